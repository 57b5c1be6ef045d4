"""``python -m lct``: the command line."""

from .cli import main

main()
