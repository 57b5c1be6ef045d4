"""``compress_activations``: what autograd saves for backward, kept compressed until backward asks.

A pair of saved-tensor hooks. What is stored is the *storage* that a saved tensor lies in, as a flat
tensor: a view of it comes back with the strides, offset and alignment that it had, and the views
that several ops save (q, k and v of one projection; a tensor and its transpose) share one encode.
The graph owns what is stored; this module keeps weak references only.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..config import save_batch_bytes
from ..ops import arena_devices, launches_kernels, trim_arenas
from ..text import text_table
from .at_once import asked_at_once
from .bits import pack_bits
from .garbage import fewer_collections
from .little import LittleSaves
from .room import heard_of_spills
from .saves import (
    BatchOrder,
    SaveBatch,
    SavedTogether,
    StoredSave,
    captures,
    changed_error,
    decoded_saves,
    encode_saves,
    is_capturing,
    stream_of,
    time_when_done,
)
from .sites import SaveSite, Sites
from .strides import memory_order
from .untraced import untraced


@dataclass(frozen=True)
class SaveRule:
    """From which size of its storage on a saved tensor of ``dtype`` is compressed.

    Below, the payload's fixed part (a header, and the planes of a group of 8,192 values) costs more
    than 1 % of the ratio of a large tensor, and an encode and a decode take as long as for a group
    (benchmarks/thresholds.py).
    """

    dtype: torch.dtype
    min_bytes: int


# At these sizes a payload is 0.695 (BF16), 0.883 (FP16), 0.848 (FP32) and 0.348 (FP32 that was cast
# from BF16) of the dense bytes (benchmarks/results/thresholds-*.json). FP32 in general saves as
# many bytes a value as BF16. A mask is an eighth at any size: it is taken from an eighth of BF16's
# size on.
SAVE_RULES: dict[torch.dtype, SaveRule] = {
    rule.dtype: rule
    for rule in (
        SaveRule(torch.bfloat16, 16384),
        SaveRule(torch.float16, 16384),
        SaveRule(torch.float32, 32768),
        SaveRule(torch.bool, 2048),
    )
}
# A view of less than this share of its storage is kept as it is, unless the storage is stored
# anyway: encoding all of a large buffer for a few rows would not pay.
MIN_COVERAGE = 1 / 4
# What a graph saves of one dtype is copied rather than encoded where that is less than this part of
# all that it saves: it would take launches of its own.
LEAST_SHARE = 64
# What waits to be encoded together, and later decoded: the larger share of what a block saves up to
# so many bytes, the smaller one beyond. Where saves are large a batch of few would take the host as
# much time as one of many.
BATCH_SHARE = 1 / 16
BATCH_BYTES = 64 << 20
LARGE_BATCH_SHARE = 1 / 128
_VIEWS = {
    f"{name}Backward0"
    for name in (
        *("View", "UnsafeView", "ReshapeAlias", "Transpose", "Permute", "T", "Alias", "Slice"),
        *("Select", "Expand", "Unsqueeze", "Squeeze", "Split", "SplitWithSizes", "AsStrided"),
    )
}


# What cross entropy saves is alive where forward ends and backward begins, and dense there in any
# case: for logits of a large vocabulary a payload beside it would be the peak.
_OF_LOSSES = {"LogSoftmaxBackward0"}


class SavedActivations:
    """What one ``compress_activations`` block has seen: ``sites``, and their sums.

    ``print`` gives a table. ``kept`` counts the saves that were left as they are, by reason.
    ``profile``: whether encodes and decodes are timed, which waits for the device around each.
    ``in_graphs``: whether graphs that are compiled now encode what they save (``graph_saves``).
    """

    def __init__(self, profile: bool = False, min_bytes: int = 0, in_graphs: bool = False) -> None:
        self.profile = profile
        self.min_bytes = min_bytes
        self.in_graphs = in_graphs
        self.kept: Counter[str] = Counter()
        self._sites = Sites()
        # By address of a storage, version, dtype and stream. An entry ends with what it refers to.
        self._stored: dict[Any, weakref.KeyedRef[Any, StoredSave]] = {}
        table = self._stored

        def ended(ref: weakref.KeyedRef[Any, StoredSave]) -> None:
            if table.get(ref.key) is ref:
                del table[ref.key]

        self._ended = ended  # without this object, which what is stored must not keep alive
        self._batch: SaveBatch | None = None
        self._order = BatchOrder()
        self._most_batch_bytes = 0 if profile else save_batch_bytes()
        # Of the block before, which in a training loop saved as much as this one will.
        self._expected_bytes = _last.dense_bytes if _last is not None else 0
        self._seen_bytes = 0
        self._limit_bytes = self._batch_bytes()
        self._within_capture = captures()
        before = _last._little if _last is not None else None
        self._little: LittleSaves = LittleSaves(before, self._expected_bytes)

    @property
    def sites(self) -> list[SaveSite]:
        """One entry a line, shape, dtype and producer; those that save the most bytes first."""
        return sorted(self._sites, key=lambda site: -site.saved_bytes)

    @property
    def encoded(self) -> int:
        """Storages that were compressed."""
        return sum(site.encoded for site in self._sites)

    @property
    def reused(self) -> int:
        """Saves that found their storage compressed."""
        return sum(site.reused for site in self._sites)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the compressed storages, each once."""
        return sum(site.dense_bytes for site in self._sites)

    @property
    def stored_bytes(self) -> int:
        """Bytes of their payloads, without spilled chunks, which only the device knows."""
        return sum(site.stored_bytes for site in self._sites)

    def as_dict(self) -> dict[str, Any]:
        """Sums, reasons and sites for programs."""
        sums = ("encoded", "reused", "dense_bytes", "stored_bytes")
        return {
            **{name: getattr(self, name) for name in sums},
            "kept": dict(self.kept),
            "sites": [site.as_dict() for site in self.sites],
        }

    def __str__(self) -> str:
        head = ["made by", "dtype", "shape", "compressed", "reused", "dense MB", "stored MB"]
        head += ["encode ms", "decode ms"] if self.profile else []
        rows = []
        for site in self.sites:
            row = [site.producer or "–", str(site.dtype).removeprefix("torch.")]
            row += [" × ".join(map(str, site.shape)), f"{site.encoded:,}", f"{site.reused:,}"]
            row += [f"{size / 1e6:,.2f}" for size in (site.dense_bytes, site.stored_bytes)]
            if self.profile:
                row += [f"{1e3 * s:,.2f}" for s in (site.encode_seconds, site.decode_seconds)]
            rows.append([site.place, *row])
        kept = (f"left as it is, {count:,} times: {why}" for why, count in self.kept.most_common())
        return "\n".join((text_table(["saved at", *head], rows), *kept))

    @untraced
    def pack(self, tensor: torch.Tensor) -> Any:
        """Pack hook: a ``_Saved`` or a ``_Kept``. Called a thousand times a step."""
        stored = self._find_or_store(tensor)
        if isinstance(stored, StoredSave):
            return _Saved(stored, tensor)
        self.kept[stored] += 1
        return _keep(tensor)

    def _find_or_store(self, tensor: torch.Tensor) -> StoredSave | str:
        """What ``tensor`` lies in, stored; or the reason why it stays as it is."""
        # Cheap and frequent reasons first: this runs for everything that a model saves.
        if type(tensor) is not torch.Tensor:
            return "it is a parameter or a subclass"
        rule = SAVE_RULES.get(tensor.dtype)
        if rule is None:
            return _no_codec_for(tensor.dtype)
        if tensor.layout != torch.strided or not (
            tensor.is_cuda or tensor.is_cpu or tensor.is_meta
        ):
            return "its layout or device has no codec"
        source = tensor.untyped_storage()
        size = source.nbytes()
        if size < rule.min_bytes or size < self.min_bytes:
            return "it is small"
        if torch._C._current_graph_task_id() != -1:
            return "it is saved within a backward, which needs it at once"
        if tensor.is_leaf and tensor.requires_grad:
            return "it is a leaf, which its owner keeps alive"
        if tensor._is_view() and isinstance(tensor._base, torch.nn.Parameter):
            return "it is a view of a parameter"
        if self._little.stays_dense(size, source._cdata):
            return "it is little beside what the block saves"
        reason = _reason_to_keep(tensor)
        if reason:
            return reason
        # On CUDA another stream would have to wait for the encode: let it make its own.
        stream = stream_of(tensor) if tensor.is_cuda else 0
        key = source._cdata, tensor._version, tensor.dtype, stream
        ref = self._stored.get(key)
        stored = ref() if ref is not None else None
        # An address is used again after its storage was freed, and what was stored may live on.
        if stored is not None and stored.source() is source:
            stored.site.reused += 1
            return stored
        if tensor.nbytes < MIN_COVERAGE * size:
            return "it is a small part of its storage"
        self._little.count(size)
        site = self._sites.of(tensor)
        # Most tensors are all of their storage, and need no view of it, here and in unpack.
        coded = tensor.dtype != torch.bool
        whole = coded and tensor.nbytes == size and tensor.is_contiguous()
        # Without the history: the graph, which owns what is stored, must not be held by it.
        flat = tensor.detach() if whole else _flat(tensor, source)
        upcast = is_exact_upcast(tensor)
        if coded:
            site.room.look(flat, upcast)
            if not site.room.pays:
                return "its values need as much room compressed"
        asked_at_once.save(size)
        if site.in_graph and site.room.at_once:
            return "a compiled graph asks for it and most of what is saved at once"
        stored = StoredSave(flat, upcast, source, size, stream, site, self.profile)
        ref = stored.ref = weakref.KeyedRef(stored, self._ended, key)
        self._seen_bytes += size
        if self._seen_bytes > self._expected_bytes:
            self._limit_bytes = self._batch_bytes()
        if coded and size <= self._limit_bytes and self._may_wait(tensor.device):
            self._batch_for(tensor.device, stream, size).add(ref, size)
        else:
            started = time_when_done(tensor.device) if self.profile else 0.0
            encode_saves([stored])
            if self.profile:
                site.encode_seconds += time_when_done(tensor.device) - started
        site.encoded += 1
        site.dense_bytes += size
        self._stored[key] = ref
        return stored

    def save_together(
        self, tensors: Sequence[torch.Tensor], sources: Sequence[tuple[str, str, bool]]
    ) -> SavedTogether:
        """``tensors``, without holes in memory, encoded at once: a graph takes their memory.

        ``sources``: the place (file:line), the producer, whether it is FP32 cast from BF16.
        """
        sites = [
            self._sites.named(place, producer, tensor)
            for tensor, (place, producer, _) in zip(tensors, sources, strict=True)
        ]
        saved = SavedTogether([tensor.stride() for tensor in tensors], sites, self.profile)
        coded: dict[tuple[torch.dtype, bool], list[int]] = {}
        flats: list[Any] = [t if t.is_contiguous() else memory_order(t) for t in tensors]
        for number, (flat, site, (*_, upcast)) in enumerate(
            zip(flats, sites, sources, strict=True)
        ):
            if flat.dtype == torch.bool:
                bits = saved.others[number] = pack_bits(flat.view(-1))
                site.count_encode(flat.nbytes, bits.payload.nbytes)
                continue
            site.room.look(flat, upcast)
            if site.room.pays:
                coded.setdefault((flat.dtype, upcast), []).append(number)
            else:
                self.kept["its values need as much room compressed"] += 1
                saved.others[number] = flat.clone()
        total = sum(flat.nbytes for flat in flats)
        for (_, upcast), numbers in coded.items():
            chosen = [flats[n] for n in numbers]
            if sum(flat.nbytes for flat in chosen) * LEAST_SHARE < total:
                for number, flat in zip(numbers, chosen, strict=True):
                    saved.others[number] = flat.clone()
                    self.kept["it is little beside what is saved with it"] += 1
            else:
                saved.encode(numbers, chosen, upcast)
        return saved

    def _batch_bytes(self) -> int:
        """Dense bytes that may wait for their encode."""
        saved = max(self._expected_bytes, self._seen_bytes)
        share = max(min(BATCH_BYTES, saved * BATCH_SHARE), saved * LARGE_BATCH_SHARE)
        return min(self._most_batch_bytes, int(share))

    def _batch_for(self, device: torch.device, stream: int, size_bytes: int) -> SaveBatch:
        """The batch that takes so many bytes more; one that would exceed the limit is encoded."""
        batch = self._batch
        if batch is not None and (
            batch.stream != stream
            or batch.device != device
            or batch.size_bytes + size_bytes > self._limit_bytes
        ):
            self.flush()
            batch = None
        if batch is None:
            batch = self._batch = SaveBatch(device, stream, self._order)
        return batch

    def _may_wait(self, device: torch.device) -> bool:
        """Whether an encode may wait for others: where kernels are launched, but not for the end of
        a block outside of a captured graph, which must hold the encodes of what it computes.
        """
        return launches_kernels(device) and is_capturing(device) == self._within_capture

    def flush(self) -> None:
        """Encode what waits for others to be encoded with. Does nothing while a graph is captured
        within the block; where the block began within a capture that has ended, what waits stays
        dense.

        ArenaExhaustedError and torch.OutOfMemoryError where there is no room: what waited stays
        dense, and backward gets it as it is.
        """
        batch = self._batch
        if batch is None:
            return
        if is_capturing(batch.device) == self._within_capture:
            self._batch = None
            batch.encode()
        elif self._within_capture:
            self._batch = None


