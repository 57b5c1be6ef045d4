"""Golden files: the format's bytes and the sizes it reaches on real tensors cannot drift unnoticed.

After a deliberate change (a new format version, a row of the bank): ``python tests/test_golden.py``
writes tests/golden anew, from the reference.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import inputs
from compare import assert_same_bits
from lct.backends import cpu, reference
from lct.codebook import bank, candidates
from lct.dtypes import DTYPES, UPCAST, DType
from lct.layout import PayloadLayout, parse_header, validate_payload
from lct.presets import PRESETS, RAW, Preset

GOLDEN = Path(__file__).resolve().parent / "golden"
RATIOS = GOLDEN / "ratios.csv"
BANK = GOLDEN / "bank.csv"
BF16, FP32, FP16 = (DTYPES[name] for name in ("bfloat16", "float32", "float16"))
POOLED = PRESETS["pooled"]


@dataclass(frozen=True)
class Case:
    """A payload that is kept: the first ``size`` values of a tensor of tests/data."""

    name: str
    preset: Preset
    dtype: DType
    tensor: str
    size: int = 8192 + 300
    capacity: int | None = None
    wide: bool = False

    @property
    def path(self) -> Path:
        return GOLDEN / f"{self.name}.bin"

    def values(self) -> np.ndarray:
        values = inputs.as_dtype(inputs.data_tensors()[self.tensor], self.dtype)[: self.size].copy()
        if self.wide:
            values[-1] |= 0x1234
        return values

    def layout(self) -> PayloadLayout:
        capacity = self.preset.capacity_words if self.capacity is None else self.capacity
        return PayloadLayout(self.preset, self.dtype, self.size, capacity)


CASES = (
    Case("pooled_bfloat16", POOLED, BF16, "weight_mlp_gate"),
    Case("pooled_bfloat16_spilled", POOLED, BF16, "act_silu_times_up", capacity=600),
    Case("pooled_bfloat16_zeros", POOLED, BF16, "grad_embedding", capacity=200),
    Case("pooled_float32", POOLED, FP32, "momentum_embedding", size=1001),
    Case("pooled_float16", POOLED, FP16, "act_q", size=1001),
    Case("pooled_upcast", POOLED, UPCAST, "act_norm_fp32", wide=True),
    Case("clean_bfloat16", PRESETS["clean"], BF16, "act_silu_times_up"),
    Case("medium_bfloat16", PRESETS["medium"], BF16, "act_silu_times_up"),
    Case("high_bfloat16", PRESETS["high"], BF16, "act_silu_times_up"),
    Case("raw_bfloat16", RAW, BF16, "weight_attn_q", size=100),
)


def books() -> str:
    """CSV: the length of every code of the bank. Books are computed, and payloads name only ids."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("book", "name", "code_lengths"))
    for book, row in enumerate(bank()):
        coded = np.flatnonzero(row.lengths)
        lengths = " ".join(f"{symbol}:{row.lengths[symbol]}" for symbol in coded)
        writer.writerow((book, row.name, lengths))
    return text.getvalue()


def test_bank() -> None:
    """The books are the same on every machine, with every version of NumPy."""
    expected = BANK.read_text(encoding="utf-8").splitlines()
    for found, line in zip(books().splitlines(), expected, strict=True):
        assert found == line


def choose(case: Case) -> tuple[int, int]:
    if case.layout().is_raw:
        return 0, 0
    words, _ = reference.split(case.values(), case.dtype)
    return reference.select(words, case.layout(), candidates(None))


@pytest.mark.parametrize("backend", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_payloads(case: Case, backend) -> None:
    golden = np.fromfile(case.path, np.uint8)
    layout, book, shift = parse_header(golden[:16].tobytes())
    assert layout == case.layout()
    assert (book, shift) == choose(case)
    expected_payload, expected_spill = golden[: layout.size_bytes], golden[layout.size_bytes :]
    validate_payload(layout, expected_payload, expected_spill.size)
    payload, spill = backend.encode(case.values(), layout, book, shift)
    assert_same_bits(payload, expected_payload, "payload")
    assert_same_bits(spill, expected_spill, "spill")
    assert_same_bits(backend.decode(expected_payload, expected_spill), case.values(), "values")


def ratios() -> str:
    """CSV: what every real tensor takes in a pooled payload, from the CPU backend."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    header = "tensor", "num_values", "book", "payload_bytes", "spill_bytes", "largest_need_words"
    writer.writerow((*header, "ratio"))
    for name, tensor in inputs.data_tensors().items():
        values = tensor.reshape(-1)
        layout = PayloadLayout(POOLED, BF16, values.size, POOLED.capacity_words)
        book, shift = cpu.select(values, layout, candidates(None))
        payload, spill = cpu.encode(values, layout, book, shift)
        need = int(cpu.group_needs(values, layout, book).max())
        ratio = values.nbytes / (payload.size + spill.size)
        row = name, values.size, book, payload.size, spill.size, need, f"{ratio:.4f}"
        writer.writerow(row)
    return text.getvalue()


def test_ratios() -> None:
    expected = RATIOS.read_text(encoding="utf-8").splitlines()
    for found, line in zip(ratios().splitlines(), expected, strict=True):
        assert found == line


def write() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for case in CASES:
        payload, spill = reference.encode(case.values(), case.layout(), *choose(case))
        np.concatenate([payload, spill]).tofile(case.path)
    BANK.write_text(books(), encoding="utf-8")
    RATIOS.write_text(ratios(), encoding="utf-8")


if __name__ == "__main__":
    write()
