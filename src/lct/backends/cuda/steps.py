"""Fused optimizer steps on compressed parameters and state, in one pass (kernels/step.cuh)."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch

from ...layout import WORD_BYTES, PayloadLayout
from . import jit
from .codec import (
    DECODE_TABLE_BYTES,
    ENCODE_TABLE_BYTES,
    SharedMemory,
    aligned,
    batches,
    call_over_groups,
    current_device,
    current_stream,
    is_capturing,
    launch_with_credit,
    ready,
    take,
    template,
)

# Bytes of shared memory that the kernels themselves declare, at most: RareState of every warp.
DECLARED_BYTES = 1024
_TABLE_BYTES = DECODE_TABLE_BYTES + ENCODE_TABLE_BYTES  # of each tensor
ROUNDINGS = ("single", "foreach", "fused")


class SgdArgs(ctypes.Structure):
    """The argument of ``sgd_step``; mirrors ``struct StepArgs`` in sgd_update.cuh."""

    _fields_ = [
        ("tensors", jit.Args * 2),
        *[(name, ctypes.c_uint64) for name in ("grad", "grad_scale", "found_inf")],
        *[(name, ctypes.c_float) for name in ("lr", "momentum", "dampening_left", "weight_decay")],
    ]


class AdamArgs(ctypes.Structure):
    """The argument of ``adam_step``; mirrors ``struct StepArgs`` in adam_update.cuh."""

    _fields_ = [
        ("tensors", jit.Args * 3),
        *[(name, ctypes.c_uint64) for name in ("grad", "grad_scale", "found_inf", "step")],
        *[(name, ctypes.c_float) for name in ("lr", "beta1", "beta2", "weight_decay", "eps")],
        *[(name, ctypes.c_float) for name in ("grad_share", "square_share", "param_share")],
        *[(name, ctypes.c_float) for name in ("step_size", "correction")],
    ]


class MuonArgs(ctypes.Structure):
    """The argument of ``muon_step``; mirrors ``struct StepArgs`` in muon_update.cuh."""

    _fields_ = [
        ("tensors", jit.Args * 1),
        *[(name, ctypes.c_uint64) for name in ("grad", "update")],
        *[(name, ctypes.c_float) for name in ("buffer_share", "update_share")],
    ]


# A payload and its layout; the tensors of one update, the parameter first.
Part = tuple[Any, PayloadLayout]
Update = Sequence[Part]


@cache
def _list_type(args_type: type[ctypes.Structure]) -> type[ctypes.Structure]:
    """Mirrors ``struct StepList`` in step.cuh."""
    fields = [
        ("first_block", ctypes.c_uint32 * (jit.MOST_STEPS + 1)),
        ("steps", args_type * jit.MOST_STEPS),
    ]
    return type("StepList", (ctypes.Structure,), {"_fields_": fields})


def sgd(
    updates: Sequence[Update],
    grads: Sequence[torch.Tensor],
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
    """SGD with momentum buffers that exist, on pooled BF16 payloads: parameter, buffer.

    ``grads`` are dense BF16, on one device. Bits as torch's ``rounding`` path gives them. Does not
    wait for the device.
    """
    _check_rounding(rounding)
    if rounding == "fused" and maximize:
        # Torch's kernel contracts other products there, depending on a value's place in a thread.
        raise ValueError("maximize must not be asked of the fused rounding")
    args = SgdArgs(
        lr=lr, momentum=momentum, dampening_left=1 - dampening, weight_decay=weight_decay
    )
    # In the order of the kernel's options.
    options = rounding == "fused", nesterov, maximize, weight_decay != 0, grad_scale is not None
    _launch("sgd_step", args, updates, grads, options, grad_scale, found_inf)


def adam(
    updates: Sequence[Update],
    grads: Sequence[torch.Tensor],
    *,
    step: float | Sequence[torch.Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled_weight_decay: bool,
    maximize: bool,
    rounding: str,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None:
    """Adam or AdamW with moments that exist, on pooled BF16 payloads: parameter, exp_avg,
    exp_avg_sq.

    ``step`` counts this step too: a number, the same for all, or a float32 tensor on the device for
    each with ``rounding="fused"``, which computes with it there. ``grads`` are dense BF16, on one
    device. Bits as torch's ``rounding`` path gives them. Does not wait for the device.
    """
    _check_rounding(rounding)
    if rounding == "fused" and weight_decay != 0 and not decoupled_weight_decay:
        # Torch's kernel contracts the product for some values and not for others.
        raise ValueError("L2 decay must not be asked of the fused rounding")
    args = AdamArgs(lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps)
    counts: Sequence[torch.Tensor] = ()
    if isinstance(step, Sequence):
        assert rounding == "fused" and len(step) == len(updates)
        assert all(count.is_cuda and count.dtype == torch.float32 for count in step)
        counts = step
    else:
        assert rounding != "fused"
        # As torch: Python's numbers, rounded to float when a kernel takes them.
        root = (1 - beta2**step) ** 0.5
        args.grad_share, args.square_share = 1 - beta1, 1 - beta2
        args.param_share = 1 - lr * weight_decay
        args.step_size = -(lr / (1 - beta1**step))
        # Rounding the double quotient once more gives float's own.
        args.correction = 1 / ctypes.c_float(root).value if rounding == "single" else root
    # In the order of the kernel's options.
    options = (
        rounding == "fused",
        rounding == "single",
        maximize,
        weight_decay != 0 and not decoupled_weight_decay,
        weight_decay != 0 and decoupled_weight_decay,
        grad_scale is not None,
    )
    _launch("adam_step", args, updates, grads, options, grad_scale, found_inf, counts)


def muon(buffer: Part, grad: torch.Tensor, *, momentum: float) -> torch.Tensor:
    """Muon's Nesterov momentum on a buffer that exists, a pooled BF16 payload, in place.

    ``grad``: dense BF16. Returns what torch orthogonalises, dense BF16 of its shape, contiguous.
    Bits of torch's ``buffer.lerp_(grad, 1 - momentum)`` and ``grad.lerp(buffer, momentum)``. Does
    not wait for the device.
    """
    update = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    buffer_share, buffer_from_grad = _lerp_share(1 - momentum)
    update_share, update_from_buffer = _lerp_share(momentum)
    args = MuonArgs(update=update.data_ptr(), buffer_share=buffer_share, update_share=update_share)
    # In the order of the kernel's options.
    options = buffer_from_grad, not update_from_buffer
    _launch("muon_step", args, [[buffer]], [grad], options, None, None)
    return update


def _lerp_share(weight: float) -> tuple[float, bool]:
    """How torch's lerp with a number computes: the factor of ``end - self``, and whether that is
    added to ``end`` (which is the nearer one) instead of ``self``.
    """
    rounded = ctypes.c_float(weight).value
    if abs(rounded) < 0.5:
        return rounded, False
    # Exact in double, so that rounding it to float gives float's difference. -0 where weight is 1.
    return -(1 - rounded), True


def _check_rounding(rounding: str) -> None:
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be one of {', '.join(ROUNDINGS)}, got {rounding!r}")


def _launch(
    entry: str,
    args: ctypes.Structure,
    updates: Sequence[Update],
    grads: Sequence[torch.Tensor],
    options: tuple[bool, ...],
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    counts: Sequence[torch.Tensor] = (),
) -> None:
    """Step ``updates`` with the kernel ``entry``; ``args`` has all that they share, ``counts`` the
    count of steps of each, where the kernel reads them.
    """
    device = grads[0].get_device()
    if current_device() != device:
        with torch.cuda.device(device):
            return _launch(entry, args, updates, grads, options, grad_scale, found_inf, counts)
    shared: Any = args
    if grad_scale is not None:
        grad_scale = grad_scale.to(grads[0].device, non_blocking=True)
        shared.grad_scale = grad_scale.data_ptr()
    if found_inf is not None:
        found_inf = found_inf.to(grads[0].device, non_blocking=True)
        shared.found_inf = found_inf.data_ptr()
    # Referenced until the launches are enqueued.
    dense = [aligned(grad.contiguous()) for grad in grads]
    arena = updates[0][0][0].spill.arena
    capturing = is_capturing()
    for batch in step_batches(updates, arena.limit_chunks):
        some, some_grads = [updates[k] for k in batch], [dense[k] for k in batch]
        some_counts = [counts[k] for k in batch] if counts else ()
        worst = sum([_worst_chunks(update) for update in some])
        if capturing or worst > arena.limit_chunks:
            _launch_with_credit(entry, options, args, some, some_grads, some_counts)
        else:
            _launch_ready(entry, options, args, some, some_grads, some_counts, worst)
    if grad_scale is not None:
        # Torch's fused step leaves the unscaled gradient, unless it found an infinity. One
        # dimension: else the quotient would be computed with the scale rounded to BF16.
        scale = grad_scale.reshape(1)
        if found_inf is not None:
            scale = torch.where(found_inf.reshape(1) == 1, torch.ones_like(scale), scale)
        for grad in grads:
            grad.div_(scale)


@cache
def _chosen(entry: str, options: tuple[bool, ...]) -> frozenset[str]:
    """Names of the kernel's options that are on."""
    names = jit.KERNELS[entry].options
    return frozenset(name for name, on in zip(names, options, strict=True) if on)


