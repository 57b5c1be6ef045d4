"""``plan_memory`` beside the live bytes of the same steps, and its refusals."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

from lct import optim
from lct.bench.models.byte_gpt import ByteGpt, GptSize
from lct.bench.planning import measure_step, training_of
from lct.cli.app import app
from lct.nn import room
from lct.optim import step_in_backward
from lct.plan import PARTS, Training, plan_memory
from training import BF16

# The bound that is stated for the CPU, where live storages are counted one by one.
ERROR = 0.02
SIZE = GptSize("test", 2, 128, 4, 128, "native")
ALL = frozenset(PARTS)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests saved from the same lines of a model is no business of these."""
    monkeypatch.setattr(room, "_rooms", {})


def small_gpt() -> nn.Module:
    return ByteGpt(SIZE)


def gpt_training(**options: Any) -> Training:
    return training_of(f"{__name__}:small_gpt", tokens=128, batch=4, **options)


CASES = [
    *(("sgd", parts) for parts in ((), PARTS, ("weights",), ("state",), ("activations",))),
    *(("adamw", ()), ("adamw", PARTS), ("muon", PARTS)),
]


@pytest.mark.parametrize(("optimizer", "parts"), CASES)
def test_the_planned_peak_is_the_measured_one(optimizer: str, parts: tuple[str, ...]) -> None:
    training = gpt_training(optimizer=optimizer, step_in_backward=optimizer == "adamw")
    planned = plan_memory(training, frozenset(parts), "cpu")
    measured = measure_step(training, frozenset(parts), CPU)
    assert planned.phase == measured.phase
    assert planned.peak == pytest.approx(measured.peak, rel=ERROR)
    assert planned.weights == pytest.approx(measured.weights, rel=ERROR)
    assert planned.saved == pytest.approx(measured.saved, rel=ERROR)
    # Squares of gradients have twice their exponents' range, and are not Gaussian.
    assert planned.state == pytest.approx(
        measured.state, rel=0.08 if optimizer == "adamw" else ERROR
    )


def test_gradients_that_wait_for_a_step_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    # Few tokens, so that gradients outweigh what is freed meanwhile.
    training = training_of(f"{__name__}:small_gpt", tokens=16, batch=1, step_in_backward=True)
    peaks = []
    for batch_bytes in (0, 1 << 30):
        chosen = functools.partial(step_in_backward, batch_bytes=batch_bytes)
        monkeypatch.setattr(optim, "step_in_backward", chosen)
        planned = plan_memory(training, ALL, "cpu")
        assert planned.peak == pytest.approx(measure_step(training, ALL, CPU).peak, rel=ERROR)
        peaks.append(planned.peak)
    assert peaks[0] < 0.95 * peaks[1]


@pytest.mark.parametrize("parts", [frozenset(), ALL])
def test_a_model_that_was_measured_is_gone(parts: frozenset[str]) -> None:
    """Else it counts in the next one's peak on a GPU."""
    built: list[weakref.ref[nn.Module]] = []

    def build() -> nn.Module:
        model = small_gpt()
        built.append(weakref.ref(model))
        return model

    training = dataclasses.replace(gpt_training(step_in_backward=True), build=build)
    measure_step(training, parts, CPU)
    gc.collect()
    assert [model() for model in built] == [None]


def test_what_lct_saves() -> None:
    training = gpt_training()
    dense, lct = (plan_memory(training, parts) for parts in (frozenset[str](), ALL))
    assert lct.weights < 0.7 * dense.weights and lct.state < 0.7 * dense.state
    assert lct.saved < 0.8 * dense.saved
    assert lct.peak < 0.85 * dense.peak
    # On CUDA torch's optimizers hold lists of temporaries, and LCT's step in place.
    adam = training_of(f"{__name__}:small_gpt", tokens=16, batch=1, optimizer="adamw")
    on_cuda, on_cpu = (plan_memory(adam, frozenset(), device) for device in ("cuda", "cpu"))
    assert on_cuda.peak > on_cpu.peak
    assert plan_memory(adam, ALL, "cuda").peak < plan_memory(adam, ALL, "cpu").peak


