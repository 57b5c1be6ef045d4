"""The CPU backend: the reference's functions and bytes (docs/format.md), compiled by Numba.

Shapes: ``values`` uint16 or uint32 (num_values,) bit patterns, ``payload`` uint8
(layout.size_bytes,), ``spill`` uint8 in canonical order. Kernels are compiled at the first use of
each and cached on disk; importing this package does not import Numba. Groups are spread over as many
threads as torch uses for its own kernels; any number of Python threads may call at once.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch

from ...codebook import CENTER, ESC, MAX_LENGTH, NUM_SYMBOLS, ZERO, bank
from ...errors import CorruptPayloadError
from ...layout import (
    ALIGNMENT,
    HEADER_BYTES,
    STATE_SHIFT,
    STATE_SPILLED,
    STATE_WIDE,
    WORD_BYTES,
    PayloadLayout,
    parse_header,
)
from ...dtypes import UPCAST
from ...presets import STEP_VALUES

SAMPLED_SPANS = 64
SAMPLED_VALUES = 4096
# A share of fewer values than this (about 30 µs) is not worth handing to another thread.
MIN_SHARE_VALUES = 1 << 15
# Shares a thread: threads do not run equally fast, and groups do not cost the same.
SHARES_PER_THREAD = 4

_pool: ThreadPoolExecutor | None = None


def _kernels() -> ModuleType:
    from . import kernels

    return kernels


def _forget_pool() -> None:
    global _pool
    _pool = None


# A forked child has none of the pool's threads.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def _submit(work: Callable[[], None]) -> Any:
    """A future for ``work``; None where there can be no more threads (the interpreter shuts down)."""
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="lct-cpu")
    try:
        return _pool.submit(work)
    except RuntimeError:
        return None


def _run(kernel: Any, layout: PayloadLayout, *arguments: Any) -> None:
    """``kernel(*arguments, first, last)`` over all groups, in shares that threads take in turn."""
    groups = layout.num_groups
    threads = min(
        torch.get_num_threads(), groups * layout.preset.group_values // MIN_SHARE_VALUES
    )
    if threads < 2:
        kernel(*arguments, 0, groups)
        return
    count = min(threads * SHARES_PER_THREAD, groups)
    shares = deque((groups * i // count, groups * (i + 1) // count) for i in range(count))

    def work() -> None:
        while True:
            try:
                first, last = shares.popleft()
            except IndexError:
                return
            kernel(*arguments, first, last)

    futures = [_submit(work) for _ in range(threads - 1)]
    work()
    for future in futures:
        if future is not None:
            future.result()


def _geometry(layout: PayloadLayout) -> Any:
    return _kernels().Geometry(
        num_values=layout.num_values,
        dtype_code=layout.dtype.code,
        pooled=int(layout.preset.pooled),
        steps=layout.preset.steps,
        groups_per_block=layout.preset.groups_per_block,
        full_groups=layout.full_groups,
        tail_steps=layout.tail_steps,
        capacity_words=layout.capacity_words,
        tail_capacity_words=layout.tail_capacity_words,
        sign_fraction_offset=layout.sign_fraction_offset,
        low_offset=layout.low_offset,
        lane_offset=layout.lane_offset,
        meta_offset=layout.meta_offset,
        slots_offset=HEADER_BYTES,
    )


@cache
def _code_table(book: int) -> np.ndarray:
    """Entry of each (shift, exponent), uint16 (65536,): the code, its length, whether it is ESC."""
    codes, lengths = bank()[book].codes, bank()[book].lengths
    escapes = (lengths == 0).astype(np.int64)
    own = np.where(lengths > 0, codes, codes[ESC])
    bits = np.where(lengths > 0, lengths, lengths[ESC])
    k = _kernels()
    entries = own | bits << k.LENGTH_SHIFT | escapes << k.ESCAPE_SHIFT
    shifts, exponents = np.arange(256)[:, None], np.arange(256)[None, :]
    symbols = np.where(exponents == 0, ZERO, (exponents - shifts + CENTER) % 256)
    return entries[symbols].astype(np.uint16).reshape(-1)


@cache
def _window_table(book: int) -> np.ndarray:
    """Entry of each (shift, 8-bit window), uint16 (65536,): exponent, length, whether it is ESC."""
    codes, lengths = bank()[book].codes, bank()[book].lengths
    symbols = np.full(1 << MAX_LENGTH, ESC)
    for symbol in range(NUM_SYMBOLS):
        if lengths[symbol]:
            free = MAX_LENGTH - lengths[symbol]
            symbols[codes[symbol] << free : (codes[symbol] + 1) << free] = symbol
    k = _kernels()
    exponents = (symbols[None, :] + np.arange(256)[:, None] - CENTER) % 256
    exponents = np.where(symbols >= ZERO, 0, exponents)
    flags = lengths[symbols] << k.LENGTH_SHIFT | (symbols == ESC).astype(np.int64) << k.ESCAPE_SHIFT
    return (exponents | flags).astype(np.uint16).reshape(-1)


def _kernel_array(array: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
    """``array`` as kernels take it: contiguous, writable, aligned to words; else a copy.

    A kernel is compiled for each kind of array that it meets, so all arrays are made of one kind.
    """
    usable = array.flags.c_contiguous and array.flags.writeable
    if not usable or array.ctypes.data % WORD_BYTES:
        array = array.copy()
    return array.view(dtype)


def _check_values(values: np.ndarray, layout: PayloadLayout) -> None:
    pattern = np.uint32 if layout.dtype.itemsize == 4 else np.uint16
    if values.dtype != pattern or values.shape != (layout.num_values,):
        raise ValueError(
            f"values must be {np.dtype(pattern)} of shape ({layout.num_values},), "
            f"got {values.dtype} of shape {values.shape}"
        )


def select(
    values: np.ndarray, layout: PayloadLayout, candidates: tuple[int, ...]
) -> tuple[int, int]:
    """(book, shift) of least coded length over a sample of ``values`` (section 5)."""
    _check_values(values, layout)
    kernels = _kernels()
    halves = _kernel_array(values, np.uint16)
    cost_bits = np.stack([bank()[book].cost_bits for book in candidates]).astype(np.int64)
    if layout.preset.pooled:
        counts = np.zeros(ZERO + 1, np.int64)
        kernels.count_symbols(halves, _geometry(layout), SAMPLED_SPANS, counts)
        return candidates[int(np.argmin(cost_bits @ counts))], 0
    counts = np.zeros(256, np.int64)
    kernels.count_exponents(halves, _geometry(layout), SAMPLED_VALUES, counts)
    row, shift = kernels.best_shift(counts, cost_bits)
    return candidates[row], shift


def encode(
    values: np.ndarray,
    layout: PayloadLayout,
    book: int,
    shift: int,
    payload: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(payload, spill) of ``values``; every byte of ``payload`` is written where it is given.

    ValueError where an array has the wrong shape or dtype.
    """
    _check_values(values, layout)
    if payload is None:
        payload = np.empty(layout.size_bytes, np.uint8)
    elif payload.dtype != np.uint8 or payload.shape != (layout.size_bytes,):
        raise ValueError(
            f"payload must be uint8 of shape ({layout.size_bytes},), "
            f"got {payload.dtype} of shape {payload.shape}"
        )
    target = _kernel_array(payload, np.uint8)
    target[:HEADER_BYTES] = np.frombuffer(layout.pack_header(book, shift), np.uint8)
    if layout.is_raw:
        target[HEADER_BYTES:] = values.view(np.uint8)
        spill = np.empty(0, np.uint8)
    else:
        spill = _encode_groups(_kernel_array(values, np.uint16), layout, book, shift, target)
    if target is not payload and not np.shares_memory(target, payload):
        payload[:] = target
    return payload, spill


