"""Many tensors encoded or decoded in few launches on CUDA: the bits of each, and no others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch

import inputs
import lct
from inputs import ALL_DTYPES, dtype_id
from lct import ops
from lct.backends.cuda import arena as arenas
from lct.backends.cuda import codec, jit
from lct.dtypes import DTYPES, UPCAST, DType
from lct.tensor import CompressedBatch, decode_all, encode_all
from training import assert_same_bits

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
BF16 = DTYPES["bfloat16"]
POISON = 0x5A
GUARD = 64  # values on either side of an out, which no decode may write
SIZES = (1000, 8191, 8192, 8193, 1, 20_001, 127, 65_537, 40_960, 5, 300_001)
CAPACITIES = (None, 200, 64, 1024, "exact", 2112, 748)
VALUES: dict[str, Callable[[DType, int, int], object]] = {
    "gaussian": lambda dtype, n, seed: inputs.gaussian(dtype, n, seed=seed),
    "random bits": lambda dtype, n, seed: inputs.random_bits(dtype, n, seed),
    "zeros": lambda dtype, n, seed: inputs.gaussian(dtype, n, seed=seed) * 0,
    "spread": lambda dtype, n, seed: inputs.from_floats(
        inputs.gaussian(DTYPES["float32"], n, seed=seed).view("float32")
        * 2.0 ** (torch.arange(n).numpy() // 700 % 9),
        dtype,
    ),
}
Tensors = list[tuple[torch.Tensor, lct.CompressedTensor]]


def tensors(count: int, dtypes: Sequence[DType], seed: int = 0) -> Tensors:
    """(dense, compressed) of all sizes, capacities, kinds of values and presets in turn."""
    made: Tensors = []
    for k in range(count):
        dtype, name = dtypes[k % len(dtypes)], tuple(VALUES)[(k + k // 4) % len(VALUES)]
        values = VALUES[name](dtype, SIZES[k % len(SIZES)], seed + k)
        dense = inputs.to_torch(values, dtype).to(DEVICE)
        upcast = dtype is UPCAST
        if upcast and k % 3 == 0:
            dense[-1] = 1.0000001  # its group is stored wide
        if k % 10 == 6 and not upcast:
            made.append((dense, lct.encode(dense, preset="clean")))
        else:
            capacity = CAPACITIES[k % len(CAPACITIES)]
            made.append((dense, lct.encode(dense, capacity=capacity, upcast=upcast)))
    return made


def integers(size_bytes: int) -> torch.dtype:
    return {2: torch.int16, 4: torch.int32}[size_bytes]


class Outs:
    """Where tensors are decoded to: poisoned, between guards; ``shift``: values off alignment."""

    def __init__(self, made: Tensors, shifts: Sequence[int] = (0,)) -> None:
        self.buffers: list[torch.Tensor] = []
        self.outs: list[torch.Tensor] = []
        for k, (dense, _) in enumerate(made):
            first = GUARD + shifts[k % len(shifts)]
            size = first + dense.numel() + GUARD
            buffer = torch.empty(size, dtype=dense.dtype, device=DEVICE)
            self.buffers.append(buffer)
            self.outs.append(buffer[first : first + dense.numel()])
        self.poison()

    def poison(self) -> None:
        for buffer in self.buffers:
            buffer.view(torch.uint8).fill_(POISON)

    def check(self, made: Tensors, what: str = "") -> None:
        for k, ((dense, _), out, buffer) in enumerate(
            zip(made, self.outs, self.buffers, strict=True)
        ):
            assert_same_bits(dense, out, f"{what} tensor {k}")
            first = out.storage_offset()
            for guard in (buffer[:first], buffer[first + dense.numel() :]):
                assert (guard.view(torch.uint8) == POISON).all(), f"{what} beside tensor {k}"


def decode_into(made: Tensors, outs: Outs) -> None:
    stored = [compressed._stored for _, compressed in made]
    ops.decode_all(stored, [compressed.layout for _, compressed in made], outs.outs)


@pytest.mark.parametrize("count", [1, 2, 7, 16, 17, 40])
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_id)
def test_any_number_of_tensors(dtype: DType, count: int) -> None:
    made = tensors(count, [dtype])
    outs = Outs(made)
    for turn in ("first", "again"):
        decode_into(made, outs)
        outs.check(made, turn)
        outs.poison()


def test_the_tensors_are_of_every_kind() -> None:
    """What the other tests count on."""
    for dtype in ALL_DTYPES:
        compressed = [tensor for _, tensor in tensors(40, [dtype])]
        counts = [tensor.group_counts() for tensor in compressed]
        assert {"pooled", "raw"} <= {tensor.preset for tensor in compressed}
        assert sum(count.spilled > 0 for count in counts) > 5
        assert sum(count.constant > 0 for count in counts) > 5
        assert sum(not count.spilled for count in counts) > 5
        assert len({tensor.layout.capacity_words for tensor in compressed}) > 5
    assert any(tensor.preset == "clean" for _, tensor in tensors(40, [BF16]))


def test_dtypes_in_turn() -> None:
    made = tensors(40, ALL_DTYPES)
    outs = Outs(made)
    decode_into(made, outs)
    outs.check(made)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_id)
def test_hostile_inputs(dtype: DType) -> None:
    for capacity in (None, 2112):
        made: Tensors = []
        for values in inputs.hostile(dtype).values():
            dense = inputs.to_torch(values, dtype).to(DEVICE)
            upcast = dtype is UPCAST
            made.append((dense, lct.encode(dense, capacity=capacity, upcast=upcast)))
        outs = Outs(made)
        decode_into(made, outs)
        outs.check(made, f"capacity {capacity}")


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_id)
def test_outs_off_alignment(dtype: DType) -> None:
    made = tensors(20, [dtype])
    outs = Outs(made, shifts=(0, 1, 8, 3))
    decode_into(made, outs)
    outs.check(made)


def test_new_tensors_have_their_shapes_and_memory() -> None:
    made = [
        (dense.view(1, -1), lct.encode(dense.view(1, -1), capacity=200))
        for dense, _ in tensors(9, ALL_DTYPES)
    ]
    found = decode_all([compressed for _, compressed in made])
    for (dense, _), out in zip(made, found, strict=True):
        assert_same_bits(dense, out)
    assert len({out.untyped_storage().data_ptr() for out in found}) == len(found)
    on_cpu = lct.encode(made[0][0].cpu())
    both = decode_all([on_cpu, made[1][1], lct.encode(torch.empty(0, 3, device=DEVICE))])
    assert [out.device.type for out in both] == ["cpu", "cuda", "cuda"]
    assert_same_bits(made[0][0].cpu(), both[0])
    assert_same_bits(made[1][0], both[1])
    assert both[2].shape == (0, 3)


def test_one_launch_for_tensors_of_a_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [(dense, lct.encode(dense)) for dense, _ in tensors(4, [BF16])]
    outs = Outs(made)
    decode_into(made, outs)
    launches = []
    launch = jit.Call.launch
    monkeypatch.setattr(
        jit.Call,
        "launch",
        lambda call, *how, **more: (launches.append(call), launch(call, *how, **more)),
    )
    outs.poison()
    decode_into(made, outs)
    assert len(launches) == 1
    outs.check(made)


Encodes = tuple[list[torch.Tensor], list[int], list[bool]]


def encodes(count: int, dtypes: Sequence[DType], seed: int = 0) -> Encodes:
    """What ``encode_all`` takes: tensors of all sizes, capacities and kinds of values in turn."""
    made = tensors(count, dtypes, seed)
    capacities = [CAPACITIES[k % len(CAPACITIES)] for k in range(count)]
    words = [c if isinstance(c, int) else 748 + 4 * k for k, c in enumerate(capacities)]
    return (
        [dense for dense, _ in made],
        words,
        [dtypes[k % len(dtypes)] is UPCAST for k in range(count)],
    )


def check_encodes(todo: Encodes, made: Sequence[lct.CompressedTensor], what: str = "") -> None:
    """The canonical bytes are those of an encode alone, and of the one on the CPU."""
    for k, (dense, words, upcast, one) in enumerate(zip(*todo, made, strict=True)):
        alone = lct.encode(dense, capacity=words, upcast=upcast)
        on_cpu = lct.encode(dense.cpu(), capacity=words, upcast=upcast)
        expected = on_cpu.canonical_bytes()
        assert one.canonical_bytes() == alone.canonical_bytes() == expected, f"{what} tensor {k}"
        assert_same_bits(dense, lct.decode(one), f"{what} tensor {k}")


@pytest.mark.parametrize("count", [1, 2, 7, 16, 17, 40])
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_id)
def test_any_number_of_encodes(dtype: DType, count: int) -> None:
    for turn in range(2):  # other values in calls that stand ready
        todo = encodes(count, [dtype], seed=50 * turn)
        check_encodes(todo, encode_all(*todo), f"turn {turn}")


def test_encodes_of_all_dtypes_in_turn() -> None:
    todo = encodes(40, ALL_DTYPES)
    check_encodes(todo, encode_all(*todo))


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_id)
def test_encodes_of_hostile_inputs(dtype: DType) -> None:
    dense = [inputs.to_torch(v, dtype).to(DEVICE) for v in inputs.hostile(dtype).values()]
    for capacity in (748, 2112):
        todo = dense, [capacity] * len(dense), [dtype is UPCAST] * len(dense)
        check_encodes(todo, encode_all(*todo), f"capacity {capacity}")


def test_encodes_off_alignment() -> None:
    buffer = torch.randn(40_000, device=DEVICE).bfloat16()
    dense = [buffer[k : k + 17_000] for k in (0, 1, 8, 3)]
    todo = dense, [748] * 4, [False] * 4
    check_encodes(todo, encode_all(*todo))


def test_encodes_larger_than_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches take what half of its limit covers; larger tensors go alone, in pieces."""
    arena = arenas.of(torch.cuda.current_device())
    monkeypatch.setattr(arena, "limit_chunks", 9)
    sizes = (8192 * 3, 8192 * 2, 8192 * 30, 8192, 100, 8192 * 5)
    dense = [inputs.to_torch(inputs.random_bits(BF16, n, n), BF16).to(DEVICE) for n in sizes]
    todo = dense, [748] * len(dense), [False] * len(dense)
    check_encodes(todo, encode_all(*todo))


