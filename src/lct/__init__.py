"""LCT: BF16 weights, activations and optimizer states, losslessly compressed during training."""

from .errors import ArenaExhaustedError, CorruptFileError, CorruptPayloadError, LctError
from .tensor import CompressedTensor, decode, encode

__version__ = "0.1.0"
__all__ = [
    "ArenaExhaustedError",
    "CompressedTensor",
    "CorruptFileError",
    "CorruptPayloadError",
    "LctError",
    "decode",
    "encode",
]
