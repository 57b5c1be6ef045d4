"""Result files: complete, honest about the commit, whole."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from lct.bench import results
from lct.bench.results import describe_run, git_commit, script_line, versions, write_json


def test_head_of_a_result() -> None:
    head = describe_run("lct bench codec", "cpu")
    assert list(head) == ["command", "device", "gpu", "versions", "environment", "commit", "date"]
    assert head["command"] == "lct bench codec"
    assert head["gpu"] is None
    assert datetime.datetime.fromisoformat(head["date"]).tzinfo is not None
    assert set(versions()) == {"lct", "torch", "cuda", "python", "numpy"}


def test_the_command_of_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that was given, wherever it was run."""
    argv = ["/somewhere/benchmarks/sweep.py", "--kernels", "a,b", "--json", "a file.json"]
    monkeypatch.setattr("sys.argv", argv)
    assert script_line() == "python benchmarks/sweep.py --kernels a,b --json 'a file.json'"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"ls-files": "results.py", "rev-parse": "abc", "status": ""}, "abc"),
        ({"ls-files": "results.py", "rev-parse": "abc", "status": " M x.py"}, "abc-dirty"),
        ({"ls-files": None, "rev-parse": "abc", "status": ""}, None),
        ({"ls-files": "results.py", "rev-parse": None, "status": ""}, None),
    ],
    ids=["clean", "dirty", "in somebody else's repository", "no commit"],
)
def test_commit(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, str | None], expected: str | None
) -> None:
    monkeypatch.setattr(results, "_git", lambda verb, *_: answers[verb])
    assert git_commit() == expected
    assert describe_run("x", "cpu", commit="given")["commit"] == "given"


def test_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert git_commit() is None


def test_json_is_written_whole_or_not(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_json(path, {"ö": [1, 2.5, None]})
    assert json.loads(path.read_text(encoding="utf-8")) == {"ö": [1, 2.5, None]}
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"x": float("nan")})
    assert json.loads(path.read_text(encoding="utf-8")) == {"ö": [1, 2.5, None]}
