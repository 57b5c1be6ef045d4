"""Muon's momentum on CUDA in one pass: bits of torch's lerps on dense tensors, hostile ones too."""

from typing import Any

import pytest
import torch
from test_sgd_cuda import COUNT, DEVICE, gradients, random_bits
from torch import nn

import lct
from lct.tensor import CompressedTensor
from training import assert_same_bits, assert_same_model, assert_same_state

pytestmark = pytest.mark.gpu
# Either lerp starts from either of its ends: below, at and above 1/2; and what torch takes besides.
MOMENTA = [0.95, 0.5, 0.3, 0.0, 1.0, 1.7]


def lerps(buffer: torch.Tensor, grad: torch.Tensor, momentum: float) -> torch.Tensor:
    """What torch does to a dense buffer; returns the update."""
    buffer.lerp_(grad, 1 - momentum)
    return grad.lerp(buffer, momentum)


def compare(
    kind: str, momentum: float, steps: int, capacity: int | str = "exact", count: int = COUNT
) -> CompressedTensor:
    buffer = gradients("gaussian", 99, count).to(DEVICE)
    held = lct.encode(buffer, capacity=capacity)
    assert held.can_step_fused()
    for step in range(steps):
        grad = gradients(kind, step, count).to(DEVICE)
        before = grad.clone()
        update = held.muon_(grad, momentum=momentum)
        expected = lerps(buffer, grad, momentum)
        assert_same_bits(buffer, held, f"momentum at step {step}")
        assert_same_bits(expected, update, f"update at step {step}")
        assert_same_bits(before, grad, "gradient")
    # What a step leaves is what an encode of the same values with the same book gives.
    again = CompressedTensor.from_canonical(held.canonical_bytes(), held.shape, DEVICE)
    assert_same_bits(held, again)
    return held


@pytest.mark.parametrize("momentum", MOMENTA)
def test_bits_of_torch(momentum: float) -> None:
    compare("gaussian", momentum, 12)


@pytest.mark.parametrize("count", [2**22, 2**22 + 1])
@pytest.mark.parametrize("momentum", MOMENTA)
def test_bits_of_many_values(momentum: float, count: int) -> None:
    """As ``test_sgd_cuda`` says."""
    compare("gaussian", momentum, 4, count=count)


@pytest.mark.parametrize("kind", ["sparse", "random bits", "extremes", "nan"])
@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("capacity", [200, 768])
def test_hostile_gradients(kind: str, momentum: float, capacity: int) -> None:
    compare(kind, momentum, 10, capacity)


