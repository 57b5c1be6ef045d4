"""Comparison of integer arrays, bit by bit: no tolerance for a lossless claim."""

from __future__ import annotations

import numpy as np


def assert_same_bits(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    """Fail, naming the first mismatch, unless dtype, shape and all bits of two arrays agree."""
    assert found.dtype == expected.dtype and found.shape == expected.shape, (
        f"{what}: {found.dtype} {found.shape}, expected {expected.dtype} {expected.shape}"
    )
    differs = np.flatnonzero(found != expected)
    if differs.size:
        i = int(differs[0])
        raise AssertionError(
            f"{what}: {differs.size} of {found.size} differ, the first at {i}: "
            f"{found.flat[i]:#x}, expected {expected.flat[i]:#x}"
        )
