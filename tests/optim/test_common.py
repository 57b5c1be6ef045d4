"""What every optimizer of lct.optim does as torch's: scalers, groups, schedulers."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import lct
from lct import ops
from lct.optim import base
from training import (
    Mlp,
    assert_same_bits,
    assert_same_losses,
    assert_same_model,
    assert_same_state,
    check_grad_scaler,
    make,
    mlp_batches,
    mlp_loss,
    plain,
    train,
)

# cuBLAS is deterministic with a workspace of its own for each stream; it reads this once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01},
    "Muon": {"lr": 0.02},
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "chain": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.StepLR(o, 2, 0.5)], [2]
    ),
    # Also moves momentum or betas, where there are some.
    "one cycle": lambda o: lr_scheduler.OneCycleLR(
        o, 0.1, total_steps=8, cycle_momentum=not isinstance(o, torch.optim.Muon)
    ),
}


def build(kind: str, compressed: bool, params: Any, **options: Any) -> torch.optim.Optimizer:
    source = lct.optim if compressed else torch.optim
    matrices = [p for p in params if kind != "Muon" or p.dim() == 2]
    return getattr(source, kind)(matrices, **{**OPTIONS[kind], **options})


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cuda":
        torch.use_deterministic_algorithms(True)
    yield request.param
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
@pytest.mark.parametrize("kind", OPTIONS)
def test_grad_scaler(kind: str, device: str) -> None:
    check_grad_scaler(lambda compressed, params: build(kind, compressed, params), device)


@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("kind", OPTIONS)
def test_schedulers(kind: str, schedule: str) -> None:
    data = mlp_batches(6)
    runs = []
    for compressed in (False, True):
        model = make(Mlp, compressed)
        optimizer = build(kind, compressed, model.parameters())
        scheduler = SCHEDULERS[schedule](optimizer)
        losses = train(model, optimizer, mlp_loss, data, scheduler=scheduler)
        runs.append((losses, model, optimizer, scheduler))
    assert_same_losses(runs[0][0], runs[1][0])
    assert_same_model(runs[0][1], runs[1][1])
    assert_same_state(runs[0][2], runs[1][2])
    assert runs[0][3].get_last_lr() == runs[1][3].get_last_lr() != [OPTIONS[kind]["lr"]]


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_group_that_joins_later(kind: str) -> None:
    """With options of its own; a scheduler made then; a weight that is compressed in between."""
    data = mlp_batches(6)
    runs = []
    for compressed in (False, True):
        model = make(Mlp, False)
        optimizer = build(kind, compressed, [model.up.weight])
        losses = train(model, optimizer, mlp_loss, data[:2])
        if compressed:
            lct.compress_(model)
        optimizer.add_param_group({"params": [model.down.weight], "lr": 0.005, "weight_decay": 0.2})
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
        losses += train(model, optimizer, mlp_loss, data[2:], scheduler=scheduler)
        runs.append((losses, model, optimizer))
        with pytest.raises(ValueError, match="more than one parameter group"):
            optimizer.add_param_group({"params": [model.up.weight]})
    assert_same_losses(runs[0][0], runs[1][0])
    assert_same_model(runs[0][1], runs[1][1])
    assert_same_state(runs[0][2], runs[1][2])


@pytest.mark.parametrize("kind", OPTIONS)
def test_state_that_does_not_shrink_is_seldom_measured(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measurement waits for the device."""
    weight = nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))  # too small to code
    optimizer = build(kind, True, [weight])
    calls: list[torch.Tensor] = []
    encode = base.encode

    def counted(flat: torch.Tensor, **options: Any) -> lct.CompressedTensor:
        calls.append(flat)
        return encode(flat, **options)

    monkeypatch.setattr(base, "encode", counted)
    measured = []
    for step in range(20):
        calls.clear()
        weight.grad = torch.full_like(weight, 0.5)
        optimizer.step()
        if calls:
            measured.append(step)
    assert measured == [0, 1, 2, 4, 8, 16]


def test_state_that_shrinks_later_is_compressed_later() -> None:
    torch.manual_seed(0)
    weight, twin = (nn.Parameter(torch.zeros(64, 512, dtype=torch.bfloat16)) for _ in range(2))
    options = {"lr": 0.1, "momentum": 1e-45}  # forgets
    optimizer = lct.optim.SGD([weight], **options)
    expected = torch.optim.SGD([twin], **options)
    compressed = []
    for step in range(12):
        grad = torch.randn(64, 512)
        if step < 5:
            grad = grad * torch.exp2(torch.randint(-100, 100, grad.shape).float())
        weight.grad, twin.grad = grad.bfloat16(), grad.bfloat16()
        optimizer.step()
        expected.step()
        state = optimizer.state[weight]["momentum_buffer"]
        compressed.append(isinstance(state, lct.CompressedTensor))
        assert_same_bits(expected.state[twin]["momentum_buffer"], state)
        assert_same_bits(twin, weight)
    assert compressed == [False] * 8 + [True] * 4


ROOM_KINDS = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"lr": 0.1},
    "AdamW": {"lr": 0.1, "amsgrad": True},
    "Muon": {"lr": 0.1},
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("compressed", [False, True], ids=["dense weight", "compressed weight"])
@pytest.mark.parametrize("kind", ROOM_KINDS)
def test_no_room_changes_nothing(
    kind: str, compressed: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is not fused encodes several tensors: all have room, or none is changed."""
    torch.manual_seed(0)
    # FP32 has no fused step on any device.
    model = nn.Linear(128, 256, bias=False, dtype=torch.float32, device=device)
    if compressed:
        lct.compress_(model)
    optimizer = getattr(lct.optim, kind)(model.parameters(), **ROOM_KINDS[kind])
    grads = [torch.randn(256, 128, device=device) for _ in range(3)]
    asked: list[int] = []
    ensure = ops.ensure_room

    def counted(parts: Any) -> None:
        asked.append(len(parts))
        ensure(parts)

    def no_room(parts: Any) -> None:
        raise lct.ArenaExhaustedError("no memory; nothing was overwritten")

    def step(number: int) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            model.weight.grad = grads[number].clone()
        optimizer.step()

    monkeypatch.setattr(ops, "ensure_room", counted)
    step(0)
    step(1)
    states = {"SGD": 1, "Adam": 2, "AdamW": 3, "Muon": 1}[kind]
    assert asked == [int(compressed), states + compressed]
    weight, state = plain(model.weight).clone(), copy.deepcopy(optimizer.state_dict())
    monkeypatch.setattr(ops, "ensure_room", no_room)
    with pytest.raises(lct.ArenaExhaustedError):
        step(2)
    assert_same_bits(weight, model.weight)
    for name, value in state["state"][0].items():
        assert_same_bits(value, optimizer.state_dict()["state"][0][name], name)
    monkeypatch.setattr(ops, "ensure_room", counted)
    optimizer.step()  # the gradient is still there
    with pytest.raises(AssertionError):
        assert_same_bits(weight, model.weight)
