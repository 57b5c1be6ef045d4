"""Steps in backward on CUDA: the bits of an optimizer for each parameter by itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lct
from lct.nn import CompressedWeight
from training import BF16, assert_same_bits, plain

pytestmark = pytest.mark.gpu
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
WIDTH, LAYERS = 256, 6
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd-foreach": ("SGD", {**SGD, "nesterov": True}),
    "sgd-fused": ("SGD", {**SGD, "fused": True}),
    "sgd-single": ("SGD", {**SGD, "foreach": False}),
    "adam": ("Adam", {"lr": 1e-2, "amsgrad": True}),
    "adamw-foreach": ("AdamW", {"lr": 1e-2}),
    "adamw-fused": ("AdamW", {"lr": 1e-2, "fused": True}),
    "muon": ("Muon", {"lr": 1e-2}),
}
# Every parameter at once; two or three weights; all at the end.
BATCHES = [0, 300_000, 1 << 30]


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class _Late(torch.autograd.Function):
    """The identity; its gradient comes late, on the stream of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(20_000_000)
        return grad.clone()


class Branches(nn.Module):
    """Two stacks over one input, the second one on a stream and a device of its own."""

    def __init__(self, devices: list[str], stream: torch.cuda.Stream | None) -> None:
        super().__init__()
        self.stacks = nn.ModuleList(
            nn.Sequential(
                *(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())),
                nn.LayerNorm(WIDTH),
            ).to(device, BF16)
            for device in devices
        )
        self.stream = stream

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.stacks
        device = next(second.parameters()).device
        y = first(x)
        own = self.stream
        if own is None:
            return y + _Late.apply(second(x.to(device))).to(x.device)
        own.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(own):
            z = _Late.apply(second(x))
        torch.cuda.current_stream().wait_stream(own)
        z.record_stream(torch.cuda.current_stream())
        return y + z


def trained(
    kind: str,
    batch_bytes: int | None,
    devices: list[str],
    stream: torch.cuda.Stream | None = None,
    steps: int = 4,
) -> tuple[nn.Module, list[dict[str, Any]], set[tuple[int, int]]]:
    """The model, each parameter's state, and the (device, stream) that steps ran on.

    ``batch_bytes`` None: dense, an optimizer of torch's for each parameter.
    """
    name, options = KINDS[kind]
    torch.manual_seed(0)
    model = Branches(devices, stream)
    params = [p for p in model.parameters() if kind != "muon" or p.dim() == 2]
    places: set[tuple[int, int]] = set()
    if batch_bytes is None:
        optimizers = [getattr(torch.optim, name)([p], **options) for p in params]
    else:
        lct.compress_(model)
        assert isinstance(params[0], CompressedWeight)
        optimizer = getattr(lct.optim, name)(params, **options)
        step_params = optimizer.step_params

        def noted(group: Any, some: Any) -> None:
            assert {p.device.index for p in some} == {torch.cuda.current_device()}
            places.add((torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream))
            step_params(group, some)

        optimizer.step_params = noted
        lct.optim.step_in_backward(optimizer, batch_bytes=batch_bytes)
    for step in range(steps):
        x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = F.mse_loss(model(x.to(devices[0], BF16)).float(), x.to(devices[0]))
        loss.backward()
        if batch_bytes is None:
            for one in optimizers:
                one.step()
                one.zero_grad()
        else:
            assert all(p.grad is None for p in params)
    torch.cuda.synchronize()
    if batch_bytes is None:
        states = [one.state[p] for one, p in zip(optimizers, params, strict=True)]
    else:
        states = [optimizer.state[p] for p in params]
    return model, states, places


def assert_same(expected: Any, got: Any) -> None:
    for a, b in zip(expected[0].parameters(), got[0].parameters(), strict=True):
        assert_same_bits(a, b)
    for theirs, ours in zip(expected[1], got[1], strict=True):
        for name, value in theirs.items():
            assert_same_bits(value, plain(ours[name]), name)


@pytest.mark.parametrize("batch_bytes", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_an_optimizer_for_each_parameter(kind: str, batch_bytes: int) -> None:
    expected = trained(kind, None, ["cuda:0"] * 2)
    assert_same(expected, trained(kind, batch_bytes, ["cuda:0"] * 2))


@pytest.mark.parametrize("batch_bytes", BATCHES)
@pytest.mark.parametrize("kind", ["sgd-foreach", "adamw-fused"])
def test_gradients_on_two_streams(kind: str, batch_bytes: int) -> None:
    """Each is stepped on the stream that it was accumulated on, and what follows waits for it."""
    expected = trained(kind, None, ["cuda:0"] * 2)
    own = torch.cuda.Stream()
    got = trained(kind, batch_bytes, ["cuda:0"] * 2, own)
    assert_same(expected, got)
    assert got[2] == {(0, torch.cuda.current_stream().cuda_stream), (0, own.cuda_stream)}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("batch_bytes", BATCHES)
@pytest.mark.parametrize("kind", ["sgd-foreach", "adamw-fused"])
def test_parameters_on_two_devices(kind: str, batch_bytes: int) -> None:
    devices = ["cuda:0", "cuda:1"]
    got = trained(kind, batch_bytes, devices)
    assert_same(trained(kind, None, devices), got)
    assert {device for device, _ in got[2]} == {0, 1}


def test_one_launch_steps_several_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from lct.backends.cuda import steps

    counts: list[int] = []
    launch = steps._launch

    def counted(entry: str, args: Any, updates: Any, *rest: Any) -> None:
        counts.append(len(updates))
        launch(entry, args, updates, *rest)

    monkeypatch.setattr(steps, "_launch", counted)
    trained("sgd-foreach", 1 << 30, ["cuda:0"] * 2, steps=2)
    # All weights of the second step: momentum is there then.
    assert counts == [2 * LAYERS]
