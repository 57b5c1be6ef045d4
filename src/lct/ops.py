"""The one place that picks a backend: the same few operations for every device.

``Stored`` is what a backend keeps for a tensor: the payload, and what spilled. Tensors are dense,
contiguous and on the payload's device; callers have checked them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from .backends import cpu, meta
from .codebook import BANK_ROWS
from .layout import (
    CHUNK_BYTES,
    HEADER_BYTES,
    STATE_CONSTANT,
    STATE_SHIFT,
    STATE_SPILLED,
    STATE_WIDE,
    WORD_BYTES,
    PayloadLayout,
    parse_header,
    validate_payload,
)

SUPPORTED_DEVICES = ("cpu", "cuda", "meta")
MOST_TOGETHER = 16  # tensors that one launch encodes or decodes at most


@dataclass
class Stored:
    """What a backend keeps for a tensor.

    ``payload``: uint8 (layout.size_bytes,). ``spill``: canonical uint8 on the CPU; a lease on the
    device's arena on CUDA (it gives the chunks back when it is dropped). ``step_args``: what the
    CUDA backend keeps of the last fused step that took this parameter. Tensors on ``meta`` have
    sizes alone.
    """

    payload: torch.Tensor
    spill: Any
    step_args: Any = None


@dataclass(frozen=True)
class GroupCounts:
    """How the groups of a payload are stored."""

    groups: int
    constant: int
    spilled: int
    raw: int
    spill_bytes: int


@cache
def _cuda() -> Any:
    from .backends import cuda

    return cuda


def patterns(tensor: torch.Tensor) -> np.ndarray:
    """Bit patterns of a contiguous CPU tensor as a flat uint16 or uint32 array, without a copy."""
    integer = torch.int32 if tensor.element_size() == 4 else torch.int16
    flat = tensor.detach().reshape(-1).view(integer).numpy()
    return flat.view(np.uint32 if tensor.element_size() == 4 else np.uint16)


def encode(
    dense: torch.Tensor,
    layout: PayloadLayout,
    candidates: tuple[int, ...],
    into: Stored | None = None,
) -> Stored:
    """Encode ``dense`` (flat or not; ``layout.num_values`` values), into ``into`` where given."""
    if dense.is_cuda:
        return Stored(*_cuda().encode(dense, layout, candidates, into))
    if dense.is_meta:
        return into if into is not None else Stored(*meta.encode(layout))
    values = patterns(dense)
    book, shift = (0, 0) if layout.is_raw else cpu.select(values, layout, candidates)
    if into is not None:
        payload = into.payload
    else:
        payload = torch.empty(layout.size_bytes, dtype=torch.uint8, device="cpu")
    _, spill = cpu.encode(values, layout, book, shift, payload.numpy())
    spilled = torch.from_numpy(spill)
    # Torch's own memory, so that what spilled is seen where torch's allocations are counted.
    return Stored(payload, spilled.clone() if spill.size else spilled)


def encode_all(
    denses: Sequence[torch.Tensor], layouts: Sequence[PayloadLayout], candidates: tuple[int, ...]
) -> list[Stored]:
    """``encode`` of many, on one device, into new payloads: in few launches on CUDA."""
    if denses and denses[0].is_cuda:
        return [Stored(*made) for made in _cuda().encode_list(denses, layouts, candidates)]
    pairs = zip(denses, layouts, strict=True)
    return [encode(dense, layout, candidates) for dense, layout in pairs]


def launch_counts(layouts: Sequence[PayloadLayout], device: torch.device) -> list[int]:
    """How many of ``layouts``, of one dtype and in their order, each launch encodes."""
    if device.type == "cuda":
        counts: list[int] = _cuda().launch_counts(layouts, device.index)
        return counts
    whole, rest = divmod(len(layouts), MOST_TOGETHER)
    return [MOST_TOGETHER] * whole + [rest] * (rest > 0)


def encode_buffer(
    denses: Sequence[torch.Tensor], layouts: Sequence[PayloadLayout], candidates: tuple[int, ...]
) -> tuple[Stored, list[int]] | None:
    """``encode`` of many, on one device, into payloads of one buffer, and where they begin.

    None where that is not one launch on CUDA.
    """
    if denses[0].is_cuda:
        made: Any = _cuda().encode_buffer(denses, layouts, candidates)
    else:
        made = meta.encode_buffer(layouts) if denses[0].is_meta else None
    if made is None:
        return None
    buffer, offsets, spill = made
    return Stored(buffer, spill), offsets


def decode_buffer(
    stored: Stored,
    offsets: Sequence[int],
    layouts: Sequence[PayloadLayout],
    outs: Sequence[torch.Tensor],
) -> None:
    """Decode all of ``encode_buffer`` into new tensors, in one launch."""
    if not stored.payload.is_meta:
        _cuda().decode_buffer(stored.payload, offsets, layouts, outs)


def decode(stored: Stored, layout: PayloadLayout, out: torch.Tensor) -> torch.Tensor:
    """Decode into ``out`` (contiguous, ``layout.num_values`` values); returns it."""
    if out.is_cuda:
        return _cuda().decode(stored.payload, layout, out)
    if out.is_meta:
        return out
    cpu.decode(stored.payload.numpy(), stored.spill.numpy(), patterns(out))
    return out


def is_written_by_graphs(stored: Stored) -> bool:
    """Whether a CUDA graph was captured that writes to the payload."""
    return stored.payload.is_cuda and stored.spill.captured


def launches_kernels(device: torch.device) -> bool:
    """Whether work on ``device`` is launched: on CUDA, and on ``meta`` where it stands for CUDA."""
    return device.type == "cuda" or (device.type == "meta" and meta.steps_fused())


def ensure_room(parts: Sequence[tuple[Stored, PayloadLayout]]) -> None:
    """ArenaExhaustedError where encodes into all of ``parts``, on one device, might find no room.

    On the CPU there is always some.
    """
    if parts and parts[0][0].payload.is_cuda:
        _cuda().ensure_room(parts)


def decode_all(
    stored: Sequence[Stored], layouts: Sequence[PayloadLayout], outs: Sequence[torch.Tensor]
) -> None:
    """``decode`` of many, on any devices: in few launches where they are on CUDA."""
    on_cuda: dict[int, list[tuple[Stored, PayloadLayout, torch.Tensor]]] = {}
    for kept, layout, out in zip(stored, layouts, outs, strict=True):
        if out.is_cuda:
            on_cuda.setdefault(out.get_device(), []).append((kept, layout, out))
        else:
            decode(kept, layout, out)
    for decodes in on_cuda.values():
        parts = [(kept.payload, layout) for kept, layout, _ in decodes]
        _cuda().decode_list(parts, [out for _, _, out in decodes])


def can_step_fused(stored: Stored, layout: PayloadLayout) -> bool:
    """Whether fused steps take this tensor: a pooled BF16 payload on CUDA."""
    return (
        (stored.payload.is_cuda or (stored.payload.is_meta and meta.steps_fused()))
        and layout.preset.pooled
        and layout.dtype.name == "bfloat16"
    )


# A payload and its layout; the tensors of one update of an optimizer, the parameter first.
Part = tuple[Stored, PayloadLayout]


def fused_launches(updates: Sequence[Sequence[Part]]) -> Iterator[Sequence[int]]:
    """Numbers of those of ``updates`` that one launch of a fused step takes, launch by launch.

    Where one finds no room, the updates of those before it are made, and no other.
    """
    if len(updates) > 1 and updates[0][0][0].payload.is_cuda:
        limit_chunks = updates[0][0][0].spill.arena.limit_chunks
        yield from _cuda().step_batches(updates, limit_chunks)
    else:
        yield range(len(updates))


def fused_sgd(
    updates: Sequence[Sequence[Part]], grads: Sequence[torch.Tensor], **update: Any
) -> None:
    """Fused steps of SGD with momentum in place; arguments as ``backends.cuda.steps.sgd``."""
    if not _has_no_values(updates):
        _cuda().sgd(updates, grads, **update)


def fused_adam(
    updates: Sequence[Sequence[Part]], grads: Sequence[torch.Tensor], **update: Any
) -> None:
    """Fused steps of Adam or AdamW in place; arguments as ``backends.cuda.steps.adam``."""
    if not _has_no_values(updates):
        _cuda().adam(updates, grads, **update)


def fused_muon(buffer: Part, grad: torch.Tensor, *, momentum: float) -> torch.Tensor:
    """Muon's momentum in place, and its update; arguments as ``backends.cuda.steps.muon``."""
    if buffer[0].payload.is_meta:
        return torch.empty_like(grad)
    return _cuda().muon(buffer, grad, momentum=momentum)


