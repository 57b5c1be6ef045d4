"""The storage analysis against brute force, bounds and the real encoder."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lct
from lct import analysis
from lct.analysis import (
    OCTAVES,
    SAMPLERS,
    allocate,
    analyze_distribution,
    analyze_families,
    analyze_mismatch,
    analyze_tensor,
    best_book,
    entropy_bits,
    exponents_of,
    huffman_bits,
    ideal_bits,
    sample,
    span_symbols,
    spilled_values,
    stream_overflow,
)
from lct.backends import reference
from lct.codebook import BANK_ROWS, ZERO, bank, candidates
from lct.distributions import FAMILIES, exponent_probabilities
from lct.presets import PRESETS

HISTOGRAMS = st.lists(st.integers(0, 1000), min_size=1, max_size=40).filter(any)


@given(HISTOGRAMS)
def test_costs_are_ordered_as_theory_says(counts: list[int]) -> None:
    weights = np.array(counts)
    entropy, ideal, huffman = entropy_bits(weights), ideal_bits(weights), huffman_bits(weights)
    assert 0 <= entropy <= ideal + 1e-9
    assert ideal <= entropy + 1
    assert ideal <= huffman + 1e-9
    assert huffman <= 8 + 1e-9


def test_entropy_in_closed_form() -> None:
    assert entropy_bits(np.ones(16)) == pytest.approx(4)
    assert entropy_bits(np.array([0, 7, 0])) == 0
    assert entropy_bits(np.zeros(4)) == 0
    assert entropy_bits(np.array([1, 3])) == pytest.approx(2 - 0.75 * np.log2(3))


def test_dyadic_histograms_cost_their_entropy() -> None:
    weights = np.array([8, 4, 2, 1, 1])
    assert ideal_bits(weights) == huffman_bits(weights) == pytest.approx(entropy_bits(weights))


def test_a_single_symbol() -> None:
    assert ideal_bits(np.array([0, 9])) == 0
    assert huffman_bits(np.array([0, 9])) == 1  # a code has at least one bit
    assert huffman_bits(np.zeros(3)) == 0


def test_ideal_code_by_hand() -> None:
    # 5, 9, 12, 13, 16, 45: the textbook's example costs 224 bits for 100 symbols.
    assert ideal_bits(np.array([5, 9, 12, 13, 16, 45])) == pytest.approx(2.24)


def test_escape_beats_a_code_for_every_symbol(rng: np.random.Generator) -> None:
    """One frequent symbol and 200 rare ones: every choice of escapes by brute force."""
    weights = np.r_[10_000, rng.integers(1, 3, 200)]
    p = np.sort(weights / weights.sum())[::-1]
    best = np.inf
    for kept in range(1, 201):
        shares = np.append(p[:kept], p[kept:].sum()) if kept < len(p) else p
        cost = float(shares @ analysis.length_limited_code(shares)) + 8 * float(p[kept:].sum())
        best = min(best, cost)
    assert huffman_bits(weights) == pytest.approx(best)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_exponents_are_those_of_the_format(dtype: torch.dtype, rng: np.random.Generator) -> None:
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    low, high = torch.iinfo(integer).min, torch.iinfo(integer).max
    dense = torch.from_numpy(rng.integers(low, high, 4096)).to(integer).view(dtype)
    patterns = dense.view(integer).numpy().view(np.uint32 if integer == torch.int32 else np.uint16)
    row = analysis.get_dtype(str(dtype).removeprefix("torch."))
    expected = reference.exponents_of(reference.split(patterns, row)[0])
    assert (exponents_of(dense) == expected).all()
    assert (exponents_of(dense.reshape(64, 64).t()) == expected.reshape(64, 64).T.ravel()).all()


def test_exponents_of_other_dtypes() -> None:
    with pytest.raises(TypeError, match=r"dtype must be one of bfloat16, .* got float64"):
        exponents_of(torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("n", [1, 255, 256, 257, 5000])
def test_span_symbols_are_those_of_the_reference(n: int, rng: np.random.Generator) -> None:
    exponents = rng.integers(0, 256, n).astype(np.uint8) * rng.integers(0, 2, n).astype(np.uint8)
    expected = np.zeros(ZERO + 1, np.int64)
    for start in range(0, n, 256):
        part = exponents[start : start + 256]
        symbols = reference.symbols_of(part, reference.mean_exponent(part))
        expected += np.bincount(symbols, minlength=ZERO + 1)
    assert (span_symbols(exponents) == expected).all()


@pytest.mark.parametrize("distribution", FAMILIES)
def test_best_book_is_the_encoder_s_choice(distribution: str) -> None:
    """A tensor that the encoder's sample covers whole: same book, same cost."""
    dense = sample(distribution, 0.02, 64 * 256, seed=1)
    name, bits = best_book(span_symbols(exponents_of(dense)))
    assert name == lct.encode(dense).book
    book = next(book for book in bank() if book.name == name)
    assert bits == pytest.approx(
        float(span_symbols(exponents_of(dense)) @ book.cost_bits) / dense.numel()
    )


