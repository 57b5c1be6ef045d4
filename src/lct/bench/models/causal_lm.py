"""What the training benchmark asks of a language model, and how its weights are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

STD = 0.02  # of every matrix at the start

OnPart = Callable[[nn.Module], object]


class CausalLm(nn.Module):
    """A decoder. ``forward(tokens)``, int64 (batch, length + 1), gives the mean loss, FP32.

    ``chunk_tokens``: the loss is computed over chunks of so many tokens, each of them again in
    backward, so that logits of one chunk exist at a time; None: all at once.
    """

    layers: nn.ModuleList
    head: nn.Linear
    vocabulary: int

    def __init__(self) -> None:
        super().__init__()
        self.chunk_tokens: int | None = None

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the head reads, (batch, length, width). tokens: int64 (batch, length)."""
        raise NotImplementedError

    def plain_loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss with all logits at once."""
        logits = self.head(self.hidden(tokens[:, :-1]))
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def parts(self) -> Iterator[nn.Module]:
        """Modules that hold all parameters between them; tied ones count where they are first."""
        raise NotImplementedError

    def finish(self, device: torch.device) -> None:
        """What remains to be done when the weights of all parts exist: ties, buffers."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.chunk_tokens is None:
            return self.plain_loss(tokens)
        hidden = self.hidden(tokens[:, :-1]).flatten(0, 1)
        return chunked_loss(hidden, self.head, tokens[:, 1:].flatten(), self.chunk_tokens)

    def checkpoint_layers_(self) -> None:
        """Have every layer save its input only, and compute the rest again in backward."""
        for index, layer in enumerate(self.layers):
            self.layers[index] = Checkpointed(layer)


# Nothing here is random, and the generator's state cannot be asked for while a graph is captured.
_CHECKPOINT: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}


class Checkpointed(nn.Module):
    """A layer under ``torch.utils.checkpoint`` (not reentrant); ``layer`` may be compiled."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.layer, *args, **_CHECKPOINT, **kwargs)


def _loss_sum(hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(hidden).float(), targets, reduction="sum")


def chunked_loss(
    hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor, chunk_tokens: int
) -> torch.Tensor:
    """Mean cross entropy. hidden: (tokens, width), targets: int64 (tokens,)."""
    total = torch.zeros((), device=hidden.device)
    for rows, wanted in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True):
        total = total + checkpoint(_loss_sum, rows, head, wanted, **_CHECKPOINT)
    return total / targets.numel()


def materialize(
    model: CausalLm, device: torch.device, seed: int, on_part: OnPart | None = None
) -> None:
    """Make the weights of ``model``, which lies on the meta device, part by part.

    ``on_part`` sees each part when its weights exist and may compress them: the whole model never
    exists dense. The same seed gives the same weights on the same device.
    """
    for index, part in enumerate(model.parts()):
        torch.manual_seed(seed + index)
        part.to_empty(device=device)
        with torch.no_grad():
            for name, parameter in part.named_parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(std=STD)
                else:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        if on_part is not None:
            on_part(part)
    model.finish(device)


def count_parameters(model: nn.Module) -> int:
    """Values in all parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
