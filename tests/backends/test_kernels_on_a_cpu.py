"""Kernels' own code on a CPU: compiled as C++, a warp's lanes taking turns (warp/shim.hpp).

CI has no GPU. What a warp of an encode and of a decode does runs there all the same, and must give
the bytes of the CPU backend.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("cuda.core", reason="needs cuda-core, which pip install lct-torch[cuda] brings")

from lct.backends import cpu
from lct.backends.cuda import codec, jit
from lct.codebook import bank
from lct.dtypes import DTYPES_BY_CODE, UPCAST, DType
from lct.layout import CHUNK_BYTES, STATE_SHIFT, STATE_SPILLED, STATE_WIDE, PayloadLayout
from lct.ops import patterns
from lct.presets import PRESETS, Preset
from training import COMPILER, needs_compiler

pytestmark = needs_compiler
WARP = Path(__file__).parent / "warp"
# Functions that shim.hpp has instead of those in assembly, and one that rounds floats, which no
# codec does.
REPLACED = (
    "blend",
    "stage16",
    "stage_wait",
    "prefetch",
    "prefetch_at_once",
    "opaque",
    "shift_left",
)
ROUNDS = "pack2"
CHUNKS = 32  # of the arena that run.hpp makes

Make = Callable[[int], torch.Tensor]
Load = Callable[[str, Preset, DType], ctypes.CDLL]
GENERATOR = torch.Generator()


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A kernel, compiled for a CPU."""
    folder = tmp_path_factory.mktemp("kernels")

    @cache
    def compiled(name: str, preset: Preset, dtype: DType) -> ctypes.CDLL:
        text = jit.source(jit.KERNELS[name], jit.Variant(preset, dtype), jit.MEASURED_ARCH)
        text = re.sub(r"^#if __CUDA_ARCH__ >= 900\n.*?^#endif\n", "", text, flags=re.M | re.S)
        for function in (*REPLACED, ROUNDS):
            pattern = rf"^__device__ __forceinline__ \w+ {function}\(.*?^}}\n"
            text = re.sub(pattern, "", text, flags=re.M | re.S)
        assert not re.search(r"\basm\b", re.sub("//.*", "", text)), f"{name} has more assembly"
        text = text.replace("extern __shared__", "extern")
        text = re.sub(r"^#define WARPS \d+$", "#define WARPS 1", text, flags=re.M)
        path = folder / f"{name}_{preset.name}_{dtype.code}.cpp"
        parts = (f'#include "{WARP}/shim.hpp"', f"#define KERNEL {name}", text)
        path.write_text("\n".join((*parts, f'#include "{WARP}/run.hpp"\n')))
        library = path.with_suffix(".so")
        options = ("-std=c++17", "-O1", "-w", "-shared", "-fPIC")
        subprocess.run([COMPILER, *options, str(path), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))

    return compiled


def _normal(count: int) -> torch.Tensor:
    return torch.randn(count, generator=GENERATOR)


def _any_bits(count: int) -> torch.Tensor:
    bits = torch.randint(-(2**31), 2**31, (count,), generator=GENERATOR)
    return bits.to(torch.int32).view(torch.float32)


def _few(count: int, share: float, make: Make, otherwise: torch.Tensor) -> torch.Tensor:
    chosen = torch.rand(count, generator=GENERATOR) < share
    return torch.where(chosen, make(count), otherwise)


