"""``lct bench train``: memory and time of whole training steps, with LCT and with its alternatives.

A ``Case`` is one run. ``measure`` trains it in this process; ``measure_apart`` in a process of its
own on CUDA, so that no run sees what another one left in the allocator, in the arena or in the
compiler. Running out of memory is a result.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib.util
import math
import struct
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import (
    ArenaExhaustedError,
    CompressedTensor,
    CompressedWeight,
    compress_,
    decode,
    memory_report,
)
from ..memory import LiveBytes
from ..optim import step_in_backward
from .isolate import ChildError, describe_error, run_isolated
from .models.causal_lm import CausalLm, materialize
from .models.nanogpt import SIZES, NanoGpt
from .models.transformers_models import SHAPES, TransformersLm
from .profile import profile_steps
from .timing import summarize
from .tokens import Kind, Tokens
from .variants import CONFIGURATIONS, DENSE, OPTIMIZERS, VARIANTS, OptimizerRow, compile_

MIB = 1 << 20
# What a CUDA context takes of a card, which torch's allocator does not see: the same for all.
CONTEXT_MIB = 600
OUT_OF_MEMORY = "out of memory"
HELD_OUT_BATCHES = 8
HELD_OUT_SEED = 1 << 40  # far from the seeds of training batches


@dataclass(frozen=True)
class ModelRow:
    """How a model is measured where the command does not say. ``chunk_tokens``: of the loss."""

    name: str
    sequences: tuple[int, ...]
    micro_batches: tuple[int, ...]
    micro_steps: int
    chunk_tokens: int
    tokens: Kind


MODELS = {
    row.name: row
    for row in (
        *(
            ModelRow(name, (500, 1000), (1,), micro_steps=1, chunk_tokens=256, tokens="random")
            for name in SHAPES
        ),
        *(
            ModelRow(
                name,
                (size.context,),
                (8, 16, 32),
                micro_steps=4,
                chunk_tokens=2048,
                tokens="gpt2",
            )
            for name, size in SIZES.items()
        ),
    )
}
SEARCHED_MODELS = ("qwen3-4b", "llama-2-7b", "qwen2.5-7b", "qwen3-8b", "llama-3-8b")


@dataclass(frozen=True)
class Case:
    """One training run. Steps: ``warm_up`` untimed, ``steps`` timed, ``profiled`` under a profiler.

    ``micro_steps``: forward and backward passes a step, over ``micro_batch`` sequences each, whose
    gradients add up. ``identity``: deterministic kernels, and hashes of weights and state at the
    end. ``memory_limit_mib``: what a card with so much memory would leave to torch.
    """

    model: str
    configuration: str
    variant: str
    sequence: int
    micro_batch: int = 1
    micro_steps: int = 1
    optimizer: str = "sgd"
    device: str = "cuda"
    warm_up: int = 3
    steps: int = 8
    profiled: int = 1
    identity: bool = False
    memory_limit_mib: int | None = None
    num_layers: int | None = None
    lr: float | None = None
    expandable_segments: bool = False
    backend: str = "inductor"
    seed: int = 20261130

    @property
    def optimizer_row(self) -> OptimizerRow:
        return VARIANTS[self.variant].optimizer or OPTIMIZERS[self.optimizer]

    def reason_against(self) -> str | None:
        """Why this case makes no sense; None where it does."""
        budget = VARIANTS[self.variant].saving.budget
        if budget < 1 and CONFIGURATIONS[self.configuration].compiled == "none":
            return "a memory budget is one of compiled graphs"
        if self.model in SIZES and self.sequence > SIZES[self.model].context:
            return f"{self.model} has a context of {SIZES[self.model].context} tokens"
        return None


def missing_package(name: str) -> str | None:
    """Why the model of a row cannot be built; None where it can."""
    if name in SHAPES and importlib.util.find_spec("transformers") is None:
        return f"{name} needs transformers: pip install 'lct-torch[bench]'"
    return None


def build_model(name: str, num_layers: int | None = None) -> CausalLm:
    """The model of a row of ``MODELS``, on the meta device."""
    if name in SHAPES:
        return TransformersLm(SHAPES[name], num_layers or SHAPES[name].num_layers)
    return NanoGpt(SIZES[name], num_layers or SIZES[name].num_layers)


class Run:
    """A model, its optimizers and its batches: what a case trains."""

    def __init__(self, case: Case, tokens: Tokens) -> None:
        self.case = case
        self.variant = VARIANTS[case.variant]
        self.configuration = CONFIGURATIONS[case.configuration]
        self.device = _device(case)
        self.tokens = tokens
        self.losses: list[torch.Tensor] = []
        self.seen: Any = None  # what compress_activations counted in the last forward

        self.model = build_model(case.model, case.num_layers)
        weights = self.variant.storage.weights
        materialize(self.model, self.device, case.seed, compress_ if weights else None)
        if self.configuration.chunked_loss:
            self.model.chunk_tokens = MODELS[case.model].chunk_tokens
        cuda = self.device.type == "cuda"
        make = case.optimizer_row.make
        self.optimizers = make(self.model, self.variant.storage.state, cuda)
        if case.lr is not None:
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = case.lr
        self._stepping = [step_in_backward(optimizer) for optimizer in self.optimizers]
        compile_(self.model, self.configuration, case.backend)
        if self.variant.saving.checkpoint:
            self.model.checkpoint_layers_()

    def batches(self) -> list[torch.Tensor]:
        """The micro-batches of the next step, on the device."""
        case = self.case
        return [
            self.tokens.batch(
                case.micro_batch,
                case.sequence + 1,
                self.model.vocabulary,
                case.seed + len(self.losses) * case.micro_steps + i,
            ).to(self.device)
            for i in range(case.micro_steps)
        ]

    def step(self, batches: Sequence[torch.Tensor]) -> None:
        """One step, the optimizers' within its last backward. Waits for nothing."""
        total: Any = 0
        for i, batch in enumerate(batches):
            with ExitStack() as adding:
                if i < len(batches) - 1:
                    for stepping in self._stepping:
                        adding.enter_context(stepping.accumulate())
                with self.variant.save() as seen:
                    loss = self.model(batch) / len(batches)
                loss.backward()
            total = total + loss.detach()
            self.seen = seen
        self.losses.append(total)

    def next_step(self) -> None:
        """``step`` on the next batches."""
        self.step(self.batches())

    def timed_step(self) -> float:
        """Milliseconds of one step, from an idle device to an idle device."""
        batches = self.batches()
        self._wait()
        start = time.perf_counter_ns()
        self.step(batches)
        self._wait()
        return (time.perf_counter_ns() - start) / 1e6

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def loss_values(self) -> list[float]:
        """Losses of all steps so far. ValueError for one that is not finite."""
        values = [float(loss) for loss in self.losses]
        wrong = [f"step {i}: {value}" for i, value in enumerate(values) if not math.isfinite(value)]
        if wrong:
            raise ValueError(f"losses must be finite, or the run measures nothing: {wrong[0]}")
        return values

    def peaks(self) -> dict[str, float | None]:
        """MiB: the allocator's peaks on CUDA; on the CPU live tensors over one more step."""
        if self.device.type == "cuda":
            statistics = torch.cuda.memory_stats(self.device)
            return {
                f"peak_{name}_mib": statistics[f"{name}_bytes.all.peak"] / MIB
                for name in ("allocated", "active", "reserved")
            }
        allocated = None
        if self.configuration.compiled == "none":  # a dispatch mode does not see into the others
            batches = self.batches()
            with LiveBytes(self.model, *self.optimizers, batches) as live:
                self.step(batches)
            allocated = live.peak_bytes / MIB
        return {
            "peak_allocated_mib": allocated,
            "peak_active_mib": None,
            "peak_reserved_mib": None,
        }

    def held(self) -> dict[str, float]:
        """MiB that weights, optimizer state and the overflow arena take between steps."""
        reports = [memory_report(self.model, optimizer) for optimizer in self.optimizers]
        model_rows = {"weights", "gradients", "buffers"}
        state = sum(
            row.stored_bytes
            for report in reports
            for row in report.rows
            if row.name not in model_rows
        )
        weights = sum(row.stored_bytes for row in reports[0].rows if row.name == "weights")
        return {
            "weights_mib": weights / MIB,
            "state_mib": state / MIB,
            "arena_mib": reports[0].arena_bytes / MIB,
        }

    def held_out_loss(self) -> float:
        """Mean loss of a few batches of held-out text, or of random tokens not trained on."""
        case = self.case
        total = 0.0
        with torch.no_grad():
            for i in range(HELD_OUT_BATCHES):
                batch = self.tokens.batch(
                    case.micro_batch,
                    case.sequence + 1,
                    self.model.vocabulary,
                    HELD_OUT_SEED + i,
                    held_out=True,
                )
                total += float(self.model(batch.to(self.device)))
        return total / HELD_OUT_BATCHES

    def hashes(self) -> dict[str, str]:
        """SHA-256 of all weights and of all state, decoded one tensor at a time."""
        weights, state = hashlib.sha256(), hashlib.sha256()
        for parameter in self.model.parameters():
            weights.update(_bytes(parameter))
            for optimizer in self.optimizers:
                for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                    if isinstance(value, (torch.Tensor, CompressedTensor)):
                        state.update(key.encode())
                        state.update(_bytes(value))
        return {"weights_sha256": weights.hexdigest(), "state_sha256": state.hexdigest()}


