"""``lct.optim.SGD``: torch's SGD with compressed momentum, for compressed and dense weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import ParamsT, _device_dtype_check_for_fused
from torch.optim.sgd import sgd

from ..nn.compressed_weight import CompressedWeight
from ..nn.handles import count_write
from ..tensor import CompressedTensor, sgd_all_
from .base import (
    CompressedState,
    Rounding,
    choose_rounding,
    compress_state,
    decode_state,
    grad_of_payload,
    has_compressible_state,
)


@dataclass(frozen=True)
class SgdUpdate:
    """Everything but the tensors of one parameter that a step depends on.

    ``rounding``: which of torch's implementations to equal. ``mixed``: other parameters of its
    device, dtype and group have no momentum yet (or this one has none while others have), upon
    which torch's foreach takes other calls.
    """

    lr: float | torch.Tensor
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool
    rounding: Rounding
    mixed: bool = False
    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None


class SGD(CompressedState, torch.optim.SGD):
    """``torch.optim.SGD`` with the same arguments, keys and bits, and compressed momentum.

    ``momentum_buffer`` of every parameter with two or more dimensions (BF16, FP16 or FP32; a weight
    of ``lct.compress_`` or a dense one) is held compressed. The bits of weights and momentum are
    those of ``torch.optim.SGD`` with the same arguments on dense weights on the same device, for
    ``foreach=True`` (torch's choice on CUDA), ``foreach=False`` (its choice on the CPU) and
    ``fused=True`` (on the CPU in FP32: torch 2.13's fused CPU kernel does not repeat its own bits
    for BF16 and FP16 momentum). On CUDA kernels step compressed BF16 weights and momentum, many a
    launch, without a dense copy; other parameters are decoded, stepped and encoded one by one.

    Takes dense gradients for weights: RuntimeError for sparse ones. ValueError for
    ``differentiable=True``, and for a parameter given twice.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        if differentiable:
            raise ValueError(
                "differentiable must be False: compressed weights are written in place"
            )
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=False,
            fused=fused,
        )

    def _plan(self, group: dict[str, Any]) -> tuple[dict[str, Any], list[torch.Tensor], Rounding]:
        params = [p for p in group["params"] if p.grad is not None]
        for param in params:
            if isinstance(param, CompressedWeight) and _is_sparse(param):
                raise RuntimeError(
                    "gradients of compressed weights must be dense, got a sparse one of shape "
                    f"{tuple(param.shape)} (an embedding with sparse=True?)"
                )
            if group["fused"]:
                _device_dtype_check_for_fused(param)
        return group, params, choose_rounding(params, group["foreach"], group["fused"])

    def _step_group(
        self, group: dict[str, Any], params: list[torch.Tensor], rounding: Rounding
    ) -> None:
        momentum = group["momentum"]
        without: set[Any] = set()
        having: set[Any] = set()
        if momentum != 0:
            for param in params:
                empty = self.state[param].get("momentum_buffer") is None
                (without if empty else having).add((param.device, param.dtype))
        mixed_kinds = without & having

        update = SgdUpdate(
            lr=group["lr"],
            momentum=momentum,
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            rounding=rounding,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
        )
        updates = {False: update, True: dataclasses.replace(update, mixed=True)}
        dense: dict[bool, list[torch.Tensor]] = {}
        payloads: dict[torch.device, list[CompressedWeight]] = {}
        for param in params:
            mixed = (param.device, param.dtype) in mixed_kinds
            state = self.state[param] if momentum != 0 else {}
            has_state = momentum != 0 and has_compressible_state(param) and not _is_sparse(param)
            if _takes_kernel(param, state.get("momentum_buffer"), updates[mixed]):
                assert isinstance(param, CompressedWeight)
                payloads.setdefault(param.device, []).append(param)
            elif isinstance(param, CompressedWeight) or has_state:
                buffer = _decode_step_encode(param, state.get("momentum_buffer"), updates[mixed])
                if momentum != 0:
                    state["momentum_buffer"] = buffer
            else:
                dense.setdefault(mixed, []).append(param)
        for weights in payloads.values():
            buffers = [self.state[weight]["momentum_buffer"] for weight in weights]
            _step_payloads(weights, buffers, update)
        for mixed, plain in dense.items():
            states = [self.state[p] if momentum != 0 else {} for p in plain]
            buffers = [state.get("momentum_buffer") for state in states]
            _torch_sgd(plain, [p.grad for p in plain], buffers, updates[mixed])
            if momentum != 0:
                for state, buffer in zip(states, buffers, strict=True):
                    state["momentum_buffer"] = buffer


