"""Encode and decode against a copy of the same dense tensor: the rows of ``lct bench codec``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import decode, encode
from ..checkpoint.sources import find_files, read_tensors
from ..errors import LctError
from ..presets import DEFAULT_PRESET, PRESETS
from ..tensor import CompressedTensor
from .timing import REPETITIONS, Measurement, measure, rotations_for

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
class Layout:
    """A way to encode: arguments of ``lct.encode``. ``files_only``: not measured on Gaussians.

    ``no_graph``: why its encode cannot be replayed.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    files_only: bool = False
    no_graph: str | None = None


# The default comes first: it is ``lct.encode(t)`` without arguments.
LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(DEFAULT_PRESET),
        *(Layout(name, {"preset": name}) for name in PRESETS if name != DEFAULT_PRESET),
        Layout(
            f"{DEFAULT_PRESET}-exact",  # how weights and optimizer state are stored
            {"capacity": "exact"},
            files_only=True,
            no_graph="encode waits for the device once, to measure the room that is needed",
        ),
    )
}

# Tensors by the start of their file's name; sums are given over each class and over these.
CLASSES = ("weight", "minilm", "act", "grad", "momentum", "exp_avg_sq", "exp_avg")
OTHER_CLASS = "other"
SUMMED_CLASSES = {"weight+minilm": ("weight", "minilm"), "all": (*CLASSES, OTHER_CLASS)}


@dataclass(frozen=True)
class Input:
    """A tensor to measure. ``name``: ``gaussian`` or a file's stem; ``more``: keys of its rows."""

    name: str
    dense: torch.Tensor
    more: dict[str, Any]

    @property
    def is_file(self) -> bool:
        return "phase" not in self.more


def normal_values(
    num_values: int, scale: float, dtype: torch.dtype, device: torch.device, seed: int = SEED
) -> torch.Tensor:
    """Seeded normal values of standard deviation ``scale``, flat."""
    generator = torch.Generator(device).manual_seed(seed)
    # In pieces: the FP32 values of 2^28 BF16 values would take twice their memory at once.
    dense = torch.empty(num_values, dtype=dtype, device=device)
    for piece in dense.split(2**26):
        piece.copy_(torch.randn(piece.numel(), generator=generator, device=device) * scale)
    return dense


def gaussian(num_values: int, phase: int, dtype: torch.dtype, device: torch.device) -> Input:
    """A seeded Gaussian with σ = 0.02 · 2^(phase/8)."""
    scale = BASE_SCALE * 2.0 ** (phase / NUM_PHASES)
    dense = normal_values(num_values, scale, dtype, device)
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
    options = LAYOUTS[layout].options
    return lambda tensor: encode(tensor, **options)


def check_bits(dense: torch.Tensor, decoded: torch.Tensor, where: str = "") -> None:
    """LctError, which names the first difference, unless both tensors have the same bits.

    ``where``: what was compared, for the message.
    """
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dense.element_size()]
    expected, got = dense.reshape(-1).view(integer), decoded.reshape(-1).view(integer)
    if torch.equal(expected, got):
        return
    differ = (expected != got).nonzero().reshape(-1)
    first = int(differ[0])
    mask = (1 << 8 * dense.element_size()) - 1
    wanted, found = int(expected[first]) & mask, int(got[first]) & mask
    raise LctError(
        f"no figures for wrong bits{where and f' in {where}'}: {len(differ)} of {len(expected)} "
        f"values differ, the first at {first}: expected {wanted:#x}, got {found:#x}"
    )


def poisoned(like: torch.Tensor) -> torch.Tensor:
    """A buffer like ``like`` whose every byte is one that a decode has to overwrite."""
    out = torch.empty_like(like)
    out.reshape(-1).view(torch.uint8).fill_(POISON)
    return out