def _bytes(value: torch.Tensor | CompressedTensor) -> bytes:
    if isinstance(value, CompressedWeight):
        dense = value.dense()
    elif isinstance(value, CompressedTensor):
        dense = decode(value)
    else:
        dense = value
    return dense.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()


def hash_losses(losses: Sequence[float]) -> str:
    """SHA-256 of the losses as FP32, little-endian."""
    return hashlib.sha256(struct.pack(f"<{len(losses)}f", *losses)).hexdigest()


def measure(case: Case, tokens: Tokens) -> dict[str, Any]:
    """Train ``case`` and give its row; ``completed`` is False where memory ran out."""
    row = _blank_row(case, tokens)
    try:
        with _setting(case):
            return row | _measure(case, tokens)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return row | {"completed": False, "error": OUT_OF_MEMORY}


def measure_apart(case: Case, tokens: Tokens) -> dict[str, Any]:
    """``measure``, in a process of its own on CUDA; the row's ``error`` says what it raised."""
    return _blank_row(case, tokens) | _apart(measure, case, tokens)


def _apart(function: Callable[..., dict[str, Any]], case: Case, *args: Any) -> dict[str, Any]:
    # One run that breaks must not lose the others' figures: it is reported, and the command fails.
    try:
        if case.device.startswith("cuda"):
            return run_isolated(function, case, *args)
        return function(case, *args)
    except ChildError as error:
        return {"completed": False, "error": str(error), "traceback": error.traceback}
    except Exception as error:
        text = traceback.format_exc()
        return {"completed": False, "error": describe_error(error), "traceback": text}


