"""The demo's model: FP32 products are the products, and their gradients the gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lct.bench.models import float32_products
from lct.bench.models.byte_gpt import ByteGpt, GptSize

# Bits of BF16 results depend on the order of sums; these are other kernels, so compare with room
# for one rounding to BF16.
BF16_ULP = 2.0**-8


def _close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(
        found.double(),
        expected,
        rtol=BF16_ULP,
        atol=BF16_ULP * float(expected.detach().abs().max()),
    )


def _leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16).requires_grad_()


def _wide(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("shape", [(7, 24), (3, 400, 24)])
def test_linear_equals_fp64(shape: tuple[int, ...]) -> None:
    x, weight = _leaf(*shape), _leaf(16, 24)
    wide_x, wide_weight = _wide(x, weight)
    out, expected = float32_products.linear(x, weight), F.linear(wide_x, wide_weight)
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad.double())
    _close(out, expected)
    assert x.grad is not None
    assert weight.grad is not None
    _close(x.grad, wide_x.grad)
    _close(weight.grad, wide_weight.grad)


def test_attention_equals_fp64() -> None:
    leaves = [_leaf(2, 3, 20, 8) for _ in range(3)]
    wide = _wide(*leaves)
    out = float32_products.attention(*leaves)
    expected = F.scaled_dot_product_attention(*wide, is_causal=True)
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad.double())
    _close(out, expected)
    assert out.transpose(1, 2).is_contiguous()
    for leaf, wide_leaf in zip(leaves, wide, strict=True):
        _close(leaf.grad, wide_leaf.grad)


@pytest.mark.parametrize("products", ["native", "float32"])
def test_model_is_causal(products: str) -> None:
    size = GptSize("tiny", num_layers=2, width=32, num_heads=2, context=16, products=products)
    model = ByteGpt(size).to(torch.bfloat16)
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 9] ^= 1
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :9], after[0, :9])
    assert not torch.equal(before[0, 9:], after[0, 9:])