def _has_no_values(updates: Sequence[Sequence[Part]]) -> bool:
    return bool(updates) and updates[0][0][0].payload.is_meta


def group_needs(
    dense: torch.Tensor, layout: PayloadLayout, candidates: tuple[int, ...]
) -> np.ndarray:
    """Words each pooled group of ``dense`` needs, int32 (num_groups,). Synchronises on CUDA."""
    if dense.is_cuda:
        return _cuda().group_needs(dense, layout, candidates)
    if dense.is_meta:
        return meta.group_needs(layout)
    values = patterns(dense)
    book, _ = cpu.select(values, layout, candidates)
    return cpu.group_needs(values, layout, book)


def group_needs_later(
    dense: torch.Tensor, layout: PayloadLayout, candidates: tuple[int, ...]
) -> Callable[[], np.ndarray | None]:
    """``group_needs`` without waiting: a call that gives None until the device is done."""
    if dense.is_cuda:
        return _cuda().group_needs_later(dense, layout, candidates)
    needs = group_needs(dense, layout, candidates)
    return lambda: needs


def to_canonical(stored: Stored, layout: PayloadLayout) -> tuple[np.ndarray, np.ndarray]:
    """(payload, spill) as canonical bytes on the host, uint8. Synchronises on CUDA."""
    if stored.payload.is_cuda:
        return _cuda().to_canonical(stored.payload, layout)
    return stored.payload.numpy(), stored.spill.numpy()


