"""Models of Hugging Face transformers by the shapes of their public configurations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .causal_lm import CausalLm


@dataclass(frozen=True)
class Shape:
    """Sizes as ``config.json`` of a published model gives them. ``family``: its model type.

    ``num_parameters``: what the publisher's weights count, tied ones once.
    """

    name: str
    family: str
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    vocabulary: int
    tied: bool
    rope_theta: float
    rms_norm_eps: float
    num_parameters: int


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            *("qwen3-4b", "qwen3", 36, 2560, 32, 8, 128, 9728, 151936),
            tied=True,
            rope_theta=1e6,
            rms_norm_eps=1e-6,
            num_parameters=4_022_468_096,
        ),
        Shape(
            *("llama-2-7b", "llama", 32, 4096, 32, 32, 128, 11008, 32000),
            tied=False,
            rope_theta=1e4,
            rms_norm_eps=1e-5,
            num_parameters=6_738_415_616,
        ),
        Shape(
            *("qwen2.5-7b", "qwen2", 28, 3584, 28, 4, 128, 18944, 152064),
            tied=False,
            rope_theta=1e6,
            rms_norm_eps=1e-6,
            num_parameters=7_615_616_512,
        ),
        Shape(
            *("qwen3-8b", "qwen3", 36, 4096, 32, 8, 128, 12288, 151936),
            tied=False,
            rope_theta=1e6,
            rms_norm_eps=1e-6,
            num_parameters=8_190_735_360,
        ),
        Shape(
            *("llama-3-8b", "llama", 32, 4096, 32, 8, 128, 14336, 128256),
            tied=False,
            rope_theta=5e5,
            rms_norm_eps=1e-5,
            num_parameters=8_030_261_248,
        ),
        # Not published: for trials without a GPU.
        Shape(
            *("qwen3-tiny", "qwen3", 2, 64, 4, 2, 16, 128, 512),
            tied=True,
            rope_theta=1e6,
            rms_norm_eps=1e-6,
            num_parameters=106_880,
        ),
    )
}


def config_of(shape: Shape, num_layers: int) -> Any:
    """The configuration of transformers for ``shape``."""
    from transformers import AutoConfig

    sizes: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.mlp_width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": shape.tied,
        "use_cache": False,
    }
    return AutoConfig.for_model(shape.family, **sizes)


class TransformersLm(CausalLm):
    """``AutoModelForCausalLM.from_config``, BF16, sdpa, without a cache; on the meta device."""

    def __init__(self, shape: Shape, num_layers: int) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__()
        self.vocabulary = shape.vocabulary
        config = config_of(shape, num_layers)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation="sdpa"
            )
        self.model = model.train()

    @property
    def layers(self) -> nn.ModuleList:  # type: ignore[override]
        return self.model.model.layers

    @property
    def head(self) -> nn.Linear:  # type: ignore[override]
        return self.model.lm_head

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        inner = self.model.model
        masks = self._masks()
        return inner(input_ids=tokens, attention_mask=masks, use_cache=False).last_hidden_state

    def plain_loss(self, tokens: torch.Tensor) -> torch.Tensor:
        # As users call it; the model shifts the labels itself.
        inputs, masks = tokens[:, :-1], self._masks()
        return self.model(
            input_ids=inputs, attention_mask=masks, labels=inputs, use_cache=False
        ).loss

    def _masks(self) -> dict[str, None] | None:
        """None for each kind of layer, while a CUDA graph is captured.

        Attention is causal without a mask, but transformers makes one then: other kernels, and
        other graphs of compiled layers, than in steps that are not captured.
        """
        kinds = getattr(self.model.config, "layer_types", None)
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if kinds is None or not capturing:
            return None
        return dict.fromkeys(kinds)

    def parts(self) -> Iterator[nn.Module]:
        inner = self.model.model
        yield inner.embed_tokens
        yield from inner.layers
        yield inner.norm
        if not self.model.config.tie_word_embeddings:
            yield self.model.lm_head

    def finish(self, device: torch.device) -> None:
        inner = self.model.model
        if self.model.config.tie_word_embeddings:
            self.model.lm_head.weight = inner.embed_tokens.weight
        # Its buffer is computed, not stored: on the meta device there was nothing to compute with.
        with device:
            inner.rotary_emb = type(inner.rotary_emb)(config=inner.config)
