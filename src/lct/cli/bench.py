"""``lct bench``: one subcommand a benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import typer

from ..presets import DEFAULT_PRESET, PRESETS
from .options import CommitOption, JsonPath, PlotPath
from .output import check_outputs, command_line, print_table, progress_bar, table
from .plots import check_suffix

bench_app = typer.Typer(no_args_is_help=True, help="Measure LCT next to a copy of the same tensor.")

DeviceName = Literal["cpu", "cuda"]
DTypeName = Literal["bfloat16", "float32", "float16"]


@bench_app.callback()
def _benchmarks() -> None:
    """Measure LCT next to a copy of the same tensor."""


@bench_app.command()
def codec(
    device: Annotated[
        Optional[DeviceName],  # noqa: UP045 - typer reads this at run time
        typer.Option(help="Default: cuda where there is a GPU.", show_default=False),
    ] = None,
    tensors: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--tensors",
            metavar="DIR",
            help="Measure all .npy, .safetensors and .lct files of DIR too.",
        ),
    ] = None,
    sizes: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--sizes",
            metavar="N,…",
            help="Numbers of values. Default: 2**20,2**22 on the CPU, 2**24,2**28 on CUDA.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[DTypeName, typer.Option(help="Of the Gaussian tensors.")] = "bfloat16",
    presets: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--preset",
            metavar="NAME,…",
            help="Layouts to measure. Default: all.",
            show_default=False,
        ),
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Timed calls of each variant.")] = 15,
    commit: CommitOption = None,
    json_path: JsonPath = None,
    plot_path: PlotPath = None,
) -> None:
    """Encode and decode: time over a copy's, GB/s of dense bytes, ratio; bits are checked first.

    Inputs are seeded Gaussians (each size at phase 0, and eight phases of the
    scale, σ = 0.02 · 2^(k/8)) and given files. Every row comes from the call
    that users make: lct.encode(t), with preset=… for the layouts that are not
    the default, and decode into a given tensor. [bold]ratio[/bold] is dense bytes over all
    bytes allocated, headers and spilled chunks included. Variants take turns,
    buffers rotate past twice the L2 cache, calls under 100 µs are replayed as
    a CUDA graph; the figures are medians of the repetitions.

    [bold]Examples[/bold]
      lct bench codec --device cpu --json codec-cpu.json
      lct bench codec --device cuda --tensors DIR --json codec-cuda.json --plot codec.png
      lct bench codec --sizes 2**20,2**24 --preset pooled --repetitions 31

    [bold]Exit codes:[/bold] 0 done, 1 failed (one wrong bit: no figures), 2 wrong usage.
    """
    import torch

    from ..bench.codec import all_inputs, measure_input
    from ..bench.results import describe_run, write_json

    check_outputs(json_path, plot_path)
    check_suffix(plot_path)
    numbers = _parse_sizes(sizes)
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda needs a CUDA GPU and a CUDA build of torch, found none")
    layouts = _parse_presets(presets)
    rows: list[dict[str, Any]] = []
    with progress_bar("measure", count=True) as progress:
        for given in all_inputs(torch.device(chosen), sizes=numbers, dtype=dtype, tensors=tensors):
            for layout in layouts:
                progress(f"{given.name} {given.dense.numel():,} {layout}", len(rows), None)
                rows.append(measure_input(given, layout, repetitions=repetitions))
    _print(rows)
    if json_path is not None:
        write_json(json_path, {**describe_run(command_line(), chosen, commit), "rows": rows})
    if plot_path is not None:
        from .plots import plot_codec

        plot_codec(plot_path, rows)


def _parse_presets(texts: list[str] | None) -> list[str]:
    """Names from ``pooled,clean``, all for None, the default first; exit code 2 for others."""
    if not texts:
        return sorted(PRESETS, key=lambda name: name != DEFAULT_PRESET)
    names = [name.strip() for name in ",".join(texts).split(",")]
    for name in names:
        if name not in PRESETS:
            raise typer.BadParameter(
                f"must be among {', '.join(PRESETS)}, got {name!r}", param_hint="--preset"
            )
    return names


def _parse_sizes(texts: list[str] | None) -> list[int] | None:
    """Numbers from ``2**20,100000``; exit code 2 for anything else."""
    if not texts:
        return None
    numbers = []
    for text in ",".join(texts).split(","):
        base, power, exponent = text.strip().partition("**")
        try:
            number = int(base) ** int(exponent) if power and int(exponent) < 64 else int(text)
        except ValueError:
            number = 0
        if number < 1:
            raise typer.BadParameter(
                f"must be whole numbers such as 2**20,100000, got {text!r}", param_hint="--sizes"
            )
        numbers.append(number)
    return numbers


def _print(rows: list[dict[str, Any]]) -> None:
    columns = (
        "layout",
        "input",
        "phase",
        "dtype",
        "values",
        "encode ÷ copy",
        "decode ÷ copy",
        "encode GB/s",
        "decode GB/s",
        "copy GB/s",
        "ratio",
        "spilled",
        "timed by",
    )
    shown = table(
        "Encode and decode next to a copy (medians)",
        columns,
        text=("layout", "input", "dtype", "timed by"),
    )
    previous = None
    for row in rows:
        group = row["input"], row["num_values"], row.get("phase"), row.get("tensor")
        if previous not in (None, group):
            shown.add_section()
        previous = group
        tensor = f": {row['tensor']}" if "tensor" in row else ""
        shown.add_row(
            row["layout"] + (" (default)" if row["default"] else ""),
            row["input"] + tensor,
            str(row.get("phase", "")),
            row["dtype"],
            f"{row['num_values']:,}",
            f"{row['encode_over_copy']:.3f}",
            f"{row['decode_over_copy']:.3f}",
            f"{row['encode_gb_s']:.4g}",
            f"{row['decode_gb_s']:.4g}",
            f"{row['copy_gb_s']:.4g}",
            f"{row['ratio']:.4f}",
            f"{row['spilled_groups']} of {row['groups']}",
            row["timing"],
        )
    print_table(shown)
