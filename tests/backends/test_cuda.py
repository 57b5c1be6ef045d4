"""The CUDA backend gives the reference's bytes and every bit back; the arena loses nothing."""

import functools
import gc
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import lct
from inputs import ALL_DTYPES, DATA, hostile, to_torch
from lct import ops
from lct.backends import reference
from lct.backends.cuda import jit
from lct.codebook import candidates
from lct.dtypes import DTYPES, UPCAST, DType
from lct.errors import ArenaExhaustedError
from lct.layout import parse_header, validate_payload
from lct.presets import PRESETS

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def gaussian(count: int, scale: float = 0.02, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale


def random_bits(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, (count,), generator=generator, dtype=torch.int32).to(
        torch.int16
    )


INPUTS = {
    "gaussian": lambda n: gaussian(n).bfloat16(),
    "random bits": lambda n: random_bits(n).view(torch.bfloat16),
    "zeros": lambda n: torch.zeros(n).bfloat16(),
    "negative zeros": lambda n: torch.full((n,), -0.0).bfloat16(),
    "constant": lambda n: torch.full((n,), 1.5).bfloat16(),
    "sparse": lambda n: (gaussian(n) * (gaussian(n, 1.0, 1) > 0.7)).bfloat16(),
    "subnormal": lambda n: (
        (random_bits(n).to(torch.int32) & 0x07FF).to(torch.int16).view(torch.bfloat16)
    ),
    "alternating extremes": lambda n: torch.tensor([1e-38, 3e38]).repeat(n // 2 + 1)[:n].bfloat16(),
    "nan payloads": lambda n: (random_bits(n) | 0x7F80).view(torch.bfloat16),
    "infinities": lambda n: (
        torch.tensor([float("inf"), -float("inf")]).repeat(n // 2 + 1)[:n].bfloat16()
    ),
    "wide": lambda n: (gaussian(n) * torch.exp2(4 * gaussian(n, 1.0, 2))).bfloat16(),
}
SIZES = (
    1,
    5,
    127,
    128,
    129,
    255,
    256,
    257,
    8191,
    8192,
    8193,
    20001,
    32767,
    32769,
    65535,
    65536,
    65537,
)


def assert_reference_bytes(dense: torch.Tensor, compressed: lct.CompressedTensor) -> None:
    """Payload and spilled data equal the reference's, the values equal ``dense``."""
    layout = compressed.layout
    values = ops.patterns(dense.contiguous())
    book, shift = (0, 0)
    if not layout.is_raw:
        words = reference.split(values, layout.dtype)[0]
        book, shift = reference.select(words, layout, candidates(None))
    expected_payload, expected_spill = reference.encode(values, layout, book, shift)
    payload, spill = ops.to_canonical(compressed._stored, layout)
    validate_payload(layout, payload, spill.size)
    for name, got, expected in (
        ("payload", payload, expected_payload),
        ("spill", spill, expected_spill),
    ):
        assert got.size == expected.size, f"{name} has {got.size} bytes, expected {expected.size}"
        different = np.flatnonzero(got != expected)
        assert not different.size, f"{name} differs first at byte {different[0]} of {got.size}"
    assert torch.equal(bits(compressed.decode().cpu()), bits(dense))


@pytest.fixture(scope="module")
def real_tensors() -> dict[str, torch.Tensor]:
    """The real tensors of tests/data, flat, at most 8 groups each: the reference is slow."""
    return {
        path.stem: torch.from_numpy(np.load(path).reshape(-1)[:60_000].view(np.int16)).view(
            torch.bfloat16
        )
        for path in sorted(DATA.glob("*.npy"))
    }


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("count", SIZES)
def test_sizes(preset: str, count: int) -> None:
    dense = gaussian(count).bfloat16()
    assert_reference_bytes(dense, lct.encode(dense.to(DEVICE), preset=preset))


@pytest.mark.parametrize(
    ("dtype", "capacity", "name"),
    [
        (dtype, capacity, name)
        for dtype, capacity in [(DTYPES["bfloat16"], 2112), *((row, None) for row in ALL_DTYPES)]
        for name in sorted(hostile(dtype))
    ],
    ids=lambda v: getattr(v, "name", str(v)),
)
def test_hostile_inputs(dtype: DType, capacity: int | None, name: str) -> None:
    """Every edge of the streams that the CPU's tests know; 2,112 words hold any group."""
    dense = to_torch(hostile(dtype)[name][:18000], dtype)  # the reference is slow
    upcast = dtype is UPCAST
    assert_reference_bytes(dense, lct.encode(dense.to(DEVICE), capacity=capacity, upcast=upcast))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", INPUTS)
def test_inputs(preset: str, name: str) -> None:
    dense = INPUTS[name](20001)
    assert_reference_bytes(dense, lct.encode(dense.to(DEVICE), preset=preset))


@pytest.mark.parametrize("preset", PRESETS)
def test_all_patterns(preset: str) -> None:
    dense = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert_reference_bytes(dense, lct.encode(dense.to(DEVICE), preset=preset))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("count", [1, 7, 129, 8193, 20001, 65537])
def test_dtypes(preset: str, dtype: torch.dtype, count: int) -> None:
    dense = gaussian(count).to(dtype)
    assert_reference_bytes(dense, lct.encode(dense.to(DEVICE), preset=preset))
    hostile = random_bits(2 * count).view(dtype)[:count]
    assert_reference_bytes(hostile, lct.encode(hostile.to(DEVICE), preset=preset))


@pytest.mark.parametrize("count", [100, 8192, 20001])
def test_upcast_hint_costs_storage_never_bits(count: int) -> None:
    exact = gaussian(count).bfloat16().float()
    assert_reference_bytes(exact, lct.encode(exact.to(DEVICE), upcast=True))
    general = gaussian(count)
    assert_reference_bytes(general, lct.encode(general.to(DEVICE), upcast=True))
    one = exact.clone()
    one[-1] = 1.0000001
    assert_reference_bytes(one, lct.encode(one.to(DEVICE), upcast=True))


@pytest.mark.parametrize("capacity", [0, 4, 64, 68, 200, 1024, "exact"])
@pytest.mark.parametrize("name", ["gaussian", "sparse", "random bits", "zeros"])
def test_capacities(capacity: int | str, name: str) -> None:
    dense = INPUTS[name](20001)
    assert_reference_bytes(dense, lct.encode(dense.to(DEVICE), capacity=capacity))


def test_real_tensors(real_tensors: dict[str, torch.Tensor]) -> None:
    for dense in real_tensors.values():
        assert_reference_bytes(dense, lct.encode(dense.to(DEVICE)))
        assert_reference_bytes(dense, lct.encode(dense.to(DEVICE), preset="clean"))


def test_exact_capacity_is_that_of_the_cpu(real_tensors: dict[str, torch.Tensor]) -> None:
    for name, dense in real_tensors.items():
        on_cpu = lct.encode(dense, capacity="exact")
        on_gpu = lct.encode(dense.to(DEVICE), capacity="exact")
        assert on_cpu.layout == on_gpu.layout, name
        assert on_cpu.canonical_bytes() == on_gpu.canonical_bytes(), name


def test_non_contiguous_and_misaligned() -> None:
    dense = gaussian(300 * 400).bfloat16().view(300, 400).to(DEVICE)
    for view in (dense.t(), dense[:, 3:], dense[1:].flatten()[1:]):
        compressed = lct.encode(view)
        assert torch.equal(bits(compressed.decode()), bits(view.contiguous()))
        out = torch.empty(view.numel() + 1, dtype=torch.bfloat16, device=DEVICE)[1:].view(
            view.shape
        )
        assert torch.equal(bits(compressed.decode(out)), bits(view.contiguous()))


def test_moves_clones_and_pickles_carry_what_spilled() -> None:
    for name in ("gaussian", "random bits"):
        dense = INPUTS[name](40000)
        compressed = lct.encode(dense.to(DEVICE), capacity=200)
        expected = compressed.canonical_bytes()
        copies = (
            compressed.clone(),
            compressed.cpu(),
            compressed.cpu().cuda(),
            pickle.loads(pickle.dumps(compressed)),
        )
        for copy in copies:
            assert copy.canonical_bytes() == expected
            assert torch.equal(bits(copy.decode().cpu()), bits(dense))


def test_encode_in_place_reuses_and_returns_chunks() -> None:
    from lct.backends.cuda import arena

    compressed = lct.encode(INPUTS["gaussian"](100000).to(DEVICE))
    for _ in range(2):
        for name in INPUTS:
            dense = INPUTS[name](100000)
            compressed.encode_(dense.to(DEVICE))
            assert torch.equal(bits(compressed.decode().cpu()), bits(dense)), name
    compressed.encode_(INPUTS["random bits"](100000).to(DEVICE))
    used = arena.of(0).total_chunks - arena.of(0).counters().free_chunks
    assert used >= compressed.group_counts().spilled > 0
    del compressed
    gc.collect()
    arena.of(0).collect()
    assert arena.of(0).total_chunks - arena.of(0).counters().free_chunks < used


def test_repack_comes_back_from_dense_storage() -> None:
    calm, hostile = (INPUTS[name](20001).to(DEVICE) for name in ("gaussian", "random bits"))
    compressed = lct.encode(calm, capacity="exact")
    assert compressed.encode_(hostile).repack().preset == "raw"
    assert compressed.encode_(calm).preset == "raw"  # looking would wait for the device
    assert torch.equal(bits(compressed.decode()), bits(calm))
    assert compressed.repack().layout == lct.encode(calm, capacity="exact").layout
    assert torch.equal(bits(compressed.decode()), bits(calm))


def test_small_arena_waits_and_grows_but_never_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from lct.backends.cuda import arena

    monkeypatch.setattr(arena.of(0), "limit_chunks", 4)
    kept = []
    for seed in range(20):
        dense = random_bits(300_000, seed).view(torch.bfloat16)
        compressed = lct.encode(dense.to(DEVICE))
        kept.append((dense, compressed))
    for dense, compressed in kept:
        assert torch.equal(bits(compressed.decode().cpu()), bits(dense))
    assert arena.of(0).counters().failed_groups == 0


def test_no_memory_for_the_arena_is_an_error_before_anything_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lct.backends.cuda import arena

    dense = INPUTS["gaussian"](8192 * 40).to(DEVICE)
    compressed = lct.encode(dense, capacity=64)
    before = compressed.canonical_bytes()
    own = arena.of(0)
    monkeypatch.setattr(own, "limit_chunks", own.total_chunks)
    monkeypatch.setattr(own, "host_limit_chunks", own._host_chunks)

    def no_memory(*_args, **_kwargs):
        raise torch.cuda.OutOfMemoryError("no memory")

    monkeypatch.setattr(arena.torch, "empty", no_memory)
    with pytest.raises(ArenaExhaustedError, match="nothing was overwritten"), own.lock:
        own.admit(own.total_chunks + own._host_chunks + 1, own._arena_stream())
    monkeypatch.undo()
    assert compressed.canonical_bytes() == before


def test_payloads_keep_their_chunks_while_others_come_and_go() -> None:
    """Over many segments: what one payload spilled is never given to another that is alive."""
    from lct.backends.cuda import arena

    kept = []
    for seed in range(60):
        dense = random_bits(2_000_000, seed).view(torch.bfloat16).to(DEVICE)
        compressed = lct.encode(dense, capacity=64)
        if seed % 3:
            kept.append((dense, compressed))
        if seed % 10 == 9:
            arena.of(0).collect()
            del kept[::4]
    gc.collect()
    for dense, compressed in kept:
        assert torch.equal(bits(compressed.decode()), bits(dense))
    assert arena.of(0).total_chunks > 8 * arena.SEGMENT_CHUNKS


def test_graph_capture_replays_encode_and_decode() -> None:
    dense = gaussian(100_000).bfloat16().to(DEVICE)
    compressed = lct.encode(dense)
    out = torch.empty_like(dense)
    compressed.encode_(dense)
    compressed.decode(out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compressed.encode_(dense)
        compressed.decode(out)
    for seed in range(5):
        dense.copy_(INPUTS["random bits" if seed % 2 else "gaussian"](100_000))
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(bits(out), bits(dense))


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {}),
        (torch.bfloat16, {"preset": "clean"}),
        (torch.float32, {}),
        (torch.float32, {"upcast": True}),  # three chunks a group
    ],
)
def test_replays_take_no_more_chunks_than_one(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Of what the graph encodes into memory of its own: the chunks of the replay before go back."""
    from lct.backends.cuda import arena

    count = 40_000
    dense = torch.zeros(count, dtype=dtype, device=DEVICE)
    lct.encode(dense, **options)
    lct.reserve_arena(8 << 20)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = lct.encode(dense, **options)
        second = lct.encode(first.decode(), **options)
        out = second.decode()
    used = []
    for seed in range(40):
        values = random_bits(count * dtype.itemsize // 2, seed).view(dtype)
        dense.copy_(values if seed else torch.zeros(count, dtype=dtype))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(bits(out), bits(dense))
        used.append(arena.of(0).counters().used_chunks)
    assert used[0] < used[1] and set(used[2:]) == {used[1]}


@pytest.mark.parametrize("count", [1, 5, 63])
def test_graph_capture_of_tensors_stored_as_they_are(count: int) -> None:
    dense = gaussian(count).bfloat16().to(DEVICE)
    lct.encode(dense)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compressed = lct.encode(dense)
    assert compressed.preset == "raw"
    for seed in range(3):
        dense.copy_(random_bits(count, seed).view(torch.bfloat16))
        compressed.payload.zero_()
        graph.replay()
        assert compressed.canonical_bytes() == lct.encode(dense).canonical_bytes()


def test_kernels_are_loaded_in_the_middle_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ran before the capture may have been other kernels: those for lists, for example."""
    count = 100_007  # no other test's, whose calls stand ready
    dense = gaussian(count).bfloat16().to(DEVICE)
    lct.reserve_arena(4 << 20)
    torch.cuda.synchronize()
    monkeypatch.setattr(jit, "_loaded", {})
    # Calls of other layouts stand ready with the old tables, which stay.
    monkeypatch.setattr(jit, "device_tables", functools.cache(jit.device_tables.__wrapped__))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compressed = lct.encode(dense)
        out = compressed.decode()
    for seed in range(3):
        dense.copy_(random_bits(count, seed).view(torch.bfloat16))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(bits(out), bits(dense))
    assert jit._loaded


def test_streams_see_each_others_chunks() -> None:
    side = torch.cuda.Stream()
    dense = random_bits(200_000).view(torch.bfloat16).to(DEVICE)
    torch.cuda.synchronize()
    for _ in range(10):
        first = lct.encode(dense)
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.default_stream())
            second = lct.encode(dense)
            on_side = second.decode()
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(bits(on_side), bits(dense))
        assert torch.equal(bits(first.decode()), bits(dense))


@pytest.mark.timeout(900)
def test_more_than_two_to_the_31_values() -> None:
    count = 2**31 + 5
    dense = torch.empty(count, dtype=torch.bfloat16, device=DEVICE)
    for start in range(0, count, 2**28):
        part = dense[start : start + 2**28]
        part.normal_(std=0.02, generator=torch.Generator(DEVICE).manual_seed(start))
    for preset in ("pooled", "clean"):
        compressed = lct.encode(dense, preset=preset)
        decoded = compressed.decode()
        for start in range(0, count, 2**28):
            assert torch.equal(
                bits(decoded[start : start + 2**28]), bits(dense[start : start + 2**28])
            ), (preset, start)
        del decoded
        layout, payload = compressed.layout, compressed.payload
        # Groups on both sides of the boundary have the bytes of the same values encoded alone.
        first = 2**31 - 2 * layout.preset.block_values
        values = ops.patterns(dense[first:].cpu())
        small = layout.choose(layout.preset, layout.dtype, len(values), layout.capacity_words)
        _, book, shift = parse_header(bytes(payload[:16].cpu().numpy()))
        expected, _ = reference.encode(values, small, book, shift)
        group = layout.full_groups - small.full_groups
        for plane, own, start in (
            ("slots", layout.slot_offset(group), small.slot_offset(0)),
            ("sign-fraction", layout.sign_fraction_offset + first, small.sign_fraction_offset),
            ("lane", layout.lane_offset + 32 * group, small.lane_offset),
            ("meta", layout.meta_offset + 4 * group, small.meta_offset),
        ):
            size = {
                "slots": small.slot_offset(small.num_groups) - start,
                "sign-fraction": small.num_values,
                "lane": 32 * small.num_groups,
                "meta": 4 * small.num_groups,
            }[plane]
            got = payload[own : own + size].cpu().numpy()
            assert np.array_equal(got, expected[start : start + size]), (preset, plane)
        del compressed, payload
