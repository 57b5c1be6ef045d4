"""Codes against brute force, and what every book of the bank must have."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lct import codebook
from lct.codebook import (
    BANK_ROWS,
    CENTER,
    ESC,
    LITERAL_BITS,
    MAX_LENGTH,
    NUM_SYMBOLS,
    ZERO,
    Codebook,
    bank,
    build_codebook,
    candidates,
    canonical_codes,
    length_limited_code,
)
from lct.presets import DEFAULT_PRESET, PRESETS, get_preset

WEIGHTS = st.lists(st.floats(0, 1, allow_subnormal=False), min_size=2, max_size=6)


def kraft_feasible(n: int, max_length: int) -> np.ndarray:
    """All assignments of lengths 1..max_length to n symbols that a prefix code can have."""
    lengths = np.array(list(itertools.product(range(1, max_length + 1), repeat=n)))
    return lengths[(0.5**lengths).sum(1) <= 1]


FEASIBLE = {
    (n, limit): kraft_feasible(n, limit)
    for n in range(2, 7)
    for limit in range(2, 6)
    if n <= 1 << limit
}


def words(lengths: np.ndarray, codes: np.ndarray) -> list[str]:
    return [format(int(c), f"0{int(v)}b") for c, v in zip(codes, lengths, strict=True) if v]


def is_prefix_free(code_words: list[str]) -> bool:
    ordered = sorted(code_words)
    return all(not b.startswith(a) for a, b in itertools.pairwise(ordered))


@given(WEIGHTS, st.integers(2, 5))
def test_length_limited_code_is_optimal(weights: list[float], limit: int) -> None:
    if len(weights) > 1 << limit:
        return
    w = np.array(weights)
    lengths = length_limited_code(w, limit)
    assert lengths.max() <= limit
    assert (0.5**lengths).sum() <= 1
    best = (FEASIBLE[len(w), limit] @ w).min()
    assert float(lengths @ w) == pytest.approx(best, rel=1e-9, abs=1e-12)


def test_limit_of_length_binds() -> None:
    """Fibonacci weights: without a limit the longest of 12 codes has 11 bits."""
    w = np.array([1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144], float)
    assert length_limited_code(w, 12).max() == 11
    limited = length_limited_code(w, 4)
    assert limited.max() == 4
    assert (0.5**limited).sum() == 1


@pytest.mark.parametrize("n", [0, 1, 257])
def test_impossible_alphabets_are_refused(n: int) -> None:
    with pytest.raises(ValueError, match=f"2 to 256 symbols, got {n}"):
        length_limited_code(np.ones(n))


def test_ties_fall_to_the_lower_index() -> None:
    assert length_limited_code(np.ones(3)).tolist() == [2, 2, 1]
    assert length_limited_code(np.ones(256)).tolist() == [8] * 256


@given(WEIGHTS)
def test_canonical_codes_are_prefix_free_and_ordered(weights: list[float]) -> None:
    lengths = length_limited_code(np.array(weights), 8)
    code_words = words(lengths, canonical_codes(lengths))
    assert is_prefix_free(code_words)
    by_rank = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    values = [int(code_words[i].ljust(8, "0"), 2) for i in by_rank]
    assert values == sorted(values)
    assert int(code_words[by_rank[0]], 2) == 0


# Rare symbols and the escape weigh at least 2^-30 and 2^-10 when lengths are chosen, so a book may
# cost this much more than the best one for the very probabilities.
FLOOR_BITS = MAX_LENGTH * 2.0**-10 + 1e-6


def brute_force_cost(probabilities: np.ndarray, others: list[int]) -> float:
    """Least cost over every choice of symbols that escape and every feasible set of lengths."""
    best = np.inf
    for count in range(1, len(others) + 1):
        for kept in itertools.combinations(others, count):
            own = probabilities[[CENTER, ZERO, *kept]]
            escape = max(1.0 - own.sum(), 0.0)
            coded = (all_lengths(len(own) + 1) @ np.append(own, escape)).min()
            best = min(best, float(coded) + LITERAL_BITS * escape)
    return best


@cache
def all_lengths(n: int) -> np.ndarray:
    return kraft_feasible(n, max(n - 1, 2))  # an optimal code of n symbols has lengths below n


@pytest.mark.parametrize("zero_share", [0.0, 0.01, 0.6])
def test_choice_of_escaped_symbols(
    zero_share: float, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without slack the cheapest book; with slack no dearer than that allows, and fewer escapes."""
    for _ in range(6):
        others = [int(s) for s in rng.choice(np.r_[100:128, 129:150], 4, replace=False)]
        p = np.zeros(ZERO + 1)
        p[[CENTER, *others]] = rng.dirichlet(np.full(5, 0.5)) * (1 - zero_share)
        p[ZERO] = zero_share
        book = build_codebook("test", "test", p)
        with monkeypatch.context() as patch:
            patch.setattr(codebook, "ESCAPE_SLACK_BITS", 1e-12)
            cheapest = build_codebook("test", "test", p)
        least = brute_force_cost(p, others)
        cost, cheapest_cost = (float(p @ b.cost_bits) for b in (book, cheapest))
        assert least - 1e-9 <= cheapest_cost <= least + FLOOR_BITS
        assert cheapest_cost - 1e-9 <= cost <= cheapest_cost + codebook.ESCAPE_SLACK_BITS + 1e-9
        escaped, least_escaped = (float(p[b.lengths[:ESC] == 0].sum()) for b in (cheapest, book))
        assert least_escaped <= escaped


