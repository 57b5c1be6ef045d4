"""What ``compress_activations`` keeps: one storage a save, in batches of them.

A storage is dense until its batch is encoded, compressed until backward asks for it, and handed
over to the last consumer.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..tensor import CompressedBatch, decode_all, encode_batches
from .bits import PackedBits, pack_bits
from .sites import SaveSite, shares_of

# A batch is decoded whole unless more than this share of what its block has encoded lies between it
# and where backward is: layers ask for their saves in no strict order, and for what all of them
# share first.
EARLY_SHARE = 1 / 4
# Decoded storages that wait for their other consumers (k and q, after v) may take this much.
SHARED_DECODED_BYTES = 256 << 20


class StoredSave:
    """One storage, compressed or waiting for that; owned by the graph's nodes through ``_Saved``.

    ``shape``, ``stride``: of the decoded tensor, which begins where the storage does.
    """

    __slots__ = (
        *("__weakref__", "content", "decoded", "number", "profile", "ref", "shape", "site"),
        *("size_bytes", "source", "stream", "stride", "upcast", "version", "waiting"),
    )

    def __init__(
        self,
        flat: torch.Tensor,
        upcast: bool,
        source: torch.UntypedStorage,
        size_bytes: int,
        stream: int,
        site: SaveSite,
        profile: bool,
    ) -> None:
        # Dense until it is encoded.
        self.content: torch.Tensor | EncodedSaves | PackedBits | _Handed = flat
        self.number = 0  # among those that were encoded with it
        self.upcast = upcast
        self.shape, self.stride = flat.shape, flat.stride()
        self.source = weakref.ref(source)
        self.size_bytes = size_bytes
        # To this object, for all that must not keep it alive: one serves, and there are thousands.
        self.ref: weakref.ref[StoredSave] = weakref.ref(self)
        self.stream = stream
        self.site = site
        self.profile = profile
        self.waiting = 0  # saves that backward has not asked for yet
        self.decoded: torch.Tensor | None = None
        self.version = 0

    def waits_for_encode(self) -> bool:
        """Whether it is dense and may be encoded; not where its storage was emptied since."""
        content = self.content
        if not isinstance(content, torch.Tensor):
            return False
        return content.untyped_storage().nbytes() == self.size_bytes

    def values(self, shared: bool) -> torch.Tensor:
        """The storage's values, flat or as they lay; kept for other consumers where ``shared``."""
        with decoded_saves.lock:
            flat = self.decoded
            # A consumer that wrote into its copy has spoilt it for the others.
            if flat is not None and (
                flat._version != self.version or not self._same_stream(flat.device)
            ):
                flat = None
            elif not shared:
                decoded_saves.forget(self)
        if flat is None:
            flat = self._decode()
            if shared:
                decoded_saves.keep(self, flat)
        if not shared and not torch._C._autograd._get_current_graph_task_keep_graph():
            # The last consumer has it, and the graph is freed as it goes: the payload goes too, or
            # with the last of its batch.
            self.content = _Handed(flat, flat._version)
        return flat

    def _decode(self) -> torch.Tensor:
        content = self.content
        if isinstance(content, torch.Tensor):
            return content
        if isinstance(content, _Handed):
            return content.decode()
        packed = content if isinstance(content, PackedBits) else content.batch
        started = time_when_done(packed.device) if self.profile else 0.0
        if isinstance(content, PackedBits):
            self.site.decoded += 1
            flat = content.decode()
        else:
            flat = content.decode(self, alone=not self._same_stream(packed.device))
        if self.profile:
            self.site.decode_seconds += time_when_done(packed.device) - started
        return flat

    def _same_stream(self, device: torch.device) -> bool:
        # Memory of one stream must not be read on another without waiting.
        return device.type != "cuda" or _raw_stream(device.index) == self.stream


class BatchOrder:
    """Where the batches of a block lie in all that it has encoded, in bytes: backward begins at
    the end.
    """

    __slots__ = ("_undecoded", "size_bytes")

    def __init__(self) -> None:
        self.size_bytes = 0
        # Latest last; those before the last one may be decoded, or gone.
        self._undecoded: list[weakref.ref[EncodedSaves]] = []

    def add(self, saves: Iterable[StoredSave]) -> None:
        """``saves`` were a batch."""
        with decoded_saves.lock:
            contents: list[Any] = []
            for stored in saves:
                self.size_bytes += stored.size_bytes
                if isinstance(stored.content, EncodedSaves) and stored.content not in contents[-1:]:
                    contents.append(stored.content)
            for content in contents:
                content.order, content.end = self, self.size_bytes
                self._undecoded.append(weakref.ref(content))

    def is_early(self, asked: EncodedSaves) -> bool:
        """Whether backward has much to come to before it comes to those of ``asked``."""
        while self._undecoded:
            latest = self._undecoded[-1]()
            if latest is not None and not latest.is_decoded:
                return latest.end - asked.end > EARLY_SHARE * self.size_bytes
            self._undecoded.pop()
        return False