@pytest.mark.parametrize("checkpointing", [False, True])
def test_models_of_transformers(checkpointing: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=512,
        use_cache=False,
    )
    config.save_pretrained(tmp_path)
    training = training_of(
        str(tmp_path), tokens=128, batch=2, step_in_backward=True, checkpointing=checkpointing
    )
    for parts in (frozenset[str](), ALL):
        planned, measured = plan_memory(training, parts, "cpu"), measure_step(training, parts, CPU)
        # Some of what norms and gates give out is wider than Gaussian values, and spills.
        assert planned.peak == pytest.approx(measured.peak, rel=0.05)
        assert planned.saved == pytest.approx(measured.saved, rel=0.1)
    full = plan_memory(training_of(str(tmp_path), tokens=128, batch=2), frozenset(), "cpu")
    if checkpointing:
        assert plan_memory(training, frozenset(), "cpu").saved < 0.7 * full.saved


class Kernels(nn.Module):
    """Functions that CUDA has one kernel for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(F.rms_norm(x, (64,), self.weight), 0.1)
        heads = x.view(2, 128, 4, 16).transpose(1, 2)
        masked = F.scaled_dot_product_attention(heads, heads, heads, torch.ones(128, 128))
        if (masked > 0).all():
            masked = masked + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return masked.sum()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_kernels_are_those_of_the_device(device: str) -> None:
    def make_batch(device: torch.device) -> torch.Tensor:
        return torch.randn(2, 128, 64, dtype=BF16, device=device)

    with torch.device("meta"):
        training = Training(lambda: Kernels().to(BF16), make_batch, lambda m, x: m.loss(x))
    before = F.dropout, F.rms_norm, F.scaled_dot_product_attention
    with torch.device("meta"):
        planned = plan_memory(training, frozenset(), device)
    assert before == (F.dropout, F.rms_norm, F.scaled_dot_product_attention)
    attention_matrix = 2 * 4 * 128 * 128 * 4
    assert planned.saved < 2 * attention_matrix, "fused attention saves none"


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"must be one of qwen3-4b, .* got 'gpt-17'"):
        training_of("gpt-17", tokens=8, batch=1)
    with pytest.raises(ValueError, match="optimizer must be one of sgd, adamw, muon, got 'lamb'"):
        gpt_training(optimizer="lamb")
    with pytest.raises(ValueError, match=r"gradient_checkpointing_enable, got ByteGpt"):
        plan_memory(gpt_training(checkpointing=True))
    with pytest.raises(ValueError, match="device_type must be cpu or cuda, got 'mps'"):
        plan_memory(gpt_training(), device_type="mps")
    with pytest.raises(ValueError, match=r"parts must be among .*, got gradients"):
        plan_memory(gpt_training(), frozenset({"gradients"}))


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    model = f"{__name__}:small_gpt"
    arguments = ["plan", model, "--tokens", "64", "--check-device", "cpu", "--json", str(path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "lower with LCT" in result.stdout and "error of the planned peak" in result.stdout
    plan = json.loads(path.read_text())
    assert plan["settings"]["planned_for"] == "cpu"
    for arm in ("dense", "lct"):
        assert abs(plan[arm]["error"]) < ERROR
    wrong = CliRunner().invoke(app, ["plan", model, "--compress", "weights,gradients"])
    assert wrong.exit_code == 1 and "got 'weights,gradients'" in wrong.output


def test_the_command_for_a_gpu() -> None:
    result = CliRunner().invoke(app, ["plan", f"{__name__}:small_gpt", "--tokens", "64"])
    assert result.exit_code == 0, result.output
    assert "overflow arena" in result.stdout and "kernels' workspaces" in result.stdout


@pytest.mark.gpu
def test_a_measured_model_leaves_no_memory_behind() -> None:
    training = training_of("byte-gpt-cuda", tokens=256, batch=1, step_in_backward=True)
    cuda = torch.device("cuda")
    measure_step(training, frozenset(), cuda)  # what libraries keep
    before = torch.cuda.memory_allocated()
    measure_step(training, frozenset(), cuda)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [frozenset(), ALL])
def test_the_planned_peak_on_a_gpu(parts: frozenset[str]) -> None:
    """A model large enough for the allocator's rounding and workspaces not to matter."""
    from lct.bench.planning import WORKSPACE_BYTES, arena_bytes

    gc.collect()
    before = torch.cuda.memory_allocated()  # among it an arena that other tests have grown
    training = training_of("byte-gpt-cuda", tokens=1024, batch=8)
    planned = plan_memory(training, parts)
    measured = measure_step(training, parts, torch.device("cuda"))
    peak = planned.peak + WORKSPACE_BYTES + arena_bytes(bool(parts))
    # On an H200 the plan without LCT was 15 % too low, why is not known.
    assert peak == pytest.approx(measured.peak - before, rel=0.2)
