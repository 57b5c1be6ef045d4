"""Length-limited canonical Huffman codes with an escape, and the bank of precomputed books.

Symbols (docs/format.md, section 4): 0..255 = exponent relative to the shift, plus 128, modulo 256;
256 = ZERO (exponent byte 0, whatever the shift); 257 = ESC, followed by the absolute exponent byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from .distributions import FAMILIES, get_family, relative_probabilities

MAX_LENGTH = 8
ZERO, ESC, NUM_SYMBOLS = 256, 257, 258
CENTER = 128
LITERAL_BITS = 8
# A warp leaves its fast path where one of 512 values escapes. Books may cost this much more a value
# (0.1 % of storage) for fewer escapes: on Gaussian data 1 of 16,000 values, not 1 of 1,600.
ESCAPE_SLACK_BITS = 0.0125


def length_limited_code(weights: np.ndarray, max_length: int = MAX_LENGTH) -> np.ndarray:
    """Optimal code lengths <= ``max_length`` for ``weights``, shape (n,).

    Package-merge (Larmore, Hirschberg 1990); n >= 2; ValueError when 2^max_length < n. Ties fall to
    the lower index, so that every machine builds the same book.
    """
    n = len(weights)
    if not 2 <= n <= 1 << max_length:
        raise ValueError(
            f"a code of at most {max_length} bits takes 2 to {1 << max_length} symbols, got {n}"
        )
    items = sorted((float(w), (i,)) for i, w in enumerate(weights))
    packages: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(max_length):
        row = sorted(items + packages, key=lambda t: t[0])
        packages = [
            (row[2 * i][0] + row[2 * i + 1][0], row[2 * i][1] + row[2 * i + 1][1])
            for i in range(len(row) // 2)
        ]
    lengths = np.zeros(n, np.int64)
    for _, members in packages[: n - 1]:
        for i in members:
            lengths[i] += 1
    return lengths


def canonical_codes(lengths: np.ndarray) -> np.ndarray:
    """Canonical code words, shape (n,): shorter first, then by symbol; length 0 means no code."""
    codes = np.zeros(len(lengths), np.int64)
    code = previous = 0
    for length, symbol in sorted((int(v), i) for i, v in enumerate(lengths) if v):
        code <<= length - previous
        codes[symbol], previous = code, length
        code += 1
    return codes


@dataclass(frozen=True)
class Codebook:
    """``lengths`` and ``codes``, shape (258,); length 0 = no code of its own, so it escapes."""

    name: str
    family: str
    lengths: np.ndarray
    codes: np.ndarray

    @property
    def cost_bits(self) -> np.ndarray:
        """Bits that each symbol 0..256 costs, literal included; shape (257,)."""
        own = self.lengths[:ESC]
        return np.where(own > 0, own, self.lengths[ESC] + LITERAL_BITS)


def build_codebook(name: str, family: str, probabilities: np.ndarray) -> Codebook:
    """The cheapest book for ``probabilities``, shape (257,): which symbols escape is chosen too.

    CENTER and ZERO always have codes of their own. The escape weighs what the others leave, at
    least 2^-10: data that a book does not fit must stay decodable at a bounded cost. Of books that
    cost within ``ESCAPE_SLACK_BITS`` of the best, the one with the fewest escapes is taken.
    """
    order = [int(s) for s in np.argsort(-probabilities, kind="stable") if s not in (CENTER, ZERO)]
    books: list[tuple[float, np.ndarray]] = []
    for kept in range(1, min(64, len(order))):
        symbols = sorted([CENTER, ZERO, *order[:kept]])
        escape = max(1.0 - float(probabilities[symbols].sum()), 0.0)
        weights = np.append(np.maximum(probabilities[symbols], 2.0**-30), max(escape, 2.0**-10))
        lengths = length_limited_code(weights)
        cost = float(probabilities[symbols] @ lengths[:-1]) + escape * (
            int(lengths[-1]) + LITERAL_BITS
        )
        full = np.zeros(NUM_SYMBOLS, np.int64)
        full[[*symbols, ESC]] = lengths
        books.append((cost, full))
    least = min(cost for cost, _ in books)
    chosen = [full for cost, full in books if cost <= least + ESCAPE_SLACK_BITS][-1]
    return Codebook(name, family, chosen, canonical_codes(chosen))


# Phases of the scale, in octaves, that every book is averaged over. A book for one phase alone
# saves up to 2 % of the exponents' bits there and costs up to 15 % elsewhere; optimizer state
# drifts through all of them.
PHASES = (0.0, 0.25, 0.5, 0.75)


@dataclass(frozen=True)
class BankRow:
    """A precomputed book: mixture of families (equal shares) and zero share."""

    families: tuple[str, ...]
    zero_share: float

    @property
    def name(self) -> str:
        """Name in reports."""
        base = "+".join(self.families)
        return base + (f", {self.zero_share:.0%} zeros" if self.zero_share else "")


# A book's id is its place in this table and stands in payloads: append, never reorder.
BANK_ROWS: tuple[BankRow, ...] = (
    BankRow(("gaussian",), 0.0),
    BankRow(("gaussian", "laplace"), 0.0),
    BankRow(("laplace",), 0.0),
    BankRow(("power-law",), 0.0),
    BankRow(("log-normal",), 0.0),
    BankRow(("gaussian",), 0.02),
    BankRow(("laplace",), 0.25),
    BankRow(("laplace",), 0.5),
    BankRow(("laplace",), 0.75),
    BankRow(("power-law",), 0.25),
    BankRow(("power-law",), 0.75),
    BankRow(("log-normal",), 0.5),
    BankRow(("laplace",), 0.95),
)


@cache
def bank() -> tuple[Codebook, ...]:
    """All precomputed books, in the order of ``BANK_ROWS``; built once, in about 0.2 s."""
    books = []
    for row in BANK_ROWS:
        parts = [relative_probabilities(FAMILIES[f], row.zero_share, PHASES) for f in row.families]
        books.append(build_codebook(row.name, row.families[0], sum(parts) / len(parts)))  # type: ignore[arg-type]
    return tuple(books)


def candidates(distribution: str | None) -> tuple[int, ...]:
    """Ids of the books to choose among: all (``None``), or those of one family.

    Zero-inflated forms belong to their family. ValueError for an unknown distribution.
    """
    if distribution is None:
        return tuple(range(len(BANK_ROWS)))
    name = get_family(distribution).name
    return tuple(i for i, row in enumerate(BANK_ROWS) if row.families == (name,))
