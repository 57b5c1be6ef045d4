"""Host time of a call that does not wait for the GPU: ``lct bench host``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from .. import compress_, encode
from ..optim import SGD
from ..tensor import CompressedBatch, decode_all
from .timing import REPETITIONS, summarize

# Small: the device keeps up, so that the queue of launches never fills and makes the host wait.
NUM_VALUES = 2**16
CALLS = 200  # a sample is their mean
BASE = "torch.add"
WEIGHTS = 7  # the matrices of a transformer's block, which are decoded together
SAVES = 16  # that are encoded together, and decoded
# Tensors of a call, where they are several: times are those of each.
TENSORS = {
    f"decode {WEIGHTS} at once, each": WEIGHTS,
    f"encode {SAVES} saves, each": SAVES,
    f"decode {SAVES} saves, each": SAVES,
}


def calls(device: torch.device) -> dict[str, Callable[[], object]]:
    """The calls to time, by name; the first one is what the others are compared with."""
    a, b, out = (torch.randn(NUM_VALUES, device=device).bfloat16() for _ in range(3))
    compressed = encode(a)
    weights = [encode(a) for _ in range(WEIGHTS)]
    saves = [a] * SAVES, [784] * SAVES, [False] * SAVES
    batch = CompressedBatch(*saves)
    linear = torch.nn.Linear(256, 256, bias=False, device=device, dtype=torch.bfloat16)
    compress_(linear)
    weight = linear.weight
    weight.grad = torch.randn(256, 256, device=device).bfloat16()
    optimizer = SGD([weight], lr=1e-3, momentum=0.9)
    optimizer.step()  # makes the momentum
    several = (
        lambda: decode_all(weights),
        lambda: CompressedBatch(*saves),
        lambda: batch.decode(),
    )
    return {
        BASE: lambda: torch.add(a, b, out=out),
        "copy_": lambda: out.copy_(a),
        "decode(out)": lambda: compressed.decode(out),
        "decode": lambda: compressed.decode(),
        "encode": lambda: encode(a),
        "encode_": lambda: compressed.encode_(a),
        "SGD.step": lambda: optimizer.step(),
        **dict(zip(TENSORS, several, strict=True)),
    }


def measure_host(device: torch.device, *, repetitions: int = REPETITIONS) -> list[dict[str, Any]]:
    """A row a call: host microseconds a tensor, and those over ``torch.add(a, b, out=c)``'s.

    ValueError on the CPU, where a call is over when its work is.
    """
    if device.type != "cuda":
        raise ValueError(f"host times are those of a CUDA device, got {device}")
    todo = calls(device)
    samples: dict[str, list[float]] = {name: [] for name in todo}
    for repetition in range(-2, repetitions):  # the first two compile and warm up
        for name, call in todo.items():
            torch.cuda.synchronize(device)
            start = time.perf_counter_ns()
            for _ in range(CALLS):
                call()
            elapsed = (time.perf_counter_ns() - start) / CALLS
            if repetition >= 0:
                samples[name].append(elapsed / TENSORS.get(name, 1) / 1e6)
    torch.cuda.synchronize(device)
    timings = {name: summarize(values) for name, values in samples.items()}
    base = timings[BASE].median_ms
    return [
        {
            "call": name,
            "host_us": timing.median_ms * 1e3,
            "host_iqr_us": timing.iqr_ms * 1e3,
            "over_add": timing.median_ms / base,
            "num_values": NUM_VALUES,
            "calls": CALLS,
            "repetitions": timing.repetitions,
        }
        for name, timing in timings.items()
    ]
