"""Compressed weights and saved activations."""

from . import weight_ops  # noqa: F401 - fills the tables that CompressedWeight dispatches by
from .activations import SavedActivations, compress_activations
from .compressed_weight import CompressedWeight
from .sites import SaveSite
from .weights import CompressionReport, WeightReport, compress_, compression_report, decompress_

__all__ = [
    "CompressedWeight",
    "CompressionReport",
    "SaveSite",
    "SavedActivations",
    "WeightReport",
    "compress_",
    "compress_activations",
    "compression_report",
    "decompress_",
]
