"""The sizes from which saved tensors are compressed are those of the measured table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lct.dtypes import DTYPES, UPCAST
from lct.layout import PayloadLayout
from lct.nn.activations import SAVE_RULES
from lct.nn.room import CAPACITY_WORDS
from lct.presets import get_preset

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
FILES = sorted(RESULTS.glob("thresholds-*.json"))
CODED = {
    "bfloat16": DTYPES["bfloat16"],
    "float16": DTYPES["float16"],
    "float32": DTYPES["float32"],
    "float32, cast from bfloat16": UPCAST,
}


def test_there_is_a_table() -> None:
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_rules_are_those_of_the_table(path: Path) -> None:
    result = json.loads(path.read_text())
    for kind, min_bytes in result["thresholds"].items():
        dtype = getattr(torch, kind.partition(",")[0])
        if dtype == torch.bool:
            # Bits have one ratio at all sizes: only time speaks against small masks.
            assert SAVE_RULES[dtype].min_bytes >= min_bytes
        else:
            assert SAVE_RULES[dtype].min_bytes == min_bytes


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_sizes_of_the_table_are_those_of_the_format(path: Path) -> None:
    for row in json.loads(path.read_text())["rows"]:
        count, stored = row["num_values"], row["stored_bytes"]
        if row["kind"] == "bool":
            assert stored == count // 8
        else:
            layout = PayloadLayout.choose(
                get_preset(None), CODED[row["kind"]], count, CAPACITY_WORDS
            )
            assert stored == layout.size_bytes
