"""``plan_memory``: what a training step would hold at its peak, with LCT and without, by a trace.

The model is built and trained for two steps on torch's device ``meta``, where tensors have sizes
and no values, by the calls that train a real one; a dispatch mode counts the bytes of storages that
are alive. What depends on values is assumed: payloads have the sizes of Gaussian values, nothing
spills, and where a model asks for a value it is told 1 or True.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from . import optim
from .backends import meta
from .memory import LiveBytes
from .nn import CompressedWeight, compress_, compress_activations
from .report import memory_report

aten = torch.ops.aten
PARTS = ("weights", "state", "activations")
PHASES = ("forward", "backward", "step")


@dataclass(frozen=True)
class OptimizerRow:
    """How the optimizer of a plan is made: from ``torch.optim`` or ``lct.optim``, by its ``name``.

    ``foreach``: whether torch takes lists of parameters on CUDA, and their temporaries with them.
    ``matrices_only``: it takes parameters of two dimensions; the others get AdamW, as is usual.
    """

    name: str
    options: dict[str, Any]
    foreach: bool = True
    matrices_only: bool = False


OPTIMIZERS = {
    "sgd": OptimizerRow("SGD", {"lr": 1e-3, "momentum": 0.9}),
    "adamw": OptimizerRow("AdamW", {"lr": 1e-3}),
    "muon": OptimizerRow("Muon", {"lr": 1e-3}, foreach=False, matrices_only=True),
}


@dataclass(frozen=True)
class Training:
    """What is trained, and how; the same for a plan and for a run that is measured.

    ``build`` makes the model on torch's default device, ``make_batch`` a batch on a device;
    ``loss(model, batch)`` is called in every step. ``optimizer``: a row of ``OPTIMIZERS``.
    ``step_in_backward``: by ``lct.optim.step_in_backward``, with the gradients that wait there.
    ``checkpointing``: layers save their inputs only, by a method of transformers' models.
    """

    build: Callable[[], nn.Module]
    make_batch: Callable[[torch.device], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    optimizer: str = "sgd"
    step_in_backward: bool = False
    checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            known = ", ".join(OPTIMIZERS)
            raise ValueError(f"optimizer must be one of {known}, got {self.optimizer!r}")


@dataclass(frozen=True)
class StepBytes:
    """Bytes of the second training step, when the optimizer's state exists.

    ``saved``: what forward leaves alive; ``phase``: where the peak is. ``weights`` and ``buffers``
    of the model and ``state`` are there all the time.
    """

    weights: int
    buffers: int
    state: int
    saved: int
    peak: int
    phase: str


class Trainer:
    """Trains the model of ``training`` on ``device``, with ``parts`` compressed.

    ``foreach``: given to the optimizers that take it; None lets torch choose. ValueError for parts
    other than ``PARTS``, and for checkpointing where the model is none of transformers'.
    """

    def __init__(
        self, training: Training, parts: frozenset[str], device: torch.device, foreach: bool | None
    ) -> None:
        unknown = sorted(parts - set(PARTS))
        if unknown:
            raise ValueError(f"parts must be among {', '.join(PARTS)}, got {', '.join(unknown)}")
        self.training = training
        self.parts = parts
        with torch.device(device):
            self.model = training.build().train()
        if training.checkpointing:
            _checkpoint_layers_of(self.model)
        if "weights" in parts:
            compress_(self.model)
        self.optimizers = list(self._make_optimizers(foreach))
        self._stepping = []
        if training.step_in_backward:
            self._stepping = [optim.step_in_backward(optimizer) for optimizer in self.optimizers]
        self.batch = training.make_batch(device)

    def _make_optimizers(self, foreach: bool | None) -> Iterator[torch.optim.Optimizer]:
        source: Any = optim if "state" in self.parts else torch.optim
        if "weights" in self.parts and "state" not in self.parts:
            foreach = False  # torch's own would decode a list of weights at once
        row = OPTIMIZERS[self.training.optimizer]
        params = [p for p in self.model.parameters() if p.requires_grad]
        rest = []
        if row.matrices_only:
            rest = [p for p in params if p.dim() != 2]
            params = [p for p in params if p.dim() == 2]
        for chosen, its in ((row, params), (OPTIMIZERS["adamw"], rest)):
            if its:
                more = {"foreach": foreach} if chosen.foreach else {}
                yield getattr(source, chosen.name)(its, **chosen.options, **more)

    def step(self, end_phase: Callable[[str], object]) -> None:
        """One step; ``end_phase(name)`` is called after each of ``PHASES``."""
        saving = compress_activations if "activations" in self.parts else contextlib.nullcontext
        with saving():
            loss = self.training.loss(self.model, self.batch)
        end_phase("forward")
        loss.backward()
        end_phase("backward")
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        end_phase("step")

    def close(self) -> None:
        """Let the model go: the hooks of steps in backward would hold it for ever."""
        for stepping in self._stepping:
            stepping.remove()

    def held(self) -> tuple[int, int, int]:
        """Bytes of weights, of buffers and of the optimizers' state now."""
        report = memory_report(self.model, self.optimizers[0])
        rows = {row.name: row.stored_bytes for row in report.rows}
        state = sum(
            row.stored_bytes
            for optimizer in self.optimizers
            for row in memory_report(self.model, optimizer).rows
            if row.name not in ("weights", "gradients", "buffers")
        )
        return rows.get("weights", 0), rows.get("buffers", 0), state


