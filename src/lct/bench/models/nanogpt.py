"""A GPT in the style of the NanoGPT speed runs: RMSNorm, RoPE, QK-norm, ReLU², no biases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .causal_lm import CausalLm

ROPE_THETA = 10_000.0


@dataclass(frozen=True)
class NanoGptSize:
    """Shape of a model; norms have no weights. ``context``: the most tokens in a sequence."""

    name: str
    num_layers: int
    width: int
    num_heads: int
    context: int
    vocabulary: int
    num_parameters: int


SIZES = {
    size.name: size
    for size in (
        # GPT-2's vocabulary of 50,257, rounded up to a multiple of 128.
        NanoGptSize("nanogpt-162m", 12, 768, 6, 1024, 50304, num_parameters=162_201_600),
        NanoGptSize("nanogpt-tiny", 2, 64, 2, 128, 256, num_parameters=131_072),
    )
}


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to its input."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """X and result: (batch, length, width); cos, sin: (length, head size)."""
        batch, length, width = x.shape
        heads = (batch, length, self.num_heads, width // self.num_heads)
        q, k, v = (t.view(heads).transpose(1, 2) for t in self.qkv(_norm(x)).chunk(3, dim=-1))
        q, k = _rotate(_norm(q), cos, sin), _rotate(_norm(k), cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.relu(self.up(_norm(x))).square())


def _norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class NanoGpt(CausalLm):
    """The model in BF16, on the meta device."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, size: NanoGptSize, num_layers: int) -> None:
        super().__init__()
        self.size = size
        self.vocabulary = size.vocabulary
        with torch.device("meta"):
            self.tokens = nn.Embedding(size.vocabulary, size.width)
            self.layers = nn.ModuleList(
                Block(size.width, size.num_heads) for _ in range(num_layers)
            )
            self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.to(torch.bfloat16)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.tokens(tokens)
        cos, sin = self.cos[:length], self.sin[:length]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return _norm(x)

    def parts(self) -> Iterator[nn.Module]:
        yield self.tokens
        yield from self.layers
        yield self.head

    def finish(self, device: torch.device) -> None:
        size = self.size.width // self.size.num_heads
        rates = ROPE_THETA ** (-torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
        places = torch.arange(self.size.context, device=device, dtype=torch.float32)
        angles = torch.outer(places, rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos().bfloat16(), persistent=False)
        self.register_buffer("sin", angles.sin().bfloat16(), persistent=False)
