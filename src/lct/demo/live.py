"""Bytes of tensors over one training step: counted storages on the CPU, the allocator's on CUDA."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..memory import LiveBytes
from ..nn import CompressedWeight


class AllocatedBytes(TorchDispatchMode):
    """``LiveBytes`` for a CUDA device: what its allocator has given out, after every op."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.timeline: list[tuple[int, int]] = []
        self.num_ops = 0
        self._device = device
        self._mark()

    @property
    def live_bytes(self) -> int:
        """Bytes allocated now."""
        return torch.cuda.memory_allocated(self._device)

    @property
    def peak_bytes(self) -> int:
        """The most bytes allocated since the statistics were reset, scratch within ops included."""
        return torch.cuda.max_memory_allocated(self._device)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, CompressedWeight) for kind in types):
            return NotImplemented  # decoded first, with this mode on
        result = func(*args, **(kwargs or {}))
        self.num_ops += 1
        self._mark()
        return result

    def _mark(self) -> None:
        live = self.live_bytes
        if not self.timeline or self.timeline[-1][1] != live:
            self.timeline.append((self.num_ops, live))


@dataclass
class StepMemory:
    """One step, measured. ``timeline``: (place, bytes) at every change.

    Place 0–1 is forward, 1–2 backward, 2–3 the optimizer's step, by share of the phase's ops.
    """

    timeline: list[tuple[float, int]] = field(default_factory=list)
    peak_bytes: int = 0
    saved_bytes: int = 0  # what forward leaves alive: saved activations, and the loss


class StepMeter:
    """Measures a step: ``with meter:`` around it, ``meter.end_phase()`` after each phase.

    The phases are forward, backward and the optimizer's step.
    """

    def __init__(self, device: torch.device, *held: Any) -> None:
        self._device = device
        self._mode: LiveBytes | AllocatedBytes
        if device.type == "cuda":
            self._mode = AllocatedBytes(device)
        else:
            self._mode = LiveBytes(*held)
        self._ends: list[int] = []
        self._start_bytes = self._mode.live_bytes
        self.memory = StepMemory()

    def __enter__(self) -> StepMeter:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._start_bytes = self._mode.live_bytes
        self._mode.__enter__()
        return self

    def end_phase(self) -> None:
        if not self._ends:
            self.memory.saved_bytes = self._mode.live_bytes - self._start_bytes
        self._ends.append(self._mode.num_ops)

    def __exit__(self, *exception: Any) -> None:
        self._mode.__exit__(*exception)
        self.memory.peak_bytes = self._mode.peak_bytes
        starts = [0, *self._ends]
        for op, size in self._mode.timeline:
            phase = sum(op > end for end in self._ends[:-1])
            length = max(1, self._ends[phase] - starts[phase])
            place = phase + min(1.0, (op - starts[phase]) / length)
            self.memory.timeline.append((place, size))