def _checkpoint_layers_of(model: Any) -> None:
    for name in _CHECKPOINTING:
        if hasattr(model, name):
            getattr(model, name)()
            return
    raise ValueError(
        f"checkpointing needs a model with {' or '.join(_CHECKPOINTING)}, got "
        f"{type(model).__name__}"
    )


# What transformers calls it from version 5 on, and before.
_CHECKPOINTING = ("activation_checkpointing_enable", "gradient_checkpointing_enable")


def live_step_bytes(trainer: Trainer, live: LiveBytes) -> StepBytes:
    """Two steps of ``trainer``, the second one within ``live``, which counts nothing yet."""
    trainer.step(lambda phase: None)
    live.baseline(trainer.model, *trainer.optimizers, trainer.batch)
    start = live.live_bytes
    saved = 0
    peaks: dict[str, int] = {}

    def end_phase(phase: str) -> None:
        nonlocal saved
        if phase == "forward":
            saved = live.live_bytes - start
        peaks[phase] = live.peak_bytes
        live.peak_bytes = live.live_bytes

    with live:
        trainer.step(end_phase)
    phase = max(peaks, key=lambda name: peaks[name])
    return StepBytes(*trainer.held(), saved, peaks[phase], phase)


def plan_memory(
    training: Training, parts: frozenset[str] = frozenset(PARTS), device_type: str = "cuda"
) -> StepBytes:
    """Predict the bytes of one step with ``parts`` compressed (none: the dense run).

    ``device_type``: ``"cuda"`` or ``"cpu"``, where attention and optimizers take other kernels. An
    allocator's rounding, kernels' workspaces and LCT's overflow arena are not in it. The trace
    needs no GPU, and no memory for the model. ValueError for another device, RuntimeError (torch's)
    where a model does what needs values. Some functions of ``torch.nn.functional`` are replaced
    while it runs: let no other thread train meanwhile.
    """
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"device_type must be cpu or cuda, got {device_type!r}")
    with meta.stands_for(device_type), _kernels_of(device_type):
        # On CUDA torch's optimizers take lists of parameters by default.
        foreach = True if device_type == "cuda" else None
        with _Values(), torch.random.fork_rng(devices=[]):
            trainer = Trainer(training, parts, torch.device("meta"), foreach)
            try:
                return live_step_bytes(trainer, LiveBytes(meta=True))
            finally:
                trainer.close()


class _Values(TorchDispatchMode):
    """Answers for the value of a tensor that has none: 1, or True."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype, device="cpu").item()
        if any(issubclass(kind, CompressedWeight) for kind in types):
            return NotImplemented  # decoded first, with this mode on
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _kernels_of(device_type: str) -> Iterator[None]:
    """Have functions call what they do on a device where ``meta`` would take them apart."""
    # A torch-function mode would be off within functions that torch lets it override as a whole.
    kernels: dict[str, Callable[..., Any]] = {
        "scaled_dot_product_attention": _attention[device_type]
    }
    if device_type == "cuda":
        kernels |= {"dropout": _cuda_dropout, "rms_norm": _cuda_rms_norm}
    before = {name: getattr(F, name) for name in kernels}
    try:
        for name, kernel in kernels.items():
            setattr(F, name, kernel)
        yield
    finally:
        for name, function in before.items():
            setattr(F, name, function)


def _cuda_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """FlashAttention for half precision without a mask, else the memory-efficient kernel."""
    if attn_mask is None and q.dtype in (torch.bfloat16, torch.float16):
        flash = aten._scaled_dot_product_flash_attention
        return flash(q, k, v, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa and q.shape[-3] != k.shape[-3]:
        repeats = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(repeats, -3), v.repeat_interleave(repeats, -3)
    bias = None
    if attn_mask is not None:
        bias = attn_mask.to(q.dtype).expand(*q.shape[:-1], k.shape[-2])
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, bias, True, dropout_p, is_causal, scale=scale)[0]


def _cpu_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The fused kernel, which takes no dropout."""
    if dropout_p:
        composed = torch._C._nn.scaled_dot_product_attention
        return composed(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    bias = attn_mask.to(q.dtype) if attn_mask is not None else None
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    return flash(q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale)[0]


def _cuda_dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """One kernel, which saves a mask."""
    return torch.native_dropout(input, p, training)[0] if training and p else input


def _cuda_rms_norm(
    input: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """One kernel, which saves what LayerNorm's does: its input, and a factor a row."""
    return F.layer_norm(input, normalized_shape, weight, None, eps or 1e-5)


_attention = {"cuda": _cuda_attention, "cpu": _cpu_attention}
