"""``lct demo``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import typer

from .options import CommitOption, JsonPath
from .output import check_outputs, command_line, human_bytes, stderr, stdout, table

if TYPE_CHECKING:
    from ..demo import Recipe

DeviceName = Literal["auto", "cpu", "cuda"]
ARMS = {"dense": "without LCT", "lct": "with LCT"}
# Steps between two lines of progress where there is no terminal.
STEPS_A_LINE = 10
# How the classes of a report's bytes are called in the table.
CLASSES = {
    "weights": "weights",
    "optimizer_state": "optimizer state",
    "saved_activations": "saved activations",
}


def demo(
    device: Annotated[
        DeviceName, typer.Option(help="auto: cuda where there is a GPU.", show_default=True)
    ] = "auto",
    steps: Annotated[
        Optional[int],  # noqa: UP045 - typer reads this at run time
        # Two at least: the measured step is the last one, when momentum exists.
        typer.Option(min=2, help="Steps of each run (default: 50 on cpu, 200 on cuda)."),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for report and picture.")
    ] = Path("demo"),
    commit: CommitOption = None,
    json_path: JsonPath = None,
) -> None:
    """Train a GPT on real text without LCT and with it, and compare every bit.

    The text is the source of Python's standard library, found on this
    machine; the model reads and writes bytes. Both runs have the same seeds,
    deterministic kernels and SGD with momentum; the second one holds weights,
    saved activations and momentum compressed. It then compares all losses,
    weights and momentum bit by bit, and the bytes of live tensors over one
    step (on cuda: what torch's allocator has given out).

    Writes DIR/report.json and DIR/memory.png.

    [bold]Examples[/bold]
      lct demo
      lct demo --device cuda --steps 100 --output demo-cuda

    [bold]Exit codes:[/bold] 0 done: all bits are equal and the peak with LCT is
    at most 0.85 of the dense one; 1 failed, 2 wrong usage.
    """
    import torch

    from ..bench.results import describe_run, write_json
    from ..demo import build_report, load_corpus, train
    from .plots import plot_step_memory

    chosen = _device(device)
    recipe = _recipe(chosen.type, steps)
    output.mkdir(parents=True, exist_ok=True)
    report_path, picture_path = output / "report.json", output / "memory.png"
    check_outputs(report_path, picture_path, json_path)

    corpus = load_corpus()
    stdout().print(
        f"text: {corpus.num_files} files, {human_bytes(len(corpus.train))} "
        f"(held out: {human_bytes(len(corpus.held_out))})\n"
        f"model: {recipe.size.num_layers} layers of width {recipe.size.width}, "
        f"{recipe.batch} × {recipe.size.context} bytes a step, "
        f"{recipe.num_steps} steps on {_device_name(chosen)}",
        highlight=False,
    )
    with _progress(recipe.num_steps) as progress:
        dense = train(recipe, corpus, chosen, with_lct=False, on_step=progress("dense"))
        lct = train(recipe, corpus, chosen, with_lct=True, on_step=progress("lct"))

    report = build_report(dense, lct, recipe, corpus)
    head = describe_run(command_line(), str(chosen), commit)
    plot_step_memory(picture_path, report["timeline"], report["peak_bytes"])
    for path in (report_path, json_path):
        if path is not None:
            write_json(path, {**head, "threads": torch.get_num_threads(), **report})
    _print_report(report)
    stdout().print(f"wrote {report_path} and {picture_path}", highlight=False, soft_wrap=True)
    for failure in report["failures"]:
        stderr().print(f"failed: {failure}", markup=False, highlight=False, soft_wrap=True)
    if report["failures"]:
        raise typer.Exit(1)


def _device(name: DeviceName) -> Any:
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be available on this machine, got 'cuda'")
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(automatic if name == "auto" else name)


def _device_name(device: Any) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"the CPU ({torch.get_num_threads()} threads)"


def _recipe(device_type: str, steps: int | None) -> Recipe:
    from dataclasses import replace

    from ..demo import RECIPES

    recipe = RECIPES[device_type]
    return recipe if steps is None else replace(recipe, num_steps=steps)


@contextlib.contextmanager
def _progress(num_steps: int) -> Iterator[Callable[[str], Callable[[int, float, float], None]]]:
    """A bar for each run on a terminal, a line now and then elsewhere; both on stderr."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = stderr()
    with Progress(
        TextColumn("{task.description:<11}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[pace]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as bars:

        def start(arm: str) -> Callable[[int, float, float], None]:
            task = bars.add_task(ARMS[arm], total=num_steps, loss="–", pace="")

            def advance(step: int, loss: float, seconds: float) -> None:
                if console.is_terminal:
                    bars.update(task, advance=1, loss=f"{loss:.4f}", pace=f"{seconds:.2f} s/step")
                elif step % STEPS_A_LINE == 0 or step == num_steps - 1:
                    console.print(
                        f"{ARMS[arm]}: step {step + 1} of {num_steps}, "
                        f"loss {loss:.4f}, {seconds:.2f} s",
                        highlight=False,
                    )

            return advance

        yield start


def _print_report(report: dict[str, Any]) -> None:
    shown = table(
        "Training without LCT and with it", ("", "dense", "LCT", "dense ÷ LCT"), text=("",)
    )
    rows = {title: report["bytes"][key] for key, title in CLASSES.items()}
    for title, size in {**rows, "peak": report["peak_bytes"]}.items():
        if title == "peak":
            shown.add_section()
        shown.add_row(
            title,
            human_bytes(size["dense"]),
            human_bytes(size["lct"]),
            f"{size['dense'] / size['lct']:.3f}",
        )
    dense, lct = report["step_seconds"]["dense"], report["step_seconds"]["lct"]
    shown.add_row("step time", f"{dense:.3f} s", f"{lct:.3f} s", f"{dense / lct:.3f}")
    console = stdout()
    console.print(shown)
    saved = 1 - report["peak_ratio"]
    console.print(f"peak {saved:.1%} lower with LCT", highlight=False)
    losses = report["losses"]
    console.print(
        f"loss: {losses[0]:.4f} in the first step, {losses[-1]:.4f} in the last, "
        f"{report['held_out_loss']['lct']:.4f} on held-out text (nats a byte)",
        highlight=False,
    )
    for kind in ("losses", "weights", "optimizer_state"):
        word = "identical" if report[f"{kind}_identical"] else "DIFFERENT"
        digests = dict.fromkeys(report["sha256"][kind].values())
        console.print(
            f"{kind.replace('_', ' ')} {word}: SHA-256 {' and '.join(digests)}",
            highlight=False,
            soft_wrap=True,
        )
