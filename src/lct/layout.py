"""Where each byte of a payload lies, and the checks that a payload must pass (docs/format.md).

Pure arithmetic on sizes: every size is known to the host before anything is encoded.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from .codebook import BANK_ROWS
from .dtypes import DTYPES_BY_CODE, UPCAST, DType
from .errors import CorruptPayloadError
from .presets import LANES, PRESETS_BY_CODE, QUAD, RAW, STEP_VALUES, Preset

FORMAT_VERSION = 2
HEADER = struct.Struct("<BBBBBBHQ")  # version, preset, dtype, book, shift, 0, capacity, num_values
HEADER_BYTES = HEADER.size
ALIGNMENT = 16
BUFFER_ALIGNMENT = 256  # of payloads that share a buffer: no two of them share a sector
WORD_BYTES = 4
CHUNK_BYTES = 8192
FIRST_WORDS = 2 * LANES  # a pooled group hands two words to every lane before its first step
MAX_POOLED_CAPACITY = 2048 + FIRST_WORDS
MAX_STREAM_CAPACITY = 64

# Group states: the top byte of a group's 32-bit meta word (docs/format.md, section 8).
STATE_CODED, STATE_CONSTANT, STATE_WIDE, STATE_SPILLED = 0x00, 0x01, 0x02, 0x80
STATE_SHIFT, REF_MASK, MARKER_MASK = 24, 0x00FF_FFFF, 0x7F


def align(size: int, unit: int = ALIGNMENT) -> int:
    """``size`` rounded up to a multiple of ``unit``."""
    return (size + unit - 1) // unit * unit


@dataclass(frozen=True)
class PayloadLayout:
    """Static description of a payload: with it and the bytes, everything can be decoded.

    ``capacity_words``: 32-bit words a group (pooled) or a stream (fixed); 0 for RAW.
    """

    preset: Preset
    dtype: DType
    num_values: int
    capacity_words: int

    def __post_init__(self) -> None:
        if self.num_values < 0:
            raise ValueError(f"num_values must be >= 0, got {self.num_values}")
        if self.preset.code == RAW.code:
            valid, rule = self.capacity_words == 0, "0"
        elif self.preset.pooled:
            valid = 0 <= self.capacity_words <= MAX_POOLED_CAPACITY and self.capacity_words % 4 == 0
            rule = f"a multiple of 4 words a group from 0 to {MAX_POOLED_CAPACITY}"
        else:
            valid = 1 <= self.capacity_words <= MAX_STREAM_CAPACITY
            rule = f"1 to {MAX_STREAM_CAPACITY} words a stream"
        if not valid:
            raise ValueError(
                f"capacity of a {self.preset.name} payload must be {rule}, "
                f"got {self.capacity_words}"
            )
        if self.dtype is UPCAST and not self.preset.pooled and self.preset.code != RAW.code:
            raise ValueError(f"upcast FP32 takes the pooled preset, got {self.preset.name}")

    @classmethod
    def choose(
        cls, preset: Preset, dtype: DType, num_values: int, capacity_words: int | None = None
    ) -> PayloadLayout:
        """The layout for ``num_values`` values: ``preset``'s, or RAW where that is not smaller."""
        return _choose(preset, dtype, num_values, capacity_words)

    def __reduce__(self) -> tuple[Any, ...]:
        # Rows of tables by their code, and without what backends keep in a layout.
        row = self.preset.code, self.dtype.code
        return _rebuild, (*row, self.num_values, self.capacity_words)

    @property
    def is_raw(self) -> bool:
        """True where the payload holds the dense bytes."""
        return self.preset.code == RAW.code

    @cached_property
    def num_groups(self) -> int:
        """Groups of 32 streams; the last block counts all of its groups."""
        if self.is_raw:
            return 0
        blocks = -(-self.num_values // self.preset.block_values)
        return blocks * self.preset.groups_per_block

    @cached_property
    def full_groups(self) -> int:
        """Groups before the partial last block."""
        if self.is_raw:
            return 0
        return self.num_values // self.preset.block_values * self.preset.groups_per_block

    @cached_property
    def tail_steps(self) -> int:
        """Steps of the groups of the partial last block (0: there is none)."""
        if self.is_raw:
            return 0
        values = self.num_values % self.preset.block_values
        return -(-values // (STEP_VALUES * self.preset.groups_per_block))

    @cached_property
    def tail_capacity_words(self) -> int:
        """Words a group (pooled) or a stream (fixed) of the partial last block."""
        capacity, steps = self.capacity_words, self.preset.steps
        if not self.preset.pooled:
            return min(capacity, -(-capacity * self.tail_steps // steps) + 1)
        extra = max(capacity - FIRST_WORDS, 0)
        return min(capacity, align(FIRST_WORDS + -(-extra * self.tail_steps // steps), 4))

    def group_steps(self, group: int) -> int:
        """Steps of ``group``."""
        return self.preset.steps if group < self.full_groups else self.tail_steps

    def group_capacity_words(self, group: int) -> int:
        """Words a group (pooled) or a stream (fixed) of ``group``."""
        return self.capacity_words if group < self.full_groups else self.tail_capacity_words

    def slot_words(self, group: int) -> int:
        """32-bit words of the slot of ``group``."""
        return self.group_capacity_words(group) * (1 if self.preset.pooled else LANES)

    def slot_offset(self, group: int) -> int:
        """Byte offset of the slot of ``group`` in the payload."""
        full = min(group, self.full_groups)
        words = full * self.slot_words(0) if full else 0
        if group > full:
            words += (group - full) * self.slot_words(group)
        return HEADER_BYTES + words * WORD_BYTES

    @cached_property
    def sign_fraction_offset(self) -> int:
        """Byte offset of the sign-fraction plane, one byte a value in the tensor's order."""
        return align(self.slot_offset(self.num_groups))

    @cached_property
    def low_offset(self) -> int:
        """Byte offset of the low plane (FP32, FP16)."""
        return align(self.sign_fraction_offset + self.num_values)

    @cached_property
    def lane_offset(self) -> int:
        """Byte offset of the lane plane: 32 bytes a group (shifts, or markers of fixed streams)."""
        return align(self.low_offset + self.dtype.low_plane_bytes(self.num_values))

    @cached_property
    def meta_offset(self) -> int:
        """Byte offset of the meta plane: one 32-bit word a group."""
        return self.lane_offset + LANES * self.num_groups

    @cached_property
    def size_bytes(self) -> int:
        """All bytes of the payload, without spilled chunks."""
        if self.is_raw:
            return HEADER_BYTES + self.num_values * self.dtype.itemsize
        return align(self.meta_offset + WORD_BYTES * self.num_groups)

    @property
    def chunks_per_group(self) -> int:
        """Arena chunks that a group can take at worst; a wide one also stores its low halves."""
        return 3 if self.dtype is UPCAST else 1

    @cached_property
    def worst_chunks(self) -> int:
        """Arena chunks that an encode takes where nothing fits."""
        return self.num_groups * self.chunks_per_group

    def group_values_index(self, group: int) -> np.ndarray:
        """Index of the value at (step, lane, j) of ``group``: (steps, 32, 4); may pass the end."""
        steps = np.arange(self.group_steps(group))[:, None, None]
        lanes = np.arange(LANES)[None, :, None]
        j = np.arange(QUAD)[None, None, :]
        per_block = self.preset.groups_per_block
        block, part = divmod(group, per_block)
        quads = LANES * per_block
        # Diagonal dealing: each row of quads starts 4 quads (32 bytes) further, so that a stream is
        # no column of the matrix and loads stay aligned to sectors. One group a block: no rotation.
        rotation = 4 * steps if per_block > 1 else 0 * steps
        column = (LANES * part + lanes - rotation) % quads
        return block * self.preset.block_values + steps * quads * QUAD + column * QUAD + j

    def pack_header(self, book: int, shift: int) -> bytes:
        """The 16 header bytes."""
        return HEADER.pack(
            FORMAT_VERSION,
            self.preset.code,
            self.dtype.code,
            book,
            shift,
            0,
            self.capacity_words,
            self.num_values,
        )


def _rebuild(preset: int, dtype: int, num_values: int, capacity_words: int) -> PayloadLayout:
    return PayloadLayout(PRESETS_BY_CODE[preset], DTYPES_BY_CODE[dtype], num_values, capacity_words)


@lru_cache(maxsize=4096)
def _choose(
    preset: Preset, dtype: DType, num_values: int, capacity_words: int | None
) -> PayloadLayout:
    # Cached: training asks for the same few layouts at every step; one costs tens of microseconds.
    capacity = preset.capacity_words if capacity_words is None else capacity_words
    if dtype is UPCAST and preset.pooled:
        capacity = max(capacity, 4)  # a wide group keeps two references in its slot
    layout = PayloadLayout(preset, dtype, num_values, capacity)
    raw = PayloadLayout(RAW, dtype, num_values, 0)
    return layout if layout.size_bytes < raw.size_bytes else raw


def parse_header(data: bytes) -> tuple[PayloadLayout, int, int]:
    """(layout, book, shift) from the first bytes of a payload. CorruptPayloadError otherwise."""
    if len(data) < HEADER_BYTES:
        raise CorruptPayloadError(f"a payload has at least {HEADER_BYTES} bytes, got {len(data)}")
    version, preset, dtype, book, shift, zero, capacity, num_values = HEADER.unpack_from(data)
    if version != FORMAT_VERSION:
        raise CorruptPayloadError(f"payload version must be {FORMAT_VERSION}, got {version}")
    if preset not in PRESETS_BY_CODE or dtype not in DTYPES_BY_CODE or zero != 0:
        raise CorruptPayloadError(f"unknown preset {preset}, dtype {dtype} or reserved byte {zero}")
    if book >= len(BANK_ROWS):
        raise CorruptPayloadError(f"book must be below {len(BANK_ROWS)}, got {book}")
    try:
        layout = PayloadLayout(PRESETS_BY_CODE[preset], DTYPES_BY_CODE[dtype], num_values, capacity)
    except ValueError as error:
        raise CorruptPayloadError(str(error)) from None
    return layout, book, shift


def buffer_offsets(layouts: Sequence[PayloadLayout]) -> list[int] | None:
    """Where payloads begin that share a buffer, and its size; None unless one kernel codes them.

    That is, they are several, pooled, and of one dtype.
    """
    first = layouts[0]
    alike = all(o.preset is first.preset and o.dtype is first.dtype for o in layouts)
    if len(layouts) == 1 or not first.preset.pooled or not alike:
        return None
    sizes = [align(layout.size_bytes, BUFFER_ALIGNMENT) for layout in layouts]
    return list(itertools.accumulate(sizes, initial=0))


def best_capacity(needs: np.ndarray, headroom_words: int = 0) -> int:
    """Pooled capacity, words, of least storage for groups that need ``needs`` words.

    ``needs``: int (num_groups,). A group that does not fit costs a chunk of the arena beside its
    slot. ``headroom_words`` are added for values that are going to change.
    """
    sizes, counts = np.unique((np.asarray(needs, np.int64) + 3) // 4 * 4, return_counts=True)
    if not len(sizes):
        return 0
    above = counts.sum() - np.cumsum(counts)
    cost = sizes * WORD_BYTES * counts.sum() + above * CHUNK_BYTES
    best = int(sizes[np.argmin(cost)])
    return min(align(best + headroom_words, 4), MAX_POOLED_CAPACITY) if best else 0


def spill_bytes_of(state: int, steps: int) -> int:
    """Canonical spill bytes of a group in ``state`` with ``steps`` steps."""
    if state == STATE_WIDE:
        return steps * STEP_VALUES * 3
    return steps * STEP_VALUES if state & STATE_SPILLED else 0


def validate_payload(layout: PayloadLayout, payload: np.ndarray, spill_bytes: int) -> None:
    """Raise CorruptPayloadError unless the canonical ``payload`` (uint8) is safe to decode.

    Checks sizes, header, every group's state, marker and reference; the bits of streams need no
    check: decoders clamp their reads, so damaged streams give wrong values, never wild reads.
    """
    if payload.size != layout.size_bytes:
        raise CorruptPayloadError(
            f"payload must have {layout.size_bytes} bytes, got {payload.size}"
        )
    found, _, _ = parse_header(payload[:HEADER_BYTES].tobytes())
    if found != layout:
        raise CorruptPayloadError(f"payload header says {found}, expected {layout}")
    expected_ref = used = 0
    # What is coded takes the words that every lane owns from the start.
    codes = not layout.preset.pooled or layout.capacity_words >= FIRST_WORDS
    if layout.num_groups:
        meta = payload[layout.meta_offset :][: WORD_BYTES * layout.num_groups].view("<u4")
        lanes = payload[layout.lane_offset : layout.meta_offset].reshape(-1, LANES)
        if not codes and not meta.all():
            raise CorruptPayloadError(
                f"a coded group takes a capacity of at least {FIRST_WORDS} words, "
                f"got {layout.capacity_words}"
            )
        for group in np.flatnonzero(meta).tolist():
            word = int(meta[group])
            state, ref, steps = word >> STATE_SHIFT, word & REF_MASK, layout.group_steps(group)
            marker_limit = steps if layout.preset.pooled and codes else 1
            if state == STATE_CONSTANT:
                valid = ref < 256
            elif state == STATE_WIDE:
                valid = (
                    layout.dtype is UPCAST and layout.capacity_words >= 2 and ref == expected_ref
                )
            elif state & STATE_SPILLED:
                valid = (state & MARKER_MASK) < marker_limit and ref == expected_ref
            else:
                valid = False
            if not valid:
                raise CorruptPayloadError(f"group {group} has an invalid meta word {word:#010x}")
            expected_ref += 3 if state == STATE_WIDE else int(bool(state & STATE_SPILLED))
            used += spill_bytes_of(state, steps)
        if not layout.preset.pooled:
            limits = np.array([layout.preset.steps] * layout.num_groups)
            limits[layout.full_groups :] = layout.tail_steps
            if (lanes > limits[:, None]).any():
                raise CorruptPayloadError("a stream's marker lies past its last quad")
    if used != spill_bytes:
        raise CorruptPayloadError(f"spilled data must have {used} bytes, got {spill_bytes}")
