"""What the training tests share: small models, a training loop, comparison of bits."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lct
from lct.nn import CompressedWeight, activations, little
from lct.tensor import CompressedTensor

# Models this small gain nothing from threads, and OpenMP threads that spin starve other processes.
torch.set_num_threads(1)
BF16 = torch.bfloat16
COMPILER = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++") or ""
needs_compiler = pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def plain(value: Any) -> torch.Tensor:
    """The plain tensor of a weight, a state or a tensor."""
    if isinstance(value, CompressedTensor):
        return value.decode()
    return value.dense() if isinstance(value, CompressedWeight) else value.detach()


def bits(value: Any) -> torch.Tensor:
    tensor = plain(value).contiguous()
    return tensor.view(_INTEGER[tensor.element_size()])


def assert_same_bits(expected: Any, got: Any, what: str = "tensor") -> None:
    a, b = bits(expected), bits(got)
    assert a.shape == b.shape, f"{what}: shape {tuple(b.shape)}, expected {tuple(a.shape)}"
    assert a.dtype == b.dtype, f"{what}: {b.dtype}, expected {a.dtype}"
    if not torch.equal(a, b):
        where = (a != b).nonzero()
        first = tuple(where[0].tolist())
        raise AssertionError(
            f"{what}: {len(where)} of {a.numel()} values differ, first at {first}: "
            f"{int(b[first]):#x}, expected {int(a[first]):#x}"
        )


def assert_same_model(expected: nn.Module, got: nn.Module) -> None:
    for (name, a), b in zip(expected.named_parameters(), got.parameters(), strict=True):
        assert_same_bits(a, b, name)
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            assert type(b.grad) is torch.Tensor, f"{name}: gradients stay plain"
            assert_same_bits(a.grad, b.grad, f"gradient of {name}")
    for (name, a), b in zip(expected.named_buffers(), got.buffers(), strict=True):
        assert_same_bits(a, b, name)


def assert_same_state(expected: torch.optim.Optimizer, got: torch.optim.Optimizer) -> None:
    a, b = expected.state_dict(), got.state_dict()
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for key, state in a["state"].items():
        assert state.keys() == b["state"][key].keys()
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                assert_same_bits(value, b["state"][key][name], f"{name} of {key}")
            else:
                assert value == b["state"][key][name]


def random_bits(*shape: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """BF16 of uniformly random bits: every exponent, infinities and NaN payloads."""
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator).view(BF16)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 96)
        self.down = nn.Linear(96, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)))), 0.1, self.training)


class TiedTransformer(nn.Module):
    """A GPT whose output layer is its embedding; the norm runs in FP32, upcast from BF16."""

    def __init__(self, vocabulary: int = 64, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        wide = x.float()
        x = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
        return self.head(x)


class Zoo(nn.Module):
    """Modules that reach their weights in other ways than F.linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.grouped = nn.Conv1d(16, 32, 3, padding=1, groups=2)
        self.norm = nn.GroupNorm(4, 16)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.cross = nn.MultiheadAttention(32, 4, kdim=16, vdim=16, batch_first=True)
        self.gru = nn.GRU(32, 24, num_layers=2, batch_first=True, bidirectional=True)
        self.lstm = nn.LSTM(48, 16, batch_first=True)
        self.bilinear = nn.Bilinear(16, 16, 16)
        self.scale = nn.Parameter(0.1 * torch.randn(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(F.relu(self.conv(x), inplace=True)).flatten(2)
        memory = x.transpose(1, 2)
        y = self.grouped(x).transpose(1, 2)
        y = y + self.attention(y, y, y, need_weights=False)[0]
        y = y + self.cross(y, memory, memory, need_weights=False)[0]
        y, _ = self.gru(y)
        y, _ = self.lstm(y)
        return self.bilinear(y, y) + memory @ (self.scale.t() @ self.scale)


Batch = tuple[torch.Tensor, ...]


def mlp_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.mse_loss(model(batch[0]).float(), batch[0].float())


def token_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(batch[0][:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[0][:, 1:].flatten())


def zoo_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return (model(batch[0]).float() - 1).square().mean()


def mlp_batches(count: int) -> list[Batch]:
    return [(torch.randn(4, 8, 64).to(BF16),) for _ in range(count)]


def token_batches(count: int) -> list[Batch]:
    return [(torch.randint(0, 64, (2, 17)),) for _ in range(count)]


def zoo_batches(count: int) -> list[Batch]:
    return [(torch.randn(2, 3, 4, 4).to(BF16),) for _ in range(count)]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], Callable[..., Any]]] = {
    "mlp": (Mlp, mlp_loss, mlp_batches),
    "transformer": (TiedTransformer, token_loss, token_batches),
    "zoo": (Zoo, zoo_loss, zoo_batches),
}


