"""The CPU backend gives the reference's bytes, and the values back, whatever it is given."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import inputs
from compare import assert_same_bits
from lct.backends import cpu, reference
from lct.codebook import BANK_ROWS, ZERO, bank, candidates
from lct.dtypes import DTYPES, UPCAST, DType
from lct.errors import CorruptPayloadError
from lct.layout import HEADER_BYTES, MAX_POOLED_CAPACITY, PayloadLayout, align, validate_payload
from lct.presets import PRESETS, RAW, Preset

ROOT = Path(__file__).resolve().parents[2]
ALL_BOOKS = candidates(None)
NOTHING = np.empty(0, np.uint8)
POISON = 0xA5
BF16 = DTYPES["bfloat16"]
POOLED = PRESETS["pooled"]

CODECS = [
    pytest.param(preset, dtype, id=f"{preset.name}-{inputs.dtype_id(dtype)}")
    for preset in (*PRESETS.values(), RAW)
    for dtype in inputs.ALL_DTYPES
    if dtype is not UPCAST or preset.pooled or preset is RAW
]
over_codecs = pytest.mark.parametrize(("preset", "dtype"), CODECS)
over_dtypes = pytest.mark.parametrize("dtype", inputs.ALL_DTYPES, ids=inputs.dtype_id)


def layout_of(
    preset: Preset, dtype: DType, values: np.ndarray, capacity: int | None = None
) -> PayloadLayout:
    words = preset.capacity_words if capacity is None else capacity
    return PayloadLayout(preset, dtype, len(values), words)


def encode_poisoned(
    values: np.ndarray, layout: PayloadLayout, book: int, shift: int
) -> tuple[np.ndarray, np.ndarray]:
    """``cpu.encode`` into memory that was not zero."""
    payload = np.full(layout.size_bytes, POISON, np.uint8)
    returned, spill = cpu.encode(values, layout, book, shift, payload)
    assert returned is payload
    return payload, spill


def check(values: np.ndarray, layout: PayloadLayout) -> tuple[np.ndarray, np.ndarray]:
    """Same book, shift, bytes and needs as the reference; a valid payload; the values come back."""
    choice = 0, 0
    if not layout.is_raw:
        choice = cpu.select(values, layout, ALL_BOOKS)
        words, _ = reference.split(values, layout.dtype)
        assert choice == reference.select(words, layout, ALL_BOOKS)
    payload, spill = encode_poisoned(values, layout, *choice)
    expected_payload, expected_spill = reference.encode(values, layout, *choice)
    assert_same_bits(payload, expected_payload, "payload")
    assert_same_bits(spill, expected_spill, "spill")
    check_round_trip(values, layout, payload, spill)
    return payload, spill


def check_round_trip(
    values: np.ndarray, layout: PayloadLayout, payload: np.ndarray, spill: np.ndarray
) -> None:
    validate_payload(layout, payload, spill.size)
    assert_same_bits(cpu.decode(payload, spill), values, "values")
    out = np.full(len(values), POISON, values.dtype)
    assert cpu.decode(payload, spill, out) is out
    assert_same_bits(out, values, "values in out")


def sizes_of(preset: Preset) -> list[int]:
    block = preset.block_values
    around_groups = {n + d for n in (128, 256, preset.group_values, block) for d in (-1, 0, 1)}
    return sorted({0, 1, 2, 3, 4, 5, 1023, 1024, 1025} | around_groups | {8191, 8192, 8193})


@over_codecs
def test_sizes(preset: Preset, dtype: DType) -> None:
    values = inputs.gaussian(dtype, max(sizes_of(preset)))
    for size in sizes_of(preset):
        check(values[:size], layout_of(preset, dtype, values[:size]))


@over_codecs
def test_sizes_of_random_bits(preset: Preset, dtype: DType) -> None:
    for size in (1, 7, 127, 129, 1025, preset.group_values + 1):
        values = inputs.random_bits(dtype, size, seed=size)
        check(values, layout_of(preset, dtype, values))


@over_codecs
def test_hostile_inputs(preset: Preset, dtype: DType) -> None:
    for name, values in inputs.hostile(dtype).items():
        try:
            check(values, layout_of(preset, dtype, values))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@over_dtypes
@pytest.mark.parametrize("capacity", [0, 4, 64, 68, 200, 1024, MAX_POOLED_CAPACITY, "exact"])
def test_pooled_capacities(capacity: int | str, dtype: DType) -> None:
    wide_needs_words = capacity == 0 and dtype is UPCAST
    names = ["extremes", "random_bits", "sparse", "row_scales", "outlier_last", "lonely_first"]
    names += ["long_codes", "full_windows", "mixed_codes", "wrap_below", "wrap_above"]
    if dtype is UPCAST and not wide_needs_words:
        names += ["wide_first", "wide_all"]
    for name in names:
        values = inputs.hostile(dtype)[name]
        words = capacity
        if capacity == "exact":
            layout = layout_of(POOLED, dtype, values)
            book, _ = cpu.select(values, layout, ALL_BOOKS)
            need = int(cpu.group_needs(values, layout, book).max())
            words = min(max(align(need, 4), 4), MAX_POOLED_CAPACITY)
        check(values, layout_of(POOLED, dtype, values, int(words)))


@over_dtypes
def test_exact_capacity_is_the_least_that_does_not_spill(dtype: DType) -> None:
    values = inputs.gaussian(dtype, 8192)
    book, _ = cpu.select(values, layout_of(POOLED, dtype, values), ALL_BOOKS)
    (need,) = cpu.group_needs(values, layout_of(POOLED, dtype, values), book)
    for capacity, spills in ((align(int(need), 4), False), (align(int(need), 4) - 4, True)):
        layout = layout_of(POOLED, dtype, values, capacity)
        _, spill = encode_poisoned(values, layout, book, 0)
        assert (spill.size > 0) == spills


# Before an even step: the position, where it asks; before an odd one: where its quad would end.
EDGES = {
    "long_codes": {("even", 64), ("odd", 64), ("odd", 96)},
    "full_windows": {("even", 32), ("even", 64), ("odd", 64), ("odd", 88)},
    "mixed_codes": {("even", 64), ("odd", 64), ("odd", 65)},
}


@over_dtypes
@pytest.mark.parametrize("name", EDGES)
def test_lanes_that_fill_their_windows(
    name: str, dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The input reaches its edges, and both backends encode and decode it."""
    met: set[tuple[str, int]] = set()
    requests = reference._Pooled.requests

    def observed(state: reference._Pooled, step: int, quad_bits: list[int]) -> list[int]:
        for position, bits in zip(state.position, quad_bits, strict=True):
            met.add(("odd", position + bits) if step % 2 else ("even", position))
        return requests(state, step, quad_bits)

    monkeypatch.setattr(reference._Pooled, "requests", observed)
    values = inputs.hostile(dtype)[name]
    for capacity in (POOLED.capacity_words, MAX_POOLED_CAPACITY):
        payload, spill = check(values, layout_of(POOLED, dtype, values, capacity))
        assert_same_bits(reference.decode(payload, spill), values, "values of the reference")
    assert met >= EDGES[name]


