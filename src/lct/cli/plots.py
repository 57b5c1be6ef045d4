"""Pictures of the figures that the commands print. Drawn without a display."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..atomic import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_BARS = 40
LOG_RANGE = 30
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "font.size": 9,
    "legend.frameon": False,
}
MARKERS = ("o", "s", "^", "D", "v", "P")
# Okabe and Ito's palette: told apart by colour-blind readers too.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")


def _figure(width: float, height: float, columns: int) -> tuple[Figure, list[Axes]]:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(STYLE)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    return figure, list(axes)


def check_suffix(path: Path | None) -> None:
    """ValueError unless the suffix of ``path`` names a format. Called before the work."""
    if path is None:
        return
    from matplotlib.backend_bases import FigureCanvasBase

    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lstrip(".") not in formats:
        raise ValueError(
            f"suffix of a picture must be one of {', '.join(formats)}, got {str(path)!r}"
        )


def _save(figure: Figure, path: Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.lstrip("."), dpi=150)
    with atomic_write(path) as file:
        file.write(buffer.getvalue())


def plot_inspection(
    path: Path, title: str, tensors: Sequence[tuple[str, float, int]], total_ratio: float
) -> None:
    """Ratio by tensor (name, ratio, dense bytes): bars for a few, and how the bytes are spread."""
    largest = sorted(tensors, key=lambda item: -item[2])[:MAX_BARS]
    figure, (bars, spread) = _figure(12, max(3.5, 0.9 + 0.17 * len(largest)), 2)
    names = [name if len(name) <= 48 else f"…{name[-47:]}" for name, _, _ in largest]
    bars.barh(range(len(largest)), [ratio for _, ratio, _ in largest], color=COLORS[0])
    bars.set_yticks(range(len(largest)), names, fontsize=7)
    bars.set_ylim(len(largest) - 0.4, -0.6)
    bars.axvline(total_ratio, color=COLORS[5], linestyle="--")
    more = f", {len(largest)} largest of {len(tensors)}" if len(largest) < len(tensors) else ""
    title_of_bars = f"Ratio by tensor{more} (dashed: whole file, {total_ratio:.4f})"
    bars.set(xlabel="dense bytes ÷ stored bytes", title=title_of_bars)
    bars.grid(visible=False, axis="y")
    sizes = [size / 1e6 for _, _, size in tensors]
    spread.hist([ratio for _, ratio, _ in tensors], bins=40, weights=sizes, color=COLORS[2])
    spread.set(xlabel="dense bytes ÷ stored bytes", ylabel="dense MB", title="Bytes by ratio")
    figure.suptitle(title)
    _save(figure, path)


def plot_distributions(
    path: Path, distributions: Sequence[dict[str, Any]], mismatch: Sequence[dict[str, Any]]
) -> None:
    """Bits per exponent by phase of the scale, and over the mismatch of the shift."""
    figure, (by_phase, by_octave) = _figure(12, 4.5, 2)
    families = list(dict.fromkeys(row["distribution"] for row in distributions))
    for color, family in zip(COLORS, families, strict=False):
        rows = [row for row in distributions if row["distribution"] == family]
        phases = [row["phase"] for row in rows]
        lines = (("entropy_bits", ":"), ("huffman_bits", "--"), ("book_bits", "-"))
        for key, style in lines:
            label = family if key == "book_bits" else None
            by_phase.plot(phases, [row[key] for row in rows], style, color=color, label=label)
        missed = [row for row in mismatch if row["distribution"] == family]
        octaves = [row["octaves"] for row in missed]
        by_octave.plot(
            octaves, [row["book_bits"] for row in missed], "o-", color=color, label=family
        )
    for style, name in ((":", "entropy"), ("--", "Huffman"), ("-", "book")):
        by_phase.plot([], [], style, color="grey", label=name)
    by_phase.set(
        xlabel="phase of the scale (octaves)", ylabel="bits per exponent", title="Cost by phase"
    )
    by_octave.set(
        xlabel="values larger than the shift fits (octaves)",
        ylabel="bits per exponent",
        title="Cost of a shift that misses the scale",
    )
    by_octave.axhline(8, color="grey", linewidth=0.8, linestyle="--")
    by_phase.legend(ncols=2)
    by_octave.legend()
    _save(figure, path)


def plot_tensor_costs(path: Path, tensors: Sequence[dict[str, Any]]) -> None:
    """Bits per exponent by tensor, the largest ones: entropy, Huffman, book, allocated."""
    rows = sorted(tensors, key=lambda row: -row["num_values"])[:MAX_BARS]
    figure, (axes,) = _figure(9, max(3.5, 1.2 + 0.2 * len(rows)), 1)
    names = [
        row["name"] if row["name"] == row["file"] else f"{row['file']}: {row['name']}"
        for row in rows
    ]
    places = range(len(rows))
    series = (
        ("entropy of the tensor", [row["entropy_bits"] for row in rows], "|"),
        ("own Huffman code", [row["huffman_bits"] for row in rows], "x"),
        ("best book, shift per 256 values", [row["book_bits"] for row in rows], "o"),
        (
            "allocated (pooled, exact)",
            [row["allocations"]["pooled, exact"]["allocated_bits"] for row in rows],
            "s",
        ),
    )
    for color, (label, bits, marker) in zip(COLORS, series, strict=False):
        axes.plot(bits, places, marker, color=color, label=label, linestyle="none", markersize=6)
    axes.set_yticks(
        places, [name if len(name) <= 48 else f"…{name[-47:]}" for name in names], fontsize=7
    )
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set(xlabel="bits per exponent", title="Cost by tensor")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.03), ncols=2)
    _save(figure, path)


def plot_codec(
    path: Path,
    rows: Sequence[dict[str, Any]],
    sums: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> None:
    """Throughput at phase 0 against size, and ratio by class of tensor.

    ``sums``: Σ dense ÷ Σ allocated bytes by layout and class, of rows of files.
    """
    from ..bench.codec import class_of

    layouts = list(dict.fromkeys(row["layout"] for row in rows))
    figure, (speeds, ratios) = _figure(13, 4.8, 2)
    gaussians = [row for row in rows if "phase" in row]
    _plot_throughput(speeds, [row for row in gaussians if row["phase"] == 0], layouts)
    smallest = min((row["num_values"] for row in gaussians), default=0)
    points = [
        ("gaussian phases" if "phase" in row else class_of(row["input"]), row)
        for row in rows
        if "phase" not in row or row["num_values"] == smallest
    ]
    _plot_ratios(ratios, points, layouts, sums)
    _save(figure, path)


def _scale_y(axes: Axes) -> None:
    """From zero, or logarithmic where a linear axis would flatten the smallest values."""
    values = [value for line in axes.lines for value in np.asarray(line.get_ydata()).flat]
    if values and max(values) > LOG_RANGE * min(values) > 0:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


def _plot_throughput(axes: Axes, rows: Sequence[dict[str, Any]], layouts: Sequence[str]) -> None:
    sizes = sorted({row["num_values"] for row in rows})
    copies = [max(row["copy_gb_s"] for row in rows if row["num_values"] == n) for n in sizes]
    axes.plot(sizes, copies, "o-", color="black", label="copy", linewidth=1.2)
    for color, layout in zip(COLORS, layouts, strict=False):
        own = sorted((r for r in rows if r["layout"] == layout), key=lambda r: r["num_values"])
        for what, style in (("encode", "o-"), ("decode", "s--")):
            if own:
                speeds = [row[f"{what}_gb_s"] for row in own]
                label = f"{layout} {what}"
                axes.plot([r["num_values"] for r in own], speeds, style, color=color, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes)
    _scale_y(axes)
    axes.set(xlabel="values", ylabel="GB/s of dense bytes", title="Gaussian, phase 0")
    axes.legend(fontsize=7, ncols=2)


def _plot_ratios(
    axes: Axes,
    points: Sequence[tuple[str, dict[str, Any]]],
    layouts: Sequence[str],
    sums: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> None:
    """A dot a tensor, side by side for the layouts; a bar where a class has a sum."""
    classes = list(dict.fromkeys(name for name, _ in points))
    width = 0.8 / max(len(layouts), 1)
    for number, layout in enumerate(layouts):
        color = COLORS[number % len(COLORS)]
        shift = (number - (len(layouts) - 1) / 2) * width
        own = [(name, row) for name, row in points if row["layout"] == layout]
        places = [classes.index(name) + shift for name, _ in own]
        axes.plot(
            *(places, [row["ratio"] for _, row in own], "o"),
            color=color,
            markersize=3.5,
            label=layout,
        )
        found = sums.get(layout, {})
        for name in classes:
            if name in found:
                axes.bar(
                    classes.index(name) + shift, found[name]["ratio"], width, color=color, alpha=0.3
                )
    axes.set_xticks(range(len(classes)), classes, rotation=35, ha="right")
    lowest = min((row["ratio"] for _, row in points), default=1.0)
    axes.set_ylim(bottom=min(1.0, 0.98 * lowest))
    title = "Ratio by tensor" + (" (bars: Σ dense ÷ Σ allocated of the class)" if sums else "")
    axes.set(ylabel="dense bytes ÷ allocated bytes", title=title)
    axes.grid(visible=False, axis="x")
    axes.legend(fontsize=7, ncols=2)


def plot_optim(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Time of a step over its floor against size, beside torch's dense steps, by optimizer."""
    optimizers = list(dict.fromkeys(row["optimizer"] for row in rows))
    roundings = list(dict.fromkeys(row["rounding"] for row in rows))
    columns = max(len(optimizers), 1)
    figure, all_axes = _figure(max(6.0, 4.5 * columns), 4.5, columns)
    for axes, optimizer in zip(all_axes, optimizers, strict=True):
        own = [row for row in rows if row["optimizer"] == optimizer]
        for color, rounding in zip(COLORS, roundings, strict=False):
            line = sorted(
                (row for row in own if row["rounding"] == rounding),
                key=lambda row: row["num_values"],
            )
            if not line:
                continue
            sizes = [row["num_values"] for row in line]
            for key, style, label in (
                ("step_over_floor", "o-", f"compressed, {rounding}"),
                (f"dense_{rounding}_over_floor", "s--", f"dense, {rounding}"),
            ):
                axes.plot(sizes, [row[key] for row in line], style, color=color, label=label)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({row["num_values"] for row in own}))
        _scale_y(axes)
        copies = own[0]["floor_copies"]
        axes.set(
            xlabel="values",
            ylabel=f"time of a step ÷ ({copies:g} × time of a copy)",
            title=optimizer,
        )
        axes.legend(fontsize=8)
    _save(figure, path)


