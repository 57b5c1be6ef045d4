"""lct analyze: the tables, the figures, given tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lct.cli.app import app
from lct.distributions import FAMILIES

DATA = Path(__file__).resolve().parents[1] / "data"
runner = CliRunner()


def test_models(tmp_path: Path) -> None:
    report, plot = tmp_path / "r.json", tmp_path / "plot.svg"
    arguments = ["analyze", "--phases", "2", "--values", "65536", "--json", report, "--plot", plot]
    result = runner.invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    for title in (
        "allocated / share spilled",
        "misses the scale by octaves",
        "another distribution",
    ):
        assert title in result.stdout
    assert "<svg" in plot.read_text()
    figures = json.loads(report.read_text())
    assert [(r["distribution"], r["phase"]) for r in figures["distributions"]] == [
        (family, phase) for family in FAMILIES for phase in (0.0, 0.5)
    ]
    for row in figures["distributions"]:
        assert row["entropy_bits"] < row["ideal_bits"] < row["huffman_bits"] <= row["book_bits"]
        assert set(row["allocations"]) == {"clean", "medium", "high", "pooled", "pooled, exact"}
        for allocation in row["allocations"].values():
            assert allocation["ratio"] == pytest.approx(16 / (8 + allocation["allocated_bits"]))
            assert allocation["allocated_bits"] > row["entropy_bits"]
            assert 0 <= allocation["spilled_share"] <= 1
    gaussian = figures["distributions"][0]["allocations"]
    assert gaussian["clean"]["ratio"] > 1.433
    assert gaussian["pooled"]["ratio"] > 1.44
    assert {(r["distribution"], r["octaves"]) for r in figures["mismatch"]} == {
        (family, octaves) for family in FAMILIES for octaves in range(-4, 5)
    }
    assert set(figures["families"]) == set(FAMILIES)


def test_the_same_seed_gives_the_same_figures(tmp_path: Path) -> None:
    figures = []
    for name in ("a.json", "b.json"):
        arguments = ["analyze", "--phases", "1", "--values", "8192", "--json", str(tmp_path / name)]
        assert runner.invoke(app, arguments).exit_code == 0
        report = json.loads((tmp_path / name).read_text())
        figures.append({key: report[key] for key in ("distributions", "mismatch", "families")})
    assert figures[0] == figures[1]


def test_given_tensors(tmp_path: Path) -> None:
    report, plot = tmp_path / "r.json", tmp_path / "plot.png"
    files = [DATA / "weight_attn_q.npy", DATA / "grad_embedding.npy"]
    arguments = ["analyze", *files, "--json", report, "--plot", plot]
    result = runner.invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    weight, grad = json.loads(report.read_text())["tensors"]
    assert (weight["file"], weight["dtype"]) == ("weight_attn_q", "BF16")
    assert weight["entropy_bits"] == pytest.approx(2.56, abs=0.03)
    assert weight["allocations"]["pooled"]["ratio"] > 1.43
    assert grad["zero_share"] > 0.5
    assert "zeros" in grad["book"]
    assert "weight_attn_q" in result.stdout


def test_a_directory_of_tensors(tmp_path: Path) -> None:
    for name in ("weight_attn_q.npy", "act_relu_out.npy"):
        (tmp_path / name).write_bytes((DATA / name).read_bytes())
    result = runner.invoke(app, ["analyze", "--tensors", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "act_relu_out" in result.stdout
    result = runner.invoke(app, ["analyze", "--tensors", str(tmp_path / "missing")])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: no such directory")


@pytest.mark.parametrize("columns", ["40", "400"])
def test_tables_lose_nothing_in_a_narrow_terminal(
    columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    result = runner.invoke(app, ["analyze", str(DATA / "weight_attn_q.npy")])
    (row,) = (line for line in result.stdout.splitlines() if "weight_attn_q" in line)
    assert "gaussian" in row
    assert row.count("%") == 5
