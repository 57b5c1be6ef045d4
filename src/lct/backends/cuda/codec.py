"""Encode and decode on CUDA: payloads and launches around the kernels in kernels/.

Tensors are dense, contiguous and on one CUDA device; launches go to torch's current stream.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from ...codebook import BANK_ROWS
from ...dtypes import UPCAST
from ...errors import ArenaExhaustedError
from ...layout import (
    CHUNK_BYTES,
    HEADER_BYTES,
    MARKER_MASK,
    REF_MASK,
    STATE_SHIFT,
    STATE_SPILLED,
    STATE_WIDE,
    WORD_BYTES,
    PayloadLayout,
    buffer_offsets,
)
from ...presets import LANES, STEP_VALUES
from . import arena as arenas
from . import jit, payload_pool

NO_BOOK = 0xFFFFFFFF
NO_BLOCK = 0xFFFFFFFF
CAPTURED = 1 << 62  # launch number of captured launches: the host never learns that they are done
ENCODE_TABLE_BYTES = (jit.ENCODE_PAIRS_WORDS + jit.ENCODE_WORDS) * WORD_BYTES
DECODE_TABLE_BYTES = (jit.PAIRS_WORDS + jit.SINGLES_WORDS) * WORD_BYTES
# Torch's own, without what its Python functions check at each call. CPU builds lack them.
# current_stream(device): torch's current stream there, as the driver's handle.
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)


def template(layout: PayloadLayout) -> jit.Args:
    """The part of the launch argument that depends on the layout alone; kept with the layout."""
    found = layout.__dict__.get("_cuda_args")
    if found is None:
        tail_words = layout.tail_capacity_words if layout.tail_steps else layout.capacity_words
        found = jit.Args(
            num_values=layout.num_values,
            sign_fraction_offset=layout.sign_fraction_offset,
            low_offset=layout.low_offset,
            lane_offset=layout.lane_offset,
            meta_offset=layout.meta_offset,
            tail_slot_offset=layout.slot_offset(layout.full_groups),
            size_bytes=layout.size_bytes,
            end_group=layout.num_groups,
            num_groups=layout.num_groups,
            full_groups=layout.full_groups,
            tail_steps=layout.tail_steps,
            capacity=layout.capacity_words,
            tail_capacity=tail_words,
            book=NO_BOOK,
        )
        header = np.frombuffer(layout.pack_header(0, 0), np.uint32)
        found.header = (ctypes.c_uint32 * 4)(*(int(v) for v in header))
        layout.__dict__["_cuda_args"] = found
    return found


class Lease:
    """A payload's claim on chunks of its device's arena; gives them back when it is dropped."""

    __slots__ = ("arena", "captured", "last", "serial")

    def __init__(self, device: int) -> None:
        self.arena = arenas.of(device)
        self.serial = self.arena.new_serial()
        self.last = 0
        self.captured = False

    def note(self, sequence: int) -> None:
        """Launch ``sequence`` writes the payload."""
        self.last = sequence
        self.captured = self.captured or sequence == CAPTURED

    def __del__(self) -> None:
        # At interpreter exit torch is half gone; the process's memory goes with it.
        if sys is not None and not sys.is_finalizing() and self.last:
            self.arena.forget(self.serial, self.last)


def lease(payload: torch.Tensor) -> Lease:
    """A lease for a payload that holds no chunks yet."""
    return Lease(payload.device.index)


@cache
def candidates_mask(candidates: tuple[int, ...]) -> int:
    """Bit b: book b may be chosen."""
    return sum(1 << b for b in candidates)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a copy where it does not begin at a multiple of 16 bytes (vector loads)."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


class SharedMemory(NamedTuple):
    """Bytes of dynamic shared memory: a block's tables, and what each of its warps has."""

    tables: int
    warp: int


