"""Training on CUDA: the same bits as without LCT, and streams."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lct
from lct import tensor as tensors
from lct.nn import CompressedWeight, activations
from lct.tensor import CompressedBatch
from training import (
    BF16,
    CASES,
    assert_same_bits,
    assert_same_losses,
    assert_same_model,
    assert_same_state,
    make,
    store_small_tensors,
    train,
)

pytestmark = pytest.mark.gpu
# cuBLAS is deterministic with a workspace of its own for each stream; it reads this once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    store_small_tensors(monkeypatch)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def batches_of_any_share(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Saves of small models wait to be encoded together; the tensors of each encode."""
    monkeypatch.setattr(activations, "BATCH_SHARE", 1e9)
    sizes: list[int] = []

    class Counted(CompressedBatch):
        def __init__(self, tensors: Any, *rest: Any) -> None:
            sizes.append(len(tensors))
            super().__init__(tensors, *rest)

    monkeypatch.setattr(tensors, "CompressedBatch", Counted)
    return sizes


def loss_of(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return mlp(x).float().square().mean()


def mlp_on_cuda() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(5)
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())]
    return nn.Sequential(*layers).cuda().to(BF16), torch.randn(300, 256, device="cuda").to(BF16)


@pytest.mark.parametrize("side", [False, True], ids=["one stream", "a side stream in the block"])
def test_saves_that_are_encoded_together(side: bool, batches_of_any_share: list[int]) -> None:
    mlp, x = mlp_on_cuda()
    expected = torch.autograd.grad(loss_of(mlp, x), list(mlp.parameters()))
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    for _ in range(5):
        stream.wait_stream(torch.cuda.current_stream())
        with lct.compress_activations(), torch.cuda.stream(stream):
            loss = loss_of(mlp, x)
        torch.cuda.current_stream().wait_stream(stream)
        grads = torch.autograd.grad(loss, list(mlp.parameters()))
        torch.cuda.synchronize()
        for want, got in zip(expected, grads, strict=True):
            assert_same_bits(want, got)
    assert max(batches_of_any_share) > 5


