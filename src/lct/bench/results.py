"""Result files: what was run, where, when and from which commit."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import __version__
from ..atomic import atomic_write
from ..config import set_variables

PACKAGE_DIR = Path(__file__).resolve().parents[1]


def versions() -> dict[str, str | None]:
    """Versions of what a result depends on; CUDA's is None in a CPU build of torch."""
    return {
        "lct": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def gpu_name(device: str) -> str | None:
    """Name of the GPU that ``device`` means, None for the CPU."""
    return torch.cuda.get_device_name(torch.device(device)) if device.startswith("cuda") else None


def git_commit() -> str | None:
    """Commit of the checkout that this package runs from, ``-dirty`` appended where it differs.

    None outside a checkout (an installed wheel, a copy without ``.git``) and without git.
    """
    # An installed package may lie inside somebody else's repository: ask for this very file.
    tracked = _git("ls-files", "--error-unmatch", str(Path(__file__).resolve()))
    head = _git("rev-parse", "HEAD")
    if tracked is None or head is None:
        return None
    return f"{head}-dirty" if _git("status", "--porcelain", "--untracked-files=no") else head


def _git(*arguments: str) -> str | None:
    try:
        run = subprocess.run(
            ["git", "-C", str(PACKAGE_DIR), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def script_line() -> str:
    """The command of a script in ``benchmarks/`` as it was typed, for its result file."""
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def describe_run(command: str, device: str, commit: str | None = None) -> dict[str, Any]:
    """The head of a result file. ``commit``: recorded instead of git's."""
    return {
        "command": command,
        "device": device,
        "gpu": gpu_name(device),
        "versions": versions(),
        "environment": set_variables(),
        "commit": commit or git_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def write_json(path: str | os.PathLike[str], result: Mapping[str, Any]) -> None:
    """Write ``result`` whole or not at all. ValueError for NaN, which JSON does not have."""
    text = json.dumps(result, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    with atomic_write(path) as file:
        file.write(text.encode("utf-8"))
