"""The CPU backend: the reference's functions and bytes (docs/format.md), compiled by Numba.

Shapes: ``values`` uint16 or uint32 (num_values,) bit patterns, ``payload`` uint8
(layout.size_bytes,), ``spill`` uint8 in canonical order. Kernels are compiled at the first use of
each and cached on disk; importing this package does not import Numba. Groups are spread over as
many threads as torch uses for its own kernels; any number of Python threads may call at once.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch

from ...codebook import CENTER, ESC, MAX_LENGTH, NUM_SYMBOLS, ZERO, bank
from ...errors import CorruptPayloadError
from ...layout import (
    HEADER_BYTES,
    STATE_SHIFT,
    STATE_SPILLED,
    STATE_WIDE,
    WORD_BYTES,
    PayloadLayout,
    parse_header,
)
from ...presets import STEP_VALUES

SAMPLED_SPANS = 32
SPAN_VALUES = 256
SAMPLED_VALUES = 4096
# Fewer values than this for each thread (about 50 µs of work) are not worth another thread.
MIN_THREAD_VALUES = 1 << 15
# Threads take shares in turn: neither cores nor groups are equally fast.
SHARES_PER_THREAD = 4


def _kernels() -> ModuleType:
    from . import kernels

    return kernels


def _make_pool() -> None:
    """(Re)create the pool; it starts no thread before it is used. A forked child needs its own."""
    global _pool
    _pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="lct-cpu")


_pool: ThreadPoolExecutor
_make_pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_make_pool)


def _submit(work: Callable[[], None]) -> list[Future[None]]:
    try:
        return [_pool.submit(work)]
    except RuntimeError:  # the interpreter is shutting down: the calling thread does it all
        return []


def _run(kernel: Callable[..., None], layout: PayloadLayout, *arguments: Any) -> None:
    """``kernel(*arguments, first, last)`` over all groups, spread over threads.

    The threads are not Numba's: those abort the process when two Python threads use them at once,
    which autograd does.
    """
    groups = layout.num_groups
    values = groups * layout.preset.group_values
    threads = min(torch.get_num_threads(), values // MIN_THREAD_VALUES)
    if threads <= 1:
        kernel(*arguments, 0, groups)
        return
    count = min(threads * SHARES_PER_THREAD, groups)
    shares = deque((groups * i // count, groups * (i + 1) // count) for i in range(count))

    def work() -> None:
        while shares:
            try:
                first, last = shares.popleft()
            except IndexError:
                return
            kernel(*arguments, first, last)

    helpers = [future for _ in range(threads - 1) for future in _submit(work)]
    try:
        work()
    finally:
        for future in helpers:
            if not future.cancel():  # one that has not begun finds nothing left to do
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


def _usable(array: np.ndarray) -> np.ndarray:
    """``array`` if it is contiguous, writable and aligned to words, else a copy.

    Kernels take no other arrays: each kind would be compiled by itself.
    """
    flags = array.flags
    aligned = array.__array_interface__["data"][0] % WORD_BYTES == 0
    return array if flags.c_contiguous and flags.writeable and aligned else array.copy()


def _check_array(
    name: str, array: np.ndarray, dtype: type[np.unsignedinteger[Any]], size: int
) -> None:
    if array.dtype != dtype or array.shape != (size,):
        raise ValueError(
            f"{name} must be {np.dtype(dtype)} of shape ({size},), "
            f"got {array.dtype} of shape {array.shape}"
        )


def _pattern(layout: PayloadLayout) -> type[np.unsignedinteger[Any]]:
    return np.uint32 if layout.dtype.itemsize == 4 else np.uint16


def _sample(total: int, samples: int) -> np.ndarray:
    """Places of ``samples`` jittered samples of ``total`` items, int64; all if there are fewer."""
    if total <= samples:
        return np.arange(total)
    k = np.arange(samples + 1)
    edges = k * total // samples
    jitter = (k[1:] * 2654435761 % 2**32) >> 8
    return edges[:-1] + jitter % np.diff(edges)


def _exponents(values: np.ndarray, layout: PayloadLayout) -> np.ndarray:
    if layout.dtype.name == "float16":
        return (values >> 10 & 0x1F).astype(np.int64)
    return (values >> (8 * layout.dtype.itemsize - 9) & 0xFF).astype(np.int64)


def select(
    values: np.ndarray, layout: PayloadLayout, candidates: tuple[int, ...]
) -> tuple[int, int]:
    """(book, shift) of least coded length over a sample; ties: the first (section 5)."""
    _check_array("values", values, _pattern(layout), layout.num_values)
    cost_bits = _costs(candidates)
    if layout.preset.pooled:
        spans = _sample(-(-layout.num_values // SPAN_VALUES), SAMPLED_SPANS)
        index = spans[:, None] * SPAN_VALUES + np.arange(SPAN_VALUES)
        inside = index < layout.num_values
        exponents = _exponents(values[np.where(inside, index, 0)], layout) * inside
        count = np.count_nonzero(exponents, axis=1)
        shifts = (exponents.sum(1) + count // 2) // np.maximum(count, 1)
        symbols = np.where(exponents == 0, ZERO, (exponents - shifts[:, None] + CENTER) & 0xFF)
        counts = np.bincount(symbols[inside], minlength=ZERO + 1)
        return candidates[int(np.argmin(cost_bits @ counts))], 0
    exponents = _exponents(values[_sample(layout.num_values, SAMPLED_VALUES)], layout)
    counts = np.bincount(exponents, minlength=256)
    found = np.flatnonzero(counts)
    symbols = np.where(found == 0, ZERO, (found - np.arange(256)[:, None] + CENTER) & 0xFF)
    costs = cost_bits[:, symbols] @ counts[found]
    row, shift = divmod(int(np.argmin(costs)), 256)
    return candidates[row], shift


@cache
def _costs(candidates: tuple[int, ...]) -> np.ndarray:
    """Bits of each symbol 0…256 in each book, int64 (books, 257)."""
    return np.stack([bank()[book].cost_bits for book in candidates]).astype(np.int64)


def encode(
    values: np.ndarray,
    layout: PayloadLayout,
    book: int,
    shift: int,
    payload: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(payload, spill) of ``values``. A given ``payload`` is overwritten, every byte of it.

    ValueError where an array has the wrong shape or dtype, or where a group is wide and the layout
    gives it no words.
    """
    _check_array("values", values, _pattern(layout), layout.num_values)
    if payload is None:
        payload = np.empty(layout.size_bytes, np.uint8)
    _check_array("payload", payload, np.uint8, layout.size_bytes)
    target = _usable(payload)
    target[:HEADER_BYTES] = np.frombuffer(layout.pack_header(book, shift), np.uint8)
    if layout.is_raw:
        target[HEADER_BYTES:].view(values.dtype)[:] = values
        spill = np.empty(0, np.uint8)
    else:
        spill = _encode_groups(_usable(values).view(np.uint16), layout, book, shift, target)
    if target is not payload:
        payload[:] = target
    return payload, spill