def test_encodes_are_captured() -> None:
    todo = encodes(9, [BF16])
    encode_all(*todo)
    lct.reserve_arena(16 << 20)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = encode_all(*todo)
    for seed in range(3):
        for k, dense in enumerate(todo[0]):
            values = inputs.random_bits if seed == 1 else inputs.gaussian
            dense.copy_(inputs.to_torch(values(BF16, dense.numel(), seed=seed + k), BF16))
        graph.replay()
        torch.cuda.synchronize()
        for dense, one in zip(todo[0], made, strict=True):
            assert_same_bits(dense, lct.decode(one))


BATCHES: dict[str, tuple[int, bool]] = {
    "one": (1, False),
    "one launch": (16, True),
    "two": (17, False),
}


@pytest.mark.parametrize(("count", "shares"), BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_id)
def test_batches_share_a_buffer(dtype: DType, count: int, shares: bool) -> None:
    for turn in range(2):
        sized = [t for t, _ in tensors(4 * count, [dtype], seed=50 * turn) if t.numel() > 1000]
        dense = sized[:count]
        words = [748 + 4 * k for k in range(count)]
        upcasts = [dtype is UPCAST] * count
        batch = CompressedBatch(dense, words, upcasts)
        assert (batch._buffer is not None) == shares
        made = batch.tensors()
        check_encodes((dense, words, upcasts), made, f"turn {turn}")
        assert batch.nbytes == [one.payload.nbytes for one in made]
        for k, (expected, found) in enumerate(zip(dense, batch.decode(), strict=True)):
            assert_same_bits(expected, found, f"turn {turn}, tensor {k}")


