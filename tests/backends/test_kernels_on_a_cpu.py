"""Kernels' own code on a CPU: compiled as C++, a warp's lanes taking turns (warp/shim.hpp).

CI has no GPU. What a warp of an encode, a decode and a step does runs there all the same, and must
give the bytes of the CPU backend.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cuda.core", reason="needs cuda-core, which pip install lct-torch[cuda] brings")

from lct.backends import cpu
from lct.backends.cuda import codec, jit
from lct.backends.cuda.steps import AdamArgs, MuonArgs, SgdArgs, _list_type
from lct.codebook import bank
from lct.dtypes import DTYPES_BY_CODE, UPCAST, DType
from lct.layout import CHUNK_BYTES, STATE_SHIFT, STATE_SPILLED, STATE_WIDE, PayloadLayout
from lct.ops import patterns
from lct.presets import PRESETS, Preset
from training import COMPILER, needs_compiler

pytestmark = needs_compiler
WARP = Path(__file__).parent / "warp"
# Functions that shim.hpp has instead of those in assembly.
REPLACED = (
    "blend",
    "stage16",
    "stage_wait",
    "prefetch",
    "prefetch_at_once",
    "opaque",
    "pack2",
    "shift_left",
)
CHUNKS = 32

Make = Callable[[int], torch.Tensor]
Load = Callable[..., ctypes.CDLL]
GENERATOR = torch.Generator()


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A kernel, compiled for a CPU."""
    folder = tmp_path_factory.mktemp("kernels")

    @cache
    def compiled(
        name: str,
        preset: Preset,
        dtype: DType,
        options: frozenset[str] = frozenset(),
        argument: str = "Args",
    ) -> ctypes.CDLL:
        variant = jit.Variant(preset, dtype, options)
        text = jit.source(jit.KERNELS[name], variant, jit.MEASURED_ARCH)
        text = re.sub(r"^#if __CUDA_ARCH__ >= 900\n.*?^#endif\n", "", text, flags=re.M | re.S)
        for function in REPLACED:
            pattern = rf"^__device__ __forceinline__ \w+ {function}\(.*?^}}\n"
            text = re.sub(pattern, "", text, flags=re.M | re.S)
        approximate = r'asm\("(\w+)\.approx\.ftz\.f32 %0, %1;" : "=f"\((\w+)\) : "f"\((\w+)\)\);'
        text = re.sub(approximate, r"\2 = \1_approx(\3);", text)
        assert not re.search(r"\basm\b", re.sub("//.*", "", text)), f"{name} has more assembly"
        text = text.replace("extern __shared__", "extern")
        text = re.sub(r"^#define WARPS \d+$", "#define WARPS 1", text, flags=re.M)
        path = folder / ("_".join((name, preset.name, str(dtype.code), *sorted(options))) + ".cpp")
        names = f"#define KERNEL {name}\n#define ARGUMENT {argument}"
        parts = (f'#include "{WARP}/shim.hpp"', names, text)
        path.write_text("\n".join((*parts, f'#include "{WARP}/run.hpp"\n')))
        library = path.with_suffix(".so")
        flags = ("-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC")
        subprocess.run([COMPILER, *flags, str(path), "-o", str(library)], check=True)
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


class Arena(ctypes.Structure):
    """Mirrors ``struct Arena`` in arena.cuh; one segment of ``CHUNKS``."""

    _fields_ = [
        *[(name, ctypes.c_int32) for name in ("free_chunks", "failed_groups", "taken_total")],
        *[(name, ctypes.c_int32) for name in ("bitmap_words", "segment_shift", "home_words")],
        *[(name, ctypes.c_int32) for name in ("host_free", "host_words")],
        *[(name, ctypes.c_uint64) for name in ("segments", "bitmap")],
    ]

    def __init__(self) -> None:
        # Their owners lie behind the chunks.
        self._chunks = np.zeros(CHUNKS * (CHUNK_BYTES + 4), np.uint8)
        self._segments = np.array([self._chunks.ctypes.data], np.uint64)
        self._bitmap = np.zeros(1, np.uint32)
        tables = self._segments.ctypes.data, self._bitmap.ctypes.data
        super().__init__(CHUNKS, 0, 0, 1, CHUNKS.bit_length() - 1, 1, 0, 0, *tables)

    @property
    def used_chunks(self) -> int:
        return CHUNKS - self.free_chunks


