"""Step every parameter in backward, as soon as its gradient is complete, and drop the gradient."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


class StepInBackward:
    """What ``step_in_backward`` returns: ``accumulate()`` and ``remove()``."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._lock = threading.Lock()  # backward runs a thread a device
        self._accumulating = False
        self._handles: list[RemovableHandle] = [
            param.register_post_accumulate_grad_hook(self._step)
            for group in optimizer.param_groups
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

    def _step(self, param: torch.Tensor) -> None:
        if self._accumulating:
            return
        with self._lock, _only(self._optimizer, param):
            self._optimizer.step()
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
    usual. Gradients add up over several backward passes within ``accumulate()``.

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


@contextmanager
def _only(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> Iterator[None]:
    """``param`` is the one parameter of ``optimizer``; hooks and schedulers see its own step."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    kept = [group["params"] for group in groups]
    try:
        for group, params in zip(groups, kept, strict=True):
            group["params"] = [param] if any(p is param for p in params) else []
        yield
    finally:
        for group, params in zip(groups, kept, strict=True):
            group["params"] = params
