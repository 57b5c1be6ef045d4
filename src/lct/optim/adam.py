"""``lct.optim.Adam`` and ``AdamW``: torch's, with compressed moments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.optimizer import _device_dtype_check_for_fused, _get_scalar_dtype

from ..nn.compressed_weight import CompressedWeight
from ..nn.handles import count_write
from ..nn.saves import captures
from ..tensor import CompressedTensor, adam_all_
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


class Adam(CompressedState, torch.optim.Adam):
    """``torch.optim.Adam`` with the same arguments, keys and bits, and compressed moments.

    ``exp_avg``, ``exp_avg_sq`` (and ``max_exp_avg_sq`` with ``amsgrad``) of every parameter with
    two or more dimensions (BF16, FP16 or FP32; a weight of ``lct.compress_`` or a dense one) are
    held compressed; ``step`` is a plain tensor, as torch's. On CUDA kernels step compressed BF16
    weights and their moments without a dense copy, from the second step on, where ``lr`` and
    ``betas`` are numbers and ``amsgrad`` is off (and not for ``fused`` with L2 decay, where torch's
    kernel rounds some values another way than others); any other parameter is decoded, stepped by
    torch and encoded before the next one is. The bits are those of torch's implementation for
    ``foreach=True``, ``foreach=False`` or ``fused=True`` on dense weights on the same device.

    A CUDA graph can hold a step where ``fused=True`` and ``capturable=True``, once every parameter
    has been stepped outside of it and the kernels take each that is compressed.

    ValueError for ``differentiable=True``, for ``capturable=True`` without ``fused=True``, for a
    tensor ``lr`` or tensor ``betas`` with torch's foreach implementation, and for a parameter given
    twice. RuntimeError for gradients that are not dense, and for a capture of anything else.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Torch's; ValueError for options that are refused and for a parameter given twice."""
        if isinstance(param_group, dict):
            _check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict`` of this optimizer or of torch's, and compress it.

        ValueError where it would switch on an option that is refused; nothing is loaded then.
        """
        for group in state_dict["param_groups"]:
            _check_options(group)
        super().load_state_dict(state_dict)

    def _check(self, group: dict[str, Any], params: list[torch.Tensor]) -> Rounding:
        _check_options(group)
        capturing = captures()
        if capturing and not group["capturable"]:
            raise RuntimeError(
                f"{type(self).__name__} needs fused=True and capturable=True where a CUDA graph is "
                "captured: its step count lives on the CPU otherwise"
            )
        for param in params:
            assert param.grad is not None
            if param.grad.layout != torch.strided:
                raise RuntimeError(
                    f"gradients must be dense, got one of layout {param.grad.layout} and shape "
                    f"{tuple(param.shape)} (an embedding with sparse=True?)"
                )
            if group["fused"]:
                _device_dtype_check_for_fused(param)
            held = self.state.get(param, {})
            missing = [name for name in _state_names(group) if held and name not in held]
            if missing:
                raise ValueError(
                    f"state must have {', '.join(missing)} from a parameter's first step on "
                    f"(amsgrad={group['amsgrad']}), got only {', '.join(held)}"
                )
        numbers = (group["lr"], *group["betas"])
        foreach = group["foreach"]
        # Torch's default is not foreach where lr is a tensor.
        if foreach is None and group["fused"] is None and isinstance(numbers[0], torch.Tensor):
            foreach = False
        rounding = choose_rounding(params, foreach, group["fused"])
        if capturing:
            self._check_captured(group, params, rounding)
        if rounding == "foreach" and any(isinstance(n, torch.Tensor) for n in numbers):
            raise ValueError(
                "lr and betas must be numbers in torch's foreach implementation, got "
                f"lr={group['lr']}, betas={group['betas']}; foreach=False takes tensors"
            )
        return rounding

    def _has_coded_state(self, param: torch.Tensor) -> bool:
        return any(isinstance(v, CompressedTensor) for v in self.state.get(param, {}).values())

    def _check_captured(
        self, group: dict[str, Any], params: list[torch.Tensor], rounding: Rounding
    ) -> None:
        takes_kernel = self._allows_kernel(group, rounding)
        for param in params:
            coded = isinstance(param, CompressedWeight) or self._has_coded_state(param)
            if not self.state.get(param) or (
                coded and not (takes_kernel and self._takes_kernel(param, rounding))
            ):
                raise RuntimeError(
                    "a CUDA graph holds steps of parameters that were stepped before its capture, "
                    "and where weight or state is compressed of BF16 that the fused kernel takes "
                    f"(no amsgrad or L2 decay, numbers for lr and betas), got one "
                    f"of {param.dtype} and shape {tuple(param.shape)}"
                )

    def _step_group(
        self,
        group: dict[str, Any],
        params: list[torch.Tensor],
        rounding: Rounding,
        drop_grads: bool = False,
    ) -> None:
        plain = []
        capturing = captures()
        # One launch takes what is at the same step; fused steps are counted on the device, where
        # the kernel reads each parameter's.
        payloads: dict[Any, list[CompressedWeight]] = {}
        takes_kernel = self._allows_kernel(group, rounding)
        for param in params:
            if takes_kernel and self._takes_kernel(param, rounding):
                assert isinstance(param, CompressedWeight)
                number = None if rounding == "fused" else self.state[param]["step"].item()
                payloads.setdefault((param.device, number), []).append(param)
            elif isinstance(param, CompressedWeight) or (
                # A capture leaves state as it is held.
                self._has_coded_state(param) if capturing else has_compressible_state(param)
            ):
                self._decode_step_encode(group, param, rounding)
                if drop_grads:
                    param.grad = None
            else:
                plain.append(param)
        for weights in payloads.values():
            self._step_payloads(group, weights, rounding, drop_grads)
        if plain:
            lists: list[list[torch.Tensor]] = [[] for _ in range(6)]
            has_complex = self._init_group({**group, "params": plain}, *lists)
            self._torch_adam(group, rounding, lists, has_complex)
            if drop_grads:
                drop_grads_of(plain)

    def _allows_kernel(self, group: dict[str, Any], rounding: Rounding) -> bool:
        """Whether the kernel knows the options of ``group``."""
        scaled = any(getattr(self, name, None) is not None for name in ("grad_scale", "found_inf"))
        return (
            not group["amsgrad"]
            and all(isinstance(n, (int, float)) for n in (group["lr"], *group["betas"]))
            and (not scaled or rounding == "fused")
            and not (rounding == "fused" and _has_l2_decay(group))
        )

    def _takes_kernel(self, param: torch.Tensor, rounding: Rounding) -> bool:
        """Whether the kernel takes the payloads: BF16 on CUDA, from the second step on."""
        if not isinstance(param, CompressedWeight):
            return False
        held = self.state.get(param)
        if not held:
            return False
        first, second = held["exp_avg"], held["exp_avg_sq"]
        return (
            isinstance(first, CompressedTensor)
            and isinstance(second, CompressedTensor)
            and param.compressed.can_step_fused(first, second)
            and (held["step"].is_cuda or rounding != "fused")
            and grad_of_payload(param) is not None
        )

    def _step_payloads(
        self,
        group: dict[str, Any],
        weights: list[CompressedWeight],
        rounding: Rounding,
        drop_grads: bool,
    ) -> None:
        """Step payloads, all at the same step, with the kernel."""
        held = [self.state[weight] for weight in weights]
        grads = [grad_of_payload(weight) for weight in weights]
        assert all(grad is not None for grad in grads)
        steps = [state["step"] for state in held]
        if captures():  # replays count in place
            torch._foreach_add_(steps, 1)
        else:
            steps = list(torch._foreach_add(steps, 1))
        beta1, beta2 = group["betas"]
        found_inf = getattr(self, "found_inf", None)

        def launched(numbers: Sequence[int]) -> None:
            for number in numbers:
                weight, step = weights[number], steps[number]
                if found_inf is not None:
                    # A skipped step does not count.
                    step -= found_inf.to(step.device, non_blocking=True)
                held[number]["step"] = step
                torch.autograd.graph.increment_version(weight)
                count_write(weight.compressed)
                if drop_grads:
                    weight.grad = None

        adam_all_(
            [
                (weight.compressed, state["exp_avg"], state["exp_avg_sq"])
                for weight, state in zip(weights, held, strict=True)
            ],
            grads,  # type: ignore[arg-type]
            launched,
            step=steps if rounding == "fused" else steps[0].item(),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
            maximize=group["maximize"],
            rounding=rounding,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=found_inf,
        )

    def _decode_step_encode(
        self, group: dict[str, Any], param: torch.Tensor, rounding: Rounding
    ) -> None:
        assert param.grad is not None
        held = self.state.get(param, {})
        names = _state_names(group)
        ensure_room_for_step(param, held.values())
        weight = param.dense() if isinstance(param, CompressedWeight) else param
        if held:
            step = held["step"].clone()
            states = [_own(decode_state(param, held[name]), held[name]) for name in names]
        else:
            step = _first_step(group, param)
            states = [torch.zeros_like(weight) for _ in names]
        moments = [[state] for state in states] + [[]] * (3 - len(states))
        self._torch_adam(group, rounding, [[weight], [param.grad], *moments, [step]])
        # What is held changes only now that torch's step has succeeded.
        new: dict[str, torch.Tensor | CompressedTensor] = {"step": step}
        for name, state in zip(names, states, strict=True):
            new[name] = compress_state(param, state, held.get(name))
        if isinstance(param, CompressedWeight):
            param.copy_(weight)
        self.state[param].update(new)

    def _torch_adam(
        self,
        group: dict[str, Any],
        rounding: Rounding,
        lists: list[list[torch.Tensor]],
        has_complex: bool = False,
    ) -> None:
        """Torch's own step on plain tensors: ``lists`` are the first six arguments of ``adam``."""
        params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps = lists
        beta1, beta2 = group["betas"]
        adam(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            max_exp_avg_sqs,
            steps,
            amsgrad=group["amsgrad"],
            has_complex=has_complex,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            foreach=rounding == "foreach",
            fused=rounding == "fused",
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            decoupled_weight_decay=group["decoupled_weight_decay"],
        )


