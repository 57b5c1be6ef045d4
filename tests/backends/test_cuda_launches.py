"""In what order the CUDA backend asks for credit and launches, and with what arguments: needs no
GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lct import ops
from lct.backends.cuda import codec, jit
from lct.dtypes import DTYPES, UPCAST, DType
from lct.errors import ArenaExhaustedError
from lct.layout import PayloadLayout
from lct.presets import PRESETS, RAW

LAYOUT = PayloadLayout(PRESETS["pooled"], DTYPES["bfloat16"], 8192 * 8, 748)


class Lock:
    """Counts how often it is held."""

    held = 0

    def __enter__(self) -> None:
        self.held += 1

    def __exit__(self, *_: Any) -> None:
        self.held -= 1


class Arena:
    """Grants ``grants`` requests, then none; each is held until it is told of the launch."""

    def __init__(self, log: list[Any], limit_chunks: int, grants: int) -> None:
        self.log, self.limit_chunks, self.grants = log, limit_chunks, grants
        self.total_chunks = 1
        self.pointer = self.serial = 0
        self.lock = Lock()

    def new_serial(self) -> int:
        self.serial += 1
        return self.serial

    def forget(self, serial: int, last_launch: int) -> None:
        pass

    def admit(self, chunks: int, stream: int) -> int:
        assert self.lock.held
        if not self.grants:
            raise ArenaExhaustedError("no memory; nothing was overwritten")
        self.grants -= 1
        self.log.append(f"admit {chunks}")
        return 1

    def launched(self) -> None:
        assert self.lock.held, "a checkpoint of another thread would count what is not enqueued"

    def note_capture(self) -> None:
        pass

    def sweep_in_graph(self, serial: int, stream: int) -> None:
        self.log.append(f"sweep {serial}")


class Held:
    def __init__(self, arena: Arena) -> None:
        self.arena, self.last, self.serial = arena, 0, 5

    def note(self, sequence: int) -> None:
        self.last = sequence


class Recorder:
    def __init__(self, log: list[Any], name: str) -> None:
        self.log, self.name = log, name

    def launch(self, stream: int, *, early: bool = False) -> None:
        # Nothing else may still run, and the encode waits for the sweep through the search.
        earlier = {"search": ("sweep",)}.get(self.name, ("search",))
        assert not early or self.log[-1].startswith(earlier)
        self.log.append(f"{self.name} early" if early else self.name)


def launches(
    monkeypatch: pytest.MonkeyPatch,
    limit_chunks: int,
    grants: int,
    *,
    capturing: bool = False,
    fresh: bool = False,
    wave: int = 2,
) -> tuple[list[Any], ArenaExhaustedError | None]:
    """What an encode of ``LAYOUT`` asks for and launches, and how it ends."""
    log: list[Any] = []
    call = codec._EncodeCall.__new__(codec._EncodeCall)
    call.args = jit.Args.from_buffer_copy(codec.template(LAYOUT))
    call.args.fresh = fresh
    call.search, call.code = Recorder(log, "search"), Recorder(log, "code")  # type: ignore
    call.kernel = type("Kernel", (), {"warps": 1, "blocks_at_once": lambda *_: wave})()
    call.memory = codec.SharedMemory(0, 0)
    call.worst_chunks = LAYOUT.num_groups

    def over_groups(kernel: Any, args: Any, groups: Any, *_: Any) -> Recorder:
        return Recorder(log, f"code {groups[0].first_group}-{groups[0].end_group}")

    monkeypatch.setattr(codec, "call_over_groups", over_groups)
    monkeypatch.setattr(codec, "is_capturing", lambda: capturing)
    try:
        call.launch(LAYOUT, Held(Arena(log, limit_chunks, grants)), 0)  # type: ignore
    except ArenaExhaustedError as error:
        return log, error
    return log, None


def test_the_header_is_written_when_there_is_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for a book writes it: without credit the old values would be read with it."""
    assert launches(monkeypatch, 100, 1) == (["admit 8", "search", "code early"], None)
    log, error = launches(monkeypatch, 100, 0)
    assert log == [] and "nothing was overwritten" in str(error)
    log, error = launches(monkeypatch, 4, 0)
    assert log == [] and "nothing was overwritten" in str(error)


