"""Tensors whose values lie in memory without holes, in any order of dimensions."""

from __future__ import annotations

import torch


def memory_order(tensor: torch.Tensor) -> torch.Tensor | None:
    """A flat alias of ``tensor`` in the order of its memory; None where that has holes or overlaps.

    ``tensor`` equals ``memory_order(tensor).as_strided(tensor.shape, tensor.stride())``.
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return None
        expected *= size
    return tensor.detach().as_strided((tensor.numel(),), (1,))