@pytest.mark.parametrize("momentum", MOMENTA)
def test_every_value(momentum: float) -> None:
    """All bit patterns of the buffer, each with some of the gradient."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    buffer = patterns.repeat(16).view(torch.bfloat16).to(DEVICE)
    for seed in range(4):
        dense = buffer.clone()
        held = lct.encode(dense, capacity=200)
        grad = random_bits(len(buffer), seed).view(torch.bfloat16).to(DEVICE)
        update = held.muon_(grad, momentum=momentum)
        assert_same_bits(lerps(dense, grad, momentum), update, "update")
        assert_same_bits(dense, held, "momentum")


@pytest.mark.parametrize("kind", ["gaussian", "random bits"])
@pytest.mark.parametrize("count", [1000, 1001, 2047, 8191, 8192, 8193, 8322, 8192 * 3 + 129])
def test_tails(count: int, kind: str) -> None:
    buffer = gradients(kind, 0)[:count].to(DEVICE)
    held = lct.encode(buffer)
    assert held.can_step_fused()
    for step in range(1, 4):
        # Does not begin at a multiple of 16 bytes.
        grad = gradients(kind, step)[: count + 1].to(DEVICE)[1:]
        update = held.muon_(grad, momentum=0.95)
        assert update.shape == grad.shape
        assert_same_bits(lerps(buffer, grad, 0.95), update, "update")
        assert_same_bits(buffer, held, "momentum")


def test_group_that_spills() -> None:
    """One group spills in one step and is coded in its slot again in the next."""
    buffer = gradients("gaussian", 99).to(DEVICE)
    held = lct.encode(buffer)
    spilled = []
    for step in range(5):
        grad = gradients("gaussian", step)
        if step == 2:
            # Of any scale but finite: the buffer, which momentum 0 makes the gradient, forgets it.
            scales = torch.randint(-100, 100, (8192,), generator=torch.Generator().manual_seed(1))
            grad[8192 : 2 * 8192] = torch.exp2(scales.float()).bfloat16()
        grad = grad.to(DEVICE)
        update = held.muon_(grad, momentum=0.0)
        assert_same_bits(lerps(buffer, grad, 0.0), update, f"update at step {step}")
        assert_same_bits(buffer, held, f"momentum at step {step}")
        spilled.append(held.group_counts().spilled)
    assert spilled == [0, 0, 1, 0, 0]


def test_small_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """All groups spill, in launches over a few of them each."""
    from lct.backends.cuda import arena

    monkeypatch.setattr(arena.of(0), "limit_chunks", 8)
    count = 8192 * 50 + 99
    buffer = random_bits(count, 0).view(torch.bfloat16).to(DEVICE)
    held = lct.encode(buffer, capacity=68)
    for step in range(1, 10):
        grad = random_bits(count, step).view(torch.bfloat16).to(DEVICE)
        update = held.muon_(grad, momentum=0.3)
        assert_same_bits(lerps(buffer, grad, 0.3), update, f"update at step {step}")
        assert_same_bits(buffer, held, f"momentum at step {step}")
    assert held.group_counts().spilled > 0
    assert arena.of(0).counters().failed_groups == 0


def test_graph_replay() -> None:
    buffer = gradients("gaussian", 0).to(DEVICE)
    held = lct.encode(buffer)
    grad = buffer.clone()
    held.muon_(grad, momentum=0.9)  # compiles
    lerps(buffer, grad, 0.9)
    lct.reserve_arena(8 << 20)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update = held.muon_(grad, momentum=0.9)
    for step in range(10):
        grad.copy_(gradients("gaussian" if step % 3 else "random bits", step))
        graph.replay()
        expected = lerps(buffer, grad, 0.9)
        torch.cuda.synchronize()
        assert_same_bits(buffer, held, f"momentum at step {step}")
        assert_same_bits(expected, update, f"update at step {step}")


class Matrices(nn.Module):
    """Wide, tall, square and transposed; and one too small to be compressed."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.wide = nn.Parameter(torch.randn(130, 515) * 0.02)
        self.tall = nn.Parameter(torch.randn(700, 96) * 0.02)
        self.square = nn.Parameter(torch.randn(256, 256) * 0.02)
        self.turned = nn.Parameter((torch.randn(64, 80) * 0.02).t())
        self.small = nn.Parameter(torch.randn(3, 4))
        self.to(DEVICE, dtype)

    def set_grads(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for param in self.parameters():
            grad = torch.empty_strided(
                param.shape, param.stride(), device=DEVICE, dtype=param.dtype
            )
            param.grad = grad.copy_(torch.randn(param.shape, generator=generator) * 1e-2)


def count_kernels(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A list that grows by the momentum of every parameter that the kernel steps."""
    taken: list[float] = []
    muon_ = CompressedTensor.muon_

    def counted(self: CompressedTensor, grad: torch.Tensor, *, momentum: float) -> torch.Tensor:
        taken.append(momentum)
        return muon_(self, grad, momentum=momentum)

    monkeypatch.setattr(CompressedTensor, "muon_", counted)
    return taken


def step_both(
    one: tuple[Matrices, torch.optim.Optimizer],
    other: tuple[Matrices, torch.optim.Optimizer],
    step: int,
) -> None:
    """The gradients of ``step``, and a step, for both."""
    for model, optimizer in (one, other):
        model.set_grads(step)
        optimizer.step()


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.3, "weight_decay": 0.0},
        {"momentum": 0.0, "ns_steps": 3},
        {"adjust_lr_fn": "match_rms_adamw"},
        {"nesterov": False},
        {"lr": torch.tensor(0.01)},
    ],
    ids=str,
)
def test_optimizer(
    options: dict[str, Any], compressed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = count_kernels(monkeypatch)
    a, b = Matrices(), Matrices()
    if compressed:
        lct.compress_(b)
    options = {"lr": 0.01, **options}
    expected = torch.optim.Muon(a.parameters(), **options)
    optimizer = lct.optim.Muon(b.parameters(), **options)
    for step in range(8):
        step_both((a, expected), (b, optimizer), step)
        assert_same_model(a, b)
    assert_same_state(expected, optimizer)
    # The first step makes the momentum.
    by_kernel = options.get("nesterov", True) and not isinstance(options["lr"], torch.Tensor)
    assert taken == ([options.get("momentum", 0.95)] * (7 * 3) if by_kernel else [])


def test_momentum_of_other_dtypes_is_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = count_kernels(monkeypatch)
    a, b = Matrices(torch.float32), lct.compress_(Matrices(torch.float32))
    expected = torch.optim.Muon(a.parameters(), lr=0.01)
    optimizer = lct.optim.Muon(b.parameters(), lr=0.01)
    for step in range(3):
        step_both((a, expected), (b, optimizer), step)
    assert_same_model(a, b)
    assert_same_state(expected, optimizer)
    assert not taken


def test_captured_step_takes_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = Matrices(), Matrices()
    del a.small, b.small  # whether to compress its momentum is measured, which a graph cannot hold
    lct.compress_(b)
    expected = torch.optim.Muon(a.parameters(), lr=0.01)
    optimizer = lct.optim.Muon(b.parameters(), lr=0.01)
    for step in range(2):
        step_both((a, expected), (b, optimizer), step)
    lct.reserve_arena(8 << 20)
    taken = count_kernels(monkeypatch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(3):
        graph.replay()
        expected.step()
    torch.cuda.synchronize()
    assert_same_model(a, b)
    assert not taken
