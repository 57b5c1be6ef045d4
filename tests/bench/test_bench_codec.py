"""lct bench codec: rows that other checks rely on, and no figures for wrong bits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import lct
from lct.bench import codec
from lct.bench.codec import (
    LAYOUTS,
    NUM_PHASES,
    Input,
    all_inputs,
    check_bits,
    class_of,
    gaussian,
    measure_input,
    sum_ratios,
)
from lct.cli.app import app
from lct.presets import DEFAULT_PRESET, PRESETS

DATA = Path(__file__).resolve().parents[1] / "data"
CPU = torch.device("cpu")
ROW_KEYS = {
    "layout", "default", "input", "dtype", "num_values", "encode_over_copy", "decode_over_copy",
    "encode_gb_s", "decode_gb_s", "ratio", "bits_equal",
}  # fmt: skip
HEAD_KEYS = {
    "command",
    "device",
    "gpu",
    "versions",
    "environment",
    "commit",
    "date",
    "rows",
    "sums",
}


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench", "codec", *map(str, arguments)])


@pytest.mark.parametrize("layout", PRESETS)
def test_row(layout: str) -> None:
    given = gaussian(65536, 3, torch.bfloat16, CPU)
    row = measure_input(given, layout, repetitions=2)
    assert set(row) >= ROW_KEYS
    preset = None if layout == DEFAULT_PRESET else layout
    compressed = lct.encode(given.dense, preset=preset)
    assert row["ratio"] == 2 * 65536 / compressed.nbytes
    assert row["default"] == (layout == DEFAULT_PRESET)
    assert (row["layout"], row["input"], row["phase"]) == (layout, "gaussian", 3)
    assert (row["dtype"], row["num_values"], row["bits_equal"]) == ("bfloat16", 65536, True)
    assert row["encode_over_copy"] == pytest.approx(row["encode_ms"] / row["copy_ms"])
    assert row["encode_gb_s"] == pytest.approx(2 * 65536 / row["encode_ms"] / 1e6)
    assert row["decode_gb_s"] == pytest.approx(2 * 65536 / row["decode_ms"] / 1e6)
    assert row["timing"] == "wall"
    assert row["repetitions"] == 2
    json.dumps(row, allow_nan=False)


def test_the_default_is_encode_without_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def spy(tensor: torch.Tensor, **options: Any) -> lct.CompressedTensor:
        calls.append(options)
        return lct.encode(tensor, **options)

    monkeypatch.setattr(codec, "encode", spy)
    given = gaussian(4096, 0, torch.bfloat16, CPU)
    measure_input(given, DEFAULT_PRESET, repetitions=1)
    assert calls and all(options == {} for options in calls)
    calls.clear()
    measure_input(given, "clean", repetitions=1)
    assert calls and all(options == {"preset": "clean"} for options in calls)


def test_gaussians() -> None:
    for phase in (0, 5):
        given = gaussian(1 << 18, phase, torch.float32, CPU)
        assert given.dense.std().item() == pytest.approx(0.02 * 2 ** (phase / 8), rel=0.01)
        assert torch.equal(given.dense, gaussian(1 << 18, phase, torch.float32, CPU).dense)


def test_inputs() -> None:
    inputs = list(all_inputs(CPU, sizes=[4096, 1000]))
    assert [(i.name, i.dense.numel(), i.more["phase"]) for i in inputs] == [
        ("gaussian", 4096, 0),
        *(("gaussian", 1000, phase) for phase in range(NUM_PHASES)),
    ]
    assert all(i.dense.dtype == torch.bfloat16 for i in inputs)
    half = next(all_inputs(CPU, sizes=[64], dtype="float16"))
    assert half.dense.dtype == torch.float16
    with pytest.raises(ValueError, match=r"dtype must be one of .* got 'int8'"):
        next(all_inputs(CPU, sizes=[64], dtype="int8"))
    with pytest.raises(ValueError, match="at least 1 value, got 0"):
        next(all_inputs(CPU, sizes=[0]))
    with pytest.raises(ValueError, match=r"layout must be one of .* got 'raw'"):
        measure_input(inputs[-1], "raw")


def test_files_of_every_kind(tmp_path: Path) -> None:
    dense = (torch.randn(64, 64) * 0.02).bfloat16()
    np.save(tmp_path / "a.npy", dense.view(torch.int16).numpy().view(np.uint16))
    lct.save_file({"x": dense, "i": torch.arange(3), "e": dense[:0]}, tmp_path / "b.lct")
    inputs = [i for i in all_inputs(CPU, sizes=[64], tensors=tmp_path) if i.name != "gaussian"]
    assert [(i.name, i.more) for i in inputs] == [("a", {}), ("b", {"tensor": "x"})]
    assert all(torch.equal(i.dense, dense) for i in inputs)
    with pytest.raises(ValueError, match="no such directory"):
        list(all_inputs(CPU, sizes=[64], tensors=tmp_path / "missing"))


def test_command(tmp_path: Path) -> None:
    np.save(tmp_path / "weight_small.npy", np.load(DATA / "weight_attn_q.npy")[:64])
    report, plot = tmp_path / "r.json", tmp_path / "plot.png"
    result = run(
        *("--device", "cpu", "--sizes", "2**14", "--repetitions", 1),
        *("--tensors", tmp_path, "--json", report, "--plot", plot),
    )
    assert result.exit_code == 0, result.output
    figures = json.loads(report.read_text())
    assert set(figures) == HEAD_KEYS
    assert figures["device"] == "cpu"
    assert figures["gpu"] is None
    assert {"torch", "cuda", "python", "lct", "numpy"} <= set(figures["versions"])
    rows = figures["rows"]
    assert len(rows) == len(PRESETS) * NUM_PHASES + len(LAYOUTS)
    assert all(set(row) >= ROW_KEYS and row["bits_equal"] is True for row in rows)
    default = [row for row in rows if row["default"]]
    assert len(default) == NUM_PHASES + 1
    assert all(row["layout"] == DEFAULT_PRESET for row in default)
    assert {row["input"] for row in rows} == {"gaussian", "weight_small"}
    assert sorted({row["phase"] for row in rows if row["input"] == "gaussian"}) == list(range(8))
    assert all(math.isfinite(row["encode_over_copy"]) for row in rows)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "pooled (default)" in result.stdout
    assert set(figures["sums"]) == set(LAYOUTS)
    for layout, sums in figures["sums"].items():
        (row,) = [r for r in rows if r["layout"] == layout and r["input"] == "weight_small"]
        assert set(sums) == {"weight", "weight+minilm", "all"}
        assert sums["all"] == {
            "tensors": 1,
            "dense_bytes": row["dense_bytes"],
            "allocated_bytes": row["allocated_bytes"],
            "ratio": row["ratio"],
        }


def test_the_exact_layout_is_for_files() -> None:
    dense = (torch.randn(40000) * 0.02).bfloat16()
    row = measure_input(Input("weight_x", dense, {}), "pooled-exact", repetitions=1)
    assert set(row) >= ROW_KEYS
    assert row["allocated_bytes"] == lct.encode(dense, capacity="exact").nbytes
    assert row["default"] is False
    assert "waits for the device once" in row["timing_note"]
    assert LAYOUTS["pooled-exact"].files_only
    assert not gaussian(64, 0, torch.bfloat16, CPU).is_file


def test_sums() -> None:
    def row(layout: str, name: str, dense: int, allocated: int, **more: Any) -> dict[str, Any]:
        sizes = {"dense_bytes": dense, "allocated_bytes": allocated}
        return {"layout": layout, "input": name, **sizes, **more}

    rows = [
        row("pooled", "gaussian", 100, 1, phase=0),
        row("pooled", "weight_a", 300, 200),
        row("pooled", "minilm_a", 100, 50),
        row("pooled", "exp_avg_sq_a", 60, 50),
        row("pooled", "exp_avg_a", 40, 20),
        row("pooled", "mine", 100, 80),
        row("clean", "exp_avg_a", 40, 40),
        row("somebody-else", "weight_a", 300, 1),
    ]
    sums = sum_ratios(rows)
    assert set(sums) == {"pooled", "clean"}
    ratios = {name: found["ratio"] for name, found in sums["pooled"].items()}
    assert ratios == {
        "weight": 1.5,
        "minilm": 2.0,
        "exp_avg_sq": 1.2,
        "exp_avg": 2.0,
        "other": 1.25,
        "weight+minilm": 1.6,
        "all": 1.5,
    }
    assert sums["pooled"]["all"]["tensors"] == 5
    assert set(sums["clean"]) == {"exp_avg", "all"}
    assert sum_ratios(rows[:1]) == {}
    assert class_of("act_grad") == "act"


def test_presets_and_sizes_of_the_command(tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    result = run(
        *("--device", "cpu", "--sizes", "100, 2**10", "--sizes", "50", "--preset", "clean,pooled"),
        *("--dtype", "float32", "--repetitions", 1, "--json", report),
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(report.read_text())["rows"]
    assert {row["num_values"] for row in rows} == {50, 100, 1024}
    assert {row["layout"] for row in rows} == {"clean", "pooled"}
    assert {row["dtype"] for row in rows} == {"float32"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--preset", "raw"), "must be among"),
        (("--preset", "pooled,,clean"), "must be among"),
        (("--peers", "zstd"), "must be among nvcomp-ans, none, got 'zstd'"),
        (("--sizes", "2**x"), "must be whole numbers"),
        (("--sizes", "0"), "must be whole numbers"),
        (("--repetitions", "0"), "greater than or equal to 1"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], message: str) -> None:
    result = run("--device", "cpu", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
def test_cuda_without_a_gpu() -> None:
    result = run("--device", "cuda")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: device cuda needs a CUDA GPU")


def test_wrong_bits_give_no_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = lct.CompressedTensor.decode

    def wrong(self: lct.CompressedTensor, out: torch.Tensor | None = None) -> torch.Tensor:
        result = right(self, out)
        result.view(torch.int16)[77] ^= 1
        return result

    monkeypatch.setattr(lct.CompressedTensor, "decode", wrong)
    report = tmp_path / "r.json"
    result = run("--device", "cpu", "--sizes", 1024, "--repetitions", 1, "--json", report)
    assert result.exit_code == 1
    assert "no figures for wrong bits: 1 of 1024 values differ, the first at 77" in result.stderr
    assert result.stdout == ""
    assert not report.exists()


def test_a_decode_that_writes_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output still holds the right values from before? It holds poison instead."""
    given = Input("zeros", torch.zeros(4096, dtype=torch.bfloat16), {})
    monkeypatch.setattr(lct.CompressedTensor, "decode", lambda self, out=None: out)
    with pytest.raises(lct.LctError, match="4096 of 4096 values differ"):
        measure_input(given, "clean", repetitions=1)


def test_check_bits_knows_zeros_and_nans() -> None:
    nan = torch.tensor([float("nan"), 0.0])
    check_bits(nan, nan.clone())
    with pytest.raises(lct.LctError, match="first at 1: expected 0x0, got 0x80000000"):
        check_bits(nan, torch.tensor([float("nan"), -0.0]))
    with pytest.raises(lct.LctError, match=r"wrong bits in a plane: 1 of 2 .* 0x1, got 0x2"):
        check_bits(torch.tensor([1, 1]).byte(), torch.tensor([1, 2]).byte(), "a plane")
