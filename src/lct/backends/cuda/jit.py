"""Compile the kernels with NVRTC at first use, keep the machine code on disk, and launch them.

A kernel is one ``.cu`` file joined with the headers it needs; constants come from the Python
tables.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...codebook import BANK_ROWS, CENTER, ESC, MAX_LENGTH, NUM_SYMBOLS, ZERO, Codebook, bank
from ...config import kernel_cache_dir
from ...dtypes import DTYPES, DTYPES_BY_CODE, DType
from ...errors import LctError
from ...presets import PRESETS, Preset
from .tuning import LAUNCH, MEASURED_ARCH, LaunchConfig

KERNEL_DIR = Path(__file__).parent / "kernels"
# Architectures that CI compiles every kernel for (Ampere, Ada, Hopper, Blackwell).
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
# Words of the tables of a book, in the order of common.cuh, and how pairs of symbols are indexed.
SINGLES_WORDS, PAIRS_WORDS, ENCODE_WORDS, ENCODE_PAIRS_WORDS, COST_WORDS = 256, 4096, 260, 424, 260
TABLE_WORDS = SINGLES_WORDS + PAIRS_WORDS + ENCODE_WORDS + ENCODE_PAIRS_WORDS + COST_WORDS + 4
PAIR_BITS, PAIR_WINDOW, PAIR_STRIDE = 12, 16, 27
# Updates that one launch of a step takes at most: their arguments are 9 kB for Adam.
MOST_STEPS = 16
# Beyond so many waves the last one is a small part of a launch.
MOST_EVEN_WAVES = 3
# Of a block's shared memory, for CUDA and for what kernels declare beside the dynamic part.
RESERVED_SHARED_BYTES = 2048
MOST_TENSORS = 16  # that one launch encodes or decodes at most: their arguments are 2.5 kB
_SIZES = {
    "MOST_STEPS": MOST_STEPS,
    "MOST_TENSORS": MOST_TENSORS,
    "SINGLES_WORDS": SINGLES_WORDS,
    "PAIRS_WORDS": PAIRS_WORDS,
    "ENCODE_WORDS": ENCODE_WORDS,
    "ENCODE_PAIRS_WORDS": ENCODE_PAIRS_WORDS,
    "COST_WORDS": COST_WORDS,
    "PAIR_BITS": PAIR_BITS,
    "PAIR_STRIDE": PAIR_STRIDE,
    "NUM_BOOKS": len(BANK_ROWS),
}
# Flags of their entries, as in common.cuh.
_PAIR_SLOW, _PAIR_ZERO = 0x10000, 0x8000
_ESC_FLAG, _ZERO_FLAG = 0x8000, 0x4000
_ESCAPED, _SLOW = 0x80000000, 0x20


@dataclass(frozen=True)
class Kernel:
    """One row of the kernel table: entry point and source files.

    ``pooled``: the presets it serves, pooled or fixed (None: both). ``constants``: names of the
    constants that its code depends on; the others are left out, so that variants share machine
    code.
    """

    entry: str
    files: tuple[str, ...]
    pooled: bool | None
    constants: tuple[str, ...] = ("DTYPE", "POOLED", "STEPS", "GROUPS_PER_BLOCK")
    options: tuple[str, ...] = ()  # constants that a launch chooses, 0 or 1
    rare_in_shared: bool = False  # pooled_group.cuh

    @property
    def warps(self) -> int:
        """Warps a block."""
        return LAUNCH[self.entry].warps


_POOLED = ("common.cuh", "arena.cuh", "pooled.cuh")
_ENCODE = (*_POOLED, "pooled_group.cuh", "pooled_encode.cuh")
_DECODE = (*_POOLED, "pooled_decode.cuh")
_SELECT = ("common.cuh", "select.cuh")
_SGD_OPTIONS = ("ROUNDING", "NESTEROV", "MAXIMIZE", "DECAY", "SCALED")
_ADAM_OPTIONS = ("ROUNDING", "RECIPROCAL", "MAXIMIZE", "L2_DECAY", "DECOUPLED_DECAY", "SCALED")
_MUON_OPTIONS = ("BUFFER_FROM_GRAD", "UPDATE_FROM_GRAD")
KERNELS: dict[str, Kernel] = {
    row.entry: row
    for row in (
        Kernel("pooled_encode", (*_ENCODE, "pooled_encode.cu"), True),
        Kernel("pooled_encode_list", (*_ENCODE, "tensor_list.cuh", "pooled_encode_list.cu"), True),
        Kernel("pooled_decode", (*_DECODE, "pooled_decode.cu"), True),
        Kernel("pooled_decode_list", (*_DECODE, "tensor_list.cuh", "pooled_decode_list.cu"), True),
        Kernel("pooled_needs", ("common.cuh", "pooled.cuh", "pooled_needs.cu"), True),
        Kernel("fixed_encode", (*_POOLED, "fixed.cuh", "fixed_encode.cu"), False),
        Kernel("fixed_decode", (*_POOLED, "fixed.cuh", "fixed_decode.cu"), False),
        Kernel(
            "sgd_step",
            (*_POOLED, "pooled_group.cuh", "update.cuh", "sgd_update.cuh", "step.cuh", "sgd.cu"),
            True,
            ("POOLED", "STEPS", "GROUPS_PER_BLOCK"),
            _SGD_OPTIONS,
        ),
        Kernel(
            "adam_step",
            (*_POOLED, "pooled_group.cuh", "update.cuh", "adam_update.cuh", "step.cuh", "adam.cu"),
            True,
            ("POOLED", "STEPS", "GROUPS_PER_BLOCK"),
            _ADAM_OPTIONS,
            rare_in_shared=True,
        ),
        Kernel(
            "muon_step",
            (*_POOLED, "pooled_group.cuh", "muon_update.cuh", "step.cuh", "muon.cu"),
            True,
            ("POOLED", "STEPS", "GROUPS_PER_BLOCK"),
            _MUON_OPTIONS,
        ),
        Kernel("select_book", (*_SELECT, "select.cu"), None, ("DTYPE", "POOLED")),
        Kernel("select_books", (*_SELECT, "tensor_list.cuh", "select_list.cu"), True, ("DTYPE",)),
        Kernel("sweep_chunks", ("common.cuh", "arena.cuh", "sweep.cu"), None, ()),
        Kernel("grow_arena", ("common.cuh", "arena.cuh", "grow.cu"), None, ()),
        Kernel("close_segments", ("common.cuh", "arena.cuh", "close.cu"), None, ()),
        Kernel("report_counters", ("common.cuh", "arena.cuh", "report.cu"), None, ()),
    )
}


class Args(ctypes.Structure):
    """The one argument of every kernel; mirrors ``struct Args`` in common.cuh."""

    _fields_ = [
        *[
            (name, ctypes.c_uint64)
            for name in (
                "payload",
                "dense",
                "arena",
                "tables",
                "num_values",
                "sign_fraction_offset",
                "low_offset",
                "lane_offset",
                "meta_offset",
                "tail_slot_offset",
                "size_bytes",
            )
        ],
        *[
            (name, ctypes.c_uint32)
            for name in (
                "first_group",
                "end_group",
                "num_groups",
                "full_groups",
                "tail_steps",
                "capacity",
                "tail_capacity",
                "fresh",
                "reserve",
                "serial",
            )
        ],
        ("header", ctypes.c_uint32 * 4),
        ("candidates", ctypes.c_uint32),
        ("book", ctypes.c_uint32),
    ]


@dataclass(frozen=True)
class Variant:
    """What a kernel is compiled for. ``options``: names of the kernel's options that are 1."""

    preset: Preset
    dtype: DType
    options: frozenset[str] = frozenset()