@pytest.mark.parametrize("name", ["wrap_below", "wrap_above"])
def test_exponents_that_wrap(name: str) -> None:
    """A code for a symbol on the other side of 0 or 255, in both backends."""
    values = inputs.hostile(BF16)[name]
    layout = layout_of(POOLED, BF16, values, MAX_POOLED_CAPACITY)
    book, _ = cpu.select(values, layout, ALL_BOOKS)
    exponents = reference.exponents_of(values)[:256]
    shift = reference.mean_exponent(exponents)
    symbols = reference.symbols_of(exponents, shift)
    wrapped = (symbols < ZERO) & (symbols - 128 + shift != exponents)
    assert wrapped.sum() == 1
    assert bank()[book].lengths[symbols[wrapped]] > 0
    payload, spill = check(values, layout)
    assert_same_bits(reference.decode(payload, spill), values, "values of the reference")


@over_dtypes
def test_group_needs(dtype: DType) -> None:
    for name, values in inputs.hostile(dtype).items():
        layout = layout_of(POOLED, dtype, values)
        for book in (0, 8, 12):
            found = cpu.group_needs(values, layout, book)
            assert_same_bits(found, reference.group_needs(values, layout, book), name)


def test_wide_groups_take_room() -> None:
    values = inputs.hostile(UPCAST)["wide_first"]
    layout = layout_of(POOLED, UPCAST, values, 0)
    for backend in (cpu, reference):
        with pytest.raises(ValueError, match="a wide group takes a capacity of at least 4 words"):
            backend.encode(values, layout, 0, 0)


