"""Files of compressed tensors (docs/file-format.md), and safetensors files both ways."""

from .convert import Summary, compress_file, decompress_file
from .files import load_file, read_metadata, save_file
from .run import load_checkpoint, save_checkpoint

__all__ = [
    "Summary",
    "compress_file",
    "decompress_file",
    "load_checkpoint",
    "load_file",
    "read_metadata",
    "save_checkpoint",
    "save_file",
]