KINDS: dict[str, Make] = {
    "normal": _normal,
    "zeros in between": lambda n: torch.relu(_normal(n)),
    "squares": lambda n: torch.relu(_normal(n)).square(),
    "products": lambda n: _normal(n) * _normal(n),
    "nearly all zero": lambda n: _few(n, 0.02, _normal, torch.zeros(n)),
    "all zero": torch.zeros,
    "constant": torch.ones,
    "constant at first": lambda n: torch.cat([torch.ones(n - n // 3), _normal(n // 3)]),
    "few of any bits": lambda n: _few(n, 0.003, _any_bits, _normal(n)),
    "any bits": _any_bits,
    "subnormal": lambda n: _normal(n) * 1e-38,
    "tiny products": lambda n: _normal(n) * 1e-37 * _normal(n),
    "huge": lambda n: _normal(n) * 1e38,
    "other scales": lambda n: _normal(n) * torch.exp(4 * _normal(n // 250)).repeat_interleave(250),
}
COUNT = 2 * 8192 + 3116  # groups in full and a tail, of whole numbers of 250 values
TABLES = np.concatenate([jit.codebook_tables(book) for book in bank()])


def _dense(kind: str, dtype: DType) -> torch.Tensor:
    GENERATOR.manual_seed(0)
    values = KINDS[kind](COUNT)
    if dtype is UPCAST:
        values = values.bfloat16()
        if kind == "few of any bits":  # breaks the promise
            values = _few(COUNT, 0.003, _any_bits, values.float())
    return values.to(getattr(torch, dtype.name))


@pytest.mark.parametrize("capacity", [64, 600, 748, 960])
@pytest.mark.parametrize("kind", KINDS)
def test_pooled(load: Load, kind: str, capacity: int) -> None:
    _check(load, PRESETS["pooled"], DTYPES_BY_CODE[1], kind, capacity)


@pytest.mark.parametrize("code", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_pooled_of_other_dtypes(load: Load, kind: str, code: int) -> None:
    _check(load, PRESETS["pooled"], DTYPES_BY_CODE[code], kind, 748)


@pytest.mark.parametrize("preset", ["clean", "medium", "high"])
@pytest.mark.parametrize("kind", KINDS)
def test_fixed(load: Load, kind: str, preset: str) -> None:
    _check(load, PRESETS[preset], DTYPES_BY_CODE[1], kind, None)


def _check(load: Load, preset: Preset, dtype: DType, kind: str, capacity: int | None) -> None:
    """Payload and decoded values in each book; chunks in use are those that the spill needs."""
    family = "pooled" if preset.pooled else "fixed"
    encode, decode = (load(f"{family}_{name}", preset, dtype) for name in ("encode", "decode"))
    values = patterns(_dense(kind, dtype))
    layout = PayloadLayout.choose(preset, dtype, len(values), capacity)
    assert not layout.is_raw
    for number in range(len(bank())):
        book, shift = cpu.select(values, layout, (number,))
        expected = np.zeros(layout.size_bytes, np.uint8)
        cpu.encode(values, layout, book, shift, expected)
        payload = np.full(layout.size_bytes, 0xAB, np.uint8)
        chunks = np.zeros(CHUNKS * (CHUNK_BYTES + 4), np.uint8)
        header = layout.pack_header(book, shift)
        used = _run(encode, layout, header, payload, values, chunks)
        assert np.array_equal(payload, expected), (kind, book)
        decoded = np.zeros_like(values)
        _run(decode, layout, header, payload, decoded, chunks)
        assert np.array_equal(decoded, values), (kind, book)
        end = layout.meta_offset + 4 * layout.num_groups
        states = expected[layout.meta_offset : end].view(np.uint32) >> STATE_SHIFT
        wanted = np.sum(states & STATE_SPILLED != 0) + 3 * np.sum(states == STATE_WIDE)
        assert used == wanted, (kind, book)


def _run(
    kernel: ctypes.CDLL,
    layout: PayloadLayout,
    header: bytes,
    payload: np.ndarray,
    values: np.ndarray,
    chunks: np.ndarray,
) -> int:
    """Run a kernel on a payload and dense values; how many chunks are in use then."""
    args = jit.Args()
    ctypes.pointer(args)[0] = codec.template(layout)
    args.header = (ctypes.c_uint32 * 4)(*(int(v) for v in np.frombuffer(header, np.uint32)))
    args.payload, args.dense = payload.ctypes.data, values.ctypes.data
    args.tables = TABLES.ctypes.data
    args.book, args.fresh = header[3], 1
    free = kernel.run(ctypes.byref(args), layout.num_groups, ctypes.c_void_p(chunks.ctypes.data))
    return CHUNKS - int(free)
