"""Memory is truly freed: live bytes of a run are the sum that the format predicts, ± 1 %."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lct
from lct.dtypes import get_dtype
from lct.layout import PayloadLayout
from lct.memory import LiveBytes
from lct.nn.activations import SAVE_RULES
from lct.nn.room import CAPACITY_WORDS
from lct.presets import get_preset
from lct.tensor import CompressedTensor
from training import BF16

ROWS, WIDTH, LAYERS = 512, 256, 4


def build(device: str) -> nn.Module:
    torch.manual_seed(0)
    layers = [(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*(module for layer in layers for module in layer)).to(device, BF16)


@contextlib.contextmanager
def counted(device: str) -> Iterator[Callable[[], int]]:
    """Live bytes since then: of storages on the CPU, of the allocator on CUDA."""
    if device == "cpu":
        with LiveBytes() as live:
            yield lambda: live.live_bytes
        return
    gc.collect()  # what lives of other tests counts for how much is decoded ahead
    # Workspaces of cuBLAS, tables and the overflow arena are made once and stay.
    model = lct.compress_(build(device))
    optimizers = [lct.optim.SGD(model.parameters(), momentum=0.9)]
    optimizers.append(lct.optim.AdamW(model.parameters()))
    for _ in range(2):
        with lct.compress_activations():
            loss = loss_of(model, batch_of(device))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    del model, optimizers, optimizer, loss
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    yield lambda: torch.cuda.memory_allocated() - before


def batch_of(device: str) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, device=device).to(BF16)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def dense_bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def predicted_weights(model: nn.Module) -> int:
    """Of a dense model: payloads with the room that the values need; other parameters."""
    weights = [p for p in model.parameters() if p.dim() >= 2]
    payloads = [lct.encode(p, capacity="exact").layout.size_bytes for p in weights]
    return sum(payloads) + dense_bytes(p for p in model.parameters() if p.dim() < 2)


def predicted_activations(model: nn.Module, batch: torch.Tensor) -> tuple[int, int]:
    """Dense and compressed bytes of what a forward of a dense model saves besides parameters."""
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: list[torch.UntypedStorage] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.untyped_storage())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model, batch)
    sizes = {storage._cdata: storage.nbytes() for storage in kept if storage._cdata not in own}
    preset, dtype = get_preset(None), get_dtype("bfloat16")
    stored = [
        PayloadLayout.choose(preset, dtype, size // 2, CAPACITY_WORDS).size_bytes
        for size in sizes.values()
    ]
    assert min(sizes.values()) >= SAVE_RULES[BF16].min_bytes
    return sum(sizes.values()), sum(stored)


@pytest.mark.parametrize("in_backward", [False, True], ids=["step", "step in backward"])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_live_bytes_are_what_the_format_predicts(device: str, kind: str, in_backward: bool) -> None:
    twin = build(device)
    weights, all_dense = predicted_weights(twin), dense_bytes(twin.parameters())
    saved_dense, saved = predicted_activations(twin, batch_of(device))
    assert weights < 0.72 * all_dense and saved < 0.75 * saved_dense

    with counted(device) as live:

        def check(expected: int, what: str) -> None:
            got = live()
            assert abs(got - expected) <= 0.01 * expected, f"{what}: {got}, expected {expected}"

        model = build(device)
        check(all_dense, "dense")
        lct.compress_(model)
        check(weights, "compressed")

        options = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer = getattr(lct.optim, kind)(model.parameters(), lr=1e-3, **options)
        if in_backward:
            steps = lct.optim.step_in_backward(optimizer)
        state = 0
        for step in range(3):
            batch = batch_of(device)
            with lct.compress_activations():
                loss = loss_of(model, batch)
            check(weights + state + saved + batch.nbytes + loss.nbytes, f"forward {step}")
            del batch
            loss.backward()
            del loss
            if in_backward:
                state = held_state(optimizer)
            else:
                check(weights + state + all_dense, f"gradients of step {step}")
                optimizer.step()
                state = held_state(optimizer)
                optimizer.zero_grad()
            check(weights + state, f"step {step}")
        moments = {"SGD": 1, "AdamW": 2}[kind]
        assert state < 0.8 * moments * all_dense

        lct.decompress_(model)
        check(all_dense + state, "dense again")
        if in_backward:
            # Torch's hooks of parameters hide the cycle through them from the garbage collector.
            steps.remove()
            del steps
        del model, optimizer
        assert live() <= 0.01 * all_dense


def held_state(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(
        value.layout.size_bytes if isinstance(value, CompressedTensor) else value.nbytes
        for value in values
    )