def ready(layout: PayloadLayout, key: Any) -> list[Any]:
    """The calls that stand ready for ``layout`` and ``key`` (what for, on which device).

    Whoever launches one takes it out and puts it back after: its arguments are read in place, and
    several threads may work on tensors of one layout.
    """
    pools = layout.__dict__.get("_cuda_ready")
    if pools is None:
        pools = layout.__dict__.setdefault("_cuda_ready", {})
    pool = pools.get(key)
    return pools.setdefault(key, []) if pool is None else pool


def take(pool: list[Any]) -> Any:
    """A call out of ``pool``, or None."""
    try:
        return pool.pop()
    except IndexError:
        return None


def _encode_args(
    layout: PayloadLayout, device: int, candidates: tuple[int, ...], shift: int
) -> jit.Args:
    """Of an encode into a new payload; ``book`` is NO_BOOK where one of several is searched for."""
    args = jit.Args.from_buffer_copy(template(layout))
    args.tables = jit.device_tables(device).data_ptr()
    args.arena = arenas.of(device).pointer
    args.fresh = 1
    if len(candidates) == 1 and (layout.preset.pooled or shift):
        args.book = candidates[0]
        args.header[0] |= candidates[0] << 24
        args.header[1] |= shift
    else:
        args.candidates = candidates_mask(candidates)
    return args


class _EncodeCall:
    """Launches that encode tensors of one layout on one device; ``search`` where a book is chosen.

    Both read ``args``.
    """

    __slots__ = ("args", "code", "kernel", "memory", "search", "worst_chunks")

    def __init__(
        self, layout: PayloadLayout, device: int, candidates: tuple[int, ...], shift: int = 0
    ) -> None:
        preset, dtype = layout.preset, layout.dtype
        self.args = args = _encode_args(layout, device, candidates, shift)
        self.search: jit.Call | None = None
        if args.book == NO_BOOK:
            select = jit.load("select_book", preset, dtype, device)
            self.search = jit.Call(select, args, 1, select.warps)
        entry = "pooled_encode" if preset.pooled else "fixed_encode"
        self.kernel = jit.load(entry, preset, dtype, device)
        words = layout.capacity_words * (1 if preset.pooled else LANES)
        self.memory = SharedMemory(ENCODE_TABLE_BYTES, words * WORD_BYTES)
        self.code = call_over_groups(self.kernel, args, [args], self.memory)
        self.worst_chunks = layout.worst_chunks

    def launch(self, layout: PayloadLayout, held: Lease, stream: int) -> None:
        """Launch with what ``args`` says of the tensor and its payload.

        The search writes the payload's header, so it comes after the credit that says that the
        present values need not stay. In a captured graph groups may find none and keep theirs:
        there a payload that has values keeps its book. One that the graph makes has those of the
        replay before, whose chunks go back first.
        """
        arena = held.arena
        capturing = is_capturing()
        if capturing or self.worst_chunks > arena.limit_chunks:
            launch_with_credit(
                self.kernel,
                self.args,
                [[self.args]],
                arena,
                [held],
                layout.chunks_per_group,
                self.memory,
                stream,
                before=self.search if self.args.fresh or not capturing else None,
                made=[held.serial] if self.args.fresh else [],
            )
            # As they were, for the next tensor.
            self.args.first_group, self.args.end_group = 0, layout.num_groups
            self.args.reserve = 0
            return
        with arena.lock:
            held.last = arena.admit(self.worst_chunks, stream)
            if self.search is not None:
                self.search.launch(stream)
            self.code.launch(stream, early=self.search is not None)
            arena.launched()