def _dense(kind: str, dtype: DType, seed: int = 0) -> torch.Tensor:
    GENERATOR.manual_seed(seed)
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
        arena = Arena()
        header = layout.pack_header(book, shift)
        _run(encode, _args(layout, header, payload, values, arena), layout)
        assert np.array_equal(payload, expected), (kind, book)
        decoded = np.zeros_like(values)
        _run(decode, _args(layout, header, payload, decoded, arena), layout)
        assert np.array_equal(decoded, values), (kind, book)
        assert arena.used_chunks == _chunks_of(layout, expected), (kind, book)


# Of SGD: powers of two, for which products are exact and `_sgd` rounds once.
LR, MOMENTUM, DAMPENING_LEFT, WEIGHT_DECAY, SCALE = 0.25, 0.5, 0.5, 0.125, 4.0
STEPS: dict[str, tuple[type[ctypes.Structure], dict[str, float]]] = {
    "sgd_step": (
        SgdArgs,
        {
            "lr": LR,
            "momentum": MOMENTUM,
            "dampening_left": DAMPENING_LEFT,
            "weight_decay": WEIGHT_DECAY,
        },
    ),
    "adam_step": (
        AdamArgs,
        {
            "lr": 0.01,
            "beta1": 0.9,
            "beta2": 0.99,
            "weight_decay": 0.1,
            "eps": 1e-8,
            "grad_share": 0.1,
            "square_share": 0.01,
            "param_share": 0.999,
            "step_size": -0.05,
            "correction": 0.2,
        },
    ),
    "muon_step": (MuonArgs, {"buffer_share": 0.05, "update_share": 0.4}),
}
# No option, torch's fused rounding alone, and all.
STEP_VARIANTS = {
    "-".join((name, *sorted(options))): (name, options)
    for name in STEPS
    for every in (frozenset(jit.KERNELS[name].options),)
    for options in (frozenset(), every & {"ROUNDING"}, every)
}