def plot_step_memory(
    path: Path, timelines: Mapping[str, Sequence[tuple[float, int]]], peaks: Mapping[str, int]
) -> None:
    """Bytes of live tensors over one training step, without LCT and with it.

    ``timelines``: (place, bytes) by run; place 0–1 is forward, 1–2 backward, 2–3 the optimizer.
    """
    figure, (axes,) = _figure(9, 5, 1)
    labels = {"dense": "without LCT", "lct": "with LCT"}
    runs = [
        (labels[name], color, timelines[name], peaks[name])
        for name, color in zip(labels, COLORS[1::-1], strict=True)
    ]
    for label, color, points, peak in runs:
        places = [place for place, _ in points]
        sizes = [size / 1e6 for _, size in points]
        axes.plot(places, sizes, color=color, drawstyle="steps-post", label=label, linewidth=1.4)
        axes.fill_between(places, sizes, step="post", color=color, alpha=0.15)
        axes.axhline(peak / 1e6, color=color, linestyle="--", linewidth=0.9)
        axes.annotate(
            f"peak {label}: {peak / 1e6:,.1f} MB",
            (2.98, peak / 1e6),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            color=color,
            fontweight="bold",
        )
    saved = 1 - peaks["lct"] / peaks["dense"]
    for border in (1, 2):
        axes.axvline(border, color="grey", linewidth=0.8)
    axes.set_xticks([0.5, 1.5, 2.5], ["forward", "backward", "optimizer step"])
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.set(
        xlim=(0, 3),
        ylim=(0, 1.12 * max(peak for *_, peak in runs) / 1e6),
        ylabel="MB",
        title=f"Live tensors over one training step: {saved:.1%} off the peak",
    )
    _save(figure, path)