def source(kernel: Kernel, variant: Variant, arch: str) -> str:
    """The translation unit of ``kernel``: constants, headers, kernel."""
    preset = variant.preset
    values = {
        "DTYPE": variant.dtype.code,
        "POOLED": int(preset.pooled),
        "STEPS": preset.steps,
        "GROUPS_PER_BLOCK": preset.groups_per_block,
    }
    defaults = {"DTYPE": 1, "POOLED": 1, "STEPS": 64, "GROUPS_PER_BLOCK": 1}
    used = {name: (values if name in kernel.constants else defaults)[name] for name in values}
    used |= {name: int(name in variant.options) for name in kernel.options}
    used |= _SIZES
    used["WARPS"] = kernel.warps
    used["RARE_IN_SHARED"] = int(kernel.rare_in_shared)
    dtype = variant.dtype if "DTYPE" in kernel.constants else DTYPES["bfloat16"]
    used["MIN_BLOCKS"] = LAUNCH[kernel.entry].min_blocks(arch, dtype)
    parts = [f"#define {name} {value}" for name, value in used.items()]
    for name in kernel.files:
        parts.append(f'#line 1 "{name}"\n{(KERNEL_DIR / name).read_text()}')
    return "\n".join(parts)


def variants() -> list[tuple[Kernel, Variant]]:
    """Every kernel with the presets and dtypes that give it different code, options off and on."""
    found: dict[str, tuple[Kernel, Variant]] = {}
    for kernel in KERNELS.values():
        for preset in PRESETS.values():
            if kernel.pooled not in (None, preset.pooled):
                continue
            for dtype in DTYPES_BY_CODE.values() if preset.pooled else DTYPES.values():
                for options in {frozenset(), frozenset(kernel.options)}:
                    variant = Variant(preset, dtype, options)
                    found.setdefault(source(kernel, variant, MEASURED_ARCH), (kernel, variant))
    return list(found.values())


