"""What ``lct bench train`` trains: a case, and its model, optimizers and batches."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .. import (
    CompressedTensor,
    CompressedWeight,
    compress_,
    decode,
    memory_report,
    reserve_arena,
)
from ..config import arena_limit_bytes
from ..memory import LiveBytes
from ..optim import step_in_backward
from .models.causal_lm import CausalLm, materialize
from .models.nanogpt import SIZES, NanoGpt
from .models.transformers_models import SHAPES, TransformersLm
from .tokens import GPT2_VOCABULARY, Kind, Tokens
from .variants import CONFIGURATIONS, OPTIMIZERS, VARIANTS, OptimizerRow, compile_

MIB = 1 << 20
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
                tokens="gpt2" if size.vocabulary >= GPT2_VOCABULARY else "bytes",
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
    gradients add up. ``itemized``: one more step says what its peak of memory consists of.
    ``identity``: deterministic kernels, and hashes of weights and state at the end. ``cuda_graph``:
    after the warm-up a step is captured, and later ones are its replays. ``memory_limit_mib``: the
    memory of the card to imitate.
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
    itemized: bool = False
    identity: bool = False
    cuda_graph: bool = False
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
        if self.cuda_graph and VARIANTS[self.variant].saving.offload:
            return "copies to the host are not captured"
        if self.model in SIZES and self.sequence > SIZES[self.model].context:
            return f"{self.model} has a context of {SIZES[self.model].context} tokens"
        return None


def missing_package(name: str) -> str | None:
    """Why the model of a row cannot be built; None where it can."""
    if name in SHAPES and importlib.util.find_spec("transformers") is None:
        return f"{name} needs transformers: pip install 'lct-torch[bench]'"
    return None


def full_depth(model: str) -> int:
    """Layers of the model that the shape is of."""
    return (SHAPES[model] if model in SHAPES else SIZES[model]).num_layers


def build_model(name: str, num_layers: int | None = None) -> CausalLm:
    """The model of a row of ``MODELS``, on the meta device."""
    if name in SHAPES:
        return TransformersLm(SHAPES[name], num_layers or SHAPES[name].num_layers)
    return NanoGpt(SIZES[name], num_layers or SIZES[name].num_layers)


def device_of(case: Case) -> torch.device:
    """With its index: some calls of torch.cuda ask for one."""
    if case.device == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(case.device)


class Run:
    """A model, its optimizers and its batches: what a case trains."""

    def __init__(self, case: Case, tokens: Tokens) -> None:
        self.case = case
        self.variant = VARIANTS[case.variant]
        self.configuration = CONFIGURATIONS[case.configuration]
        self.device = device_of(case)
        self.tokens = tokens
        self.losses: list[torch.Tensor] = []
        self.seen: Any = None  # what compress_activations counted in the last forward
        self._captured: tuple[torch.cuda.CUDAGraph, list[torch.Tensor], torch.Tensor] | None = None

        self.model = build_model(case.model, case.num_layers)
        if tokens.vocabulary > self.model.vocabulary:
            raise ValueError(
                f"{case.model} takes tokens below {self.model.vocabulary}, got {tokens.kind} "
                f"tokens below {tokens.vocabulary}"
            )
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
        compile_(self.model, self.configuration, case.backend, same_rounding=case.identity)
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
        if self._captured is None:
            self.losses.append(self._train(batches))
            return
        graph, inputs, loss = self._captured
        for old, new in zip(inputs, batches, strict=True):
            old.copy_(new)
        graph.replay()
        self.losses.append(loss.clone())

    def warm_up(self) -> None:
        """The steps before anything is timed; a captured run's on a stream of their own."""
        for _ in range(self.case.warm_up):
            if self.case.cuda_graph:
                with _aside(self.device):
                    self.next_step()
            else:
                self.next_step()

    def capture(self) -> None:
        """Capture a step into a CUDA graph: from now on steps are its replays."""
        inputs = self.batches()
        storage = self.variant.storage
        if storage.weights or storage.state or storage.activations:
            device_bytes = torch.cuda.get_device_properties(self.device).total_memory
            reserve_arena(arena_limit_bytes(device_bytes), self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self._train(inputs)
        self._captured = graph, inputs, loss

    def _train(self, batches: Sequence[torch.Tensor]) -> torch.Tensor:
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
        return total

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
        # A dispatch mode does not see into what is compiled.
        if self.configuration.compiled == "none" and not self.case.optimizer_row.compiles:
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


@contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """On a stream of its own, as work before a capture must be."""
    current, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    aside.wait_stream(current)
    with torch.cuda.stream(aside):
        yield
    current.wait_stream(aside)


def _bytes(value: torch.Tensor | CompressedTensor) -> memoryview:
    if isinstance(value, CompressedWeight):
        dense = value.dense()
    elif isinstance(value, CompressedTensor):
        dense = decode(value)
    else:
        dense = value.detach()
    return dense.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data
