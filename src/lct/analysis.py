"""The storage analysis: what exponents cost, in closed form and through the real encoder.

All costs are bits per exponent. *Entropy*: the bound. *Ideal*: the best prefix code, of any length.
*Huffman*: the best code of at most 8 bits with an escape, made for the very distribution. *Book*:
the bank's best book. *Allocated*: every byte that ``lct.encode`` holds beside the bytes that it
stores as they are, so headers, markers, unused room and spilled chunks included.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from . import ops
from .checkpoint.dense import is_upcast
from .codebook import (
    BANK_ROWS,
    CENTER,
    LITERAL_BITS,
    MAX_LENGTH,
    ZERO,
    bank,
    candidates,
    length_limited_code,
)
from .distributions import (
    FAMILIES,
    NUM_EXPONENTS,
    exponent_probabilities,
    get_family,
    relative_probabilities,
)
from .dtypes import UPCAST, get_dtype
from .layout import (
    MARKER_MASK,
    STATE_SHIFT,
    STATE_SPILLED,
    STATE_WIDE,
    WORD_BYTES,
    PayloadLayout,
)
from .presets import LANES, PRESETS, QUAD, STEP_VALUES, Preset
from .tensor import Capacity, CompressedTensor, encode

SPAN_VALUES = 256
WORD_BITS = 8 * WORD_BYTES
# What a lane does not use of the words that it was handed: 0.85 words on average, measured on
# Gaussian data at seven phases of the scale (27 to 28 words a group of 32 lanes).
SLACK_BITS = 0.85 * WORD_BITS / SPAN_VALUES
BASE_SCALE = 0.02
OCTAVES = range(-4, 5)

_EXPONENT_FIELDS = {torch.bfloat16: (7, 0xFF), torch.float32: (23, 0xFF), torch.float16: (10, 0x1F)}


def exponents_of(dense: torch.Tensor) -> np.ndarray:
    """Exponent bytes of a BF16, FP32 or FP16 tensor, uint8 (num_values,); else TypeError."""
    if dense.dtype not in _EXPONENT_FIELDS:
        get_dtype(str(dense.dtype).removeprefix("torch."))
    position, mask = _EXPONENT_FIELDS[dense.dtype]
    return (ops.patterns(dense.detach().cpu().contiguous()) >> position & mask).astype(np.uint8)


def entropy_bits(weights: np.ndarray) -> float:
    """Entropy of a histogram or of probabilities; 0 where all weights are 0."""
    p = weights[weights > 0] / max(float(weights.sum()), 1e-300)
    return abs(float(-(p * np.log2(p)).sum()))


def ideal_bits(weights: np.ndarray) -> float:
    """Mean length of the best prefix code without a limit (Huffman 1952); 0 for a single symbol."""
    heap = [float(w) for w in weights if w > 0]
    total, cost = sum(heap), 0.0
    heapq.heapify(heap)
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        cost += merged
        heapq.heappush(heap, merged)
    return cost / total if total else 0.0


def huffman_bits(weights: np.ndarray) -> float:
    """Mean length of the best code of at most 8 bits whose rare symbols share an escape.

    Tries the number of symbols with a code of their own; stops when eight more did not help, since
    past the best number every further symbol only takes from the escape's share.
    """
    p = np.sort(weights[weights > 0] / max(float(weights.sum()), 1e-300))[::-1]
    if len(p) < 2:
        return float(len(p))
    best, since = np.inf, 0
    for kept in range(1, min(len(p), (1 << MAX_LENGTH) - 1) + 1):
        escaped = float(p[kept:].sum())
        shares = np.append(p[:kept], escaped) if kept < len(p) else p[:kept]
        lengths = length_limited_code(shares) if len(shares) > 1 else np.ones(1)
        cost = float(shares @ lengths) + LITERAL_BITS * escaped
        best, since = (cost, 0) if cost < best - 1e-12 else (best, since + 1)
        if since == 8:
            break
    return float(best)


def span_symbols(exponents: np.ndarray) -> np.ndarray:
    """Histogram (257,) of symbols relative to the shift of each 256 values (POOLED)."""
    padded = np.zeros(-(-len(exponents) // SPAN_VALUES) * SPAN_VALUES, np.int64)
    padded[: len(exponents)] = exponents
    spans = padded.reshape(-1, SPAN_VALUES)
    count = np.count_nonzero(spans, axis=1)
    shifts = (spans.sum(1) + count // 2) // np.maximum(count, 1)
    symbols = np.where(spans == 0, ZERO, (spans - shifts[:, None] + CENTER) % NUM_EXPONENTS)
    return np.bincount(symbols.reshape(-1)[: len(exponents)], minlength=ZERO + 1)


def best_book(symbols: np.ndarray, books: tuple[int, ...] | None = None) -> tuple[str, float]:
    """(name, bits per exponent) of the cheapest book for a histogram or probabilities (257,)."""
    ids = candidates(None) if books is None else books
    costs = [float(symbols @ bank()[book].cost_bits) for book in ids]
    best = int(np.argmin(costs))
    return BANK_ROWS[ids[best]].name, costs[best] / max(float(symbols.sum()), 1e-300)


def spilled_values(compressed: CompressedTensor) -> int:
    """How many values of ``compressed`` are not coded but spilled. Synchronises on CUDA."""
    layout = compressed.layout
    if not layout.num_groups:
        return 0
    payload, _ = ops.to_canonical(compressed._stored, layout)
    meta = payload[layout.meta_offset :][: WORD_BYTES * layout.num_groups].view("<u4")
    lanes = payload[layout.lane_offset : layout.meta_offset].reshape(-1, LANES).astype(np.int64)
    state = meta >> STATE_SHIFT
    steps = np.full(layout.num_groups, layout.preset.steps)
    steps[layout.full_groups :] = layout.tail_steps
    if layout.preset.pooled:
        left = (steps - (state & MARKER_MASK)) * STEP_VALUES
    else:
        left = (steps[:, None] - lanes).sum(1) * QUAD
    count = (
        left[state & STATE_SPILLED != 0].sum() + (steps[state == STATE_WIDE] * STEP_VALUES).sum()
    )
    return min(int(count), layout.num_values)


@dataclass(frozen=True)
class Allocation:
    """What ``lct.encode`` made of a tensor. ``spilled_share``: share of the values."""

    preset: str
    book: str
    allocated_bits: float
    ratio: float
    spilled_share: float


def allocate(
    dense: torch.Tensor,
    preset: str | None,
    distribution: str | None = None,
    capacity: Capacity = None,
) -> Allocation:
    """Encode ``dense`` and count."""
    compressed = encode(dense, preset=preset, distribution=distribution, capacity=capacity)
    num_values = max(dense.numel(), 1)
    plain_bits = 8 + compressed.layout.dtype.low_bits
    return Allocation(
        preset=compressed.preset,
        book=compressed.book,
        allocated_bits=8 * compressed.nbytes / num_values - plain_bits,
        ratio=compressed.ratio,
        spilled_share=spilled_values(compressed) / num_values,
    )


@dataclass(frozen=True)
class DistributionReport:
    """A family at one phase of the scale: costs in closed form, allocations of a seeded sample."""

    distribution: str
    phase: float
    scale: float
    entropy_bits: float
    ideal_bits: float
    huffman_bits: float
    book: str
    book_bits: float
    allocations: tuple[Allocation, ...]


SAMPLERS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "gaussian": lambda rng, n: rng.standard_normal(n),
    "laplace": lambda rng, n: rng.laplace(size=n),
    "power-law": lambda rng, n: rng.standard_t(2, n),
    "log-normal": lambda rng, n: np.exp2(4 * rng.standard_normal(n)) * rng.choice((-1, 1), n),
}


def sample(distribution: str, scale: float, num_values: int, seed: int) -> torch.Tensor:
    """A seeded BF16 sample of ``scale`` times the family, (num_values,)."""
    values = SAMPLERS[distribution](np.random.default_rng(seed), num_values) * scale
    return torch.from_numpy(values.astype(np.float32)).bfloat16()


def analyze_distribution(
    distribution: str,
    phase: float,
    num_values: int,
    seed: int,
    layouts: Sequence[tuple[str, Capacity]],
) -> DistributionReport:
    """One family at ``BASE_SCALE * 2^phase``; ``layouts``: (preset, capacity) of each allocation.

    ValueError for an unknown family, preset or capacity.
    """
    family = get_family(distribution)
    scale = BASE_SCALE * 2.0**phase
    probabilities = exponent_probabilities(family, scale)
    relative = relative_probabilities(family, 0.0, (np.log2(scale) + 5.0,))
    book, book_bits = best_book(relative, candidates(distribution))
    dense = sample(distribution, scale, num_values, seed)
    return DistributionReport(
        distribution,
        phase,
        scale,
        entropy_bits(probabilities),
        ideal_bits(probabilities),
        huffman_bits(probabilities),
        book,
        book_bits,
        tuple(allocate(dense, preset, distribution, capacity) for preset, capacity in layouts),
    )


@dataclass(frozen=True)
class MismatchReport:
    """A shift that misses the scale by ``octaves``: cost in closed form, overflow of CLEAN."""

    distribution: str
    octaves: int
    book_bits: float
    spilled_share: float


def analyze_mismatch(distribution: str, num_values: int, seed: int) -> list[MismatchReport]:
    """Cost of a shift that is wrong by each of ``OCTAVES``, for the family's own book.

    Fixed presets have one shift a tensor, so this is what a change of the scale between two encodes
    costs them; POOLED takes the shift of each 256 values from the values themselves.
    """
    family = FAMILIES[distribution]
    relative = relative_probabilities(family, 0.0, (0.0, 0.25, 0.5, 0.75))
    name, _ = best_book(relative, candidates(distribution))
    costs = next(book for book in bank() if book.name == name).cost_bits
    sampled = exponents_of(sample(distribution, BASE_SCALE, num_values, seed)).astype(np.int64)
    mean = round(float(sampled[sampled > 0].mean()))
    reports = []
    for octaves in OCTAVES:
        moved = np.append(np.roll(relative[:ZERO], octaves), relative[ZERO])
        symbols = np.where(sampled == 0, ZERO, (sampled - mean + octaves + CENTER) % NUM_EXPONENTS)
        reports.append(
            MismatchReport(
                distribution,
                octaves,
                float(moved @ costs),
                stream_overflow(costs[symbols], PRESETS["clean"]),
            )
        )
    return reports


def stream_overflow(lengths: np.ndarray, preset: Preset) -> float:
    """Share of values past the room of their stream, for codes of ``lengths`` dealt in order.

    Whole streams only; a stream spills from the first quad that does not fit.
    """
    values = preset.steps * QUAD
    streams = lengths[: len(lengths) // values * values].reshape(-1, preset.steps, QUAD)
    if not len(streams):
        return 0.0
    filled = np.cumsum(streams.sum(2), axis=1)
    return float((filled > preset.capacity_words * WORD_BITS).mean())


def analyze_families() -> dict[str, dict[str, float]]:
    """Bits per exponent: data of one family (outer key) in the books of another (inner)."""
    table = {}
    for data in FAMILIES:
        symbols = relative_probabilities(FAMILIES[data], 0.0, (0.0, 0.25, 0.5, 0.75))
        table[data] = {books: best_book(symbols, candidates(books))[1] for books in FAMILIES}
    return table


@dataclass(frozen=True)
class TensorReport:
    """A given tensor: bounds and Huffman code of its histogram; book with a shift per span."""

    num_values: int
    zero_share: float
    entropy_bits: float
    ideal_bits: float
    huffman_bits: float
    book: str
    book_bits: float
    predicted_ratio: float


def analyze_tensor(dense: torch.Tensor) -> TensorReport:
    """Costs of a BF16, FP32 or FP16 tensor. TypeError for other dtypes."""
    exponents = exponents_of(dense)
    counts = np.bincount(exponents, minlength=NUM_EXPONENTS)
    book, book_bits = best_book(span_symbols(exponents))
    dtype = UPCAST if is_upcast(dense) else get_dtype(str(dense.dtype).removeprefix("torch."))
    # Groups whose exponents are all equal hold no stream; a tensor of them costs headers alone.
    coded_bits = 0.0 if np.count_nonzero(counts) < 2 else book_bits + SLACK_BITS
    planes_bytes = PayloadLayout(PRESETS["pooled"], dtype, len(exponents), 0).size_bytes
    stored_bytes = planes_bytes + coded_bits * len(exponents) / 8
    return TensorReport(
        num_values=len(exponents),
        zero_share=float(counts[0]) / max(len(exponents), 1),
        entropy_bits=entropy_bits(counts),
        ideal_bits=ideal_bits(counts),
        huffman_bits=huffman_bits(counts),
        book=book,
        book_bits=book_bits,
        predicted_ratio=max(len(exponents) * dtype.itemsize / stored_bytes, 1.0),
    )
