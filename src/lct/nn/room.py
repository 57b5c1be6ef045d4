"""Room for saved activations: the words of a group that tensors of one place of a model need.

A save must not wait for the device, and what a tensor needs depends on its values: outputs of a
gated product take a fifth more words than Gaussian values, those of a ReLU a third fewer. So the
first saves of a place are measured, and one now and then after them, on CUDA by a kernel whose
result is read when it is there; later saves get the capacity that the measured ones needed. Where
much spills all the same, as when values have changed, all places look again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..layout import CHUNK_BYTES, MAX_POOLED_CAPACITY, align, best_capacity
from ..ops import arena_taken_chunks
from ..tensor import HEADROOM_WORDS, group_needs_later, payload_bytes

# Room of a group before anything is known: activations are wider than weights, and many groups that
# would spill in the default 748 words fit (docs/format.md, "Capacity classes").
CAPACITY_WORDS = 784
# Capacities are multiples of this, so that payloads have few sizes: 8 words too many, in the mean,
# are 0.3 % of a BF16 payload.
CLASS_WORDS = 16
# How many measurements are made at first, and of one in how many saves besides: a prime, so that
# the layers of a model take turns. A measurement reads the tensor once more and takes the host a
# millisecond. Values that grow wider are heard of sooner, by what they spill.
FIRST_LOOKS = 8
LOOK_EVERY = 997
# All places of a device look again where more than this share of what a block of saves stores has
# spilled since the block before. Values may simply be such: while it stays so they look after twice
# as many blocks as the last time, up to the most.
MUCH_SPILLED = 0.01
MOST_PAUSE = 128
# Of the dense bytes: the rest would not be worth the time.
PAYS_BELOW = 0.95
GROUP_VALUES = 8192


class Room:
    """``words``: the capacity of the next payload. ``pays``: whether payloads are smaller.
    ``at_once``: whether a compiled graph asks for them with too much else (``at_once.py``).
    """

    __slots__ = ("_looks", "_pending", "_saves", "_seen", "at_once", "pays", "words")

    def __init__(self) -> None:
        self.words = CAPACITY_WORDS
        self.pays = True
        self.at_once = False
        self._saves = 0
        self._looks = FIRST_LOOKS  # measurements that are due
        # Needs of the groups of the last tensors that were measured.
        self._seen: deque[np.ndarray] = deque(maxlen=FIRST_LOOKS)
        self._pending: Callable[[], np.ndarray | None] | None = None

    def look(self, dense: torch.Tensor, upcast: bool) -> None:
        """Take in what measurements said, and measure ``dense``, a plain tensor, if it is time."""
        self._saves += 1
        due = self._looks > 0 or self._saves % LOOK_EVERY == 0
        if self._pending is None and not due:
            return
        # A capture forbids to ask whether the device is done.
        if dense.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self._receive(dense.dtype, upcast)
        if due and self._pending is None:
            self._pending = group_needs_later(dense, upcast)
            self._looks = max(self._looks - 1, 0)
            self._receive(dense.dtype, upcast)

    def look_again(self) -> None:
        """Measure the next saves, as many as at first."""
        self._looks = FIRST_LOOKS

    def _receive(self, dtype: torch.dtype, upcast: bool) -> None:
        if self._pending is None:
            return
        needs = self._pending()
        if needs is None:
            return
        self._pending = None
        self._seen.append(needs)
        seen = np.concatenate(self._seen)
        words = min(align(best_capacity(seen, HEADROOM_WORDS), CLASS_WORDS), MAX_POOLED_CAPACITY)
        # A class more at once; less only where it is two classes, or the sizes of payloads would go
        # back and forth.
        if not self.words - CLASS_WORDS <= words <= self.words:
            self.words = words
        coded = payload_bytes(dtype, upcast, GROUP_VALUES, self.words)
        spilled = CHUNK_BYTES * float(np.mean(seen > self.words))
        self.pays = coded + spilled < PAYS_BELOW * GROUP_VALUES * dtype.itemsize


_rooms: dict[Any, Room] = {}


def room_of(place: str, producer: str, tensor: torch.Tensor) -> Room:
    """The room of what ``place`` saves. Lengths and batches do not matter, the width does."""
    key = place, producer, tensor.dtype, tensor.device, tensor.shape[-1:]
    return _rooms.setdefault(key, Room())


@dataclass
class _Spills:
    """Of one device: chunks ever taken as last heard, and how many blocks of spills to let pass."""

    taken_chunks: int = 0
    pause: int = 0
    left: int = 0


_spills: dict[torch.device, _Spills] = {}


def heard_of_spills(device: torch.device, stored_bytes: int) -> None:
    """Let all rooms of ``device``, on CUDA, look again if much has spilled since the last call.

    For the end of a block of saves, which stored ``stored_bytes`` without what spilled. Does not
    wait for the device: what it has not told yet counts in the next call.
    """
    heard = _spills.setdefault(device, _Spills())
    taken = arena_taken_chunks(device)
    spilled_bytes = CHUNK_BYTES * ((taken - heard.taken_chunks) % 2**32)
    heard.taken_chunks = taken
    if spilled_bytes <= MUCH_SPILLED * stored_bytes:
        heard.pause //= 2
        heard.left = min(heard.left, heard.pause)
    elif heard.left:
        heard.left -= 1
    else:
        heard.pause = min(2 * heard.pause + 1, MOST_PAUSE)
        heard.left = heard.pause
        for (*_, own_device, _), room in _rooms.items():
            if own_device == device:
                room.look_again()