def _encode_groups(
    halves: np.ndarray, layout: PayloadLayout, book: int, shift: int, payload: np.ndarray
) -> np.ndarray:
    kernels, geometry = _kernels(), _geometry(layout)
    for end_of_part, start_of_next in (
        (layout.sign_fraction_offset + layout.num_values, layout.low_offset),
        (layout.low_offset + layout.dtype.low_plane_bytes(layout.num_values), layout.lane_offset),
        (layout.meta_offset + WORD_BYTES * layout.num_groups, layout.size_bytes),
    ):
        payload[end_of_part:start_of_next] = 0
    payload16, payload32 = payload.view(np.uint16), payload.view(np.uint32)
    # FP32 keeps low halves up to a multiple of 8 values.
    _run(
        kernels.encode_groups,
        layout,
        halves,
        geometry,
        _code_table(book),
        shift,
        payload,
        payload16,
        payload32,
    )
    refs, offsets = _spill_places(layout, payload)
    spill = np.empty(int(offsets[-1]), np.uint8)
    if spill.size:
        _run(
            kernels.encode_spill,
            layout,
            halves,
            geometry,
            payload,
            payload32,
            refs,
            offsets,
            spill,
        )
    return spill


def _spill_places(layout: PayloadLayout, payload: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(first chunk of each group, its first byte in the canonical spill), int64 (num_groups + 1,)."""
    meta = payload[layout.meta_offset :][: WORD_BYTES * layout.num_groups].view(np.uint32)
    state = meta >> STATE_SHIFT
    chunks = np.where(state == STATE_WIDE, 3, (state >= STATE_SPILLED).astype(np.int64))
    sizes = chunks * layout.preset.steps * STEP_VALUES
    sizes[layout.full_groups :] = chunks[layout.full_groups :] * layout.tail_steps * STEP_VALUES
    return tuple(np.concatenate(([0], np.cumsum(a))) for a in (chunks, sizes))  # type: ignore[return-value]


def decode(payload: np.ndarray, spill: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """The bit patterns, uint16 or uint32 (num_values,), of a canonical payload; into ``out`` if given.

    CorruptPayloadError where sizes do not fit the header and the states of the groups. Streams are
    not checked: damaged ones give wrong values.
    """
    layout, book, shift = parse_header(payload[:HEADER_BYTES].tobytes())
    if payload.size != layout.size_bytes:
        raise CorruptPayloadError(f"payload must have {layout.size_bytes} bytes, got {payload.size}")
    if out is None:
        pattern = np.uint32 if layout.dtype.itemsize == 4 else np.uint16
        out = np.empty(layout.num_values, pattern)
    _check_values(out, layout)
    if layout.is_raw:
        out.view(np.uint8)[:] = payload[HEADER_BYTES:]
        return out
    _, offsets = _spill_places(layout, payload)
    if offsets[-1] != spill.size:
        raise CorruptPayloadError(f"spilled data must have {offsets[-1]} bytes, got {spill.size}")
    source = _kernel_array(payload, np.uint8)
    target = _kernel_array(out, np.uint16)
    _run(
        _kernels().decode_groups,
        layout,
        source,
        source.view(np.uint16),
        source.view(np.uint32),
        _kernel_array(spill, np.uint8),
        offsets,
        _geometry(layout),
        _window_table(book),
        shift,
        target,
    )
    if not np.shares_memory(target, out):
        out[:] = target.view(out.dtype)
    return out


def group_needs(values: np.ndarray, layout: PayloadLayout, book: int) -> np.ndarray:
    """Words that each pooled group needs so that nothing spills, int32 (num_groups,); constant: 0."""
    _check_values(values, layout)
    needs = np.zeros(layout.num_groups, np.int32)
    _run(
        _kernels().measure_groups,
        layout,
        _kernel_array(values, np.uint16),
        _geometry(layout),
        _code_table(book),
        needs,
    )
    return needs