@dataclass(frozen=True)
class Resources:
    """What the assembler reports for a kernel."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int  # that the kernel declares


_import_lock = threading.Lock()


def _cuda_core() -> Any:
    """The package ``cuda.core``. Imported by one thread: to others it would look complete before it
    is.
    """
    with _import_lock:
        try:
            import cuda.core
        except ImportError as error:
            raise LctError("CUDA tensors need cuda-core: pip install lct-torch[cuda]") from error
        return cuda.core


def compile_kernel(kernel: Kernel, variant: Variant, arch: str) -> tuple[bytes, Resources]:
    """Machine code (cubin) of a kernel for ``arch`` and its resources; needs no GPU.

    LctError with source name, arch and the compiler's log where it does not compile.
    """
    core = _cuda_core()
    name = f"{kernel.files[-1]} ({variant.preset.name}, {variant.dtype.name})"
    options = core.ProgramOptions(
        name=kernel.files[-1], arch=arch, std="c++17", ptxas_options=["-v"]
    )
    logs = io.StringIO()
    try:
        code = core.Program(source(kernel, variant, arch), "c++", options).compile(
            "cubin", logs=logs
        )
    except Exception as error:
        raise LctError(f"kernel {name} does not compile for {arch}: {error}") from error
    return bytes(code.code), _resources(logs.getvalue(), kernel.entry)


def _resources(log: str, entry: str) -> Resources:
    def largest(pattern: str) -> int:
        return max((int(m) for m in re.findall(pattern, log)), default=0)

    return Resources(
        registers=largest(r"Used (\d+) registers"),
        spill_bytes=largest(r"(\d+) bytes spill stores") + largest(r"(\d+) bytes spill loads"),
        stack_bytes=largest(r"(\d+) bytes stack frame"),
        shared_bytes=largest(r"(\d+) bytes smem"),
    )


def _cached_code(kernel: Kernel, variant: Variant, arch: str) -> bytes:
    """``compile_kernel`` through the cache on disk, keyed by all that the code depends on."""
    import importlib.metadata

    versions = (
        f"{importlib.metadata.version('cuda-core')} {importlib.metadata.version('cuda-bindings')}"
    )
    key = hashlib.sha256(
        f"{versions}\n{arch}\n{source(kernel, variant, arch)}".encode()
    ).hexdigest()
    path = kernel_cache_dir() / f"{kernel.entry}-{key[:32]}.cubin"
    if path.exists():
        return path.read_bytes()
    code, _ = compile_kernel(kernel, variant, arch)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(code)
    os.replace(file.name, path)
    return code


def ceil_div(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


class Grid(NamedTuple):
    """Blocks of a launch and warps a block."""

    blocks: int
    warps: int


@dataclass
class Loaded:
    """A kernel in a device's context."""

    function: int
    warps: int
    module: Any  # keeps the code loaded
    processors: int  # of the device
    config: LaunchConfig
    shared_bytes: int = 48 * 1024
    processor_shared_bytes: int = 0  # that the blocks of a multiprocessor share
    starts_early: bool = False  # whether the device can start a kernel before the one before ends
    grids: dict[int, Grid] = field(default_factory=dict)
    resident: dict[tuple[int, int], int] = field(default_factory=dict)

    def grid(self, groups: int) -> Grid:
        """How to launch over ``groups``, one a warp."""
        found = self.grids.get(groups)
        if found is None:
            found = self.grids[groups] = self._make_grid(groups)
        return found

    def _make_grid(self, groups: int) -> Grid:
        warps = self.warps
        if self.config.any_warps and groups <= 2 * self.processors * self.config.groups_at_once:
            # Few blocks: all multiprocessors get the same share.
            def groups_of_fullest(w: int) -> int:
                return ceil_div(ceil_div(groups, w), self.processors) * w

            warps = min(range(self.warps, self.warps // 2 - 1, -1), key=groups_of_fullest)
        return Grid(ceil_div(groups, warps), warps)

    def blocks_at_once(self, warps: int, shared_bytes: int) -> int:
        """Blocks of so many warps, with so much dynamic shared memory, that the device holds."""
        key = warps, shared_bytes
        if key not in self.resident:
            self.allow_shared(shared_bytes)
            error, blocks = driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
                self.function, warps * 32, shared_bytes
            )
            check(error)
            self.resident[key] = max(blocks, 1) * self.processors
        return self.resident[key]

    def shared_for_even_waves(self, blocks: int, warps: int, shared_bytes: int) -> int:
        """``shared_bytes``, or as many as let no more blocks a multiprocessor in than equal waves
        of ``blocks`` need.
        """
        waves = ceil_div(blocks, self.blocks_at_once(warps, shared_bytes))
        if not 1 < waves <= MOST_EVEN_WAVES:
            return shared_bytes
        each = ceil_div(blocks, waves * self.processors)
        return max(shared_bytes, self.processor_shared_bytes // each - RESERVED_SHARED_BYTES)

    def allow_shared(self, size_bytes: int) -> None:
        """Let blocks have so much dynamic shared memory."""
        if size_bytes > self.shared_bytes:
            attribute = (
                driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            )
            check(driver().cuFuncSetAttribute(self.function, attribute, size_bytes)[0])
            self.shared_bytes = size_bytes


_lock = threading.Lock()
_loaded: dict[tuple[int, str, int, int, frozenset[str]], Loaded] = {}


def load(
    entry: str,
    preset: Preset,
    dtype: DType,
    device: int,
    options: frozenset[str] = frozenset(),
) -> Loaded:
    """The kernel ``entry`` on ``device``, compiled and loaded at first use."""
    key = (device, entry, preset.code, dtype.code, options)
    found = _loaded.get(key)
    if found is not None:
        return found
    import torch

    core = _cuda_core()
    with _lock, outside_capture(device):
        if key not in _loaded:
            torch.cuda.current_stream(device)  # torch makes the context
            major, minor = torch.cuda.get_device_capability(device)
            kernel = KERNELS[entry]
            code = _cached_code(kernel, Variant(preset, dtype, options), f"sm_{major}{minor}")
            module = core.ObjectCode.from_cubin(code)
            handle = module.get_kernel(entry)
            error, function = driver().cuKernelGetFunction(driver().CUkernel(int(handle.handle)))
            check(error)
            properties: Any = torch.cuda.get_device_properties(device)
            processors = properties.multi_processor_count
            _loaded[key] = Loaded(
                *(int(function), kernel.warps, module, processors, LAUNCH[entry]),
                processor_shared_bytes=properties.shared_memory_per_multiprocessor,
                starts_early=major >= 9,
            )
    return _loaded[key]


@contextlib.contextmanager
def outside_capture(device: int) -> Iterator[None]:
    """What is made once and kept, such as kernels and tables, on ``device``: also in the middle of
    a capture, and then no part of its graph.
    """
    import torch

    with torch.cuda.device(device):
        if not torch.cuda.is_current_stream_capturing():
            yield
            return
        mode = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        error, before = driver().cuThreadExchangeStreamCaptureMode(mode)
        check(error)
        try:
            with torch.cuda.stream(torch.cuda.Stream(device)):
                yield
                torch.cuda.current_stream(device).synchronize()
        finally:
            check(driver().cuThreadExchangeStreamCaptureMode(before)[0])


@cache
def driver() -> Any:
    """The driver's functions and types, from Python."""
    from cuda.bindings import driver

    return driver


def check(error: Any) -> None:
    """LctError for a result of the driver that is no success."""
    if int(error) != 0:
        raise LctError(f"CUDA driver call failed: {error!r}")


class Call:
    """A launch made ready: change fields of ``args``, then ``launch``, any number of times.

    ``args`` is read while ``launch`` runs: a call belongs to one thread at a time. ``extra``: a
    second, 64-bit argument of the kernel.
    """

    __slots__ = (
        *("_early", "_keep", "_pointers", "args", "blocks", "function", "shared_bytes", "threads"),
    )

    def __init__(
        self,
        kernel: Loaded,
        args: Any,
        blocks: int,
        warps: int,
        shared_bytes: int = 0,
        extra: int | None = None,
    ) -> None:
        kernel.allow_shared(shared_bytes)
        second = ctypes.c_uint64(extra or 0)
        pointers = (ctypes.c_void_p * 2)(ctypes.addressof(args), ctypes.addressof(second))
        self._keep = kernel, pointers, second
        self._pointers = ctypes.addressof(pointers)
        self.args = args
        self.function = kernel.function
        self.blocks = blocks
        self.threads = warps * 32
        self.shared_bytes = shared_bytes
        self._early: Any = None  # how to launch early, once that was asked for

    def launch(self, stream: int, *, early: bool = False) -> None:
        """Launch on ``stream``. LctError where that fails.

        ``early``: the kernel may start while the one launched just before it on ``stream`` runs, if
        the device can do that; it waits for it by itself (``wait_for_previous`` in common.cuh).
        """
        if early and self._keep[0].starts_early:
            if self._early is None:
                self._early = self._early_config()
            self._early.hStream = stream
            (error,) = driver().cuLaunchKernelEx(self._early, self.function, self._pointers, 0)
        else:
            (error,) = driver().cuLaunchKernel(
                *(self.function, self.blocks, 1, 1, self.threads, 1, 1),
                *(self.shared_bytes, stream, self._pointers, 0),
            )
        if error:
            check(error)

    def _early_config(self) -> Any:
        attribute, config = driver().CUlaunchAttribute(), driver().CUlaunchConfig()
        ids = driver().CUlaunchAttributeID
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.gridDimX, config.gridDimY, config.gridDimZ = self.blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes = self.shared_bytes
        config.attrs, config.numAttrs = [attribute], 1
        return config


def codebook_tables(book: Codebook) -> np.ndarray:
    """One book as the kernels read it, uint32 (TABLE_WORDS,); the layout stands in common.cuh."""
    lengths, codes = book.lengths.astype(np.int64), book.codes.astype(np.int64)
    window = _pair_window(lengths)
    tables = (
        _singles(lengths, codes),
        _pairs(lengths, codes),
        _encode(lengths, codes),
        _encode_pairs(lengths, codes, window),
        np.append(book.cost_bits, [0, 0, 0]),
        np.array([window, 0, 0, 0]),
    )
    return np.concatenate(tables).astype(np.uint32)


def _symbols_by_window(lengths: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Symbol whose code the 8 bits of a stream begin with, int64 (256,)."""
    symbols = np.zeros(256, np.int64)
    for symbol in range(NUM_SYMBOLS):
        length = int(lengths[symbol])
        if length:
            first = int(codes[symbol]) << (MAX_LENGTH - length)
            symbols[first : first + (1 << (MAX_LENGTH - length))] = symbol
    return symbols


def _delta(symbol: int) -> int:
    return (symbol - CENTER) % 256 if symbol < ZERO else 0


def _singles(lengths: np.ndarray, codes: np.ndarray) -> np.ndarray:
    flags = {ESC: _ESC_FLAG, ZERO: _ZERO_FLAG}
    return np.array(
        [
            _delta(s) << 23 | flags.get(s, 0) | int(lengths[s])
            for s in _symbols_by_window(lengths, codes).tolist()
        ]
    )


def _pairs(lengths: np.ndarray, codes: np.ndarray) -> np.ndarray:
    symbols = _symbols_by_window(lengths, codes).tolist()
    table = np.full(PAIRS_WORDS, _PAIR_SLOW, np.int64)
    for bits in range(PAIRS_WORDS):
        first = symbols[bits >> (PAIR_BITS - MAX_LENGTH)]
        rest = bits << int(lengths[first]) & (PAIRS_WORDS - 1)
        second = symbols[rest >> (PAIR_BITS - MAX_LENGTH)]
        length = int(lengths[first] + lengths[second])
        if length <= PAIR_BITS and ESC not in (first, second):
            zeros = (first == ZERO) * _PAIR_ZERO | (second == ZERO) * _PAIR_ZERO << 16
            table[bits] = zeros | _delta(second) << 23 | _delta(first) << 7 | length
    return table


def _encode(lengths: np.ndarray, codes: np.ndarray) -> np.ndarray:
    escape = _ESCAPED | int(codes[ESC]) << 8 | int(lengths[ESC])
    table = np.zeros(ENCODE_WORDS, np.int64)
    table[: ZERO + 1] = np.where(lengths[:ESC] > 0, codes[:ESC] << 8 | lengths[:ESC], escape)
    return table


def _encode_pairs(lengths: np.ndarray, codes: np.ndarray, window: int) -> np.ndarray:
    table = np.zeros(ENCODE_PAIRS_WORDS, np.int64)
    for high in range(PAIR_WINDOW):
        for low in range(PAIR_WINDOW):
            a, b = window + low, window + high
            entry = _SLOW
            if lengths[a] and lengths[b]:
                code = int(codes[a]) << int(lengths[b]) | int(codes[b])
                entry = code << 16 | int(lengths[a] + lengths[b])
            table[low + PAIR_STRIDE * high] = entry
    return table


def _pair_window(lengths: np.ndarray) -> int:
    """Start of the 16 neighbouring symbols that are coded most cheaply together."""
    weight = np.where(lengths[:256] > 0, 2.0 ** -lengths[:256], 0.0)
    sums = np.convolve(weight, np.ones(PAIR_WINDOW), "valid")
    sums[: CENTER - PAIR_WINDOW + 1] = -1
    sums[CENTER + 1 :] = -1
    return int(np.argmax(sums))


_COST_BOOKS = 16  # books that a row of costs has room for
assert len(BANK_ROWS) <= _COST_BOOKS


@cache
def device_tables(device: int) -> Any:
    """The whole bank on ``device``, int32, and behind it the costs of all books; made once."""
    import torch

    costs = np.zeros((ZERO + 1, _COST_BOOKS), np.uint8)
    for number, book in enumerate(bank()):
        costs[:, number] = book.cost_bits
    tables = np.concatenate(
        [*(codebook_tables(book) for book in bank()), costs.view(np.uint32).reshape(-1)]
    )
    with outside_capture(device):
        return torch.from_numpy(tables.view(np.int32)).to(torch.device("cuda", device))
