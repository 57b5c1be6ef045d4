"""Printing: consoles, tables, sizes, a progress bar; all of it works without a terminal."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from ..atomic import check_target

if TYPE_CHECKING:
    from ..checkpoint import Summary

# Without a terminal rich would fold tables at 80 columns; a log has no width.
WIDTH_WITHOUT_TERMINAL = 200
MAX_TEXT_WIDTH = 44  # longer names are folded


def stdout() -> Console:
    """Console for results."""
    return _console(stderr=False)


def stderr() -> Console:
    """Console for progress and errors."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(stderr=stderr, width=WIDTH_WITHOUT_TERMINAL)
    return console


def command_line() -> str:
    """The command as it was typed, for result files."""
    return shlex.join(["lct", *sys.argv[1:]])


def print_line(text: str) -> None:
    """Print ``text`` to stdout as it is, on one line however long."""
    stdout().print(text, markup=False, highlight=False, soft_wrap=True)


def check_outputs(*paths: Path | None) -> None:
    """OSError if one of ``paths`` could not be written: say so before the work, not after it."""
    for path in paths:
        if path is not None:
            check_target(path)


def write_summary(path: Path, summary: Summary) -> None:
    """Write what a conversion of a file did to ``path``, as JSON."""
    from ..bench.results import describe_run, write_json

    fields = {**asdict(summary), "ratio": summary.ratio}
    write_json(path, {**describe_run(command_line(), "cpu"), **fields})


def table(title: str, columns: Sequence[str], *, text: Sequence[str] = ()) -> Table:
    """An empty table; ``text``: the columns that hold words, the others hold numbers."""
    result = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        words = column in text
        result.add_column(
            column,
            justify="left" if words else "right",
            overflow="fold",
            no_wrap=not words,
            max_width=MAX_TEXT_WIDTH if words else None,
        )
    return result


def print_table(shown: Table) -> None:
    """Print a table to stdout in its full width.

    In a narrow terminal its lines run on; rich would squeeze columns until nothing is left of them.
    """
    console = stdout()
    terminal_width, console.width = console.width, 1000
    console.width = max(terminal_width, console.measure(shown).maximum)
    console.print(shown, crop=False)


def human_bytes(size: float) -> str:
    """``size`` in decimal units, three significant digits."""
    units = ("B", "kB", "MB", "GB", "TB")
    step = 0
    while size >= 999.5 and step < len(units) - 1:
        size, step = size / 1000, step + 1
    return f"{size:.3g} {units[step]}"


@contextlib.contextmanager
def progress_bar(
    verb: str, *, count: bool = False
) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar on stderr over bytes, or over items (``count``); none without a terminal.

    Gives a callback (item, done, total).
    """
    console = stderr()
    amount = (MofNCompleteColumn(),) if count else (DownloadColumn(), TransferSpeedColumn())
    columns: tuple[ProgressColumn, ...] = (
        TextColumn(verb),
        BarColumn(),
        *amount,
        TimeRemainingColumn(),
        TextColumn("{task.fields[item]}", markup=False),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(verb, item="", total=None)
        yield lambda item, done, total: bar.update(task, item=item, completed=done, total=total)
