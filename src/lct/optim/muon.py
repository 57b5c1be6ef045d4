"""``lct.optim.Muon``: torch's, with compressed momentum."""

from __future__ import annotations

import inspect
from typing import Any, TypeGuard

import torch
from torch.optim import _muon as torch_muon

from ..nn.compressed_weight import CompressedWeight
from ..tensor import CompressedTensor
from .base import (
    CompressedState,
    Rounding,
    compress_state,
    decode_state,
    ensure_room_for_step,
    has_compressible_state,
)


class Muon(CompressedState, torch.optim.Muon):
    """``torch.optim.Muon`` with the same arguments, keys and bits, and compressed momentum.

    Takes parameters of two dimensions, as torch's does. ``momentum_buffer`` of BF16, FP16 and FP32
    parameters (of ``lct.compress_`` or dense ones) is held compressed. On CUDA a kernel steps
    compressed BF16 momentum without a dense copy and gives the update that torch orthogonalises;
    other momentum is decoded, stepped by torch and encoded. Compressed parameters are decoded,
    stepped by torch and encoded one by one. RuntimeError for gradients that are sparse, and for
    complex parameters.
    """

    def _check(self, group: dict[str, Any], params: list[torch.Tensor]) -> Rounding:
        for param in params:
            assert param.grad is not None
            if param.grad.is_sparse or param.is_complex():
                raise RuntimeError(
                    "Muon takes dense gradients of real parameters, got a gradient of layout "
                    f"{param.grad.layout} and dtype {param.grad.dtype}"
                )
        return "single"

    def _step_group(
        self,
        group: dict[str, Any],
        params: list[torch.Tensor],
        rounding: Rounding,
        drop_grads: bool = False,
    ) -> None:
        options = {name: value for name, value in group.items() if name in _OPTIONS}
        for param in params:
            assert param.grad is not None
            state = self.state[param]
            held = state.get("momentum_buffer")
            if _kernel_takes(held, param, options):
                _step_fused(param, held, options)
            else:
                state["momentum_buffer"] = _decode_step_encode(param, held, options)
            if drop_grads:
                param.grad = None


_OPTIONS = (
    "lr",
    "weight_decay",
    "momentum",
    "nesterov",
    "ns_coefficients",
    "eps",
    "ns_steps",
    "adjust_lr_fn",
)


def _part_of_torch(name: str, *parameters: str) -> Any:
    """Torch's private function of this name; None where a version of torch has no such one."""
    function = getattr(torch_muon, name, None)
    known = function is not None and tuple(inspect.signature(function).parameters) == parameters
    return function if known else None


_orthogonalise = _part_of_torch(
    "_zeropower_via_newtonschulz", "grad", "ns_coefficients", "ns_steps", "eps"
)
_adjust_lr = _part_of_torch("_adjust_lr", "lr", "adjust_lr_fn", "param_shape")


def _kernel_takes(
    held: Any, param: torch.Tensor, options: dict[str, Any]
) -> TypeGuard[CompressedTensor]:
    """Whether the kernel steps the momentum ``held`` of ``param``: BF16 on CUDA, laid out in memory
    like gradient and parameter, from the second step on.
    """
    grad = param.grad
    assert grad is not None
    return (
        isinstance(held, CompressedTensor)
        and _orthogonalise is not None
        and _adjust_lr is not None
        # Without Nesterov's momentum torch orthogonalises the buffer, and scales it in place.
        and options["nesterov"]
        and not any(isinstance(options[name], torch.Tensor) for name in ("lr", "momentum"))
        and grad.dtype == torch.bfloat16
        and grad.shape == held.shape
        and grad.is_contiguous()
        and param.is_contiguous()
        and held.can_step_fused()
        # A group that finds no room in the arena, as in a graph it may, has no update.
        and not (grad.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _decode_step_encode(
    param: torch.Tensor, held: torch.Tensor | CompressedTensor | None, options: dict[str, Any]
) -> torch.Tensor | CompressedTensor:
    """Torch's step; returns the new momentum."""
    assert param.grad is not None
    ensure_room_for_step(param, [held])
    buffer = torch.zeros_like(param.grad) if held is None else decode_state(param, held)
    weight = param.dense() if isinstance(param, CompressedWeight) else param
    torch_muon.muon([weight], [param.grad], [buffer], has_complex=False, **options)
    result = buffer
    if has_compressible_state(param):
        result = compress_state(param, buffer, held)
    if isinstance(param, CompressedWeight):
        param.copy_(weight)
    return result


def _step_fused(param: torch.Tensor, held: CompressedTensor, options: dict[str, Any]) -> None:
    """Torch's step, in torch's order, with the kernel for the momentum."""
    assert param.grad is not None
    ensure_room_for_step(param, [held])
    lr = options["lr"]
    update = held.muon_(param.grad, momentum=options["momentum"])
    update = _orthogonalise(update, options["ns_coefficients"], options["ns_steps"], options["eps"])
    weight = param.dense() if isinstance(param, CompressedWeight) else param
    weight.mul_(1 - lr * options["weight_decay"])
    weight.add_(update, alpha=-_adjust_lr(lr, options["adjust_lr_fn"], param.shape))
    if isinstance(param, CompressedWeight):
        param.copy_(weight)
