"""In what order the CUDA backend asks for credit and launches: needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest

from lct.backends.cuda import codec, jit
from lct.dtypes import DTYPES
from lct.errors import ArenaExhaustedError
from lct.layout import PayloadLayout
from lct.presets import PRESETS

LAYOUT = PayloadLayout(PRESETS["pooled"], DTYPES["bfloat16"], 8192 * 8, 748)


class Arena:
    """Grants ``grants`` requests, then none."""

    def __init__(self, log: list[Any], limit_chunks: int, grants: int) -> None:
        self.log, self.limit_chunks, self.grants = log, limit_chunks, grants
        self.total_chunks = 1

    def admit(self, chunks: int, stream: int) -> int:
        if not self.grants:
            raise ArenaExhaustedError("no memory; nothing was overwritten")
        self.grants -= 1
        self.log.append(f"admit {chunks}")
        return 1

    def launched(self) -> None:
        pass


class Held:
    def __init__(self, arena: Arena) -> None:
        self.arena, self.last = arena, 0

    def note(self, sequence: int) -> None:
        self.last = sequence


class Recorder:
    def __init__(self, log: list[Any], name: str) -> None:
        self.log, self.name = log, name

    def launch(self, stream: int) -> None:
        self.log.append(self.name)


def launches(
    monkeypatch: pytest.MonkeyPatch,
    limit_chunks: int,
    grants: int,
    *,
    capturing: bool = False,
    fresh: bool = False,
) -> tuple[list[Any], ArenaExhaustedError | None]:
    """What an encode of ``LAYOUT`` asks for and launches, and how it ends."""
    log: list[Any] = []
    call = codec._EncodeCall.__new__(codec._EncodeCall)
    call.args = jit.Args.from_buffer_copy(codec.template(LAYOUT))
    call.args.fresh = fresh
    call.search, call.code = Recorder(log, "search"), Recorder(log, "code")  # type: ignore
    call.kernel = type("Kernel", (), {"warps": 2})()
    call.memory = codec.SharedMemory(0, 0)
    call.worst_chunks = LAYOUT.num_groups

    def over_groups(kernel: Any, args: Any, groups: Any, *_: Any) -> Recorder:
        return Recorder(log, f"code {groups[0].first_group}-{groups[0].end_group}")

    monkeypatch.setattr(codec, "call_over_groups", over_groups)
    monkeypatch.setattr(codec, "is_capturing", lambda: capturing)
    try:
        call.launch(LAYOUT, Held(Arena(log, limit_chunks, grants)), 0)  # type: ignore
    except ArenaExhaustedError as error:
        return log, error
    return log, None


def test_the_header_is_written_when_there_is_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for a book writes it: without credit the old values would be read with it."""
    assert launches(monkeypatch, 100, 1) == (["admit 8", "search", "code"], None)
    log, error = launches(monkeypatch, 100, 0)
    assert log == [] and "nothing was overwritten" in str(error)
    log, error = launches(monkeypatch, 4, 0)
    assert log == [] and "nothing was overwritten" in str(error)


def test_pieces_say_how_far_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    log, error = launches(monkeypatch, 4, 9)
    first = ["admit 2", "search", "code 0-2", "admit 2", "code 2-4"]
    assert (log, error) == ([*first, "admit 2", "code 4-6", "admit 2", "code 6-8"], None)
    log, error = launches(monkeypatch, 4, 2)
    assert log == first
    assert "of 8 groups the first 4 have new values" in str(error)


def test_captured_encodes_in_place_keep_their_book(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that find no room in a replay keep their values, and need the book that codes them."""
    assert launches(monkeypatch, 100, 0, capturing=True) == (["code 0-8"], None)
    in_graph = launches(monkeypatch, 100, 0, capturing=True, fresh=True)
    assert in_graph == (["search", "code 0-8"], None)