def _measure(case: Case, tokens: Tokens) -> dict[str, Any]:
    run = Run(case, tokens)
    for _ in range(case.warm_up):
        run.next_step()
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)
        torch.cuda.reset_peak_memory_stats(run.device)
    timing = summarize([run.timed_step() for _ in range(case.steps)])
    row: dict[str, Any] = {
        **run.peaks(),
        "step_ms_median": timing.median_ms,
        "step_ms_iqr": timing.iqr_ms,
        "tokens_per_s": _tokens_a_step(case) / timing.median_ms * 1e3,
    }
    if run.seen is not None and run.variant.storage.activations:
        row["activations"] = {
            "encoded": run.seen.encoded,
            "reused": run.seen.reused,
            "dense_mib": run.seen.dense_bytes / MIB,
            "stored_mib": run.seen.stored_bytes / MIB,
        }
    if case.profiled and run.device.type == "cuda":
        row |= profile_steps(run.next_step, case.profiled)
    losses = run.loss_values()
    row |= run.held() | {
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "loss_sha256": hash_losses(losses),
        "losses": len(losses),
    }
    if case.identity:
        row |= run.hashes() | {"validation_loss": run.held_out_loss()}
    return row | {"completed": True}


def measure_pairs(case: Case, tokens: Tokens, pairs: int) -> dict[str, Any]:
    """Steps of ``case`` and of the same without LCT, both alive on the device, in turn.

    Ratios are those of pairs, whose order alternates.
    """
    base = replace(case, variant=VARIANTS[case.variant].equals or DENSE)
    with _setting(case):
        runs = [Run(base, tokens), Run(case, tokens)]
        for run in runs:
            for _ in range(case.warm_up):
                run.next_step()
        times: list[list[float]] = [[], []]
        for pair in range(pairs):
            for which in (0, 1) if pair % 2 == 0 else (1, 0):
                times[which].append(runs[which].timed_step())
        busy: list[float | None] = [None, None]
        if case.profiled and runs[0].device.type == "cuda":
            busy = [profile_steps(run.next_step, case.profiled)["gpu_busy_ms"] for run in runs]
        hashes = [hash_losses(run.loss_values()) for run in runs]
    ratios = summarize([b / a for a, b in zip(*times, strict=True)])
    medians = [summarize(values) for values in times]
    return {
        "base": base.variant,
        "pairs": pairs,
        "base_step_ms_median": medians[0].median_ms,
        "step_ms_median": medians[1].median_ms,
        "ratio_median": ratios.median_ms,
        "ratio_iqr": ratios.iqr_ms,
        "base_gpu_busy_ms": busy[0],
        "gpu_busy_ms": busy[1],
        "gpu_busy_ratio": busy[1] / busy[0] if busy[0] and busy[1] else None,
        "base_loss_sha256": hashes[0],
        "loss_sha256": hashes[1],
        "completed": True,
        "error": None,
    }


