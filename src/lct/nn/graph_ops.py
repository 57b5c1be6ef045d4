"""Ops of LCT's that compiled graphs call: how they are made known, and their lists of sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

_library = torch.library.Library("lct", "DEF")


def define(
    schema: str, function: Callable[..., Any], fake: Callable[..., Any], tag: torch.Tag
) -> None:
    """Make an op ``lct::…`` known, on all devices and without gradients; ``tag``: of its layouts.

    ``fake`` gives the sizes of what ``function`` gives.
    """
    name = schema.partition("(")[0]
    # A captured CUDA graph would not look anew for what the op looks for.
    _library.define(schema, tags=(tag, torch.Tag.cudagraph_unsafe))
    _library.impl(name, function, "CompositeExplicitAutograd")
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"lct::{name}", fake, lib=_library)


def split_by_rank(values: Sequence[int], ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """Sizes or strides of several tensors, which stand one after another, each by itself."""
    ends = list(itertools.accumulate(ranks, initial=0))
    return [tuple(values[start:end]) for start, end in itertools.pairwise(ends)]
