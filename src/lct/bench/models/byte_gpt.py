"""A byte-level GPT in pure BF16: pre-norm blocks of causal attention and a GELU MLP, no dropout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from . import float32_products

VOCABULARY = 256  # one token a byte
# Standard deviations of the weights at the start. Tokens stand out from positions, so that SGD,
# which has one rate for all, learns what follows what before it learns where.
TOKEN_STD = 1.0
POSITION_STD = 0.1
MATRIX_STD = 0.02


@dataclass(frozen=True)
class Products:
    """How the model multiplies: ``linear(x, weight)`` and causal ``attention(q, k, v)``."""

    linear: Callable[..., torch.Tensor]
    attention: Callable[..., torch.Tensor]


def _causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


PRODUCTS = {
    "native": Products(F.linear, _causal_attention),
    "float32": Products(float32_products.linear, float32_products.attention),
}


@dataclass(frozen=True)
class GptSize:
    """Shape of a model. ``context``: the most tokens in a sequence; ``products``: see PRODUCTS."""

    name: str
    num_layers: int
    width: int
    num_heads: int
    context: int
    products: str


SIZES = {
    size.name: size
    for size in (
        GptSize("cpu", num_layers=4, width=256, num_heads=4, context=256, products="float32"),
        GptSize("cuda", num_layers=12, width=1024, num_heads=16, context=1024, products="native"),
    )
}


class Linear(nn.Linear):
    """``nn.Linear`` without a bias, multiplied as ``products`` says."""

    def __init__(self, in_features: int, out_features: int, products: Products) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.products = products

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.products.linear(x, self.weight)


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to its input."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        width = size.width
        self.num_heads = size.num_heads
        self.products = PRODUCTS[size.products]
        self.norm_attention = nn.LayerNorm(width, bias=False)
        self.qkv = Linear(width, 3 * width, self.products)
        self.out = Linear(width, width, self.products)
        self.norm_mlp = nn.LayerNorm(width, bias=False)
        self.up = Linear(width, 4 * width, self.products)
        self.down = Linear(4 * width, width, self.products)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X and result: (batch, length, width)."""
        batch, length, width = x.shape
        heads = (batch, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = self.qkv(self.norm_attention(x)).view(heads).permute(2, 0, 3, 1, 4)
        mixed = self.products.attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class ByteGpt(nn.Module):
    """Logits of the next byte. tokens: int64 (batch, length ≤ context); gives (…, length, 256)."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.size = size
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.num_layers))
        self.norm = nn.LayerNorm(size.width, bias=False)
        self.head = Linear(size.width, VOCABULARY, PRODUCTS[size.products])
        self._initialize()

    def _initialize(self) -> None:
        """Normal; what a block adds to its input shrinks with the depth, as in GPT-2."""
        added_std = MATRIX_STD / math.sqrt(2 * self.size.num_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                added = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=added_std if added else MATRIX_STD)
        nn.init.normal_(self.tokens.weight, std=TOKEN_STD)
        nn.init.normal_(self.positions.weight, std=POSITION_STD)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy, nats a byte, FP32. tokens: int64 (batch, length + 1)."""
        logits: Any = self(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