class AdamW(Adam, torch.optim.AdamW):
    """``torch.optim.AdamW`` with compressed moments: as ``Adam``, weight decay decoupled."""


def _check_options(group: dict[str, Any]) -> None:
    if group.get("differentiable"):
        raise ValueError(
            "differentiable must be False: compressed weights are written in place, got "
            f"{group['differentiable']}"
        )
    if group.get("capturable") and not group.get("fused"):
        raise ValueError(
            "capturable must be False unless fused is True: only torch's fused implementation "
            f"counts steps on the device, got {group['capturable']}"
        )


def _has_l2_decay(group: dict[str, Any]) -> bool:
    return group["weight_decay"] != 0 and not group["decoupled_weight_decay"]


def _state_names(group: dict[str, Any]) -> tuple[str, ...]:
    names = ("exp_avg", "exp_avg_sq")
    return (*names, "max_exp_avg_sq") if group["amsgrad"] else names


def _first_step(group: dict[str, Any], param: torch.Tensor) -> torch.Tensor:
    """The count of steps before the first one, where torch keeps it: on the device if fused."""
    return torch.zeros(
        (),
        dtype=_get_scalar_dtype(is_fused=group["fused"]),
        device=param.device if group["fused"] else "cpu",
    )


def _own(dense: torch.Tensor, held: torch.Tensor | CompressedTensor) -> torch.Tensor:
    """``dense`` where it is not the very tensor that is held, else a copy."""
    return dense.clone() if dense is held else dense
