"""``F.linear`` with a compressed weight: decode, multiply, forget; decode again in backward.

The autograd graph holds the compressed weight. Formulas are those of torch's own graph for the same
call, so that the same kernels run on operands with the same strides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from .compressed_weight import CompressedWeight


class _Linear(torch.autograd.Function):
    """``x``: (..., in), 2-D or more; ``weight``: (out, in); both contiguous. ``bias``: (out,)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: CompressedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.x_shape = x.shape
        out = F.linear(x, weight.operand(), bias)
        if bias is not None and x.dim() > 2:
            # F.linear returns a view here, and autograd forbids changing a view that a Function
            # made in place (as `relu(…, inplace=True)` does): hand out a tensor that is none.
            out = torch.ops.aten._unsafe_view.default(out, out.shape)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad = grads[0]
        rows = grad if grad.dim() == 2 else grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = None
        if needs_x:
            # With create_graph the product must be differentiable in the weight itself.
            operand = weight if torch.is_grad_enabled() else weight.operand()
            grad_x = rows.mm(operand)
            if len(ctx.x_shape) > 2:
                grad_x = grad_x.view(ctx.x_shape)
            del operand  # before the weight's gradient is allocated
        if needs_weight:
            grad_weight = rows.t().mm(x.view(-1, x.shape[-1]))
        # Autograd sums the bias's gradient to its shape, with the call that it makes for addmm.
        return grad_x, grad_weight, rows if needs_bias else None


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """``F.linear(x, weight, bias)``, or NotImplemented where torch's own graph must do it.

    That is so where the formulas above would not be torch's (1-D or non-contiguous operands), and
    under autocast and functorch, which act above this function. ``weight`` may be no compressed
    one.
    """
    if (
        type(x) not in _PLAIN
        or type(weight) in _PLAIN
        or (bias is not None and type(bias) not in _PLAIN)
        or x.dim() < 2
        or weight.dim() != 2
        or x.dtype != weight.dtype
        or not x.is_contiguous()
        or not weight.is_contiguous()
        # A single row may have any stride, and torch chooses the product's form by the stride.
        or (x.dim() == 2 and x.stride(0) != x.shape[1])
        or torch._C._is_any_autocast_enabled()
        or torch._C._functorch.maybe_current_level() is not None
    ):
        return NotImplemented
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return _Linear.apply(x, weight, bias)
    return F.linear(x, weight.operand(), bias)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