def from_canonical(
    payload: np.ndarray, spill: np.ndarray, layout: PayloadLayout, device: torch.device
) -> Stored:
    """The opposite of ``to_canonical``; CorruptPayloadError where decoding is not safe."""
    validate_payload(layout, payload, spill.size)
    stored = Stored(torch.from_numpy(payload.copy()), torch.from_numpy(spill.copy()))
    if device.type == "cpu":
        return stored
    return to_device(stored, layout, device)


def to_device(stored: Stored, layout: PayloadLayout, device: torch.device) -> Stored:
    """A copy on ``device``. Chunks belong to a device: what spilled on CUDA is encoded anew."""
    if device.type == "meta":
        return Stored(*meta.encode(layout))
    counts = count_groups(stored, layout)
    if counts.spilled == 0:
        payload = stored.payload.to(device, copy=True)
        spill = (
            torch.empty(0, dtype=torch.uint8) if device.type == "cpu" else _cuda().lease(payload)
        )
        return Stored(payload, spill)
    if device.type == "cpu":
        payload_array, spill_array = to_canonical(stored, layout)
        return Stored(torch.from_numpy(payload_array.copy()), torch.from_numpy(spill_array.copy()))
    _, book, shift = parse_header(bytes(stored.payload[:HEADER_BYTES].cpu().numpy()))
    integer = torch.int32 if layout.dtype.itemsize == 4 else torch.int16
    bits = torch.empty(layout.num_values, dtype=integer, device=stored.payload.device)
    dense = decode(stored, layout, bits).to(device)
    return Stored(*_cuda().encode(dense, layout, (book,), None, shift=shift))


def count_groups(stored: Stored, layout: PayloadLayout) -> GroupCounts:
    """How the groups are stored. Synchronises on CUDA."""
    count = layout.num_groups
    if stored.payload.is_meta:
        return GroupCounts(count, constant=0, spilled=0, raw=0, spill_bytes=0)
    meta = stored.payload[layout.meta_offset :][: WORD_BYTES * count].cpu().numpy().view(np.uint32)
    state = meta >> STATE_SHIFT
    spilled = state & STATE_SPILLED != 0
    wide = state == STATE_WIDE
    chunks = int(spilled.sum()) + 3 * int(wide.sum())
    spill_bytes = chunks * CHUNK_BYTES if stored.payload.is_cuda else stored.spill.nbytes
    return GroupCounts(
        groups=count,
        constant=int((state == STATE_CONSTANT).sum()),
        spilled=int(spilled.sum() + wide.sum()),
        raw=int((state == STATE_SPILLED).sum() + wide.sum()) if layout.preset.pooled else 0,
        spill_bytes=spill_bytes,
    )


def book_name(stored: Stored) -> str:
    """Name of the book that a payload uses. Synchronises on CUDA."""
    _, book, _ = parse_header(bytes(stored.payload[:HEADER_BYTES].cpu().numpy()))
    return BANK_ROWS[book].name


def arena_report() -> dict[str, dict[str, int]]:
    """By device: reserved bytes there, pinned ones of the host, used chunks and their bytes, chunks
    ever taken. Synchronises.
    """
    report = {}
    for device in arena_devices():
        arena = _cuda().arena.of(device.index)
        arena.check()
        arena.collect()
        counters = arena.counters()
        used = counters.used_chunks
        report[str(device)] = {
            "reserved_bytes": arena.reserved_bytes,
            "host_bytes": arena.host_bytes,
            "used_chunks": used,
            "used_bytes": used * CHUNK_BYTES,
            "chunks_ever_taken": counters.taken_total,
        }
    return report


def arena_used_chunks(device: torch.device) -> int:
    """Chunks of the arena of ``device`` in use, as the host last heard. Asks nothing."""
    return _cuda().arena.of(device.index).known_used_chunks()


def arena_taken_chunks(device: torch.device) -> int:
    """Chunks ever taken of the arena of ``device``, modulo 2³², as the host last heard. Asks
    nothing.
    """
    return _cuda().arena.of(device.index).known_taken_chunks()


def arena_devices() -> list[torch.device]:
    """CUDA devices that have an arena: those on which something was compressed."""
    if "lct.backends.cuda" not in sys.modules:
        return []
    return [torch.device("cuda", device) for device in _cuda().arena.existing()]


def trim_arenas() -> None:
    """Let the arenas of all devices give back memory that is not needed. Does not wait for them."""
    for device in arena_devices():
        _cuda().arena.of(device.index).trim()


def settle_arena(device: torch.device) -> int:
    """Chunks of the arena of ``device`` in use once those of dropped payloads are given back.

    Synchronises.
    """
    return _cuda().arena.of(device.index).settle()


def reserve_arena(size_bytes: int, device: torch.device) -> None:
    """Grow the arena of a CUDA device to at least ``size_bytes`` of chunks."""
    _cuda().arena.of(device.index).reserve(size_bytes)
