"""The one timing harness: variants interleaved, buffers rotated past L2, medians with their spread.

On CUDA a variant is timed by events; where all are short, by replays of a CUDA graph. On the CPU by
``time.perf_counter_ns``. Correctness is the caller's gate: time nothing that gives other bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

# Takes the number of the set of buffers to use, 0 <= i < rotations. What it returns is kept until
# the same set comes round again, so that allocations rotate as the inputs do.
Call = Callable[[int], object]
Method = Literal["wall", "events", "graph"]

REPETITIONS = 15
WARMUP = 3
# Below this, launch overhead and event resolution (0.5 µs) would count: replay a graph instead.
GRAPH_BELOW_MS = 0.1
WALL_MIN_MS = 2.0  # on the CPU a sample is the mean of calls that fill this time
GRAPH_MIN_MS = 1.0  # one replay lasts at least this long
# A busy wait before each timed call, so that the host has enqueued the call when the device comes
# to it: else the gap between the first event and the first kernel would be the host's time.
LEAD_CYCLES = 1_000_000
ROTATED_L2_SIZES = 2
MEMORY_SHARE = 0.5  # of the free device memory, for rotated buffers


@dataclass(frozen=True)
class Timing:
    """Median and interquartile range of the repetitions, milliseconds a call."""

    median_ms: float
    iqr_ms: float
    repetitions: int


@dataclass(frozen=True)
class Measurement:
    """``timings`` and last ``results`` by variant, all by one ``method``. ``note``: why no graph.

    ``results``: (number of the set of buffers, what the timed call returned). ``runs``: how often
    each variant ran on each set, warm-up included: for calls that change what they work on.
    """

    timings: dict[str, Timing]
    results: dict[str, list[tuple[int, Any]]]
    method: Method
    runs: dict[str, list[int]]
    note: str | None = None

    def over(self, variant: str, base: str) -> float:
        """Median of ``variant`` over median of ``base``."""
        return self.timings[variant].median_ms / self.timings[base].median_ms


def summarize(samples_ms: list[float]) -> Timing:
    """Median and interquartile range. ValueError for no samples."""
    if not samples_ms:
        raise ValueError("a timing needs at least one sample, got none")
    low, middle, high = np.percentile(samples_ms, (25, 50, 75))
    return Timing(float(middle), float(high - low), len(samples_ms))


def rotations_for(buffer_bytes: int, device: torch.device, bytes_per_rotation: int) -> int:
    """How many sets of buffers keep L2 cold: they exceed twice its size before one returns.

    ``buffer_bytes``: the least that a timed call touches; ``bytes_per_rotation``: memory of a set.
    One set on the CPU, or where a single call already passes that size.
    """
    if device.type != "cuda":
        return 1
    cold_bytes = ROTATED_L2_SIZES * torch.cuda.get_device_properties(device).L2_cache_size
    sets = math.ceil(cold_bytes / max(buffer_bytes, 1))
    sets = 1 if sets <= 1 else sets + 1
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return max(1, min(sets, int(MEMORY_SHARE * free_bytes / max(bytes_per_rotation, 1))))


def measure(
    variants: Mapping[str, Call],
    device: torch.device,
    *,
    rotations: int = 1,
    repetitions: int = REPETITIONS,
    no_graph: str | None = None,
) -> Measurement:
    """Time ``variants`` in turn, ``repetitions`` times each; ValueError for fewer than one.

    ``no_graph``: why calls must not be captured, where that is so: encodes that take chunks of an
    arena which only their owner gives back, calls that wait for the device.
    """
    if repetitions < 1:
        raise ValueError(f"repetitions must be at least 1, got {repetitions}")
    runs = {name: [0] * rotations for name in variants}
    counted = {name: _counting(call, runs[name]) for name, call in variants.items()}
    for call in counted.values():
        # Every set of buffers once: first launches compile, first results take the device's memory.
        kept = [call(i % rotations) for i in range(max(WARMUP, rotations))]
        del kept
    if device.type != "cuda":
        return _time_wall(counted, rotations, repetitions, runs)
    with torch.cuda.device(device):
        rough = _time_events(counted, rotations, repetitions, runs)
        if max(timing.median_ms for timing in rough.timings.values()) >= GRAPH_BELOW_MS:
            return rough
        if no_graph is not None:
            return replace(rough, note=f"no graph: {no_graph}")
        try:
            return _time_graphs(variants, rough.timings, rotations, repetitions, runs)
        except Exception as error:
            # Whatever a capture forbids (a synchronisation, a host copy) raises its own library's
            # error. The events stand, and the result says how it was timed and why.
            torch.cuda.synchronize()
            return replace(rough, note=f"no graph: {type(error).__name__}: {error}")


def _counting(call: Call, runs: list[int]) -> Call:
    """``call``, counted in ``runs`` by set of buffers."""

    def counted(i: int) -> object:
        runs[i] += 1
        return call(i)

    return counted


class _Samples:
    """Times and results of interleaved calls. Every call takes the next set of buffers.

    Were a set used for a whole round, the second variant would find the first one's input in L2.
    """

    def __init__(self, variants: Mapping[str, Call], rotations: int) -> None:
        self._rotations = rotations
        self._calls = 0
        self._times: dict[str, list[float]] = {name: [] for name in variants}
        self._kept: dict[str, dict[int, Any]] = {name: {} for name in variants}

    def next_set(self) -> int:
        self._calls += 1
        return self._calls % self._rotations

    def keep(self, name: str, i: int, result: object) -> None:
        self._kept[name][i] = result

    def add(self, name: str, milliseconds: float) -> None:
        self._times[name].append(milliseconds)

    def measurement(self, method: Method, runs: dict[str, list[int]]) -> Measurement:
        timings = {name: summarize(values) for name, values in self._times.items()}
        results = {name: list(kept.items()) for name, kept in self._kept.items()}
        return Measurement(timings, results, method, runs)


def _time_wall(
    variants: Mapping[str, Call], rotations: int, repetitions: int, runs: dict[str, list[int]]
) -> Measurement:
    samples = _Samples(variants, rotations)
    for _ in range(repetitions):
        for name, call in variants.items():
            i = samples.next_set()
            # Not timed: torch and numba have thread pools of their own, and those of the variant
            # before still spin for a moment. It also says how many calls fill a sample.
            start = time.perf_counter_ns()
            result = call(i)
            rough_ms = (time.perf_counter_ns() - start) / 1e6
            calls = max(1, math.ceil(WALL_MIN_MS / max(rough_ms, 1e-3)))
            start = time.perf_counter_ns()
            for _ in range(calls):
                result = call(i)
            samples.add(name, (time.perf_counter_ns() - start) / 1e6 / calls)
            samples.keep(name, i, result)
    return samples.measurement("wall", runs)


def _time_events(
    variants: Mapping[str, Call], rotations: int, repetitions: int, runs: dict[str, list[int]]
) -> Measurement:
    samples = _Samples(variants, rotations)
    for _ in range(repetitions):
        events = {}
        for name, call in variants.items():
            i = samples.next_set()
            events[name] = _events()
            torch.cuda._sleep(LEAD_CYCLES)
            events[name][0].record()
            samples.keep(name, i, call(i))
            events[name][1].record()
        torch.cuda.synchronize()
        for name, (start, end) in events.items():
            samples.add(name, start.elapsed_time(end))
    return samples.measurement("events", runs)


def _time_graphs(
    variants: Mapping[str, Call],
    rough: Mapping[str, Timing],
    rotations: int,
    repetitions: int,
    runs: dict[str, list[int]],
) -> Measurement:
    """``variants`` as they are: a captured call does not run, each replay runs all of them."""
    samples = _Samples(variants, rotations)
    graphs = {}
    captured = {}
    for name, call in variants.items():
        calls = max(rotations, math.ceil(GRAPH_MIN_MS / max(rough[name].median_ms, 1e-3)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            # Results of one capture live together, so that each call writes memory of its own.
            captured[name] = [(i % rotations, call(i % rotations)) for i in range(calls)]
        graphs[name] = graph, calls
    for repetition in range(-1, repetitions):  # -1: the first replay uploads the graph
        for name, (graph, calls) in graphs.items():
            start, end = _events()
            torch.cuda._sleep(LEAD_CYCLES)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            for i, _ in captured[name]:
                runs[name][i] += 1
            if repetition >= 0:
                samples.add(name, start.elapsed_time(end) / calls)
    for name, results in captured.items():
        for i, result in results:
            samples.keep(name, i, result)
    return samples.measurement("graph", runs)


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
