"""Where in a device's memory payloads lie.

Saved tensors live from forward to backward, states for ever, and all have sizes of their own. Among
the tensors that a model makes and drops they leave gaps that fit nothing, about a twentieth of what
is reserved. In a pool of their own they lie close together.

Only while gradients go within backward: where they stay until a step, each backward takes up what
its payloads leave, and memory must go from the ones to the others.
"""

from __future__ import annotations

import threading
from weakref import WeakSet

import torch

from ...config import has_payload_pool

# Those that drop gradients within backward now.
_droppers: WeakSet[object] = WeakSet()
_pools: dict[int, torch.cuda.MemPool] = {}
_lock = threading.Lock()


def gradients_go(dropper: object) -> None:
    """From now on, until ``gradients_stay``: ``dropper`` frees gradients within backward."""
    _droppers.add(dropper)


def gradients_stay(dropper: object) -> None:
    """``dropper`` frees them no longer."""
    _droppers.discard(dropper)


def empty(size_bytes: int, device: torch.device) -> torch.Tensor:
    """New memory for a payload on ``device``, the current one: uint8 (size_bytes,).

    torch.OutOfMemoryError, as of ``torch.empty``.
    """
    if not _droppers or torch.cuda.is_current_stream_capturing() or not has_payload_pool():
        # While a graph is captured: its replays own the memory.
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)
    pool = _pool(device.index)
    try:
        with torch.cuda.use_mem_pool(pool):
            return torch.empty(size_bytes, dtype=torch.uint8, device=device)
    except torch.cuda.OutOfMemoryError:
        pass
    # For a pool of its own torch does not give back what others have cached.
    torch.cuda.empty_cache()
    try:
        with torch.cuda.use_mem_pool(pool):
            return torch.empty(size_bytes, dtype=torch.uint8, device=device)
    except torch.cuda.OutOfMemoryError:
        # Gaps of the common pool are better than nothing.
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)


def _pool(device: int) -> torch.cuda.MemPool:
    pool = _pools.get(device)
    if pool is None:
        with _lock:
            # use_on_oom: what payloads have left is there for others, before memory runs out.
            pool = _pools.setdefault(device, torch.cuda.MemPool(use_on_oom=True))
    return pool
