"""Ways to train in less memory, as rows: what ``lct bench train`` measures side by side."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import compress_activations, optim
from .models.causal_lm import CausalLm

DENSE = "dense"


@dataclass(frozen=True)
class Storage:
    """What LCT holds compressed; of the activations, storages of ``min_bytes`` or more.

    ``in_graphs``: whether compiled graphs encode their activations themselves.
    """

    name: str
    weights: bool = False
    state: bool = False
    activations: bool = False
    min_bytes: int = 0
    in_graphs: bool = False


@dataclass(frozen=True)
class Saving:
    """What PyTorch itself does about activations.

    ``checkpoint``: every layer is computed again in backward; ``offload``: what autograd saves goes
    to pinned memory of the host; ``hooks``: what autograd saves passes hooks that change nothing,
    which is the least that any library of such hooks costs; ``budget``:
    ``activation_memory_budget`` of compiled graphs.
    """

    name: str
    checkpoint: bool = False
    offload: bool = False
    hooks: bool = False
    budget: float = 1.0

    @property
    def has_hooks(self) -> bool:
        """Whether it takes torch's saved-tensor hooks, of which one pair applies."""
        return self.offload or self.hooks


NO_STORAGE = Storage(DENSE)
STORAGES = (
    NO_STORAGE,
    Storage("lct-weights-state", weights=True, state=True),
    Storage("lct-activations", activations=True),
    Storage("lct-all", weights=True, state=True, activations=True),
    Storage("lct-large", weights=True, state=True, activations=True, min_bytes=4 << 20),
    Storage("lct-in-graphs", weights=True, state=True, activations=True, in_graphs=True),
)
NO_SAVING = Saving("")
SAVINGS = (
    NO_SAVING,
    Saving("recompute", checkpoint=True),
    Saving("save-on-cpu", offload=True),
    Saving("hooks-alone", hooks=True),
    *(Saving(f"budget-{share}", budget=share) for share in (0.9, 0.8, 0.7, 0.6, 0.5, 0.3, 0.1, 0)),
)


@dataclass(frozen=True)
class OptimizerRow:
    """``make(model, lct, cuda)`` gives the optimizers of one run: LCT's, or torch's.

    ``package``: what must be installed for it; ``lossy``: its state is rounded; ``compiles``: its
    step is compiled.
    """

    name: str
    make: Callable[[CausalLm, bool, bool], list[torch.optim.Optimizer]]
    package: str | None = None
    lossy: bool = False
    compiles: bool = False

    def missing(self) -> str | None:
        """Why it cannot run; None where it can."""
        if self.package is None:
            return None
        try:
            importlib.import_module(self.package)
        except ImportError as error:
            return f"{self.package} is not installed: {error}"
        return None


SGD_LR = 0.02
MUON_LR = 0.02
ADAMW_LR = 3e-4
MOMENTUM = 0.9


def _sgd(model: CausalLm, lct: bool, cuda: bool) -> list[torch.optim.Optimizer]:
    kind = optim.SGD if lct else torch.optim.SGD
    # Torch's fused SGD on the CPU does not repeat its own bits for BF16.
    fused = True if cuda else None
    return [kind(model.parameters(), SGD_LR, momentum=MOMENTUM, fused=fused)]