def _encode_groups(
    values: np.ndarray, layout: PayloadLayout, book: int, shift: int, payload: np.ndarray
) -> np.ndarray:
    kernels, geometry = _kernels(), _geometry(layout)
    # Between the parts, and the low plane's share of the values that fill up the last unit.
    low_end = layout.low_offset + layout.num_values * layout.dtype.low_bits // 8
    payload[layout.sign_fraction_offset + layout.num_values : layout.low_offset] = 0
    payload[low_end : layout.lane_offset] = 0
    payload[layout.meta_offset + WORD_BYTES * layout.num_groups :] = 0
    payload16, payload32 = payload.view(np.uint16), payload.view(np.uint32)
    codes = _code_table(book)
    _run(
        kernels.encode_groups,
        layout,
        *(values, geometry, codes, shift, payload, payload16, payload32),
    )
    state, refs, offsets = _places_of_spill(layout, payload)
    spill = np.empty(int(offsets[-1]), np.uint8)
    if not spill.size:
        return spill
    if layout.capacity_words == 0 and (state == STATE_WIDE).any():
        raise ValueError("a wide group takes a capacity of at least 4 words, got 0")
    _run(
        kernels.encode_spill,
        layout,
        *(values, geometry, payload, payload32, refs, offsets, spill),
    )
    return spill


def _places_of_spill(
    layout: PayloadLayout, payload: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """State, ordinal of the first chunk, and where it begins in the spill, for each group.

    The last two are int64 (num_groups + 1,): the last entry is the sum.
    """
    meta = payload[layout.meta_offset :][: WORD_BYTES * layout.num_groups].view(np.uint32)
    state = meta >> STATE_SHIFT
    chunks = np.where(state == STATE_WIDE, 3, state >= STATE_SPILLED)
    steps = np.full(layout.num_groups, layout.preset.steps)
    steps[layout.full_groups :] = layout.tail_steps
    refs = np.concatenate(([0], np.cumsum(chunks)))
    return state, refs, np.concatenate(([0], np.cumsum(chunks * steps * STEP_VALUES)))


def decode(payload: np.ndarray, spill: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Bit patterns, uint16 or uint32 (num_values,), of a canonical payload; in ``out`` where given.

    CorruptPayloadError where the sizes do not fit the header and the groups' states. Nothing else
    is checked: damaged streams give wrong values, but nothing is read outside of the arrays.
    """
    layout, book, shift = parse_header(payload[:HEADER_BYTES].tobytes())
    if payload.size != layout.size_bytes:
        raise CorruptPayloadError(
            f"payload must have {layout.size_bytes} bytes, got {payload.size}"
        )
    if out is None:
        out = np.empty(layout.num_values, _pattern(layout))
    _check_array("out", out, _pattern(layout), layout.num_values)
    if layout.is_raw:
        out[:] = payload[HEADER_BYTES:].view(out.dtype)
        return out
    source, target = _usable(payload), _usable(out)
    _, _, offsets = _places_of_spill(layout, source)
    if offsets[-1] != spill.size:
        raise CorruptPayloadError(f"spilled data must have {offsets[-1]} bytes, got {spill.size}")
    _run(
        _kernels().decode_groups,
        layout,
        *(source, source.view(np.uint16), source.view(np.uint32), _usable(spill), offsets),
        *(_geometry(layout), _window_table(book), shift, target.view(np.uint16)),
    )
    if target is not out:
        out[:] = target
    return out


def group_needs(values: np.ndarray, layout: PayloadLayout, book: int) -> np.ndarray:
    """Words that each pooled group needs to spill nothing, int32 (num_groups,); constant: 0."""
    _check_array("values", values, _pattern(layout), layout.num_values)
    needs = np.zeros(layout.num_groups, np.int32)
    usable = _usable(values).view(np.uint16)
    _run(_kernels().measure_groups, layout, usable, _geometry(layout), _code_table(book), needs)
    return needs
