"""``lct.optim.SGD``: torch's SGD with compressed momentum, for compressed and dense weights."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import ParamsT, _device_dtype_check_for_fused
from torch.optim.sgd import sgd

from ..nn.compressed_weight import CompressedWeight
from ..nn.handles import count_write
from ..tensor import CompressedTensor, relieve_arena, sgd_all_
from .base import (
    CompressedState,
    Rounding,
    choose_rounding,
    compress_state,
    decode_state,
    drop_grads_of,
    ensure_room_for_step,
    grad_of_payload,
    has_compressible_state,
)


class SgdUpdate(NamedTuple):
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
    launch, without a dense copy; other parameters are decoded, stepped and encoded one by one, as
    are all with ``fused=True`` and ``maximize=True``, where torch's kernel rounds some values
    another way than others.

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

    def _check(self, group: dict[str, Any], params: list[torch.Tensor]) -> Rounding:
        for param in params:
            if isinstance(param, CompressedWeight) and _is_sparse(param):
                raise RuntimeError(
                    "gradients of compressed weights must be dense, got a sparse one of shape "
                    f"{tuple(param.shape)} (an embedding with sparse=True?)"
                )
            if group["fused"]:
                _device_dtype_check_for_fused(param)
        return choose_rounding(params, group["foreach"], group["fused"])

    def _kind(self, group: dict[str, Any], param: torch.Tensor) -> Hashable:
        # Lists in which some have momentum and some have none are mixed (SgdUpdate).
        has_momentum = self.state.get(param, {}).get("momentum_buffer") is not None
        return super()._kind(group, param), has_momentum

    def step_params(self, group: dict[str, Any], params: Iterable[torch.Tensor]) -> None:
        """As every optimizer's; in less host time for those that the kernel takes."""
        rest = params
        if group["momentum"] != 0:
            with torch._C.DisableTorchFunctionSubclass():
                rest = self._step_those_of_the_kernel(group, params)
        if rest:
            super().step_params(group, rest)

    def _step_those_of_the_kernel(
        self, group: dict[str, Any], params: Iterable[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Step the ``params`` that have momentum in payloads; gives the others."""
        others: list[torch.Tensor] = []
        payloads: dict[int, list[_Payload]] = {}
        for param in params:
            held = self.state.get(param)
            payload = _payload_for_kernel(param, held.get("momentum_buffer")) if held else None
            if payload is None:
                others.append(param)
            else:
                payloads.setdefault(payload.grad.get_device(), []).append(payload)
        for many in payloads.values():
            weights: list[torch.Tensor] = [payload.weight for payload in many]
            update = self._update(group, self._check(group, weights))
            if _allows_kernel(update):
                _step_payloads(many, update, drop_grads=True)
                relieve_arena(weights[0].device, self._payloads)
            else:
                others += weights
        return others

    def _update(self, group: dict[str, Any], rounding: Rounding) -> SgdUpdate:
        return SgdUpdate(
            lr=group["lr"],
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            rounding=rounding,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
        )

    def _step_group(
        self,
        group: dict[str, Any],
        params: list[torch.Tensor],
        rounding: Rounding,
        drop_grads: bool = False,
    ) -> None:
        momentum = group["momentum"]
        states = [self.state[param] if momentum != 0 else {} for param in params]
        buffers = [state.get("momentum_buffer") for state in states]
        missing = [buffer is None for buffer in buffers]
        mixed_kinds: set[Any] = set()
        if momentum != 0 and any(missing) and not all(missing):
            kinds: dict[bool, set[Any]] = {True: set(), False: set()}
            for param, empty in zip(params, missing, strict=True):
                kinds[empty].add((param.device, param.dtype))
            mixed_kinds = kinds[True] & kinds[False]

        update = self._update(group, rounding)
        allows_kernel = _allows_kernel(update)
        updates = {False: update}
        if mixed_kinds:
            updates[True] = update._replace(mixed=True)
        dense: dict[bool, list[torch.Tensor]] = {}
        payloads: dict[torch.device, list[_Payload]] = {}
        for param, state, buffer in zip(params, states, buffers, strict=True):
            mixed = bool(mixed_kinds) and (param.device, param.dtype) in mixed_kinds
            payload = _payload_for_kernel(param, buffer) if allows_kernel and not mixed else None
            if payload is not None:
                payloads.setdefault(param.device, []).append(payload)
                continue
            has_state = momentum != 0 and has_compressible_state(param) and not _is_sparse(param)
            if isinstance(param, CompressedWeight) or has_state:
                new = _decode_step_encode(param, buffer, updates[mixed])
                if momentum != 0:
                    state["momentum_buffer"] = new
                if drop_grads:
                    param.grad = None
            else:
                dense.setdefault(mixed, []).append(param)
        for many in payloads.values():
            _step_payloads(many, update, drop_grads)
        for mixed, plain in dense.items():
            held = [self.state[p] if momentum != 0 else {} for p in plain]
            own = [state.get("momentum_buffer") for state in held]
            _torch_sgd(plain, [p.grad for p in plain], own, updates[mixed])
            if momentum != 0:
                for state, buffer in zip(held, own, strict=True):
                    state["momentum_buffer"] = buffer
            if drop_grads:
                drop_grads_of(plain)


def _is_sparse(param: torch.Tensor) -> bool:
    """True where the gradient is sparse."""
    return param.grad is not None and param.grad.is_sparse


class _Payload(NamedTuple):
    """What the kernel steps."""

    weight: CompressedWeight
    buffer: CompressedTensor
    grad: torch.Tensor


def _step_payloads(payloads: list[_Payload], update: SgdUpdate, drop_grads: bool) -> None:
    def launched(numbers: Sequence[int]) -> None:
        for number in numbers:
            weight = payloads[number].weight
            torch.autograd.graph.increment_version(weight)
            count_write(weight.compressed)
            if drop_grads:
                weight.grad = None

    sgd_all_(
        [(payload.weight.compressed, payload.buffer) for payload in payloads],
        [payload.grad for payload in payloads],
        launched,
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


def _allows_kernel(update: SgdUpdate) -> bool:
    """Whether the kernel knows the options of a step that is not mixed."""
    scaled, fused = update.grad_scale is not None, update.rounding == "fused"
    return (
        not isinstance(update.lr, torch.Tensor)
        and (not scaled or fused)
        and not (fused and update.maximize)
    )


def _payload_for_kernel(
    param: torch.Tensor, buffer: torch.Tensor | CompressedTensor | None
) -> _Payload | None:
    """What the kernel takes: BF16 on CUDA, from the second step on. None where it does not."""
    if (
        not isinstance(param, CompressedWeight)
        or not isinstance(buffer, CompressedTensor)
        or not param.compressed.can_step_fused(buffer)
    ):
        return None
    grad = grad_of_payload(param)
    return None if grad is None else _Payload(param, buffer, grad)


def _decode_step_encode(
    param: torch.Tensor, buffer: torch.Tensor | CompressedTensor | None, update: SgdUpdate
) -> torch.Tensor | CompressedTensor | None:
    assert param.grad is not None
    ensure_room_for_step(param, [buffer])
    weight = param.dense() if isinstance(param, CompressedWeight) else param
    buffers = [decode_state(param, buffer)]
    _torch_sgd([weight], [param.grad], buffers, update)
    new = buffers.pop()
    result = None
    if update.momentum != 0:
        result = compress_state(param, new, buffer)
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
