"""The longest sequence that a run completes: by doubling, then by halving what is between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .train import OUT_OF_MEMORY
from .training_run import Case

GRANULARITY = 250  # tokens
START = 1000
LIMIT = 64_000


def longest(
    completes: Callable[[int], bool],
    *,
    start: int = START,
    granularity: int = GRANULARITY,
    limit: int = LIMIT,
) -> int:
    """The greatest multiple of ``granularity`` for which ``completes``; 0 for none, ``limit`` if
    that completes too.

    ``start`` and ``limit`` are multiples of it. Holds where ``completes`` once false stays false.
    """
    good, bad = 0, start
    while completes(bad):
        good = bad
        if good >= limit:
            return limit
        bad = min(2 * good, limit)
    while bad - good > granularity:
        middle = (good + bad) // (2 * granularity) * granularity
        if completes(middle):
            good = middle
        else:
            bad = middle
    return good


class _BrokenError(Exception):
    """An attempt failed for another reason than memory."""


def search_context(
    case: Case, run: Callable[[Case], dict[str, Any]], *, start: int = START, limit: int = LIMIT
) -> dict[str, Any]:
    """The row of the longest sequence of ``case`` that completes, with all attempts.

    ``run`` gives a case's row. Where an attempt fails for another reason than memory the row is
    its own, and ``longest_sequence`` None.
    """
    rows: dict[int, dict[str, Any]] = {}

    def completes(sequence: int) -> bool:
        row = rows[sequence] = run(replace(case, sequence=sequence))
        if row["error"] not in (None, OUT_OF_MEMORY):
            raise _BrokenError
        return bool(row["completed"])

    try:
        found = longest(completes, start=start, limit=limit)
        best = rows[found or min(rows)]
    except _BrokenError:
        found, best = None, list(rows.values())[-1]
    attempts = [
        {
            "sequence": sequence,
            "completed": row["completed"],
            "peak_reserved_mib": row["peak_reserved_mib"],
        }
        for sequence, row in sorted(rows.items())
    ]
    return {
        **best,
        "longest_sequence": found,
        "granularity": GRANULARITY,
        "reached_limit": found == limit,
        "attempts": attempts,
    }
