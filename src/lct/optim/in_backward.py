"""Step every parameter in backward, as soon as its gradient is complete, and drop the gradient."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils.hooks import RemovableHandle

from ..nn.untraced import untraced
from .base import CompressedState


class StepInBackward:
    """What ``step_in_backward`` returns: ``accumulate()`` and ``remove()``."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._lock = threading.Lock()  # backward runs a thread a device
        self._accumulating = False
        self._handles: list[RemovableHandle] = [
            param.register_post_accumulate_grad_hook(partial(self._step, number))
            for number, group in enumerate(optimizer.param_groups)
            for param in group["params"]
        ]

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

    @untraced
    def _step(self, group: int, param: torch.Tensor) -> None:
        if self._accumulating:
            return
        optimizer = self._optimizer
        with self._lock:
            if isinstance(optimizer, CompressedState) and not _is_watched(optimizer):
                # By number: load_state_dict makes new groups.
                optimizer.step_param(optimizer.param_groups[group], param)
                # What torch's schedulers look at to warn of a step that never was.
                optimizer._opt_called = True  # type: ignore[attr-defined]
            else:
                with _only(optimizer, group, param):
                    optimizer.step()
        with torch._C.DisableTorchFunctionSubclass():
            param.grad = None


def step_in_backward(
    optimizer: torch.optim.Optimizer, *, max_norm: float | None = None
) -> StepInBackward:
    """Let ``optimizer`` step each of its parameters in backward and free its gradient there.

    No two gradients need to exist at once then, which for a large model saves as much as its
    weights take. Takes the optimizers of ``lct.optim`` and torch's that step parameters
    independently of one another (all of torch's but LBFGS). The bits are those of an optimizer
    for each parameter by itself. ``optimizer.step()`` and ``zero_grad()`` may stay in the loop:
    there is nothing left to do for them. Learning-rate schedulers and ``state_dict`` work as
    usual. Gradients add up over several backward passes within ``accumulate()``. The parameters'
    hooks keep the optimizer alive, and it them: call ``remove()`` on what is returned where a model
    is to be freed before the process ends.

    ValueError for ``max_norm``: clipping by the norm of all gradients needs them all before the
    first parameter is stepped. TypeError for anything but an optimizer; ValueError for parameters
    that need no gradient or are no leaves, and for LBFGS.
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
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not param.requires_grad or not param.is_leaf:
                raise ValueError(
                    "parameters must be leaves that require gradients, got one of shape "
                    f"{tuple(param.shape)} with requires_grad={param.requires_grad}"
                )
    return StepInBackward(optimizer)


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
