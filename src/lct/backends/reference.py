"""The slow, obvious reading of docs/format.md: plain Python, one group at a time.

Everything else must produce these bytes. Arrays: ``words`` uint16 (num_values,), ``low`` uint8 (the
low plane's bytes), ``payload`` uint8 (layout.size_bytes,), ``spill`` uint8 (canonical order).
"""

from __future__ import annotations

import numpy as np

from ..codebook import CENTER, ESC, LITERAL_BITS, MAX_LENGTH, ZERO, Codebook, bank
from ..dtypes import UPCAST, DType
from ..layout import (
    FIRST_WORDS,
    HEADER_BYTES,
    MARKER_MASK,
    REF_MASK,
    STATE_CONSTANT,
    STATE_SHIFT,
    STATE_SPILLED,
    STATE_WIDE,
    WORD_BYTES,
    PayloadLayout,
    parse_header,
    spill_bytes_of,
)
from ..presets import LANES, QUAD, STEP_VALUES

WORD_BITS = 32
WINDOW_BITS = 2 * WORD_BITS  # what a lane of a pooled group holds: its last two words
SPAN_STEPS = 2  # a shift serves 256 values: two steps
SPAN_VALUES = SPAN_STEPS * STEP_VALUES
SAMPLED_SPANS = 32
SAMPLED_VALUES = 4096


