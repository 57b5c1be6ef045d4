"""lct bench optim: complete rows, and no figures for steps that leave other bits than torch's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import lct
from lct.bench import optim, timing
from lct.bench.optim import OPTIMIZERS, ROUNDINGS, choose_roundings, measure_step, shape_for
from lct.cli.app import app
from lct.optim import sgd

CPU = torch.device("cpu")
SIZE = 2**14
FIRST_KEYS = ["optimizer", "rounding", "num_values", "step_over_copy", "ratio", "bits_equal"]
HEAD_KEYS = {"command", "device", "gpu", "versions", "environment", "commit", "date", "rows"}
ON_CPU = [(name, r) for name, row in OPTIMIZERS.items() for r in choose_roundings(row, CPU)]


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "WALL_MIN_MS", 0.0)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench", "optim", *map(str, arguments)])


def check_row(row: dict[str, Any]) -> None:
    assert list(row)[: len(FIRST_KEYS)] == FIRST_KEYS
    assert row["bits_equal"] is True
    copies = {"sgd": 2.5, "adam": 3.5, "adamw": 3.5}[row["optimizer"]]
    assert row["floor_copies"] == copies
    assert row["step_over_copy"] == pytest.approx(row["step_ms"] / row["copy_ms"])
    for variant in ("step", "dense_foreach", "dense_fused"):
        floor_ms = copies * row["copy_ms"]
        assert row[f"{variant}_over_floor"] == pytest.approx(row[f"{variant}_ms"] / floor_ms)
        assert math.isfinite(row[f"{variant}_iqr_ms"])
    states = 1 if row["optimizer"] == "sgd" else 2
    assert row["dense_bytes"] == 2 * row["num_values"] * (1 + states)
    assert row["ratio"] == row["dense_bytes"] / row["allocated_bytes"]
    assert row["ratio"] > 1.3
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize(("name", "rounding"), ON_CPU)
def test_row(name: str, rounding: str) -> None:
    row = measure_step(name, rounding, SIZE, CPU, repetitions=2)
    check_row(row)
    assert (row["optimizer"], row["rounding"], row["num_values"]) == (name, rounding, SIZE)
    assert (row["timing"], row["repetitions"], row["rotations"]) == ("wall", 2, 1)
    # The first two, the warm-up, and an untimed call before each timed one.
    assert row["checked_steps"] == optim.FIRST_STEPS + timing.WARMUP + 2 * 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("size", [2**18, 2**24])
def test_row_on_a_gpu(name: str, rounding: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Hundreds of sets of small buffers, as a benchmark takes, would make the gate last minutes.
    monkeypatch.setattr(optim, "rotations_for", lambda *_: 3)
    device = torch.device("cuda", torch.cuda.current_device())
    row = measure_step(name, rounding, size, device, repetitions=2)
    check_row(row)
    if name != "sgd":
        assert row["timing"] == "events"


def test_command(tmp_path: Path) -> None:
    report, plot = tmp_path / "r.json", tmp_path / "plot.png"
    result = run(
        *("--device", "cpu", "--sizes", f"{SIZE},2**15", "--repetitions", 1),
        *("--json", report, "--plot", plot, "--commit", "given"),
    )
    assert result.exit_code == 0, result.output
    figures = json.loads(report.read_text())
    assert set(figures) == HEAD_KEYS
    assert (figures["device"], figures["commit"]) == ("cpu", "given")
    rows = figures["rows"]
    assert [(r["optimizer"], r["rounding"], r["num_values"]) for r in rows] == [
        *(("sgd", "foreach", SIZE), ("adamw", "foreach", SIZE), ("adamw", "fused", SIZE)),
        *(("sgd", "foreach", 2**15), ("adamw", "foreach", 2**15), ("adamw", "fused", 2**15)),
    ]
    for row in rows:
        check_row(row)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "step ÷ floor" in result.stdout


def test_chosen_optimizers_and_roundings(tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    result = run(
        *("--device", "cpu", "--sizes", SIZE, "--repetitions", 1, "--optimizer", "adam"),
        *("--rounding", "fused", "--json", report),
    )
    assert result.exit_code == 0, result.output
    (row,) = json.loads(report.read_text())["rows"]
    assert (row["optimizer"], row["rounding"]) == ("adam", "fused")


def wrong_step(after: int) -> Any:
    """A step of a compressed weight that flips one bit of the momentum from step ``after`` on."""
    right, calls = sgd._decode_step_encode, [0]

    def step(param: torch.Tensor, buffer: Any, update: Any) -> Any:
        new = right(param, buffer, update)
        calls[0] += 1
        if calls[0] >= after:
            dense = new.decode()
            dense.view(torch.int16)[1, 5] ^= 1
            new.encode_(dense)
        return new

    return step


@pytest.mark.parametrize(
    ("after", "where"),
    [
        (2, "momentum_buffer in sgd (foreach), step 2"),
        (optim.GATE_STEPS + 1, "momentum_buffer in sgd (foreach) after 7 steps, timed"),
    ],
    ids=["in the gate", "in what is timed"],
)
def test_wrong_bits_give_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, where: str
) -> None:
    monkeypatch.setattr(sgd, "_decode_step_encode", wrong_step(after))
    report = tmp_path / "r.json"
    result = run(
        *("--device", "cpu", "--sizes", SIZE, "--optimizer", "sgd", "--repetitions", 1),
        *("--json", report),
    )
    assert result.exit_code == 1
    expected = f"error: no figures for wrong bits in {where}: 1 of 16384 values differ, "
    assert result.stderr.startswith(expected + "the first at 4101: expected ")
    assert result.stdout == ""
    assert not report.exists()


def test_a_weight_that_is_not_stepped_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lct.optim.AdamW, "_step_group", lambda *_: None)
    with pytest.raises((lct.LctError, ValueError)):
        measure_step("adamw", "foreach", SIZE, CPU, repetitions=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--optimizer", "lion"), "must be among sgd, adam, adamw, got 'lion'"),
        (("--rounding", "foreach,single"), "must be among foreach, fused, got 'single'"),
        (("--sizes", "2**-3"), "must be whole numbers"),
        (("--repetitions", "0"), "greater than or equal to 1"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], message: str) -> None:
    result = run("--device", "cpu", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_what_torch_does_not_repeat_is_refused() -> None:
    result = run("--device", "cpu", "--optimizer", "sgd", "--rounding", "fused")
    assert result.exit_code == 1
    assert "rounding fused of sgd needs device cuda" in result.stderr


def test_wrong_calls() -> None:
    with pytest.raises(ValueError, match=r"optimizer must be one of .* got 'lion'"):
        measure_step("lion", "foreach", SIZE, CPU)
    with pytest.raises(ValueError, match=r"rounding must be one of .* got 'single'"):
        measure_step("sgd", "single", SIZE, CPU)
    with pytest.raises(ValueError, match=r"sizes must be large enough .* got 3"):
        measure_step("sgd", "foreach", 3, CPU)


def test_shapes() -> None:
    assert shape_for(2**20) == (256, 4096)
    assert shape_for(48) == (3, 16)
    assert shape_for(7) == (7, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
def test_cuda_without_a_gpu() -> None:
    result = run("--device", "cuda")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: device cuda needs a CUDA GPU")
