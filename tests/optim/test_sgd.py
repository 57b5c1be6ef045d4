"""``lct.optim.SGD`` equals ``torch.optim.SGD`` bit for bit, and behaves like it."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lct
from lct.nn import CompressedWeight
from lct.tensor import CompressedTensor
from training import (
    BF16,
    Mlp,
    TiedTransformer,
    assert_same_bits,
    assert_same_losses,
    assert_same_model,
    assert_same_state,
    check_checkpoints_go_to_torch_and_back,
    check_grad_scaler,
    make,
    token_batches,
    token_loss,
    train,
)

OPTIONS = [
    {
        "momentum": momentum,
        "dampening": dampening,
        "weight_decay": weight_decay,
        "nesterov": nesterov,
        "maximize": maximize,
    }
    for momentum, dampening, weight_decay, nesterov, maximize in itertools.product(
        (0, 0.9), (0, 0.3), (0, 0.1), (False, True), (False, True)
    )
    if not (nesterov and (momentum == 0 or dampening)) and not (dampening and momentum == 0)
]


class Weights(nn.Module):
    """Parameters without a forward: gradients are given."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(33, 32))
        self.cube = nn.Parameter(torch.randn(5, 7, 32))
        self.vector = nn.Parameter(torch.randn(37))
        self.tiny = nn.Parameter(torch.randn(2, 3))


def weights(compressed: bool, dtype: torch.dtype = BF16) -> Weights:
    torch.manual_seed(0)
    model = Weights().to(dtype)
    return lct.compress_(model) if compressed else model


def set_grads(model: nn.Module, step: int, skip: str = "") -> None:
    generator = torch.Generator().manual_seed(step)
    for name, p in model.named_parameters():
        grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = None if name == skip else grad


def compare(dtype: torch.dtype, compressed: bool = True, **options: Any) -> None:
    a, b = weights(False, dtype), weights(compressed, dtype)
    expected = torch.optim.SGD(a.parameters(), lr=0.1, **options)
    optimizer = lct.optim.SGD(b.parameters(), lr=0.1, **options)
    for step in range(4):
        for model, opt in ((a, expected), (b, optimizer)):
            set_grads(model, step, skip="matrix" if step == 0 else "")
            opt.step()
        assert_same_model(a, b)
    assert_same_state(expected, optimizer)


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(f"{v:g}" for v in o.values()))
def test_same_bits_for_all_options(options: dict[str, Any], foreach: bool | None) -> None:
    compare(BF16, foreach=foreach, **options)


@pytest.mark.parametrize("compressed", [True, False], ids=["compressed", "dense"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_same_bits_for_dtypes_and_dense_weights(dtype: torch.dtype, compressed: bool) -> None:
    compare(dtype, compressed, momentum=0.9, nesterov=True, weight_decay=0.01)


@pytest.mark.parametrize(
    "options", OPTIONS[::3], ids=lambda o: ",".join(f"{v:g}" for v in o.values())
)
def test_same_bits_for_fused(options: dict[str, Any]) -> None:
    """In FP32: torch's fused CPU kernel reads unset memory for BF16 and FP16 momentum (2.13)."""
    a, b = weights(False, torch.float32), weights(True, torch.float32)
    expected = torch.optim.SGD(a.parameters(), lr=0.1, fused=True, **options)
    optimizer = lct.optim.SGD(b.parameters(), lr=0.1, fused=True, **options)
    for step in range(4):
        for model, opt in ((a, expected), (b, optimizer)):
            set_grads(model, step)
            opt.step()
        assert_same_model(a, b)
    assert_same_state(expected, optimizer)


def test_tensor_learning_rate_and_groups() -> None:
    results = []
    for compressed in (False, True):
        model = weights(compressed)
        kind = lct.optim.SGD if compressed else torch.optim.SGD
        optimizer = kind(
            [
                {"params": [model.matrix], "lr": torch.tensor(0.05)},
                {"params": [model.cube], "momentum": 0.5, "weight_decay": 0.1},
            ],
            lr=0.1,
            momentum=0.9,
        )
        optimizer.add_param_group({"params": [model.vector, model.tiny], "maximize": True})
        for step in range(3):
            set_grads(model, step)
            optimizer.step()
        results.append(model)
    assert_same_model(*results)


def test_momentum_is_compressed() -> None:
    model = weights(True)
    optimizer = lct.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    set_grads(model, 0)
    optimizer.step()
    states = {name: optimizer.state[p]["momentum_buffer"] for name, p in model.named_parameters()}
    assert isinstance(states["matrix"], CompressedTensor)
    assert isinstance(states["cube"], CompressedTensor)
    assert states["matrix"].ratio > 1.2
    assert type(states["vector"]) is torch.Tensor
    assert type(states["tiny"]) is torch.Tensor, "it would not get smaller"
    payload = states["matrix"].payload
    set_grads(model, 1)
    optimizer.step()
    assert optimizer.state[model.matrix]["momentum_buffer"].payload is payload


def test_pitfall_24_it_is_torchs_optimizer() -> None:
    model = weights(True)
    optimizer = lct.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(weights(False).parameters(), lr=0.1, momentum=0.9)
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.defaults == reference.defaults
    assert repr(optimizer) == repr(reference)
    calls = []
    optimizer.register_step_pre_hook(lambda *args: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *args: calls.append("post"))
    optimizer.register_state_dict_post_hook(
        lambda _, state: calls.append(type(state["state"][0]["momentum_buffer"]))
    )
    set_grads(model, 0)
    optimizer.step()
    assert set(optimizer.state_dict()["state"][0]) == {"momentum_buffer"}
    assert calls == ["pre", "post", torch.Tensor]
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    set_grads(model, 0)
    optimizer.zero_grad(set_to_none=False)
    assert not any(p.grad.any() for p in model.parameters())


def test_parameters_without_gradients_are_skipped() -> None:
    model = weights(True)
    before = model.matrix.dense()
    optimizer = lct.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    set_grads(model, 0, skip="matrix")
    optimizer.step()
    assert_same_bits(before, model.matrix)
    assert model.matrix not in optimizer.state


def test_closure() -> None:
    runs = []
    for compressed in (False, True):
        model = make(TiedTransformer, compressed).eval()
        kind = lct.optim.SGD if compressed else torch.optim.SGD
        optimizer = kind(model.parameters(), lr=0.1)
        tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))

        def closure(model: Any = model, optimizer: Any = optimizer, tokens: Any = tokens) -> Any:
            optimizer.zero_grad()
            loss = token_loss(model, (tokens,))
            loss.backward()
            return loss

        runs.append([optimizer.step(closure) for _ in range(3)])
    assert_same_losses(*runs)


