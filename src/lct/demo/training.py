"""Training of the demo's model: one loop, with the few lines that switch LCT on."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .. import compress_, compress_activations, optim
from ..bench.models.byte_gpt import SIZES, ByteGpt, GptSize
from .data import Corpus
from .live import StepMemory, StepMeter

WARM_UP_SHARE = 0.1  # of the steps: the rate rises, then falls to zero along a cosine
# Not timed: kernels are compiled, allocators and caches fill.
UNTIMED_STEPS = 2
HELD_OUT_BATCHES = 4


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how. ``batch``: sequences of ``size.context`` bytes a step."""

    size: GptSize
    batch: int
    num_steps: int
    lr: float
    momentum: float = 0.9
    nesterov: bool = True
    max_norm: float = 1.0
    seed: int = 20261130


RECIPES = {
    "cpu": Recipe(SIZES["cpu"], batch=8, num_steps=50, lr=0.1),
    "cuda": Recipe(SIZES["cuda"], batch=16, num_steps=200, lr=0.1),
}


@dataclass
class Run:
    """What one training run leaves. Tensors are on the CPU, plain, in the order of their names."""

    losses: list[float] = field(default_factory=list)
    held_out_loss: float = math.nan
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer_state: dict[str, torch.Tensor] = field(default_factory=dict)
    weight_bytes: int = 0
    optimizer_state_bytes: int = 0
    memory: StepMemory = field(default_factory=StepMemory)
    step_seconds: float = math.nan


OnStep = Callable[[int, float, float], None]  # number of the step, loss, seconds


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Kernels whose results do not depend on the order in which threads finish."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # It would write every new tensor twice, and no result here depends on what was not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def train(
    recipe: Recipe, corpus: Corpus, device: torch.device, *, with_lct: bool, on_step: OnStep
) -> Run:
    """Train from ``recipe.seed`` on; everything but the storage of tensors is the same with LCT."""
    with deterministic():
        run = _train(recipe, corpus, device, with_lct, on_step)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return run


def _train(
    recipe: Recipe, corpus: Corpus, device: torch.device, with_lct: bool, on_step: OnStep
) -> Run:
    torch.manual_seed(recipe.seed)
    model: ByteGpt = ByteGpt(recipe.size).to(device, torch.bfloat16)
    if with_lct:
        compress_(model)
    sgd = optim.SGD if with_lct else torch.optim.SGD
    save = compress_activations if with_lct else contextlib.nullcontext
    optimizer = sgd(
        model.parameters(), recipe.lr, momentum=recipe.momentum, nesterov=recipe.nesterov
    )

    run = Run()
    seconds: list[float] = []
    batches = torch.Generator().manual_seed(recipe.seed)
    length = recipe.size.context + 1
    for step in range(recipe.num_steps):
        tokens = corpus.batch(corpus.train, recipe.batch, length, batches).to(device)
        _set_rate(optimizer, recipe, step)
        meter: StepMeter | None = None
        if step == recipe.num_steps - 1:
            meter = StepMeter(device, model, optimizer, tokens)
        started = time.perf_counter()
        with meter or contextlib.nullcontext():
            with save():
                loss = model.loss(tokens)
            _end_phase(meter)
            loss.backward()
            _end_phase(meter)
            nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm)
            optimizer.step()
            optimizer.zero_grad()
            _end_phase(meter)
        run.losses.append(loss.item())
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
        on_step(step, run.losses[-1], seconds[-1])
        if meter is not None:
            run.memory = meter.memory
    # The last step is slower for being measured.
    timed = seconds[UNTIMED_STEPS:-1] or seconds[:1]
    run.step_seconds = statistics.median(timed)

    run.weight_bytes = sum(_nbytes(parameter) for parameter in model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    run.optimizer_state_bytes = sum(_nbytes(value) for value in states if value is not None)
    run.held_out_loss = _held_out_loss(model, recipe, corpus, device)
    run.weights = {name: tensor.cpu() for name, tensor in sorted(model.state_dict().items())}
    run.optimizer_state = dict(_plain_states(model, optimizer))
    return run


def _end_phase(meter: StepMeter | None) -> None:
    if meter is not None:
        meter.end_phase()


def _set_rate(optimizer: torch.optim.Optimizer, recipe: Recipe, step: int) -> None:
    warm_up = max(1, round(WARM_UP_SHARE * recipe.num_steps))
    rise = min(1.0, (step + 1) / warm_up)
    fall = 0.5 + 0.5 * math.cos(math.pi * step / recipe.num_steps)
    for group in optimizer.param_groups:
        group["lr"] = recipe.lr * rise * fall


def _nbytes(tensor: Any) -> int:
    """Bytes that a weight or state is held in: those of the payload where it is compressed."""
    return getattr(tensor, "compressed", tensor).nbytes


def _plain_states(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    names = [name for name, _ in model.named_parameters()]
    for index, state in sorted(optimizer.state_dict()["state"].items()):
        for key, value in sorted(state.items()):
            if isinstance(value, torch.Tensor):
                yield f"{names[index]}.{key}", value.cpu()


@torch.no_grad()
def _held_out_loss(model: ByteGpt, recipe: Recipe, corpus: Corpus, device: torch.device) -> float:
    generator = torch.Generator().manual_seed(recipe.seed)
    length = recipe.size.context + 1
    total = 0.0
    for _ in range(HELD_OUT_BATCHES):
        tokens = corpus.batch(corpus.held_out, recipe.batch, length, generator)
        total += model.loss(tokens.to(device)).item()
    return total / HELD_OUT_BATCHES
