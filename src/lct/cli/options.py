"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, Optional

import typer

PresetName = Literal["clean", "medium", "high", "pooled"]
DistributionName = Literal["gaussian", "laplace", "power-law", "log-normal"]

JsonPath = Annotated[
    Optional[Path],  # noqa: UP045 - typer reads this at run time
    typer.Option("--json", metavar="PATH", help="Write the figures as JSON."),
]
PlotPath = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--plot", metavar="PATH", help="Draw them; the suffix says how (.png, .svg, .pdf)."
    ),
]
PresetOption = Annotated[
    Optional[PresetName],  # noqa: UP045
    typer.Option("--preset", help="Layout of the streams (default: pooled).", show_default=False),
]
DistributionOption = Annotated[
    Optional[DistributionName],  # noqa: UP045
    typer.Option(
        "--distribution",
        help="Use books of this family only (default: the best of all).",
        show_default=False,
    ),
]
CommitOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--commit",
        help="Commit to record instead of the git checkout's.",
        show_default=False,
    ),
]
OutputPath = Annotated[
    Path, typer.Option("--output", "-o", metavar="OUT", help="File to write.", show_default=False)
]
Force = Annotated[
    bool,
    typer.Option(
        "--force/--no-clobber",
        "-f/-n",
        help="Replace OUT where it exists (in one step), or refuse to.",
    ),
]
DeviceOption = Annotated[
    Optional[Literal["cpu", "cuda"]],  # noqa: UP045 - typer reads this at run time
    typer.Option("--device", help="Default: cuda where there is a GPU.", show_default=False),
]


def choose_device(device: str | None) -> str:
    """``device``, or cuda where there is a GPU; ValueError for cuda without one."""
    import torch

    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda needs a CUDA GPU and a CUDA build of torch, found none")
    return chosen


def parse_names(texts: list[str] | None, flag: str, allowed: Iterable[str]) -> list[str] | None:
    """Names from ``a,b``, each once; None for none given. Exit code 2 for others."""
    if not texts:
        return None
    known = list(allowed)
    names = list(dict.fromkeys(name.strip() for name in ",".join(texts).split(",")))
    for name in names:
        if name not in known:
            raise typer.BadParameter(
                f"must be among {', '.join(known)}, got {name!r}", param_hint=flag
            )
    return names
