"""``LiveBytes``: bytes of live tensor storages over time, dense and compressed alike.

Counts what torch allocates where every op passes a dispatch mode: weights, gradients, state, saved
activations, payloads, and the decoded tensors and scratch of LCT. It works where an allocator keeps
no statistics (the CPU); scratch inside a kernel, and NumPy arrays, are not seen.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .nn.compressed_weight import CompressedWeight
from .tensor import CompressedTensor

_WRAPPERS = (CompressedWeight,)


class LiveBytes(TorchDispatchMode):
    """Within the block, ``timeline`` gets a point ``(op index, live bytes)`` at every change.

    Each storage counts once, from the op that makes (or first uses) it until it is freed, with all
    of its bytes. Tensors from before the block count from their first use on; ``baseline`` counts
    them from the start: it takes tensors, modules, optimizers, compressed tensors, and lists and
    dictionaries of them. Modes are thread-local, and autograd restores them in its own threads, so
    that backward is counted on every device. ``meta``: count tensors without values too, with the
    bytes that their values would take.
    """

    def __init__(self, *baseline: Any, meta: bool = False) -> None:
        super().__init__()
        self._meta = meta
        self.timeline: list[tuple[int, int]] = []
        self.num_ops = 0
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._lock = threading.RLock()
        self.baseline(*baseline)

    def baseline(self, *items: Any) -> LiveBytes:
        """Count what ``items`` hold; returns self."""
        for item in items:
            for tensor in _tensors_of(item):
                self._count(tensor)
        self._mark()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, _WRAPPERS) for kind in types):
            # The wrapper decodes first and runs with this mode on: what it allocates is counted.
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.num_ops += 1
        for tensor in _tensors_of((args, tuple(kwargs.values()), result)):
            self._count(tensor)
        self._mark()
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        if (tensor.is_meta and not self._meta) or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        with self._lock:
            found = self._sizes.get(key)
            if found is not None and found[0]() is storage:
                self.live_bytes += size - found[1]  # a storage can be resized
                self._sizes[key] = found[0], size
                return
            ref = weakref.ref(storage, lambda ref: self._freed(key, ref))
            self._sizes[key] = ref, size
            self.live_bytes += size

    def _freed(self, key: int, ref: weakref.ref[torch.UntypedStorage]) -> None:
        with self._lock:
            found = self._sizes.get(key)
            # The address may belong to a new storage by now.
            if found is not None and found[0] is ref:
                self.live_bytes -= found[1]
                del self._sizes[key]
                self._mark()

    def _mark(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if not self.timeline or self.timeline[-1][1] != self.live_bytes:
            self.timeline.append((self.num_ops, self.live_bytes))


def _tensors_of(item: Any) -> Iterator[torch.Tensor]:
    """Every plain tensor in ``item``: payloads in place of compressed tensors."""
    if isinstance(item, CompressedTensor):
        yield from item.tensors()
    elif isinstance(item, CompressedWeight):
        yield from item.compressed.tensors()
    elif isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, torch.nn.Module):
        for tensor in (*item.parameters(), *item.buffers()):
            yield from _tensors_of(tensor)
            yield from _tensors_of(tensor.grad)
    elif isinstance(item, torch.optim.Optimizer):
        yield from _tensors_of(list(item.state.values()))
    elif isinstance(item, dict):
        yield from _tensors_of(list(item.values()))
    elif isinstance(item, (list, tuple)):
        for value in item:
            yield from _tensors_of(value)
