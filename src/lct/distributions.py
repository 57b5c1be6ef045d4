"""Closed-form distributions of BF16 exponents (source: the paper's models, widened).

Every family is a CDF of |x|, symmetric about zero, with scale 1. ``exponent_probabilities`` turns
it into the probability of each of the 256 exponent bytes; a zero-inflated form adds an atom at 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

NUM_EXPONENTS = 256


def _gaussian(x: float) -> float:
    return math.erf(x / math.sqrt(2.0))


def _laplace(x: float) -> float:
    return -math.expm1(-x)


def _student_t2(x: float) -> float:
    """Student-t with 2 degrees of freedom: tails fall as x^-2 (the power-law model)."""
    return x / math.sqrt(2.0 + x * x)


def _log_normal4(x: float) -> float:
    """log2 |x| is normal with a standard deviation of 4 octaves."""
    return 0.5 * math.erfc(-math.log2(x) / (4.0 * math.sqrt(2.0))) if x > 0 else 0.0


@dataclass(frozen=True)
class Family:
    """``cdf(x)`` = P(|X| <= x) at scale 1."""

    name: str
    cdf: Callable[[float], float]


FAMILIES: dict[str, Family] = {
    row.name: row
    for row in (
        Family("gaussian", _gaussian),
        Family("laplace", _laplace),
        Family("power-law", _student_t2),
        Family("log-normal", _log_normal4),
    )
}


def get_family(name: str) -> Family:
    """The family called ``name``. ValueError for any other name."""
    if name not in FAMILIES:
        raise ValueError(f"distribution must be one of {', '.join(FAMILIES)} or None, got {name!r}")
    return FAMILIES[name]


def exponent_probabilities(family: Family, scale: float, zero_share: float = 0.0) -> np.ndarray:
    """P(exponent byte = e), shape (256,), for scale * X; ``zero_share``: extra mass at zero.

    Exponent 0 holds zeros and subnormals; 255 (Inf, NaN) gets what overflows. Rounding to 8
    significant bits moves 2^-9 of an octave and is ignored.
    """
    edges = [2.0 ** (e - 127) / scale for e in range(1, NUM_EXPONENTS)]
    cdf = [0.0, *(family.cdf(x) for x in edges), 1.0]
    p = np.maximum(np.diff(np.array(cdf)), 0.0)
    p = p / p.sum() * (1.0 - zero_share)
    p[0] += zero_share
    return p


def relative_probabilities(
    family: Family, zero_share: float, phases: tuple[float, ...]
) -> np.ndarray:
    """P(symbol), shape (257,): relative exponents 0..255 (128 = the mean exponent), then ZERO.

    Averaged over ``phases``: the scale is 2^-5 * 2^phase, the mean is rounded as the encoder
    rounds.
    """
    out = np.zeros(NUM_EXPONENTS + 1)
    for phase in phases:
        p = exponent_probabilities(family, 2.0 ** (phase - 5.0))
        p[0] = 0.0
        p /= p.sum()
        mean = math.floor((np.arange(NUM_EXPONENTS) * p).sum() + 0.5)
        rel = (np.arange(NUM_EXPONENTS) - mean + 128) % NUM_EXPONENTS
        out[rel] += p * (1.0 - zero_share) / len(phases)
    out[NUM_EXPONENTS] = zero_share
    return out
