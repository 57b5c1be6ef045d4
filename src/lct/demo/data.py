"""The text that the demo trains on: sources of Python's standard library, found on the machine."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

# Not of the library itself, or not on every machine.
EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
HELD_OUT_EVERY = 20
# The smallest library that is worth training on; a whole one has more than 10 MB.
MIN_BYTES = 1_000_000


@dataclass(frozen=True)
class Corpus:
    """Bytes of all files one after another, uint8: every 20th file is held out of training."""

    train: torch.Tensor
    held_out: torch.Tensor
    num_files: int
    sha256: str

    def batch(
        self, text: torch.Tensor, rows: int, length: int, generator: torch.Generator
    ) -> torch.Tensor:
        """``rows`` random pieces of ``text``, int64 (rows, length)."""
        starts = torch.randint(len(text) - length + 1, (rows, 1), generator=generator)
        return text[starts + torch.arange(length)].long()


def load_corpus(folder: Path | None = None) -> Corpus:
    """The ``*.py`` files under ``folder`` (the standard library), in the order of their paths.

    ValueError where they are too few, as with an interpreter that ships without its sources.
    """
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    paths = sorted(path.as_posix() for path in relative if not EXCLUDED_FOLDERS & {*path.parts})
    files = [(root / path).read_bytes() for path in paths]
    size = sum(map(len, files))
    if size < MIN_BYTES:
        raise ValueError(
            f"the demo needs at least {MIN_BYTES} bytes of Python sources, got {size} in {root}"
        )
    held_out = b"".join(files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
    train = b"".join(data for i, data in enumerate(files, 1) if i % HELD_OUT_EVERY)
    return Corpus(
        train=torch.frombuffer(bytearray(train), dtype=torch.uint8),
        held_out=torch.frombuffer(bytearray(held_out), dtype=torch.uint8),
        num_files=len(files),
        sha256=hashlib.sha256(train + held_out).hexdigest(),
    )