@pytest.mark.parametrize("book", range(len(BANK_ROWS)))
def test_books_and_shifts(book: int) -> None:
    """Books and shifts that nobody would choose for the values."""
    values = inputs.hostile(BF16)["random_exponents"][:4100]
    for preset in (POOLED, PRESETS["high"], PRESETS["clean"]):
        for shift in (0, 100, 255):
            layout = layout_of(preset, BF16, values)
            payload, spill = encode_poisoned(values, layout, book, shift)
            expected = reference.encode(values, layout, book, shift)
            assert_same_bits(payload, expected[0], "payload")
            assert_same_bits(spill, expected[1], "spill")
            check_round_trip(values, layout, payload, spill)


@pytest.mark.parametrize("family", ["gaussian", "laplace", "power-law", "log-normal"])
def test_select_within_a_family(family: str) -> None:
    books = candidates(family)
    for values in inputs.hostile(BF16).values():
        for preset in PRESETS.values():
            layout = layout_of(preset, BF16, values)
            found = cpu.select(values, layout, books)
            assert found[0] in books
            assert found == reference.select(values, layout, books)


@pytest.mark.parametrize("name", inputs.DATA_NAMES)
def test_real_tensors(name: str) -> None:
    """The reference's bytes for a part (it is slow), the values for all of it."""
    tensor = inputs.data_tensors()[name]
    for dtype in inputs.ALL_DTYPES:
        values = inputs.as_dtype(tensor, dtype)
        for preset in PRESETS.values():
            if dtype is UPCAST and not preset.pooled:
                continue
            if dtype is BF16:
                part = values[: preset.group_values + 1500]
                check(part, layout_of(preset, dtype, part))
            layout = layout_of(preset, dtype, values)
            payload, spill = encode_poisoned(values, layout, *cpu.select(values, layout, ALL_BOOKS))
            check_round_trip(values, layout, payload, spill)


def test_extra_tensors(extra_tensor_path: Path) -> None:
    for tensor in inputs.load_tensors(extra_tensor_path).values():
        dtype = DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        if dtype is None:
            continue
        signed = torch.int32 if dtype.itemsize == 4 else torch.int16
        flat = tensor.contiguous().reshape(-1).view(signed).numpy()
        values = flat.view(inputs.pattern_type(dtype))
        for preset in PRESETS.values():
            layout = layout_of(preset, dtype, values)
            payload, spill = encode_poisoned(values, layout, *cpu.select(values, layout, ALL_BOOKS))
            check_round_trip(values, layout, payload, spill)
            part = values[: preset.group_values + 1500]
            check(part, layout_of(preset, dtype, part))


@over_codecs
def test_shares_of_several_threads_make_the_same_bytes(preset: Preset, dtype: DType) -> None:
    """Enough groups for every thread, some of which spill."""
    calm = inputs.gaussian(dtype, 300_000)
    values = np.concatenate([calm, inputs.hostile(dtype)["random_bits"], calm[:70_001]])
    layout = layout_of(preset, dtype, values)
    choice = cpu.select(values, layout, ALL_BOOKS)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 5):
            torch.set_num_threads(threads)
            payload, spill = encode_poisoned(values, layout, *choice)
            check_round_trip(values, layout, payload, spill)
            results.append((payload, spill))
    finally:
        torch.set_num_threads(before)
    assert_same_bits(results[0][0], results[1][0], "payload")
    assert_same_bits(results[0][1], results[1][1], "spill")