def _muon(model: CausalLm, lct: bool, cuda: bool) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the rest."""
    matrices = [p for p in model.layers.parameters() if p.dim() == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    muon = optim.Muon if lct else torch.optim.Muon
    adamw = optim.AdamW if lct else torch.optim.AdamW
    fused = True if cuda else None
    return [muon(matrices, MUON_LR), adamw(others, ADAMW_LR, fused=fused)]


def _sgd_8bit(model: CausalLm, lct: bool, cuda: bool) -> list[torch.optim.Optimizer]:
    from bitsandbytes.optim import SGD8bit

    # By default it keeps the momentum of small tensors in FP32, and has no CUDA kernel that steps
    # those with BF16 gradients.
    return [SGD8bit(model.parameters(), SGD_LR, momentum=MOMENTUM, min_8bit_size=1)]


def _adamw_8bit(model: CausalLm, lct: bool, cuda: bool) -> list[torch.optim.Optimizer]:
    from torchao.optim import AdamW8bit

    return [AdamW8bit(model.parameters(), ADAMW_LR)]


OPTIMIZERS = {row.name: row for row in (OptimizerRow("sgd", _sgd), OptimizerRow("muon", _muon))}
LOSSY_OPTIMIZERS = (
    OptimizerRow("sgd-8bit", _sgd_8bit, package="bitsandbytes", lossy=True),
    OptimizerRow("adamw-8bit", _adamw_8bit, package="torchao", lossy=True, compiles=True),
)


@dataclass(frozen=True)
class Variant:
    """One way to train. ``optimizer``: replaces the run's where it is not None."""

    name: str
    storage: Storage = NO_STORAGE
    saving: Saving = NO_SAVING
    optimizer: OptimizerRow | None = None

    @property
    def uses_lct(self) -> bool:
        return self.storage is not NO_STORAGE

    @property
    def equals(self) -> str | None:
        """The variant whose bits it must have: the same without LCT; None where LCT is not used."""
        return (self.saving.name or DENSE) if self.uses_lct else None

    def save(self) -> AbstractContextManager[Any]:
        """The context of forward."""
        if self.storage.activations:
            storage = self.storage
            return compress_activations(min_bytes=storage.min_bytes, in_graphs=storage.in_graphs)
        if self.saving.offload:
            return torch.autograd.graph.saved_tensors_hooks(to_host, from_host)
        if self.saving.hooks:
            # Without its history: the graph must not be held by what it holds.
            return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, _as_it_is)
        return contextlib.nullcontext()


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def to_host(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
    """Pack hook of ``save_on_cpu(pin_memory=True)``, but for the strides, which torch's loses: the
    backward of a compiled graph refuses other ones than its forward saved.
    """
    sizes, strides = tensor.shape, tensor.stride()
    if any(stride == 0 and size > 1 for size, stride in zip(sizes, strides, strict=True)):
        tensor = tensor.contiguous()  # nothing can be copied to values that share their memory
    host = torch.empty_strided(
        sizes, tensor.stride(), dtype=tensor.dtype, pin_memory=tensor.is_cuda
    )
    return tensor.device, host.copy_(tensor)


def from_host(packed: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
    """The unpack hook that goes with it."""
    device, host = packed
    tensor = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
    return tensor.copy_(host, non_blocking=True)


def _name(storage: Storage, saving: Saving) -> str:
    parts = (storage.name if storage is not NO_STORAGE else "", saving.name)
    return "+".join(part for part in parts if part) or DENSE


VARIANTS = {
    variant.name: variant
    for variant in (
        *(
            Variant(_name(storage, saving), storage, saving)
            for saving in SAVINGS
            for storage in STORAGES
            # Torch applies one pair of saved-tensor hooks only.
            if not (saving.has_hooks and storage.activations)
        ),
        *(Variant(row.name, optimizer=row) for row in LOSSY_OPTIMIZERS),
    )
}
DEFAULT_VARIANTS = (
    DENSE,
    *("lct-weights-state", "lct-activations", "lct-all"),
    *("recompute", "lct-all+recompute", "save-on-cpu"),
    *(row.name for row in LOSSY_OPTIMIZERS),
)
SEARCH_VARIANTS = ("recompute", "lct-weights-state+recompute", "lct-all+recompute")


@dataclass(frozen=True)
class Configuration:
    """How the model runs. ``compiled``: nothing, each of its layers, or all of it."""

    name: str
    compiled: str
    chunked_loss: bool


CONFIGURATIONS = {
    row.name: row
    for row in (
        Configuration("eager", compiled="none", chunked_loss=False),
        Configuration("eager-chunked", compiled="none", chunked_loss=True),
        Configuration("layers", compiled="layers", chunked_loss=False),
        Configuration("lean", compiled="layers", chunked_loss=True),
        Configuration("whole", compiled="model", chunked_loss=False),
        Configuration("whole-chunked", compiled="model", chunked_loss=True),
    )
}


def compile_(
    model: CausalLm, configuration: Configuration, backend: str, *, same_rounding: bool
) -> None:
    """Compile ``model`` in place, for one shape of its input. Call it before checkpointing.

    ``same_rounding``: have Inductor round where eager torch rounds. Else it rounds where its
    kernels happen to end, and a graph with other inputs may end them elsewhere.
    """
    modules: list[nn.Module] = []
    if configuration.compiled == "layers":
        modules = list(model.layers)
    elif configuration.compiled == "model":
        modules = [model]
    # As an option: settings of the thread would not reach a backward that is compiled in another.
    emulate = same_rounding and backend == "inductor"
    options = {"options": {"emulate_precision_casts": True}} if emulate else {}
    for module in modules:
        module.compile(backend=backend, dynamic=False, **options)
