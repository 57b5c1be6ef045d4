"""Named inputs of the codec: hostile ones that are made here, real ones from tests/data.

Everything is a flat array of bit patterns, uint16 (BF16, FP16) or uint32 (FP32), and the same in
every run. ``to_torch`` makes tensors of them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch

from lct.dtypes import DTYPES, UPCAST, DType

DATA = Path(__file__).resolve().parent / "data"
ALL_DTYPES = (*DTYPES.values(), UPCAST)

# (bits of the exponent, bits of the fraction)
FIELDS = {"bfloat16": (8, 7), "float32": (8, 23), "float16": (5, 10)}


def dtype_id(dtype: DType) -> str:
    """A name for test ids: torch's, and ``upcast`` for FP32 that holds BF16 values."""
    return "upcast" if dtype is UPCAST else dtype.name


def pattern_type(dtype: DType) -> type[np.unsignedinteger]:
    """The integer type of bit patterns of ``dtype``."""
    return np.uint32 if dtype.itemsize == 4 else np.uint16


def pack(dtype: DType, sign: np.ndarray, exponent: np.ndarray, fraction: np.ndarray) -> np.ndarray:
    """Bit patterns of ``dtype``; ``exponent`` and ``fraction`` are cut to their fields' widths."""
    exponent_bits, fraction_bits = FIELDS[dtype.name]
    bits = np.asarray(sign, np.int64) & 1
    bits = bits << exponent_bits | np.asarray(exponent, np.int64) & (1 << exponent_bits) - 1
    bits = bits << fraction_bits | np.asarray(fraction, np.int64) & (1 << fraction_bits) - 1
    return _fit(bits, dtype)


def _fit(bits: np.ndarray, dtype: DType) -> np.ndarray:
    return (bits >> 16 << 16 if dtype is UPCAST else bits).astype(pattern_type(dtype))


def random_bits(dtype: DType, size: int, seed: int = 0) -> np.ndarray:
    """Uniform random bit patterns (upcast: their lower halves are zero)."""
    bits = np.random.default_rng(seed).integers(0, 1 << 8 * dtype.itemsize, size)
    return _fit(bits, dtype)


def gaussian(dtype: DType, size: int, scale: float = 0.02, seed: int = 0) -> np.ndarray:
    """Normally distributed values, like a weight's."""
    values = np.random.default_rng(seed).standard_normal(size).astype(np.float32) * np.float32(
        scale
    )
    return from_floats(values, dtype)


def from_floats(values: np.ndarray, dtype: DType) -> np.ndarray:
    """Bit patterns of float32 ``values``, truncated to BF16 and upcast, rounded to FP16."""
    if dtype.name == "float16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.astype(np.float32).view(np.uint32)
    return (bits >> 16).astype(np.uint16) if dtype.name == "bfloat16" else _fit(bits, dtype)


def _around(dtype: DType, offset: np.ndarray) -> np.ndarray:
    """Exponents near that of 1.0."""
    return (1 << FIELDS[dtype.name][0] - 1) - 1 + np.asarray(offset)


