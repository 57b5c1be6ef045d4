"""What one compiled graph saves of most that forward saves stays dense: its backward asks for all
of it at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lct
from lct.nn import activations, at_once, room
from training import assert_same_bits, assert_same_model, store_small_tensors

WIDTH, LAYERS = 32, 8
REASON = "a compiled graph asks for it and most of what is saved at once"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    store_small_tensors(monkeypatch)
    monkeypatch.setattr(at_once, "LEAST_BYTES", 0)
    monkeypatch.setattr(room, "_rooms", {})
    monkeypatch.setattr(activations, "asked_at_once", at_once.AskedAtOnce())
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Deep(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def model_of(layers: int = LAYERS, width: int = WIDTH) -> Deep:
    torch.manual_seed(0)
    return Deep(layers, width).to(torch.bfloat16)


def step(model: nn.Module, x: torch.Tensor) -> lct.nn.SavedActivations:
    with lct.compress_activations() as saved:
        loss = model(x).float().square().mean()
    loss.backward()
    return saved


def values() -> torch.Tensor:
    return torch.randn(64, WIDTH, dtype=torch.bfloat16)


def in_graphs(saved: lct.nn.SavedActivations) -> int:
    return sum(site.encoded for site in saved.sites if site.in_graph)


def test_a_model_that_is_compiled_as_a_whole() -> None:
    model, dense = model_of(), model_of()
    model.compile(backend="aot_eager")
    dense.compile(backend="aot_eager")
    x = values()
    first = step(model, x)
    assert in_graphs(first) > LAYERS and not first.kept[REASON]
    second = step(model, x)
    assert in_graphs(second) == 0 and second.kept[REASON] == in_graphs(first)
    third = step(model, x)  # stays so
    assert third.kept == second.kept
    for _ in range(3):
        dense(x).float().square().mean().backward()
    assert_same_model(dense, model)
    for (_, a), (_, b) in zip(dense.named_parameters(), model.named_parameters(), strict=True):
        assert_same_bits(a.grad, b.grad)


def test_layers_that_are_compiled_one_by_one() -> None:
    model = model_of()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    x = values()
    seen = [step(model, x) for _ in range(4)]
    assert all(saved.kept[REASON] == 0 for saved in seen)
    assert in_graphs(seen[0]) == in_graphs(seen[3]) > LAYERS


def test_blocks_around_each_layer_count_what_all_have_saved() -> None:
    model = model_of()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    for _ in range(3):
        x = values()
        for layer in model.layers:
            with lct.compress_activations() as saved:
                x = layer(x)
            assert in_graphs(saved) and not saved.kept[REASON]
        x.float().square().mean().backward()


def test_the_small_graphs_beside_a_large_one_stay_compressed() -> None:
    large, small = model_of(), model_of(2)
    large.compile(backend="aot_eager")
    for layer in small.layers:
        layer.compile(backend="aot_eager")
    model = nn.Sequential(large, small)
    x = values()
    seen = [step(model, x) for _ in range(5)]
    kept = [saved.kept[REASON] for saved in seen]
    assert kept[0] == 0 and kept[1] > LAYERS and len(set(kept[1:])) == 1
    assert in_graphs(seen[4]) == in_graphs(seen[1]) > 2


def test_what_eager_steps_before_have_saved_does_not_count() -> None:
    eager, model = model_of(4 * LAYERS), model_of()
    model.compile(backend="aot_eager")
    x = values()
    for _ in range(3):
        step(eager, x)
    assert in_graphs(step(model, x)) > LAYERS
    assert in_graphs(step(model, x)) == 0


def test_eager_models_are_not_asked() -> None:
    model = model_of(1)
    seen = [step(model, values()) for _ in range(3)]
    assert all(saved.encoded and not saved.kept[REASON] for saved in seen)
    assert not any(site.in_graph for site in seen[0].sites)


def test_few_bytes_are_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    store_small_tensors(monkeypatch)
    model = model_of()
    model.compile(backend="aot_eager")
    assert not any(step(model, values()).kept[REASON] for _ in range(3))


@pytest.mark.gpu
def test_the_peak_of_a_model_that_is_compiled_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x = torch.randn(4096, 1024, dtype=torch.bfloat16, device="cuda")
    peaks = []
    for compressed in (False, True):
        model = model_of(width=1024).cuda()
        model.compile()
        for _ in range(3):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with lct.compress_activations() if compressed else contextlib.nullcontext():
                loss = model(x).float().square().mean()
            loss.backward()
            del loss
            model.zero_grad()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del model
    # What saves that came before had the arena grow to is there in both.
    assert peaks[1] < peaks[0] * 1.05