def make_row(
    given: Input,
    layout: str,
    measurement: Measurement,
    allocated_bytes: int,
    *,
    notes: Sequence[str | None] = (),
    **more: Any,
) -> dict[str, Any]:
    """A row of checked and timed calls: ``copy``, ``encode``, ``decode`` and any others.

    ``notes``: on how it was timed, beside the measurement's own; ``more``: further keys.
    """
    times = measurement.timings
    dense_bytes = given.dense.nbytes

    def gb_s(name: str) -> float:
        return dense_bytes / times[name].median_ms / 1e6

    return {
        "layout": layout,
        "default": layout == DEFAULT_PRESET,
        "input": given.name,
        "dtype": str(given.dense.dtype).removeprefix("torch."),
        "num_values": given.dense.numel(),
        "encode_over_copy": measurement.over("encode", "copy"),
        "decode_over_copy": measurement.over("decode", "copy"),
        "encode_gb_s": gb_s("encode"),
        "decode_gb_s": gb_s("decode"),
        "ratio": dense_bytes / allocated_bytes,
        "bits_equal": True,
        **given.more,
        "copy_gb_s": gb_s("copy"),
        **{f"{name}_ms": timing.median_ms for name, timing in times.items()},
        **{f"{name}_iqr_ms": timing.iqr_ms for name, timing in times.items()},
        "repetitions": times["copy"].repetitions,
        "timing": measurement.method,
        "timing_note": "; ".join(filter(None, (measurement.note, *notes))) or None,
        "dense_bytes": dense_bytes,
        "allocated_bytes": allocated_bytes,
        **more,
    }


def measure_input(given: Input, layout: str, *, repetitions: int = REPETITIONS) -> dict[str, Any]:
    """One row: times of encode and decode over a copy's, ratio with every allocated byte counted.

    The bits are checked before anything is timed and once more after it, on what the timed calls
    wrote; LctError where they differ. ValueError for an unknown layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    dense, device = given.dense.contiguous(), given.dense.device
    encode_one, waits = encoder(layout), LAYOUTS[layout].no_graph
    compressed = encode_one(dense)
    check_bits(dense, compressed.decode(poisoned(dense)))
    check_bits(dense, decode(compressed))
    nbytes = compressed.nbytes
    counts = compressed.group_counts()

    # A set of buffers: input, output, payload to decode, payload that encode allocates, and what
    # decode allocates.
    set_bytes = 3 * dense.nbytes + 2 * nbytes
    rotations = rotations_for(dense.nbytes, device, set_bytes)
    inputs = [dense, *(dense.clone() for _ in range(rotations - 1))]
    outputs = [poisoned(dense) for _ in range(rotations)]
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
        no_graph=waits or ("the input spills" if counts.spilled else None),
    )
    for i, tensor in measurement.results["encode"]:
        check_bits(inputs[i], tensor.decode(poisoned(dense)))
    for i, tensor in measurement.results["decode_new"]:
        check_bits(inputs[i], tensor)
    return make_row(
        given,
        layout,
        measurement,
        nbytes,
        notes=[waits if measurement.note is None else None],
        decode_new_over_copy=measurement.over("decode_new", "copy"),
        rotations=rotations,
        stored=compressed.preset,
        spill_bytes=counts.spill_bytes,
        groups=counts.groups,
        spilled_groups=counts.spilled,
    )


def class_of(name: str) -> str:
    """The class of a tensor by the start of its file's name, ``other`` where it has none."""
    return next((kind for kind in CLASSES if name.startswith(kind)), OTHER_CLASS)


def sum_ratios(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Σ dense ÷ Σ allocated bytes over the files: by layout, then by class and groups of them.

    Only LCT's layouts, which take every file. Empty without files.
    """
    by_layout: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for row in rows:
        if row["layout"] in LAYOUTS and "phase" not in row:
            classes = by_layout.setdefault(row["layout"], {})
            sizes = row["dense_bytes"], row["allocated_bytes"]
            classes.setdefault(class_of(row["input"]), []).append(sizes)
    sums: dict[str, dict[str, dict[str, Any]]] = {}
    for layout, found in by_layout.items():
        wanted = {kind: (kind,) for kind in (*CLASSES, OTHER_CLASS)} | SUMMED_CLASSES
        sums[layout] = {}
        for name, kinds in wanted.items():
            sizes_of = [sizes for kind in kinds for sizes in found.get(kind, ())]
            if sizes_of:
                dense, allocated = (sum(column) for column in zip(*sizes_of, strict=True))
                sums[layout][name] = {
                    "tensors": len(sizes_of),
                    "dense_bytes": dense,
                    "allocated_bytes": allocated,
                    "ratio": dense / allocated,
                }
    return sums
