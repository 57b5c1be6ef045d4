"""Where in a device's memory payloads lie.

Saved tensors live from forward to backward, states for ever, and all have sizes of their own. Among
the tensors that a model makes and drops they leave gaps that fit nothing. In a pool of their own,
where ``LCT_PAYLOAD_POOL`` asks for it, they lie close together.

Only while gradients go within backward: where they stay until a step, each backward takes up what
its payloads leave, and memory must go from the ones to the others.
"""

from __future__ import annotations

import contextlib
import threading
from weakref import WeakSet

import torch

from ...config import has_payload_pool

# Those that drop gradients within backward now.
_droppers: WeakSet[object] = WeakSet()
# They stay: torch still asks a pool that has ended for memory when it runs out, and fails by an
# assertion where payloads are in it.
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
    # A graph that is captured owns the memory of its replays.
    if _droppers and has_payload_pool() and not torch.cuda.is_current_stream_capturing():
        found = _from_pool(size_bytes, device)
        if found is None:
            # For a pool of its own torch does not give back what others have cached.
            torch.cuda.empty_cache()
            found = _from_pool(size_bytes, device)
        if found is not None:
            return found
        # Gaps of the common pool are better than nothing.
    return torch.empty(size_bytes, dtype=torch.uint8, device=device)


def _from_pool(size_bytes: int, device: torch.device) -> torch.Tensor | None:
    """None where the pool cannot grow."""
    pool = _pools.get(device.index)
    if pool is None:
        with _lock:
            # use_on_oom: what payloads leave is there for others, before memory runs out.
            pool = _pools.setdefault(device.index, torch.cuda.MemPool(use_on_oom=True))
    with contextlib.suppress(torch.cuda.OutOfMemoryError), torch.cuda.use_mem_pool(pool):
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)
    return None
