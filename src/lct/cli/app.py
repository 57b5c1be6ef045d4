"""The application: its commands, and how an error becomes one line and an exit code."""

from __future__ import annotations

import errno
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import LctError
from .analyze import analyze
from .bench import bench_app
from .bench_show import show
from .bench_train import train
from .compress import compress
from .decompress import decompress
from .demo import demo
from .inspect import inspect
from .output import stderr
from .plan import plan

DEBUG = "debug"
# What a wrong argument, a damaged file or the system raises. Anything else is a bug of LCT: it
# shows its traceback.
EXPECTED_ERRORS = (LctError, ValueError, TypeError, OSError, MemoryError)


class OneLineErrors(TyperGroup):
    """Prints an expected error as one line on stderr and exits with 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except EXPECTED_ERRORS as error:
            broken_pipe = isinstance(error, OSError) and error.errno == errno.EPIPE
            if broken_pipe or ctx.params.get(DEBUG):
                raise
            stderr().print(
                f"error: {describe(error)}", markup=False, highlight=False, soft_wrap=True
            )
            raise typer.Exit(1) from None


def describe(error: BaseException) -> str:
    """One line: the rule that was broken and the value, or the system's words and the file."""
    if isinstance(error, OSError) and error.strerror:
        file = f": {str(error.filename)!r}" if error.filename is not None else ""
        text = f"{error.strerror}{file}"
    elif isinstance(error, MemoryError):
        text = f"out of memory{f': {error}' if str(error) else ''}"
    else:
        text = str(error) or type(error).__name__
    return " ".join(text.split())


app = typer.Typer(
    name="lct",
    cls=OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lct {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Losslessly compressed tensors: train with compressed weights, activations and state.

    Every value comes back bit for bit.

    [bold]Exit codes:[/bold] 0 done, 1 failed (one line on stderr says why), 2 wrong usage.
    """


app.command()(demo)
app.command()(compress)
app.command()(decompress)
app.command("inspect")(inspect)
app.command()(analyze)
bench_app.command()(train)
bench_app.command()(show)
app.command()(plan)
app.add_typer(bench_app, name="bench")