def encode(
    dense: torch.Tensor,
    layout: PayloadLayout,
    candidates: tuple[int, ...],
    into: Any = None,
    *,
    shift: int = 0,
) -> tuple[torch.Tensor, Lease]:
    """(payload, lease) of ``dense``; ``into`` (payload and spill, same layout) is overwritten.

    Does not wait for the device. One candidate (fixed presets: and a ``shift``) needs no sample.
    """
    device = dense.get_device()
    if current_device() != device:
        with torch.cuda.device(device):
            return encode(dense, layout, candidates, into, shift=shift)
    # A wide group's chunks are not reused in place, so an upcast payload is always a new one.
    if into is None or layout.dtype is UPCAST:
        payload = payload_pool.empty(layout.size_bytes, dense.device)
        held = Lease(device)
        fresh = 1
    else:
        payload, held, fresh = into.payload, into.spill, 0
    if layout.is_raw:
        _write_header(payload, layout, current_stream(device))
        payload[HEADER_BYTES:].copy_(dense.reshape(-1).view(torch.uint8))
        return payload, held
    dense = aligned(dense)
    pool = ready(layout, (device, candidates, shift))
    call = take(pool) or _EncodeCall(layout, device, candidates, shift)
    args = call.args
    args.payload, args.dense = payload.data_ptr(), dense.data_ptr()
    args.fresh, args.serial = fresh, held.serial
    call.launch(layout, held, current_stream(device))
    pool.append(call)
    return payload, held


def _write_header(payload: torch.Tensor, layout: PayloadLayout, stream: int) -> None:
    # Not a copy: replays of a captured graph would read the host's memory anew, which is gone then.
    words = np.frombuffer(layout.pack_header(0, 0), np.uint32).tolist()
    for number, word in enumerate(words):
        address = payload.data_ptr() + number * WORD_BYTES
        jit.check(jit.driver().cuMemsetD32Async(address, word, 1, stream)[0])


class TensorList(ctypes.Structure):
    """The argument of kernels that take several tensors; mirrors ``struct TensorList`` in
    tensor_list.cuh.
    """

    _fields_ = [
        ("first_block", ctypes.c_uint32 * (jit.MOST_TENSORS + 1)),
        ("tensors", jit.Args * jit.MOST_TENSORS),
    ]


def _list_of(tensors: Sequence[jit.Args]) -> Any:
    """A ``TensorList`` of at most ``jit.MOST_TENSORS``; ``first_block`` is still to be filled."""
    every: Any = TensorList()
    every.first_block[:] = [NO_BLOCK] * len(every.first_block)
    every.tensors[: len(tensors)] = tensors
    return every


class _EncodeListCall:
    """Launches that encode several tensors into new payloads, made ready for their layouts."""

    __slots__ = ("code", "search", "tensors", "worst_chunks")

    def __init__(
        self, layouts: Sequence[PayloadLayout], device: int, candidates: tuple[int, ...]
    ) -> None:
        first = layouts[0]
        every = _list_of([_encode_args(layout, device, candidates, 0) for layout in layouts])
        self.tensors: list[Any] = every.tensors[: len(layouts)]  # parts of it, not copies
        self.search: jit.Call | None = None
        if self.tensors[0].book == NO_BOOK:
            select = jit.load("select_books", first.preset, first.dtype, device)
            self.search = jit.Call(select, every, len(layouts), select.warps)
        kernel = jit.load("pooled_encode_list", first.preset, first.dtype, device)
        words = max(layout.capacity_words for layout in layouts)
        memory = SharedMemory(ENCODE_TABLE_BYTES, words * WORD_BYTES)
        self.code = call_over_groups(kernel, every, self.tensors, memory, every.first_block)
        self.worst_chunks = sum(layout.worst_chunks for layout in layouts)

    def launch(self, stream: int, *, swept: bool = False) -> None:
        """The search for books, where there is one, and the encodes; ``swept``: after a sweep."""
        if self.search is not None:
            self.search.launch(stream, early=swept)
        self.code.launch(stream, early=self.search is not None)


