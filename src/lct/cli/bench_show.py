"""``lct bench show``: result files of ``lct bench train`` as tables and one plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import PlotPath
from .output import check_outputs, print_line
from .plots import check_suffix, plot_training
from .training_tables import print_result

KINDS = ("rows", "pairs", "searches", "differences")


def show(
    files: Annotated[list[Path], typer.Argument(metavar="FILE…", show_default=False)],
    plot_path: PlotPath = None,
) -> None:
    """Show result files of lct bench train: their tables, and one plot of all runs.

    [bold]Example[/bold]
      lct bench show train-qwen3-4b-*.json --plot qwen.png

    [bold]Exit codes:[/bold] 0 done, 1 failed (one line on stderr says why), 2 wrong usage.
    """
    check_outputs(None, plot_path)
    check_suffix(plot_path)
    rows: list[dict[str, Any]] = []
    for path in files:
        result = _read(path)
        print_line(f"{path.name}: {result['gpu'] or result['device']}, commit {result['commit']}")
        print_result(result)
        rows += result["rows"]
    if plot_path is not None:
        plot_training(plot_path, rows)


def _read(path: Path) -> dict[str, Any]:
    """ValueError where ``path`` is no result file of ``lct bench train``."""
    try:
        result = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} must be a JSON file: {error}") from error
    if not isinstance(result, dict) or not all(isinstance(result.get(k), list) for k in KINDS):
        raise ValueError(f"{path} must be a result file of lct bench train")
    return result
