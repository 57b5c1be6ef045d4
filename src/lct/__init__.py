"""LCT: BF16 weights, activations and optimizer states, losslessly compressed during training."""

from . import optim
from .checkpoint import load_checkpoint, load_file, save_checkpoint, save_file
from .errors import ArenaExhaustedError, CorruptFileError, CorruptPayloadError, LctError
from .nn import (
    CompressedWeight,
    compress_,
    compress_activations,
    compression_report,
    decompress_,
)
from .report import memory_report, stats
from .tensor import CompressedTensor, decode, encode, reserve_arena

__version__ = "0.1.0"
__all__ = [
    "ArenaExhaustedError",
    "CompressedTensor",
    "CompressedWeight",
    "CorruptFileError",
    "CorruptPayloadError",
    "LctError",
    "compress_",
    "compress_activations",
    "compression_report",
    "decode",
    "decompress_",
    "encode",
    "load_checkpoint",
    "load_file",
    "memory_report",
    "optim",
    "reserve_arena",
    "save_checkpoint",
    "save_file",
    "stats",
]
