"""``lct demo`` from end to end, with a small model and little text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import lct.demo
from lct.bench import results
from lct.bench.models.byte_gpt import GptSize
from lct.cli.app import app
from lct.demo import Corpus, Recipe, Run, build_report, data, training
from lct.demo.live import StepMemory

SIZE = GptSize("tiny", num_layers=3, width=128, num_heads=2, context=256, products="float32")
TINY = Recipe(SIZE, batch=4, num_steps=3, lr=0.05)
KEYS = {
    "losses_identical",
    "weights_identical",
    "optimizer_state_identical",
    "peak_bytes",
    "step_seconds",
    "device",
    "versions",
}
Demo = Callable[..., tuple[Result, dict[str, Any]]]


@pytest.fixture
def run_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Demo]:
    """``lct demo`` with the tiny recipe: (result, report)."""
    library = tmp_path / "library"
    library.mkdir()
    for i in range(40):
        (library / f"m{i:02}.py").write_text(f"def f{i}(self):\n    return {i} + self.x\n" * 800)
    monkeypatch.setitem(training.RECIPES, "cpu", TINY)
    monkeypatch.setattr(lct.demo, "load_corpus", lambda: data.load_corpus(library))

    def run(*arguments: str) -> tuple[Result, dict[str, Any]]:
        folder = tmp_path / "out"
        command = ["demo", "--device", "cpu", "--output", str(folder), *arguments]
        result = CliRunner().invoke(app, command)
        report = folder / "report.json"
        return result, json.loads(report.read_text()) if report.exists() else {}

    yield run
    assert not torch.are_deterministic_algorithms_enabled(), "the demo leaves torch as it was"


def test_bits_are_equal_and_the_peak_is_lower(
    run_demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "git_commit", lambda: None)
    copy = tmp_path / "copy.json"
    result, report = run_demo("--json", str(copy), "--commit", "abc")
    assert result.exit_code == 0, result.output
    assert report.keys() >= KEYS
    for kind in ("losses", "weights", "optimizer_state"):
        assert report[f"{kind}_identical"] is True
        assert report["sha256"][kind]["dense"] == report["sha256"][kind]["lct"]
        assert f"{kind.replace('_', ' ')} identical: SHA-256 " in result.output
    assert report["failures"] == []
    assert report["device"] == "cpu"
    assert report["commit"] == "abc"
    assert report["peak_bytes"]["lct"] <= 0.85 * report["peak_bytes"]["dense"]
    assert all(seconds > 0 for seconds in report["step_seconds"].values())
    for size in report["bytes"].values():
        assert size["lct"] < size["dense"]
    assert len(report["losses"]) == TINY.num_steps
    assert json.loads(copy.read_text()) == report
    assert (tmp_path / "out" / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_one_flipped_bit_fails(run_demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    def flip_and_compress(model: torch.nn.Module) -> torch.nn.Module:
        model.blocks[1].up.weight.data.view(torch.int16)[3, 5] ^= 1
        return lct.compress_(model)

    monkeypatch.setattr(training, "compress_", flip_and_compress)
    result, report = run_demo()
    assert result.exit_code == 1
    assert report["weights_identical"] is False
    assert "weights DIFFERENT: SHA-256 " in result.output
    assert any("weights differ: blocks." in failure for failure in report["failures"])


def test_help_names_the_steps_of_the_recipes() -> None:
    steps = {name: recipe.num_steps for name, recipe in training.RECIPES.items()}
    text = CliRunner().invoke(app, ["demo", "--help"], env={"COLUMNS": "200"}).output
    assert f"default: {steps['cpu']} on cpu, {steps['cuda']} on cuda" in text


def test_a_missed_peak_fails() -> None:
    text = torch.zeros(1, dtype=torch.uint8)
    runs = [Run(memory=StepMemory(peak_bytes=size)) for size in (1000, 851)]
    report = build_report(*runs, TINY, Corpus(text, text, 1, ""))
    (failure,) = report["failures"]
    assert failure == "peak with LCT must be at most 0.85 of the dense one, got 0.8510"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
def test_cuda_is_refused_where_there_is_none(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--device", "cuda", "--output", str(tmp_path / "x")])
    assert result.exit_code == 1
    assert "device must be available on this machine, got 'cuda'" in result.output


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1000000 bytes of Python sources, got 0"):
        data.load_corpus(tmp_path)


def test_corpus_is_split_by_file_in_the_order_of_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "MIN_BYTES", 1)
    for i in range(40):
        (tmp_path / f"{i:02}.py").write_bytes(bytes([i]))
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "excluded.py").write_text("excluded")
    corpus = data.load_corpus(tmp_path)
    assert corpus.held_out.tolist() == [19, 39]
    assert corpus.train.tolist() == [i for i in range(40) if i not in (19, 39)]
    assert corpus.num_files == 40


def test_batches_are_pieces_of_the_text() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    corpus = Corpus(text, text, 1, "")
    batch = corpus.batch(text, 5, 10, torch.Generator().manual_seed(0))
    assert batch.shape == (5, 10)
    assert batch.dtype == torch.int64
    assert torch.equal(batch - batch[:, :1], torch.arange(10).expand(5, 10))


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_a_small_run_on_cuda(
    run_demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = replace(training.RECIPES["cuda"].size, num_layers=4)
    recipe = Recipe(size, batch=8, num_steps=4, lr=0.05)
    monkeypatch.setitem(training.RECIPES, "cuda", recipe)
    # The arena's share of a small run's memory must not depend on how far the host ran ahead.
    from lct.backends.cuda import arena

    monkeypatch.setattr(arena.of(torch.cuda.current_device()), "limit_chunks", 8192)
    folder = tmp_path / "cuda"
    result = CliRunner().invoke(app, ["demo", "--device", "cuda", "--output", str(folder)])
    assert result.exit_code == 0, result.output
