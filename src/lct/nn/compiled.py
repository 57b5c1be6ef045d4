"""Compressed weights within ``torch.compile``: ``lct::decode``, the op that graphs decode with.

A graph sees a weight as its handle; the op finds the ``CompressedTensor`` when the graph runs. It
also takes the plain tensors that the op with the weight takes, and does not read them: in backward
they depend on the incoming gradient, so that no partitioner can keep for backward what the forward
decoded, and uses of one weight in different places stay apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .ahead import decode_for_op
from .compressed_weight import CompressedWeight
from .handles import root_of


class TracedRoot:
    """What a ``CompressedTensor`` is while a graph is traced: decoding it is an op of the graph."""

    __slots__ = ("device", "dtype", "handle", "shape")

    def __init__(self, handle: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
        self.handle = handle
        self.shape = shape
        self.dtype = dtype
        self.device = handle.device

    def numel(self) -> int:
        """Number of values."""
        return self.shape.numel()

    @property
    def dense_nbytes(self) -> int:
        """Bytes of the dense tensor."""
        return self.numel() * self.dtype.itemsize

    def decode(self, after: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """The dense tensor, decoded no sooner than the tensors ``after`` exist."""
        return torch.ops.lct.decode(self.handle, self.shape, self.dtype, list(after))


def plain_tensors(values: Any) -> Iterator[torch.Tensor]:
    """The plain tensors among ``values`` and what they list."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from plain_tensors(value)
        elif isinstance(value, torch.Tensor) and not isinstance(value, CompressedWeight):
            yield value


def _decode(
    handle: torch.Tensor, size: Sequence[int], dtype: torch.dtype, after: list[torch.Tensor]
) -> torch.Tensor:
    root = root_of(handle)
    if root.shape != tuple(size) or root.dtype != dtype:
        raise RuntimeError(
            f"the graph was traced for a {dtype} weight of shape {tuple(size)}, got one of "
            f"{root.dtype} and {tuple(root.shape)}"
        )
    return decode_for_op(root)


def _decode_fake(
    handle: torch.Tensor, size: Sequence[int], dtype: torch.dtype, after: list[torch.Tensor]
) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=handle.device)


_library = torch.library.Library("lct", "DEF")
_library.define(
    "decode(Tensor handle, SymInt[] size, ScalarType dtype, Tensor[] after) -> Tensor",
    # Inductor need not lay out `after` as it was traced, for nobody reads it. A captured CUDA graph
    # would decode from where, and as, the payload lay then.
    tags=(torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe),
)
_library.impl("decode", _decode, "CompositeExplicitAutograd")
_library.impl("decode", torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("lct::decode", _decode_fake, lib=_library)
