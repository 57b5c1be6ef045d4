"""``lct bench``: one subcommand a benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import typer

from .options import CommitOption, DeviceOption, JsonPath, PlotPath, choose_device, parse_names
from .output import check_outputs, command_line, print_line, print_table, progress_bar, table
from .plots import check_suffix

bench_app = typer.Typer(no_args_is_help=True, help="Measure LCT next to a copy of the same tensor.")

DTypeName = Literal["bfloat16", "float32", "float16"]
Repetitions = Annotated[int, typer.Option(min=1, help="Timed calls of each variant.")]
NO_PEERS = "none"


def _names_option(flag: str, text: str) -> Any:
    return typer.Option(flag, metavar="NAME,…", help=text, show_default=False)


def _sizes_option(defaults: str) -> Any:
    text = f"Numbers of values. Default: {defaults}."
    return typer.Option("--sizes", metavar="N,…", help=text, show_default=False)


@bench_app.callback()
def _benchmarks() -> None:
    """Measure LCT next to a copy of the same tensor."""


@bench_app.command()
def codec(
    device: DeviceOption = None,
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
        _sizes_option("2**20,2**22 on the CPU, 2**24,2**28 on CUDA"),
    ] = None,
    dtype: Annotated[DTypeName, typer.Option(help="Of the Gaussian tensors.")] = "bfloat16",
    presets: Annotated[
        Optional[list[str]],  # noqa: UP045
        _names_option("--preset", "Layouts to measure. Default: all."),
    ] = None,
    peers: Annotated[
        Optional[list[str]],  # noqa: UP045
        _names_option(
            "--peers", "Other codecs to measure, or none. Default: those that are installed."
        ),
    ] = None,
    repetitions: Repetitions = 15,
    commit: CommitOption = None,
    json_path: JsonPath = None,
    plot_path: PlotPath = None,
) -> None:
    """Encode and decode: time over a copy's, GB/s of dense bytes, ratio; bits are checked first.

    Inputs are seeded Gaussians (each size at phase 0, and eight phases of the
    scale, σ = 0.02 · 2^(k/8)) and given files. Every row comes from the call
    that users make: lct.encode(t), with preset=… for the layouts that are not
    the default, and decode into a given tensor; pooled-exact, for files only, is
    encode with capacity="exact", as weights are stored. [bold]ratio[/bold] is dense bytes
    over all bytes allocated, headers and spilled chunks included, and with
    files there are sums by class of tensor. Variants take turns, buffers rotate
    past twice the L2 cache, calls under 100 µs are replayed as a CUDA graph;
    the figures are medians of the repetitions. Peers code the exponent plane
    of BF16 values, split off beforehand, with a copy of their own in turn.

    [bold]Examples[/bold]
      lct bench codec --device cpu --json codec-cpu.json
      lct bench codec --device cuda --tensors DIR --json codec-cuda.json --plot codec.png
      lct bench codec --sizes 2**20,2**24 --preset pooled --repetitions 31

    [bold]Exit codes:[/bold] 0 done, 1 failed (one wrong bit: no figures), 2 wrong usage.
    """
    import torch

    from ..bench.codec import DTYPES, LAYOUTS, all_inputs, measure_input, sum_ratios
    from ..bench.peers import measure_peer, takes
    from ..bench.results import describe_run, write_json

    check_outputs(json_path, plot_path)
    check_suffix(plot_path)
    numbers = _parse_sizes(sizes)
    layouts = [LAYOUTS[name] for name in parse_names(presets, "--preset", LAYOUTS) or LAYOUTS]
    chosen = choose_device(device)
    others, absent = _choose_peers(peers, torch.device(chosen))
    if peers and others and DTYPES[dtype] != torch.bfloat16:
        raise ValueError(f"--peers needs --dtype bfloat16, got {dtype}")
    rows: list[dict[str, Any]] = []
    with progress_bar("measure", count=True) as progress:
        for given in all_inputs(torch.device(chosen), sizes=numbers, dtype=dtype, tensors=tensors):
            what = f"{given.name} {given.dense.numel():,}"
            for layout in layouts:
                if given.is_file or not layout.files_only:
                    progress(f"{what} {layout.name}", len(rows), None)
                    rows.append(measure_input(given, layout.name, repetitions=repetitions))
            for peer in others if takes(given) else ():
                progress(f"{what} {peer.name}", len(rows), None)
                rows.append(measure_peer(given, peer, repetitions=repetitions))
    sums = sum_ratios(rows)
    _print_codec(rows)
    _print_sums(sums)
    for line in absent:
        print_line(line)
    if json_path is not None:
        head = describe_run(command_line(), chosen, commit)
        write_json(json_path, {**head, "rows": rows, "sums": sums})
    if plot_path is not None:
        from .plots import plot_codec

        plot_codec(plot_path, rows, sums)


@bench_app.command()
def optim(
    device: DeviceOption = None,
    sizes: Annotated[
        Optional[list[str]],  # noqa: UP045
        _sizes_option("2**20 on the CPU, 2**24,2**28 on CUDA"),
    ] = None,
    optimizers: Annotated[
        Optional[list[str]],  # noqa: UP045
        _names_option("--optimizer", "Optimizers: sgd, adam, adamw. Default: sgd,adamw."),
    ] = None,
    roundings: Annotated[
        Optional[list[str]],  # noqa: UP045
        _names_option(
            "--rounding",
            "Which of torch's implementations to equal: foreach, fused. Default: those whose bits "
            "torch repeats on the device.",
        ),
    ] = None,
    repetitions: Repetitions = 15,
    commit: CommitOption = None,
    json_path: JsonPath = None,
    plot_path: PlotPath = None,
) -> None:
    """Optimizer steps on compressed weight and state: time over a copy's; bits are checked first.

    One BF16 weight that lct.compress_ compressed, its state as lct.optim holds
    it, a dense gradient; what is timed is optimizer.step(). Before that, steps
    must leave the bits of torch's optimizer on dense weights, and after it what
    the timed steps left must be what as many dense steps leave. [bold]÷ floor[/bold] is time
    over the time of the bytes that a dense step moves: 2.5 copies for SGD with
    momentum, 3.5 for Adam; torch's dense steps take turns and stand beside it.
    [bold]ratio[/bold] is dense bytes over all bytes allocated, of weight and state.

    [bold]Examples[/bold]
      lct bench optim --device cpu --json optim-cpu.json
      lct bench optim --device cuda --json optim-cuda.json --plot optim.png
      lct bench optim --sizes 2**28 --optimizer sgd --rounding fused --repetitions 31

    [bold]Exit codes:[/bold] 0 done, 1 failed (one wrong bit: no figures), 2 wrong usage.
    """
    import torch

    from ..bench.optim import (
        DEFAULT_OPTIMIZERS,
        DEFAULT_SIZES,
        OPTIMIZERS,
        ROUNDINGS,
        choose_roundings,
        measure_step,
    )
    from ..bench.results import describe_run, write_json

    check_outputs(json_path, plot_path)
    check_suffix(plot_path)
    numbers = _parse_sizes(sizes)
    names = parse_names(optimizers, "--optimizer", OPTIMIZERS) or DEFAULT_OPTIMIZERS
    wanted = parse_names(roundings, "--rounding", ROUNDINGS)
    chosen = choose_device(device)
    place = torch.device(chosen)
    plan = [
        (size, name, rounding)
        for size in numbers or DEFAULT_SIZES[chosen]
        for name in names
        for rounding in choose_roundings(OPTIMIZERS[name], place, wanted)
    ]
    rows: list[dict[str, Any]] = []
    with progress_bar("measure", count=True) as progress:
        for size, name, rounding in plan:
            progress(f"{name} {rounding} {size:,}", len(rows), len(plan))
            rows.append(measure_step(name, rounding, size, place, repetitions=repetitions))
    _print_optim(rows)
    if json_path is not None:
        write_json(json_path, {**describe_run(command_line(), chosen, commit), "rows": rows})
    if plot_path is not None:
        from .plots import plot_optim

        plot_optim(plot_path, rows)


@bench_app.command()
def host(
    repetitions: Repetitions = 15,
    commit: CommitOption = None,
    json_path: JsonPath = None,
) -> None:
    """Host time of calls that do not wait for the GPU, over torch.add(a, b, out=c)'s.

    Where the host is slower than the GPU, as with small layers, this decides the
    step time. Calls on 2^16 values; a sample is the mean of 200 calls, the figures
    are medians of the repetitions.

    [bold]Example[/bold]
      lct bench host --json host.json

    [bold]Exit codes:[/bold] 0 done, 1 failed (no GPU), 2 wrong usage.
    """
    import torch

    from ..bench.host import measure_host
    from ..bench.results import describe_run, write_json

    check_outputs(json_path, None)
    device = torch.device(choose_device("cuda"))
    rows = measure_host(device, repetitions=repetitions)
    columns = ("call", "host µs", "spread µs", "÷ torch.add")
    shown = table("Host time of a call (medians)", columns, text=("call",))
    for row in rows:
        shown.add_row(
            row["call"],
            f"{row['host_us']:.2f}",
            f"{row['host_iqr_us']:.2f}",
            f"{row['over_add']:.2f}",
        )
    print_table(shown)
    if json_path is not None:
        write_json(json_path, {**describe_run(command_line(), "cuda", commit), "rows": rows})


def _choose_peers(texts: list[str] | None, device: Any) -> tuple[list[Any], list[str]]:
    """Peers to measure, and a line for each that is left out because it cannot be.

    ValueError for one that was asked for and cannot be measured.
    """
    from ..bench.peers import PEERS

    names = parse_names(texts, "--peers", (*PEERS, NO_PEERS))
    chosen, absent = [], []
    for name in PEERS if names is None else names:
        if name == NO_PEERS:
            continue
        reason = PEERS[name].missing(device)
        if reason is None:
            chosen.append(PEERS[name])
        elif names is None:
            absent.append(f"left out {name}: {reason}")
        else:
            raise ValueError(f"peer {name} cannot be measured: {reason}")
    return chosen, absent


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


def _print_codec(rows: list[dict[str, Any]]) -> None:
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
            f"{row['spilled_groups']} of {row['groups']}" if "groups" in row else "",
            row["timing"],
        )
    print_table(shown)


def _print_sums(sums: dict[str, dict[str, dict[str, Any]]]) -> None:
    if not sums:
        return
    classes = list(dict.fromkeys(name for found in sums.values() for name in found))
    shown = table(
        "Sums over the files: dense ÷ allocated bytes", ("layout", *classes), text=("layout",)
    )
    for layout, found in sums.items():
        cells = (f"{found[name]['ratio']:.4f}" if name in found else "" for name in classes)
        shown.add_row(layout, *cells)
    print_table(shown)


def _print_optim(rows: list[dict[str, Any]]) -> None:
    columns = (
        "optimizer",
        "rounding",
        "values",
        "step ÷ copy",
        "step ÷ floor",
        "dense foreach ÷ floor",
        "dense fused ÷ floor",
        "step ms",
        "copy GB/s",
        "ratio",
        "spilled",
        "timed by",
    )
    shown = table(
        "Steps on compressed weight and state next to a copy and to dense steps (medians)",
        columns,
        text=("optimizer", "rounding", "timed by"),
    )
    previous = None
    for row in rows:
        if previous not in (None, row["num_values"]):
            shown.add_section()
        previous = row["num_values"]
        shown.add_row(
            row["optimizer"],
            row["rounding"],
            f"{row['num_values']:,}",
            f"{row['step_over_copy']:.3f}",
            f"{row['step_over_floor']:.3f}",
            f"{row['dense_foreach_over_floor']:.3f}",
            f"{row['dense_fused_over_floor']:.3f}",
            f"{row['step_ms']:.4g}",
            f"{row['copy_gb_s']:.4g}",
            f"{row['ratio']:.4f}",
            f"{row['spilled_groups']} of {row['groups']}",
            row["timing"],
        )
    print_table(shown)
