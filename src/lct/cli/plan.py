"""``lct plan``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal, Optional

import typer

from .options import CommitOption, JsonPath
from .output import (
    check_outputs,
    command_line,
    human_bytes,
    print_line,
    print_table,
    progress_bar,
    table,
)

DeviceName = Literal["cpu", "cuda"]


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Name (qwen3-4b, llama-3-8b, byte-gpt-cuda, …), transformers configuration "
            "(file or directory), or module:factory.",
            show_default=False,
        ),
    ],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 1024,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a batch.")] = 1,
    optimizer: Annotated[
        Literal["sgd", "adamw", "muon"], typer.Option(help="With momentum 0.9 for sgd.")
    ] = "sgd",
    step_in_backward: Annotated[
        bool, typer.Option("--step-in-backward", help="Step parameters in backward.")
    ] = False,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Layers save their inputs only.")
    ] = False,
    parts: Annotated[
        str,
        typer.Option(
            "--compress",
            metavar="PART,…",
            help="Of weights, state, activations.",
            show_default=True,
        ),
    ] = "weights,state,activations",
    device: Annotated[DeviceName, typer.Option(help="Whose kernels to plan for.")] = "cuda",
    check_device: Annotated[
        Optional[DeviceName],  # noqa: UP045 - typer reads this at run time
        typer.Option("--check-device", help="Also train two steps there, and compare."),
    ] = None,
    commit: CommitOption = None,
    json_path: JsonPath = None,
) -> None:
    """Predict the peak memory of training a model, with LCT and without.

    Two training steps are traced without values: no GPU and no memory for the
    model are needed. Payloads are taken to have the sizes of Gaussian values,
    and nothing to spill. The peak counts live tensors; on cuda also cuBLAS's
    workspaces and LCT's overflow arena before data spills, and not
    what the allocator reserves beyond them.

    [bold]Examples[/bold]
      lct plan qwen3-4b --tokens 500 --step-in-backward
      lct plan path/to/config.json --optimizer adamw --checkpointing --json plan.json
      lct plan byte-gpt-cuda --batch 16 --check-device cuda

    [bold]Exit codes:[/bold] 0 done, 1 failed (one line on stderr says why), 2 wrong usage.
    """
    import torch

    from ..bench.planning import WORKSPACE_BYTES, arena_bytes, measure_step, training_of
    from ..bench.results import describe_run, write_json
    from ..plan import PARTS, plan_memory

    check_outputs(json_path)
    chosen = frozenset(part for part in parts.split(",") if part)
    if not chosen or not chosen <= set(PARTS):
        raise ValueError(f"--compress takes parts of {', '.join(PARTS)}, got {parts!r}")
    if check_device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--check-device must be available on this machine, got 'cuda'")
    training = training_of(
        model,
        tokens=tokens,
        batch=batch,
        optimizer=optimizer,
        step_in_backward=step_in_backward,
        checkpointing=checkpointing,
    )
    planned_for = check_device or device
    arms: dict[str, dict[str, Any]] = {"dense": {}, "lct": {}}
    compressed_parts: dict[str, frozenset[str]] = {"dense": frozenset(), "lct": chosen}
    todo = len(arms) * (1 if check_device is None else 2)
    with progress_bar("trace", count=True) as progress:
        for done, (name, compressed) in enumerate(compressed_parts.items()):
            progress(f"{name}, planned", done, todo)
            planned = asdict(plan_memory(training, compressed, planned_for))
            planned["workspaces"] = WORKSPACE_BYTES if planned_for == "cuda" else 0
            planned["arena"] = arena_bytes(bool(compressed)) if planned_for == "cuda" else 0
            planned["peak"] += planned["workspaces"] + planned["arena"]
            arms[name]["planned"] = planned
        for done, (name, compressed) in enumerate(compressed_parts.items()):
            if check_device is None:
                break
            progress(f"{name}, measured", len(arms) + done, todo)
            measured = asdict(measure_step(training, compressed, torch.device(check_device)))
            arms[name]["measured"] = measured
            arms[name]["error"] = arms[name]["planned"]["peak"] / measured["peak"] - 1
    _print_plan(model, arms)
    if json_path is not None:
        settings = {
            "model": model,
            "tokens": tokens,
            "batch": batch,
            "optimizer": optimizer,
            "step_in_backward": step_in_backward,
            "checkpointing": checkpointing,
            "compress": sorted(chosen),
            "planned_for": planned_for,
        }
        head = describe_run(command_line(), check_device or "cpu", commit)
        write_json(json_path, {**head, "settings": settings, **arms})


# How the bytes of a plan are called in the table.
ROWS = {
    "weights": "weights",
    "buffers": "buffers",
    "state": "optimizer state",
    "saved": "saved by forward",
    "workspaces": "kernels' workspaces",
    "arena": "overflow arena",
    "peak": "peak",
}


def _print_plan(model: str, arms: dict[str, dict[str, Any]]) -> None:
    shown = table(f"A training step of {model}", ("", "dense", "LCT", "LCT ÷ dense"), text=("",))
    kinds = ["planned", *(["measured"] if "measured" in arms["dense"] else [])]
    for kind in kinds:
        dense, lct = arms["dense"][kind], arms["lct"][kind]
        for key, title in ROWS.items():
            if not dense.get(key) and not lct.get(key):
                continue
            ratio = f"{lct[key] / dense[key]:.3f}" if dense[key] else ""
            name = title if kind == "planned" else f"{title}, measured"
            shown.add_row(name, human_bytes(dense[key]), human_bytes(lct[key]), ratio)
        shown.add_section()
    if len(kinds) == 2:
        errors = (f"{arms[name]['error']:+.1%}" for name in ("dense", "lct"))
        shown.add_row("error of the planned peak", *errors, "")
    print_table(shown)
    phases = {name: arm["planned"]["phase"] for name, arm in arms.items()}
    saved = 1 - arms["lct"]["planned"]["peak"] / arms["dense"]["planned"]["peak"]
    print_line(
        f"planned peak {saved:.1%} lower with LCT; it is in {phases['dense']} without LCT and in "
        f"{phases['lct']} with it"
    )