def encode_list(
    denses: Sequence[torch.Tensor],
    layouts: Sequence[PayloadLayout],
    candidates: tuple[int, ...],
) -> list[tuple[torch.Tensor, Lease]]:
    """``encode`` of each into a new payload; at least one, all on one device.

    Pooled tensors of one dtype share launches. Does not wait for the device. Where memory runs out
    nothing was overwritten: all payloads are new.
    """
    device = denses[0].get_device()
    if current_device() != device:
        with torch.cuda.device(device):
            return encode_list(denses, layouts, candidates)
    limit_chunks = arenas.of(device).limit_chunks
    made: list[Any] = [None] * len(denses)
    together: dict[tuple[int, int], list[int]] = {}
    for number, layout in enumerate(layouts):
        if layout.preset.pooled and layout.worst_chunks * 2 <= limit_chunks:
            key = layout.preset.code, layout.dtype.code
            together.setdefault(key, []).append(number)
        else:
            made[number] = encode(denses[number], layout, candidates)
    for numbers in together.values():
        worsts = [layouts[n].worst_chunks for n in numbers]
        for batch in batches(worsts, limit_chunks, jit.MOST_TENSORS):
            chosen = [numbers[k] for k in batch]
            if len(chosen) == 1:
                made[chosen[0]] = encode(denses[chosen[0]], layouts[chosen[0]], candidates)
                continue
            for n in chosen:
                size = layouts[n].size_bytes
                payload = payload_pool.empty(size, denses[n].device)
                made[n] = payload, Lease(device)
            sequence = _launch_encodes(
                [denses[n] for n in chosen],
                [layouts[n] for n in chosen],
                candidates,
                device,
                [(made[n][0].data_ptr(), made[n][1].serial) for n in chosen],
            )
            for n in chosen:
                made[n][1].note(sequence)
    return made


def encode_buffer(
    denses: Sequence[torch.Tensor],
    layouts: Sequence[PayloadLayout],
    candidates: tuple[int, ...],
) -> tuple[torch.Tensor, list[int], Lease] | None:
    """(buffer, offsets, lease): ``encode_list`` into payloads of one buffer, which have one lease.

    None for one tensor, and where one launch cannot do it. Memory that many payloads share costs
    the host less.
    """
    device = denses[0].get_device()
    if current_device() != device:
        with torch.cuda.device(device):
            return encode_buffer(denses, layouts, candidates)
    offsets = buffer_offsets(layouts)
    if offsets is None or not _is_one_launch(layouts, device):
        return None
    buffer = payload_pool.empty(offsets.pop(), denses[0].device)
    held = Lease(device)
    start, serial = buffer.data_ptr(), held.serial
    targets = [(start + offset, serial) for offset in offsets]
    held.note(_launch_encodes(denses, layouts, candidates, device, targets))
    return buffer, offsets, held


def batches(worsts: Sequence[int], limit_chunks: int, most: int) -> Iterator[list[int]]:
    """Numbers of what one launch takes, at most ``most``; ``worsts``: their worst cases in chunks.

    That of a launch stays within half of the arena's limit, so that the next one need not wait for
    it; what is larger goes alone.
    """
    batch: list[int] = []
    chunks = 0
    for number, worst in enumerate(worsts):
        if batch and (len(batch) == most or (chunks + worst) * 2 > limit_chunks):
            yield batch
            batch, chunks = [], 0
        batch.append(number)
        chunks += worst
    if batch:
        yield batch


def launch_counts(layouts: Sequence[PayloadLayout], device: int) -> list[int]:
    """How many of ``layouts``, of one dtype and in their order, each launch encodes."""
    if _is_one_launch(layouts, device):
        return [len(layouts)]
    worsts = [layout.worst_chunks for layout in layouts]
    limit_chunks = arenas.of(device).limit_chunks
    return [len(batch) for batch in batches(worsts, limit_chunks, jit.MOST_TENSORS)]


def _is_one_launch(layouts: Sequence[PayloadLayout], device: int) -> bool:
    """What ``batches`` says of most; asked for every batch of saves."""
    worst = sum([layout.worst_chunks for layout in layouts])
    return len(layouts) <= jit.MOST_TENSORS and worst * 2 <= arenas.of(device).limit_chunks