def test_bad_arguments() -> None:
    model = weights(True)
    with pytest.raises(ValueError, match="each parameter once, got 3 parameters of which 1 repeat"):
        lct.optim.SGD([model.matrix, model.cube, model.matrix])
    with pytest.raises(ValueError, match="each parameter once"):
        lct.optim.SGD([{"params": (p for p in [model.matrix, model.matrix])}])
    with pytest.raises(ValueError, match="each parameter once"):
        lct.optim.SGD([("a", model.matrix), ("b", model.matrix)])
    with pytest.raises(ValueError, match="more than one parameter group"):
        lct.optim.SGD([{"params": [model.matrix]}, {"params": [model.matrix]}])
    with pytest.raises(ValueError, match="empty parameter list"):
        lct.optim.SGD([])
    with pytest.raises(ValueError, match="Invalid learning rate"):
        lct.optim.SGD(model.parameters(), lr=-1)
    with pytest.raises(ValueError, match="differentiable must be False"):
        lct.optim.SGD(model.parameters(), differentiable=True)
    with pytest.raises(RuntimeError, match="cannot be `True` together"):
        lct.optim.SGD(model.parameters(), fused=True, foreach=True)
    with pytest.raises(TypeError, match="ordered collections"):
        lct.optim.SGD([{"params": {model.matrix}}])


def test_sparse_gradients_are_refused_before_anything_changes() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Embedding(64, 32, sparse=True)).to(BF16)
    lct.compress_(model)
    optimizer = lct.optim.SGD(model.parameters(), lr=0.1)
    loss = model[0](torch.randn(2, 32).to(BF16)).sum() + model[1](torch.tensor([1, 2])).sum()
    loss.backward()
    before = model[0].weight.dense()
    with pytest.raises(
        RuntimeError, match="gradients of compressed weights must be dense, got a sp"
    ):
        optimizer.step()
    assert_same_bits(before, model[0].weight)


def test_sparse_gradients_of_dense_weights() -> None:
    results = []
    for kind in (torch.optim.SGD, lct.optim.SGD):
        torch.manual_seed(0)
        model = nn.Embedding(64, 32, sparse=True)
        optimizer = kind(model.parameters(), lr=0.1)
        model(torch.tensor([1, 2, 1])).square().sum().backward()
        optimizer.step()
        results.append(model)
    assert_same_bits(results[0].weight, results[1].weight)