def plot_training(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Peak memory against step time, a panel a model and configuration, with Pareto fronts.

    One front is of all lossless variants, one of those without LCT. Runs of the same sequence and
    micro-batch share a marker; lossy ones are hollow. Rows without both figures are left out: they
    ran out of memory, or none was measured.
    """
    done = [row for row in rows if row["peak_allocated_mib"] and row["step_ms_median"]]
    panels = list(dict.fromkeys((row["model"], row["configuration"]) for row in done))
    columns = max(len(panels), 1)
    figure, all_axes = _figure(max(7.0, 6.0 * columns), 5.5, columns)
    for axes, panel in zip(all_axes, panels, strict=False):
        own = [row for row in done if (row["model"], row["configuration"]) == panel]
        inputs = list(dict.fromkeys((row["sequence"], row["micro_batch"]) for row in own))
        for marker, given in zip(itertools.cycle(MARKERS), inputs, strict=False):
            group = [row for row in own if (row["sequence"], row["micro_batch"]) == given]
            _plot_variants(axes, group, marker)
            label = f"{given[0]} tokens × {given[1]}"
            axes.plot([], [], marker, color="grey", linestyle="none", label=label)
        axes.margins(0.15)
        axes.set(xlabel="ms a step", ylabel="peak MiB (allocated)", title=", ".join(panel))
        for color, label in ((COLORS[0], "with LCT"), (COLORS[1], "without")):
            axes.plot([], [], color=color, linewidth=4, label=label)
        axes.legend(fontsize=8)
    _save(figure, path)


def _plot_variants(axes: Axes, rows: Sequence[dict[str, Any]], marker: str) -> None:
    def point(row: dict[str, Any]) -> tuple[float, float]:
        return row["step_ms_median"], row["peak_allocated_mib"]

    def has_lct(row: dict[str, Any]) -> bool:
        return str(row["variant"]).startswith("lct")

    lossless = [row for row in rows if not row["lossy"]]
    without = [row for row in lossless if not has_lct(row)]
    for group, style, color in ((without, "--", COLORS[1]), (lossless, "-", "grey")):
        if group:
            front = _pareto_front([point(row) for row in group])
            axes.plot(*zip(*front, strict=True), style, color=color, linewidth=0.9, zorder=1)
    width, height = (
        max(values) - min(values) or 1.0 for values in zip(*map(point, rows), strict=True)
    )
    named: list[tuple[float, float]] = []  # points with their name above
    for row in sorted(rows, key=point):
        color = COLORS[0] if has_lct(row) else COLORS[1]
        fill = "none" if row["lossy"] else color
        x, y = point(row)
        axes.plot(x, y, marker, color=color, markerfacecolor=fill, markersize=7)
        # Below, where it would lie over another name.
        crowded = any(x - a < 0.2 * width and abs(y - b) < 0.03 * height for a, b in named)
        if not crowded:
            named.append((x, y))
        offset = (5, -11 if crowded else 4)
        axes.annotate(
            *(row["variant"], (x, y)), xytext=offset, textcoords="offset points", fontsize=7
        )


def _pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other one is at most equal to in both, by the first coordinate."""
    front: list[tuple[float, float]] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front
