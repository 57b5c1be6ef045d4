"""BF16 linear layer and attention whose products run in FP32: for CPUs without BF16 instructions.

There torch multiplies BF16 matrices one value at a time (1.2 against 100 GFLOP/s in the gradient of
a linear layer's input, AVX2, 2 cores). Operands, results and what autograd saves are BF16; the FP32
copies cover one slice of the batch at a time, so that they do not set the peak of memory.
"""

from __future__ import annotations

import math
from typing import Any

import torch

# Rows that are upcast at a time: 2 MB of FP32 for 1,024 columns. The products lose nothing by it.
SLICE_ROWS = 512


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``F.linear(x, weight)``. x: (…, in), weight: (out, in); gives (…, out)."""
    return _Linear.apply(x, weight)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal ``F.scaled_dot_product_attention``. q, k, v and result: (batch, heads, length, size).

    In memory the result is (batch, length, heads, size), as torch's own kernels lay it out.
    """
    return _Attention.apply(q, k, v)


def _upcast(tensor: torch.Tensor) -> torch.Tensor:
    # `copy_` rather than `float()`: a cast in a custom function, where gradients are off, looks
    # like the cast of a model, and that of a compressed weight would be compressed again.
    return torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device).copy_(tensor)


def _slices(*tensors: torch.Tensor) -> Any:
    rows = [tensor.reshape(-1, tensor.shape[-1]).split(SLICE_ROWS) for tensor in tensors]
    return zip(*rows, strict=True)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        wide = _upcast(weight).t()
        out = x.new_empty((*x.shape[:-1], weight.shape[0]))
        for rows, out_rows in _slices(x, out):
            out_rows.copy_(rows.float() @ wide)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        wide = _upcast(weight)
        grad_x = x.new_empty(x.shape)
        grad_weight = torch.zeros_like(wide)
        for grad_rows, x_rows, grad_x_rows in _slices(grads[0], x, grad_x):
            wide_rows = grad_rows.float()
            grad_x_rows.copy_(wide_rows @ wide)
            grad_weight.addmm_(wide_rows.t(), x_rows.float())
        return grad_x, grad_weight.to(weight.dtype)


def _future(q: torch.Tensor) -> torch.Tensor:
    """Mask of what a position must not see, boolean (length, length)."""
    length = q.shape[-2]
    return torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1)


def _probabilities(q: torch.Tensor, k: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
    """Softmax of the masked scores. q, k: FP32 (heads, length, size)."""
    scores = (q @ k.transpose(-1, -2)).mul_(q.shape[-1] ** -0.5)
    return scores.masked_fill_(future, -math.inf).softmax(-1)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        batch, heads, length, size = q.shape
        out = q.new_empty(batch, length, heads, size).transpose(1, 2)
        future = _future(q)
        for i in range(batch):
            out[i].copy_(_probabilities(q[i].float(), k[i].float(), future) @ v[i].float())
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        q, k, v = ctx.saved_tensors
        grad_q, grad_k, grad_v = (tensor.new_empty(tensor.shape) for tensor in (q, k, v))
        scale, future = q.shape[-1] ** -0.5, _future(q)
        for i in range(q.shape[0]):
            q_i, k_i, grad_i = q[i].float(), k[i].float(), grads[0][i].float()
            p = _probabilities(q_i, k_i, future)
            grad_v[i].copy_(p.transpose(-1, -2) @ grad_i)
            grad_p = grad_i @ v[i].float().transpose(-1, -2)
            # Gradient of softmax: p ∘ (grad_p − Σ grad_p ∘ p).
            grad_scores = grad_p.sub_((grad_p * p).sum(-1, keepdim=True)).mul_(p).mul_(scale)
            grad_q[i].copy_(grad_scores @ k_i)
            grad_k[i].copy_(grad_scores.transpose(-1, -2) @ q_i)
        return grad_q, grad_k, grad_v