def noise(n: int, rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(rng.integers(-(2**15), 2**15, n, np.int16)).view(torch.bfloat16)


@pytest.mark.parametrize("preset", PRESETS)
def test_spilled_values(preset: str, rng: np.random.Generator) -> None:
    block = PRESETS[preset].block_values
    dense = torch.cat([sample("gaussian", 0.02, block, 0), noise(block, rng)])
    assert spilled_values(lct.encode(dense[:block], preset=preset)) <= block // 500
    spilled = spilled_values(lct.encode(dense, preset=preset))
    assert 0.7 * block < spilled <= 1.02 * block  # one book for both halves: some of the first too


def test_spilled_values_of_raw_wide_and_empty_tensors() -> None:
    assert spilled_values(lct.encode(torch.zeros(0, dtype=torch.bfloat16))) == 0
    assert spilled_values(lct.encode(torch.zeros(3, dtype=torch.bfloat16))) == 0
    dense = torch.ones(3 * 8192)
    dense[8192] += 2**-20  # a lower half that is not zero: the whole group goes wide
    assert spilled_values(lct.encode(dense, upcast=True)) == 8192


@pytest.mark.parametrize("preset", ["pooled", "high"])
def test_allocation_counts_every_byte(preset: str) -> None:
    dense = sample("laplace", 0.02, 65536, seed=0)
    compressed = lct.encode(dense, preset=preset)
    found = allocate(dense, preset)
    assert found.allocated_bits == pytest.approx(8 * compressed.nbytes / 65536 - 8)
    assert found.ratio == compressed.ratio == pytest.approx(16 / (8 + found.allocated_bits))
    assert (found.preset, found.book) == (preset, compressed.book)
    spill_bytes = compressed.group_counts().spill_bytes
    assert compressed.nbytes == compressed.payload.nbytes + spill_bytes
    assert (spill_bytes > 0) == (found.spilled_share > 0)
    assert spill_bytes > 0 or preset == "pooled"


@pytest.mark.parametrize("distribution", FAMILIES)
def test_samples_follow_the_closed_form(distribution: str) -> None:
    n = 200_000
    counts = np.bincount(exponents_of(sample(distribution, 0.02, n, seed=3)), minlength=256)
    p = exponent_probabilities(FAMILIES[distribution], 0.02)
    # BF16 rounding moves 2^-9 of an octave's values up.
    assert (np.abs(counts - n * p) <= 6 * np.sqrt(n * p) + n * p / 256 + 1).all()
    again = sample(distribution, 0.02, n, seed=3)
    assert torch.equal(again, sample(distribution, 0.02, n, seed=3))
    assert set(SAMPLERS) == set(FAMILIES)


def test_distribution_report() -> None:
    layouts = [("clean", None), ("pooled", None), ("pooled", "exact")]
    report = analyze_distribution("gaussian", 0.0, 65536, 0, layouts)
    assert report.entropy_bits == pytest.approx(2.545, abs=5e-4)
    assert report.entropy_bits < report.ideal_bits < report.huffman_bits < report.book_bits < 2.65
    clean, pooled, exact = report.allocations
    assert clean.ratio > 1.433
    assert pooled.ratio > 1.44
    assert exact.ratio > pooled.ratio
    assert clean.spilled_share == pooled.spilled_share == exact.spilled_share == 0
    assert report.book.startswith("gaussian")
    with pytest.raises(ValueError, match="distribution must be one of"):
        analyze_distribution("uniform", 0.0, 4096, 0, layouts)
    with pytest.raises(ValueError, match="preset must be one of"):
        analyze_distribution("gaussian", 0.0, 4096, 0, [("best", None)])


@pytest.mark.parametrize("distribution", FAMILIES)
def test_mismatch_costs(distribution: str) -> None:
    reports = analyze_mismatch(distribution, 65536, seed=0)
    assert [r.octaves for r in reports] == list(OCTAVES) == list(range(-4, 5))
    bits = [r.book_bits for r in reports]
    middle = bits.index(min(bits))
    assert reports[middle].octaves == 0
    assert bits[: middle + 1] == sorted(bits[: middle + 1], reverse=True)
    assert bits[middle:] == sorted(bits[middle:])
    costs = bank()[candidates(distribution)[0]].cost_bits
    assert max(bits) <= costs.max() + 1e-9
    shares = [r.spilled_share for r in reports]
    assert shares[middle] == min(shares)


def test_stream_overflow_by_hand() -> None:
    preset = PRESETS["clean"]
    room = preset.capacity_words * 32
    # 64 quads of 4 values; a quad of 16 bits fits room // 16 times.
    assert stream_overflow(np.full(256, 4), preset) == pytest.approx(1 - (room // 16) / 64)
    assert stream_overflow(np.full(256, 3), preset) == 0
    assert stream_overflow(np.full(255, 9), preset) == 0  # no whole stream


def test_stream_overflow_agrees_with_the_encoder() -> None:
    """Independent values: dealing them in another order changes nothing but noise."""
    n = 1 << 20
    dense = sample("power-law", 0.02 * 2**0.375, n, seed=0)
    compressed = lct.encode(dense, preset="clean", distribution="power-law")
    payload, shift = compressed.canonical_bytes(), compressed.canonical_bytes()[4]
    costs = bank()[payload[3]].cost_bits
    expected = stream_overflow(
        costs[reference.symbols_of(exponents_of(dense), shift)], PRESETS["clean"]
    )
    found = spilled_values(compressed) / n
    assert expected > 0
    assert found == pytest.approx(expected, rel=0.3)


def test_own_books_fit_best() -> None:
    table = analyze_families()
    for data, costs in table.items():
        assert min(costs, key=costs.__getitem__) == data


def test_given_tensors(rng: np.random.Generator) -> None:
    dense = sample("gaussian", 0.02, 65536, 0).reshape(256, 256)
    report = analyze_tensor(dense)
    assert report.num_values == 65536
    assert report.entropy_bits <= report.ideal_bits <= report.huffman_bits
    assert report.book in {row.name for row in BANK_ROWS}
    # Prediction and truth differ by the spread of the groups' needs and the head-room: 3 %.
    real = lct.encode(dense, capacity="exact").ratio
    assert report.predicted_ratio == pytest.approx(real, rel=0.03)
    rows = dense * torch.exp2(torch.arange(-8, 8).repeat(16))[:, None]
    by_row = analyze_tensor(rows)
    assert by_row.book_bits < by_row.entropy_bits - 1


def test_special_tensors(rng: np.random.Generator) -> None:
    zeros = analyze_tensor(torch.zeros(65536, dtype=torch.bfloat16))
    assert (zeros.zero_share, zeros.entropy_bits) == (1, 0)
    assert zeros.predicted_ratio > 1.98
    empty = analyze_tensor(torch.zeros(0, dtype=torch.bfloat16))
    assert (empty.num_values, empty.predicted_ratio) == (0, 1)
    random = analyze_tensor(noise(65536, rng))
    assert random.entropy_bits > 7.9
    assert random.predicted_ratio == 1
    upcast = analyze_tensor(sample("gaussian", 0.02, 65536, 0).float())
    assert upcast.predicted_ratio > 2.8
    assert analyze_tensor(torch.ones(1)).predicted_ratio == 1