def make(build: Callable[[], nn.Module], compressed: bool, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = build().to(BF16)
    return lct.compress_(model) if compressed else model


def store_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have saved activations compressed from 1 KiB on, as large as those of the test's models, and
    whatever the test before has saved.
    """
    monkeypatch.setattr(little, "LITTLE_SHARE", 0)
    for dtype, rule in activations.SAVE_RULES.items():
        monkeypatch.setitem(
            activations.SAVE_RULES, dtype, dataclasses.replace(rule, min_bytes=1024)
        )


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[..., torch.Tensor],
    batches: Iterable[Batch],
    *,
    activations: bool = False,
    accumulate: int = 1,
    clip: float | None = None,
    scheduler: Any = None,
    seed: int = 1,
) -> list[torch.Tensor]:
    """Losses of one pass over ``batches``, an optimizer step every ``accumulate`` of them."""
    losses = []
    torch.manual_seed(seed)  # dropout
    for index, batch in enumerate(batches):
        with lct.compress_activations() if activations else contextlib.nullcontext():
            loss = loss_of(model, batch)
        loss.backward()
        losses.append(loss.detach())
        if (index + 1) % accumulate == 0:
            if clip is not None:
                losses.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
    return losses


def assert_same_losses(expected: list[torch.Tensor], got: list[torch.Tensor]) -> None:
    assert len(expected) == len(got)
    for step, (a, b) in enumerate(zip(expected, got, strict=True)):
        assert_same_bits(a, b, f"loss {step}")


def check_checkpoints_go_to_torch_and_back(kind: str, path: Path, **options: Any) -> None:
    """Nine steps of torch's optimizer ``kind``, the middle three taken over by LCT's, and back."""
    data = token_batches(9)
    model = make(TiedTransformer, False).eval()
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    expected = train(model, optimizer, token_loss, data)
    losses: list[torch.Tensor] = []
    for part, compressed in enumerate((False, True, False)):
        run = make(TiedTransformer, compressed, seed=part).eval()
        source = lct.optim if compressed else torch.optim
        run_optimizer = getattr(source, kind)(run.parameters(), **options)
        if part == 0:
            run.load_state_dict(make(TiedTransformer, False).state_dict())
        else:
            saved = torch.load(path, weights_only=True)
            run.load_state_dict(saved["model"])
            run_optimizer.load_state_dict(saved["optimizer"])
        losses += train(run, run_optimizer, token_loss, data[3 * part : 3 * part + 3])
        state = {"model": run.state_dict(), "optimizer": run_optimizer.state_dict()}
        torch.save(state, path)
    assert_same_losses(expected, losses)
    assert_same_model(model, run)
    assert_same_state(optimizer, run_optimizer)


def check_grad_scaler(
    make_optimizer: Callable[[bool, Any], torch.optim.Optimizer], device: str = "cpu"
) -> None:
    """``make_optimizer(compressed, params)`` under a GradScaler, with an overflow: torch's bits and
    scale.
    """
    results = []
    for compressed in (False, True):
        torch.manual_seed(0)
        model = Mlp().to(device)
        if compressed:
            lct.compress_(model)
        optimizer = make_optimizer(compressed, model.parameters())
        scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2)
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(device)
        for step in range(5):
            optimizer.zero_grad()
            loss = model(x).square().mean() * (float("inf") if step == 3 else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append((model, optimizer, scaler.get_scale()))
    assert results[0][2] == results[1][2]
    assert_same_model(results[0][0], results[1][0])
    assert_same_state(results[0][1], results[1][1])