def _flat(tensor: torch.Tensor, source: torch.UntypedStorage) -> torch.Tensor:
    """All of the storage that ``tensor`` lies in, as values of its dtype."""
    return tensor.detach().as_strided((source.nbytes() // tensor.element_size(),), (1,), 0)


class _Saved:
    """What autograd holds for one saved tensor: its place in a ``StoredSave``."""

    __slots__ = ("counter", "stored", "version", "view", "waits")

    def __init__(self, stored: StoredSave, tensor: torch.Tensor) -> None:
        self.stored = stored
        view = tensor.shape, tensor.stride(), tensor.storage_offset()
        # None where it is what is stored: Python's search for cycles visits fewer objects.
        whole = view == (stored.shape, stored.stride, 0)
        self.view: Any = None if whole else view  # shape, strides, offset
        self.version = tensor._version
        # An alias shares the version counter; with another storage it does not keep the values
        # alive.
        self.counter = tensor.detach()
        self.counter.data = _nothing(tensor)
        self.waits = True
        stored.waiting += 1

    def unpack(self) -> torch.Tensor:
        if self.counter._version != self.version:
            shape = self.stored.shape if self.view is None else self.view[0]
            raise changed_error(self.counter.dtype, shape, self.version, self.counter._version)
        if self.waits:
            self.waits = False
            self.stored.waiting -= 1
        stored = self.stored
        asked_at_once.is_backward = True
        if stored.site.in_graph:
            asked_at_once.ask(stored.size_bytes, stored.site.room)
        values = stored.values(shared=stored.waiting > 0)
        return values if self.view is None else values.as_strided(*self.view)

    @untraced
    def __del__(self) -> None:
        # The graph lets go of a save with no backward, or of the last one: nobody else will ask.
        if self.waits:
            self.stored.waiting -= 1
        if self.stored.waiting <= 0:
            decoded_saves.forget(self.stored)


# A saved tensor as it is, and its version: None where it has none. A tuple costs the least.
_Kept = tuple[torch.Tensor, int | None]


def _keep(tensor: torch.Tensor) -> _Kept:
    # Not the tensor itself if it has a history: that would be a cycle.
    kept = tensor if tensor.grad_fn is None else tensor.detach()
    return kept, None if tensor.is_inference() else tensor._version


@untraced
def _unpack(packed: _Saved | _Kept) -> torch.Tensor:
    if isinstance(packed, _Saved):
        return packed.unpack()
    tensor, version = packed
    if version is not None and tensor._version != version:
        raise changed_error(tensor.dtype, tensor.shape, version, tensor._version)
    return tensor


def _nothing(tensor: torch.Tensor) -> torch.Tensor:
    key = tensor.dtype, tensor.device
    if key not in _empty:
        _empty[key] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return _empty[key]


_empty: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def _reason_to_keep(tensor: torch.Tensor) -> str:
    """What is seldom a reason; empty where there is none."""
    if tensor.is_nested or tensor.is_neg() or tensor.is_inference():
        return "it is a nested, negated or inference tensor"
    if tensor.grad_fn is not None and tensor.grad_fn.name() in _OF_LOSSES:
        return "a loss saves it, which backward asks for first"
    return ""


@cache
def _no_codec_for(dtype: torch.dtype) -> str:
    return f"{dtype} is not compressed"


def is_exact_upcast(tensor: torch.Tensor) -> bool:
    """True where the history of FP32 ``tensor`` says that it was cast from BF16.

    A hint: a write through ``.data`` leaves no trace in the history.
    """
    if tensor.dtype != torch.float32:
        return False
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    if node is None or node.name() != "ToCopyBackward0":
        return False
    source, output = node.next_functions[0]
    if source is None:
        return False
    if hasattr(source, "variable"):
        return source.variable.dtype == torch.bfloat16
    return source._input_metadata[output].dtype == torch.bfloat16


def active_block() -> SavedActivations | None:
    """The ``compress_activations`` block whose hooks torch applies now; None where it applies
    others, or none.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    owner = getattr(hooks[0], "__self__", None) if hooks is not None else None
    return owner if isinstance(owner, SavedActivations) else None


_last: SavedActivations | None = None


def last_saved() -> SavedActivations | None:
    """What the last ``compress_activations`` block has seen; None before the first."""
    return _last


@contextlib.contextmanager
def compress_activations(
    *, profile: bool = False, min_bytes: int = 0, in_graphs: bool = False
) -> Iterator[SavedActivations]:
    """Compress, losslessly, what autograd saves within the block; backward may run after it.

    BF16, FP16 and FP32 tensors go through the codec (FP32 that was cast from BF16 as BF16), masks
    become bits. Left as they are: parameters and their views, other leaves that require gradients,
    tensor subclasses, integers, what is small (``SAVE_RULES``) or little beside what the block
    before saved (below 4 MiB and 1/512 of it; the smallest, 1/5 in all), the probabilities that
    cross entropy saves, and what is saved while a backward runs. Gives a ``SavedActivations``:
    counts and bytes, by line of the model too (``sites``); ``lct.stats()["activations"]`` has
    those of the last block. ``profile``: also time encodes and decodes, waiting for the device
    around each.
    ``min_bytes``: leave smaller storages as they are too. On a GPU an encode and a decode take tens
    of microseconds each, however small the tensor is: where the host is what a step waits for, a
    few MiB give up little memory and much of that time. ValueError where it is negative.

    ``in_graphs``: graphs that Inductor compiles within the block encode themselves what they save,
    and decode it where their backward needs it. Without it the hooks take it when all of a graph
    has run, and backward decodes all of it at once. A graph that saves most of what forward saves,
    as of a model that is compiled as a whole, would take more memory in backward than without LCT:
    after its first backward its saves stay dense. But with ``in_graphs`` Inductor plans other
    kernels, which may add and round in another order: the bits are those of that graph, not of the
    one without LCT (docs/guide.md, "torch.compile").

    On CUDA saved tensors wait, dense, until a batch is full (``BATCH_BYTES``,
    ``LCT_SAVE_BATCH_MIB``); the end of the block encodes the last ones. ArenaExhaustedError or
    torch.OutOfMemoryError, in forward or there, where memory runs out: what could not be encoded
    stays as it is.

    Python's garbage collection comes less often in the block: a save is Python objects, and
    thousands of them would call for it (``gc.set_threshold``, as it was when the block ends).

    A saved tensor that is changed in place before backward raises autograd's error, as without
    LCT. A change that torch does not see (through ``.data``, or by a kernel of one's own) is not
    seen here either: backward then may get the values from before.

    Torch applies only the innermost saved-tensor hooks: a warning says so where this block replaces
    hooks of others. Inside a checkpointed region they would undo the checkpoint: RuntimeError;
    around one they compress what the checkpoint saves. What a selective checkpoint caches passes no
    hooks and stays dense. ``torch.func`` transforms refuse the hooks with an error of their own.
    """
    if min_bytes < 0:
        raise ValueError(f"min_bytes must be at least 0, got {min_bytes}")
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if outer is not None:
        _check_outer(outer[0])
    around = active_block()
    saved = around or SavedActivations(profile, min_bytes, in_graphs)
    if saved.in_graphs:
        from .graph_saves import install  # imports the compiler

        install()
    global _last
    _last = saved
    with fewer_collections():
        with saved_tensors_hooks(saved.pack, _unpack):
            yield saved
        saved.flush()
    if saved is not around:
        trim_arenas()
        for device in arena_devices():
            heard_of_spills(device, saved.stored_bytes)


def _check_outer(pack: Any) -> None:
    if getattr(pack, "__module__", None) == "torch.utils.checkpoint":
        raise RuntimeError(
            "compress_activations must be entered outside of checkpointed regions, got a call "
            "inside one: its hooks would save what the checkpoint is there to compute again"
        )
    if not isinstance(getattr(pack, "__self__", None), SavedActivations):
        warnings.warn(
            f"compress_activations replaces the saved-tensor hooks {pack!r} within its block: "
            "torch applies only the innermost",
            stacklevel=4,
        )
