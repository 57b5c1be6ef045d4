"""``lct bench host``: rows complete on a GPU, refused without one."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lct.bench.host import BASE, TENSORS, calls, measure_host
from lct.cli.app import app


def test_the_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="of a CUDA device, got cpu"):
        measure_host(torch.device("cpu"))


def test_every_call_can_be_made() -> None:
    todo = calls(torch.device("cpu"))
    assert next(iter(todo)) == BASE and set(TENSORS) <= set(todo)
    for call in todo.values():
        call()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
def test_the_command_needs_a_gpu() -> None:
    result = CliRunner().invoke(app, ["bench", "host"])
    assert result.exit_code == 1
    assert "found none" in result.output


@pytest.mark.gpu
def test_rows(tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    result = CliRunner().invoke(app, ["bench", "host", "--repetitions", "2", "--json", str(path)])
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert rows[0]["call"] == BASE and rows[0]["over_add"] == 1.0
    assert {"decode", "encode", "encode_", "SGD.step", *TENSORS} <= {row["call"] for row in rows}
    assert all(row["host_us"] > 0 for row in rows)
