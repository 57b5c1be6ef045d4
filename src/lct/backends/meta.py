"""Tensors without values (torch's device ``meta``): payloads have sizes, and no bytes.

For planning. What depends on values is assumed: groups need the words of Gaussian values, and none
spills. A meta tensor says nothing of the device that it stands for; ``stands_for`` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ..layout import PayloadLayout, buffer_offsets

# What the widest of many groups of Gaussian values needs: 705 to 728 words, by where the scale lies
# between two powers of two (`lct analyze` has the bits by phase).
GAUSSIAN_WORDS = 716

_stands_for = "cuda"


def steps_fused() -> bool:
    """Whether optimizers step compressed tensors in place, as they do on CUDA."""
    return _stands_for == "cuda"


@contextlib.contextmanager
def stands_for(device_type: str) -> Iterator[None]:
    """Within the block meta tensors stand for those of ``device_type``; elsewhere for CUDA's."""
    global _stands_for
    before, _stands_for = _stands_for, device_type
    try:
        yield
    finally:
        _stands_for = before


def encode(layout: PayloadLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """(payload, spill): the sizes that they have where nothing spills."""
    payload = torch.empty(layout.size_bytes, dtype=torch.uint8, device="meta")
    return payload, payload[:0]


def encode_buffer(
    layouts: Sequence[PayloadLayout],
) -> tuple[torch.Tensor, list[int], torch.Tensor] | None:
    """(buffer, offsets, spill) of payloads that share one, as they do on CUDA; else None."""
    offsets = buffer_offsets(layouts) if steps_fused() else None
    if offsets is None:
        return None
    buffer = torch.empty(offsets.pop(), dtype=torch.uint8, device="meta")
    return buffer, offsets, buffer[:0]


def group_needs(layout: PayloadLayout) -> np.ndarray:
    """Words that each group of Gaussian values needs, int32 (num_groups,)."""
    needs = np.full(layout.num_groups, GAUSSIAN_WORDS, np.int32)
    # The last group has fewer values.
    share = layout.tail_steps / layout.preset.steps
    needs[layout.full_groups :] = np.ceil(GAUSSIAN_WORDS * share)
    return needs