def test_batches_that_fall_apart() -> None:
    """Dtypes in turn, what is stored raw, more than the arena covers: the same bits."""
    for dtypes, least in ((ALL_DTYPES[:2], 1000), ([BF16], 0)):
        dense = [t for t, _ in tensors(20, dtypes) if t.numel() > least][:12]
        batch = CompressedBatch(dense, [748] * len(dense), [False] * len(dense))
        assert batch._buffer is None
        for expected, found in zip(dense, batch.decode(), strict=True):
            assert_same_bits(expected, found)


def test_batches_count_and_give_their_chunks_back() -> None:
    device = torch.device(DEVICE, torch.cuda.current_device())
    before = ops.settle_arena(device)
    counted = lct.stats()
    dense = [
        inputs.to_torch(inputs.random_bits(BF16, 90_000, k), BF16).to(DEVICE) for k in range(5)
    ]
    batch = CompressedBatch(dense, [748] * 5, [False] * 5)
    assert batch._buffer is not None
    assert ops.settle_arena(device) == before + 5 * 11
    now = lct.stats()
    assert now["tensors"] == counted["tensors"] + 5
    assert now["dense_bytes"] == counted["dense_bytes"] + 5 * 180_000
    assert now["spilled_groups"] == counted["spilled_groups"] + 55
    one = batch.tensors()[2]
    del batch
    assert_same_bits(dense[2], lct.decode(one))  # it holds the buffer and the chunks
    del one
    assert ops.settle_arena(device) == before


