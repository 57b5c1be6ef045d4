"""lct bench show: result files of training runs as tables and a plot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lct.cli.app import app

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TRAINING = sorted(path.name for path in RESULTS.glob("train-*.json"))


@pytest.mark.parametrize("name", TRAINING)
def test_shows_what_a_result_file_holds(name: str, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    result = CliRunner().invoke(
        app, ["bench", "show", str(RESULTS / name), "--plot", str(plot)], env={"COLUMNS": "250"}
    )
    assert result.exit_code == 0, result.output
    content = json.loads((RESULTS / name).read_text())
    assert content["commit"] in result.output and content["gpu"] in result.output
    for row in [*content["rows"], *content["pairs"], *content["searches"]]:
        assert row["model"] in result.output and row["variant"] in result.output
    assert plot.stat().st_size > 10_000


def test_many_files_make_one_plot(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    names = [str(RESULTS / name) for name in TRAINING]
    assert CliRunner().invoke(app, ["bench", "show", *names, "--plot", str(plot)]).exit_code == 0
    text = plot.read_text()
    assert "qwen3-4b" in text and "nanogpt-162m" in text


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "must be a JSON file"), ('{"rows": []}', "must be a result file of lct bench train")],
)
def test_other_files(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    result = CliRunner().invoke(app, ["bench", "show", str(path)], env={"COLUMNS": "250"})
    assert result.exit_code == 1 and words in " ".join(result.stderr.split())


def test_no_such_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "show", str(tmp_path / "none.json")])
    assert result.exit_code == 1 and "none.json" in result.stderr
