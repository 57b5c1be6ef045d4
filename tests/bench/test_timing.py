"""The timing harness: order of calls, rotation, summary, and what it does on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch

from lct.bench import timing
from lct.bench.timing import measure, rotations_for, summarize

CPU = torch.device("cpu")


def test_summary() -> None:
    found = summarize([4.0, 1.0, 2.0, 3.0, 100.0])
    assert (found.median_ms, found.iqr_ms, found.repetitions) == (3.0, 2.0, 5)
    with pytest.raises(ValueError, match="at least one sample"):
        summarize([])


def test_wall_times() -> None:
    found = measure(
        {"short": lambda _: time.sleep(0.002), "long": lambda _: time.sleep(0.01)},
        CPU,
        repetitions=5,
    )
    assert found.method == "wall"
    assert found.note is None
    assert 2 <= found.timings["short"].median_ms < found.timings["long"].median_ms
    assert found.over("long", "short") > 1.5
    assert found.timings["long"].repetitions == 5


def test_variants_take_turns_and_buffers_rotate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "WALL_MIN_MS", 0.0)
    monkeypatch.setattr(timing, "WARMUP", 1)
    calls: list[tuple[str, int]] = []
    variants = {name: lambda i, name=name: calls.append((name, i)) or (name, i) for name in "abc"}
    found = measure(variants, CPU, rotations=4, repetitions=8)
    warm, timed = calls[:12], calls[12:]
    assert warm == [(name, i) for name in "abc" for i in range(4)]
    # Each timed call comes after an untimed one on the same buffers.
    assert timed[::2] == timed[1::2]
    assert [name for name, _ in timed[::2]] == ["a", "b", "c"] * 8
    sets = [i for _, i in timed[::2]]
    # A set returns only after all others were used.
    assert all(sorted(sets[k : k + 4]) == [0, 1, 2, 3] for k in range(len(sets) - 3))
    for name in "abc":
        assert all(result == (name, i) for i, result in found.results[name])
        assert found.runs[name] == [calls.count((name, i)) for i in range(4)]


def test_wrong_repetitions() -> None:
    with pytest.raises(ValueError, match="repetitions must be at least 1, got 0"):
        measure({"a": lambda _: None}, CPU, repetitions=0)


def test_the_cpu_needs_no_rotation() -> None:
    assert rotations_for(1000, CPU, 1000) == 1


@pytest.mark.gpu
def test_short_calls_are_replayed_as_a_graph() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x = [torch.full((1 << 16,), float(i), device=device) for i in range(4)]
    y = [torch.empty_like(t) for t in x]
    found = measure(
        {"copy": lambda i: y[i].copy_(x[i]), "double": lambda i: x[i] * 2}, device, rotations=4
    )
    assert (found.method, found.note) == ("graph", None)
    assert 0 < found.timings["copy"].median_ms < 0.1
    for i, result in found.results["double"]:
        assert torch.equal(result, x[i] * 2)


@pytest.mark.gpu
def test_replays_are_counted() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    counts = torch.zeros(3, 1 << 10, device=device)
    rows = [counts[i] for i in range(3)]
    found = measure({"add": lambda i: rows[i].add_(1)}, device, rotations=3)
    assert (found.method, found.note) == ("graph", None)
    assert found.runs["add"] == counts[:, 0].int().tolist()


# In a process of its own: after a capture that failed, torch's CUDA generator refuses to draw.
UNCAPTURABLE = """
import torch
from lct.bench.timing import measure

device = torch.device("cuda", torch.cuda.current_device())
x = torch.ones(1 << 10, device=device)
found = measure({"sync": lambda _: x.sum().item()}, device)
assert found.method == "events", found
assert found.note is not None
assert found.note.startswith("no graph: ") or found.timings["sync"].median_ms >= 0.1
found = measure({"copy": lambda _: x.clone()}, device, no_graph="it is a test")
assert (found.method, found.note) == ("events", "no graph: it is a test")
"""


@pytest.mark.gpu
def test_calls_that_cannot_be_captured_are_timed_by_events() -> None:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    subprocess.run([sys.executable, "-c", UNCAPTURABLE], check=True, env=environment)


@pytest.mark.gpu
def test_long_calls_are_timed_by_events() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.ones(1 << 28, device=device)
    found = measure({"double": lambda _: x * 2}, device, repetitions=3)
    assert (found.method, found.note) == ("events", None)


@pytest.mark.gpu
def test_rotation_exceeds_twice_the_l2() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    for size in (1 << 16, 1 << 20, 1 << 22):
        sets = rotations_for(size, device, 4 * size)
        assert (sets - 1) * size >= 2 * l2 or sets * 4 * size > torch.cuda.mem_get_info()[0] // 4
    assert rotations_for(2 * l2, device, 8 * l2) == 1