def _is_sparse(param: torch.Tensor) -> bool:
    """True where the gradient is sparse."""
    return param.grad is not None and param.grad.is_sparse


def _step_payloads(
    weights: list[CompressedWeight], buffers: list[CompressedTensor], update: SgdUpdate
) -> None:
    """Step payloads with the kernel, which ``_takes_kernel`` has said it takes."""
    grads = [grad_of_payload(weight) for weight in weights]
    assert all(grad is not None for grad in grads)
    sgd_all_(
        [(weight.compressed, buffer) for weight, buffer in zip(weights, buffers, strict=True)],
        grads,  # type: ignore[arg-type]
        lr=update.lr,
        momentum=update.momentum,
        dampening=update.dampening,
        weight_decay=update.weight_decay,
        nesterov=update.nesterov,
        maximize=update.maximize,
        rounding=update.rounding,
        grad_scale=update.grad_scale,
        found_inf=update.found_inf,
    )
    for weight in weights:
        torch.autograd.graph.increment_version(weight)
        count_write(weight.compressed)


def _takes_kernel(
    param: torch.Tensor, buffer: torch.Tensor | CompressedTensor | None, update: SgdUpdate
) -> bool:
    """Whether one kernel can step the payloads: BF16 on CUDA, from the second step on."""
    return (
        isinstance(param, CompressedWeight)
        and isinstance(buffer, CompressedTensor)
        and not update.mixed
        and not isinstance(update.lr, torch.Tensor)
        and (update.grad_scale is None or update.rounding == "fused")
        and param.compressed.can_step_fused(buffer)
        and grad_of_payload(param) is not None
    )


def _decode_step_encode(
    param: torch.Tensor, buffer: torch.Tensor | CompressedTensor | None, update: SgdUpdate
) -> torch.Tensor | CompressedTensor | None:
    assert param.grad is not None
    weight = param.dense() if isinstance(param, CompressedWeight) else param
    buffers = [decode_state(param, buffer)]
    _torch_sgd([weight], [param.grad], buffers, update)
    new = buffers.pop()
    result = None
    if update.momentum != 0:
        result = compress_state(
            param, new, buffer if isinstance(buffer, CompressedTensor) else None
        )
    if isinstance(param, CompressedWeight):
        param.copy_(weight)
    return result


def _torch_sgd(
    params: list[torch.Tensor],
    grads: list[Any],
    buffers: list[torch.Tensor | None],
    update: SgdUpdate,
) -> None:
    """Torch's own step on plain tensors; new momentum is put into ``buffers``."""
    count = len(params)
    if update.mixed and update.rounding == "foreach":
        extra = list(_without_momentum(params))
        params, grads = params + extra, grads + extra
        own = buffers + [None] * len(extra)
    else:
        own = buffers
    sgd(
        params,
        grads,
        own,
        has_sparse_grad=any(grad.is_sparse for grad in grads),
        foreach=update.rounding == "foreach",
        fused=update.rounding == "fused",
        grad_scale=update.grad_scale,
        found_inf=update.found_inf,
        weight_decay=update.weight_decay,
        momentum=update.momentum,
        lr=update.lr,  # type: ignore[arg-type]
        dampening=update.dampening,
        nesterov=update.nesterov,
        maximize=update.maximize,
    )
    buffers[:] = own[:count]


def _without_momentum(params: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """A value of no account per device and dtype, which has no momentum: it makes foreach take the
    calls that it takes for a list where some have none.
    """
    for device, dtype in {(p.device, p.dtype): None for p in params}:
        yield torch.zeros(1, device=device, dtype=dtype)
