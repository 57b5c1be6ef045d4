"""``F.linear``'s fast path runs torch's own kernels on the same operands: equal bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lct.nn import CompressedWeight
from lct.nn.linear import linear
from training import BF16, assert_same_bits


def run(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, grad_x: bool
) -> list[torch.Tensor | None]:
    leaf = x.detach().requires_grad_(grad_x)
    bias = None if bias is None else bias.detach().requires_grad_()
    out = F.linear(leaf, weight, bias)
    torch.manual_seed(5)
    if out.requires_grad:
        out.backward(torch.randn(out.shape).to(out.dtype))
    return [out, leaf.grad, weight.grad, None if bias is None else bias.grad]


def compare(x: torch.Tensor, with_bias: bool, frozen: bool, grad_x: bool, out: int = 24) -> None:
    dense = torch.randn(out, x.shape[-1]).to(x.dtype)
    bias = torch.randn(out).to(x.dtype) if with_bias else None
    a = nn.Parameter(dense.clone(), requires_grad=not frozen)
    b = nn.Parameter(CompressedWeight.from_dense(dense), requires_grad=not frozen)
    results = run(x, a, bias, grad_x), run(x, b, bias, grad_x)
    for expected, got, name in zip(*results, ("out", "x", "weight", "bias"), strict=True):
        assert (expected is None) == (got is None), name
        if expected is not None:
            assert got.stride() == expected.stride(), name
            assert_same_bits(expected, got, name)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.sampled_from([32, 64, 100]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([BF16, torch.float32]),
)
def test_same_bits(
    rows: list[int], width: int, bias: bool, frozen: bool, grad_x: bool, dtype: torch.dtype
) -> None:
    compare(torch.randn(*rows, width).to(dtype), bias, frozen, grad_x)


INPUTS: dict[str, Callable[[], torch.Tensor]] = {
    "vector": lambda: torch.randn(32),
    "transposed": lambda: torch.randn(32, 6).t(),
    "permuted": lambda: torch.randn(5, 32, 6).permute(2, 0, 1).transpose(1, 2).transpose(1, 2),
    "sliced": lambda: torch.randn(4, 6, 40)[..., :32],
    "every other": lambda: torch.randn(4, 6, 32)[:, ::2],
    "one row": lambda: torch.randn(32, 1).t(),
    "expanded": lambda: torch.randn(1, 6, 32).expand(3, 6, 32),
    "empty": lambda: torch.randn(0, 32),
    "four": lambda: torch.randn(2, 3, 4, 32),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_other_layouts(name: str, bias: bool) -> None:
    compare(INPUTS[name]().to(BF16), bias, frozen=False, grad_x=True)


def test_views_of_a_weight_as_weights() -> None:
    dense = torch.randn(48, 64).to(BF16)
    x = torch.randn(5, 32).to(BF16)
    for part in (
        lambda w: w[:24, :32],
        lambda w: w[24:].view(-1, 32),
        lambda w: w.t()[:32, :48].t(),
    ):
        a, b = nn.Parameter(dense.clone()), nn.Parameter(CompressedWeight.from_dense(dense))
        outs = []
        for w in (a, b):
            out = F.linear(x, part(w))
            out.square().sum().backward()
            outs.append(out)
        assert_same_bits(*outs)
        assert_same_bits(a.grad, b.grad)


def test_the_output_may_be_changed_in_place() -> None:
    weight = nn.Parameter(CompressedWeight.from_dense(torch.randn(32, 32).to(BF16)))
    bias = nn.Parameter(torch.zeros(32, dtype=BF16))
    for b in (bias, None):
        out = F.linear(torch.randn(2, 3, 32).to(BF16), weight, b)
        F.relu(out, inplace=True).sum().backward()


def test_the_graph_holds_no_decoded_weight() -> None:
    weight = nn.Parameter(CompressedWeight.from_dense(torch.randn(32, 32).to(BF16)))
    out = F.linear(torch.randn(2, 32, dtype=BF16, requires_grad=True), weight)
    assert any(saved is weight for saved in out.grad_fn.saved_tensors)
    assert not [
        s for s in out.grad_fn.saved_tensors if type(s) is torch.Tensor and s.shape == (32, 32)
    ]


def test_a_frozen_input_is_not_saved() -> None:
    weight = nn.Parameter(CompressedWeight.from_dense(torch.randn(32, 32).to(BF16)), False)
    bias = nn.Parameter(torch.zeros(32, dtype=BF16))
    assert F.linear(torch.randn(2, 32).to(BF16), weight, bias).grad_fn.saved_tensors == (None, None)


def test_errors_are_torchs() -> None:
    weight = CompressedWeight.from_dense(torch.randn(32, 32).to(BF16))
    with pytest.raises(RuntimeError):
        F.linear(torch.randn(2, 33).to(BF16), weight)
    with pytest.raises(RuntimeError, match="dtype"):
        F.linear(torch.randn(2, 32), weight)
    assert linear(torch.randn(2, 32), torch.randn(3, 32)) is NotImplemented
