"""Tiny models of well-known kinds, and what they train on."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lct.bench.models.byte_gpt import ByteGpt, GptSize
from training import BF16, Batch

LENGTH = 32
CLASSES = 8
# What every causal model of transformers is made from here: grouped queries, one token a byte.
CAUSAL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def byte_gpt() -> nn.Module:
    return ByteGpt(GptSize("tiny", 1, width=32, num_heads=4, context=LENGTH, products="native"))


def qwen3(**changes: Any) -> nn.Module:
    """Its output layer is its embedding."""
    hf = pytest.importorskip("transformers")
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**{**CAUSAL, "tie_word_embeddings": True, **changes}))


def llama() -> nn.Module:
    hf = pytest.importorskip("transformers")
    return hf.LlamaForCausalLM(hf.LlamaConfig(**CAUSAL, tie_word_embeddings=False))


def vit() -> nn.Module:
    """With dropout; its patches go through a convolution."""
    hf = pytest.importorskip("transformers")
    config = hf.ViTConfig(
        image_size=16,
        patch_size=4,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        hidden_dropout_prob=0.1,
        num_labels=CLASSES,
    )
    return hf.ViTForImageClassification(config)


class Cnn(nn.Module):
    """Convolutions with batch norm, whose running statistics are buffers, and a residual.

    No pooling: its backward is not deterministic on CUDA.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, stride=2, padding=1, bias=False)
        self.block = nn.Sequential(
            nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.Conv2d(32, 32, 3, padding=1, bias=False)
        )
        self.norm = nn.BatchNorm2d(32)
        self.down = nn.Conv2d(32, 32, 3, stride=2, padding=1)
        self.head = nn.Linear(32 * 16, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        x = F.relu(self.norm(x + self.block(x)))
        return self.head(self.down(x).flatten(1))


def text_batches(count: int) -> list[Batch]:
    """Pieces of a source file of the standard library, one token a byte."""
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - LENGTH, (count, 2, 1), generator=generator)
    return [(text[rows + torch.arange(LENGTH)].long(),) for rows in starts]


def image_batches(count: int) -> list[Batch]:
    """Noise on one pattern a class; the class."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(CLASSES, 3, 16, 16, generator=generator)
    batches = []
    for _ in range(count):
        labels = torch.randint(CLASSES, (4,), generator=generator)
        noise = torch.randn(4, 3, 16, 16, generator=generator)
        batches.append(((patterns[labels] + noise).to(BF16), labels))
    return batches


def _logits(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.logits


def text_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = _logits(model(batch[0][:, :-1]))
    return F.cross_entropy(logits.float().flatten(0, 1), batch[0][:, 1:].flatten())


def image_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(_logits(model(batch[0])).float(), batch[1])


@dataclass(frozen=True)
class Kind:
    """``blocks``: the module, or list of modules, that activation checkpointing goes around."""

    build: Callable[[], nn.Module]
    batches: Callable[[int], list[Batch]]
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    blocks: str


KINDS = {
    "byte_gpt": Kind(byte_gpt, text_batches, text_loss, "blocks"),
    "qwen3": Kind(qwen3, text_batches, text_loss, ""),
    "llama": Kind(llama, text_batches, text_loss, ""),
    "vit": Kind(vit, image_batches, image_loss, ""),
    "cnn": Kind(Cnn, image_batches, image_loss, "block"),
}


def checkpoint_blocks(kind: Kind, model: nn.Module, use_reentrant: bool) -> None:
    """Activation checkpointing around every block of ``model``."""
    if not kind.blocks:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        return
    blocks = model.get_submodule(kind.blocks)
    for block in blocks if isinstance(blocks, nn.ModuleList) else [blocks]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=use_reentrant)