@pytest.mark.parametrize("book", bank(), ids=lambda book: book.name)
def test_book_is_complete_and_within_the_limits(book: Codebook) -> None:
    assert book.lengths.shape == book.codes.shape == (NUM_SYMBOLS,)
    assert book.lengths.max() <= MAX_LENGTH
    assert book.lengths[CENTER] > 0
    assert book.lengths[ZERO] > 0
    assert book.lengths[ESC] > 0
    coded = book.lengths[book.lengths > 0]
    # Equal to 1: every 8-bit window decodes to a symbol, so that damage cannot leave the table.
    assert (0.5**coded).sum() == 1
    code_words = words(book.lengths, book.codes)
    assert len(code_words) == len(coded)
    assert is_prefix_free(code_words)
    assert (canonical_codes(book.lengths) == book.codes).all()


@pytest.mark.parametrize("book", bank(), ids=lambda book: book.name)
def test_cost_counts_the_literal(book: Codebook) -> None:
    cost = book.cost_bits
    assert cost.shape == (ZERO + 1,)
    escaped = book.lengths[:ESC] == 0
    assert escaped.any()
    assert (cost[escaped] == book.lengths[ESC] + LITERAL_BITS).all()
    assert (cost[~escaped] == book.lengths[:ESC][~escaped]).all()


def test_bank_has_the_table_s_books() -> None:
    assert [book.name for book in bank()] == [row.name for row in BANK_ROWS]
    assert len({book.name for book in bank()}) == len(BANK_ROWS) <= 256
    assert bank() is bank()


def test_candidates() -> None:
    assert candidates(None) == tuple(range(len(BANK_ROWS)))
    for family in ("gaussian", "laplace", "power-law", "log-normal"):
        ids = candidates(family)
        assert ids
        assert all(BANK_ROWS[i].families == (family,) for i in ids)
    with pytest.raises(ValueError, match=r"distribution must be one of .* got 'normal'"):
        candidates("normal")


def test_presets_by_name() -> None:
    assert get_preset(None) is PRESETS[DEFAULT_PRESET]
    for name, preset in PRESETS.items():
        assert get_preset(name) is preset
    with pytest.raises(ValueError, match=r"preset must be one of clean, .* got 'CLEAN'"):
        get_preset("CLEAN")
    with pytest.raises(ValueError, match="got 'raw'"):
        get_preset("raw")
