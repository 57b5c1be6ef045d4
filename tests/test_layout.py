"""Checks of payloads before they are decoded (docs/format.md, section 10)."""

from __future__ import annotations

import numpy as np
import pytest

import inputs
from lct.backends import cpu
from lct.dtypes import DTYPES
from lct.errors import CorruptPayloadError
from lct.layout import (
    FIRST_WORDS,
    FORMAT_VERSION,
    HEADER_BYTES,
    REF_MASK,
    STATE_CODED,
    STATE_CONSTANT,
    STATE_SHIFT,
    STATE_SPILLED,
    STATE_WIDE,
    PayloadLayout,
    parse_header,
    validate_payload,
)
from lct.presets import PRESETS

BF16 = DTYPES["bfloat16"]
POOLED = PRESETS["pooled"]


def damaged(capacity: int, state: int, ref: int | None = None) -> None:
    """Validate a payload whose second group of two (and a tail) has another ``state``."""
    values = inputs.gaussian(BF16, 2 * POOLED.group_values + 100)
    layout = PayloadLayout(POOLED, BF16, len(values), capacity)
    payload, spill = cpu.encode(values, layout, 0, 0)
    validate_payload(layout, payload, spill.size)
    meta = payload[layout.meta_offset :][: 4 * layout.num_groups].view(np.uint32)
    ref = int(meta[1]) & REF_MASK if ref is None else ref
    meta[1] = state << STATE_SHIFT | ref
    validate_payload(layout, payload, spill.size)


@pytest.mark.parametrize("capacity", [0, 4, FIRST_WORDS - 4])
def test_nothing_is_coded_where_lanes_have_no_words(capacity: int) -> None:
    damaged(capacity, STATE_SPILLED)  # as it was
    with pytest.raises(CorruptPayloadError, match="at least 64 words, got"):
        damaged(capacity, STATE_CODED, 0)
    for marker in (1, 63):
        with pytest.raises(CorruptPayloadError, match="group 1 has an invalid meta word"):
            damaged(capacity, STATE_SPILLED | marker)


@pytest.mark.parametrize("capacity", [FIRST_WORDS, 200])
def test_markers_are_valid_where_lanes_have_words(capacity: int) -> None:
    for marker in (0, 1, 63):
        damaged(capacity, STATE_SPILLED | marker)
    with pytest.raises(CorruptPayloadError, match="group 1 has an invalid meta word"):
        damaged(capacity, STATE_SPILLED | 64)


@pytest.mark.parametrize(
    ("state", "ref"),
    [
        (STATE_CODED, 1),
        (STATE_CONSTANT, 256),
        (STATE_WIDE, 0),  # BF16 has no wide groups
        (0x03, 0),
        (STATE_SPILLED, 0),
        (STATE_SPILLED, 2),
    ],
)
def test_states_and_references(state: int, ref: int) -> None:
    with pytest.raises(CorruptPayloadError, match="group 1 has an invalid meta word"):
        damaged(200, state, ref)


def test_payloads_of_other_versions_are_refused() -> None:
    values = inputs.gaussian(BF16, 1000)
    layout = PayloadLayout(POOLED, BF16, len(values), 748)
    payload, _ = cpu.encode(values, layout, 0, 0)
    for version in (0, FORMAT_VERSION - 1, FORMAT_VERSION + 1):
        payload[0] = version
        with pytest.raises(CorruptPayloadError, match=f"version must be 2, got {version}"):
            parse_header(payload[:HEADER_BYTES].tobytes())


def test_chunks_must_be_there() -> None:
    with pytest.raises(CorruptPayloadError, match="spilled data must have"):
        damaged(200, STATE_CODED, 0)
