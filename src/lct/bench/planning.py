"""What ``lct plan`` trains: models by name, file or factory; and the same step, measured."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import arena_host_bytes, arena_limit_bytes
from ..memory import LiveBytes
from ..plan import PHASES, StepBytes, Trainer, Training, live_step_bytes
from .models.byte_gpt import SIZES, ByteGpt
from .models.transformers_models import SHAPES, config_of

# What torch's allocator gives to cuBLAS: 32 MiB on Hopper, once for forward's thread and once for
# backward's (CUBLAS_WORKSPACE_CONFIG).
WORKSPACE_BYTES = 2 * (32 << 20)
GPU_BYTES = 80_000_000_000  # where there is no GPU to ask


BYTE_GPTS = {f"byte-gpt-{name}": size for name, size in SIZES.items()}


def training_of(model: str, *, tokens: int, batch: int, **options: Any) -> Training:
    """The training of ``model`` in BF16 on ``batch`` sequences of ``tokens`` tokens.

    ``model``: a name of ``SHAPES`` or ``BYTE_GPTS``, a transformers configuration (a file or
    a directory with ``config.json``), or ``module:factory``, a function without arguments that
    gives a module whose ``loss(tokens)`` takes int64 (batch, tokens + 1). ``options``: of
    ``Training``. ValueError for a model that is none of these.
    """
    build, loss, extra = _resolve(model)

    def make_batch(device: torch.device) -> torch.Tensor:
        # Small numbers are tokens of every vocabulary.
        return torch.randint(0, 64, (batch, tokens + extra), device=device)

    return Training(build, make_batch, loss, **options)


Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def _resolve(model: str) -> tuple[Callable[[], nn.Module], Loss, int]:
    """(factory, loss, tokens that a sequence has more than the model reads)."""
    if model in BYTE_GPTS:
        # The products of CPUs without BF16 instructions are no part of a plan.
        size = replace(BYTE_GPTS[model], products="native")
        return lambda: ByteGpt(size).to(torch.bfloat16), _own_loss, 1
    if model in SHAPES:
        shape = SHAPES[model]
        return (lambda: _from_config(config_of(shape, shape.num_layers))), _hf_loss, 0
    if Path(model).exists():
        path = Path(model)
        return (lambda: _from_config(_read_config(path))), _hf_loss, 0
    module, colon, factory = model.partition(":")
    if colon and module and factory:
        function = getattr(importlib.import_module(module), factory)
        return lambda: function().to(torch.bfloat16), _own_loss, 1
    known_names = ", ".join((*SHAPES, *BYTE_GPTS))
    raise ValueError(
        f"a model must be one of {known_names}, a file or directory with a transformers "
        f"configuration, or module:factory, got {model!r}"
    )


def _own_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model.loss(tokens)  # type: ignore[operator]


def _hf_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def _read_config(path: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path)


def _from_config(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def arena_bytes(compressed: bool) -> int:
    """What LCT's overflow arena grows to, on this machine's GPU or on one of ``GPU_BYTES``.

    An eighth of its limit where the host backs the rest, else half: more where data really spills.
    """
    if not compressed:
        return 0
    device_bytes = GPU_BYTES
    if torch.cuda.is_available():
        device_bytes = torch.cuda.get_device_properties(0).total_memory
    return arena_limit_bytes(device_bytes) // (8 if arena_host_bytes() else 2)


def measure_step(training: Training, parts: frozenset[str], device: torch.device) -> StepBytes:
    """The second step of a real run: live storages on the CPU, the allocator's peak on CUDA."""
    trainer = Trainer(training, parts, device, foreach=None)
    try:
        if device.type == "cpu":
            return live_step_bytes(trainer, LiveBytes())
        return _allocated_step_bytes(trainer, device)
    finally:
        trainer.close()
        del trainer
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _allocated_step_bytes(trainer: Trainer, device: torch.device) -> StepBytes:
    trainer.step(lambda phase: None)
    torch.cuda.synchronize(device)
    start, saved, peaks = torch.cuda.memory_allocated(device), 0, dict.fromkeys(PHASES, 0)

    def end_phase(phase: str) -> None:
        nonlocal saved
        if phase == "forward":
            saved = torch.cuda.memory_allocated(device) - start
        peaks[phase] = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)

    torch.cuda.reset_peak_memory_stats(device)
    trainer.step(end_phase)
    torch.cuda.synchronize(device)
    phase = max(peaks, key=lambda name: peaks[name])
    return StepBytes(*trainer.held(), saved, peaks[phase], phase)