@pytest.mark.parametrize("capacity", [64, 748])
@pytest.mark.parametrize("variant", STEP_VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_steps(load: Load, kind: str, variant: str, capacity: int) -> None:
    """Tensors of one kind, gradients of another: some spans get rarer kinds, others commoner.

    What the update computes is checked here for SGD alone, else on a GPU against torch.
    """
    preset, dtype = PRESETS["pooled"], DTYPES_BY_CODE[1]
    name, options = STEP_VARIANTS[variant]
    encode, decode = (load(f"pooled_{code}", preset, dtype) for code in ("encode", "decode"))
    kernel = load(name, preset, dtype, options, "StepList")
    args_type, numbers = STEPS[name]
    steps: Any = _list_type(args_type)()
    args = steps.steps[0]
    layout = PayloadLayout.choose(preset, dtype, COUNT, capacity)
    steps.first_block[:2] = [0, layout.num_groups]
    arena = Arena()
    values = [patterns(_dense(kind, dtype, seed)) for seed in range(len(args.tensors))]
    books = [cpu.select(v, layout, tuple(range(len(bank())))) for v in values]
    headers = [layout.pack_header(*book) for book in books]
    payloads = [np.full(layout.size_bytes, 0xAB, np.uint8) for _ in values]
    for t, value in enumerate(values):
        _run(encode, _args(layout, headers[t], payloads[t], value, arena), layout)
        args.tensors[t] = _args(layout, headers[t], payloads[t], None, arena)
    for field, number in numbers.items():
        setattr(args, field, number)
    # Scale, count of steps, and whether the step is skipped.
    scalars = np.array([SCALE, 3, 0], np.float32)
    update = np.zeros(COUNT, np.uint16)
    where = {
        "grad_scale": scalars[0:].ctypes.data,
        "step": scalars[1:].ctypes.data,
        "found_inf": scalars[2:].ctypes.data,
        "update": update.ctypes.data,
    }
    for field, *_ in args_type._fields_:
        if field in where:
            setattr(args, field, where[field])
    for number, grad_kind in enumerate(("normal", kind, "any bits", "zeros in between")):
        grad = patterns(_dense(grad_kind, dtype, 3 + number))
        args.grad = grad.ctypes.data
        _run(kernel, steps, layout)
        *new, left = _updated(kernel, args, values, grad)
        if name == "sgd_step":
            assert all(map(np.array_equal, new, _sgd(*values, grad, options)))
        if name == "muon_step":
            assert np.array_equal(update, left), (kind, number)
        values = new
        used = 0
        for t, (book, shift) in enumerate(books):
            expected = np.zeros(layout.size_bytes, np.uint8)
            cpu.encode(values[t], layout, book, shift, expected)
            found = (_without_chunks(layout, payload) for payload in (payloads[t], expected))
            assert np.array_equal(*found), (kind, number, t)
            decoded = np.zeros_like(values[t])
            _run(decode, _args(layout, headers[t], payloads[t], decoded, arena), layout)
            assert np.array_equal(decoded, values[t]), (kind, number, t)
            used += _chunks_of(layout, expected)
        assert arena.used_chunks == used
    if name != "muon_step":
        before = [payload.copy() for payload in payloads]
        scalars[2] = 1
        _run(kernel, steps, layout)
        assert all(map(np.array_equal, before, payloads))


def _updated(
    kernel: ctypes.CDLL, args: ctypes.Structure, values: list[np.ndarray], grad: np.ndarray
) -> list[np.ndarray]:
    """New values, and what the update leaves of the gradient, from the kernel's own arithmetic."""
    arrays = [np.zeros(-(-COUNT // 8) * 8, np.uint16) for _ in range(len(values) + 1)]
    for array, dense in zip(arrays, (*values, grad), strict=True):
        array[:COUNT] = dense
    pointers = (ctypes.c_void_p * len(values))(*(array.ctypes.data for array in arrays[:-1]))
    pairs = ctypes.c_uint64(len(arrays[0]) // 2)
    kernel.update(ctypes.byref(args), pointers, ctypes.c_void_p(arrays[-1].ctypes.data), pairs)
    return [array[:COUNT] for array in arrays]


def _sgd(
    param: np.ndarray, buffer: np.ndarray, grad: np.ndarray, options: frozenset[str]
) -> list[np.ndarray]:
    """What sgd_update.cuh computes, each operation in FP64 and rounded once."""

    def value(bits: np.ndarray) -> np.ndarray:
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    def single(x: np.ndarray) -> np.ndarray:
        return x.astype(np.float32).astype(np.float64)

    def bits_of(x: np.ndarray) -> np.ndarray:
        found = torch.from_numpy(x.astype(np.float32)).bfloat16().view(torch.int16).numpy()
        return np.where(np.isnan(x), 0x7FFF, found.view(np.uint16)).astype(np.uint16)

    def rounded(x: np.ndarray) -> np.ndarray:
        return x if "ROUNDING" in options else value(bits_of(x))

    with np.errstate(all="ignore"):
        w, b, g = value(param), value(buffer), value(grad)
        if "SCALED" in options:
            g = single(g / SCALE)
        if "MAXIMIZE" in options:
            g = rounded(-g)
        if "DECAY" in options:
            g = rounded(single(WEIGHT_DECAY * w + g))
        b = rounded(single(MOMENTUM * b))
        b = single(DAMPENING_LEFT * g + b)
        new_buffer = bits_of(b)
        if "ROUNDING" not in options:
            b = value(new_buffer)
        g = rounded(single(MOMENTUM * b + g)) if "NESTEROV" in options else b
        return [bits_of(single(-LR * g + w)), new_buffer]


def _states(layout: PayloadLayout, payload: np.ndarray) -> np.ndarray:
    """The groups' state words, in place."""
    end = layout.meta_offset + 4 * layout.num_groups
    return payload[layout.meta_offset : end].view(np.uint32)


def _chunks_of(layout: PayloadLayout, payload: np.ndarray) -> int:
    states = _states(layout, payload) >> STATE_SHIFT
    return int(np.sum(states & STATE_SPILLED != 0) + 3 * np.sum(states == STATE_WIDE))


def _without_chunks(layout: PayloadLayout, payload: np.ndarray) -> np.ndarray:
    """A copy in which spilled groups name no chunk: which one they have is of no account."""
    found = payload.copy()
    states = _states(layout, found)
    spilled = states >> STATE_SHIFT & STATE_SPILLED != 0
    states[spilled] &= np.uint32(0xFF << STATE_SHIFT)
    return found


def _args(
    layout: PayloadLayout,
    header: bytes,
    payload: np.ndarray,
    values: np.ndarray | None,
    arena: Arena,
) -> jit.Args:
    """The argument of a kernel for a payload and dense values; None: of a step, which has none and
    whose payload holds a tensor already.
    """
    args = jit.Args()
    ctypes.pointer(args)[0] = codec.template(layout)
    args.header = (ctypes.c_uint32 * 4)(*(int(v) for v in np.frombuffer(header, np.uint32)))
    args.payload, args.tables = payload.ctypes.data, TABLES.ctypes.data
    args.dense = values.ctypes.data if values is not None else 0
    args.arena = ctypes.addressof(arena)
    args.book, args.fresh = header[3], int(values is not None)
    return args


def _run(kernel: ctypes.CDLL, argument: ctypes.Structure, layout: PayloadLayout) -> None:
    kernel.run(ctypes.byref(argument), layout.num_groups)
