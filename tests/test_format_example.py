"""docs/format.md, section 11: the worked example, replayed from the document cell by cell.

After a deliberate change of the bank ``python tests/test_format_example.py`` writes it anew.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from compare import assert_same_bits
from lct.backends import cpu, reference
from lct.codebook import CENTER, ESC, ZERO, bank
from lct.dtypes import DTYPES
from lct.layout import PayloadLayout, parse_header, validate_payload
from lct.presets import PRESETS, QUAD

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "format.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
SECTION = TEXT[TEXT.index("## 11. Worked example") :]
VALUES = np.array([0x3F80, 0xC000, 0x3F00, 0, 0x4040, 0x3F40, 0xBFC0, 0x4B80, 0x3FA0], np.uint16)
LAYOUT = PayloadLayout(PRESETS["pooled"], DTYPES["bfloat16"], len(VALUES), 68)
BOOK, SHIFT = 8, 130
NOTHING = np.empty(0, np.uint8)
SYMBOL_NAMES = {ZERO: "ZERO", ESC: "ESC"}
DUMP_NOTES = {
    0x000: "header: version 2, POOLED, BF16, book 8, shift 0, C = 68, 9 values",
    0x010: "slot: words 0 to 3, those of lanes 0 to 3",
    0x020: "slot: words 4 to 63, and what no lane has asked for",
    0x110: "slot: its end, where the literals begin",
    0x120: "sign-fraction plane",
    0x130: "lane plane: shift 130 of span 0; the other spans have no coded step",
    0x150: "meta plane: group 0 is coded, nothing spilled",
}


def code_of(exponent: int) -> tuple[int, str]:
    """(symbol, code) of an exponent."""
    symbol = ZERO if exponent == 0 else (exponent - SHIFT + CENTER) % 256
    book = bank()[BOOK]
    if book.lengths[symbol] == 0:
        symbol = ESC
    return symbol, format(int(book.codes[symbol]), f"0{book.lengths[symbol]}b")


def table_of_values() -> str:
    lines = ["| position | value | BF16 | sign-fraction | exponent | symbol | code | lane |"]
    lines.append("| --- " * 8 + "|")
    for i, bits in enumerate(VALUES):
        value = float((np.array([bits], np.uint32) << 16).view(np.float32)[0])
        sign_fraction = (bits >> 15) << 7 | bits & 0x7F
        exponent = int(bits >> 7 & 0xFF)
        symbol, code = code_of(exponent)
        name = SYMBOL_NAMES.get(symbol, str(symbol))
        cells = i, value, f"{bits:04x}", f"{sign_fraction:02x}", exponent, name, code, i // QUAD
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def table_of_lanes() -> str:
    codes = [code_of(int(bits >> 7 & 0xFF))[1] for bits in VALUES]
    codes += [code_of(0)[1]] * (4 * QUAD - len(codes))
    lines = ["| lane | stream | word |", "| --- | --- | --- |"]
    for lane in range(4):
        quad = codes[QUAD * lane : QUAD * lane + QUAD]
        word = int("".join(quad).ljust(32, "0"), 2)
        name = "3 to 31" if lane == 3 else str(lane)
        lines.append(f"| {name} | {' '.join(quad)} | {word:08x} |")
    return "\n".join(lines)


def dump(payload: np.ndarray) -> str:
    """Hex dump, 16 bytes a line; ``*`` stands for repetitions of the line before it."""
    lines, previous = [], b""
    for offset in range(0, len(payload), 16):
        row = payload[offset : offset + 16].tobytes()
        note = DUMP_NOTES.get(offset, "")
        if row != previous or note:
            lines.append(f"{offset:04x}  {row.hex(' ')}   {note}".rstrip())
        elif lines[-1] != "*":
            lines.append("*")
        previous = row
    return "```text\n" + "\n".join(lines) + "\n```"


def dumped_bytes() -> np.ndarray:
    """The payload of the document's hex dump."""
    (block,) = re.findall(r"```text\n(.*?)```", SECTION, flags=re.DOTALL)
    data = bytearray()
    for line in block.splitlines():
        if line == "*":
            continue
        offset, row = int(line[:4], 16), bytes.fromhex(line[6:53])
        data += data[-16:] * ((offset - len(data)) // 16) + row
    return np.frombuffer(bytes(data), np.uint8)


def test_the_tables_follow_from_the_values() -> None:
    assert reference.mean_exponent(reference.exponents_of(VALUES)) == SHIFT
    assert table_of_values() in SECTION
    assert table_of_lanes() in SECTION
    assert f"= {LAYOUT.group_capacity_words(0)} words" in SECTION


@pytest.mark.parametrize("backend", [reference, cpu], ids=["reference", "cpu"])
def test_encoders_give_the_dump_and_decoders_the_values(backend) -> None:
    golden = dumped_bytes()
    payload, spill = backend.encode(VALUES, LAYOUT, BOOK, 0)
    assert_same_bits(payload, golden, "payload")
    assert spill.size == 0
    assert parse_header(golden[:16].tobytes()) == (LAYOUT, BOOK, 0)
    validate_payload(LAYOUT, golden, 0)
    assert_same_bits(backend.decode(golden, NOTHING), VALUES, "values")
    assert dump(golden) in SECTION


def write() -> None:
    """Put the tables and the dump after the paragraphs that announce them."""
    payload, _ = reference.encode(VALUES, LAYOUT, BOOK, 0)
    blocks = table_of_values(), table_of_lanes(), dump(payload)
    prose = [part for part in SECTION.split("\n\n") if not part.startswith(("|", "```"))]
    prose = [part.strip("\n") for part in prose if part.strip()]
    assert len(prose) == len(blocks)
    pieces = [piece for pair in zip(prose, blocks, strict=True) for piece in pair]
    DOCUMENT.write_text(TEXT.replace(SECTION, "\n\n".join(pieces) + "\n"), encoding="utf-8")


if __name__ == "__main__":
    write()
