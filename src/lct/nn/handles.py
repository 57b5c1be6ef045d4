"""Handles: what stands for a ``CompressedTensor`` in a compiled graph.

A handle is a tensor of one number on the payload's device, the same size for all, so that weights
with payloads of different sizes share a graph, and storing one anew changes nothing that a graph
sees. A tensor has one handle as long as somebody holds it: a weight, or a graph that saved it for
backward. Its version counter counts the writes to the values.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from ..tensor import CompressedTensor

_numbers = itertools.count(1)
_roots: weakref.WeakValueDictionary[int, CompressedTensor] = weakref.WeakValueDictionary()
_by_address: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
_by_root: weakref.WeakKeyDictionary[CompressedTensor, weakref.ref[torch.Tensor]] = (
    weakref.WeakKeyDictionary()
)


def handle_of(root: CompressedTensor) -> torch.Tensor:
    """The handle of ``root``, int64 (1,). It keeps ``root`` alive."""
    reference = _by_root.get(root)
    handle: Any = reference() if reference is not None else None
    if handle is None:
        number = next(_numbers)
        with torch.inference_mode(False):  # autograd must be able to save it
            handle = torch.tensor([number], device=root.device)
        handle.root = root
        _roots[number] = root
        if not handle.is_meta:  # which has no address
            _by_address[handle.data_ptr()] = handle
        _by_root[root] = weakref.ref(handle)
    return handle


def root_of(handle: torch.Tensor) -> CompressedTensor:
    """The tensor that ``handle`` stands for; a copy of a handle is read, which waits for CUDA.

    RuntimeError for anything else.
    """
    # Hooks on saved tensors give others back, in the same memory or in their own.
    known: Any = handle if hasattr(handle, "root") else _by_address.get(handle.data_ptr())
    root = known.root if known is not None else None
    readable = handle.dtype == torch.int64 and handle.numel() == 1 and not handle.is_meta
    if root is None and readable:
        root = _roots.get(int(handle))
    if root is None:
        raise RuntimeError(
            f"a handle must be one of a compressed weight that exists, got {handle.dtype} of shape "
            f"{tuple(handle.shape)} that stands for none"
        )
    return root


def count_write(root: CompressedTensor) -> None:
    """Have the backward of graphs that saved the handle of ``root`` see that it was written to."""
    reference = _by_root.get(root)
    handle = reference() if reference is not None else None
    if handle is not None:
        torch.autograd.graph.increment_version(handle)
