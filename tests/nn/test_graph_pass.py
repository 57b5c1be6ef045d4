"""The pass that merges decodes of a compiled graph: which, in what order, and the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule

import lct
from lct.nn import ahead, compiled, graph_pass
from lct.nn.graph_pass import DecodeTogether
from training import BF16, assert_same_bits, needs_compiler

SIZE = 128  # a square weight: 32 KiB


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU counts as a device where launches cost."""
    torch._dynamo.reset()
    monkeypatch.setattr(graph_pass.ops, "launches_kernels", lambda device: True)
    monkeypatch.setattr(ahead, "launches_kernels", lambda device: True)
    monkeypatch.setattr(ahead, "SHARE", 1)
    yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many weights each call decoded."""
    found: list[int] = []
    alone, together = compiled.decode_for_op, compiled.decode_all

    def decode(root: lct.CompressedTensor) -> torch.Tensor:
        found.append(1)
        return alone(root)

    def decode_all(roots: Sequence[lct.CompressedTensor]) -> list[torch.Tensor]:
        found.append(len(roots))
        return together(roots)

    monkeypatch.setattr(compiled, "decode_for_op", decode)
    monkeypatch.setattr(compiled, "decode_all", decode_all)
    return found


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(SIZE, SIZE, dtype=BF16) for _ in range(3))
        self.last = nn.Linear(SIZE, SIZE, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.down(F.silu(self.gate(x)) * self.up(x))
        return y + self.last(y.to(self.last.weight.dtype)).to(y.dtype)


def run(block: nn.Module, backend: Any, steps: int = 2) -> list[torch.Tensor]:
    """Results and all gradients of some forwards and backwards."""
    torch.manual_seed(1)
    block.compile(backend=backend, dynamic=False)
    found = []
    for _ in range(steps):
        x = torch.randn(4, SIZE).to(BF16).requires_grad_()
        y = block(x)
        y.float().square().sum().backward()
        found += [y.detach(), x.grad, *(p.grad.clone() for p in block.parameters())]
        block.zero_grad()
    return found


def backend_with(change: Callable[[Graph], None]) -> Any:
    """Traces forward and backward as Inductor does, and changes the graphs, without a compiler."""

    def compile_graph(module: GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
        change(module.graph)
        module.graph.lint()
        module.recompile()
        return make_boxed_func(module.forward)

    return aot_autograd(fw_compiler=compile_graph, bw_compiler=compile_graph)


def pair(dtype: torch.dtype = BF16) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    dense = Block(dtype)
    return dense, lct.compress_(copy.deepcopy(dense))


def check(backend: Any, dtype: torch.dtype = BF16) -> None:
    dense, compressed = pair(dtype)
    expected = run(dense, backend_with(lambda graph: None))
    for a, b in zip(expected, run(compressed, backend), strict=True):
        assert_same_bits(a, b)


def test_one_call_each_in_forward_and_backward(calls: list[int]) -> None:
    check(backend_with(DecodeTogether(None)))
    assert calls == [4, 4] * 2


def test_within_the_limit(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "decode_ahead_bytes", lambda: 3 * SIZE * SIZE * 2)
    check(backend_with(DecodeTogether(None)))
    assert calls == [2, 2] * 4  # a power of two: room for two


def test_none_where_the_limit_is_zero(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LCT_DECODE_AHEAD_MIB", "0")
    check(backend_with(DecodeTogether(None)))
    assert calls == [1] * 16


def test_dtypes_apart(calls: list[int]) -> None:
    check(backend_with(DecodeTogether(None)), dtype=torch.float32)
    assert calls == [3, 1, 1, 3] * 2


def test_where_launches_cost_nothing(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_pass.ops, "launches_kernels", lambda device: device.type == "cuda")
    check(backend_with(DecodeTogether(None)))
    assert calls == [1] * 16


@needs_compiler
def test_inductor_runs_it(calls: list[int]) -> None:
    dense, compressed = pair()
    with inductor_config.patch(emulate_precision_casts=True):
        expected, found = (run(block, "inductor") for block in (dense, compressed))
    for a, b in zip(expected, found, strict=True):
        assert_same_bits(a, b)
    assert calls == [4, 4] * 2


class Counting(CustomGraphPass):
    """A user's own pass."""

    seen = 0

    def __call__(self, graph: Graph) -> None:
        self.seen += 1

    def uuid(self) -> Any:
        return "counting"


def test_passes_of_users_run_first() -> None:
    own = Counting()
    # Not monkeypatch: what it takes back it takes away, and Inductor misses the option.
    with inductor_config.patch(post_grad_custom_post_pass=own):
        graph_pass.install()
        installed = inductor_config.post_grad_custom_post_pass
        assert isinstance(installed, DecodeTogether) and installed.first is own
        graph_pass.install()
        assert inductor_config.post_grad_custom_post_pass is installed
    installed(Graph())
    assert own.seen == 1


def test_what_graphs_on_disk_are_known_by(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = DecodeTogether(None).uuid()
    assert alone is not None and DecodeTogether(None).uuid() == alone
    assert DecodeTogether(Counting()).uuid() not in (None, alone)
    assert DecodeTogether(lambda graph: None).uuid() is None  # it says nothing of itself
    monkeypatch.setenv("LCT_DECODE_AHEAD_MIB", "0")
    assert DecodeTogether(None).uuid() != alone


def test_a_weight_of_another_shape() -> None:
    roots = [lct.encode(torch.randn(SIZE, SIZE).to(BF16)) for _ in range(2)]
    handles = [lct.CompressedWeight(root).handle for root in roots]
    ops = torch.ops.lct.decode_all
    first, second = ops(handles, [SIZE] * 4, [2, 2], BF16, [])
    assert_same_bits(roots[0].decode(), first)
    assert_same_bits(roots[1].decode(), second)
    with pytest.raises(
        RuntimeError, match=r"traced for a torch.bfloat16 weight of shape \(64, 256\)"
    ):
        ops(handles, [SIZE, SIZE, 64, 256], [2, 2], BF16, [])