@pytest.mark.parametrize("block", ["within", "around"])
def test_a_captured_graph_holds_the_encodes_of_its_saves(
    block: str, batches_of_any_share: list[int]
) -> None:
    """What ends with the capture is encoded together in it; else each save at once."""
    mlp, x = mlp_on_cuda()
    parameters = list(mlp.parameters())

    def step() -> tuple[torch.Tensor, ...]:
        with lct.compress_activations() if block == "within" else contextlib.nullcontext():
            loss = loss_of(mlp, x)
        return torch.autograd.grad(loss, parameters)

    lct.reserve_arena(4 << 20)
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for _ in range(12):  # until the rooms are measured
            with lct.compress_activations():
                loss = loss_of(mlp, x)
            torch.autograd.grad(loss, parameters)
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    batches_of_any_share.clear()
    around = lct.compress_activations() if block == "around" else contextlib.nullcontext()
    with around, torch.cuda.graph(graph):
        grads = step()
    assert batches_of_any_share
    assert (max(batches_of_any_share) > 5) == (block == "within")
    for _ in range(3):
        x.normal_()
        graph.replay()
        expected = torch.autograd.grad(loss_of(mlp, x), parameters)
        torch.cuda.synchronize()
        for want, got in zip(expected, grads, strict=True):
            assert_same_bits(want, got)


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_captured_step_trains(in_backward: bool) -> None:
    """Forward, backward and optimizer in one CUDA graph, on compressed weights, state and saves."""
    models, steps, states = [], [], []
    x = torch.randn(300, 256, device="cuda").to(BF16)
    for compressed in (False, True):
        mlp, _ = mlp_on_cuda()
        if compressed:
            lct.compress_(mlp)
        make_optimizer: Any = lct.optim.SGD if compressed else torch.optim.SGD
        optimizer = make_optimizer(mlp.parameters(), lr=0.05, momentum=0.9, foreach=True)
        if compressed and in_backward:
            lct.optim.step_in_backward(optimizer)

        def step(mlp: nn.Module = mlp, optimizer: Any = optimizer, ours: bool = compressed) -> Any:
            with lct.compress_activations() if ours else contextlib.nullcontext():
                loss = loss_of(mlp, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        models.append(mlp)
        steps.append(step)
        states.append(optimizer)
    lct.reserve_arena(16 << 20)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(12):  # until the rooms are measured
            for step in steps:
                step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = steps[1]()
    for _ in range(5):
        x.normal_()
        graph.replay()
        expected = steps[0]()
        torch.cuda.synchronize()
        assert_same_bits(expected, loss)
    assert_same_model(*models)
    assert_same_state(*states)
    lct.stats()  # raises if there was no room


@pytest.mark.parametrize("rounding", [{}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_run_is_the_same_to_the_bit(case: str, rounding: dict[str, Any]) -> None:
    build, loss_of, batches = CASES[case]
    data = [tuple(t.cuda() for t in batch) for batch in batches(20)]
    options = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True, **rounding}
    dense, model = make(build, False).cuda(), lct.compress_(make(build, False).cuda())
    expected_optimizer = torch.optim.SGD(dense.parameters(), **options)
    optimizer = lct.optim.SGD(model.parameters(), **options)
    expected = train(dense, expected_optimizer, loss_of, data)
    losses = train(model, optimizer, loss_of, data, activations=True)
    assert_same_losses(expected, losses)
    assert_same_model(dense, model)
    assert_same_state(expected_optimizer, optimizer)


def test_pitfall_13_models_move_between_devices() -> None:
    build = CASES["transformer"][0]
    dense, model = make(build, False), make(build, True)
    model.cuda()
    assert isinstance(model.head.weight, CompressedWeight)
    assert model.head.weight is model.embed.weight
    assert model.head.weight.device.type == model.head.weight.payload.device.type == "cuda"
    assert_same_model(dense.cuda(), model)
    assert_same_model(dense.cpu(), model.cpu())


def test_pitfall_10_consumers_on_two_streams() -> None:
    weight = nn.Parameter(torch.randn(256, 256, device="cuda").to(BF16))
    results = []
    for activate in (False, True):
        x = torch.randn(512, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
        leaf = x.to(BF16).requires_grad_()
        weight.grad = None
        for _ in range(10):
            hidden = leaf * 1
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with lct.compress_activations() if activate else torch.enable_grad():
                first = (hidden @ weight).float().square().mean()
                with torch.cuda.stream(side):
                    second = (hidden @ weight).float().abs().mean()
            del hidden
            torch.cuda.current_stream().wait_stream(side)
            (first + second).backward()
        torch.cuda.synchronize()
        results.append((leaf.grad, weight.grad))
    for expected, got in zip(*results, strict=True):
        assert_same_bits(expected, got)


@pytest.mark.parametrize("shape", [(256, 512), (1000, 24), (32, 16, 3, 3)])
def test_pitfall_27_decoded_tensors_are_aligned_as_torchs(shape: tuple[int, ...]) -> None:
    dense = torch.randn(shape, device="cuda").to(BF16)
    if dense.dim() == 4:
        dense = dense.to(memory_format=torch.channels_last)
    weight = lct.CompressedWeight.from_dense(dense)
    for _ in range(3):
        decoded = weight.dense()
        assert decoded.data_ptr() % 256 == 0
        assert decoded.stride() == dense.stride()
    for tensor in (dense, dense.transpose(0, 1)):
        x = tensor.detach().requires_grad_() * 1
        with lct.compress_activations() as saved:
            out = x.abs()
        assert saved.encoded == 1
        back = out.grad_fn._saved_self
        assert back.data_ptr() % 256 == x.data_ptr() % 256 and back.stride() == x.stride()


def test_pitfall_28_reserved_memory_does_not_grow() -> None:
    build, loss_of, batches = CASES["transformer"]
    model = lct.compress_(make(build, False).cuda())
    optimizer = lct.optim.AdamW(model.parameters(), lr=0.01)
    data = [tuple(t.cuda() for t in batch) for batch in batches(40)]
    train(model, optimizer, loss_of, data[:10], activations=True)
    reserved = torch.cuda.memory_reserved()
    train(model, optimizer, loss_of, data[10:], activations=True)
    assert torch.cuda.memory_reserved() == reserved


def test_pitfall_30_all_bit_patterns_come_back_from_activations() -> None:
    every = torch.arange(2**16, dtype=torch.int32, device="cuda").to(torch.int16).view(BF16)
    x = every.view(256, 256).requires_grad_() * 1
    with lct.compress_activations() as saved:
        out = x.abs()
    assert saved.encoded == 1
    assert_same_bits(x, out.grad_fn._saved_self)
