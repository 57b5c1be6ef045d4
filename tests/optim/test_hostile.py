"""Fifty steps whose gradients make the state hostile: it costs memory, never a value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import lct
from lct.tensor import CompressedTensor
from training import BF16, assert_same_bits, assert_same_state, random_bits

SHAPE = (96, 100)  # one group and a partial one
STEPS = 50


def uniform(step: int) -> torch.Tensor:
    return random_bits(*SHAPE, generator=torch.Generator().manual_seed(step))


def finite(step: int) -> torch.Tensor:
    grad = uniform(step)
    return torch.where(grad.isfinite(), grad, torch.ones_like(grad))


def extremes(step: int) -> torch.Tensor:
    values = torch.tensor([1e-38, 3e38, -1e-40, -3e38, 0.0, 1.0, -0.0, 2e-39], dtype=BF16)
    return values.roll(step).repeat(SHAPE[0] * SHAPE[1] // 8).view(SHAPE)


def all_nan(step: int) -> torch.Tensor:
    payloads = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.int32) % 127 + 1
    return (payloads.to(torch.int16) | 0x7F80).view(BF16).view(SHAPE)


def zeros(step: int) -> torch.Tensor:
    return torch.zeros(SHAPE, dtype=BF16)


def wide(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    scale = torch.exp2(torch.rand(SHAPE[0], 1, generator=generator) * 120 - 60)
    return (torch.randn(SHAPE, generator=generator) * scale).to(BF16)


def taking_turns(step: int) -> torch.Tensor:
    return (uniform, zeros, extremes, wide, finite)[step % 5](step)


def compare(
    kind: str, gradient: Callable[[int], torch.Tensor], compressed: bool, **options: float
) -> None:
    """Fifty steps of torch's and LCT's optimizer ``kind``, on a dense or compressed weight."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Linear(SHAPE[1], SHAPE[0], bias=False).to(BF16))
    dense, model = models
    if compressed:
        lct.compress_(model)
    expected = getattr(torch.optim, kind)(dense.parameters(), **options)
    optimizer = getattr(lct.optim, kind)(model.parameters(), **options)
    for step in range(STEPS):
        for m, opt in ((dense, expected), (model, optimizer)):
            m.weight.grad = gradient(step).clone()
            opt.step()
        assert_same_bits(dense.weight, model.weight, f"weight after step {step}")
    assert_same_state(expected, optimizer)


OPTIONS = {
    "SGD": {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.01},
    "AdamW": {"lr": 0.5, "weight_decay": 0.01},
}


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("compressed", [True, False], ids=["compressed", "dense"])
@pytest.mark.parametrize(
    "gradient", [uniform, finite, extremes, all_nan, zeros, wide, taking_turns]
)
def test_hostile_gradients(
    gradient: Callable[[int], torch.Tensor], compressed: bool, kind: str
) -> None:
    compare(kind, gradient, compressed, **OPTIONS[kind])


def test_compression_comes_back_when_the_hostility_ends() -> None:
    torch.manual_seed(0)
    model = lct.compress_(nn.Linear(SHAPE[1], SHAPE[0], bias=False).to(BF16))
    optimizer = lct.optim.SGD(model.parameters(), lr=0.0, momentum=0.25)
    for step in range(3):
        model.weight.grad = finite(step)
        optimizer.step()
    model.weight.grad = torch.zeros(SHAPE, dtype=BF16)
    for _ in range(150):  # the momentum decays to zeros
        optimizer.step()
    state = optimizer.state[model.weight]["momentum_buffer"]
    assert isinstance(state, CompressedTensor)
    assert state.repack().ratio > 1.2
