"""Fewer of Python's searches for cycles while a block saves.

A save is some Python objects that live until backward. Python looks through what is new after every
700 objects, and through all objects of the process once enough of the new ones have lived for a
while: thousands of saves a step make both frequent, and no save is in a cycle.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

# Objects between two searches within a block: those of 10,000 saves. What a model leaves in cycles
# is still found, however long the block is.
THRESHOLD = 100_000


@contextlib.contextmanager
def fewer_collections() -> Iterator[None]:
    """``gc.set_threshold`` with ``THRESHOLD`` in the block, unless it is as high, or 0, already."""
    first, *others = gc.get_threshold()
    if not 0 < first < THRESHOLD:
        yield
        return
    gc.set_threshold(THRESHOLD, *others)
    try:
        yield
    finally:
        gc.set_threshold(first, *others)
