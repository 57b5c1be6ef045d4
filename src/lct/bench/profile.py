"""How long the GPU was at work in a step, on which kernels, and the host in calls of CUDA."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

TOP_KERNELS = 12
MAX_NAME = 96


def merged_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


def profile_steps(step: Callable[[], object], num_steps: int) -> dict[str, Any]:
    """Run ``step`` under torch's profiler; milliseconds a step (``summarize_events``)."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
    return summarize_events(profiler.events() or (), num_steps)


def summarize_events(events: Iterable[Any], num_steps: int) -> dict[str, Any]:
    """What a profile says, in milliseconds a step.

    ``gpu_busy_ms``: the union of the intervals of kernels and copies on all streams;
    ``gpu_kernels_ms``: the sums of those that took longest, by name. ``host_calls_ms``: the sums of
    the calls of CUDA that took the host longest, by name, and ``host_calls`` their numbers: where
    the GPU waits for the host, launches, allocations and waits show here.
    """
    intervals = []
    kernels: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in events:
        # Annotations of ranges lie on the device's time line too, and span the gaps.
        if event.is_user_annotation:
            continue
        start, end = event.time_range.start, event.time_range.end
        if event.device_type == DeviceType.CUDA:
            intervals.append((start, end))
            kernels[event.name[:MAX_NAME]] += end - start
        elif event.name.startswith("cu"):  # cudaLaunchKernel, cuLaunchKernel, …
            calls[event.name] += end - start
            counts[event.name] += 1
    scale = 1e3 * num_steps  # microseconds
    longest = calls.most_common(TOP_KERNELS)
    return {
        # None where the profiler may not look at the GPU, as in some containers.
        "gpu_busy_ms": merged_length(intervals) / scale if intervals else None,
        "gpu_kernels_ms": {name: us / scale for name, us in kernels.most_common(TOP_KERNELS)},
        "host_calls_ms": {name: us / scale for name, us in longest},
        "host_calls": {name: counts[name] / num_steps for name, _ in longest},
    }
