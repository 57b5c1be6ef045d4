"""``lct.optim.Muon``: torch's, with compressed momentum."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim._muon import muon

from ..nn.compressed_weight import CompressedWeight
from ..tensor import CompressedTensor
from .base import (
    CompressedState,
    Rounding,
    compress_state,
    decode_state,
    has_compressible_state,
)


class Muon(CompressedState, torch.optim.Muon):
    """``torch.optim.Muon`` with the same arguments, keys and bits, and compressed momentum.

    Takes parameters of two dimensions, as torch's does. ``momentum_buffer`` of BF16, FP16 and FP32
    parameters (of ``lct.compress_`` or dense ones) is held compressed. Parameters are decoded,
    stepped by torch and encoded one by one, on CUDA too: the step is matrix products for the most
    part. RuntimeError for gradients that are sparse, and for complex parameters.
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
        self, group: dict[str, Any], params: list[torch.Tensor], rounding: Rounding
    ) -> None:
        options = {name: value for name, value in group.items() if name in _OPTIONS}
        for param in params:
            assert param.grad is not None
            state = self.state[param]
            held = state.get("momentum_buffer")
            buffer = torch.zeros_like(param.grad) if held is None else decode_state(param, held)
            weight = param.dense() if isinstance(param, CompressedWeight) else param
            muon([weight], [param.grad], [buffer], has_complex=False, **options)
            if has_compressible_state(param):
                into = held if isinstance(held, CompressedTensor) else None
                buffer = compress_state(param, buffer, into)
            state["momentum_buffer"] = buffer
            if isinstance(param, CompressedWeight):
                param.copy_(weight)


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
