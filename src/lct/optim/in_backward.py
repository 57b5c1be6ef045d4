"""Step parameters in backward, in batches whose gradients are complete, and drop the gradients."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils.hooks import RemovableHandle

from ..backends.cuda import payload_pool
from ..nn.compressed_weight import CompressedWeight
from ..nn.untraced import untraced
from .base import CompressedState

# _raw_stream(device): torch's current stream there, as the driver's handle.
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)

# A device, a stream there by the driver's handle (0 where a device has no streams), and whether the
# parameters are compressed: dense ones are mostly small, and a step of many costs what one of few
# does.
_Place = tuple[torch.device, int, bool]


class _Batch:
    """Parameters whose gradients, of ``num_bytes`` in all, wait; each with its group's number."""

    __slots__ = ("num_bytes", "params")

    def __init__(self) -> None:
        self.params: dict[torch.Tensor, int] = {}
        self.num_bytes = 0


class _Waiting(dict[_Place, _Batch]):
    """What one backward has collected, by where its gradients were accumulated.

    Only the callback at the end of that backward holds it. So it goes where the backward fails.
    """


class StepInBackward:
    """What ``step_in_backward`` returns: ``accumulate()`` and ``remove()``."""

    def __init__(self, optimizer: torch.optim.Optimizer, batch_bytes: int) -> None:
        self._optimizer = optimizer
        self._batch_bytes = batch_bytes
        # Backward runs a thread a device; steps may call what registered with the optimizer.
        self._lock = threading.RLock()
        self._accumulating = False
        # By the number of the backward: one may run within another (reentrant checkpoints).
        self._waiting: WeakValueDictionary[int, _Waiting] = WeakValueDictionary()
        self._handles: list[RemovableHandle] = [
            param.register_post_accumulate_grad_hook(partial(self._on_gradient, number))
            for number, group in enumerate(optimizer.param_groups)
            for param in group["params"]
        ]
        payload_pool.gradients_go(self)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes in this context add up gradients and step nothing.

        The first backward after it adds its own and steps: one for the last micro-batch.
        """
        if self._accumulating:
            raise RuntimeError("accumulate() must not be entered twice")
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def remove(self) -> None:
        """Take the hooks off: from then on ``optimizer.step()`` steps, as usual."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        payload_pool.gradients_stay(self)
        with self._lock:
            for waiting in self._waiting.values():
                waiting.clear()

    @untraced
    def _on_gradient(self, group: int, param: torch.Tensor) -> None:
        if self._accumulating:
            return
        optimizer = self._optimizer
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            if isinstance(optimizer, CompressedState) and not _is_watched(optimizer):
                self._collect(optimizer, group, param)
                return
        with self._lock, _only(optimizer, group, param):
            optimizer.step()
        with torch._C.DisableTorchFunctionSubclass():
            param.grad = None

    def _collect(self, optimizer: CompressedState, group: int, param: torch.Tensor) -> None:
        """Have ``param`` wait for others, or step it with those that have waited."""
        waiting = self._waiting_now() if self._batch_bytes else None
        if waiting is None:
            _step(optimizer, {param: group})
            return
        grad = param.grad
        if grad is None:  # another hook has taken it
            return
        device = grad.device
        stream = _raw_stream(device.index) if device.type == "cuda" else 0
        compressed = type(param) is CompressedWeight
        place = device, stream, compressed
        batch = waiting.get(place)
        if batch is None:
            batch = waiting[place] = _Batch()
        batch.params[param] = group
        # Not nbytes, which sparse gradients lack.
        batch.num_bytes += grad.numel() * grad.element_size()
        others = waiting.get((device, stream, not compressed))
        if batch.num_bytes + (others.num_bytes if others else 0) < self._batch_bytes:
            return
        for kind in (True, False):
            full = waiting.get((device, stream, kind))
            if full is not None and 2 * full.num_bytes >= self._batch_bytes:
                del waiting[device, stream, kind]
                _step(optimizer, full.params)

    def _waiting_now(self) -> _Waiting | None:
        """What the backward that runs now has collected; None where nobody would step it."""
        number = torch._C._current_graph_task_id()
        waiting = self._waiting.get(number)
        # -1: a hook called by hand. In compiled autograd callbacks of this kind are never called.
        if waiting is None and number != -1 and not _in_compiled_autograd():
            waiting = _Waiting()
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(partial(_on_end, [self, waiting]))
            self._waiting[number] = waiting
        return waiting

    def _step_the_rest(self, waiting: _Waiting) -> None:
        optimizer = self._optimizer
        assert isinstance(optimizer, CompressedState)
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            while waiting:
                (device, stream, _), batch = waiting.popitem()
                if device.type == "cuda":
                    with _on_stream(device, stream):
                        _step(optimizer, batch.params)
                else:
                    _step(optimizer, batch.params)