def _sizes(layouts: Sequence[PayloadLayout]) -> tuple[tuple[int, int], ...]:
    # Of one preset and dtype, layouts differ in these alone.
    return tuple([(layout.num_values, layout.capacity_words) for layout in layouts])


def _launch_encodes(
    denses: Sequence[torch.Tensor],
    layouts: Sequence[PayloadLayout],
    candidates: tuple[int, ...],
    device: int,
    targets: Sequence[tuple[int, int]],
) -> int:
    """Encode tensors into pooled payloads of one dtype in one launch, and that of their search.

    ``targets``: where the payloads begin, and their serial numbers. The number of the launch.
    """
    pool = ready(layouts[0], ("pooled_encode_list", device, candidates, _sizes(layouts)))
    every = take(pool) or _EncodeListCall(layouts, device, candidates)
    # Referenced until the launch is enqueued.
    read = [aligned(dense) for dense in denses]
    for args, dense, (address, serial) in zip(every.tensors, read, targets, strict=True):
        args.payload, args.dense, args.serial = address, dense.data_ptr(), serial
    arena = arenas.of(device)
    stream = current_stream(device)
    if is_capturing():
        sequence = CAPTURED
        _prepare_capture(arena, {serial for _, serial in targets}, stream)
        for args in every.tensors:
            args.reserve = 1
        every.launch(stream, swept=True)
        for args in every.tensors:
            args.reserve = 0
    else:
        with arena.lock:
            sequence = arena.admit(every.worst_chunks, stream)
            every.launch(stream)
            arena.launched()
    pool.append(every)
    return sequence


def _prepare_capture(arena: arenas.Arena, serials: Iterable[int], stream: int) -> None:
    """Before a captured launch: ArenaExhaustedError where no arena is there.

    ``serials``: of the payloads that it makes. Each replay makes those of the one before anew,
    whose chunks go back first.
    """
    if not arena.total_chunks:
        raise ArenaExhaustedError(
            "the arena must hold chunks before a graph is captured: run the code once before "
            "capture, or call lct.reserve_arena(size_bytes)"
        )
    arena.note_capture()
    for serial in serials:
        arena.sweep_in_graph(serial, stream)


def ensure_room(parts: Sequence[tuple[Any, PayloadLayout]]) -> None:
    """ArenaExhaustedError where encodes into all of ``parts`` (stored, layout) might find no room.

    All are on one device. What is larger than the arena's limit goes in pieces, and is not ensured
    beyond one. Nothing is ensured in a captured graph, whose launches ask for room on the device.
    """
    coded = [(stored, layout) for stored, layout in parts if not layout.is_raw]
    if not coded or is_capturing():
        return
    arena = coded[0][0].spill.arena
    worst = sum(layout.worst_chunks for _, layout in coded)
    device = coded[0][0].payload.get_device()
    with torch.cuda.device(device):
        arena.ensure(min(worst, arena.limit_chunks), current_stream(device))


def is_capturing() -> bool:
    """Whether torch's current stream is being captured into a graph."""
    return torch.cuda.is_current_stream_capturing()


def call_over_groups(
    kernel: jit.Loaded,
    args: ctypes.Structure,
    groups: Sequence[jit.Args],
    memory: SharedMemory,
    first_blocks: Any = None,
) -> jit.Call:
    """The call over the groups that each of ``groups``, parts of ``args``, names.

    ``first_blocks``: the part of ``args`` that says which block is the first of which, where the
    kernel takes several (struct StepList in step.cuh).
    """
    counts = [part.end_group - part.first_group for part in groups]
    # Several: blocks of one size, as many as all need.
    warps = kernel.grid(counts[0]).warps if len(counts) == 1 else kernel.warps
    ends = list(itertools.accumulate(jit.ceil_div(count, warps) for count in counts))
    if first_blocks is not None:
        first_blocks[: len(ends) + 1] = [0, *ends]
    shared_bytes = memory.tables + warps * memory.warp
    if kernel.config.even_waves:
        shared_bytes = kernel.shared_for_even_waves(ends[-1], warps, shared_bytes)
    return jit.Call(kernel, args, ends[-1], warps, shared_bytes)