@pytest.mark.parametrize("at", [1, 5])
def test_pitfall_19_save_load_and_resume(at: int) -> None:
    data = token_batches(8)
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}

    def build() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = make(TiedTransformer, True).eval()
        optimizer = lct.optim.SGD(model.parameters(), **options)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    model, optimizer, scheduler = build()
    expected = train(model, optimizer, token_loss, data, scheduler=scheduler)
    first, first_optimizer, first_scheduler = build()
    losses = train(first, first_optimizer, token_loss, data[:at], scheduler=first_scheduler)
    saved = copy.deepcopy([first.state_dict(), first_optimizer.state_dict()])
    second, second_optimizer, second_scheduler = build()
    second.load_state_dict(saved[0])
    second_scheduler.load_state_dict(first_scheduler.state_dict())
    second_optimizer.load_state_dict(saved[1])
    buffer = second_optimizer.state[second.embed.weight]["momentum_buffer"]
    assert isinstance(buffer, CompressedTensor)
    losses += train(second, second_optimizer, token_loss, data[at:], scheduler=second_scheduler)
    assert_same_losses(expected, losses)
    assert_same_model(model, second)
    assert_same_state(optimizer, second_optimizer)


def test_pitfall_24_checkpoints_go_to_torch_and_back(tmp_path: Path) -> None:
    options = {"lr": 0.05, "momentum": 0.9, "nesterov": True}
    check_checkpoints_go_to_torch_and_back("SGD", tmp_path / "checkpoint.pt", **options)


def test_state_dict_leaves_the_state_compressed() -> None:
    model = weights(True)
    optimizer = lct.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    set_grads(model, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    assert type(saved["state"][0]["momentum_buffer"]) is torch.Tensor
    assert saved["state"][0]["momentum_buffer"].shape == (33, 32)
    assert isinstance(optimizer.state[model.matrix]["momentum_buffer"], CompressedTensor)
    other = copy.deepcopy(optimizer)
    assert_same_state(optimizer, other)


def test_state_of_a_dense_optimizer_is_taken_over() -> None:
    """Weights compressed, then the optimizer's class changed by load_state_dict, in mid-run."""
    a, b = weights(False), weights(False)
    expected = torch.optim.SGD(a.parameters(), lr=0.1, momentum=0.9)
    optimizer: Any = torch.optim.SGD(b.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        if step == 2:
            lct.compress_(b)
            new = lct.optim.SGD(b.parameters(), lr=0.1, momentum=0.9)
            new.load_state_dict(optimizer.state_dict())
            optimizer = new
        for model, opt in ((a, expected), (b, optimizer)):
            set_grads(model, step)
            opt.step()
    assert_same_model(a, b)
    assert_same_state(expected, optimizer)


def test_channels_last_weights() -> None:
    results = []
    for compressed in (False, True):
        torch.manual_seed(0)
        model = nn.Conv2d(8, 16, 3).to(BF16).to(memory_format=torch.channels_last)
        if compressed:
            lct.compress_(model)
        kind = lct.optim.SGD if compressed else torch.optim.SGD
        optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(2, 8, 6, 6).to(BF16).to(memory_format=torch.channels_last)
        for _ in range(3):
            model(x).float().square().mean().backward()
            optimizer.step()
        results.append((model, optimizer))
    (a, expected), (b, optimizer) = results
    assert isinstance(b.weight, CompressedWeight)
    assert isinstance(optimizer.state[b.weight]["momentum_buffer"], CompressedTensor)
    assert_same_model(a, b)
    assert_same_state(expected, optimizer)
    saved = [o.state_dict()["state"][0]["momentum_buffer"].stride() for o in (expected, optimizer)]
    assert saved[0] == saved[1]
    fresh = lct.optim.SGD(b.parameters(), lr=0.1, momentum=0.9)
    fresh.load_state_dict(expected.state_dict())
    assert_same_state(expected, fresh)


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_pitfall_17_fused_honours_grad_scale_and_found_inf(found: float) -> None:
    results = []
    for compressed in (False, True):
        model = weights(compressed, torch.float32)
        kind = lct.optim.SGD if compressed else torch.optim.SGD
        optimizer = kind(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        assert optimizer._step_supports_amp_scaling
        set_grads(model, 0)
        optimizer.step()
        set_grads(model, 1)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(found)
        optimizer.step()
        results.append((model, optimizer))
    assert_same_model(results[0][0], results[1][0])
    assert_same_state(results[0][1], results[1][1])


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(fused: bool) -> None:
    kinds = (torch.optim.SGD, lct.optim.SGD)
    check_grad_scaler(
        lambda compressed, params: kinds[compressed](params, lr=0.1, momentum=0.9, fused=fused)
    )


def test_backward_through_an_old_forward_raises() -> None:
    model = make(Mlp, True)
    optimizer = lct.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 64, dtype=BF16, requires_grad=True)
    loss = model(x).float().square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
