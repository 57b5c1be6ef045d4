"""``memory_report``, ``stats``: what a model and its optimizer hold now, what was saved last."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import ops, tensor
from .nn.activations import last_saved
from .nn.compressed_weight import CompressedWeight
from .tensor import CompressedTensor
from .text import text_table


def stats() -> dict[str, Any]:
    """What all compressed tensors hold now, spills and arenas included. Synchronises on CUDA.

    Bytes in ``dense_bytes``, ``payload_bytes``, ``spilled_bytes``; numbers of ``tensors``,
    ``groups``, ``constant_groups``, ``spilled_groups``, ``raw_groups`` (spilled as a whole);
    ``arenas`` by device. ``activations``: what the last ``compress_activations`` block saved, by
    line of the model (``SavedActivations.as_dict``); None before the first block.
    ArenaExhaustedError if a replayed graph ran out of reserved arena.
    """
    saved = last_saved()
    return {**tensor.stats(), "activations": saved.as_dict() if saved is not None else None}


@dataclass(frozen=True)
class MemoryRow:
    """One class of tensors. ``stored_bytes`` counts headers and spilled chunks."""

    name: str
    tensors: int
    compressed: int
    dense_bytes: int
    stored_bytes: int
    spilled_groups: int

    @property
    def saved_bytes(self) -> int:
        """Bytes that compression saves; negative where it costs."""
        return self.dense_bytes - self.stored_bytes


@dataclass(frozen=True)
class MemoryReport:
    """One row a class; ``arena_bytes``: what the overflow arenas of the devices hold besides.

    Chunks that hold spilled groups lie in an arena, so they are in ``stored_bytes`` and in
    ``arena_bytes``.
    """

    rows: tuple[MemoryRow, ...]
    arena_bytes: int

    @property
    def total(self) -> MemoryRow:
        """The sum of all rows."""
        return MemoryRow(
            "total",
            *(
                sum(getattr(row, field) for row in self.rows)
                for field in (
                    "tensors",
                    "compressed",
                    "dense_bytes",
                    "stored_bytes",
                    "spilled_groups",
                )
            ),
        )

    def as_dict(self) -> dict[str, Any]:
        """The same for programs: ``rows`` by name, ``total``, ``arena_bytes``."""
        rows = (*self.rows, self.total)
        return {
            **{row.name: {**vars(row), "saved_bytes": row.saved_bytes} for row in rows},
            "arena_bytes": self.arena_bytes,
        }

    def __str__(self) -> str:
        head = ("", "tensors", "compressed", "dense MB", "stored MB", "saved MB", "spilled groups")
        lines = []
        for row in (*self.rows, self.total):
            sizes = (row.dense_bytes, row.stored_bytes, row.saved_bytes)
            megabytes = (f"{size / 1e6:,.1f}" for size in sizes)
            counts = (f"{row.tensors:,}", f"{row.compressed:,}")
            lines.append((row.name, *counts, *megabytes, f"{row.spilled_groups:,}"))
        text = text_table(head, lines)
        if self.arena_bytes:
            text += f"\noverflow arenas: {self.arena_bytes / 1e6:,.1f} MB"
        return text


def memory_report(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> MemoryReport:
    """What ``model`` and ``optimizer`` hold now: weights, gradients, buffers, state by its name.

    Tied parameters count once. ``print`` gives a table, ``as_dict()`` the numbers. Activations are
    not in it: ``compress_activations`` counts them. Synchronises on CUDA, where only the device
    knows what spilled. TypeError for anything but a module and an optimizer.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"memory_report takes a torch.nn.Module, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"memory_report takes a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    parameters = list(model.parameters())
    classes: dict[str, list[Any]] = {
        "weights": parameters,
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "buffers": list(model.buffers()),
    }
    for state in optimizer.state.values() if optimizer is not None else ():
        for name, value in state.items():
            if isinstance(value, (torch.Tensor, CompressedTensor)):
                classes.setdefault(name, []).append(value)
    rows = tuple(_row(name, tensors) for name, tensors in classes.items() if tensors)
    arenas = ops.arena_report().values()
    return MemoryReport(rows, sum(arena["reserved_bytes"] for arena in arenas))


def _row(name: str, tensors: Iterable[Any]) -> MemoryRow:
    count = compressed = dense = stored = spilled = 0
    for item in tensors:
        held = item.compressed if isinstance(item, CompressedWeight) else item
        count += 1
        if isinstance(held, CompressedTensor):
            compressed += 1
            dense += held.dense_nbytes
            stored += held.nbytes
            spilled += held.group_counts().spilled
        else:
            dense += held.nbytes
            stored += held.nbytes
    return MemoryRow(name, count, compressed, dense, stored, spilled)
