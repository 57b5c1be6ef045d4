"""Room for saved activations: the words of a group that tensors of one place of a model need.

A save must not wait for the device, and what a tensor needs depends on its values: outputs of a
gated product take a fifth more words than Gaussian values, those of a ReLU a third fewer. So the
first saves of a place are measured, and one now and then after them, on CUDA by a kernel whose
result is read when it is there; later saves get the capacity that the measured ones needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..layout import CHUNK_BYTES, MAX_POOLED_CAPACITY, align, best_capacity
from ..tensor import HEADROOM_WORDS, group_needs_later, payload_bytes

# Room of a group before anything is known: activations are wider than weights, and many groups that
# would spill in the default 748 words fit (docs/format.md, "Capacity classes").
CAPACITY_WORDS = 784
# Capacities are multiples of this, so that payloads have few sizes: 8 words too many, in the mean,
# are 0.3 % of a BF16 payload.
CLASS_WORDS = 16
# How many saves are measured at first, and one in how many after them: a prime, so that the layers
# of a model take turns. A measurement reads the tensor once more.
FIRST_LOOKS = 8
LOOK_EVERY = 101
# Of the dense bytes: the rest would not be worth the time.
PAYS_BELOW = 0.95
GROUP_VALUES = 8192


class Room:
    """``words``: the capacity of the next payload. ``pays``: whether payloads are smaller."""

    __slots__ = ("_pending", "_saves", "_seen", "pays", "words")

    def __init__(self) -> None:
        self.words = CAPACITY_WORDS
        self.pays = True
        self._saves = 0
        # Needs of the groups of the last tensors that were measured.
        self._seen: deque[np.ndarray] = deque(maxlen=FIRST_LOOKS)
        self._pending: Callable[[], np.ndarray | None] | None = None

    def look(self, dense: torch.Tensor, upcast: bool) -> None:
        """Take in what measurements said, and measure ``dense``, a plain tensor, if it is time."""
        self._saves += 1
        due = self._saves <= FIRST_LOOKS or self._saves % LOOK_EVERY == 0
        if self._pending is None and not due:
            return
        # A capture forbids to ask whether the device is done.
        if dense.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        if self._pending is None:
            self._pending = group_needs_later(dense, upcast)
        self._receive(dense.dtype, upcast)

    def _receive(self, dtype: torch.dtype, upcast: bool) -> None:
        assert self._pending is not None
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