def measure_pairs_apart(case: Case, tokens: Tokens, pairs: int) -> dict[str, Any]:
    """``measure_pairs``, in a process of its own on CUDA."""
    return _named(case) | _apart(measure_pairs, case, tokens, pairs) | _settings(case, tokens)


@contextlib.contextmanager
def _setting(case: Case) -> Iterator[None]:
    """The limits and the switches of a case; what it allocated is freed after it."""
    import torch._functorch.config
    import torch._inductor.config

    from ..demo.training import deterministic

    device = _device(case)
    if device.type == "cuda":
        if case.expandable_segments:
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        if case.memory_limit_mib is not None:
            limit = (case.memory_limit_mib - CONTEXT_MIB) * MIB
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    elif case.memory_limit_mib is not None:
        raise ValueError(f"a memory limit needs a CUDA device, got {case.device}")
    with ExitStack() as stack:
        budget = VARIANTS[case.variant].saving.budget
        stack.enter_context(torch._functorch.config.patch(activation_memory_budget=budget))
        if case.identity:
            stack.enter_context(torch._inductor.config.patch(emulate_precision_casts=True))
            stack.enter_context(deterministic())
        try:
            yield
        finally:
            torch.compiler.reset()
            gc.collect()


def is_out_of_memory(error: BaseException | None) -> bool:
    """True where the device's memory, or the overflow arena's, ran out, however it was wrapped."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, ArenaExhaustedError)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _device(case: Case) -> torch.device:
    """With its index: some calls of torch.cuda ask for one."""
    if case.device == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(case.device)


def _tokens_a_step(case: Case) -> int:
    return case.sequence * case.micro_batch * case.micro_steps


def _named(case: Case) -> dict[str, Any]:
    return {
        "model": case.model,
        "configuration": case.configuration,
        "variant": case.variant,
        "sequence": case.sequence,
        "micro_batch": case.micro_batch,
    }


def _blank_row(case: Case, tokens: Tokens) -> dict[str, Any]:
    """A row as it is before anything was measured: its keys, in their order."""
    measured = (
        *("peak_allocated_mib", "peak_active_mib", "peak_reserved_mib"),
        *("step_ms_median", "step_ms_iqr", "gpu_busy_ms", "tokens_per_s", "loss_sha256"),
    )
    row = {**_named(case), **dict.fromkeys(measured), "completed": False, "error": None}
    return row | _settings(case, tokens)


def _settings(case: Case, tokens: Tokens) -> dict[str, Any]:
    return {
        "optimizer": case.optimizer_row.name,
        "lossy": case.optimizer_row.lossy,
        "micro_steps": case.micro_steps,
        "num_layers": case.num_layers or _num_layers(case.model),
        "warm_up": case.warm_up,
        "steps": case.steps,
        "identity": case.identity,
        "memory_limit_mib": case.memory_limit_mib,
        "expandable_segments": case.expandable_segments,
        "tokens": tokens.kind,
        "tokens_sha256": tokens.sha256,
    }


def _num_layers(model: str) -> int:
    return (SHAPES[model] if model in SHAPES else SIZES[model]).num_layers


def differences(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Where variants with LCT part from the same runs without it, a line each; empty if nowhere.

    ``rows``: of ``measure`` with ``identity``. A variant whose counterpart is not among them is
    compared with nothing, which counts as a difference.
    """
    keys = ("loss_sha256", "weights_sha256", "state_sha256", "validation_loss")
    place = ("model", "configuration", "sequence", "micro_batch", "optimizer")
    found = {(*(row[k] for k in place), row["variant"]): row for row in rows}
    lines = []
    for row in rows:
        equals = VARIANTS[row["variant"]].equals
        if equals is None:
            continue
        base = found.get((*(row[k] for k in place), equals))
        if base is None or not (row["completed"] and base["completed"]):
            lines.append(f"{row['variant']}: it and {equals} must both complete to be compared")
            continue
        lines += [
            f"{row['model']} {row['configuration']} {row['sequence']}: {key} of {row['variant']} "
            f"is {row[key]}, of {equals} {base[key]}"
            for key in keys
            if row[key] != base[key]
        ]
    return lines
