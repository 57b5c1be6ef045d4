"""The ``lct`` command. One file per subcommand: parsing of arguments and printing only."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn


def main() -> None:
    """Entry point of the console script. Exit codes: 0 done, 1 failed, 2 wrong usage."""
    from .app import app

    # The default action would end the process without a clean-up: temporary files would stay.
    signal.signal(signal.SIGTERM, _terminate)
    app(prog_name="lct")


def _terminate(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
