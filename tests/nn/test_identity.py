"""Whole runs with LCT and without: losses, gradient norms, weights, buffers, state, every bit."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config

import lct
from lct.nn import CompressedWeight
from lct.tensor import CompressedTensor
from models import KINDS, checkpoint_blocks
from training import (
    BF16,
    assert_same_losses,
    assert_same_model,
    assert_same_state,
    store_small_tensors,
)

# cuBLAS is deterministic with a workspace of its own for each stream; it reads this once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
STEPS = 50
CPU_STEPS = 4  # of the setups that are not run in full there
# Weights of fewer values than this may stay dense: a class token, a head of a few rows.
MIN_VALUES = 512


@dataclass(frozen=True)
class Setup:
    model: str
    optimizer: str
    checkpointing: str
    activations: bool
    accumulate: int
    clip: float | None
    scheduler: str

    def __str__(self) -> str:
        return "-".join(str(getattr(self, field.name)) for field in fields(self))


# Every two values of two columns meet in a row (a test counts).
SETUPS = [
    Setup("byte_gpt", "sgd", "none", False, 2, None, "one-cycle"),
    Setup("byte_gpt", "adamw", "non-reentrant", True, 1, 1.0, "none"),
    Setup("byte_gpt", "muon", "reentrant", True, 1, None, "cosine"),
    Setup("qwen3", "sgd", "reentrant", False, 2, 1.0, "cosine"),
    Setup("qwen3", "adamw", "non-reentrant", False, 2, None, "none"),
    Setup("qwen3", "muon", "none", True, 1, 1.0, "one-cycle"),
    Setup("llama", "sgd", "reentrant", True, 2, None, "none"),
    Setup("llama", "adamw", "none", False, 1, 1.0, "cosine"),
    Setup("llama", "muon", "non-reentrant", False, 2, 1.0, "one-cycle"),
    Setup("vit", "sgd", "non-reentrant", True, 1, 1.0, "cosine"),
    Setup("vit", "adamw", "reentrant", False, 2, 1.0, "one-cycle"),
    Setup("vit", "muon", "none", True, 1, None, "none"),
    Setup("cnn", "sgd", "non-reentrant", False, 2, 1.0, "one-cycle"),
    Setup("cnn", "adamw", "none", True, 1, None, "cosine"),
    Setup("cnn", "muon", "reentrant", False, 1, 1.0, "none"),
]


def test_the_table_covers_all_pairs() -> None:
    names = [field.name for field in fields(Setup)]
    values = {name: {getattr(setup, name) for setup in SETUPS} for name in names}
    assert values["model"] == set(KINDS)
    for a, b in itertools.combinations(names, 2):
        met = {(getattr(setup, a), getattr(setup, b)) for setup in SETUPS}
        assert met == set(itertools.product(values[a], values[b])), f"{a} and {b}"


@dataclass
class Run:
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    losses: list[torch.Tensor]
    encoded: int  # saved tensors that were compressed


def _optimizers(name: str, model: nn.Module, source: Any) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    if name == "sgd":
        return [source.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)]
    if name == "adamw":
        return [source.AdamW(parameters, lr=2e-3, weight_decay=0.1)]
    matrices = [p for p in parameters if p.dim() == 2]
    others = [p for p in parameters if p.dim() != 2]
    return [source.Muon(matrices, lr=0.01), source.AdamW(others, lr=2e-3)]


def _scheduler(name: str, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    schedulers = torch.optim.lr_scheduler
    if name == "one-cycle":
        rates = [2 * group["lr"] for group in optimizer.param_groups]
        # Muon has no momentum that could be cycled under the names that torch knows.
        cycle = not isinstance(optimizer, torch.optim.Muon)
        return schedulers.OneCycleLR(optimizer, rates, total_steps=steps + 1, cycle_momentum=cycle)
    if name == "cosine":
        return schedulers.CosineAnnealingLR(optimizer, steps)
    return schedulers.ConstantLR(optimizer, 1.0)


def _compile_layers(model: nn.Module, backend: str) -> None:
    (layers,) = (m for m in model.modules() if isinstance(m, nn.ModuleList))
    for layer in layers:
        layer.compile(backend=backend)


def _run(setup: Setup, device: str, steps: int, with_lct: bool, backend: str | None = None) -> Run:
    kind = KINDS[setup.model]
    torch.manual_seed(0)
    model = kind.build().to(device, BF16).train()
    if setup.checkpointing != "none":
        checkpoint_blocks(kind, model, setup.checkpointing == "reentrant")
    if with_lct:
        lct.compress_(model)
        _assert_compressed(model)
    if backend is not None:
        _compile_layers(model, backend)
    optimizers = _optimizers(setup.optimizer, model, lct.optim if with_lct else torch.optim)
    schedulers = [_scheduler(setup.scheduler, optimizer, steps) for optimizer in optimizers]
    batches = iter(kind.batches(steps * setup.accumulate))
    losses = []
    encoded = 0
    save = lct.compress_activations if with_lct and setup.activations else contextlib.nullcontext
    torch.manual_seed(1)  # dropout
    for _ in range(steps):
        for _ in range(setup.accumulate):
            batch = tuple(tensor.to(device) for tensor in next(batches))
            with save() as saved:
                loss = kind.loss(model, batch) / setup.accumulate
            loss.backward()
            losses.append(loss.detach())
            encoded += saved.encoded if saved is not None else 0
        if setup.clip is not None:
            losses.append(nn.utils.clip_grad_norm_(model.parameters(), setup.clip))
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return Run(model, optimizers, losses, encoded)


def _assert_compressed(model: nn.Module) -> None:
    large = [p for p in model.parameters() if p.dim() >= 2 and p.numel() >= MIN_VALUES]
    assert large and all(isinstance(p, CompressedWeight) for p in large)
    assert sum(p.numel() for p in large) > 0.95 * sum(p.numel() for p in model.parameters())


def _assert_took_part(setup: Setup, run: Run, steps: int) -> None:
    """What LCT stands for was compressed to the end, and the run was a training run."""
    _assert_compressed(run.model)
    for optimizer in run.optimizers:
        for param, state in optimizer.state.items():
            if param.dim() >= 2 and param.numel() >= MIN_VALUES:
                first = "exp_avg" if "exp_avg" in state else "momentum_buffer"
                assert isinstance(state[first], CompressedTensor)
                for held in (state[first], param.compressed):
                    # What spills of weights this small is another matter: chunks have 8 KiB.
                    assert held.payload.nbytes < held.dense_nbytes
    saves = steps * setup.accumulate
    assert (run.encoded >= saves) == setup.activations
    assert all(loss.isfinite() for loss in run.losses)


def check(setup: Setup, device: str, steps: int, backend: str | None = None) -> None:
    """``backend``: of the compiler that takes every layer by itself, in both runs."""
    expected = _run(setup, device, steps, False, backend)
    got = _run(setup, device, steps, True, backend)
    _assert_took_part(setup, got, steps)
    assert_same_losses(expected.losses, got.losses)
    assert_same_model(expected.model, got.model)
    for a, b in zip(expected.optimizers, got.optimizers, strict=True):
        assert_same_state(a, b)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    store_small_tensors(monkeypatch)


@pytest.fixture
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_a_run_on_the_cpu(setup: Setup) -> None:
    long = setup.optimizer == "adamw"
    check(setup, "cpu", STEPS // setup.accumulate if long else CPU_STEPS)


@pytest.mark.gpu
@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_a_run_on_cuda(setup: Setup) -> None:
    check(setup, "cuda", STEPS)


COMPILED = [
    Setup("byte_gpt", "muon", "none", True, 1, 1.0, "cosine"),
    Setup("qwen3", "sgd", "none", True, 2, None, "one-cycle"),
    Setup("llama", "adamw", "none", False, 1, None, "cosine"),
    Setup("vit", "adamw", "none", True, 1, 1.0, "none"),
]


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    # Without it Inductor keeps the results of what it fuses in FP32, and what it fuses decides.
    with inductor_config.patch(emulate_precision_casts=True):
        yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("setup", COMPILED, ids=str)
def test_a_compiled_run_on_the_cpu(setup: Setup) -> None:
    check(setup, "cpu", CPU_STEPS, "aot_eager")


@pytest.mark.gpu
@pytest.mark.usefixtures("_deterministic", "_fresh_compiler")
@pytest.mark.parametrize("setup", COMPILED, ids=str)
def test_a_compiled_run_on_cuda(setup: Setup) -> None:
    check(setup, "cuda", STEPS, "inductor")
