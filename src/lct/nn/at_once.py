"""Compiled graphs whose saves do not pay: a graph's backward asks for all that it saved at once.

Then all of it is dense, beside what is compressed of other graphs and what of its own has not been
handed over. Where one graph saves most of what forward saves, as for a model that is compiled as a
whole, that is more memory than without compression: the next time its saves stay as they are.
"""

from __future__ import annotations

import torch

from .room import Room

# Of all that forward has saved: a payload is about 0.7 of its dense bytes, so that one that takes
# more than the rest of them is no gain.
MOST_SHARE = 0.3
# Less is not worth a thought, and small models have few layers.
LEAST_BYTES = 64 << 20


class AskedAtOnce:
    """What forward has saved, and what the graph whose backward runs has asked for, in bytes.

    ``is_backward``: set where a backward asks for anything.
    """

    def __init__(self) -> None:
        self.is_backward = False
        self._saved_bytes = 0
        self._node = -1
        self._asked_bytes = 0
        self._rooms: list[Room] = []

    def save(self, size_bytes: int) -> None:
        """Forward saves a storage of so many bytes, which is compressed or left for this reason."""
        if self.is_backward:
            self.is_backward = False
            self._saved_bytes = 0
        self._saved_bytes += size_bytes

    def ask(self, size_bytes: int, room: Room) -> None:
        """A backward asks for a storage that a compiled graph has saved; ``room``: of its place,
        which learns where this does not pay.
        """
        node = torch._C._current_autograd_node()
        number = node._sequence_nr() if node is not None else -1
        if number != self._node:
            self._node = number
            self._asked_bytes = 0
            self._rooms = []
        self._asked_bytes += size_bytes
        self._rooms.append(room)
        most = max(LEAST_BYTES, MOST_SHARE * self._saved_bytes)
        if node is not None and self._asked_bytes > most:
            for asked in self._rooms:
                asked.at_once = True
            self._rooms = []


asked_at_once = AskedAtOnce()
