"""Steps in backward: bits of an optimizer for each parameter, gradients freed, loops unchanged."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lct
from lct.nn import CompressedWeight
from training import BF16, Mlp, assert_same_bits, plain

KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, lct.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adamw": (torch.optim.AdamW, lct.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
}


def make(compressed: bool) -> nn.Module:
    torch.manual_seed(3)
    model = Mlp().to(BF16)
    return lct.compress_(model) if compressed else model


def batch(step: int, model: nn.Module) -> torch.Tensor:
    first = next(p for p in model.parameters() if p.dim() == 2)
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, first.shape[1], generator=generator).to(BF16)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(batch(step, model)).float().square().mean()


def train_dense(kind: str, steps: int, micro_batches: int = 1) -> tuple[nn.Module, list[Any]]:
    """An optimizer for each parameter: what torch's users write for steps in backward."""
    torch_kind, _, options = KINDS[kind]
    model = make(False)
    optimizers = [torch_kind([p], **options) for p in model.parameters()]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers]
    for step in range(steps):
        for micro in range(micro_batches):
            loss_of(model, step * micro_batches + micro).backward()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return model, optimizers


def assert_same(model: nn.Module, optimizer: Any, expected: nn.Module, dense: list[Any]) -> None:
    pairs = zip(model.parameters(), expected.parameters(), dense, strict=True)
    for ours, theirs, one in pairs:
        assert_same_bits(theirs, ours)
        for name, value in one.state[theirs].items():
            assert_same_bits(value, plain(optimizer.state[ours][name]), name)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_an_optimizer_for_each_parameter(kind: str, compressed: bool) -> None:
    expected, dense = train_dense(kind, 5)
    _, ours_kind, options = KINDS[kind]
    model = make(compressed)
    optimizer = ours_kind(model.parameters(), **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    lct.optim.step_in_backward(optimizer)
    if compressed:
        assert any(isinstance(p, CompressedWeight) for p in model.parameters())
    for step in range(5):
        loss_of(model, step).backward()
        assert all(p.grad is None for p in model.parameters())
        # What an ordinary loop does after backward stays, and does nothing.
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert_same(model, optimizer, expected, dense)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(dense)


@pytest.mark.parametrize("kind", KINDS)
def test_pitfall_14_accumulation(kind: str) -> None:
    expected, dense = train_dense(kind, 3, micro_batches=3)
    _, ours_kind, options = KINDS[kind]
    model = make(True)
    optimizer = ours_kind(model.parameters(), **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    steps = lct.optim.step_in_backward(optimizer)
    for step in range(3):
        with steps.accumulate():
            for micro in range(2):
                loss_of(model, step * 3 + micro).backward()
            assert all(p.grad is not None for p in model.parameters())
            with pytest.raises(RuntimeError, match="twice"), steps.accumulate():
                pass
        loss_of(model, step * 3 + 2).backward()
        assert all(p.grad is None for p in model.parameters())
        scheduler.step()
    assert_same(model, optimizer, expected, dense)


def test_at_most_one_gradient_exists() -> None:
    model = make(True)
    optimizer = lct.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    alive: list[int] = []
    step = optimizer.step

    def counted(*args: Any) -> Any:
        alive.append(sum(p.grad is not None for p in model.parameters()))
        return step(*args)

    optimizer.step = counted  # type: ignore[method-assign]
    lct.optim.step_in_backward(optimizer)
    loss_of(model, 0).backward()
    assert alive == [1] * len(list(model.parameters()))


def test_removed_hooks_leave_an_ordinary_optimizer() -> None:
    model = make(True)
    optimizer = lct.optim.SGD(model.parameters(), lr=0.1)
    steps = lct.optim.step_in_backward(optimizer)
    steps.remove()
    before = [plain(p).clone() for p in model.parameters()]
    loss_of(model, 0).backward()
    assert all(p.grad is not None for p in model.parameters())
    for old, param in zip(before, model.parameters(), strict=True):
        assert_same_bits(old, param)


def test_torchs_own_optimizer() -> None:
    expected, dense = train_dense("sgd", 3)
    model = make(False)
    optimizer = torch.optim.SGD(model.parameters(), **KINDS["sgd"][2])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    lct.optim.step_in_backward(optimizer)
    for step in range(3):
        loss_of(model, step).backward()
        scheduler.step()
    assert_same(model, optimizer, expected, dense)


def test_groups_keep_their_options() -> None:
    model = make(True)
    params = list(model.parameters())
    groups = [{"params": params[:1], "lr": 0.0}, {"params": params[1:], "lr": 0.1}]
    optimizer = lct.optim.SGD(groups, lr=1.0)
    lct.optim.step_in_backward(optimizer)
    before = [plain(p).clone() for p in params]
    loss_of(model, 0).backward()
    assert_same_bits(before[0], params[0])
    moved = [not torch.equal(old, plain(p)) for old, p in zip(before[1:], params[1:], strict=True)]
    assert any(moved)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: lct.optim.step_in_backward(p), TypeError, "takes a torch.optim.Optimizer"),
        (
            lambda p: lct.optim.step_in_backward(torch.optim.SGD(p), max_norm=1.0),
            ValueError,
            "max_norm must be None: .* got 1.0",  # pitfall 15: or clip after backward
        ),
        (lambda p: lct.optim.step_in_backward(torch.optim.LBFGS(p)), ValueError, "no LBFGS"),
        (
            lambda p: lct.optim.step_in_backward(torch.optim.SGD([p[0].requires_grad_(False)])),
            ValueError,
            "require gradients, got one of shape",
        ),
    ],
)
def test_refusals(
    call: Callable[[list[torch.Tensor]], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call([nn.Parameter(torch.zeros(2, 3))])
