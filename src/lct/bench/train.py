"""``lct bench train``: memory and time of whole training steps, with LCT and with its alternatives.

``measure`` trains a case in this process; ``measure_apart`` in a process of its own on CUDA, so
that no run sees what another one left in the allocator, in the arena or in the compiler. Running
out of memory is a result.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import struct
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from .. import ArenaExhaustedError
from ..config import arena_limit_bytes
from .isolate import ChildError, describe_error, run_isolated
from .peak import itemize_peak
from .profile import profile_steps
from .timing import summarize
from .tokens import Tokens
from .training_run import MIB, Case, Run, device_of, full_depth
from .variants import DENSE, VARIANTS

# What a CUDA context takes of a card, which torch's allocator does not see: the same for all.
CONTEXT_MIB = 600
OUT_OF_MEMORY = "out of memory"


def hash_losses(losses: Sequence[float]) -> str:
    """SHA-256 of the losses as FP32, little-endian."""
    return hashlib.sha256(struct.pack(f"<{len(losses)}f", *losses)).hexdigest()


def measure(case: Case, tokens: Tokens) -> dict[str, Any]:
    """Train ``case`` and give its row; ``completed`` is False where memory ran out."""
    return _blank_row(case, tokens) | _within_memory(_measure, case, tokens)


def _within_memory(function: Callable[..., dict[str, Any]], case: Case, *args: Any) -> Any:
    try:
        with _setting(case):
            return function(case, *args)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {"completed": False, "error": OUT_OF_MEMORY}


def measure_apart(case: Case, tokens: Tokens) -> dict[str, Any]:
    """``measure``, in a process of its own on CUDA; the row's ``error`` says what it raised."""
    return _blank_row(case, tokens) | _apart(measure, case, tokens)


def _apart(function: Callable[..., dict[str, Any]], case: Case, *args: Any) -> dict[str, Any]:
    # One run that breaks must not lose the others' figures: it is reported, and the command fails.
    try:
        if case.device.startswith("cuda"):
            return run_isolated(function, case, *args)
        return function(case, *args)
    except ChildError as error:
        return {"completed": False, "error": str(error), "traceback": error.traceback}
    except Exception as error:
        text = traceback.format_exc()
        return {"completed": False, "error": describe_error(error), "traceback": text}


