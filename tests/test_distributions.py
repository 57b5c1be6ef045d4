"""Closed forms against densities, samples and each other."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from lct.distributions import (
    FAMILIES,
    NUM_EXPONENTS,
    exponent_probabilities,
    get_family,
    relative_probabilities,
)

# Density of |x| at scale 1, written down apart from the package's distribution functions.
DENSITIES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "gaussian": lambda x: math.sqrt(2 / math.pi) * np.exp(-x * x / 2),
    "laplace": lambda x: np.exp(-x),
    "power-law": lambda x: 2 * (2 + x * x) ** -1.5,
    "log-normal": lambda x: (
        np.exp(-((np.log2(x) / 4) ** 2) / 2) / (x * math.log(2) * 4 * math.sqrt(2 * math.pi))
    ),
}
SAMPLERS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "gaussian": lambda rng, n: rng.standard_normal(n),
    "laplace": lambda rng, n: rng.laplace(size=n),
    # Student-t with 2 degrees of freedom is a Gaussian over the root of an exponential.
    "power-law": lambda rng, n: rng.standard_normal(n) / np.sqrt(rng.exponential(size=n)),
    "log-normal": lambda rng, n: np.exp2(4 * rng.standard_normal(n)),
}


def bf16_exponents(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 23 & 0xFF).astype(np.int64)


def test_every_family_has_a_density_and_a_sampler() -> None:
    assert set(FAMILIES) == set(DENSITIES) == set(SAMPLERS)


@pytest.mark.parametrize("name", FAMILIES)
def test_cdf_is_the_integral_of_the_density(name: str) -> None:
    # Substitution x = 2^u: the log-normal is smooth in u, and all others are too.
    u = np.linspace(-40, 12, 400_001)
    x = np.exp2(u)
    weighted = DENSITIES[name](x) * x * math.log(2)
    integral = np.concatenate(
        [[0.0], np.cumsum((weighted[1:] + weighted[:-1]) / 2) * (u[1] - u[0])]
    )
    below = FAMILIES[name].cdf(float(x[0]))
    for i in range(20_000, len(x), 20_000):
        assert FAMILIES[name].cdf(float(x[i])) == pytest.approx(integral[i] + below, abs=2e-7)


@pytest.mark.parametrize("name", FAMILIES)
def test_cdf_is_one_of_a_distribution(name: str) -> None:
    cdf = FAMILIES[name].cdf
    values = [cdf(2.0**e) for e in range(-130, 128)]
    assert cdf(0.0) == 0.0
    assert values == sorted(values)
    assert values[-1] == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("scale", [0.02, 1.7, 3e-5])
def test_exponent_probabilities_match_a_sample(
    name: str, scale: float, rng: np.random.Generator
) -> None:
    n = 400_000
    counts = np.bincount(bf16_exponents(SAMPLERS[name](rng, n) * scale), minlength=NUM_EXPONENTS)
    p = exponent_probabilities(FAMILIES[name], scale)
    assert p.sum() == pytest.approx(1.0, abs=1e-12)
    # Six standard deviations of each count, and one value for the rarest.
    assert (np.abs(counts - n * p) <= 6 * np.sqrt(n * p * (1 - p)) + 1).all()


def test_exponents_at_powers_of_two_in_closed_form() -> None:
    p = exponent_probabilities(FAMILIES["laplace"], 1.0)
    assert p[127] == pytest.approx(math.exp(-1) - math.exp(-2))
    assert p[126] == pytest.approx(math.exp(-0.5) - math.exp(-1))
    p = exponent_probabilities(FAMILIES["power-law"], 0.5)
    assert p[126] == pytest.approx(2 / math.sqrt(6) - 1 / math.sqrt(3))


@pytest.mark.parametrize("name", FAMILIES)
def test_doubling_the_scale_moves_the_exponents_by_one(name: str) -> None:
    p = exponent_probabilities(FAMILIES[name], 0.02)
    q = exponent_probabilities(FAMILIES[name], 0.04)
    np.testing.assert_allclose(q[2:-1], p[1:-2], rtol=1e-9, atol=1e-12)


def test_zero_share_is_an_atom_at_exponent_zero() -> None:
    p = exponent_probabilities(FAMILIES["gaussian"], 0.02)
    q = exponent_probabilities(FAMILIES["gaussian"], 0.02, zero_share=0.75)
    assert q[0] == pytest.approx(0.75)
    np.testing.assert_allclose(q[1:], p[1:] * 0.25)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("zero_share", [0.0, 0.5])
def test_relative_probabilities_are_centred(name: str, zero_share: float) -> None:
    p = relative_probabilities(FAMILIES[name], zero_share, (0.0, 0.25, 0.5, 0.75))
    assert p.shape == (NUM_EXPONENTS + 1,)
    assert p.sum() == pytest.approx(1.0)
    assert p[NUM_EXPONENTS] == pytest.approx(zero_share)
    mean = (np.arange(NUM_EXPONENTS) * p[:NUM_EXPONENTS]).sum() / (1 - zero_share)
    assert abs(mean - 128) <= 0.5


def test_phases_are_averaged() -> None:
    family = FAMILIES["gaussian"]
    both = relative_probabilities(family, 0.0, (0.0, 0.5))
    single = [relative_probabilities(family, 0.0, (phase,)) for phase in (0.0, 0.5)]
    np.testing.assert_allclose(both, (single[0] + single[1]) / 2)


def test_unknown_family_is_named() -> None:
    with pytest.raises(ValueError, match=r"gaussian, laplace.*got 'cauchy'"):
        get_family("cauchy")
    assert get_family("laplace").name == "laplace"