def split(values: np.ndarray, dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    """(words, low plane) of the bit patterns ``values`` (uint16 or uint32, 1-D)."""
    if dtype.itemsize == 4:
        low = np.empty(0, np.uint8)
        if dtype.low_bits:
            padded = np.zeros((len(values) + 7) // 8 * 8, np.uint16)
            padded[: len(values)] = values & 0xFFFF
            low = padded.view(np.uint8)
        return (values >> 16).astype(np.uint16), low
    if dtype.low_bits == 0:
        return values.astype(np.uint16), np.empty(0, np.uint8)
    # FP16: sign, 5 exponent bits as the exponent byte, the top 7 of 10 fraction bits; 3 left over,
    # 8 values to a little-endian unit of 24 bits.
    words = (values & 0x8000) | ((values >> 10 & 0x1F) << 7) | (values >> 3 & 0x7F)
    padded = np.zeros((len(values) + 7) // 8 * 8, np.uint32)
    padded[: len(values)] = values & 7
    units = (padded.reshape(-1, 8) << (3 * np.arange(8, dtype=np.uint32))).sum(1, dtype=np.uint32)
    return words.astype(np.uint16), units.view(np.uint8).reshape(-1, 4)[:, :3].reshape(-1).copy()


def merge(words: np.ndarray, low: np.ndarray, dtype: DType) -> np.ndarray:
    """The bit patterns that ``split`` took apart; UPCAST: ``low`` holds uint16 halves or none."""
    n = len(words)
    if dtype.itemsize == 4:
        high = words.astype(np.uint32) << 16
        return high | low.view(np.uint16)[:n] if low.size else high
    if dtype.low_bits == 0:
        return words
    units = np.zeros((len(low) // 3, 4), np.uint8)
    units[:, :3] = low.reshape(-1, 3)
    bits = units.view(np.uint32) >> (3 * np.arange(8, dtype=np.uint32)) & 7
    e, f = words >> 7 & 0x1F, words & 0x7F
    low_bits = bits.reshape(-1)[:n].astype(np.uint16)
    return ((words & 0x8000) | e << 10 | f << 3 | low_bits).astype(np.uint16)


def exponents_of(words: np.ndarray) -> np.ndarray:
    """Exponent bytes, uint8."""
    return (words >> 7 & 0xFF).astype(np.uint8)


def sign_fractions_of(words: np.ndarray) -> np.ndarray:
    """Sign-fraction bytes, uint8: sign in bit 7, fraction below."""
    return (words >> 8 & 0x80 | words & 0x7F).astype(np.uint8)


def mean_exponent(exponents: np.ndarray) -> int:
    """Mean of the non-zero exponents, halves up; 0 where all are zero."""
    count = int(np.count_nonzero(exponents))
    return (int(exponents.astype(np.int64).sum()) + count // 2) // count if count else 0


def symbols_of(exponents: np.ndarray, shift: int) -> np.ndarray:
    """Symbols 0..255 relative to ``shift``, or ZERO."""
    relative = (exponents.astype(np.int64) - shift + CENTER) % 256
    return np.where(exponents == 0, ZERO, relative)


def sample_jitter(k: int) -> int:
    """Hash that moves sample ``k`` in its stretch: a regular stride aliases with shapes of 2^n."""
    return ((k + 1) * 2654435761 % 2**32) >> 8


def sample_starts(total: int, samples: int) -> list[int]:
    """Positions of ``samples`` jittered samples of ``total`` items; all where there are fewer."""
    if total <= samples:
        return list(range(total))
    starts = []
    for k in range(samples):
        first, end = k * total // samples, (k + 1) * total // samples
        starts.append(first + sample_jitter(k) % (end - first))
    return starts


def select(
    words: np.ndarray, layout: PayloadLayout, candidates: tuple[int, ...]
) -> tuple[int, int]:
    """(book, shift) of least coded length over a sample; ties: the earlier candidate, lower shift.

    Pooled: 32 spans of 256 values, each with its own shift; the tensor's shift is 0. Fixed: 4096
    values. Values past the end are not counted.
    """
    exponents = exponents_of(words)
    books = bank()
    if layout.preset.pooled:
        counts = np.zeros(ZERO + 1, np.int64)
        for span in sample_starts(-(-layout.num_values // SPAN_VALUES), SAMPLED_SPANS):
            part = exponents[span * SPAN_VALUES : (span + 1) * SPAN_VALUES]
            counts += np.bincount(symbols_of(part, mean_exponent(part)), minlength=ZERO + 1)
        costs = [int(counts @ books[b].cost_bits) for b in candidates]
        return candidates[int(np.argmin(costs))], 0
    sample = exponents[sample_starts(layout.num_values, SAMPLED_VALUES)]
    counts = np.bincount(sample, minlength=256)
    best: tuple[int, int, int] | None = None
    for b in candidates:
        cost_bits = books[b].cost_bits
        for shift in range(256):
            cost = int(counts @ cost_bits[symbols_of(np.arange(256, dtype=np.uint8), shift)])
            if best is None or cost < best[0]:
                best = cost, b, shift
    assert best is not None
    return best[1], best[2]


def _bits(value: int, length: int) -> str:
    return format(value, f"0{length}b") if length else ""


class _Pooled:
    """Streams of one pooled group: 32 lanes hand out one budget's words in the decoder's order."""

    def __init__(self, capacity_words: int):
        self.capacity = capacity_words
        self.slots = [[lane, LANES + lane] for lane in range(LANES)]
        self.handed = FIRST_WORDS
        self.position = [0] * LANES
        self.literals = bytearray()

    def requests(self, step: int, quad_bits: list[int]) -> list[int]:
        """Lanes that need a new word before ``step``, whose quads take ``quad_bits`` each.

        Only an odd step depends on them: before it, a lane asks if its quad does not fit in what
        is left of its two words. Before an even step it asks as soon as one word is used up.
        """
        if step % 2 == 0:
            return [lane for lane in range(LANES) if self.position[lane] >= WORD_BITS]
        ends = [self.position[lane] + quad_bits[lane] for lane in range(LANES)]
        return [lane for lane in range(LANES) if ends[lane] > WINDOW_BITS]

    def hand_out(self, lanes: list[int]) -> None:
        for lane in lanes:
            self.slots[lane].append(self.handed)
            self.handed += 1
            self.position[lane] -= WORD_BITS


def _encode_pooled(
    exponents: np.ndarray, book: Codebook, capacity_words: int
) -> tuple[np.ndarray, np.ndarray, int, int]:
    """(slot words, shifts, steps coded, words needed) of one group; exponents (steps, 32, 4)."""
    steps = len(exponents)
    shifts = np.zeros(LANES, np.uint8)
    state = _Pooled(capacity_words)
    streams = [""] * LANES
    coded = 0
    for step in range(steps):
        span = step // SPAN_STEPS
        part = exponents[span * SPAN_STEPS : (span + 1) * SPAN_STEPS]
        shift = mean_exponent(part)
        symbols = symbols_of(exponents[step], shift)
        lengths = book.lengths[symbols]
        escapes = exponents[step].T[lengths.T == 0]  # by j, then lane
        bits = np.where(lengths > 0, lengths, book.lengths[ESC]).sum(1).tolist()
        requests = state.requests(step, bits)
        words = state.handed + len(requests)
        if words * WORD_BYTES + len(state.literals) + len(escapes) > capacity_words * WORD_BYTES:
            break
        state.hand_out(requests)
        state.literals += bytes(int(e) for e in escapes)
        for lane in range(LANES):
            for j in range(QUAD):
                symbol = symbols[lane, j] if lengths[lane, j] else ESC
                code = _bits(int(book.codes[symbol]), int(book.lengths[symbol]))
                streams[lane] += code
            state.position[lane] += bits[lane]
        shifts[span] = shift
        coded = step + 1
    slot = np.zeros(capacity_words, np.uint32)
    if coded:
        for lane, stream in enumerate(streams):
            padded = stream.ljust(-(-len(stream) // WORD_BITS) * WORD_BITS, "0")
            for i in range(len(padded) // WORD_BITS):
                slot[state.slots[lane][i]] = int(padded[i * WORD_BITS : (i + 1) * WORD_BITS], 2)
        end = capacity_words * WORD_BYTES
        for k, literal in enumerate(state.literals):
            slot.view(np.uint8)[end - 1 - k] = literal
    return slot, shifts, coded, state.handed + -(-len(state.literals) // WORD_BYTES)


def _encode_fixed(
    exponents: np.ndarray, book: Codebook, shift: int, words: int
) -> tuple[np.ndarray, np.ndarray]:
    """(slot words, markers) of one group of 32 streams that own ``words`` words each."""
    slot = np.zeros((words, LANES), np.uint32)
    markers = np.zeros(LANES, np.uint8)
    symbols = symbols_of(exponents, shift)
    for lane in range(LANES):
        stream = ""
        for step in range(len(exponents)):
            quad = ""
            for j in range(QUAD):
                symbol = int(symbols[step, lane, j])
                length = int(book.lengths[symbol])
                if length:
                    quad += _bits(int(book.codes[symbol]), length)
                else:
                    quad += _bits(int(book.codes[ESC]), int(book.lengths[ESC]))
                    quad += _bits(int(exponents[step, lane, j]), LITERAL_BITS)
            if len(stream) + len(quad) > words * WORD_BITS:
                break
            stream += quad
            markers[lane] = step + 1
        stream = stream.ljust(words * WORD_BITS, "0")
        for i in range(words):
            slot[i, lane] = int(stream[i * WORD_BITS : (i + 1) * WORD_BITS], 2)
    return slot.reshape(-1), markers


def encode(
    values: np.ndarray, layout: PayloadLayout, book: int, shift: int
) -> tuple[np.ndarray, np.ndarray]:
    """(payload, spill) of the bit patterns ``values`` (uint16 or uint32, 1-D)."""
    payload = np.zeros(layout.size_bytes, np.uint8)
    payload[:HEADER_BYTES] = np.frombuffer(layout.pack_header(book, shift), np.uint8)
    if layout.is_raw:
        payload[HEADER_BYTES:] = values.view(np.uint8)
        return payload, np.empty(0, np.uint8)
    words, low = split(values, layout.dtype)
    payload[layout.sign_fraction_offset :][: len(words)] = sign_fractions_of(words)
    payload[layout.low_offset :][: len(low)] = low
    exponents = exponents_of(words)
    low_halves = (values & 0xFFFF).astype(np.uint16) if layout.dtype is UPCAST else None
    meta = np.zeros(layout.num_groups, np.uint32)
    spill: list[np.ndarray] = []
    ref = 0
    for group in range(layout.num_groups):
        index = layout.group_values_index(group)
        group_exponents = _take(exponents, index)
        halves = _take(low_halves, index) if low_halves is not None else None
        if halves is not None and halves.any():
            meta[group] = STATE_WIDE << STATE_SHIFT | ref
            if layout.capacity_words == 0:
                raise ValueError("a wide group takes a capacity of at least 4 words, got 0")
            slot_words = payload[layout.slot_offset(group) :][: 2 * WORD_BYTES].view(np.uint32)
            slot_words[:] = ref + 1, ref + 2
            ref += 3
            spill += [group_exponents.reshape(-1), halves.reshape(-1).view(np.uint8)]
            continue
        if (group_exponents == group_exponents.flat[0]).all():
            meta[group] = STATE_CONSTANT << STATE_SHIFT | int(group_exponents.flat[0])
            continue
        capacity = layout.group_capacity_words(group)
        if layout.preset.pooled:
            slot, lane_bytes, coded, _ = _encode_pooled(group_exponents, bank()[book], capacity)
            spilled = coded < len(index)
            marker = coded
            left = np.arange(len(index))[:, None] >= coded
        else:
            slot, lane_bytes = _encode_fixed(group_exponents, bank()[book], shift, capacity)
            spilled = bool((lane_bytes < len(index)).any())
            marker = 0
            left = np.arange(len(index))[:, None] >= lane_bytes[None, :]
        payload[layout.slot_offset(group) :][: slot.nbytes] = slot.view(np.uint8)
        payload[layout.lane_offset + LANES * group :][:LANES] = lane_bytes
        if spilled:
            meta[group] = (STATE_SPILLED | marker) << STATE_SHIFT | ref
            ref += 1
            chunk = np.where(left[:, :, None], group_exponents, 0)
            spill.append(chunk.astype(np.uint8).reshape(-1))
    payload[layout.meta_offset :][: meta.nbytes] = meta.view(np.uint8)
    return payload, np.concatenate(spill) if spill else np.empty(0, np.uint8)


def _take(plane: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Values at ``index``; positions past the end are zero."""
    found = plane[np.minimum(index, len(plane) - 1)]
    return np.where(index < len(plane), found, 0).astype(plane.dtype)


def group_needs(values: np.ndarray, layout: PayloadLayout, book: int) -> np.ndarray:
    """Words that each pooled group needs to spill nothing, int32 (num_groups,); constant: 0."""
    exponents = exponents_of(split(values, layout.dtype)[0])
    needs = np.zeros(layout.num_groups, np.int32)
    for group in range(layout.num_groups):
        part = _take(exponents, layout.group_values_index(group))
        if (part != part.flat[0]).any():
            needs[group] = _encode_pooled(part, bank()[book], 1 << 16)[3]
    return needs


def _decoding_table(book: Codebook) -> list[int]:
    """Symbol for each 8-bit window."""
    table = [ESC] * (1 << MAX_LENGTH)
    for symbol, length in enumerate(book.lengths):
        if length:
            windows = 1 << (MAX_LENGTH - int(length))
            first = int(book.codes[symbol]) * windows
            table[first : first + windows] = [symbol] * windows
    return table


def _window(stream: str, position: int) -> int:
    """The 8 bits at ``position``, the longest code or a literal; zeros past the end."""
    return int(stream[position : position + MAX_LENGTH].ljust(MAX_LENGTH, "0"), 2)


def _quad(window: str, position: int, table: list[int], book: Codebook) -> tuple[list[int], int]:
    """(symbols of the quad at ``position`` of a lane's window, bits of its codes)."""
    symbols, first = [], position
    for _ in range(QUAD):
        symbols.append(table[_window(window, position)])
        position += int(book.lengths[symbols[-1]])
    return symbols, position - first


def _exponent(symbol: int, shift: int) -> int:
    return 0 if symbol == ZERO else (symbol + shift - CENTER) % 256


def _decode_pooled(
    slot: np.ndarray, shifts: np.ndarray, book: Codebook, coded: int, steps: int
) -> np.ndarray:
    out = np.zeros((steps, LANES, QUAD), np.uint8)
    table = _decoding_table(book)
    capacity = len(slot)
    words = [int(w) for w in slot]
    literals = slot.view(np.uint8)
    state = _Pooled(capacity)
    if not words:
        return out
    clamped = [_bits(words[min(i, capacity - 1)], WORD_BITS) for i in range(FIRST_WORDS)]
    windows = [clamped[lane] + clamped[LANES + lane] for lane in range(LANES)]
    taken = 0
    for step in range(coded):
        # Codes are prefix-free: the zeros past the window change no code that lies within it, and a
        # quad that does not fit is seen not to fit. It is decoded again, with the word it asks for.
        quads = [_quad(windows[lane], state.position[lane], table, book) for lane in range(LANES)]
        requests = state.requests(step, [bits for _, bits in quads])
        for i, lane in enumerate(requests):
            word = words[min(state.handed + i, capacity - 1)]
            windows[lane] = windows[lane][WORD_BITS:] + _bits(word, WORD_BITS)
        state.hand_out(requests)
        for lane in requests:
            quads[lane] = _quad(windows[lane], state.position[lane], table, book)
        symbols = [quad_symbols for quad_symbols, _ in quads]
        for lane, (_, bits) in enumerate(quads):
            state.position[lane] += bits
        for j in range(QUAD):
            for lane in range(LANES):
                if symbols[lane][j] == ESC:
                    out[step, lane, j] = literals[max(capacity * WORD_BYTES - 1 - taken, 0)]
                    taken += 1
                else:
                    shift = int(shifts[step // SPAN_STEPS])
                    out[step, lane, j] = _exponent(symbols[lane][j], shift)
    return out


def _decode_fixed(
    slot: np.ndarray, markers: np.ndarray, book: Codebook, shift: int, steps: int
) -> np.ndarray:
    out = np.zeros((steps, LANES, QUAD), np.uint8)
    table = _decoding_table(book)
    for lane in range(LANES):
        stream = "".join(_bits(int(w), WORD_BITS) for w in slot.reshape(-1, LANES)[:, lane])
        position = 0
        for step in range(int(markers[lane])):
            for j in range(QUAD):
                symbol = table[_window(stream, position)]
                position += int(book.lengths[symbol])
                if symbol == ESC:
                    out[step, lane, j] = _window(stream, position)
                    position += LITERAL_BITS
                else:
                    out[step, lane, j] = _exponent(symbol, shift)
    return out


def decode(payload: np.ndarray, spill: np.ndarray) -> np.ndarray:
    """The bit patterns (uint16 or uint32, 1-D) of a canonical payload and its spilled data."""
    layout, book, shift = parse_header(payload[:HEADER_BYTES].tobytes())
    pattern = np.uint32 if layout.dtype.itemsize == 4 else np.uint16
    if layout.is_raw:
        return payload[HEADER_BYTES:].view(pattern).copy()
    n = layout.num_values
    exponents = np.zeros(layout.num_groups * layout.preset.group_values, np.uint8)
    halves = np.zeros(len(exponents) if layout.dtype is UPCAST else 0, np.uint16)
    meta = payload[layout.meta_offset :][: WORD_BYTES * layout.num_groups].view(np.uint32)
    taken = 0
    for group in range(layout.num_groups):
        index = layout.group_values_index(group)
        steps = len(index)
        word = int(meta[group])
        state, ref = word >> STATE_SHIFT, word & REF_MASK
        chunk = spill[taken : taken + spill_bytes_of(state, steps)]
        taken += len(chunk)
        if state == STATE_CONSTANT:
            exponents[index] = ref
            continue
        if state == STATE_WIDE:
            exponents[index] = chunk[: steps * STEP_VALUES].reshape(index.shape)
            halves[index] = chunk[steps * STEP_VALUES :].view(np.uint16).reshape(index.shape)
            continue
        slot_bytes = layout.slot_words(group) * WORD_BYTES
        slot = payload[layout.slot_offset(group) :][:slot_bytes].view(np.uint32)
        lane_bytes = payload[layout.lane_offset + LANES * group :][:LANES]
        if layout.preset.pooled:
            coded = state & MARKER_MASK if state & STATE_SPILLED else steps
            group_exponents = _decode_pooled(slot, lane_bytes, bank()[book], coded, steps)
        else:
            group_exponents = _decode_fixed(slot, lane_bytes, bank()[book], shift, steps)
        if state & STATE_SPILLED:
            group_exponents += chunk.reshape(index.shape)
        exponents[index] = group_exponents
    sign_fractions = payload[layout.sign_fraction_offset :][:n].astype(np.uint16)
    words = (sign_fractions & 0x80) << 8 | sign_fractions & 0x7F
    words |= exponents[:n].astype(np.uint16) << 7
    low = payload[layout.low_offset :][: layout.dtype.low_plane_bytes(n)]
    if layout.dtype is UPCAST and halves.any():
        low = halves[:n].view(np.uint8)
    return merge(words, low.copy(), layout.dtype)
