"""Weights decoded ahead: with the one that an op needs, those that the next ops will ask for.

A decode of a few MiB costs the host as much as one of many and leaves a GPU idle at its ends, so on
CUDA neighbours are decoded by one launch. Who is whose neighbour shows in the first forward: the
weights of a *group* follow one another there. What is decoded ahead waits for its op, once; a
weight that is written to before, or asked for elsewhere, is decoded anew.

A weight that products in eager mode read twice in a row, as a loss over chunks reads the head, is
kept for the next: until another weight is asked for, or backward reads it.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator

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


class Place:
    """A weight's place in its group. ``waiting``: at most one (decoded, version, stream)."""

    __slots__ = ("group", "number", "waiting")

    def __init__(self, group: Group, number: int) -> None:
        self.group = group
        self.number = number
        self.waiting: list[tuple[torch.Tensor, int, int]] = []


class Ahead:
    """What is decoded ahead on one device: members of one group."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()  # backward has a thread of its own
        self._group: Group | None = None  # whose members wait
        self._backward = False  # the phase in which they were decoded
        self._open: Group | None = None  # takes the weights that have none yet

    def decode(self, root: CompressedTensor) -> torch.Tensor:
        """``root`` decoded, with others of its group where it is the first one asked for."""
        place = root.place
        if place is None:
            return self._decode_first(root)
        group: Group = place.group
        if group is self._group and any(other.place.waiting for other in _alive(group)):
            # Asked for a second time, while others wait for their first.
            return root.decode()
        if group.misses[place.number, _in_backward()] >= MOST_MISSES:
            return root.decode()
        return self._decode_group(group, root)

    def _decode_first(self, root: CompressedTensor) -> torch.Tensor:
        """A weight's first decode; in forward it joins the group of the one before."""
        if _in_backward():
            self._open = None
            return root.decode()
        size = root.dense_nbytes
        if self._open is None or self._open.size_bytes + size > self._open.limit:
            self._open = Group(limit_bytes())
        group = self._open
        root.place = Place(group, len(group.members))
        group.size_bytes += size
        group.members.append(weakref.ref(root))
        return root.decode()

    def _decode_group(self, group: Group, root: CompressedTensor) -> torch.Tensor:
        self._forget()
        self._group, self._backward = group, _in_backward()
        chosen = [root]
        chosen += (
            member
            for member in _alive(group)
            if member is not root
            and group.misses[member.place.number, self._backward] < MOST_MISSES
            and member.device == self.device
            and not member.is_written_by_graphs
        )
        if len(chosen) == 1:
            return root.decode()
        try:
            decoded = decode_all(chosen)
        except torch.OutOfMemoryError:
            # There may be room for one.
            group.members.clear()
            return root.decode()
        stream = _stream(root)
        for member, tensor in zip(chosen[1:], decoded[1:], strict=True):
            member.place.waiting.append((tensor, member.version, stream))
        return decoded[0]

    def _forget(self) -> None:
        """Free what waits, which nobody has asked for."""
        group = self._group
        for member in _alive(group) if group is not None else ():
            if member.place.waiting:
                member.place.waiting.clear()
                member.place.group.misses[member.place.number, self._backward] += 1


def limit_bytes() -> int:
    """Dense bytes that may be decoded together: a setting, or a share of all that is held."""
    held = sum(t.dense_nbytes for t in live_tensors() if launches_kernels(t.device))
    return min(decode_ahead_bytes(), int(held * SHARE))


def _alive(group: Group) -> Iterator[CompressedTensor]:
    for reference in group.members:
        member = reference()
        if member is not None:
            yield member


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _stream(root: CompressedTensor) -> int:
    payload = root.payload
    return torch._C._cuda_getCurrentRawStream(payload.get_device()) if payload.is_cuda else 0


def _captures(root: CompressedTensor) -> bool:
    # What waits was decoded before the graph: its replays would see values of then.
    return root.payload.is_cuda and torch._C._cuda_isCurrentStreamCapturing()


_aheads: dict[torch.device, Ahead] = {}
# By device: the weight that a product read last; and where one is kept, it, its values, their
# version and stream.
_Reference = weakref.ref[CompressedTensor]
_last: dict[torch.device, _Reference] = {}
_kept: dict[torch.device, tuple[_Reference, torch.Tensor, int, int]] = {}


def decode_for_product(root: CompressedTensor) -> torch.Tensor:
    """``decode_for_op`` for an op that reads the values and gives nothing that shares their memory.

    In backward nothing is kept: there the weight's gradient takes as much memory again.
    """
    device = root.device
    if (
        not launches_kernels(device)
        or type(root) is not CompressedTensor
        or torch.is_inference_mode_enabled()
        or _captures(root)
    ):
        return decode_for_op(root)
    kept = _kept.pop(device, None)  # what another thread keeps meanwhile may be of another weight
    if kept is not None and kept[0]() is root and kept[2:] == (root.version, _stream(root)):
        if not _in_backward():
            _kept[device] = kept
        return kept[1]
    del kept  # before another is allocated
    decoded, last = decode_for_op(root), _last.get(device)
    if last is None or last() is not root:
        _last[device] = weakref.ref(root, _gone)
    elif not _in_backward() and not root.is_written_by_graphs:
        _kept[device] = last, decoded, root.version, _stream(root)
    return decoded


def forget_product(device: torch.device) -> None:
    """Free the weight that is kept on ``device``: others are asked for."""
    _kept.pop(device, None)


def _gone(reference: _Reference) -> None:
    for device in [device for device, last in list(_last.items()) if last is reference]:
        _last.pop(device, None)
    for device in [device for device, kept in list(_kept.items()) if kept[0] is reference]:
        _kept.pop(device, None)


def decode_for_op(root: CompressedTensor) -> torch.Tensor:
    """``root.decode()`` for an op of a model, upon which the model's next ops will follow."""
    if type(root) is not CompressedTensor:  # while a graph is traced
        return root.decode()
    if _kept:
        forget_product(root.device)
    if root.place is not None and root.place.waiting and not _captures(root):
        try:
            tensor, version, stream = root.place.waiting.pop()
        except IndexError:  # another thread has taken it
            return root.decode()
        if version == root.version and stream == _stream(root):
            return tensor
        return root.decode()
    device = root.device
    if not launches_kernels(device) or torch.is_inference_mode_enabled() or _captures(root):
        return root.decode()
    ahead = _aheads.get(device) or _aheads.setdefault(device, Ahead(device))
    with ahead.lock:
        return ahead.decode(root)
