"""Training with compressed weights, state and activations: not one bit differs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import lct
from training import (
    BF16,
    CASES,
    TiedTransformer,
    assert_same_losses,
    assert_same_model,
    assert_same_state,
    make,
    store_small_tensors,
    token_batches,
    token_loss,
    train,
)

STEPS = {"mlp": 50, "transformer": 20, "zoo": 10}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    store_small_tensors(monkeypatch)


@pytest.mark.parametrize("activations", [False, True], ids=["weights", "activations"])
@pytest.mark.parametrize("case", CASES)
def test_a_run_is_the_same_to_the_bit(case: str, activations: bool) -> None:
    build, loss_of, batches = CASES[case]
    data = batches(STEPS[case])
    dense, model = make(build, False), make(build, True)
    options: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
    expected_optimizer = torch.optim.SGD(dense.parameters(), **options)
    optimizer = lct.optim.SGD(model.parameters(), **options)
    expected = train(dense, expected_optimizer, loss_of, data)
    losses = train(model, optimizer, loss_of, data, activations=activations)
    assert all(loss.isfinite() for loss in losses)
    assert_same_losses(expected, losses)
    assert_same_model(dense, model)
    assert_same_state(expected_optimizer, optimizer)


@pytest.mark.parametrize("case", CASES)
def test_activations_of_a_dense_model(case: str) -> None:
    build, loss_of, batches = CASES[case]
    (batch,) = batches(1)
    models = [make(build, False) for _ in range(2)]
    losses = []
    for model, activations in zip(models, (False, True), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses.append(train(model, optimizer, loss_of, [batch, batch], activations=activations))
    assert_same_losses(*losses)
    assert_same_model(*models)


def test_accumulation_clipping_and_a_scheduler() -> None:
    data = token_batches(12)
    runs = []
    for compressed in (False, True):
        model = make(TiedTransformer, compressed)
        kind = lct.optim.SGD if compressed else torch.optim.SGD
        optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=6)
        losses = train(
            model,
            optimizer,
            token_loss,
            data,
            activations=compressed,
            accumulate=2,
            clip=0.5,
            scheduler=scheduler,
        )
        runs.append((losses, model, optimizer))
    assert_same_losses(runs[0][0], runs[1][0])
    assert_same_model(runs[0][1], runs[1][1])
    assert_same_state(runs[0][2], runs[1][2])


@pytest.mark.parametrize("reentrant", [True, False])
def test_pitfall_11_activation_checkpointing(reentrant: bool) -> None:
    class Checkpointed(TiedTransformer):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = checkpoint(
                    lambda inputs, block=block: block(inputs["x"][0]) + inputs["x"][1],
                    {"x": [x, x.detach()]},
                    use_reentrant=False,
                )
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(x)

    data = token_batches(3)
    runs = []
    for compressed in (False, True):
        model = make(Checkpointed, compressed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = train(model, optimizer, token_loss, data, activations=compressed)
        runs.append((losses, model))
    assert_same_losses(runs[0][0], runs[1][0])
    assert_same_model(runs[0][1], runs[1][1])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_with_backward_inside_the_block(reentrant: bool) -> None:
    models = [make(TiedTransformer, compressed) for compressed in (False, True)]
    tokens = torch.randint(0, 64, (2, 16))
    for model in models:
        torch.manual_seed(2)
        with lct.compress_activations():
            x = model.embed(tokens)
            for block in model.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            model.head(x).float().square().mean().backward()
    assert_same_model(*models)


@pytest.mark.parametrize(
    "build",
    [
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.05, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.05, foreach=True, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.01),
    ],
    ids=["sgd", "adamw", "adamw-foreach", "adamw-fused", "sgd-fused", "sgd-foreach", "adagrad"],
)
def test_torchs_optimizers_on_compressed_weights(build: Callable[..., Any]) -> None:
    data = token_batches(4)
    runs = []
    for compressed in (False, True):
        model = make(TiedTransformer, compressed)
        optimizer = build(model.parameters())
        losses = train(model, optimizer, token_loss, data, activations=compressed)
        runs.append((losses, model, optimizer))
    assert_same_losses(runs[0][0], runs[1][0])
    assert_same_model(runs[0][1], runs[1][1])
    assert_same_state(runs[0][2], runs[1][2])


def test_step_in_backward_by_hand() -> None:
    """One optimizer a parameter, stepped as soon as its gradient is there."""
    data = token_batches(4)
    runs = []
    for compressed in (False, True):
        model = make(TiedTransformer, compressed)
        kind = lct.optim.SGD if compressed else torch.optim.SGD
        optimizers = {p: kind([p], lr=0.05, momentum=0.9) for p in model.parameters()}

        def step(parameter: torch.Tensor, optimizers: Any = optimizers) -> None:
            optimizers[parameter].step()
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        unused = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
        runs.append((train(model, unused, token_loss, data, activations=compressed), model))
    assert_same_losses(runs[0][0], runs[1][0])
    assert_same_model(runs[0][1], runs[1][1])


def test_frozen_compressed_base_with_adapters() -> None:
    runs = []
    for compressed in (False, True):
        model = make(TiedTransformer, compressed).requires_grad_(False)
        torch.manual_seed(1)
        for block in model.blocks:
            adapter = torch.nn.Linear(32, 32, bias=False).to(BF16)
            block.out = torch.nn.Sequential(block.out, adapter)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        losses = train(
            model, optimizer, token_loss, token_batches_seeded(5), activations=compressed
        )
        runs.append((losses, model))
    assert_same_losses(runs[0][0], runs[1][0])
    assert_same_model(runs[0][1], runs[1][1])


def token_batches_seeded(count: int) -> list[tuple[torch.Tensor, ...]]:
    torch.manual_seed(9)
    return token_batches(count)


def test_autocast_with_fp32_weights() -> None:
    data = token_batches(3)
    runs = []
    for compressed in (False, True):
        torch.manual_seed(0)
        model = TiedTransformer()
        if compressed:
            lct.compress_(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def loss_of(model: Any, batch: Any) -> torch.Tensor:
            with torch.autocast("cpu", dtype=BF16):
                return token_loss(model, batch)

        runs.append((train(model, optimizer, loss_of, data, activations=compressed), model))
    assert_same_losses(runs[0][0], runs[1][0])
    assert_same_model(runs[0][1], runs[1][1])


def test_evaluation_and_generation_without_gradients() -> None:
    dense, model = make(TiedTransformer, False), make(TiedTransformer, True)
    tokens = torch.randint(0, 64, (2, 16))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(dense.eval()(tokens), model.eval()(tokens))


def test_gradient_penalty() -> None:
    grads = []
    for compressed in (False, True):
        model = make(TiedTransformer, compressed).eval()
        tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            if compressed:
                with lct.compress_activations():
                    loss = token_loss(model, (tokens,))
            else:
                loss = token_loss(model, (tokens,))
            parameters = [model.head.weight, model.blocks[0].up.weight]
            first = torch.autograd.grad(loss, parameters, create_graph=True)
            penalty = sum(g.float().square().sum() for g in first)
            (loss + penalty).backward()
        grads.append(copy.copy(model))
    assert_same_model(*grads)