def _measure(case: Case, tokens: Tokens) -> dict[str, Any]:
    run = Run(case, tokens)
    run.warm_up()
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)
        torch.cuda.reset_peak_memory_stats(run.device)
    if case.cuda_graph:
        run.capture()
    timing = summarize([run.timed_step() for _ in range(case.steps)])
    row: dict[str, Any] = {
        **run.peaks(),
        "step_ms_median": timing.median_ms,
        "step_ms_iqr": timing.iqr_ms,
        "tokens_per_s": _tokens_a_step(case) / timing.median_ms * 1e3,
    }
    if run.seen is not None and run.variant.storage.activations:
        row["activations"] = {
            "encoded": run.seen.encoded,
            "reused": run.seen.reused,
            "dense_mib": run.seen.dense_bytes / MIB,
            "stored_mib": run.seen.stored_bytes / MIB,
        }
    if case.profiled and run.device.type == "cuda":
        row |= profile_steps(run.next_step, case.profiled)
    if case.itemized:
        row |= itemize_peak(run.next_step, run.device)
    if run.configuration.compiled != "none":
        # More than one a kind of layer: something is compiled anew, or in pieces.
        row["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    losses = run.loss_values()
    row |= run.held() | {
        "loss_sha256": hash_losses(losses),
        "losses": losses,
    }
    if case.identity:
        row |= run.hashes() | {"validation_loss": run.held_out_loss()}
    return row | {"completed": True}


def measure_pairs(case: Case, tokens: Tokens, pairs: int) -> dict[str, Any]:
    """Steps of ``case`` and of the same without LCT, both alive on the device, in turn.

    Ratios are those of pairs, whose order alternates. A dense case is paired with itself: what the
    machine's noise does to a ratio, and whether kernels repeat their bits. ``first_difference``:
    the first step, warm-up included, whose losses differ. ``completed`` is False where memory ran
    out.
    """
    row = _named(case) | _within_memory(_measure_pairs, case, tokens, pairs)
    return row | _settings(case, tokens)


def _measure_pairs(case: Case, tokens: Tokens, pairs: int) -> dict[str, Any]:
    base = replace(case, variant=VARIANTS[case.variant].equals or DENSE)
    runs = [Run(base, tokens), Run(case, tokens)]
    for run in runs:
        run.warm_up()
        if case.cuda_graph:
            run.capture()
    times: list[list[float]] = [[], []]
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            times[which].append(runs[which].timed_step())
    busy: list[float | None] = [None, None]
    if case.profiled and runs[0].device.type == "cuda":
        busy = [profile_steps(run.next_step, case.profiled)["gpu_busy_ms"] for run in runs]
    losses = [run.loss_values() for run in runs]
    hashes = [hash_losses(values) for values in losses]
    differ = (step for step, (a, b) in enumerate(zip(*losses, strict=True)) if a != b)
    ratios = summarize([b / a for a, b in zip(*times, strict=True)])
    medians = [summarize(values) for values in times]
    return {
        "base": base.variant,
        "pairs": pairs,
        "base_step_ms_median": medians[0].median_ms,
        "step_ms_median": medians[1].median_ms,
        "ratio_median": ratios.median_ms,
        "ratio_iqr": ratios.iqr_ms,
        "base_gpu_busy_ms": busy[0],
        "gpu_busy_ms": busy[1],
        "gpu_busy_ratio": busy[1] / busy[0] if busy[0] and busy[1] else None,
        "first_difference": next(differ, None),
        "base_loss_sha256": hashes[0],
        "loss_sha256": hashes[1],
        "completed": True,
        "error": None,
    }


def measure_pairs_apart(case: Case, tokens: Tokens, pairs: int) -> dict[str, Any]:
    """``measure_pairs``, in a process of its own on CUDA."""
    return _named(case) | _apart(measure_pairs, case, tokens, pairs)


@contextlib.contextmanager
def _setting(case: Case) -> Iterator[None]:
    """The limits and the switches of a case; what it compiled and allocated goes after it."""
    import torch._dynamo.utils
    import torch._functorch.config

    from ..demo.training import deterministic

    device = device_of(case)
    if device.type == "cuda":
        if case.expandable_segments:
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        if case.memory_limit_mib is not None:
            limit = (case.memory_limit_mib - CONTEXT_MIB) * MIB
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
            # The default of that card: LCT's arena grows with the device's memory.
            arena_mib = arena_limit_bytes(case.memory_limit_mib * MIB) // MIB
            os.environ.setdefault("LCT_ARENA_MIB", str(arena_mib))
    elif case.memory_limit_mib is not None:
        raise ValueError(f"a memory limit needs a CUDA device, got {case.device}")
    with ExitStack() as stack:
        budget = VARIANTS[case.variant].saving.budget
        stack.enter_context(torch._functorch.config.patch(activation_memory_budget=budget))
        if case.identity:
            stack.enter_context(deterministic())
        try:
            yield
        finally:
            torch.compiler.reset()
            torch._dynamo.utils.counters.clear()
            gc.collect()


def is_out_of_memory(error: BaseException | None) -> bool:
    """True where the device's memory, or the overflow arena's, ran out, however it was wrapped."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, ArenaExhaustedError)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _tokens_a_step(case: Case) -> int:
    return case.sequence * case.micro_batch * case.micro_steps


def _named(case: Case) -> dict[str, Any]:
    return {
        "model": case.model,
        "configuration": case.configuration,
        "variant": case.variant,
        "sequence": case.sequence,
        "micro_batch": case.micro_batch,
    }


def _blank_row(case: Case, tokens: Tokens) -> dict[str, Any]:
    """A row as it is before anything was measured: its keys, in their order."""
    measured = (
        *("peak_allocated_mib", "peak_active_mib", "peak_reserved_mib"),
        *("step_ms_median", "step_ms_iqr", "gpu_busy_ms", "tokens_per_s", "loss_sha256"),
    )
    row = {**_named(case), **dict.fromkeys(measured), "completed": False, "error": None}
    return row | _settings(case, tokens)


def _settings(case: Case, tokens: Tokens) -> dict[str, Any]:
    return {
        "optimizer": case.optimizer_row.name,
        "lossy": case.optimizer_row.lossy,
        "micro_steps": case.micro_steps,
        "num_layers": case.num_layers or full_depth(case.model),
        "warm_up": case.warm_up,
        "steps": case.steps,
        "identity": case.identity,
        "cuda_graph": case.cuda_graph,
        "memory_limit_mib": case.memory_limit_mib,
        "expandable_segments": case.expandable_segments,
        "tokens": tokens.kind,
        "tokens_sha256": tokens.sha256,
    }


def differences(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Where variants with LCT part from the same runs without it, a line each; empty if nowhere.

    ``rows``: of ``measure`` with ``identity``. A variant whose counterpart is not among them is
    compared with nothing, which counts as a difference.
    """
    keys = ("loss_sha256", "weights_sha256", "state_sha256", "validation_loss")
    place = ("model", "configuration", "sequence", "micro_batch", "optimizer")
    found = {(*(row[k] for k in place), row["variant"]): row for row in rows}
    lines = []
    for row in rows:
        equals = VARIANTS[row["variant"]].equals
        if equals is None:
            continue
        base = found.get((*(row[k] for k in place), equals))
        if base is None or not (row["completed"] and base["completed"]):
            lines.append(f"{row['variant']}: it and {equals} must both complete to be compared")
            continue
        lines += [
            f"{row['model']} {row['configuration']} {row['sequence']}: {key} of {row['variant']} "
            f"is {row[key]}, of {equals} {base[key]}"
            for key in keys
            if row[key] != base[key]
        ]
    return lines
