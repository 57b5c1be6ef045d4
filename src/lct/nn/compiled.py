"""Compressed weights within ``torch.compile``: ``lct::decode``, the op that graphs decode with,
and ``lct::decode_all``, which Inductor's graphs have for several (``graph_pass``).

A graph sees a weight as its handle; the op finds the ``CompressedTensor`` when the graph runs. It
also takes the plain tensors that the op with the weight takes, and does not read them: in backward
they depend on the incoming gradient, so that no partitioner can keep for backward what the forward
decoded, and uses of one weight in different places stay apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..tensor import CompressedTensor, decode_all
from . import graph_pass
from .ahead import decode_for_op, forget_product
from .compressed_weight import CompressedWeight
from .graph_ops import define, split_by_rank
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


def _root(handle: torch.Tensor, size: Sequence[int], dtype: torch.dtype) -> CompressedTensor:
    root = root_of(handle)
    if root.shape != tuple(size) or root.dtype != dtype:
        raise RuntimeError(
            f"the graph was traced for a {dtype} weight of shape {tuple(size)}, got one of "
            f"{root.dtype} and {tuple(root.shape)}"
        )
    return root


def _decode(
    handle: torch.Tensor, size: Sequence[int], dtype: torch.dtype, after: list[torch.Tensor]
) -> torch.Tensor:
    return decode_for_op(_root(handle, size, dtype))


def _decode_fake(
    handle: torch.Tensor, size: Sequence[int], dtype: torch.dtype, after: list[torch.Tensor]
) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=handle.device)


def _decode_all(
    handles: list[torch.Tensor],
    dims: Sequence[int],
    ranks: Sequence[int],
    dtype: torch.dtype,
    after: list[torch.Tensor],
) -> list[torch.Tensor]:
    sizes = split_by_rank(dims, ranks)
    roots = [_root(handle, size, dtype) for handle, size in zip(handles, sizes, strict=True)]
    forget_product(handles[0].device)
    return decode_all(roots)


def _decode_all_fake(
    handles: list[torch.Tensor],
    dims: Sequence[int],
    ranks: Sequence[int],
    dtype: torch.dtype,
    after: list[torch.Tensor],
) -> list[torch.Tensor]:
    sizes = split_by_rank(dims, ranks)
    return [
        torch.empty(size, dtype=dtype, device=handle.device)
        for handle, size in zip(handles, sizes, strict=True)
    ]


# Inductor need not lay out `after` as it was traced, for nobody reads it.
define(
    "decode(Tensor handle, SymInt[] size, ScalarType dtype, Tensor[] after) -> Tensor",
    _decode,
    _decode_fake,
    torch.Tag.flexible_layout,
)
# `dims`: the sizes one after another, `ranks`: how many of them belong to each.
define(
    "decode_all(Tensor[] handles, int[] dims, int[] ranks, ScalarType dtype, Tensor[] after)"
    " -> Tensor[]",
    _decode_all,
    _decode_all_fake,
    torch.Tag.flexible_layout,
)
graph_pass.install()