def _worst_chunks(update: Update) -> int:
    return update[0][1].num_groups * len(update)


class _ReadySteps:
    """A launch that steps some parameters, made ready for the layouts of their tensors."""

    __slots__ = ("call", "steps")

    def __init__(
        self,
        entry: str,
        options: tuple[bool, ...],
        args: ctypes.Structure,
        updates: Sequence[Update],
    ) -> None:
        kernel, steps, memory = _prepare(entry, options, args, updates)
        self.steps = steps.steps[: len(updates)]
        parts = [step.tensors[0] for step in self.steps]
        self.call = call_over_groups(kernel, steps, parts, memory, steps.first_block)


def _prepare(
    entry: str, options: tuple[bool, ...], args: ctypes.Structure, updates: Sequence[Update]
) -> tuple[jit.Loaded, Any, SharedMemory]:
    """The kernel for ``updates``, its argument with their payloads, and its shared memory."""
    layout, device = updates[0][0][1], updates[0][0][0].payload.get_device()
    kernel = jit.load(entry, layout.preset, layout.dtype, device, _chosen(entry, options))
    steps: Any = _list_type(type(args))()
    for step, update in zip(steps.steps, updates, strict=False):
        step.tensors = _payloads(update, device)
    memory = _memory_of(updates)
    return _fitting(kernel, memory, device), steps, memory


