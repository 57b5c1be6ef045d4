# mypy: allow-untyped-defs
"""Numba kernels of the CPU backend. Each codes the groups ``first`` to ``last`` without the GIL.

One file, for Numba's cache on disk notices changes only of the file that holds the kernel.

Shapes: ``values`` uint16, the halfwords of the bit patterns (FP32 has two a value, the lower
first); ``payload`` uint8, ``payload16`` and ``payload32`` the same bytes as halfwords and words;
``exponents`` uint8 (8192,) of one group in the order step, lane, j. ``geo`` is a ``Geometry``.
Sections are those of docs/format.md. Callers have checked every size; kernels keep all reads of
streams, literals and markers inside of what belongs to their group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numba
import numpy as np

from ...codebook import LITERAL_BITS
from ...dtypes import DTYPES, UPCAST
from ...layout import (
    FIRST_WORDS,
    MARKER_MASK,
    STATE_CONSTANT,
    STATE_SHIFT,
    STATE_SPILLED,
    STATE_WIDE,
    WORD_BYTES,
)
from ...presets import LANES, PRESETS, QUAD, STEP_VALUES

BF16, FP32, FP16 = (DTYPES[name].code for name in ("bfloat16", "float32", "float16"))
UPCAST_CODE = UPCAST.code
GROUP_BYTES = max(preset.group_values for preset in PRESETS.values())
SPAN_STEPS = 2
SPAN_VALUES = SPAN_STEPS * STEP_VALUES
WORD_BITS = 32

# Table entries, uint16: bits 7..0 a code or an exponent, 11..8 the code's length, 15: it is ESC.
LENGTH_SHIFT, ESCAPE_SHIFT = 8, 15

# Bit buffers are uint64, and Numba follows NumPy: uint64 with a signed integer gives float64.
# Indices are cast as well: for a signed one, every access also looks for Python's negative indices,
# which keeps loops from being vectorised (encode and decode took twice as long).
_u = np.uint64
_BYTE, _WORD = _u(0xFF), _u(0xFFFF_FFFF)
_1, _5, _6, _8, _15, _32, _56, _64 = (_u(n) for n in (1, 5, 6, 8, 15, 32, 56, 64))


class Geometry(NamedTuple):
    """What kernels need to know of a ``PayloadLayout``; all int64."""

    num_values: int
    dtype_code: int
    pooled: int
    steps: int
    groups_per_block: int
    full_groups: int
    tail_steps: int
    capacity_words: int
    tail_capacity_words: int
    slots_offset: int
    sign_fraction_offset: int
    low_offset: int
    lane_offset: int
    meta_offset: int


_njit: Any = partial(
    numba.njit,
    nogil=True,
    error_model="numpy",  # sizes are checked before, no division by zero is to be looked out for
    no_cfunc_wrapper=True,
)
_inner = _njit(no_cpython_wrapper=True)


def _kernel(function: Callable[..., Any]) -> Any:
    """Compile ``function`` at its first call, or take it from the cache on disk."""
    try:
        return _njit(cache=True)(function)
    except RuntimeError:  # no writable place for a cache: every process compiles
        return _njit()(function)


@_inner
def _group_steps(geo, group):
    return geo.steps if group < geo.full_groups else geo.tail_steps


@_inner
def _slot(geo, group):
    """(first byte of the slot, capacity words a group or a stream)."""
    scale = WORD_BYTES if geo.pooled else WORD_BYTES * LANES
    if group < geo.full_groups:
        return geo.slots_offset + group * geo.capacity_words * scale, geo.capacity_words
    words = geo.full_groups * geo.capacity_words
    words += (group - geo.full_groups) * geo.tail_capacity_words
    return geo.slots_offset + words * scale, geo.tail_capacity_words


@_inner
def _run(geo, group, step, part):
    """(index of the first value, number of values, place in the step) of one of a step's two runs.

    Run 0 goes up to the end of the row; run 1 begins at its start and is mostly empty.
    """
    if geo.groups_per_block == 1:
        return (group * geo.steps + step) * STEP_VALUES, STEP_VALUES * (1 - part), 0
    quads = LANES * geo.groups_per_block
    block = group // geo.groups_per_block
    column = (LANES * (group - block * geo.groups_per_block) - 4 * step) & (quads - 1)
    row = (block * geo.steps + step) * quads * QUAD
    count = min(LANES, quads - column) * QUAD
    return (row, STEP_VALUES - count, count) if part else (row + column * QUAD, count, 0)


@_inner
def _load_run(values, geo, first, count, exponents, at):
    valid = min(max(geo.num_values - first, 0), count)
    if geo.dtype_code == BF16 or geo.dtype_code == FP16:
        shift, mask = (7, 0xFF) if geo.dtype_code == BF16 else (10, 0x1F)
        for i in range(valid):
            exponents[_u(at + i)] = (values[_u(first + i)] >> shift) & mask
    else:
        for i in range(valid):
            exponents[_u(at + i)] = (values[_u(2 * (first + i) + 1)] >> 7) & 0xFF
    for i in range(valid, count):
        exponents[_u(at + i)] = 0


@_inner
def _load_exponents(values, geo, group, steps, exponents):
    """Exponents of a group, padding included, and zeros up to the end of the last span."""
    for i in range(2 * steps):
        first, count, at = _run(geo, group, i >> 1, i & 1)
        _load_run(values, geo, first, count, exponents, (i >> 1) * STEP_VALUES + at)
    if steps % SPAN_STEPS:
        for i in range(steps * STEP_VALUES, (steps + 1) * STEP_VALUES):
            exponents[_u(i)] = 0


@_inner
def _is_constant(exponents, count):
    i = 1
    while i < count and exponents[_u(i)] == exponents[_u(0)]:
        i += 1
    return i >= count


@_inner
def _is_wide(values, first, last):
    """True where a lower half of the values ``first`` to ``last`` is not zero."""
    bits = 0
    for i in range(first, last):
        bits |= values[_u(2 * i)]
    return bits != 0


@_inner
def _split_planes(values, geo, payload, payload16, first, last):
    """Sign-fraction bytes and low bits of the values ``first`` (a multiple of 8) to ``last``."""
    signs = geo.sign_fraction_offset
    if geo.dtype_code == BF16:
        for i in range(first, last):
            v = values[_u(i)]
            payload[_u(signs + i)] = ((v >> 8) & 0x80) | (v & 0x7F)
    elif geo.dtype_code == FP16:
        for i in range(first, last):
            v = values[_u(i)]
            payload[_u(signs + i)] = ((v >> 8) & 0x80) | ((v >> 3) & 0x7F)
        for unit in range(first // 8, (last + 7) // 8):
            bits = 0
            for i in range(min(8, last - 8 * unit)):
                bits |= (values[_u(8 * unit + i)] & 7) << (3 * i)
            at = geo.low_offset + 3 * unit
            payload[_u(at)] = bits & 0xFF
            payload[_u(at + 1)] = (bits >> 8) & 0xFF
            payload[_u(at + 2)] = bits >> 16
    else:
        for i in range(first, last):
            v = values[_u(2 * i + 1)]
            payload[_u(signs + i)] = ((v >> 8) & 0x80) | (v & 0x7F)
        if geo.dtype_code == FP32:
            at = geo.low_offset // 2
            for i in range(first, last):
                payload16[_u(at + i)] = values[_u(2 * i)]


@_inner
def _span_shift(exponents, first):
    """Mean of the non-zero exponents of a span, halves up; 0 where there are none (section 5)."""
    total = 0
    count = 0
    for i in range(first, first + SPAN_VALUES):
        total += exponents[_u(i)]
        count += exponents[_u(i)] != 0
    return (total + count // 2) // count if count else 0


@_inner
def _entry(table, row, column):
    return _u(table[_u(row + np.int64(column))])


@_inner
def _length(entry):
    return (entry >> _8) & _15


@_inner
def _is_escape(entry):
    return entry >> _15


@_inner
def _asks(step, position, quad_bits):
    """1 where a lane asks for a word before ``step``, else 0 (section 6); without a branch.

    Even steps: position >= 32; odd steps: position + quad_bits > 64. Neither sum reaches 128.
    """
    return (position + (quad_bits - _1 if step & 1 else _32)) >> _6


@_inner
def _encode_pooled(exponents, steps, codes, capacity, payload, payload32, slot, lanes_at, lanes):
    """Number of steps coded of one group (section 6). ``lanes``: arrays (32,), named below."""
    acc, position, current, following, quad_code, quad_bits = lanes
    for lane in range(LANES):
        acc[_u(lane)] = 0  # the stream from the current word on, its first bit in bit 63
        position[_u(lane)] = 0
        current[_u(lane)] = lane
        following[_u(lane)] = LANES + lane
        payload[_u(lanes_at + lane)] = 0
    base = slot // WORD_BYTES
    end = slot + capacity * WORD_BYTES
    handed, literals, coded, shift = FIRST_WORDS, 0, 0, 0
    for step in range(steps):
        if step % SPAN_STEPS == 0:
            shift = _span_shift(exponents, step * STEP_VALUES)
        row = shift << 8
        # Whether the step fits must be known before a word is handed out.
        requests, escapes = _u(0), _u(0)
        for lane in range(LANES):
            code, bits = _u(0), _u(0)
            at = step * STEP_VALUES + lane * QUAD
            for i in range(at, at + QUAD):
                entry = _entry(codes, row, exponents[_u(i)])
                code = code << _length(entry) | (entry & _BYTE)
                bits += _length(entry)
                escapes += _is_escape(entry)
            quad_code[_u(lane)] = code
            quad_bits[_u(lane)] = bits
            requests += _asks(step, position[_u(lane)], bits)
        words = handed + np.int64(requests)
        if words * WORD_BYTES + literals + np.int64(escapes) > capacity * WORD_BYTES:
            break
        for lane in range(LANES):
            if _asks(step, position[_u(lane)], quad_bits[_u(lane)]):
                payload32[_u(base + current[_u(lane)])] = acc[_u(lane)] >> _32
                acc[_u(lane)] <<= _32
                position[_u(lane)] -= _32
                current[_u(lane)] = following[_u(lane)]
                following[_u(lane)] = handed
                handed += 1
            position[_u(lane)] += quad_bits[_u(lane)]
            acc[_u(lane)] |= quad_code[_u(lane)] << (_64 - position[_u(lane)])
        if escapes:
            for j in range(QUAD):
                for lane in range(LANES):
                    exponent = exponents[_u(step * STEP_VALUES + lane * QUAD + j)]
                    if _is_escape(_entry(codes, row, exponent)):
                        literals += 1
                        payload[_u(end - literals)] = exponent
        payload[_u(lanes_at + step // SPAN_STEPS)] = shift
        coded = step + 1
    unused = slot
    if coded:
        unused += handed * WORD_BYTES
        for lane in range(LANES):
            payload32[_u(base + current[_u(lane)])] = acc[_u(lane)] >> _32
            payload32[_u(base + following[_u(lane)])] = acc[_u(lane)] & _WORD
    for i in range(unused, end - literals):
        payload[_u(i)] = 0
    return coded


@_inner
def _encode_fixed(exponents, steps, codes, row, capacity, payload, payload32, slot, lanes_at):
    """True where a stream of one group spills (section 7)."""
    spilled = False
    for lane in range(LANES):
        acc, position = _u(0), _u(0)
        word = slot // WORD_BYTES + lane
        end = word + capacity * LANES
        left = capacity * WORD_BITS
        marker = steps
        for step in range(steps):
            at = step * STEP_VALUES + lane * QUAD
            bits, escapes = _u(0), _u(0)
            for i in range(at, at + QUAD):
                entry = _entry(codes, row, exponents[_u(i)])
                bits += _length(entry)
                escapes += _is_escape(entry)
            left -= np.int64(bits) + np.int64(escapes) * LITERAL_BITS
            if left < 0:
                marker = step
                break
            for i in range(at, at + QUAD):
                entry = _entry(codes, row, exponents[_u(i)])
                code, length = entry & _BYTE, _length(entry)
                if escapes and _is_escape(entry):
                    code = code << _u(LITERAL_BITS) | _u(exponents[_u(i)])
                    length += _u(LITERAL_BITS)
                if position >= _32:
                    payload32[_u(word)] = acc >> _32
                    word += LANES
                    acc <<= _32
                    position -= _32
                position += length
                acc |= code << (_64 - position)
        while word < end:
            payload32[_u(word)] = acc >> _32
            word += LANES
            acc <<= _32
        payload[_u(lanes_at + lane)] = marker
        spilled |= marker < steps
    return spilled


@_inner
def _zero_group(payload, slot, slot_bytes, lanes_at):
    for i in range(slot, slot + slot_bytes):
        payload[_u(i)] = 0
    for i in range(lanes_at, lanes_at + LANES):
        payload[_u(i)] = 0


@_kernel
def encode_groups(values, geo, codes, shift, payload, payload16, payload32, first, last):
    """All of the groups but what spills: streams, planes, meta words with references of 0."""
    exponents = np.empty(GROUP_BYTES, np.uint8)
    acc, position = np.empty(LANES, np.uint64), np.empty(LANES, np.uint64)
    current, following = np.empty(LANES, np.int64), np.empty(LANES, np.int64)
    quad_code, quad_bits = np.empty(LANES, np.uint64), np.empty(LANES, np.uint64)
    lanes = acc, position, current, following, quad_code, quad_bits
    for group in range(first, last):
        steps = _group_steps(geo, group)
        slot, capacity = _slot(geo, group)
        slot_bytes = capacity * (WORD_BYTES if geo.pooled else WORD_BYTES * LANES)
        lanes_at = geo.lane_offset + LANES * group
        meta_at = geo.meta_offset // WORD_BYTES + group
        # Planes keep the tensor's order: the values at these places, whichever group codes them.
        start = min(group * geo.steps * STEP_VALUES, geo.num_values)
        stop = min((group + 1) * geo.steps * STEP_VALUES, geo.num_values)
        _split_planes(values, geo, payload, payload16, start, stop)
        if geo.dtype_code == UPCAST_CODE and _is_wide(values, start, stop):
            _zero_group(payload, slot, slot_bytes, lanes_at)
            payload32[_u(meta_at)] = STATE_WIDE << STATE_SHIFT
            continue
        _load_exponents(values, geo, group, steps, exponents)
        if _is_constant(exponents, steps * STEP_VALUES):
            _zero_group(payload, slot, slot_bytes, lanes_at)
            payload32[_u(meta_at)] = STATE_CONSTANT << STATE_SHIFT | exponents[_u(0)]
            continue
        if geo.pooled:
            coded = _encode_pooled(
                exponents, steps, codes, capacity, payload, payload32, slot, lanes_at, lanes
            )
            state = STATE_SPILLED | coded if coded < steps else 0
        else:
            spilled = _encode_fixed(
                exponents, steps, codes, shift << 8, capacity, payload, payload32, slot, lanes_at
            )
            state = STATE_SPILLED if spilled else 0
        payload32[_u(meta_at)] = state << STATE_SHIFT


@_kernel
def encode_spill(values, geo, payload, payload32, refs, offsets, spill, first, last):
    """References and chunks of the groups that spilled; ``offsets``: their places in ``spill``."""
    exponents = np.empty(GROUP_BYTES, np.uint8)
    for group in range(first, last):
        meta_at = geo.meta_offset // WORD_BYTES + group
        state = payload32[_u(meta_at)] >> STATE_SHIFT
        if state != STATE_WIDE and state < STATE_SPILLED:
            continue
        steps = _group_steps(geo, group)
        slot, _ = _slot(geo, group)
        count = steps * STEP_VALUES
        at = offsets[_u(group)]
        payload32[_u(meta_at)] = state << STATE_SHIFT | refs[_u(group)]
        _load_exponents(values, geo, group, steps, exponents)
        if state == STATE_WIDE:
            payload32[_u(slot // WORD_BYTES)] = refs[_u(group)] + 1
            payload32[_u(slot // WORD_BYTES + 1)] = refs[_u(group)] + 2
            start = group * geo.steps * STEP_VALUES
            for i in range(count):
                half = values[_u(2 * (start + i))] if start + i < geo.num_values else 0
                spill[_u(at + i)] = exponents[_u(i)]
                spill[_u(at + count + 2 * i)] = half & 0xFF
                spill[_u(at + count + 2 * i + 1)] = half >> 8
            continue
        for step in range(steps):
            for lane in range(LANES):
                marker = np.int64(state & MARKER_MASK)
                if not geo.pooled:
                    marker = np.int64(payload[_u(geo.lane_offset + LANES * group + lane)])
                i = step * STEP_VALUES + lane * QUAD
                for j in range(QUAD):
                    spill[_u(at + i + j)] = exponents[_u(i + j)] if step >= marker else 0


@_kernel
def measure_groups(values, geo, codes, needs, first, last):
    """``needs``, int32: words that each pooled group takes where nothing spills; constant: 0."""
    exponents = np.empty(GROUP_BYTES, np.uint8)
    rows = np.empty(LANES, np.int64)
    for group in range(first, last):
        steps = _group_steps(geo, group)
        _load_exponents(values, geo, group, steps, exponents)
        if _is_constant(exponents, steps * STEP_VALUES):
            needs[_u(group)] = 0
            continue
        for step in range(0, steps, SPAN_STEPS):
            rows[_u(step // SPAN_STEPS)] = _span_shift(exponents, step * STEP_VALUES) << 8
        words, escapes = _u(FIRST_WORDS), _u(0)
        # Lane by lane: the order in which they get their words does not change how many they take.
        for lane in range(LANES):
            position = _u(0)
            for step in range(steps):
                row = rows[_u(step // SPAN_STEPS)]
                bits = _u(0)
                at = step * STEP_VALUES + lane * QUAD
                for i in range(at, at + QUAD):
                    entry = _entry(codes, row, exponents[_u(i)])
                    bits += _length(entry)
                    escapes += _is_escape(entry)
                asks = _asks(step, position, bits)
                words += asks
                position += bits - (asks << _5)
        literal_words = (np.int64(escapes) + WORD_BYTES - 1) // WORD_BYTES
        needs[_u(group)] = np.int64(words) + literal_words


@_inner
def _decode_quad(bits, table, row, entries, at):
    """(bits left, length of the quad's codes, whether one is ESC); ``entries`` from ``at`` on."""
    length, escapes = _u(0), _u(0)
    for j in range(QUAD):
        entry = _entry(table, row, bits >> _56)
        entries[_u(at + j)] = entry
        bits <<= _length(entry)
        length += _length(entry)
        escapes |= _is_escape(entry)
    return bits, length, escapes


@_inner
def _decode_pooled(payload, payload32, slot, capacity, lanes_at, table, coded, entries, lanes):
    """Table entries of the first ``coded`` steps of a group (section 6); reads stay in the slot."""
    acc, position = lanes
    base = slot // WORD_BYTES
    last_word = base + capacity - 1
    literal = slot + capacity * WORD_BYTES - 1
    for lane in range(LANES):
        high = _u(payload32[_u(min(base + lane, last_word))])
        low = _u(payload32[_u(min(base + LANES + lane, last_word))])
        acc[_u(lane)] = high << _32 | low
        position[_u(lane)] = 0
    following = base + FIRST_WORDS
    for step in range(coded):
        row = np.int64(payload[_u(lanes_at + step // SPAN_STEPS)]) << 8
        escapes = _u(0)
        for lane in range(LANES):
            bits, used = acc[_u(lane)], position[_u(lane)]
            at = step * STEP_VALUES + lane * QUAD
            if step & 1 == 0:
                # Without a branch, which would be mispredicted at every third quad.
                asks = _asks(step, used, _u(0))
                used -= asks << _5
                bits |= (_u(payload32[_u(min(following, last_word))]) * asks) << used
                following += np.int64(asks)
            left, length, found = _decode_quad(bits, table, row, entries, at)
            if used + length > _64:
                # Only before an odd step, and rare: the quad does not fit in what the lane holds.
                used -= _32
                bits |= _u(payload32[_u(min(following, last_word))]) << used
                following += 1
                left, length, found = _decode_quad(bits, table, row, entries, at)
            acc[_u(lane)] = left
            position[_u(lane)] = used + length
            escapes |= found
        if escapes:
            for j in range(QUAD):
                for lane in range(LANES):
                    at = step * STEP_VALUES + lane * QUAD + j
                    if _is_escape(_u(entries[_u(at)])):
                        entries[_u(at)] = payload[_u(max(literal, slot))]
                        literal -= 1


@_inner
def _decode_fixed(payload32, slot, capacity, markers, table, row, entries):
    """Table entries of one group, each lane up to its marker (section 7); past the slot: zeros."""
    for lane in range(LANES):
        word = slot // WORD_BYTES + lane
        end = word + capacity * LANES
        bits = _u(payload32[_u(word)]) << _32
        word += LANES
        if word < end:
            bits |= _u(payload32[_u(word)])
        word += LANES
        used = _u(0)
        for step in range(markers[_u(lane)]):
            at = step * STEP_VALUES + lane * QUAD
            for j in range(QUAD):
                if used >= _32:
                    used -= _32
                    if word < end:
                        bits |= _u(payload32[_u(word)]) << used
                    word += LANES
                entry = _entry(table, row, bits >> _56)
                bits <<= _length(entry)
                used += _length(entry)
                if _is_escape(entry):
                    entry = bits >> _56
                    bits <<= _u(LITERAL_BITS)
                    used += _u(LITERAL_BITS)
                entries[_u(at + j)] = entry


@_inner
def _merge_run(values, geo, payload, payload16, entries, at, first, count):
    """Write the values ``first`` … from their exponents (``entries``) and the planes."""
    count = min(max(geo.num_values - first, 0), count)
    signs = geo.sign_fraction_offset
    if geo.dtype_code == BF16:
        for i in range(count):
            s = payload[_u(signs + first + i)]
            values[_u(first + i)] = (s & 0x80) << 8 | (entries[_u(at + i)] & 0xFF) << 7 | (s & 0x7F)
    elif geo.dtype_code == FP16:
        for i in range(count):
            s = payload[_u(signs + first + i)]
            e = entries[_u(at + i)] & 0x1F
            values[_u(first + i)] = (s & 0x80) << 8 | e << 10 | (s & 0x7F) << 3
        for unit in range((count + 7) // 8):
            low = geo.low_offset + 3 * (first // 8 + unit)
            bits = np.int64(payload[_u(low)])
            bits |= np.int64(payload[_u(low + 1)]) << 8
            bits |= np.int64(payload[_u(low + 2)]) << 16
            for i in range(8 * unit, min(8 * unit + 8, count)):
                values[_u(first + i)] |= bits & 7
                bits >>= 3
    else:
        for i in range(count):
            s = payload[_u(signs + first + i)]
            high = (s & 0x80) << 8 | (entries[_u(at + i)] & 0xFF) << 7 | (s & 0x7F)
            values[_u(2 * (first + i) + 1)] = high
        if geo.dtype_code == FP32:
            low = geo.low_offset // 2
            for i in range(count):
                values[_u(2 * (first + i))] = payload16[_u(low + first + i)]
        else:
            for i in range(count):
                values[_u(2 * (first + i))] = 0


@_kernel
def decode_groups(
    payload, payload16, payload32, spill, offsets, geo, table, shift, values, first, last
):
    """Values of the groups. ``offsets``, int64: where each group's data begins in ``spill``."""
    entries = np.empty(GROUP_BYTES, np.uint16)
    lanes = np.empty(LANES, np.uint64), np.empty(LANES, np.uint64)
    markers = np.empty(LANES, np.int64)
    for group in range(first, last):
        steps = _group_steps(geo, group)
        count = steps * STEP_VALUES
        slot, capacity = _slot(geo, group)
        lanes_at = geo.lane_offset + LANES * group
        meta = np.int64(payload32[_u(geo.meta_offset // WORD_BYTES + group)])
        state = meta >> STATE_SHIFT
        if state == STATE_CONSTANT:
            entries[:count] = meta & 0xFF
        elif state == STATE_WIDE:
            for i in range(count):
                entries[_u(i)] = spill[_u(offsets[_u(group)] + i)]
        else:
            spilled = state >= STATE_SPILLED
            if geo.pooled:
                marker = min(state & MARKER_MASK, steps) if spilled else steps
                if capacity == 0:
                    marker = 0
                markers[:] = marker
                _decode_pooled(
                    payload, payload32, slot, capacity, lanes_at, table, marker, entries, lanes
                )
            else:
                for lane in range(LANES):
                    markers[_u(lane)] = min(np.int64(payload[_u(lanes_at + lane)]), steps)
                _decode_fixed(payload32, slot, capacity, markers, table, shift << 8, entries)
            for lane in range(LANES):
                for step in range(markers[_u(lane)], steps):
                    at = step * STEP_VALUES + lane * QUAD
                    for i in range(at, at + QUAD):
                        entries[_u(i)] = spill[_u(offsets[_u(group)] + i)] if spilled else 0
        for i in range(2 * steps):
            start, run, at = _run(geo, group, i >> 1, i & 1)
            at += (i >> 1) * STEP_VALUES
            _merge_run(values, geo, payload, payload16, entries, at, start, run)
        if state == STATE_WIDE and geo.dtype_code == UPCAST_CODE:
            start = group * geo.steps * STEP_VALUES
            halves = offsets[_u(group)] + count
            for i in range(min(count, geo.num_values - start)):
                low = np.int64(spill[_u(halves + 2 * i)])
                values[_u(2 * (start + i))] = low | np.int64(spill[_u(halves + 2 * i + 1)]) << 8