def test_python_threads_may_call_at_once() -> None:
    """As autograd does, which decodes in threads of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(8):
                dtype = inputs.ALL_DTYPES[(seed + i) % len(inputs.ALL_DTYPES)]
                values = inputs.gaussian(dtype, 200_000 + seed, seed=seed)
                layout = layout_of(POOLED, dtype, values)
                choice = cpu.select(values, layout, ALL_BOOKS)
                payload, spill = encode_poisoned(values, layout, *choice)
                check_round_trip(values, layout, payload, spill)
        except BaseException as error:
            failures.append(error)

    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        work(3)
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(before)
    assert not failures, failures[0]


def run_python(code: str, **environment: str) -> None:
    """Run ``code`` in a process of its own, which finds the package and the tests."""
    path = os.pathsep.join(str(ROOT / part) for part in ("src", "tests", "tests/backends"))
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


THREADS_GONE = """
import atexit, os, sys
import torch
import inputs, test_cpu
from lct.backends import cpu

torch.set_num_threads(2)
values = inputs.gaussian(test_cpu.BF16, 200_000)
layout = test_cpu.layout_of(test_cpu.POOLED, test_cpu.BF16, values)

def round_trip():
    try:
        ok = (cpu.decode(*cpu.encode(values, layout, 0, 0)) == values).all()
    except BaseException as error:
        print(error)
        ok = False
    if not ok:
        os._exit(3)

round_trip()
if hasattr(os, "fork"):
    child = os.fork()
    if child == 0:
        round_trip()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "forked child"