@untraced
def _on_end(held: list[Any]) -> None:
    """Step what is left of a backward. ``held``: whose it is, and what waits."""
    owner, waiting = held
    # The engine may keep its callbacks for a while, but shall not keep the model.
    held.clear()
    owner._step_the_rest(waiting)


@contextmanager
def _on_stream(device: torch.device, stream: int) -> Iterator[None]:
    """Run on this stream, where gradients wait; what follows on the current one waits for it."""
    with torch.cuda.device(device):
        current = torch.cuda.current_stream()
        if current.cuda_stream == stream:
            yield
            return
        own = torch.cuda.ExternalStream(stream, device)
        try:
            with torch.cuda.stream(own):
                yield
        finally:
            current.wait_stream(own)


def _step(optimizer: CompressedState, params: dict[torch.Tensor, int]) -> None:
    """Step ``params``, given with their groups' numbers, and drop their gradients."""
    groups: dict[int, list[torch.Tensor]] = {}
    for param, number in params.items():
        if param.grad is not None:  # zero_grad() may have taken it
            groups.setdefault(number, []).append(param)
    for number, members in groups.items():
        # By number: load_state_dict makes new groups.
        optimizer.step_params(optimizer.param_groups[number], members)
        # What torch's schedulers look at to warn of a step that never was.
        optimizer._opt_called = True  # type: ignore[attr-defined]


def _in_compiled_autograd() -> bool:
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled is not None and compiled.in_compiled_autograd_region


def step_in_backward(
    optimizer: torch.optim.Optimizer,
    *,
    max_norm: float | None = None,
    batch_bytes: int = 64 << 20,
) -> StepInBackward:
    """Let ``optimizer`` step its parameters in backward and free their gradients there.

    The gradients need not all exist at once then, which for a large model saves as much as its
    weights take. Takes the optimizers of ``lct.optim`` and torch's that step parameters
    independently of one another (all of torch's but LBFGS). The bits are those of an optimizer
    for each parameter by itself. ``optimizer.step()`` and ``zero_grad()`` may stay in the loop:
    there is nothing left to do for them. Learning-rate schedulers and ``state_dict`` work as
    usual. Gradients add up over several backward passes within ``accumulate()``. The parameters'
    hooks keep the optimizer alive, and it them: call ``remove()`` on what is returned where a model
    is to be freed before the process ends.

    ``batch_bytes``: the optimizers of ``lct.optim`` step parameters together, in less host time,
    when their gradients amount to so many bytes on one device (and stream; few of dense parameters
    wait for more), and the rest at the end of each backward; 0 steps each parameter as soon as its
    gradient is complete, as do torch's optimizers and those with hooks on ``step``. A backward
    within another one (reentrant checkpoints) has batches of its own. Where a backward raises,
    gradients that waited stay in ``.grad``, as do those of parameters that an error in a step left
    as they were, and add up with the next ones unless ``zero_grad()`` drops them.

    ValueError for ``max_norm``: clipping by the norm of all gradients needs them all before the
    first parameter is stepped; and for a negative ``batch_bytes``. TypeError for anything but an
    optimizer; ValueError for parameters that need no gradient or are no leaves, and for LBFGS.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"step_in_backward takes a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("step_in_backward takes no LBFGS: its step evaluates the loss again")
    if max_norm is not None:
        raise ValueError(
            "max_norm must be None: the norm of all gradients is not known before the first "
            f"parameter is stepped, got {max_norm}. Clip and step after backward instead"
        )
    if batch_bytes < 0:
        raise ValueError(f"batch_bytes must not be negative, got {batch_bytes}")
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not param.requires_grad or not param.is_leaf:
                raise ValueError(
                    "parameters must be leaves that require gradients, got one of shape "
                    f"{tuple(param.shape)} with requires_grad={param.requires_grad}"
                )
    return StepInBackward(optimizer, batch_bytes)


def _is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks, or a ``step`` that somebody put in place of the class's, want to see steps."""
    own = optimizer.__dict__.get("step")
    return bool(
        (own is not None and not getattr(own, "_wrapped_by_lr_sched", False))
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )


@contextmanager
def _only(optimizer: torch.optim.Optimizer, number: int, param: torch.Tensor) -> Iterator[None]:
    """``param``, of group ``number``, is the one parameter of ``optimizer``: hooks and schedulers
    see its own step.
    """
    groups: list[dict[str, Any]] = optimizer.param_groups
    kept = [group["params"] for group in groups]
    try:
        for group in groups:
            group["params"] = []
        groups[number]["params"] = [param]
        yield
    finally:
        for group, params in zip(groups, kept, strict=True):
            group["params"] = params
