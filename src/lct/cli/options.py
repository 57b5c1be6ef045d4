"""Options that several commands share."""

from __future__ import annotations

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