def launch_with_credit(
    kernel: jit.Loaded,
    args: ctypes.Structure,
    parts: Sequence[Sequence[jit.Args]],
    arena: arenas.Arena,
    leases: Sequence[Lease],
    worst_chunks: int,
    memory: SharedMemory,
    stream: int,
    first_blocks: Any = None,
    before: jit.Call | None = None,
    made: Sequence[int] = (),
) -> None:
    """Launch over all groups, in pieces that the arena's limit covers at worst (arena.py).

    ``parts``: what ``args`` says of each tensor's payloads; the first of them says which groups a
    launch takes. ``worst_chunks`` a group. ``before``, the search for a book, is launched once,
    when there is credit. ``made``: serial numbers of the payloads that are new.
    ArenaExhaustedError where the device has no memory for the arena: before anything is launched,
    or between two pieces of a tensor, and then it says which groups have new values.
    """
    groups = [tensor[0] for tensor in parts]
    if is_capturing():
        _prepare_capture(arena, made, stream)
        for tensor in parts:
            for part in tensor:
                part.reserve = 1
        for held in leases:
            held.note(CAPTURED)
        call = call_over_groups(kernel, args, groups, memory, first_blocks)
        if before is not None:
            before.launch(stream, early=bool(made))
        call.launch(stream, early=before is not None)
        return
    count = sum(part.num_groups for part in groups)
    piece = count
    if len(groups) == 1 and piece * worst_chunks > arena.limit_chunks:
        piece = max(arena.limit_chunks // 2 // worst_chunks, kernel.warps)
        # Whole waves of blocks: the last part of one would leave most of the device idle.
        shared_bytes = memory.tables + kernel.warps * memory.warp
        wave = kernel.warps * kernel.blocks_at_once(kernel.warps, shared_bytes)
        piece = max(piece - piece % wave, min(piece, wave))
    for first in range(0, count, piece):
        end = min(first + piece, count)
        with arena.lock:
            try:
                sequence = arena.admit((end - first) * worst_chunks, stream)
            except ArenaExhaustedError as error:
                if first == 0:
                    raise
                raise ArenaExhaustedError(
                    f"the device has no memory for the overflow arena: of {count} groups the first "
                    f"{first} have new values, the others their old ones"
                ) from error
            for held in leases:
                held.note(sequence)
            search = before if first == 0 else None
            if search is not None:
                search.launch(stream)
            if len(groups) == 1:
                groups[0].first_group, groups[0].end_group = first, end
            call = call_over_groups(kernel, args, groups, memory, first_blocks)
            call.launch(stream, early=search is not None)
            arena.launched()


def _decode_args(layout: PayloadLayout, device: int) -> jit.Args:
    args = jit.Args.from_buffer_copy(template(layout))
    args.tables = jit.device_tables(device).data_ptr()
    args.arena = arenas.of(device).pointer
    return args


def _decode_call(layout: PayloadLayout, device: int) -> jit.Call:
    args = _decode_args(layout, device)
    pooled = layout.preset.pooled
    table_words = jit.SINGLES_WORDS + (jit.PAIRS_WORDS if pooled else 0)
    entry = "pooled_decode" if pooled else "fixed_decode"
    kernel = jit.load(entry, layout.preset, layout.dtype, device)
    words = layout.capacity_words * (1 if pooled else LANES)
    memory = SharedMemory(table_words * WORD_BYTES, words * WORD_BYTES)
    return call_over_groups(kernel, args, [args], memory)


def decode(payload: torch.Tensor, layout: PayloadLayout, out: torch.Tensor) -> torch.Tensor:
    """Decode into ``out`` (contiguous); returns it. Does not wait for the device."""
    device = payload.get_device()
    if current_device() != device:
        with torch.cuda.device(device):
            return decode(payload, layout, out)
    if layout.is_raw:
        return out.copy_(payload[HEADER_BYTES:].view(out.dtype).view(out.shape))
    target = out if out.data_ptr() % 16 == 0 else torch.empty_like(out)
    pool = ready(layout, device)
    call = take(pool) or _decode_call(layout, device)
    call.args.payload, call.args.dense = payload.data_ptr(), target.data_ptr()
    call.launch(current_stream(device))
    pool.append(call)
    if target is not out:
        out.copy_(target)
    return out


class _DecodeListCall:
    """A launch that decodes several pooled tensors, made ready for their layouts."""

    __slots__ = ("call", "tensors")

    def __init__(self, layouts: Sequence[PayloadLayout], device: int) -> None:
        every = _list_of([_decode_args(layout, device) for layout in layouts])
        self.tensors: list[Any] = every.tensors[: len(layouts)]  # parts of it, not copies
        first = layouts[0]
        kernel = jit.load("pooled_decode_list", first.preset, first.dtype, device)
        words = max(layout.capacity_words for layout in layouts)
        memory = SharedMemory(DECODE_TABLE_BYTES, words * WORD_BYTES)
        self.call = call_over_groups(kernel, every, self.tensors, memory, every.first_block)


# A payload, its layout, and where to decode it to.
_Decode = tuple[torch.Tensor, PayloadLayout, torch.Tensor]


def decode_list(
    parts: Sequence[tuple[torch.Tensor, PayloadLayout]], outs: Sequence[torch.Tensor]
) -> None:
    """Decode each (payload, layout) into its ``out`` (contiguous); at least one, all on one device.

    Pooled tensors of one dtype share launches. Does not wait for the device.
    """
    device = outs[0].get_device()
    if current_device() != device:
        with torch.cuda.device(device):
            return decode_list(parts, outs)
    together: dict[tuple[int, int], list[_Decode]] = {}
    for (payload, layout), out in zip(parts, outs, strict=True):
        preset = layout.preset
        if preset.pooled and out.data_ptr() % 16 == 0:
            same_code = together.setdefault((preset.code, layout.dtype.code), [])
            same_code.append((payload, layout, out))
        else:
            decode(payload, layout, out)
    for decodes in together.values():
        for start in range(0, len(decodes), jit.MOST_TENSORS):
            some = decodes[start : start + jit.MOST_TENSORS]
            if len(some) == 1:
                decode(*some[0])
                continue
            payloads, these, targets = zip(*some, strict=True)
            _launch_decodes([p.data_ptr() for p in payloads], these, targets, device)


def decode_buffer(
    buffer: torch.Tensor,
    offsets: Sequence[int],
    layouts: Sequence[PayloadLayout],
    outs: Sequence[torch.Tensor],
) -> None:
    """Decode all of a buffer of ``encode_buffer`` into ``outs``, new tensors."""
    device = buffer.get_device()
    if current_device() != device:
        with torch.cuda.device(device):
            return decode_buffer(buffer, offsets, layouts, outs)
    start = buffer.data_ptr()
    _launch_decodes([start + offset for offset in offsets], layouts, outs, device)


def _launch_decodes(
    addresses: Sequence[int],
    layouts: Sequence[PayloadLayout],
    outs: Sequence[torch.Tensor],
    device: int,
) -> None:
    """Decode pooled tensors of one dtype, at most ``jit.MOST_TENSORS``, in one launch."""
    pool = ready(layouts[0], ("pooled_decode_list", device, _sizes(layouts)))
    every = take(pool) or _DecodeListCall(layouts, device)
    for args, address, out in zip(every.tensors, addresses, outs, strict=True):
        args.payload, args.dense = address, out.data_ptr()
    every.call.launch(current_stream(device))
    pool.append(every)


def group_needs(
    dense: torch.Tensor, layout: PayloadLayout, candidates: tuple[int, ...]
) -> np.ndarray:
    """Words that each pooled group needs, int32 (num_groups,). Synchronises."""
    return _launch_needs(dense, layout, candidates).cpu().numpy()


def group_needs_later(
    dense: torch.Tensor, layout: PayloadLayout, candidates: tuple[int, ...]
) -> Callable[[], np.ndarray | None]:
    """``group_needs`` as a call that gives None until the device is done. Does not wait."""
    needs = _launch_needs(dense, layout, candidates)
    with torch.cuda.device(dense.get_device()):
        host = torch.empty(needs.shape, dtype=needs.dtype, pin_memory=True)
        host.copy_(needs, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return lambda: host.numpy() if event.query() else None


def _launch_needs(
    dense: torch.Tensor, layout: PayloadLayout, candidates: tuple[int, ...]
) -> torch.Tensor:
    device = dense.get_device()
    with torch.cuda.device(device):
        dense = aligned(dense)
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=dense.device)
        needs = torch.empty(layout.num_groups, dtype=torch.int32, device=dense.device)
        args = jit.Args.from_buffer_copy(template(layout))
        args.payload, args.dense = header.data_ptr(), dense.data_ptr()
        args.tables = jit.device_tables(device).data_ptr()
        args.candidates = candidates_mask(candidates)
        stream = current_stream(device)
        select = jit.load("select_book", layout.preset, layout.dtype, device)
        jit.Call(select, args, 1, select.warps).launch(stream)
        kernel = jit.load("pooled_needs", layout.preset, layout.dtype, device)
        blocks = -(-layout.num_groups // kernel.warps)
        jit.Call(kernel, args, blocks, kernel.warps, extra=needs.data_ptr()).launch(stream)
        return needs


def to_canonical(payload: torch.Tensor, layout: PayloadLayout) -> tuple[np.ndarray, np.ndarray]:
    """(payload, spill) with references as ordinals, uint8 on the host. Synchronises."""
    host = payload.cpu().numpy().copy()
    meta = host[layout.meta_offset :][: WORD_BYTES * layout.num_groups].view(np.uint32)
    state = meta >> STATE_SHIFT
    groups = np.flatnonzero((state & STATE_SPILLED != 0) | (state == STATE_WIDE))
    if not len(groups):
        return host, np.empty(0, np.uint8)
    references: list[int] = []
    slots: dict[int, np.ndarray] = {}
    for group in groups.tolist():
        references.append(int(meta[group] & REF_MASK))
        if state[group] == STATE_WIDE:
            slots[group] = host[layout.slot_offset(group) :][: 2 * WORD_BYTES].view(np.uint32)
            references += [int(v) for v in slots[group]]
    chunks = arenas.of(payload.device.index).gather(torch.tensor(references)).numpy()
    parts: list[np.ndarray] = []
    ordinal = 0
    for group in groups.tolist():
        steps = layout.group_steps(group)
        data = chunks[ordinal][: steps * STEP_VALUES].reshape(steps, LANES, -1)
        meta[group] = (int(meta[group]) & ~REF_MASK) | ordinal
        if state[group] == STATE_WIDE:
            slots[group][:] = ordinal + 1, ordinal + 2
            halves = np.concatenate([chunks[ordinal + 1], chunks[ordinal + 2]])
            parts += [data.reshape(-1), halves[: steps * STEP_VALUES * 2]]
            ordinal += 3
            continue
        if layout.preset.pooled:
            coded = np.arange(steps)[:, None] < int(state[group]) & MARKER_MASK
        else:
            markers = host[layout.lane_offset + LANES * group :][:LANES]
            coded = np.arange(steps)[:, None] < markers[None, :]
        parts.append(np.where(coded[:, :, None], 0, data).reshape(-1).astype(np.uint8))
        ordinal += 1
    return host, np.concatenate(parts)


assert len(BANK_ROWS) <= 32, "candidates are a 32-bit mask"
assert CHUNK_BYTES == 64 * STEP_VALUES
