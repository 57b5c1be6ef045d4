"""Dense tensors as the bytes of files, and back; which of them LCT codes."""

from __future__ import annotations

import numpy as np
import torch

from ..dtypes import DTYPES
from .header import FileDType, TensorEntry


def is_coded(dtype: FileDType) -> bool:
    """True where LCT has a code for the dtype; anything else is stored as it is."""
    return dtype.torch_name in DTYPES


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor in row-major order, uint8; shared where it is contiguous on the CPU."""
    # A lazy conjugate or negative would give the bits of its base.
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


def empty_tensor(entry: TensorEntry) -> torch.Tensor:
    """An uninitialised tensor for ``entry``. TypeError where torch does not have its dtype."""
    dtype = entry.dtype.torch_dtype
    if dtype is None:
        raise TypeError(
            f"torch {torch.__version__} has no dtype for {entry.dtype.name} tensor {entry.name!r}"
        )
    return torch.empty(entry.torch_shape(), dtype=dtype)


def is_upcast(tensor: torch.Tensor) -> bool:
    """True for an FP32 tensor whose values are all BF16 values: its lower halves need no room."""
    if tensor.dtype != torch.float32 or tensor.numel() == 0:
        return False
    halves = tensor.reshape(-1).view(torch.int16)[::2]  # little-endian: the lower half comes first
    return not bool(halves.any())
