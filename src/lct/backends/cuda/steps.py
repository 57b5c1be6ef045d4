"""Fused optimizer steps on compressed parameters and state, in one pass (kernels/step.cuh)."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from ...layout import WORD_BYTES, PayloadLayout
from . import jit
from .arena import Arena
from .codec import (
    DECODE_TABLE_BYTES,
    ENCODE_TABLE_BYTES,
    SharedMemory,
    aligned,
    current_stream,
    launch_with_credit,
    on_device,
    template,
)

_TABLE_BYTES = DECODE_TABLE_BYTES + ENCODE_TABLE_BYTES  # of each tensor
ROUNDINGS = ("single", "foreach", "fused")


class SgdArgs(ctypes.Structure):
    """The argument of ``sgd_step``; mirrors ``struct StepArgs`` in sgd_update.cuh."""

    _fields_ = [
        ("tensors", jit.Args * 2),
        *[(name, ctypes.c_uint64) for name in ("grad", "grad_scale", "found_inf")],
        *[(name, ctypes.c_float) for name in ("lr", "momentum", "dampening_left", "weight_decay")],
    ]


def sgd(
    param: Any,
    param_layout: PayloadLayout,
    state: Any,
    state_layout: PayloadLayout,
    grad: torch.Tensor,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    rounding: str,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None:
    """SGD with a momentum buffer that exists, on pooled BF16 payloads of equal size.

    ``grad`` is dense BF16. Bits as torch's ``rounding`` path gives them. Does not wait for the
    device.
    """
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be one of {', '.join(ROUNDINGS)}, got {rounding!r}")
    device = grad.device.index
    with on_device(device):
        dense_grad = aligned(grad.contiguous())
        tables = jit.device_tables(device).data_ptr()
        args = SgdArgs(
            tensors=(template(param_layout), template(state_layout)),
            grad=dense_grad.data_ptr(),
            grad_scale=grad_scale.data_ptr() if grad_scale is not None else 0,
            found_inf=found_inf.data_ptr() if found_inf is not None else 0,
            lr=lr,
            momentum=momentum,
            dampening_left=1 - dampening,
            weight_decay=weight_decay,
        )
        for part, stored in zip(args.tensors, (param, state), strict=True):
            part.payload, part.tables = stored.payload.data_ptr(), tables
            part.arena, part.serial = stored.spill.arena.pointer, stored.spill.serial
        options = {
            "ROUNDING": rounding == "fused",
            "NESTEROV": nesterov,
            "MAXIMIZE": maximize,
            "DECAY": weight_decay != 0,
            "SCALED": grad_scale is not None,
        }
        chosen = frozenset(name for name, on in options.items() if on)
        kernel = jit.load("sgd_step", param_layout.preset, param_layout.dtype, device, chosen)
        words = param_layout.capacity_words + state_layout.capacity_words
        memory = SharedMemory(2 * _TABLE_BYTES, words * WORD_BYTES)
        arena: Arena = param.spill.arena
        launch_with_credit(
            kernel,
            args,
            args.tensors,
            arena,
            (param.spill, state.spill),
            2,
            memory,
            current_stream(device),
        )
        if grad_scale is not None:
            # Torch's fused step leaves the unscaled gradient, unless it found an infinity.
            skipped = torch.zeros_like(grad_scale) if found_inf is None else found_inf
            grad.div_(torch.where(skipped == 1, torch.ones_like(grad_scale), grad_scale))
