"""compress, decompress, inspect: figures, files, one clear error each."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

import lct
from lct.cli.app import app
from lct.cli.options import DistributionName, PresetName
from lct.distributions import FAMILIES
from lct.presets import PRESETS

SRC = Path(__file__).resolve().parents[2] / "src"
runner = CliRunner()


def run(*arguments: object) -> Any:
    return runner.invoke(app, [str(argument) for argument in arguments])


def succeed(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def fail(*arguments: object) -> str:
    """The single line of an error; exit code 1 and nothing on stdout."""
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return str(line)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 512, generator=generator) * 0.02
    tensors = {
        "encoder.weight": weight.bfloat16(),
        "encoder.master": weight,
        "position_ids": torch.arange(512),
        "bias": torch.zeros(3, dtype=torch.float16),
        "[bold]markup[/bold]": torch.tensor(1.5, dtype=torch.float64),
    }
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    return path


def test_round_trip(model: Path, tmp_path: Path) -> None:
    packed, back, report = (tmp_path / n for n in ("model.lct", "back.safetensors", "report.json"))
    output = succeed("compress", model, "-o", packed, "--json", report)
    assert output.count("\n") == 1
    figures = json.loads(report.read_text())
    ratio = model.stat().st_size / packed.stat().st_size
    assert figures["ratio"] == pytest.approx(ratio)
    assert f"ratio {ratio:.4f}" in output
    assert (figures["num_tensors"], figures["num_coded"]) == (5, 2)
    assert {"command", "versions", "commit", "date", "device"} <= set(figures)
    assert "checksums match" in succeed("decompress", packed, "--output", back)
    assert back.read_bytes() == model.read_bytes()


def test_existing_output(model: Path, tmp_path: Path) -> None:
    packed = tmp_path / "model.lct"
    packed.write_bytes(b"old")
    assert "must not be overwritten" in fail("compress", model, "-o", packed, "--no-clobber")
    assert packed.read_bytes() == b"old"
    succeed("compress", model, "-o", packed)
    succeed("compress", model, "-o", packed, "--force", "--preset", "clean")
    assert lct.load_file(packed)["encoder.weight"].preset == "clean"  # type: ignore[union-attr]


def test_bad_files(model: Path, tmp_path: Path) -> None:
    packed, out = tmp_path / "model.lct", tmp_path / "out"
    succeed("compress", model, "-o", packed)
    data = packed.read_bytes()
    before = {*tmp_path.iterdir(), tmp_path / "bad.lct"}
    for content, problem in (
        (data[:-1], "is truncated"),
        (data[: len(data) // 2], "is truncated"),
        (b"", "is truncated"),
        (model.read_bytes(), "is not an LCT file"),
        (data[:100] + bytes([data[100] ^ 4]) + data[101:], "is damaged"),
        (data[:-300] + bytes([data[-300] ^ 4]) + data[-299:], "is damaged"),
    ):
        (tmp_path / "bad.lct").write_bytes(content)
        line = fail("decompress", tmp_path / "bad.lct", "-o", out)
        assert problem in line
        assert "bad.lct" in line
        assert set(tmp_path.iterdir()) == before
    assert "is not a safetensors file" in fail("compress", packed, "-o", out)
    assert "is not a safetensors, .lct or .npy file" in fail("inspect", __file__)


def test_files_that_cannot_be_used(model: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert "No such file or directory" in fail("compress", missing, "-o", tmp_path / "out")
    assert "No such file or directory" in fail("decompress", missing, "-o", tmp_path / "out")
    assert "No such file or directory" in fail("inspect", missing)
    assert "Is a directory" in fail("compress", tmp_path, "-o", tmp_path / "out")
    assert "another file than the input" in fail("compress", model, "-o", model)
    assert "no such directory" in fail("compress", model, "-o", missing / "out")
    assert "must be a regular file" in fail("compress", model, "-o", tmp_path)
    assert "no such directory" in fail("inspect", model, "--json", missing / "a.json")
    line = fail("inspect", model, "--plot", tmp_path / "a.doc")
    assert "suffix of a picture must be one of" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors"]


def test_no_space(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.lct"
    succeed("compress", model, "-o", out)
    old = out.read_bytes()
    before = set(tmp_path.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, hard))
    try:
        line = fail("compress", model, "-o", out, "--preset", "clean")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in line
    assert "out.lct" in line
    assert out.read_bytes() == old
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["compress"],
        ["compress", "file"],
        ["compress", "file", "-o", "out", "--preset", "best"],
        ["decompress", "file", "-o", "out", "--preset", "clean"],
        ["inspect"],
        ["bench", "codec", "--sizes", "many"],
        ["bench", "codec", "--sizes", "-3"],
        ["bench", "codec", "--sizes", "2**100"],
        ["bench", "codec", "--preset", "pooled,best"],
        ["bench", "codec", "--device", "tpu"],
        ["analyze", "--phases", "0"],
        ["nonsense"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage" in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["demo"],
        ["compress"],
        ["decompress"],
        ["inspect"],
        ["analyze"],
        ["bench"],
        ["bench", "codec"],
        ["bench", "train"],
    ],
)
def test_help(command: list[str]) -> None:
    text = succeed(*command, "--help")
    assert "Usage" in text
    if command and command != ["bench"]:
        assert "Examples" in text
        assert f"lct {' '.join(command)} " in text
        assert "Exit codes: 0 done" in text
        assert "--json" in text
    assert succeed(*command, "-h") == text


def test_version() -> None:
    assert succeed("--version") == f"lct {lct.__version__}\n"


def test_names_of_options_are_those_of_the_tables() -> None:
    assert get_args(PresetName) == tuple(PRESETS)
    assert get_args(DistributionName) == tuple(FAMILIES)


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = run("--debug", "inspect", tmp_path / "missing")
    assert result.exit_code == 1
    assert isinstance(result.exception, FileNotFoundError)


def test_inspect_safetensors_and_lct(model: Path, tmp_path: Path) -> None:
    packed = tmp_path / "model.lct"
    succeed("compress", model, "-o", packed)
    reports = []
    for path in (model, packed):
        report, plot = tmp_path / "report.json", tmp_path / "plot.png"
        text = succeed("inspect", path, "--json", report, "--plot", plot)
        assert "[bold]markup[/bold]" in text
        assert "64×512" in text
        assert "total of 5" in text
        assert plot.read_bytes().startswith(b"\x89PNG")
        reports.append(json.loads(report.read_text()))
    first, second = ({t["name"]: t for t in report["tensors"]} for report in reports)
    assert first == second  # what compress would store is what it stored
    weight = first["encoder.weight"]
    assert weight["dtype"] == "BF16"
    assert weight["shape"] == [64, 512]
    assert 2.5 < weight["entropy_bits"] < weight["huffman_bits"] < 2.65
    assert weight["book"].startswith("gaussian")
    assert weight["predicted_ratio"] == pytest.approx(weight["ratio"], rel=0.03)
    assert weight["ratio"] == pytest.approx(weight["dense_bytes"] / weight["stored_bytes"])
    assert "entropy_bits" not in first["position_ids"]
    assert first["position_ids"]["ratio"] == 1
    totals = reports[0]["totals"]
    assert totals["dense_bytes"] == sum(t["dense_bytes"] for t in first.values())
    assert totals["ratio"] == pytest.approx(totals["dense_bytes"] / totals["stored_bytes"])


def test_inspect_npy(tmp_path: Path) -> None:
    patterns = (torch.randn(64, 256) * 0.02).bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.save(tmp_path / "weight.npy", patterns)
    succeed("inspect", tmp_path / "weight.npy", "--json", tmp_path / "r.json")
    (tensor,) = json.loads((tmp_path / "r.json").read_text())["tensors"]
    assert (tensor["name"], tensor["dtype"], tensor["shape"]) == ("weight", "BF16", [64, 256])
    assert tensor["ratio"] > 1.44


def shell(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lct", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(SRC), "PYTHONIOENCODING": "utf-8"},
        **options,
    )


def test_as_a_program_without_a_terminal(model: Path, tmp_path: Path) -> None:
    done = shell("compress", model, "-o", tmp_path / "model.lct", stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    assert "\x1b" not in done.stdout
    damaged = tmp_path / "damaged.lct"
    damaged.write_bytes((tmp_path / "model.lct").read_bytes()[:-9])
    done = shell("decompress", damaged, "-o", tmp_path / "out")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert "is truncated or damaged" in done.stderr
    assert not (tmp_path / "out").exists()