atexit.register(round_trip)
"""


def test_threads_that_are_gone() -> None:
    """In a forked child and in exit handlers the pool of the process does not work any more."""
    run_python(THREADS_GONE)


def test_no_place_for_the_cache_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from lct.backends.cpu import kernels

    def njit(cache: bool = False):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(kernels, "_njit", njit)
    assert kernels._kernel(abs) is abs


@over_dtypes
def test_arrays_of_any_memory(dtype: DType) -> None:
    """Read-only, unaligned or strided arrays are taken, and the results land where they should."""
    values = inputs.gaussian(dtype, 10_001)
    layout = layout_of(POOLED, dtype, values)
    expected, spill = cpu.encode(values, layout, 0, 0)
    frozen = values.copy()
    frozen.flags.writeable = False
    strided = np.repeat(values, 2)[::2]
    for given_values in (frozen, strided):
        assert_same_bits(cpu.encode(given_values, layout, 0, 0)[0], expected, "payload")
    unaligned = np.full(layout.size_bytes + 1, POISON, np.uint8)[1:]
    cpu.encode(values, layout, 0, 0, unaligned)
    assert_same_bits(unaligned, expected, "unaligned payload")
    assert_same_bits(cpu.decode(unaligned, spill), values, "values")
    read_only = np.frombuffer(expected.tobytes(), np.uint8)
    assert_same_bits(cpu.decode(read_only, spill), values, "values")
    target = np.zeros(2 * len(values), values.dtype)
    cpu.decode(expected, spill, target[::2])
    assert_same_bits(target[::2].copy(), values, "strided values")
    assert not target[1::2].any()


def test_arguments_are_checked() -> None:
    values = inputs.gaussian(BF16, 1000)
    layout = layout_of(POOLED, BF16, values)
    payload, spill = cpu.encode(values, layout, 0, 0)
    with pytest.raises(
        ValueError, match=r"values must be uint16 of shape \(1000,\), got uint16 of"
    ):
        cpu.encode(values[:999], layout, 0, 0)
    with pytest.raises(ValueError, match="values must be uint16"):
        cpu.select(values.astype(np.uint32), layout, ALL_BOOKS)
    with pytest.raises(ValueError, match="payload must be uint8"):
        cpu.encode(values, layout, 0, 0, payload[:-1])
    with pytest.raises(ValueError, match="out must be uint16"):
        cpu.decode(payload, spill, np.empty(1000, np.uint32))
    with pytest.raises(CorruptPayloadError, match="payload must have"):
        cpu.decode(payload[:-1], spill)
    with pytest.raises(CorruptPayloadError, match="spilled data must have 0 bytes, got 1"):
        cpu.decode(payload, np.zeros(1, np.uint8))
    with pytest.raises(CorruptPayloadError, match="a payload has at least 16 bytes"):
        cpu.decode(payload[:15], spill)


@st.composite
def codecs_and_values(draw: st.DrawFn) -> tuple[PayloadLayout, np.ndarray]:
    """A layout, and values with a few scales and exponents, from a seed: long arrays stay cheap."""
    preset, dtype = draw(st.sampled_from([param.values for param in CODECS]))
    size = draw(st.one_of(st.integers(0, 300), st.integers(0, preset.group_values + 300)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    center = draw(st.integers(0, 255))
    spread = draw(st.sampled_from([0, 1, 2, 4, 12, 40, 256]))
    stray = draw(st.sampled_from([0.0, 0.01, 0.3]))
    exponents = center + (rng.standard_normal(size) * spread / 4).astype(np.int64)
    exponents = np.where(rng.random(size) < stray, rng.integers(0, 256, size), exponents)
    exponents[rng.random(size) < draw(st.sampled_from([0.0, 0.5]))] = 0
    values = inputs.pack(dtype, rng.integers(0, 2, size), exponents, rng.integers(0, 2**23, size))
    if dtype is UPCAST and size and draw(st.booleans()):
        values[rng.integers(size)] |= 1
    capacity = preset.capacity_words
    if preset.pooled:
        least = 4 if dtype is UPCAST else 0
        capacity = 4 * draw(st.sampled_from([least // 4, 16, 17, 20, 50, 128, 192, 528]))
    return PayloadLayout(preset, dtype, size, capacity), values


@settings(max_examples=100)
@given(codecs_and_values())
def test_property_same_bytes_and_round_trip(case: tuple[PayloadLayout, np.ndarray]) -> None:
    layout, values = case
    payload, spill = check(values, layout)
    assert_same_bits(reference.decode(payload, spill), values, "values of the reference")


def guarded(array: np.ndarray, fill: int, margin: int = 1 << 16) -> tuple[np.ndarray, np.ndarray]:
    """(copy of ``array``, the memory around it): the copy lies between two margins of ``fill``."""
    memory = np.full(array.nbytes + 2 * margin, fill, np.uint8)
    inner = memory[margin : margin + array.nbytes].view(array.dtype)
    inner[:] = array
    return inner, memory


def decode_guarded(
    payload: np.ndarray, spill: np.ndarray, out: np.ndarray, fill: int
) -> np.ndarray:
    """``cpu.decode`` with ``fill`` around every array; fails if it is touched."""
    margin = 1 << 16
    inner_payload, payload_memory = guarded(payload, fill)
    inner_spill, spill_memory = guarded(spill, fill)
    inner_out, out_memory = guarded(out, fill)
    cpu.decode(inner_payload, inner_spill, inner_out)
    for memory in (payload_memory, spill_memory, out_memory):
        assert (memory[:margin] == fill).all() and (memory[-margin:] == fill).all()
    assert_same_bits(inner_payload, payload, "payload after decode")
    return inner_out


def damage_and_decode(
    layout: PayloadLayout, values: np.ndarray, seed: int, flips: int, where: str
) -> None:
    """Flip bits: validation raises, or decode gives some values, from nothing but its arrays."""
    choice = cpu.select(values, layout, ALL_BOOKS)
    payload, spill = cpu.encode(values, layout, *choice)
    rng = np.random.default_rng(seed)
    first, last = {
        "streams": (HEADER_BYTES, layout.sign_fraction_offset),
        "lanes": (layout.lane_offset, layout.meta_offset),
        "meta": (layout.meta_offset, payload.size),
        "header": (0, HEADER_BYTES),
        "anywhere": (0, payload.size),
    }[where]
    if layout.is_raw:
        first, last = 0, payload.size
    damaged = payload.copy()
    if last > first:
        damaged[rng.integers(first, last, flips)] ^= rng.integers(1, 256, flips).astype(np.uint8)
    out = np.zeros_like(values)
    valid = True
    try:
        validate_payload(layout, damaged, spill.size)
    except CorruptPayloadError:
        valid = False
    try:
        found = [decode_guarded(damaged, spill, out, fill) for fill in (0x00, 0xFF)]
    except (CorruptPayloadError, ValueError) as error:
        # ``out`` has another size than the header says, or decode found what validation found.
        assert not valid, error
        return
    assert_same_bits(found[0], found[1], "values, which must not depend on memory around")
    if valid and where == "streams":
        assert_same_bits(found[0], reference.decode(damaged, spill), "values of damaged streams")


damages = st.sampled_from(["streams", "lanes", "meta", "header", "anywhere"])


@settings(max_examples=250)
@given(codecs_and_values(), st.integers(0, 2**32 - 1), st.integers(1, 40), damages)
def test_property_damage(
    case: tuple[PayloadLayout, np.ndarray], seed: int, flips: int, where: str
) -> None:
    damage_and_decode(*case, seed, flips, where)


@settings(max_examples=100)
@given(codecs_and_values(), st.data())
def test_property_truncation(case: tuple[PayloadLayout, np.ndarray], data: st.DataObject) -> None:
    layout, values = case
    payload, spill = cpu.encode(values, layout, *cpu.select(values, layout, ALL_BOOKS))
    joined = np.concatenate([payload, spill])
    kept = joined[: data.draw(st.integers(0, max(joined.size - 1, 0)))]
    part, rest = kept[: layout.size_bytes], kept[layout.size_bytes :]
    with pytest.raises(CorruptPayloadError):
        validate_payload(layout, part, rest.size)
    with pytest.raises(CorruptPayloadError):
        cpu.decode(part, rest)


BOUNDS_CHECK = """
import numpy as np
import inputs, test_cpu