_NO_ORDER = BatchOrder()  # of what was encoded by itself


class EncodedSaves:
    """What saves hold that were encoded together; ``refs``: to each, by its ``number``."""

    __slots__ = ("__weakref__", "batch", "end", "is_decoded", "order", "refs")

    def __init__(self, batch: CompressedBatch, saves: Sequence[StoredSave]) -> None:
        self.batch = batch
        self.refs = [stored.ref for stored in saves]
        self.order, self.end = _NO_ORDER, 0
        self.is_decoded = False  # all that backward will ask for

    def decode(self, asked: StoredSave, alone: bool) -> torch.Tensor:
        """The values of ``asked``. Unless ``alone``, those of others wait for backward to ask.

        Not where that is early: what all layers share, such as rotary tables, is asked for first,
        its neighbours last.
        """
        with decoded_saves.lock:
            members = {asked.number: asked}
            if not alone and not self.order.is_early(self):
                members |= dict(self._wanted())
                self.is_decoded = True
            try:
                flats = self._decode([*members])
            except torch.OutOfMemoryError:  # there may be room for one
                members = {asked.number: asked}
                flats = self._decode([asked.number])
            for stored, flat in zip(members.values(), flats, strict=True):
                stored.site.decoded += 1
                if stored is not asked:
                    decoded_saves.keep(stored, flat)
            return flats[0]

    def _wanted(self) -> Iterator[tuple[int, StoredSave]]:
        """Those that backward will ask for and that are not decoded."""
        for number, ref in enumerate(self.refs):
            stored = ref()
            if (
                stored is not None
                and stored.waiting > 0
                and stored.decoded is None
                and stored.content is self
            ):
                yield number, stored

    def _decode(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        if len(numbers) == len(self.refs):
            flats = self.batch.decode()
            return [flats[number] for number in numbers]
        return decode_all([self.batch.tensor(number) for number in numbers])


@dataclass(slots=True)
class _Handed:
    """In place of a payload: the values that the last consumer of a graph has got.

    A Function of a user's may ask for its saved tensors more than once.
    """

    values: torch.Tensor
    version: int

    def decode(self) -> torch.Tensor:
        current = self.values._version
        if current != self.version:
            raise changed_error(self.values.dtype, self.values.shape, self.version, current)
        return self.values


class SaveBatch:
    """Saves that are encoded together, and decoded together when backward asks for the first.

    An encode or a decode of a few MiB costs the host as much as one of many, and fills a GPU for a
    part of its time. All are of one stream. From its save to the batch's encode a tensor is alive
    as it is.
    """

    __slots__ = ("device", "order", "refs", "size_bytes", "stream")

    def __init__(self, device: torch.device, stream: int, order: BatchOrder) -> None:
        self.device = device
        self.stream = stream
        self.order = order
        self.refs: list[weakref.ref[StoredSave]] = []
        self.size_bytes = 0

    def add(self, ref: weakref.ref[StoredSave], size_bytes: int) -> None:
        """The save to which ``ref`` refers joins."""
        self.refs.append(ref)
        self.size_bytes += size_bytes

    def encode(self) -> None:
        """Encode those that still wait, on the stream on which they were saved."""
        waiting = [
            stored
            for ref in self.refs
            if (stored := ref()) is not None and stored.waits_for_encode()
        ]
        if not waiting:
            return
        with self._on_its_stream():
            encode_saves(waiting)
        self.order.add(waiting)

    def _on_its_stream(self) -> AbstractContextManager[Any]:
        if self.device.type != "cuda" or _raw_stream(self.device.index) == self.stream:
            return nullcontext()
        default = torch.cuda.default_stream(self.device)
        if self.stream == default.cuda_stream:
            return torch.cuda.stream(default)
        return torch.cuda.stream(torch.cuda.ExternalStream(self.stream, device=self.device))


def encode_saves(saves: Sequence[StoredSave]) -> None:
    """Encode what each of ``saves``, of one device, holds dense."""
    alike: dict[tuple[torch.dtype, bool], list[StoredSave]] = {}
    for stored in saves:
        flat: Any = stored.content
        alike.setdefault((flat.dtype, stored.upcast), []).append(stored)
    for (dtype, _), members in alike.items():
        if dtype == torch.bool:
            _pack_bits(members)
        else:
            _encode(members)


def _pack_bits(saves: Sequence[StoredSave]) -> None:
    for stored in saves:
        mask: Any = stored.content
        bits = stored.content = pack_bits(mask)
        stored.site.stored_bytes += bits.payload.nbytes


def _encode(saves: Sequence[StoredSave]) -> None:
    """Encode saves of one dtype, each launch's by themselves."""
    flats: list[Any] = [stored.content for stored in saves]
    words = [stored.site.room.words for stored in saves]
    upcasts = [stored.upcast for stored in saves]
    for part, batch in encode_batches(flats, words, upcasts):
        together = EncodedSaves(batch, saves[part])
        for number, (stored, size) in enumerate(zip(saves[part], batch.nbytes, strict=True)):
            stored.content, stored.number = together, number
            stored.site.stored_bytes += size


class SavedTogether:
    """What a compiled graph has saved, encoded and decoded together.

    ``strides``: of the tensors as they lay in memory. ``others``: masks as bits and dense copies,
    by number. ``sites``: none where nothing was encoded. ``profile``: whether codes are timed.
    """

    __slots__ = ("batches", "others", "profile", "sites", "strides")

    def __init__(
        self, strides: list[tuple[int, ...]], sites: Sequence[SaveSite], profile: bool
    ) -> None:
        self.strides = strides
        self.sites = sites
        self.profile = profile
        self.batches: list[tuple[Sequence[int], CompressedBatch]] = []
        self.others: dict[int, torch.Tensor | PackedBits] = {}

    def encode(self, numbers: Sequence[int], flats: Sequence[Any], upcast: bool) -> None:
        """Encode those of ``numbers``, of one dtype."""
        sites = [self.sites[number] for number in numbers]
        words = [site.room.words for site in sites]
        upcasts = [upcast] * len(numbers)
        device = flats[0].device
        started = time_when_done(device) if self.profile else 0.0
        for part, batch in encode_batches(flats, words, upcasts):
            for site, flat, size in zip(sites[part], flats[part], batch.nbytes, strict=True):
                site.count_encode(flat.nbytes, size)
            self.batches.append((numbers[part], batch))
        if self.profile:
            shares = shares_of(time_when_done(device) - started, flats)
            for site, seconds in zip(sites, shares, strict=True):
                site.encode_seconds += seconds

    def decode(self, keep: bool) -> list[torch.Tensor]:
        """All, flat or as they lay, in memory of their own; ``keep``: the next time too."""
        found: list[Any] = [None] * len(self.strides)
        for numbers, batch in self.batches:
            started = time_when_done(batch.device) if self.profile else 0.0
            flats = batch.decode()
            if self.profile:
                shares = shares_of(time_when_done(batch.device) - started, flats)
                for number, seconds in zip(numbers, shares, strict=True):
                    self.sites[number].decode_seconds += seconds
            for number, flat in zip(numbers, flats, strict=True):
                found[number] = flat
        for number, other in self.others.items():
            if isinstance(other, PackedBits):
                found[number] = other.decode()
            else:
                found[number] = other.clone() if keep else other
        for site in self.sites:
            site.decoded += 1
        return found


class _Decoded:
    """Decoded storages with consumers left, oldest first, within a limit of bytes."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # each device has a backward thread of its own
        self.entries: OrderedDict[int, weakref.ref[StoredSave]] = OrderedDict()
        self.size_bytes = 0

    def keep(self, stored: StoredSave, flat: torch.Tensor) -> None:
        with self.lock:
            self.forget(stored)
            stored.decoded, stored.version = flat, flat._version
            self.entries[id(stored)] = stored.ref
            self.size_bytes += flat.nbytes
            while self.size_bytes > SHARED_DECODED_BYTES and len(self.entries) > 1:
                oldest = next(iter(self.entries.values()))()
                assert oldest is not None, "what dies forgets itself before"
                self.forget(oldest)

    def forget(self, stored: StoredSave) -> None:
        with self.lock:
            if stored.decoded is not None:
                self.size_bytes -= stored.decoded.nbytes
                del self.entries[id(stored)]
                stored.decoded = None


decoded_saves = _Decoded()


def captures() -> bool:
    """Whether a CUDA graph is captured on torch's current stream."""
    return torch.cuda.is_initialized() and torch._C._cuda_isCurrentStreamCapturing()


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of the current device is being captured into a graph."""
    # torch.cuda's function costs a microsecond more, and this is asked for every save.
    return device.type == "cuda" and torch._C._cuda_isCurrentStreamCapturing()


def stream_of(tensor: torch.Tensor) -> int:
    """The current stream of a CUDA tensor's device, as the driver's handle."""
    return _raw_stream(tensor.get_device())


def _raw_stream(device: int) -> int:
    # torch.cuda.current_stream makes two objects to say the same.
    return torch._C._cuda_getCurrentRawStream(device)


def time_when_done(device: torch.device) -> float:
    """Seconds, when ``device`` has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def changed_error(dtype: torch.dtype, shape: torch.Size, saved: int, current: int) -> RuntimeError:
    """Autograd's error for a saved tensor that was changed, which it raises where there are no
    hooks.
    """
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{dtype} {list(shape)}] is at version {current}; expected version {saved} "
        "instead. Hint: enable anomaly detection to find the operation that failed to compute its "
        "gradient, with torch.autograd.set_detect_anomaly(True)."
    )
