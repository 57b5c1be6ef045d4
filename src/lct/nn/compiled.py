"""Compressed weights within ``torch.compile``: what stands for a payload in a traced graph.

A graph sees a weight as its *handle*: the first bytes of its payload, of one size for all weights,
so that weights with payloads of different sizes share a graph and storing one anew compiles
nothing. ``lct::decode`` finds the ``CompressedTensor`` by the handle's address when the graph runs.

``lct::decode`` also takes the plain tensors that the op with the weight takes. It does not read
them: in backward they depend on the incoming gradient, so that no partitioner can keep what the
forward decoded for backward, and uses of one weight in different places stay apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..layout import HEADER_BYTES
from ..tensor import CompressedTensor

# Payloads by address. A payload that is here is alive, so a handle at its address is its own.
_payloads: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


def new_handle(root: CompressedTensor) -> torch.Tensor:
    """The handle of ``root``, uint8 (HEADER_BYTES,): memory and version counter of its payload.

    The payload's version counter tells autograd of writes between forward and backward.
    """
    payload: Any = root.payload
    payload.owner = weakref.ref(root)
    _payloads[payload.data_ptr()] = payload
    with torch.inference_mode(False):
        # Detached, it is no view: autograd saves the object itself, and so what hangs on it.
        handle: Any = payload[:HEADER_BYTES].detach()
    handle.payload = payload  # it may be stored anew before backward
    handle.root = root  # and the weight may be dropped
    return handle


def is_current(handle: Any, root: CompressedTensor) -> bool:
    """Whether ``handle`` (or None) stands for ``root``, which has not been stored anew since."""
    return handle is not None and handle.payload is root.payload and handle.root is root


def root_of(handle: torch.Tensor) -> CompressedTensor:
    """The tensor that ``handle`` stands for; RuntimeError for anything but a handle."""
    payload: Any = _payloads.get(handle.data_ptr())
    root = payload.owner() if payload is not None else None
    if root is None:
        raise RuntimeError(
            "lct::decode takes the handle of a compressed weight that exists, got a "
            f"{handle.dtype} tensor of shape {tuple(handle.shape)} that is a copy, or outlives it"
        )
    return root


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
        elif isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value):
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
    return root.decode()


def _decode_fake(
    handle: torch.Tensor, size: Sequence[int], dtype: torch.dtype, after: list[torch.Tensor]
) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=handle.device)


_library = torch.library.Library("lct", "DEF")
_library.define(
    "decode(Tensor handle, SymInt[] size, ScalarType dtype, Tensor[] after) -> Tensor",
    # Inductor need not lay out `after` as it was traced, for nobody reads it. A captured CUDA graph
    # would decode with the layout and the address that the payload had then.
    tags=(torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe),
)
_library.impl("decode", _decode, "CompositeExplicitAutograd")
_library.impl("decode", torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("lct::decode", _decode_fake, lib=_library)