def test_pieces_say_how_far_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    log, error = launches(monkeypatch, 4, 9)
    first = ["admit 2", "search", "code 0-2 early", "admit 2", "code 2-4"]
    assert (log, error) == ([*first, "admit 2", "code 4-6", "admit 2", "code 6-8"], None)
    log, error = launches(monkeypatch, 4, 2)
    assert log == first
    assert "of 8 groups the first 4 have new values" in str(error)


@pytest.mark.parametrize(
    ("limit_chunks", "wave", "pieces"),
    [
        (6, 2, [2, 2, 2, 2]),
        (7, 3, [3, 3, 2]),
        (7, 2, [2, 2, 2, 2]),
        (6, 1, [3, 3, 2]),
        (4, 5, [2, 2, 2, 2]),  # less than a wave: all that may go
    ],
)
def test_pieces_are_whole_waves(
    limit_chunks: int, wave: int, pieces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, error = launches(monkeypatch, limit_chunks, 9, wave=wave)
    assert error is None
    assert [int(entry.split()[1]) for entry in log if entry.startswith("admit")] == pieces


def test_captured_encodes_in_place_keep_their_book(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that find no room in a replay keep their values, and need the book that codes them.
    What the graph makes gives back what the replay before took.
    """
    assert launches(monkeypatch, 100, 0, capturing=True) == (["code 0-8"], None)
    in_graph = launches(monkeypatch, 100, 0, capturing=True, fresh=True)
    assert in_graph == (["sweep 5", "search early", "code 0-8 early"], None)


PROCESSOR_SHARED_BYTES = 228 << 10


class LaunchDriver:
    """A driver that takes any launch, and has the classes of the real one."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(pytest.importorskip("cuda.bindings.driver"), name)

    def cuLaunchKernel(self, *launch: Any) -> tuple[int]:
        self.launches.append(launch)
        return (0,)

    def cuLaunchKernelEx(self, config: Any, function: int, pointers: int, extra: int) -> tuple[int]:
        (attribute,) = config.attrs
        assert attribute.value.programmaticStreamSerializationAllowed == 1
        blocks = config.gridDimX, config.gridDimY, config.gridDimZ
        threads = config.blockDimX, config.blockDimY, config.blockDimZ
        stream = int(config.hStream)
        launch = function, *blocks, *threads, config.sharedMemBytes, stream, pointers, extra
        self.launches.append(("early", *launch))
        return (0,)


@pytest.mark.parametrize(
    ("blocks", "each"),
    [(600, None), (660, None), (661, 3), (780, 3), (1320, 5), (1600, 5), (1981, None)],
)
def test_even_waves_have_room_for_their_blocks(
    blocks: int, each: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five blocks of 40 kB a multiprocessor at most; None: as many as there is room for."""
    monkeypatch.setattr(jit.Loaded, "blocks_at_once", lambda *_: 5 * 132)
    config = jit.LAUNCH["pooled_decode_list"]
    kernel = jit.Loaded(7, 8, None, 132, config, processor_shared_bytes=PROCESSOR_SHARED_BYTES)
    found = kernel.shared_for_even_waves(blocks, 8, 40_000)
    room = kernel.processor_shared_bytes // (found + jit.RESERVED_SHARED_BYTES)
    assert (found == 40_000) if each is None else (room == each)


@pytest.mark.parametrize("starts_early", [False, True])
def test_early_launches_are_those_launches(
    starts_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = LaunchDriver()
    monkeypatch.setattr(jit, "driver", lambda: driver)
    config = jit.LAUNCH["pooled_encode"]
    kernel = jit.Loaded(7, 8, None, 132, config, 2**20, starts_early=starts_early)
    call = jit.Call(kernel, jit.Args(), 5, 4, shared_bytes=1000)
    for stream in (0, 11, 12):
        call.launch(stream)
        call.launch(stream, early=True)
        plain, early = driver.launches[-2:]
        assert plain[:9] == (7, 5, 1, 1, 128, 1, 1, 1000, stream)
        assert early == (("early", *plain) if starts_early else plain)


@dataclass
class Launch:
    """One of a recorded kernel's launches: (payload, dense) of its tensors, in order."""

    entry: str
    addresses: list[tuple[int, int]]


class Driver:
    """A driver that records launches of the codec as the kernels read them."""

    entries = tuple(jit.KERNELS)
    loads = 0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[Launch] = []
        self.reserves: list[set[int]] = []
        self.before: Callable[[], object] | None = None  # called once, before a launch reads
        self.log: list[Any] = []
        self.arena: Any = Arena(self.log, limit_chunks=1000, grants=99)
        monkeypatch.setattr(jit, "driver", lambda: self)
        monkeypatch.setattr(jit, "load", self.load)
        monkeypatch.setattr(jit, "device_tables", lambda device: torch.zeros(1))
        monkeypatch.setattr(codec.arenas, "of", lambda device: self.arena)
        monkeypatch.setattr(codec, "current_device", lambda: -1)  # what CPU tensors say
        monkeypatch.setattr(codec, "current_stream", lambda device: 0)
        monkeypatch.setattr(codec, "is_capturing", lambda: False)

    def load(self, entry: str, preset: Any, dtype: Any, device: int) -> jit.Loaded:
        self.loads += 1
        kernel = jit.KERNELS[entry]
        number = self.entries.index(entry)
        return jit.Loaded(
            number, kernel.warps, None, 132, jit.LAUNCH[entry], 2**20, PROCESSOR_SHARED_BYTES
        )

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(
        self, function: int, threads: int, shared_bytes: int
    ) -> tuple[int, int]:
        blocks = jit.LAUNCH[self.entries[function]].measured_min_blocks
        room = PROCESSOR_SHARED_BYTES // (shared_bytes + jit.RESERVED_SHARED_BYTES)
        return 0, min(blocks, room)

    def cuLaunchKernel(self, function: int, blocks: int, *rest: Any) -> tuple[int]:
        *_, threads, _, _, shared_bytes, _, pointers, _ = rest
        if self.before is not None:
            before, self.before = self.before, None
            before()
        entry = self.entries[function]
        address = ctypes.c_void_p.from_address(pointers).value
        if entry == "select_books":
            every: Any = codec.TensorList.from_address(address)
            addresses = [(args.payload, args.dense) for args in every.tensors[:blocks]]
        elif entry.endswith("_list"):
            addresses = self._read_list(address, blocks, threads // 32, shared_bytes)
        else:
            args = jit.Args.from_address(address)
            addresses = [(args.payload, args.dense)]
        self.launches.append(Launch(entry, addresses))
        self.reserves.append(self.read_reserve(entry, address))
        return (0,)

    def read_reserve(self, entry: str, address: int | None) -> set[int]:
        """Whether blocks ask for room on the device, of all tensors of a launch."""
        assert address is not None
        if entry.endswith("_list") or entry == "select_books":
            every: Any = codec.TensorList.from_address(address)
            return {args.reserve for args in every.tensors if args.num_groups}
        return {jit.Args.from_address(address).reserve}

    def _read_list(
        self, address: int | None, blocks: int, warps: int, shared_bytes: int
    ) -> list[tuple[int, int]]:
        """Checks that blocks take every group of every tensor once, as the kernel finds them."""
        assert address is not None
        every: Any = codec.TensorList.from_address(address)
        taken = []
        for block in range(blocks):
            number = sum(block >= every.first_block[k] for k in range(1, jit.MOST_TENSORS))
            args = every.tensors[number]
            first = args.first_group + (block - every.first_block[number]) * warps
            taken += [(number, g) for g in range(first, first + warps) if g < args.end_group]
            assert shared_bytes >= codec.ENCODE_TABLE_BYTES + 4 * warps * args.capacity
        tensors = [args for args in every.tensors if args.num_groups]
        assert taken == [(k, g) for k, args in enumerate(tensors) for g in range(args.num_groups)]
        return [(args.payload, args.dense) for args in tensors]


def pooled_layout(groups: int, capacity: int = 748, dtype: DType | None = None) -> PayloadLayout:
    """A layout of its own, with a tail: what stands ready for another one does not count."""
    dtype = DTYPES["bfloat16"] if dtype is None else dtype
    return PayloadLayout(PRESETS["pooled"], dtype, groups * 8192 - 100, capacity)


def buffers(layouts: Sequence[PayloadLayout]) -> tuple[list[Any], list[torch.Tensor]]:
    """Parts and outs of a list decode; values are of no account."""
    types = {name: getattr(torch, name) for name in DTYPES}
    parts, outs = [], []
    for layout in layouts:
        parts.append((torch.zeros(layout.size_bytes, dtype=torch.uint8), layout))
        outs.append(torch.zeros(layout.num_values, dtype=types[layout.dtype.name]))
    return parts, outs


def addresses(parts: Sequence[Any], outs: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return [(part[0].data_ptr(), out.data_ptr()) for part, out in zip(parts, outs, strict=True)]


def test_a_list_stands_ready_for_its_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    layouts = [pooled_layout(1 + 9 * k, 700 + 4 * k) for k in range(7)]
    first, second = buffers(layouts), buffers(layouts)
    codec.decode_list(*first)
    assert driver.loads == 1
    codec.decode_list(*second)
    assert driver.loads == 1  # nothing was made anew
    assert driver.launches == [
        Launch("pooled_decode_list", addresses(*first)),
        Launch("pooled_decode_list", addresses(*second)),
    ]
    for other in (pooled_layout(2), pooled_layout(2, 704)):
        codec.decode_list(*buffers([layouts[0], other]))
    assert driver.loads == 3  # another number of values, another capacity


def test_a_list_that_is_being_launched_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread that decodes tensors of the same layouts meanwhile."""
    driver = Driver(monkeypatch)
    layouts = [pooled_layout(2) for _ in range(3)]
    codec.decode_list(*buffers(layouts))
    first, second = buffers(layouts), buffers(layouts)
    driver.launches.clear()
    driver.before = lambda: codec.decode_list(*second)
    codec.decode_list(*first)
    assert [launch.addresses for launch in driver.launches] == [
        addresses(*second),
        addresses(*first),
    ]


@pytest.mark.parametrize(
    ("count", "sizes"), [(1, [1]), (16, [16]), (17, [16, 1]), (40, [16, 16, 8])]
)
def test_a_launch_takes_sixteen(
    monkeypatch: pytest.MonkeyPatch, count: int, sizes: list[int]
) -> None:
    driver = Driver(monkeypatch)
    parts, outs = buffers([pooled_layout(1 + k % 5) for k in range(count)])
    codec.decode_list(parts, outs)
    assert [len(launch.addresses) for launch in driver.launches] == sizes
    found = [pair for launch in driver.launches for pair in launch.addresses]
    assert found == addresses(parts, outs)


def test_a_list_falls_apart_by_what_its_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    bfloat16, float32 = DTYPES["bfloat16"], DTYPES["float32"]
    layouts = [
        pooled_layout(1),
        pooled_layout(1, dtype=float32),
        PayloadLayout(RAW, bfloat16, 5, 0),
        pooled_layout(2),
        pooled_layout(1, dtype=UPCAST),
        PayloadLayout(PRESETS["clean"], bfloat16, 70_000, 25),
        pooled_layout(3),  # its out is not aligned
        pooled_layout(2, dtype=float32),
    ]
    parts, outs = buffers(layouts)
    parts[2][0][16:] = torch.arange(10)
    outs[6] = torch.zeros(layouts[6].num_values + 1, dtype=torch.bfloat16)[1:]
    codec.decode_list(parts, outs)
    pairs = addresses(parts, outs)
    assert outs[2].view(torch.uint8).tolist() == list(range(10))
    fixed, unaligned, *lists = driver.launches
    assert fixed == Launch("fixed_decode", [pairs[5]])
    assert (unaligned.entry, unaligned.addresses[0][0]) == ("pooled_decode", pairs[6][0])
    assert unaligned.addresses[0][1] % 16 == 0
    assert lists == [
        Launch("pooled_decode_list", [pairs[0], pairs[3]]),
        Launch("pooled_decode_list", [pairs[1], pairs[7]]),
        Launch("pooled_decode", [pairs[4]]),
    ]


def encode_all(
    driver: Driver, layouts: Sequence[PayloadLayout], candidates: tuple[int, ...] = (0, 1)
) -> list[tuple[int, int]]:
    """Encodes tensors of ``layouts`` in a list; their (payload, dense)."""
    types = {name: getattr(torch, name) for name in DTYPES} | {UPCAST.name: torch.float32}
    dense = [torch.zeros(layout.num_values, dtype=types[layout.dtype.name]) for layout in layouts]
    made = codec.encode_list(dense, layouts, candidates)
    assert [payload.nbytes for payload, _ in made] == [layout.size_bytes for layout in layouts]
    return addresses(made, dense)


def test_an_encode_of_several_asks_for_credit_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    layouts = [pooled_layout(1 + k, 700 + 4 * k) for k in range(5)]
    for turn in range(2):
        pairs = encode_all(driver, layouts)
        assert driver.log == ["admit 15"] * (turn + 1)
        search, code = driver.launches[-2:]
        assert search == Launch("select_books", pairs)
        assert code == Launch("pooled_encode_list", pairs)
    assert driver.loads == 2, "nothing was made anew"
    pinned = encode_all(driver, layouts, (3,))
    assert driver.launches[4:] == [Launch("pooled_encode_list", pinned)], "nothing to search for"


def test_an_encode_of_several_without_credit_launches_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(monkeypatch)
    driver.arena.grants = 0
    with pytest.raises(ArenaExhaustedError, match="nothing was overwritten"):
        encode_all(driver, [pooled_layout(2), pooled_layout(3)])
    assert driver.launches == []


def test_launches_are_as_large_as_they_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sixteen tensors, and of half of the arena's limit at worst: each then shares a buffer."""
    assert ops.MOST_TOGETHER == jit.MOST_TENSORS
    driver = Driver(monkeypatch)
    driver.arena.limit_chunks = 20
    layouts = [pooled_layout(groups) for groups in [4, 4, 2, 1, 10, 11, 3, 3, *[1] * 20]]
    counts = codec.launch_counts(layouts, 0)
    assert counts == [3, 1, 1, 1, 6, 10, 6]
    start = 0
    for count in counts:
        some = layouts[start : start + count]
        dense = [torch.zeros(layout.num_values, dtype=torch.bfloat16) for layout in some]
        assert (codec.encode_buffer(dense, some, (0, 1)) is not None) == (count > 1)
        start += count
    driver.arena.limit_chunks = 10_000
    assert codec.launch_counts([pooled_layout(1)] * 40, 0) == [16, 16, 8]


def test_a_buffer_of_several_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    layouts = [pooled_layout(1 + k, 700 + 4 * k) for k in range(5)]
    dense = [torch.zeros(layout.num_values, dtype=torch.bfloat16) for layout in layouts]
    made = codec.encode_buffer(dense, layouts, (0, 1))
    assert made is not None
    buffer, offsets, held = made
    assert held.last == 1 and driver.log == ["admit 15"]
    ends = [offset + layout.size_bytes for offset, layout in zip(offsets, layouts, strict=True)]
    assert all(end <= start for end, start in zip(ends, [*offsets[1:], buffer.nbytes], strict=True))
    assert all(offset % 256 == 0 for offset in offsets)
    pairs = [(buffer.data_ptr() + o, d.data_ptr()) for o, d in zip(offsets, dense, strict=True)]
    assert driver.launches == [Launch("select_books", pairs), Launch("pooled_encode_list", pairs)]
    codec.decode_buffer(buffer, offsets, layouts, dense)
    assert driver.launches[2:] == [Launch("pooled_decode_list", pairs)]


@pytest.mark.parametrize("why", ["one", "dtypes", "raw", "many", "large"])
def test_no_buffer_where_one_launch_does_not_do(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    driver = Driver(monkeypatch)
    layouts = [pooled_layout(1) for _ in range(3)]
    if why == "one":
        del layouts[1:]
    elif why == "dtypes":
        layouts[1] = pooled_layout(1, dtype=DTYPES["float32"])
    elif why == "raw":
        layouts[1] = PayloadLayout(RAW, DTYPES["bfloat16"], 5, 0)
    elif why == "many":
        layouts *= 6
    else:
        driver.arena.limit_chunks = 5
    dense = [torch.zeros(layout.num_values) for layout in layouts]
    assert codec.encode_buffer(dense, layouts, (0, 1)) is None
    assert not driver.launches and not driver.log


def test_launches_stay_within_half_of_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    driver.arena.limit_chunks = 20
    upcast = pooled_layout(2, dtype=UPCAST)  # up to three chunks a group
    layouts = [pooled_layout(4), upcast, pooled_layout(6), pooled_layout(11), pooled_layout(5)]
    encode_all(driver, layouts)
    entries = [launch.entry for launch in driver.launches if not launch.entry.startswith("select")]
    assert entries == ["pooled_encode"] * 1 + ["pooled_encode_list"] + ["pooled_encode"] * 2
    # The one of 11 groups alone; 4 and 6 together; 5; the upcast one, a kernel of its own.
    assert driver.log == ["admit 11", "admit 10", "admit 5", "admit 6"]


def test_a_captured_list_sweeps_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """And asks for room on the device, all in one launch."""
    driver = Driver(monkeypatch)
    monkeypatch.setattr(codec, "is_capturing", lambda: True)
    layouts = [pooled_layout(2), pooled_layout(3)]
    dense = [torch.zeros(layout.num_values, dtype=torch.bfloat16) for layout in layouts]
    made = codec.encode_list(dense, layouts, (0, 1))
    assert [launch.entry for launch in driver.launches] == ["select_books", "pooled_encode_list"]
    assert driver.reserves[-1] == {1}
    assert driver.log == [f"sweep {held.serial}" for _, held in made]
    assert all(held.captured for _, held in made)


def test_a_captured_buffer_asks_for_room_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    layouts = [pooled_layout(2), pooled_layout(3)]
    dense = [torch.zeros(layout.num_values, dtype=torch.bfloat16) for layout in layouts]
    for capturing in (False, True, False):
        monkeypatch.setattr(codec, "is_capturing", lambda capturing=capturing: capturing)
        driver.log.clear()
        made = codec.encode_buffer(dense, layouts, (0, 1))
        assert made is not None
        held = made[2]
        assert driver.log == ([f"sweep {held.serial}"] if capturing else ["admit 5"])
        assert (held.captured, held.last) == (capturing, codec.CAPTURED if capturing else 1)
        assert [launch.entry for launch in driver.launches[-2:]] == [
            *("select_books", "pooled_encode_list")
        ]
        assert driver.reserves[-1] == {int(capturing)}
    assert driver.loads == 2, "what stands ready serves both"


def test_a_capture_needs_an_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    driver.arena.total_chunks = 0
    monkeypatch.setattr(codec, "is_capturing", lambda: True)
    layouts = [pooled_layout(2), pooled_layout(3)]
    dense = [torch.zeros(layout.num_values, dtype=torch.bfloat16) for layout in layouts]
    for encode in (codec.encode_buffer, codec.encode_list):
        with pytest.raises(ArenaExhaustedError, match="must hold chunks before a graph"):
            encode(dense, layouts, (0, 1))
    assert driver.launches == [] and driver.log == []


@pytest.mark.parametrize("capturing", [False, True])
def test_room_for_several_encodes(capturing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst of all of them, of which raw payloads need nothing; no more than the limit."""
    asked: list[Any] = []

    class Ensuring(Arena):
        def ensure(self, chunks: int, stream: int) -> None:
            asked.append((chunks, stream))

    class Payload:
        def get_device(self) -> int:
            return 0

    def stored(limit_chunks: int) -> Any:
        return type(
            "Stored", (), {"payload": Payload(), "spill": Held(Ensuring([], limit_chunks, 0))}
        )

    raw = PayloadLayout(RAW, DTYPES["bfloat16"], 100, 0)
    monkeypatch.setattr(codec, "is_capturing", lambda: capturing)
    monkeypatch.setattr(codec, "current_stream", lambda device: 7)
    monkeypatch.setattr(codec.torch.cuda, "device", lambda device: contextlib.nullcontext())
    for limit_chunks in (100, 10):
        one = stored(limit_chunks)
        codec.ensure_room([(one, LAYOUT), (one, raw), (one, LAYOUT)])
    codec.ensure_room([(stored(100), raw)])
    assert asked == ([] if capturing else [(16, 7), (10, 7)])
