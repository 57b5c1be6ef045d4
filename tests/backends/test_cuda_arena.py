"""The arena's bookkeeping on the host, against a model of the device; and, on a GPU, that an arena
that shrinks and grows loses no bit.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import lct
from inputs import ALL_DTYPES, hostile, to_torch
from lct import ops
from lct.backends.cuda import arena as arenas
from lct.backends.cuda import jit
from lct.dtypes import UPCAST
from lct.errors import ArenaExhaustedError
from lct.layout import (
    CHUNK_BYTES,
    REF_MASK,
    STATE_SHIFT,
    STATE_SPILLED,
    STATE_WIDE,
    WORD_BYTES,
)
from lct.nn import room
from lct.tensor import group_needs_later
from training import BF16, assert_same_bits, random_bits

STREAM = 7
SEGMENT = arenas.SEGMENT_CHUNKS
LIMIT = 2 * SEGMENT  # chunks


class Control(ctypes.Structure):
    """struct Arena in arena.cuh."""

    _fields_ = [
        ("free_chunks", ctypes.c_int32),
        *[
            (name, ctypes.c_uint32)
            for name in ("failed_groups", "taken_total", "bitmap_words", "segment_shift")
        ],
        ("home_words", ctypes.c_uint32),
        ("host_free", ctypes.c_int32),
        ("host_words", ctypes.c_uint32),
        ("segments", ctypes.c_uint64),
        ("bitmap", ctypes.c_uint64),
    ]


class Device:
    """Driver and kernels: what is launched waits until it is run, in order.

    Stands for torch in arena.py too, with memory on the CPU.
    """

    CUresult = SimpleNamespace(CUDA_ERROR_NOT_READY=600)
    entries = tuple(jit.KERNELS)

    def __init__(self, monkeypatch: pytest.MonkeyPatch, host_segments: int = 0) -> None:
        self.queue: deque[Callable[[], object]] = deque()
        self.launches: list[str] = []
        self.waits = 0
        self.capturing = False
        self.has_pinned = self.has_memory = True
        self.live: dict[int, set[int]] = {}  # chunks by serial, as kernels took them
        self.rng = np.random.default_rng(0)

        def nothing(*_: Any, **__: Any) -> Any:
            return contextlib.nullcontext()

        stream = SimpleNamespace(cuda_stream=STREAM, synchronize=lambda: None)
        self.cuda = SimpleNamespace(
            get_device_properties=lambda _: SimpleNamespace(total_memory=1 << 30),
            current_stream=lambda _: stream,
            is_current_stream_capturing=lambda: self.capturing,
            OutOfMemoryError=torch.cuda.OutOfMemoryError,
            **dict.fromkeys(("device", "stream", "ExternalStream", "default_stream"), nothing),
        )
        monkeypatch.setattr(jit, "driver", lambda: self)
        monkeypatch.setattr(jit, "load", self.load)
        monkeypatch.setattr(arenas, "torch", self)
        monkeypatch.setenv("LCT_ARENA_MIB", str(LIMIT * CHUNK_BYTES >> 20))
        host_bytes = host_segments * SEGMENT * CHUNK_BYTES
        monkeypatch.setenv("LCT_ARENA_HOST_MIB", str(host_bytes >> 20))
        self.arena = arenas.Arena(0)
        self.control = Control.from_address(self.arena.pointer)

    # ---- torch -------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, *_: Any) -> torch.device:
        return torch.device("cpu")

    def empty(self, *size: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory and size[0] >= arenas.SEGMENT_BYTES and not self.has_pinned:
            raise RuntimeError("CUDA error: out of memory")
        if not pin_memory and size[0] >= arenas.SEGMENT_BYTES and not self.has_memory:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return torch.empty(*size, **options)

    def tensor(self, values: list[int], pin_memory: bool = False, **options: Any) -> torch.Tensor:
        assert pin_memory, "a copy from other memory waits"
        return torch.tensor(values, **options)

    # ---- the driver --------------------------------------------------------------------------

    def load(self, entry: str, *_: Any) -> jit.Loaded:
        config = jit.LAUNCH[entry]
        return jit.Loaded(self.entries.index(entry), config.warps, None, 132, config)

    def cuLaunchKernel(self, function: int, *rest: Any) -> tuple[int]:
        entry = self.entries[function]
        address = ctypes.c_void_p.from_address(rest[-2]).value
        assert address is not None
        args = jit.Args.from_buffer_copy(jit.Args.from_address(address))
        if entry == "sweep_chunks":  # torch's allocator keeps the memory until the kernel is done
            if args.dense:
                gone = list((ctypes.c_uint32 * args.capacity).from_address(args.dense))
            else:
                gone = [args.serial]
            self.queue.append(lambda serials=set(gone): self.sweep_chunks(serials))  # type: ignore
        else:
            self.queue.append(lambda: getattr(self, entry)(args))
        if entry != "report_counters":
            self.launches.append(entry)
        return (0,)

    def cuMemHostGetDevicePointer(self, host: int, _: int) -> tuple[int, int]:
        return 0, host

    def cuStreamQuery(self, _: int) -> tuple[int]:
        """Asked by who waits: the device gets on by one launch."""
        self.waits += 1
        if not self.queue:
            return (0,)
        self.run(1)
        return (self.CUresult.CUDA_ERROR_NOT_READY,)

    def run(self, most: int = 1 << 30) -> None:
        for _ in range(min(most, len(self.queue))):
            self.queue.popleft()()

    # ---- kernels -----------------------------------------------------------------------------

    def taken(self) -> np.ndarray:
        """Of every chunk in an open segment, whether it is taken; writes go to the bitmap."""
        words = self.control.bitmap_words // (SEGMENT // 32) * (SEGMENT // 32)
        return np.ctypeslib.as_array(
            (ctypes.c_uint32 * words).from_address(self.control.bitmap), (words,)
        )

    def taken_on_host(self) -> np.ndarray:
        words = self.control.host_words
        first = self.control.bitmap + arenas.HOST_CHUNKS // 8
        return np.ctypeslib.as_array((ctypes.c_uint32 * words).from_address(first), (words,))

    def used(self) -> np.ndarray:
        found = [
            np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")) + first
            for words, first in ((self.taken(), 0), (self.taken_on_host(), arenas.HOST_CHUNKS))
        ]
        return np.concatenate(found)

    def grow_arena(self, args: jit.Args) -> None:
        words = SEGMENT // 32
        first = args.first_group * words
        address = self.control.segments + 8 * args.first_group
        ctypes.c_uint64.from_address(address).value = args.dense
        if first * 32 >= arenas.HOST_CHUNKS:
            first -= arenas.HOST_CHUNKS // 32
            assert first == len(self.taken_on_host()), "the number of the next one"
            self.control.host_words = first + words
            self.taken_on_host()[first:] = 0
            self.control.host_free += SEGMENT
            return
        assert first == len(self.taken()), "the number of the first closed segment"
        self.control.bitmap_words = first + words
        self.taken()[first:] = 0
        self.control.free_chunks += SEGMENT

    def report_counters(self, args: jit.Args) -> None:
        ctypes.memmove(args.dense, args.arena, 32)
        ctypes.c_uint32.from_address(args.dense + 32).value = args.serial

    def close_segments(self, args: jit.Args) -> None:
        words = SEGMENT // 32
        end, keep = self.control.bitmap_words, args.first_group * words
        while end > keep:
            last = self.taken()[end - words : end]
            if self.control.free_chunks - SEGMENT < args.capacity or last.any():
                break
            last[:] = 0xFFFFFFFF
            self.control.free_chunks -= SEGMENT
            end -= words
        self.control.bitmap_words, self.control.home_words = end, keep

    def sweep_chunks(self, serials: set[int]) -> None:
        for serial in serials & set(self.live):
            self.free(self.live.pop(serial))

    def free(self, chunks: set[int]) -> None:
        for chunk in chunks:
            on_host = chunk >= arenas.HOST_CHUNKS
            words = self.taken_on_host() if on_host else self.taken()
            number = chunk - on_host * arenas.HOST_CHUNKS
            words[number // 32] &= np.uint32(~(1 << number % 32) & 0xFFFFFFFF)
            self.control.host_free += on_host
            self.control.free_chunks += not on_host

    def encode(self, serial: int, worst: int, takes: int, everywhere: bool) -> None:
        """Takes chunks at home, or anywhere; in the host's memory what the device has not."""
        room = self.control.free_chunks + self.control.host_free
        assert room >= worst, "a launch that was admitted has its credit"
        self.control.taken_total += takes
        on_host = max(takes - self.control.free_chunks, 0)
        takes -= on_host
        bits = np.unpackbits(self.taken_on_host().view(np.uint8), bitorder="little")
        for number in np.flatnonzero(bits == 0)[:on_host].tolist():
            self.taken_on_host()[number // 32] |= np.uint32(1 << number % 32)
            self.live.setdefault(serial, set()).add(number + arenas.HOST_CHUNKS)
        self.control.host_free -= on_host
        bits = np.unpackbits(self.taken().view(np.uint8), bitorder="little")
        free = np.flatnonzero(bits == 0)
        home = free[free < 32 * self.control.home_words]
        chosen = self.rng.permutation(home if len(home) >= takes and not everywhere else free)
        for chunk in chosen[:takes].tolist():
            self.taken()[chunk // 32] |= np.uint32(1 << chunk % 32)
            self.live.setdefault(serial, set()).add(chunk)
        self.control.free_chunks -= takes

    # ---- what callers of the arena do --------------------------------------------------------

    def launch(self, worst: int, takes: int, everywhere: bool = False) -> tuple[int, int]:
        """An encode of a new payload; (serial, launch), by which it is forgotten."""
        serial = self.arena.new_serial()
        sequence = self.arena.admit(worst, STREAM)
        self.queue.append(lambda: self.encode(serial, worst, takes, everywhere))
        self.arena.launched()
        return serial, sequence

    def check(self) -> None:
        """Every chunk that is in use lies in memory that is held, and counters are right."""
        used = set(self.used().tolist())
        assert used == set().union(*self.live.values())
        on_host = {chunk for chunk in used if chunk >= arenas.HOST_CHUNKS}
        assert self.control.free_chunks == 32 * len(self.taken()) - len(used - on_host)
        assert self.control.host_free == 32 * len(self.taken_on_host()) - len(on_host)
        for number in range(len(self.taken_on_host()) * 32 // SEGMENT):
            address = self.control.segments + 8 * (arenas.HOST_CHUNKS // SEGMENT + number)
            found = ctypes.c_uint64.from_address(address).value
            assert found == self.arena.host_segments[number].data_ptr()
        held = [segment.data_ptr() for segment in self.arena.segments]
        count = len(self.taken()) * 32 // SEGMENT
        table = (ctypes.c_uint64 * count).from_address(self.control.segments)
        assert list(table) == held[:count]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


@pytest.fixture
def backed(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device whose host backs 20 segments."""
    return Device(monkeypatch, host_segments=20)


def spill(device: Device, chunks: int) -> list[tuple[int, int]]:
    """Payloads of 100 chunks that all spill; the device is done."""
    made = [device.launch(100, 100) for _ in range(chunks // 100)]
    device.run()
    return made


def trims(device: Device, count: int) -> None:
    for _ in range(count):
        device.arena.trim()
        device.run()
    device.arena.settle()
    device.check()


def test_what_spilled_once_is_given_back(device: Device) -> None:
    arena = device.arena
    made = spill(device, 20 * SEGMENT)
    most = len(arena.segments)
    assert most >= 20
    kept = made.pop(0)
    trims(device, 2)
    assert len(arena.segments) == most, "all of it is in use"
    for payload in made:
        arena.forget(*payload)
    waits = device.waits
    for _ in range(4):  # a sweep, the host hears of it, what was in use before counts no more
        arena.trim()
        device.launch(1, 0)
        device.run()
    assert device.waits == waits, "nothing waits for the device"
    trims(device, 0)
    # 100 chunks in use, the limit, and what rounds up to a segment.
    assert len(arena.segments) == 3
    assert set(device.live) == {kept[0]}
    launches = len(device.launches)
    arena.trim()
    assert len(device.launches) == launches, "nothing to close: nothing is launched"
    spill(device, 6 * SEGMENT)
    assert len(arena.segments) >= 6, "and it grows again"
    device.check()


def test_segments_in_use_stay_with_all_below(device: Device) -> None:
    arena = device.arena
    made = spill(device, 10 * SEGMENT)
    top = [payload for payload in made if max(device.live[payload[0]]) // SEGMENT == 7][-1]
    for payload in made:
        if payload != top:
            arena.forget(*payload)
    arena.settle()
    trims(device, 3)
    assert len(arena.segments) == 8
    arena.forget(*top)
    arena.settle()
    trims(device, 3)
    assert len(arena.segments) == 2


def test_growth_waits_until_it_knows_what_was_closed(device: Device) -> None:
    arena = device.arena
    for payload in spill(device, 10 * SEGMENT):
        arena.forget(*payload)
    arena.settle()
    for _ in range(3):  # the first finds that all was in use
        arena.trim()
    total = arena.total_chunks
    assert device.launches.count("close_segments") == 1, "one at a time"
    arena.reserve(CHUNK_BYTES * (LIMIT + SEGMENT))
    assert arena.total_chunks == LIMIT + SEGMENT < total
    device.run()
    device.check()


def test_credit_while_segments_are_being_closed(device: Device) -> None:
    """The limit is there for those that come after, however much was free before."""
    arena = device.arena
    for payload in spill(device, 10 * SEGMENT):
        arena.forget(*payload)
    arena.settle()
    arena.trim()
    device.launch(500, 500)  # in flight when segments are closed
    arena.trim()
    assert device.launches[-1] == "close_segments"
    waits, grown = device.waits, device.launches.count("grow_arena")
    for _ in range(10):
        device.launch(100, 0)
    assert device.waits == waits
    device.launch(100, 0)
    assert device.waits > waits, "more than the limit: what is free must be known"
    assert device.launches.count("grow_arena") == grown
    device.run()
    device.check()


def test_launches_in_flight_share_half_of_the_limit(device: Device) -> None:
    """One that needs more by itself gets it."""
    arena = device.arena
    for _ in range(3 * LIMIT // 100):
        device.launch(100, 0)
    assert arena.total_chunks == LIMIT // 2 and device.waits
    device.launch(LIMIT - 100, 0)
    assert arena.total_chunks == LIMIT
    for _ in range(3):
        device.launch(LIMIT - 100, 0)
    assert arena.total_chunks == LIMIT
    device.run()
    device.check()


def test_the_host_backs_what_is_hardly_ever_taken(backed: Device) -> None:
    """Nothing waits, and the device has little, until data really spills."""
    arena = backed.arena
    for _ in range(15 * SEGMENT // 100):
        backed.launch(100, 0)
    assert not backed.waits and not backed.launches.count("sweep_chunks")
    assert arena.total_chunks == SEGMENT and len(arena.host_segments) == 15
    assert arena.host_bytes == 15 * arenas.SEGMENT_BYTES < 1 << 26, "pinned memory: powers of two"
    backed.run()
    backed.check()
    made = [backed.launch(100, 100) for _ in range(10)]
    backed.run()
    assert max(backed.used()) >= arenas.HOST_CHUNKS, "more than the device had"
    arena.settle()
    backed.launch(100, 0)
    assert arena.total_chunks == 2 * SEGMENT, "it has more for the next"
    backed.launch(100, 0)
    assert arena.total_chunks == 2 * SEGMENT
    for payload in made:
        arena.forget(*payload)
    trims(backed, 3)
    assert not backed.live and arena.total_chunks == SEGMENT
    assert len(arena.host_segments) == 15, "pinned memory stays"


def test_the_host_backs_no_more_than_its_limit(backed: Device) -> None:
    arena = backed.arena
    for _ in range(30 * SEGMENT // 100):
        backed.launch(100, 0)
    assert len(arena.host_segments) == 20 and arena.total_chunks == SEGMENT
    assert backed.waits, "then launches wait for one another"
    backed.run()
    backed.check()


def test_a_host_without_memory_is_asked_once(backed: Device) -> None:
    arena = backed.arena
    backed.has_pinned = False
    for _ in range(3 * LIMIT // 100):
        backed.launch(100, 0)
    assert not arena.host_segments and arena.host_limit_chunks == 0
    assert arena.total_chunks == LIMIT // 2 and backed.waits
    backed.has_pinned = True
    device_alone = backed.launches.count("grow_arena")
    assert device_alone == LIMIT // 2 // SEGMENT
    backed.run()
    backed.check()


@pytest.mark.parametrize("host_segments", [0, 20])
def test_a_device_that_is_full(host_segments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host backs, or finished launches give back, needs no memory of the device."""
    device = Device(monkeypatch, host_segments)
    arena = device.arena
    if not host_segments:
        device.launch(100, 0)
    device.has_memory = False
    held = arena.total_chunks
    for _ in range(3 * LIMIT // 100):
        device.launch(100, 0)
    assert arena.total_chunks == held and bool(device.waits) != bool(host_segments)
    device.run()
    made = [device.launch(50, 50) for _ in range(4)]
    device.run()
    device.check()
    with pytest.raises(ArenaExhaustedError, match="nothing was overwritten"):
        device.launch(21 * SEGMENT, 0)
    for payload in made:
        arena.forget(*payload)
    arena.settle()
    device.check()


def test_what_is_reserved_stays(device: Device) -> None:
    arena = device.arena
    arena.reserve(CHUNK_BYTES * 5 * SEGMENT)
    for payload in spill(device, 9 * SEGMENT):
        arena.forget(*payload)
    arena.settle()
    trims(device, 3)
    assert len(arena.segments) == 5


@pytest.mark.parametrize("after", [False, True])
def test_graphs_keep_what_there_is(after: bool, device: Device) -> None:
    arena = device.arena
    for payload in spill(device, 9 * SEGMENT):
        arena.forget(*payload)
    arena.settle()
    device.capturing = True
    if after:
        arena.note_capture()
        device.capturing = False
    launches = list(device.launches)
    for _ in range(3):
        arena.trim()
    arena.collect()
    assert device.launches == launches
    device.capturing = False
    trims(device, 2)
    assert len(arena.segments) == (9 if after else 2)


def test_what_goes_during_a_capture_is_swept_after_it(device: Device) -> None:
    (payload,) = spill(device, 100)
    device.arena.forget(*payload)
    device.capturing = True
    device.arena.collect()
    device.capturing = False
    assert device.arena.settle() == 0


def test_a_sweep_in_a_graph_is_of_one_payload(device: Device) -> None:
    made = spill(device, 300)
    serial, _ = made[1]
    device.arena.sweep_in_graph(serial, STREAM)
    device.run()
    device.check()
    assert set(device.live) == {made[0][0], made[2][0]}


def test_what_goes_waits_for_no_other_thread(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may go in a thread that holds what the other one wants."""
    monkeypatch.setattr(arenas, "_SWEEP_PAYLOADS", 2)
    monkeypatch.setattr(arenas, "_SWEEP_PAYLOADS_OF_MANY", 2)
    made = spill(device, 300)
    device.arena.settle()
    entered, leave = threading.Event(), threading.Event()

    def launch() -> None:
        with device.arena.lock:
            entered.set()
            assert leave.wait(30)

    other = threading.Thread(target=launch)
    other.start()
    assert entered.wait(30)
    for serial, launched in made[:2]:
        device.arena.forget(serial, launched)
    assert len(device.arena._gone) == 2
    leave.set()
    other.join()
    device.arena.forget(*made[2])
    device.run()
    assert not device.live and not device.arena._gone


@pytest.mark.parametrize("host_segments", [0, 1, 3, 20])
def test_long_runs(
    host_segments: int, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Calls in random order, on a device that comes to them sooner or later."""
    device = Device(monkeypatch, host_segments)
    arena = device.arena
    kept: list[tuple[int, int]] = []
    sizes = set()
    for _ in range(3000):
        choice = rng.random()
        if choice < 0.60:
            worst = int(rng.integers(1, LIMIT // 2))
            takes = int(worst * rng.choice([0, 0.02, 1], p=[0.5, 0.3, 0.2]))
            kept.append(device.launch(worst, takes, everywhere=rng.random() < 0.05))
        elif choice < 0.65:
            rng.shuffle(kept)
            for _ in range(int(rng.integers(0, len(kept) + 1))):
                arena.forget(*kept.pop())
        elif choice < 0.75:
            arena.trim()
        elif choice < 0.77:
            arena.collect()
        else:
            device.run(int(rng.integers(0, 40)))
        device.check()
        sizes.add(len(arena.segments))
    assert len(sizes) > 5 and device.launches.count("close_segments") > 10
    assert min(host_segments, 15) <= len(arena.host_segments) <= host_segments
    for payload in kept:
        arena.forget(*payload)
    arena.settle()
    trims(device, 3)
    assert len(arena.segments) == (1 if host_segments else 2) and not device.live


# ---- on a GPU ------------------------------------------------------------------------------------

GROUP = 8192  # values; each of these takes a chunk where its bits are random
HOST_COUNTERS = slice(24, 32)  # host_free and host_words in the control block


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[arenas.Arena]:
    """The arena of the GPU, with a limit of one segment, no larger than it must be, and without the
    host's memory.
    """
    own = arenas.of(0)
    gc.collect()
    own.settle()
    assert not own.counters().host_used_chunks
    host = own._control[HOST_COUNTERS].clone()
    own._control[HOST_COUNTERS] = 0
    monkeypatch.setattr(own, "host_segments", [])
    monkeypatch.setattr(own, "host_limit_chunks", 0)
    monkeypatch.setattr(own, "_free_host", 0)
    total = own.total_chunks
    monkeypatch.setattr(own, "limit_chunks", SEGMENT)
    monkeypatch.setattr(own, "_reserved_chunks", 0)
    monkeypatch.setattr(own, "_captured", False)  # graphs of other tests are not replayed
    lct.encode(torch.zeros(GROUP, dtype=BF16, device="cuda"))
    shrink(own)
    yield own
    gc.collect()
    own.settle()  # what is on its way says nothing of the host's memory
    torch.cuda.synchronize()
    own._control[HOST_COUNTERS] = host
    if own.total_chunks < total:  # which graphs of other tests rely on
        own._grow(total - own.total_chunks)


def shrink(own: arenas.Arena) -> int:
    """Trims until nothing more can go; segments then."""
    gc.collect()
    for _ in range(4):
        own.trim()
        own.settle()
    return len(own.segments)


def spilling(segments: float) -> torch.Tensor:
    """Random bits that take so many segments' chunks."""
    return random_bits(int(segments * SEGMENT), GROUP).cuda()


def chunks_of(tensor: lct.CompressedTensor) -> list[int]:
    """Chunks that a BF16 payload holds."""
    layout = tensor.layout
    meta = tensor.payload[layout.meta_offset :][: WORD_BYTES * layout.num_groups]
    words = meta.cpu().numpy().view(np.uint32)
    state = words >> STATE_SHIFT
    assert not (state == STATE_WIDE).any()
    return (words[state & STATE_SPILLED != 0] & REF_MASK).tolist()


@pytest.mark.gpu
def test_memory_comes_back_and_bits_stay(own: arenas.Arena) -> None:
    small_dense, large_dense = spilling(0.1), spilling(8)
    small = lct.encode(small_dense)
    after = set()
    for _ in range(3):
        large = lct.encode(large_dense)
        assert own.settle() >= 8 * SEGMENT
        full, allocated = shrink(own), torch.cuda.memory_allocated()
        assert full >= 8, "all of it is in use"
        assert_same_bits(large_dense, large.decode())
        payload_bytes = large.payload.nbytes
        del large
        given_back = full - shrink(own)
        assert given_back >= 6
        freed = allocated - torch.cuda.memory_allocated()
        assert freed >= payload_bytes + given_back * SEGMENT * CHUNK_BYTES
        after.add((len(own.segments), torch.cuda.memory_allocated()))
        assert_same_bits(small_dense, small.decode())
    assert len(after) == 1
    assert own.counters().total_chunks == own.total_chunks


@pytest.mark.gpu
def test_a_chunk_in_use_keeps_its_segment(own: arenas.Arena) -> None:
    denses = [spilling(1 / 8) for _ in range(64)]
    payloads = [lct.encode(dense) for dense in denses]
    highest = [max(chunks_of(payload)) // SEGMENT for payload in payloads]
    top = highest.index(max(highest))
    dense, payload = denses[top], payloads[top]
    del payloads
    assert shrink(own) == highest[top] + 1
    assert_same_bits(dense, payload.decode())
    # Values that fit give the chunks back, and new ones are taken in the first segments.
    payload.encode_(torch.zeros_like(dense))
    assert shrink(own) < highest[top] + 1
    payload.encode_(dense)
    assert_same_bits(dense, payload.decode())
    assert max(chunks_of(payload)) // SEGMENT < highest[top]


@pytest.mark.gpu
def test_hostile_values_while_the_arena_shrinks_and_grows(
    own: arenas.Arena, rng: np.random.Generator
) -> None:
    inputs = [
        (to_torch(np.tile(values, int(rng.integers(1, 40))), dtype), dtype)
        for dtype in ALL_DTYPES
        for values in hostile(dtype).values()
    ]
    # Values that all spill, and values that do not, for the same payloads.
    rewritten = [spilling(1.5), torch.zeros_like(spilling(1.5))]
    before = own.settle()
    kept: list[tuple[torch.Tensor, lct.CompressedTensor]] = []
    streams = [torch.cuda.default_stream(), torch.cuda.Stream()]
    stream = streams[0]
    sizes = set()
    for _ in range(600):
        if rng.random() < 0.03:
            torch.cuda.synchronize()  # what is read on one stream and dropped belongs to the other
            stream = streams[rng.integers(2)]
        choice = rng.random()
        with torch.cuda.stream(stream):
            if choice < 0.5:
                dense, dtype = inputs[rng.integers(len(inputs))]
                dense = dense.cuda()
                kept.append((dense, lct.encode(dense, upcast=dtype is UPCAST)))
            elif choice < 0.6:
                dense = rewritten[rng.integers(2)]
                kept.append((dense, lct.encode(dense)))
            elif choice < 0.7:
                for number, (dense, payload) in enumerate(kept):
                    if any(dense is values for values in rewritten):
                        other = rewritten[rng.integers(2)]
                        kept[number] = other, payload.encode_(other)
            elif choice < 0.75:
                rng.shuffle(kept)
                del kept[: int(rng.integers(len(kept) + 1))]
            elif choice < 0.9:
                ops.trim_arenas()
            elif kept:
                dense, payload = kept[rng.integers(len(kept))]
                assert_same_bits(dense, payload.decode())
        sizes.add(len(own.segments))
    torch.cuda.synchronize()
    for dense, payload in kept:
        assert_same_bits(dense, payload.decode())
    assert len(sizes) > 2
    assert own.counters().failed_groups == 0
    used = own.settle()
    assert own.counters().used_chunks == used
    spill_bytes = sum(payload.group_counts().spill_bytes for _, payload in kept)
    assert (used - before) * CHUNK_BYTES == spill_bytes


@pytest.mark.gpu
def test_steps_of_an_optimizer_while_the_arena_shrinks(own: arenas.Arena) -> None:
    torch.manual_seed(0)
    dense = torch.nn.Linear(1024, 1024, bias=False, dtype=BF16, device="cuda")
    compressed = torch.nn.Linear(1024, 1024, bias=False, dtype=BF16, device="cuda")
    compressed.load_state_dict(dense.state_dict())
    lct.compress_(compressed)
    torch_sgd = torch.optim.SGD(dense.parameters(), lr=0.1, momentum=0.9)
    lct_sgd = lct.optim.SGD(compressed.parameters(), lr=0.1, momentum=0.9)
    for step in range(30):
        wide = torch.exp2(8 * torch.randn(1024, 1024, device="cuda") * (step % 3))
        grad = (torch.randn(1024, 1024, device="cuda") * wide * 1e-3).bfloat16()
        for model in (dense, compressed):
            model.weight.grad = grad.clone()
        torch_sgd.step()
        lct_sgd.step()
        activation = spilling(1 + step % 4)
        payload = lct.encode(activation)
        own.trim()
        assert_same_bits(dense.weight, compressed.weight, f"weight after step {step}")
        assert_same_bits(activation, payload.decode())
        del payload
    assert own.counters().failed_groups == 0


@pytest.mark.gpu
def test_bits_in_the_hosts_memory() -> None:
    """Decoded, moved to the CPU, written anew and given back; what comes next is the device's."""
    own = arenas.of(0)
    gc.collect()
    own.settle()
    first = own.counters()
    assert not first.host_used_chunks and own.host_limit_chunks >= SEGMENT
    values = random_bits(first.free_chunks + SEGMENT // 2, GROUP).cuda()
    coded = lct.encode(values)
    assert max(chunks_of(coded)) >= arenas.HOST_CHUNKS
    assert_same_bits(coded.decode(), values)
    assert_same_bits(coded.to("cpu").decode().cuda(), values)
    other = random_bits(*values.shape).cuda()
    coded.encode_(other)
    assert_same_bits(coded.decode(), other)
    own.settle()
    another = lct.encode(values)  # the device's part has grown for it
    assert_same_bits(another.decode(), values)
    del coded, another
    gc.collect()
    own.settle()
    last = own.counters()
    assert not last.host_used_chunks and last.total_chunks > first.total_chunks


@pytest.mark.gpu
def test_reserved_memory_stays(own: arenas.Arena) -> None:
    lct.reserve_arena(CHUNK_BYTES * 6 * SEGMENT)
    payload = lct.encode(spilling(9))
    assert own.settle() >= 9 * SEGMENT
    del payload
    assert shrink(own) >= 6


@pytest.mark.gpu
def test_nothing_is_trimmed_after_a_capture(own: arenas.Arena) -> None:
    first, second = spilling(0.5), spilling(0.5)
    static = first.clone()
    payload = lct.encode(static)
    large = lct.encode(spilling(6))
    own.settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        own.trim()
        payload.encode_(static)
        out = payload.decode()
    total = own.total_chunks
    del large
    own.settle()
    for values in (second, torch.zeros_like(first), first):
        static.copy_(values)
        graph.replay()
        torch.cuda.synchronize()
        assert shrink(own) * SEGMENT == total == own.counters().total_chunks
        assert_same_bits(values, out)
    own.check()
    torch.cuda.synchronize()
    del graph


@pytest.mark.gpu
def test_a_replay_without_room_for_what_it_makes_is_told(own: arenas.Arena) -> None:
    """And reads no chunks that are not there."""
    values = spilling(4)
    static = torch.zeros_like(values)
    lct.encode(static)
    shrink(own)
    before = own.counters().used_chunks
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        noise = torch.full((2 * values.nbytes,), 0xFF, dtype=torch.uint8, device="cuda")
        del noise  # what the payload's memory holds
        out = lct.encode(static).decode()
    static.copy_(values)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    with pytest.raises(ArenaExhaustedError, match="found no room in the arena"):
        own.check()
    # Every block takes its chunks before it knows what it needs.
    own.reserve(4 * SEGMENT * CHUNK_BYTES)
    graph.replay()
    assert_same_bits(values, out)
    static.zero_()
    graph.replay()
    assert_same_bits(static, out)
    own.check()
    assert own.counters().used_chunks == before
    torch.cuda.synchronize()
    del graph


@pytest.mark.gpu
def test_what_found_no_room_is_told_once(own: arenas.Arena) -> None:
    """Whatever counters are on their way to the host then."""
    values = spilling(4)
    static = torch.zeros_like(values)
    lct.encode(static)
    shrink(own)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = lct.encode(static)
    static.copy_(values)
    graph.replay()
    for _ in range(3):
        own._launches_since += 1
        own._checkpoint()
        torch.cuda._sleep(1_000_000)
    own._hear()
    with pytest.raises(ArenaExhaustedError, match="found no room in the arena"):
        lct.encode(static[:GROUP])
    torch.cuda.synchronize()
    own._poll()
    assert_same_bits(lct.encode(static[:GROUP]).decode(), static[:GROUP])
    own.check()
    del graph, out


@pytest.mark.gpu
def test_sweeps_and_trims_do_not_wait(own: arenas.Arena) -> None:
    for _ in range(2):  # the first compiles kernels and makes pinned memory
        payloads = [lct.encode(spilling(1)) for _ in range(4)]
        own.settle()
        torch.cuda.synchronize()
        del payloads
        gc.collect()
        torch.cuda._sleep(2_000_000_000)
        done = torch.cuda.Event()
        done.record()
        torch.cuda.set_sync_debug_mode("error")
        try:
            own.collect()
            own.trim()
            own.trim()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waited = done.query()
        shrink(own)
    assert not waited


@pytest.mark.gpu
def test_training_steps_give_back_what_the_first_spilled(
    own: arenas.Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = 0

    def after_the_first(dense: torch.Tensor, upcast: bool) -> Callable[[], np.ndarray | None]:
        needs = group_needs_later(dense, upcast)
        return lambda: needs() if step else None

    monkeypatch.setattr(room, "group_needs_later", after_the_first)
    monkeypatch.setattr(room, "_rooms", {})
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(64 * GROUP, generator=generator) * torch.exp2(
        3 * torch.randn(64 * GROUP, generator=generator)
    )
    values = wide.bfloat16().cuda()
    sizes = []
    for step in range(10):  # noqa: B007 - what is above reads it
        x = y = values.clone().requires_grad_()
        with lct.compress_activations():
            for _ in range(60):
                y = (y * 1).abs()
        sizes.append(len(own.segments))
        y.sum().backward()
        del y
        assert_same_bits(values.sign(), x.grad)
        torch.cuda.synchronize()
    assert max(sizes) > 6 and sizes[-1] < 4, sizes