calm = inputs.gaussian(test_cpu.BF16, 9000)
try:  # an array that is too small: is the check on?
    layout = test_cpu.layout_of(test_cpu.POOLED, test_cpu.BF16, calm)
    arguments = calm, test_cpu.cpu._geometry(layout), test_cpu.cpu._code_table(0)
    test_cpu.cpu._kernels().measure_groups(*arguments, np.zeros(1, np.int32), 0, 2)
except IndexError:
    pass
else:
    raise SystemExit("indices are not checked")

for n, (preset, dtype) in enumerate(param.values for param in test_cpu.CODECS):
    hostile = inputs.hostile(dtype)
    for name in ("random_bits", "extremes", "sparse", "wide_first", "outlier_middle"):
        if name not in hostile:
            continue
        values = hostile[name]
        for capacity in (4, 68, 768) if preset.pooled else (preset.capacity_words,):
            layout = test_cpu.layout_of(preset, dtype, values, capacity)
            for where in ("streams", "lanes", "meta", "anywhere"):
                test_cpu.damage_and_decode(layout, values, n, 200, where)
    if preset.pooled:
        test_cpu.cpu.group_needs(values, layout, 0)
"""


def test_no_access_outside_of_arrays(tmp_path: Path) -> None:
    """The kernels, compiled with a check of every index, on damaged payloads."""
    run_python(BOUNDS_CHECK, NUMBA_BOUNDSCHECK="1", NUMBA_CACHE_DIR=str(tmp_path))
