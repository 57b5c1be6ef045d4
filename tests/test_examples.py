"""The examples run, and save what they say they save."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lct

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
Run = Callable[..., list[str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example with arguments and gives the lines that it prints."""

    def run_example(name: str, *arguments: str) -> list[str]:
        capsys.readouterr()
        monkeypatch.setattr("sys.argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run_example


def check(lines: list[str], steps: list[int]) -> None:
    losses = [re.fullmatch(r"step (\d+): loss ([0-9.]+)", line) for line in lines]
    assert [int(match[1]) for match in losses if match] == steps
    assert all(0 < float(match[2]) < 7 for match in losses if match)
    (weights,) = [line.split() for line in lines if line.startswith("weights ")]
    tensors, compressed, dense, stored = (float(cell) for cell in weights[1:5])
    assert 0 < compressed < tensors and stored < dense


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def test_plain_loop_and_its_checkpoint(run: Run, device: str, tmp_path: Path) -> None:
    straight = run("plain_loop.py", "--device", device, "--steps", "3")
    check(straight, [1, 2, 3])
    path = tmp_path / "run.lct"
    command = ("plain_loop.py", "--device", device, "--checkpoint", str(path))
    first = run(*command, "--steps", "2")
    check(first, [1, 2])
    assert lct.load_checkpoint(path)["step"] == 2
    second = run(*command, "--steps", "3")
    check(second, [3])
    if device == "cpu":  # its kernels are deterministic without being told
        assert first[:2] + second[:1] == straight[:3]


def test_hugging_face(run: Run, device: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    lines = run("hugging_face.py", "--device", device, "--steps", "2", "--output", str(tmp_path))
    check(lines, [1, 2])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.bfloat16


def test_lora(run: Run, device: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    check(run("lora.py", "--device", device, "--steps", "2", "--output", str(tmp_path)), [1, 2])
    assert (tmp_path / "adapter_model.safetensors").exists()
