"""Comparison of two runs, bit by bit, as the dictionary that becomes ``report.json``."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from .data import Corpus
from .training import Recipe, Run

MAX_PEAK_RATIO = 0.85  # of the peak with LCT to the dense one
KINDS = ("losses", "weights", "optimizer_state")


def hash_losses(losses: list[float]) -> str:
    """SHA-256 of the losses as FP64, little-endian: an FP32 value in FP64 keeps its bits."""
    return hashlib.sha256(struct.pack(f"<{len(losses)}d", *losses)).hexdigest()


def hash_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over name, dtype, shape and bit patterns of each tensor, in the order given."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(_bits(tensor).numpy().tobytes())
    return digest.hexdigest()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _first_difference(kind: str, dense: Run, lct: Run) -> str:
    """Where two runs part, in words; empty where they do not."""
    if kind == "losses":
        pairs = enumerate(zip(dense.losses, lct.losses, strict=True))
        return next((f"step {i}: {a!r} and {b!r}" for i, (a, b) in pairs if a != b), "")
    expected, found = getattr(dense, kind), getattr(lct, kind)
    if expected.keys() != found.keys():
        return f"only in one of the runs: {', '.join(sorted(expected.keys() ^ found.keys()))}"
    for name, tensor in expected.items():
        other = found[name]
        if tensor.dtype != other.dtype or tensor.shape != other.shape:
            return f"{name}: {_kind(tensor)} and {_kind(other)}"
        differs = (_bits(tensor) != _bits(other)).nonzero()
        if len(differs):
            value = int(differs[0]) // tensor.element_size()
            return f"{name}: {len(differs)} bytes, the first in value {value}"
    return ""


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def build_report(dense: Run, lct: Run, recipe: Recipe, corpus: Corpus) -> dict[str, Any]:
    """Identities, hashes, bytes and times of the two runs; ``failures``: what missed its aim."""
    hashes = {
        "losses": {"dense": hash_losses(dense.losses), "lct": hash_losses(lct.losses)},
        **{
            kind: {name: hash_tensors(getattr(run, kind)) for name, run in _named(dense, lct)}
            for kind in ("weights", "optimizer_state")
        },
    }
    identical = {kind: hashes[kind]["dense"] == hashes[kind]["lct"] for kind in KINDS}
    classes = {
        "weights": _pair(dense.weight_bytes, lct.weight_bytes),
        "optimizer_state": _pair(dense.optimizer_state_bytes, lct.optimizer_state_bytes),
        "saved_activations": _pair(dense.memory.saved_bytes, lct.memory.saved_bytes),
    }
    peak = _pair(dense.memory.peak_bytes, lct.memory.peak_bytes)
    failures = [
        f"{kind.replace('_', ' ')} differ: {_first_difference(kind, dense, lct)}"
        for kind in KINDS
        if not identical[kind]
    ]
    peak_ratio = peak["lct"] / peak["dense"]
    if peak_ratio > MAX_PEAK_RATIO:
        failures.append(
            f"peak with LCT must be at most {MAX_PEAK_RATIO} of the dense one, got {peak_ratio:.4f}"
        )
    return {
        **{f"{kind}_identical": identical[kind] for kind in KINDS},
        "peak_bytes": peak,
        "peak_ratio": peak_ratio,
        "step_seconds": {"dense": dense.step_seconds, "lct": lct.step_seconds},
        "bytes": classes,
        "sha256": hashes,
        "losses": lct.losses,
        "held_out_loss": {"dense": dense.held_out_loss, "lct": lct.held_out_loss},
        "failures": failures,
        "recipe": asdict(recipe),
        "num_parameters": sum(tensor.numel() for tensor in dense.weights.values()),
        "corpus": {
            "num_files": corpus.num_files,
            "train_bytes": len(corpus.train),
            "held_out_bytes": len(corpus.held_out),
            "sha256": corpus.sha256,
        },
        "timeline": {name: run.memory.timeline for name, run in _named(dense, lct)},
    }


def _pair(dense: int, lct: int) -> dict[str, int]:
    return {"dense": dense, "lct": lct}


def _named(dense: Run, lct: Run) -> tuple[tuple[str, Run], ...]:
    return ("dense", dense), ("lct", lct)
