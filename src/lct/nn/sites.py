"""Where a model saves what: the lines whose saved tensors ``compress_activations`` has seen."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .room import Room, room_of


@dataclass(slots=True, eq=False)
class SaveSite:
    """What one line of a model has saved: the saves of one tensor shape, dtype and producer.

    ``place``: file and line of the innermost frame that is neither torch's nor LCT's;
    ``producer``: the op that made the tensor, empty where it has no history. Each storage counts
    once in ``encoded`` and the bytes (payloads without spilled chunks, which only the device
    knows); ``reused`` counts further saves of it, ``decoded`` how often backward had it decoded.
    Seconds are measured in a ``profile=True`` block, and 0 elsewhere. ``room``: the capacity that
    its payloads get. ``in_graph``: whether a compiled graph saves it.
    """

    place: str
    producer: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    room: Room
    encoded: int = 0
    reused: int = 0
    decoded: int = 0
    dense_bytes: int = 0
    stored_bytes: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    in_graph: bool = False

    @property
    def saved_bytes(self) -> int:
        """Bytes that compression saves, of all storages of this site."""
        return self.dense_bytes - self.stored_bytes

    def count_encode(self, dense_bytes: int, stored_bytes: int) -> None:
        """A storage was encoded."""
        self.encoded += 1
        self.dense_bytes += dense_bytes
        self.stored_bytes += stored_bytes

    def as_dict(self) -> dict[str, Any]:
        """The same for programs."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "room"}
        fields.update(dtype=str(self.dtype).removeprefix("torch."), shape=list(self.shape))
        return {**fields, "saved_bytes": self.saved_bytes, "capacity_words": self.room.words}


class Sites:
    """The sites of one ``compress_activations`` block."""

    def __init__(self) -> None:
        self._by_fields: dict[Any, SaveSite] = {}
        self._by_instruction: dict[Any, SaveSite] = {}

    def __iter__(self) -> Iterator[SaveSite]:
        return iter(self._by_fields.values())

    def of(self, tensor: torch.Tensor) -> SaveSite:
        """The site that saves ``tensor`` now."""
        # Called for every save, and takes about a microsecond. A frame's line number has to be
        # searched for: lines are told apart by their instructions, which is as good.
        frame = sys._getframe(1)
        while (internal := _internal.get(frame.f_code.co_filename)) is not False:
            if internal is None:
                name = frame.f_code.co_filename
                _internal[name] = is_internal(name)
            elif frame.f_back is None:
                break
            else:
                frame = frame.f_back
        code, node = frame.f_code, tensor.grad_fn
        producer = node.name() if node is not None else ""
        shape = tensor.shape
        line = code.co_filename, code.co_firstlineno, frame.f_lasti
        key = (*line, producer, tensor.dtype, shape)
        site = self._by_instruction.get(key)
        if site is None:
            place = f"{code.co_filename}:{frame.f_lineno}"
            site = self.named(place, producer.partition("Backward")[0], tensor)
            site.in_graph = _is_in_graph()
            self._by_instruction[key] = site
        return site

    def named(self, place: str, producer: str, tensor: torch.Tensor) -> SaveSite:
        """The site of what ``producer`` makes at ``place`` (file:line)."""
        fields = place, producer, tensor.dtype, tuple(tensor.shape)
        site = self._by_fields.get(fields)
        if site is None:
            room = room_of(place, producer, tensor)
            site = self._by_fields.setdefault(fields, SaveSite(*fields, room))
        return site


def shares_of(seconds: float, tensors: Sequence[torch.Tensor]) -> list[float]:
    """The share of each of ``tensors``, by size, in the time that all took together."""
    total = sum(tensor.nbytes for tensor in tensors)
    return [seconds * tensor.nbytes / total for tensor in tensors]


def is_internal(file: str) -> bool:
    """Whether a file belongs to torch, to this package or to a compiler, and is no place of a
    model's.
    """
    return file.startswith(_INTERNAL) or "torchinductor_" in file


def _is_in_graph() -> bool:
    """Whether what is saved now is a compiled graph's, and not that of a line of a model."""
    frame = sys._getframe(1)
    while is_internal(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_GRAPHS):
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


_internal: dict[str, bool] = {}
_GRAPHS = str(Path(torch.__file__).parent / "_functorch")
_INTERNAL = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent),
    "<eval_with_key>",
)