def hostile(dtype: DType) -> dict[str, np.ndarray]:
    """Inputs that a codec gets wrong, name -> bit patterns; none has more than 65,536 values."""
    rng = np.random.default_rng(7)
    n = 9000  # a group and a tail
    signs, fractions = rng.integers(0, 2, n), rng.integers(0, 1 << 23, n)
    top = (1 << FIELDS[dtype.name][0]) - 1
    index = np.arange(n)
    normal = gaussian(dtype, n)
    found = {
        "all_patterns": _fit(np.arange(65536) << 8 * (dtype.itemsize - 2), dtype),
        "random_bits": random_bits(dtype, n),
        "plus_zero": pack(dtype, 0 * index, 0 * index, 0 * index),
        "minus_zero": pack(dtype, 0 * index + 1, 0 * index, 0 * index),
        "both_zeros": pack(dtype, signs, 0 * index, 0 * index),
        "infinities": pack(dtype, signs, 0 * index + top, 0 * index),
        "nan_payloads": pack(dtype, signs, 0 * index + top, fractions),
        "subnormals": pack(dtype, signs, 0 * index, fractions),
        "one": pack(dtype, 0 * index, _around(dtype, 0 * index), 0 * index),
        "same_exponent": pack(dtype, signs, _around(dtype, 0 * index), fractions),
        "extremes": pack(dtype, signs, np.where(index % 2, 1, top - 1), fractions),
        "extreme_lanes": pack(dtype, signs, np.where(index // 4 % 32, 1, top), fractions),
        "random_exponents": pack(dtype, signs, rng.integers(0, top + 1, n), 0 * index),
        "drift": pack(dtype, signs, index * top // n, fractions),
        "half_means": pack(dtype, signs, _around(dtype, index % 2), fractions),
        "sparse": np.where(rng.random(n) < 0.9, 0, normal).astype(normal.dtype),
        "relu": from_floats(np.maximum(rng.standard_normal(n), 0).astype(np.float32), dtype),
        "row_scales": from_floats(
            np.ldexp(rng.standard_normal(n), index // 64 % 12 - 6).astype(np.float32), dtype
        ),
        "sorted": np.sort(normal),
    }
    for name, place in (("first", 0), ("middle", n // 2), ("last", n - 1)):
        outlier = normal.copy()
        outlier[place] = pack(dtype, 1, top, 1)  # a NaN
        found[f"outlier_{name}"] = outlier
        lonely = found["plus_zero"].copy()
        lonely[place] = pack(dtype, 0, 1, 0)  # the smallest normal number
        found[f"lonely_{name}"] = lonely
    found |= _windows(dtype, signs, fractions) | _wraps(dtype, signs, fractions)
    if dtype is UPCAST:
        for name, place in (("first", 0), ("last", n - 1)):
            wide = normal.copy()
            wide[place] |= 0x8000 if place else 1
            found[f"wide_{name}"] = wide
        found["wide_zero"] = found["plus_zero"] | 1
        found["wide_all"] = random_bits(DTYPES["float32"], n)
    return found


def _windows(dtype: DType, signs: np.ndarray, fractions: np.ndarray) -> dict[str, np.ndarray]:
    """Exponents whose codes fill the 64 bits that a lane of a pooled group holds.

    Exponents 12 from the mean cost 8 bits in the book that these values get (log-normal), a quad
    of them 32. ``long_codes``: every position is 64 after the first two steps and asks before all
    others. ``full_windows``: spans of such quads and short ones in turn; 64 is reached with and
    without a request. ``mixed_codes``: quads of all lengths, which end on both sides of 64.
    """
    rng = np.random.default_rng(8)
    index = np.arange(len(signs))
    far = np.where(index % 2, -12, 12)
    near = rng.integers(-1, 2, len(index))
    offsets = {
        "long_codes": far,
        "full_windows": np.where(index // 256 % 2, 0, far),
        "mixed_codes": np.where(rng.random(len(index)) < 0.7, rng.permutation(far), near),
    }
    return {
        name: pack(dtype, signs, _around(dtype, offset), fractions)
        for name, offset in offsets.items()
    }


def _wraps(dtype: DType, signs: np.ndarray, fractions: np.ndarray) -> dict[str, np.ndarray]:
    """Spans near one end of the exponents that hold one value near the other end.

    Relative to the span's shift it wraps to a symbol that has a code in the book that these values
    get (Gaussian, log-normal). In FP16 nothing wraps: the five bits of its exponents are too few.
    """
    rng = np.random.default_rng(9)
    top = (1 << FIELDS[dtype.name][0]) - 1
    index = np.arange(len(signs))
    low = rng.integers(3, 8, len(index))
    high = np.clip(np.rint(rng.normal(top - 7, 3, len(index))), top - 25, top - 1)
    stray = index % 256 == 77
    return {
        "wrap_below": pack(dtype, signs, np.where(stray, top - 3, low), fractions),
        "wrap_above": pack(dtype, signs, np.where(stray, 2, high), fractions),
    }


@cache
def data_tensors() -> dict[str, np.ndarray]:
    """The real BF16 tensors of tests/data, name -> patterns, 2-D uint16 (rows as in the model)."""
    return {path.stem: np.load(path) for path in sorted(DATA.glob("*.npy"))}


DATA_NAMES = tuple(path.stem for path in sorted(DATA.glob("*.npy")))


def as_dtype(words: np.ndarray, dtype: DType) -> np.ndarray:
    """BF16 patterns as flat values of ``dtype``: FP32 gets hashed low bits, FP16 rounds."""
    words = words.reshape(-1)
    if dtype.name == "bfloat16":
        return words
    bits = words.astype(np.uint32) << 16
    if dtype is UPCAST:
        return bits
    if dtype.name == "float32":
        return bits | (np.arange(len(bits), dtype=np.uint32) * np.uint32(2654435761) >> 16)
    with np.errstate(over="ignore"):
        return bits.view(np.float32).astype(np.float16).view(np.uint16)


def to_torch(values: np.ndarray, dtype: DType) -> torch.Tensor:
    """The tensor with these bit patterns, of the same shape; it has its own memory."""
    signed = np.int32 if dtype.itemsize == 4 else np.int16
    return torch.from_numpy(values.view(signed).copy()).view(getattr(torch, dtype.name))


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Floating-point tensors of a file of ``--tensors DIR``. A uint16 .npy holds BF16 patterns."""
    if path.suffix == ".npy":
        array = np.load(path)
        if array.dtype == np.uint16:
            return {path.stem: to_torch(array, DTYPES["bfloat16"])}
        return {path.stem: torch.from_numpy(array)}
    from safetensors.torch import load_file

    return load_file(path)