def test_batches_are_captured() -> None:
    dense = [torch.randn(9000 * k, device=DEVICE).bfloat16() for k in range(1, 5)]
    CompressedBatch(dense, [748] * 4, [False] * 4)
    lct.reserve_arena(4 << 20)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch = CompressedBatch(dense, [748] * 4, [False] * 4)
        found = batch.decode()
    for seed in range(3):
        for k, tensor in enumerate(dense):
            values = inputs.random_bits(BF16, tensor.numel(), seed + k)
            tensor.copy_(inputs.to_torch(values, BF16))
        graph.replay()
        torch.cuda.synchronize()
        for expected, out in zip(dense, found, strict=True):
            assert_same_bits(expected, out)


def test_dropped_encodes_give_their_chunks_back() -> None:
    device = torch.device(DEVICE, torch.cuda.current_device())
    before = ops.settle_arena(device)
    dense = [
        inputs.to_torch(inputs.random_bits(BF16, 90_000, k), BF16).to(DEVICE) for k in range(5)
    ]
    made = encode_all(dense, [748] * 5, [False] * 5)
    assert ops.settle_arena(device) == before + 5 * 11
    del made
    assert ops.settle_arena(device) == before


def test_two_launches_for_encodes_of_a_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    todo = (
        [torch.randn(9000 * k, device=DEVICE).bfloat16() for k in range(1, 6)],
        [748] * 5,
        [False] * 5,
    )
    encode_all(*todo)
    launches = []
    launch = jit.Call.launch
    monkeypatch.setattr(
        jit.Call,
        "launch",
        lambda call, *how, **more: (launches.append(call), launch(call, *how, **more)),
    )
    made = encode_all(*todo)
    lists = [call for call in launches if isinstance(call.args, codec.TensorList)]
    assert len(lists) == 2, "the search for the books, and the encode"
    check_encodes(todo, made)


def test_graph_capture_replays() -> None:
    made = [(dense, lct.encode(dense)) for dense, _ in tensors(20, [BF16])]
    outs = Outs(made)
    decode_into(made, outs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_into(made, outs)
    for seed in range(4):
        for k, (dense, compressed) in enumerate(made):
            values = VALUES["random bits" if seed % 2 else "gaussian"](
                BF16, dense.numel(), seed + k
            )
            dense.copy_(inputs.to_torch(values, BF16))
            compressed.encode_(dense)
        outs.poison()
        graph.replay()
        torch.cuda.synchronize()
        outs.check(made, f"replay {seed}")


def test_threads_decode_tensors_of_the_same_layouts() -> None:
    """Each with its own tensors, on a stream of its own, over the calls that stand ready."""
    threads, turns, count = 4, 30, 7
    all_made = [
        [(dense, lct.encode(dense)) for dense, _ in tensors(count, [BF16], seed=100 * number)]
        for number in range(threads)
    ]
    layouts = [[compressed.layout for _, compressed in made] for made in all_made]
    assert all(own == layouts[0] for own in layouts)
    all_outs = [Outs(made) for made in all_made]
    torch.cuda.synchronize()
    start = threading.Barrier(threads)
    failures: list[BaseException] = []

    def work(made: Tensors, outs: Outs) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                start.wait()
                for turn in range(turns):
                    decode_into(made, outs)
                    torch.cuda.current_stream().synchronize()
                    outs.check(made, f"turn {turn}")
                    outs.poison()
        except BaseException as error:
            failures.append(error)

    running = [
        threading.Thread(target=work, args=own) for own in zip(all_made, all_outs, strict=True)
    ]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if failures:
        raise failures[0]
