"""Weights decoded ahead: with the one that an op needs, those that the next ops will ask for.

A decode of a few MiB costs the host as much as one of many and leaves a GPU idle at its ends, so on
CUDA neighbours are decoded by one launch. Who is whose neighbour shows in the first forward: the
weights of a *group* follow one another there. What is decoded ahead waits for its op, once; a
weight that is written to before, or asked for elsewhere, is decoded anew.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from functools import partial
from typing import Any

import torch

from ..config import decode_ahead_bytes
from ..ops import launches_kernels
from ..tensor import CompressedTensor, decode_all, live_tensors

# At most this share of all that is held compressed on a device waits decoded.
SHARE = 1 / 32
# A weight that waited for nothing so often, in forward or in backward, is not decoded ahead there.
MOST_MISSES = 2


class Group:
    """Weights that are decoded together; ``misses`` counts by position and phase."""

    __slots__ = ("limit", "members", "misses", "size_bytes")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size_bytes = 0
        self.members: list[weakref.ref[CompressedTensor]] = []
        self.misses: Counter[tuple[int, bool]] = Counter()


class _Waiting:
    """A decoded weight, and which of its group's it is."""

    __slots__ = ("number", "tensor", "version")

    def __init__(self, number: int, tensor: torch.Tensor, version: int) -> None:
        self.number = number
        self.tensor = tensor
        self.version = version


class Ahead:
    """What is decoded ahead on one device: members of one group, on one stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()  # backward has a thread of its own
        self.waiting: dict[weakref.ref[CompressedTensor], _Waiting] = {}
        self._group: Group | None = None  # whose members wait
        self._stream = 0
        self._backward = False
        self._open: Group | None = None  # takes the weights that have none yet

    def decode(self, root: CompressedTensor) -> torch.Tensor:
        """``root`` decoded: now, or when another one of its group was."""
        if root.place is None:
            return self._decode_first(root)
        group, number = root.place
        if group is not self._group or not self.waiting:
            if group.misses[number, _in_backward()] >= MOST_MISSES:
                return root.decode()
            return self._decode_group(group, root)
        found = self.waiting.pop(weakref.ref(root), None)
        # None: it is asked for a second time, while others still wait for their first.
        if found is None or found.version != root.version or self._stream != self._now_on():
            return root.decode()
        return found.tensor

    def forget(self) -> None:
        """Free what waits, which nobody has asked for."""
        if self._group is not None:
            for waiting in self.waiting.values():
                self._group.misses[waiting.number, self._backward] += 1
        self.waiting.clear()

    def _forget_group(self, group: Group, _: Any) -> None:
        # A member is gone, and the model with it.
        if group is self._group:
            self.waiting.clear()

    def _decode_first(self, root: CompressedTensor) -> torch.Tensor:
        """A weight's first decode; in forward it joins the group of the one before."""
        if _in_backward():
            self._open = None
            return root.decode()
        size = root.dense_nbytes
        if self._open is None or self._open.size_bytes + size > self._open.limit:
            self._open = Group(self._limit_bytes())
        group = self._open
        root.place = group, len(group.members)
        group.size_bytes += size
        group.members.append(weakref.ref(root, partial(self._forget_group, group)))
        return root.decode()

    def _limit_bytes(self) -> int:
        held = sum(t.dense_nbytes for t in live_tensors() if t.device == self.device)
        return min(decode_ahead_bytes(), int(held * SHARE))

    def _decode_group(self, group: Group, root: CompressedTensor) -> torch.Tensor:
        self.forget()
        self._group, self._stream, self._backward = group, self._now_on(), _in_backward()
        chosen = [root]
        numbers = [0]
        for number, reference in enumerate(group.members):
            member = reference()
            if (
                member is not None
                and member is not root
                and group.misses[number, self._backward] < MOST_MISSES
                and member.device == self.device
                and not member.is_written_by_graphs
            ):
                chosen.append(member)
                numbers.append(number)
        if len(chosen) == 1:
            return root.decode()
        try:
            decoded = decode_all(chosen)
        except torch.OutOfMemoryError:
            # There may be room for one.
            group.members.clear()
            return root.decode()
        for number, member, tensor in zip(numbers[1:], chosen[1:], decoded[1:], strict=True):
            reference = weakref.ref(member)
            self.waiting[reference] = _Waiting(number, tensor, member.version)
        return decoded[0]

    def _now_on(self) -> int:
        if self.device.type != "cuda":
            return 0
        return torch._C._cuda_getCurrentRawStream(self.device.index)


_aheads: dict[torch.device, Ahead] = {}


def decode_for_op(root: CompressedTensor) -> torch.Tensor:
    """``root.decode()`` for an op of a model, upon which the model's next ops will follow."""
    device = root.device
    if not launches_kernels(device) or torch.is_inference_mode_enabled() or _captures(device):
        return root.decode()
    ahead = _aheads.get(device) or _aheads.setdefault(device, Ahead(device))
    with ahead.lock:
        return ahead.decode(root)


def _captures(device: torch.device) -> bool:
    # What waits was decoded before the graph, and its replays would see it as it was.
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
