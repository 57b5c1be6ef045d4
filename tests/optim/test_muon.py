"""Muon with compressed momentum: the bits of torch's, checkpoints both ways."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import lct
from lct.optim import muon
from lct.tensor import CompressedTensor
from training import assert_same_bits, assert_same_model, assert_same_state


class Matrices(nn.Module):
    """Wide, tall and small, and one that is not contiguous."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.wide = nn.Parameter((torch.randn(48, 200) * 0.02).to(dtype))
        self.tall = nn.Parameter((torch.randn(300, 40) * 0.02).to(dtype))
        self.small = nn.Parameter(torch.randn(3, 4).to(dtype))
        self.turned = nn.Parameter((torch.randn(64, 80) * 0.02).to(dtype).t())


def set_grads(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=generator) * 1e-2
        like = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype)
        param.grad = like.copy_(grad)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "weight_decay": 0.0},
    {"momentum": 0.3, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_bits_of_torch(options: dict[str, Any], dtype: torch.dtype, compressed: bool) -> None:
    a, b = Matrices(dtype), Matrices(dtype)
    if compressed:
        lct.compress_(b)
    expected = torch.optim.Muon(a.parameters(), lr=0.01, **options)
    optimizer = lct.optim.Muon(b.parameters(), lr=0.01, **options)
    for step in range(5):
        for model, opt in ((a, expected), (b, optimizer)):
            set_grads(model, step)
            opt.step()
        assert_same_model(a, b)
    assert_same_state(expected, optimizer)
    held = [optimizer.state[p]["momentum_buffer"] for p in b.parameters()]
    if dtype is torch.bfloat16:
        assert sum(isinstance(buffer, CompressedTensor) for buffer in held) == 3  # not the small


@pytest.mark.parametrize("case", ["kernel", "plain", "FP32", "tensor lr", "other torch"])
@pytest.mark.parametrize("compressed", [False, True])
def test_what_a_kernel_is_asked_for(
    compressed: bool, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way to the kernel without one, and what goes the other way."""
    calls = []

    def step_by_torch(self: CompressedTensor, grad: torch.Tensor, momentum: float) -> torch.Tensor:
        calls.append(tuple(grad.shape))
        buffer = self.decode().lerp_(grad, 1 - momentum)
        self.encode_(buffer)
        return grad.lerp(buffer, momentum)

    monkeypatch.setattr(CompressedTensor, "can_step_fused", lambda *tensors: True)
    monkeypatch.setattr(CompressedTensor, "muon_", step_by_torch)
    if case == "other torch":
        monkeypatch.setattr(muon, "_orthogonalise", None)
    dtype = torch.float32 if case == "FP32" else torch.bfloat16
    lr: Any = torch.tensor(0.01) if case == "tensor lr" else 0.01
    a, b = Matrices(dtype), Matrices(dtype)
    if compressed:
        lct.compress_(b)
    options: dict[str, Any] = {"lr": lr, "momentum": 0.9, "nesterov": case != "plain"}
    expected = torch.optim.Muon(a.parameters(), **options)
    optimizer = lct.optim.Muon(b.parameters(), **options)
    for step in range(4):
        for model, opt in ((a, expected), (b, optimizer)):
            set_grads(model, step)
            opt.step()
        assert_same_model(a, b)
    assert_same_state(expected, optimizer)
    assert calls == ([(48, 200), (300, 40)] * 3 if case == "kernel" else [])
    # A gradient that lies otherwise than the momentum.
    for model, opt in ((a, expected), (b, optimizer)):
        set_grads(model, 4)
        turned = model.wide.grad.t().contiguous().t()
        model.wide.grad = turned
        opt.step()
    assert_same_model(a, b)
    assert (48, 200) not in calls[6:]


def test_checkpoints_go_both_ways() -> None:
    first = Matrices(torch.bfloat16)
    saved = torch.optim.Muon(first.parameters(), lr=0.01)
    for step in range(2):
        set_grads(first, step)
        saved.step()
    a, b = Matrices(torch.bfloat16), lct.compress_(Matrices(torch.bfloat16))
    for model in (a, b):
        model.load_state_dict(first.state_dict())
    expected = torch.optim.Muon(a.parameters(), lr=0.01)
    optimizer = lct.optim.Muon(b.parameters(), lr=0.01)
    for opt in (expected, optimizer):
        opt.load_state_dict(copy.deepcopy(saved.state_dict()))  # torch's shares its tensors
    for model, opt in ((a, expected), (b, optimizer)):
        set_grads(model, 2)
        opt.step()
    assert_same_model(a, b)
    again = torch.optim.Muon(Matrices(torch.bfloat16).parameters())
    again.load_state_dict(optimizer.state_dict())
    assert_same_state(expected, again)


def test_step_in_backward() -> None:
    a, b = Matrices(torch.bfloat16), lct.compress_(Matrices(torch.bfloat16))
    expected = torch.optim.Muon(a.parameters(), lr=0.01)
    optimizer = lct.optim.Muon(b.parameters(), lr=0.01)
    lct.optim.step_in_backward(optimizer)
    for _ in range(3):
        for model in (a, b):
            sum(p.float().pow(2).sum() for p in model.parameters()).backward()
        expected.step()
        expected.zero_grad()
    for one, other in zip(a.parameters(), b.parameters(), strict=True):
        assert_same_bits(one, other)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="2D"):
        lct.optim.Muon([nn.Parameter(torch.zeros(3))])
    weight = nn.Parameter(torch.zeros(4, 4))
    optimizer = lct.optim.Muon([weight])
    weight.grad = torch.zeros(4, 4).to_sparse()
    with pytest.raises(RuntimeError, match="dense gradients of real parameters"):
        optimizer.step()
