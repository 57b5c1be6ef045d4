"""``lct analyze``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from .options import JsonPath, PlotPath
from .output import check_outputs, command_line, print_table, progress_bar, table
from .plots import check_suffix

if TYPE_CHECKING:
    from ..analysis import Allocation, DistributionReport, MismatchReport, TensorReport

NUM_VALUES = 2**18
NUM_PHASES = 8
# Allocations as (title, preset, capacity): what the calls of a user hold.
LAYOUTS: tuple[tuple[str, str, Any], ...] = (
    ("clean", "clean", None),
    ("medium", "medium", None),
    ("high", "high", None),
    ("pooled", "pooled", None),
    ("pooled, exact", "pooled", "exact"),
)


def analyze(
    files: Annotated[
        Optional[list[Path]],  # noqa: UP045 - typer reads this at run time
        typer.Argument(
            metavar="FILE",
            help="Analyse these files (.safetensors, .lct, .npy), not the models.",
            show_default=False,
        ),
    ] = None,
    tensors: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--tensors", metavar="DIR", help="Analyse all such files of a directory."),
    ] = None,
    num_values: Annotated[
        int, typer.Option("--values", min=1, help="Values of each seeded sample that is encoded.")
    ] = NUM_VALUES,
    num_phases: Annotated[
        int,
        typer.Option("--phases", min=1, max=64, help="Phases of the scale: 0.02 · 2^(k / PHASES)."),
    ] = NUM_PHASES,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the samples.")] = 0,
    json_path: JsonPath = None,
    plot_path: PlotPath = None,
) -> None:
    """Storage analysis: what exponents cost by distribution, preset and scale, or in files.

    All costs are bits per exponent. [bold]entropy[/bold] is the bound, [bold]ideal[/bold] the
    best prefix code of any length, [bold]Huffman[/bold] the best of at most 8 bits with an
    escape, [bold]book[/bold] LCT's precomputed one: all in closed form. [bold]allocated[/bold]
    is what lct.encode holds for a seeded sample, headers, unused room and
    spilled values included; after the slash, the share of values that
    spilled. "pooled" is lct.encode(t), "pooled, exact" measures the need
    first.

    Then the cost of a shift that misses the scale by −4 to +4 octaves (+:
    values larger than the shift fits), and of books made for another
    distribution.

    [bold]Examples[/bold]
      lct analyze
      lct analyze --phases 4 --json analysis.json --plot analysis.png
      lct analyze model.safetensors
      lct analyze --tensors DIR --json tensors.json

    [bold]Exit codes:[/bold] 0 done, 1 failed, 2 wrong usage.
    """
    from ..bench.results import describe_run, write_json

    check_outputs(json_path, plot_path)
    check_suffix(plot_path)
    head = describe_run(command_line(), "cpu")
    if files or tensors is not None:
        from ..checkpoint.sources import find_files

        paths = [*(files or []), *(find_files(tensors) if tensors is not None else [])]
        rows = list(_tensor_rows(paths))
        _print_tensors(rows)
        result: dict[str, Any] = {"tensors": [_tensor_fields(*row) for row in rows]}
    else:
        reports = list(_distributions(num_values, num_phases, seed))
        mismatch = list(_mismatch(num_values, seed))
        from ..analysis import analyze_families

        families = analyze_families()
        _print_distributions(reports)
        _print_mismatch(mismatch)
        _print_families(families)
        result = {
            "seed": seed,
            "num_values": num_values,
            "distributions": [_distribution_fields(report) for report in reports],
            "mismatch": [asdict(report) for report in mismatch],
            "families": families,
        }
    if json_path is not None:
        write_json(json_path, {**head, **result})
    if plot_path is not None:
        from . import plots

        if "tensors" in result:
            plots.plot_tensor_costs(plot_path, result["tensors"])
        else:
            plots.plot_distributions(plot_path, result["distributions"], result["mismatch"])


def _distributions(num_values: int, num_phases: int, seed: int) -> Iterator[DistributionReport]:
    from ..analysis import SAMPLERS, analyze_distribution

    layouts = [(preset, capacity) for _, preset, capacity in LAYOUTS]
    total, done = len(SAMPLERS) * num_phases, 0
    with progress_bar("encode samples", count=True) as progress:
        for distribution in SAMPLERS:
            for phase in range(num_phases):
                progress(distribution, done, total)
                yield analyze_distribution(
                    distribution, phase / num_phases, num_values, seed, layouts
                )
                done += 1


def _mismatch(num_values: int, seed: int) -> Iterator[MismatchReport]:
    from ..analysis import SAMPLERS, analyze_mismatch

    for distribution in SAMPLERS:
        yield from analyze_mismatch(distribution, num_values, seed)


TensorRow = tuple[str, str, str, "TensorReport", "tuple[Allocation, ...]"]


def _tensor_rows(paths: list[Path]) -> Iterator[TensorRow]:
    from ..analysis import allocate, analyze_tensor
    from ..checkpoint.sources import read_tensors

    with progress_bar("analyse", count=True) as progress:
        for number, path in enumerate(paths):
            progress(path.name, number, len(paths))
            for source in read_tensors(path):
                if source.load is None or not source.dense_bytes:
                    continue
                dense = source.load()
                allocations = tuple(
                    allocate(dense, preset, capacity=capacity) for _, preset, capacity in LAYOUTS
                )
                yield path.stem, source.name, source.dtype, analyze_tensor(dense), allocations


def _named(allocations: tuple[Allocation, ...]) -> dict[str, Any]:
    titles = [title for title, _, _ in LAYOUTS]
    return {title: asdict(a) for title, a in zip(titles, allocations, strict=True)}


def _distribution_fields(report: DistributionReport) -> dict[str, Any]:
    return {**asdict(report), "allocations": _named(report.allocations)}


def _tensor_fields(
    file: str, name: str, dtype: str, report: TensorReport, allocations: tuple[Allocation, ...]
) -> dict[str, Any]:
    head = {"file": file, "name": name, "dtype": dtype}
    return {**head, **asdict(report), "allocations": _named(allocations)}


def _bits(allocation: Allocation) -> str:
    return f"{allocation.allocated_bits:.3f} / {allocation.spilled_share:.2%}"


def _print_distributions(reports: list[DistributionReport]) -> None:
    layouts = [f"{title}" for title, _, _ in LAYOUTS]
    columns = ("distribution", "phase", "entropy", "ideal", "Huffman", "book", *layouts)
    shown = table(
        "Bits per exponent; by layout: allocated / share spilled", columns, text=("distribution",)
    )
    previous = None
    for r in reports:
        if previous not in (None, r.distribution):
            shown.add_section()
        previous = r.distribution
        costs = (r.entropy_bits, r.ideal_bits, r.huffman_bits, r.book_bits)
        shown.add_row(
            r.distribution,
            f"{r.phase:.3f}",
            *(f"{cost:.3f}" for cost in costs),
            *(_bits(a) for a in r.allocations),
        )
    print_table(shown)


def _print_mismatch(reports: list[MismatchReport]) -> None:
    by_family: dict[str, list[MismatchReport]] = {}
    for report in reports:
        by_family.setdefault(report.distribution, []).append(report)
    octaves = [f"{r.octaves:+d}" if r.octaves else "0" for r in next(iter(by_family.values()))]
    shown = table(
        "A shift that misses the scale by octaves: bits per exponent / share spilled in clean",
        ("distribution", *octaves),
        text=("distribution",),
    )
    for family, row in by_family.items():
        shown.add_row(family, *(f"{r.book_bits:.2f} / {r.spilled_share:.1%}" for r in row))
    print_table(shown)


def _print_families(families: dict[str, dict[str, float]]) -> None:
    books = list(next(iter(families.values())))
    shown = table(
        "Books of another distribution: bits per exponent",
        ("data", *(f"{book} books" for book in books)),
        text=("data",),
    )
    for data, costs in families.items():
        shown.add_row(data, *(f"{costs[book]:.3f}" for book in books))
    print_table(shown)


def _print_tensors(rows: list[TensorRow]) -> None:
    from rich.text import Text

    layouts = [title for title, _, _ in LAYOUTS]
    columns = ("tensor", "dtype", "values", "entropy", "ideal", "Huffman", "book", "bits", *layouts)
    title = "Bits per exponent; by layout: ratio / share spilled"
    shown = table(title, columns, text=("tensor", "dtype", "book"))
    for file, name, dtype, r, allocations in rows:
        shown.add_row(
            Text(name if name == file else f"{file}: {name}"),
            dtype,
            f"{r.num_values:,}",
            f"{r.entropy_bits:.3f}",
            f"{r.ideal_bits:.3f}",
            f"{r.huffman_bits:.3f}",
            r.book,
            f"{r.book_bits:.3f}",
            *(f"{a.ratio:.4f} / {a.spilled_share:.2%}" for a in allocations),
        )
    print_table(shown)
