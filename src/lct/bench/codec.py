"""Encode and decode against a copy of the same dense tensor: the rows of ``lct bench codec``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import decode, encode
from ..checkpoint.sources import find_files, read_tensors
from ..errors import LctError
from ..presets import DEFAULT_PRESET, PRESETS
from ..tensor import CompressedTensor
from .timing import REPETITIONS, measure, rotations_for

BASE_SCALE = 0.02
NUM_PHASES = 8
SEED = 20261130
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
POISON = 0xA5  # in buffers before a decode: a value that was not written shows


@dataclass(frozen=True)
class Defaults:
    """Sizes of the Gaussians: at phase 0, and at all phases of the scale."""

    sizes: tuple[int, ...]
    phase_size: int


DEFAULTS = {
    "cpu": Defaults(sizes=(2**20, 2**22), phase_size=2**20),
    "cuda": Defaults(sizes=(2**24, 2**28), phase_size=2**22),
}


@dataclass(frozen=True)
class Input:
    """A tensor to measure. ``name``: ``gaussian`` or a file's stem; ``more``: keys of its rows."""

    name: str
    dense: torch.Tensor
    more: dict[str, Any]


def gaussian(num_values: int, phase: int, dtype: torch.dtype, device: torch.device) -> Input:
    """A seeded Gaussian with σ = 0.02 · 2^(phase/8)."""
    generator = torch.Generator(device).manual_seed(SEED)
    scale = BASE_SCALE * 2.0 ** (phase / NUM_PHASES)
    # In pieces: the FP32 values of 2^28 BF16 values would take twice their memory at once.
    dense = torch.empty(num_values, dtype=dtype, device=device)
    for piece in dense.split(2**26):
        piece.copy_(torch.randn(piece.numel(), generator=generator, device=device) * scale)
    return Input("gaussian", dense, {"phase": phase, "scale": scale})


def file_inputs(directory: str | Path, device: torch.device) -> Iterator[Input]:
    """Every tensor that LCT codes of the files in ``directory``; empty ones are left out."""
    for path in find_files(directory):
        for source in read_tensors(path):
            if source.load is not None and source.dense_bytes:
                more = {} if path.suffix == ".npy" else {"tensor": source.name}
                yield Input(path.stem, source.load().to(device), more)


def all_inputs(
    device: torch.device,
    *,
    sizes: Sequence[int] | None = None,
    dtype: str = "bfloat16",
    tensors: str | Path | None = None,
) -> Iterator[Input]:
    """What ``lct bench codec`` measures, one at a time: Gaussians by size, by phase, then files."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    defaults = DEFAULTS[device.type]
    chosen = defaults.sizes if sizes is None else tuple(sizes)
    for size in chosen:
        if size < 1:
            raise ValueError(f"sizes must be at least 1 value, got {size}")
    phase_size = min(defaults.phase_size, *chosen)
    for size in chosen:
        if size != phase_size:
            yield gaussian(size, 0, DTYPES[dtype], device)
    for phase in range(NUM_PHASES):
        yield gaussian(phase_size, phase, DTYPES[dtype], device)
    if tensors is not None:
        yield from file_inputs(tensors, device)


def encoder(layout: str) -> Callable[[torch.Tensor], CompressedTensor]:
    """The call that users make: ``lct.encode(t)`` where ``layout`` is what it does by default."""
    if layout == DEFAULT_PRESET:
        return encode
    return lambda tensor: encode(tensor, preset=layout)


def check_bits(dense: torch.Tensor, decoded: torch.Tensor) -> None:
    """LctError, which names the first difference, unless both tensors have the same bits."""
    integer = torch.int32 if dense.element_size() == 4 else torch.int16
    expected, got = dense.reshape(-1).view(integer), decoded.reshape(-1).view(integer)
    if torch.equal(expected, got):
        return
    differ = (expected != got).nonzero().reshape(-1)
    first = int(differ[0])
    mask = (1 << 8 * dense.element_size()) - 1
    wanted, found = int(expected[first]) & mask, int(got[first]) & mask
    raise LctError(
        f"no figures for wrong bits: {len(differ)} of {len(expected)} values differ, "
        f"the first at {first}: expected {wanted:#x}, got {found:#x}"
    )


def _poisoned(like: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(like)
    out.reshape(-1).view(torch.uint8).fill_(POISON)
    return out


def measure_input(given: Input, layout: str, *, repetitions: int = REPETITIONS) -> dict[str, Any]:
    """One row: times of encode and decode over a copy's, ratio with every allocated byte counted.

    The bits are checked before anything is timed and once more after it, on what the timed calls
    wrote; LctError where they differ. ValueError for an unknown layout.
    """
    if layout not in PRESETS:
        raise ValueError(f"layout must be one of {', '.join(PRESETS)}, got {layout!r}")
    dense, device = given.dense.contiguous(), given.dense.device
    encode_one = encoder(layout)
    compressed = encode_one(dense)
    check_bits(dense, compressed.decode(_poisoned(dense)))
    check_bits(dense, decode(compressed))
    nbytes = compressed.nbytes
    counts = compressed.group_counts()

    # A set of buffers: input, output, payload to decode, payload that encode allocates, and what
    # decode allocates.
    set_bytes = 3 * dense.nbytes + 2 * nbytes
    rotations = rotations_for(dense.nbytes, device, set_bytes)
    inputs = [dense, *(dense.clone() for _ in range(rotations - 1))]
    outputs = [_poisoned(dense) for _ in range(rotations)]
    payloads = [compressed, *(encode_one(tensor) for tensor in inputs[1:])]

    measurement = measure(
        {
            "copy": lambda i: outputs[i].copy_(inputs[i]),
            "encode": lambda i: encode_one(inputs[i]),
            "decode": lambda i: payloads[i].decode(outputs[i]),
            "decode_new": lambda i: decode(payloads[i]),
        },
        device,
        rotations=rotations,
        repetitions=repetitions,
        allow_graph=counts.spilled == 0,
    )
    for i, tensor in measurement.results["encode"]:
        check_bits(inputs[i], tensor.decode(_poisoned(dense)))
    for i, tensor in measurement.results["decode_new"]:
        check_bits(inputs[i], tensor)
    times = measurement.timings

    def gb_s(name: str) -> float:
        return dense.nbytes / times[name].median_ms / 1e6

    return {
        "layout": layout,
        "default": layout == DEFAULT_PRESET,
        "input": given.name,
        "dtype": str(dense.dtype).removeprefix("torch."),
        "num_values": dense.numel(),
        "encode_over_copy": measurement.over("encode", "copy"),
        "decode_over_copy": measurement.over("decode", "copy"),
        "encode_gb_s": gb_s("encode"),
        "decode_gb_s": gb_s("decode"),
        "ratio": dense.nbytes / nbytes,
        "bits_equal": True,
        **given.more,
        "decode_new_over_copy": measurement.over("decode_new", "copy"),
        "copy_gb_s": gb_s("copy"),
        **{f"{name}_ms": timing.median_ms for name, timing in times.items()},
        **{f"{name}_iqr_ms": timing.iqr_ms for name, timing in times.items()},
        "repetitions": repetitions,
        "rotations": rotations,
        "timing": measurement.method,
        "timing_note": measurement.note,
        "stored": compressed.preset,
        "allocated_bytes": nbytes,
        "spill_bytes": counts.spill_bytes,
        "groups": counts.groups,
        "spilled_groups": counts.spilled,
    }