def _fill(
    steps: Sequence[Any],
    args: ctypes.Structure,
    updates: Sequence[Update],
    grads: Sequence[torch.Tensor],
    counts: Sequence[torch.Tensor],
) -> None:
    device = grads[0].get_device()
    for step, update, grad in zip(steps, updates, grads, strict=True):
        ctypes.memmove(ctypes.addressof(step), ctypes.addressof(args), ctypes.sizeof(args))
        step.tensors = _payloads(update, device)
        step.grad = grad.data_ptr()
    for step, count in zip(steps, counts, strict=False):
        step.step = count.data_ptr()


def _launch_ready(
    entry: str,
    options: tuple[bool, ...],
    args: ctypes.Structure,
    updates: Sequence[Update],
    grads: Sequence[torch.Tensor],
    counts: Sequence[torch.Tensor],
    worst_chunks: int,
) -> None:
    """Step what a training loop steps again and again, in little host time."""
    stored, layout = updates[0][0]
    device = grads[0].get_device()
    sizes = [(other.num_values, other.capacity_words) for update in updates for _, other in update]
    pool = ready(layout, (entry, options, device, tuple(sizes)))
    call = take(pool) or _ReadySteps(entry, options, args, updates)
    _fill(call.steps, args, updates, grads, counts)
    stream = current_stream(device)
    arena = stored.spill.arena
    with arena.lock:
        sequence = arena.admit(worst_chunks, stream)
        for update in updates:
            for held, _ in update:
                held.spill.last = sequence
        call.call.launch(stream)
        arena.launched()
    pool.append(call)


def step_batches(updates: Sequence[Update], limit_chunks: int) -> Iterator[list[int]]:
    """Numbers of the updates that one launch takes (``codec.batches``)."""
    return batches([_worst_chunks(update) for update in updates], limit_chunks, jit.MOST_STEPS)


def _payloads(update: Update, device: int) -> ctypes.Array[jit.Args]:
    """What the kernel reads of the update's payloads; kept with the parameter's until one moves."""
    first = update[0][0]
    kept = first.step_args
    if kept is not None and len(kept) == len(update):
        for part, (stored, _) in zip(kept, update, strict=True):
            # A serial number belongs to one payload.
            if part.serial != stored.spill.serial:
                break
        else:
            return kept
    kept = (jit.Args * len(update))(*(template(layout) for _, layout in update))
    tables = jit.device_tables(device).data_ptr()
    for part, (stored, _) in zip(kept, update, strict=True):
        part.payload, part.tables = stored.payload.data_ptr(), tables
        part.arena, part.serial = stored.spill.arena.pointer, stored.spill.serial
    first.step_args = kept
    return kept


def _launch_with_credit(
    entry: str,
    options: tuple[bool, ...],
    args: ctypes.Structure,
    updates: Sequence[Update],
    grads: Sequence[torch.Tensor],
    counts: Sequence[torch.Tensor],
) -> None:
    """Step in a captured graph, or a parameter so large that it goes in pieces."""
    kernel, steps, memory = _prepare(entry, options, args, updates)
    used = steps.steps[: len(updates)]
    _fill(used, args, updates, grads, counts)
    launch_with_credit(
        kernel,
        steps,
        [step.tensors for step in used],
        updates[0][0][0].spill.arena,
        [stored.spill for update in updates for stored, _ in update],
        len(updates[0]),
        memory,
        current_stream(grads[0].get_device()),
        first_blocks=steps.first_block,
    )


def _memory_of(updates: Sequence[Update]) -> SharedMemory:
    words = max(sum([layout.capacity_words for _, layout in update]) for update in updates)
    return SharedMemory(len(updates[0]) * _TABLE_BYTES, words * WORD_BYTES)


@cache
def _shared_memory_bytes(device: int) -> int:
    """Bytes of dynamic shared memory that a block may have."""
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks the field
    return properties.shared_memory_per_block_optin - DECLARED_BYTES


def _fitting(kernel: jit.Loaded, memory: SharedMemory, device: int) -> jit.Loaded:
    """``kernel``, with fewer warps a block where the shared memory of ``device`` holds no more."""
    room = _shared_memory_bytes(device) - memory.tables
    if kernel.warps * memory.warp <= room:
        return kernel
    config = dataclasses.replace(kernel.config, any_warps=False)
    warps = room // memory.warp
    return dataclasses.replace(kernel, warps=warps, config=config, grids={}, resident={})
