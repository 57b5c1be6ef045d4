"""What a training step's peak of memory consists of, from the allocator's history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import torch

MIB = 1 << 20
MAX_ENTRIES = 1_000_000
TOP_ITEMS = 24


def itemize_peak(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Run ``step`` once with the allocator's history on; what was allocated at the peak, in MiB.

    ``peak_held_mib``: from before the step (weights, state, arena) and not freed until the peak;
    ``peak_items``: blocks of the step that were alive then, grouped by where they were allocated
    and by size, the largest groups first. Code of torch itself is passed over: a block counts for
    the line that called it, or for autograd where no line of Python did.
    """
    torch.cuda.synchronize(device)
    held_bytes = torch.cuda.memory_allocated(device)
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=MAX_ENTRIES)
    try:
        step()
        torch.cuda.synchronize(device)
        snapshot = torch.cuda.memory._snapshot(device)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return items_at_peak(snapshot["device_traces"][device.index], held_bytes)


def items_at_peak(trace: Sequence[Mapping[str, Any]], held_bytes: int) -> dict[str, Any]:
    """``peak_held_mib`` and ``peak_items`` of a trace: see ``itemize_peak``."""
    live, peak, peak_end = 0, 0, 0
    for number, event in enumerate(trace):
        live += _change(event)
        if live > peak:
            peak, peak_end = live, number + 1
    blocks: dict[int, Mapping[str, Any]] = {}
    for event in trace[:peak_end]:
        if event["action"] == "alloc":
            blocks[event["addr"]] = event
        elif event["action"] == "free_completed" and blocks.pop(event["addr"], None) is None:
            held_bytes -= event["size"]
    groups = Counter((_place(event.get("frames", ())), event["size"]) for event in blocks.values())
    largest = sorted(groups.items(), key=lambda item: -item[0][1] * item[1])
    return {
        "peak_held_mib": held_bytes / MIB,
        "peak_items": [
            {"where": place, "blocks": count, "mib": size * count / MIB}
            for (place, size), count in largest[:TOP_ITEMS]
        ],
    }


def _change(event: Mapping[str, Any]) -> int:
    signs = {"alloc": 1, "free_completed": -1}
    return signs.get(event["action"], 0) * int(event["size"])


def _place(frames: Sequence[Mapping[str, Any]]) -> str:
    """File, line and function of the innermost frame that is not torch's own."""
    for frame in frames:
        parts = PurePath(frame["filename"]).parts
        if "torch" not in parts:
            return f"{'/'.join(parts[-3:])}:{frame['line']} {frame['name']}"
    return "autograd"
