"""What ``benchmarks/sanitize.py`` and ``counters.py`` read from the reports of NVIDIA's tools."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from scripts import ROOT, load_script


@pytest.fixture(scope="module")
def sanitize() -> Any:
    return load_script("sanitize")


@pytest.fixture(scope="module")
def counters() -> Any:
    return load_script("counters")


@pytest.mark.parametrize(
    ("report", "count"),
    [
        ("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n", 0),
        ("========= ERROR SUMMARY: 34 errors\n", 34),
        ("========= ERROR SUMMARY: 1 error\n", 1),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)\n", 2),
        ("========= ERROR SUMMARY: 0 errors\n========= ERROR SUMMARY: 3 errors\n", 3),
        ("========= COMPUTE-SANITIZER\n", None),
        ("", None),
    ],
)
def test_reports_are_counted(sanitize: Any, report: str, count: int | None) -> None:
    assert sanitize.count_reports(report) == count


@pytest.mark.parametrize(
    ("printed", "counts"),
    [
        ("....\n87 passed, 24 deselected in 6.22s\n", (87, 0)),
        ("2 failed, 85 passed, 24 deselected in 21.11s", (85, 2)),
        ("1 passed, 3 errors in 2s", (1, 3)),
        ("1 passed, 1 error in 2s", (1, 1)),
        ("12 passed in 3 s\n24 deselected in 0.53s\n", (0, 0)),
        ("", (0, 0)),
    ],
)
def test_tests_are_counted(sanitize: Any, printed: str, counts: tuple[int, int]) -> None:
    assert sanitize.count_tests(printed) == counts


def test_chosen_tests_exist(sanitize: Any) -> None:
    """Each word of a choice is in the name or the parameters of some test of its file."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    collected = subprocess.run(
        [*command, *sanitize.FILES], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for file, choice in sanitize.FILES.items():
        names = [line.partition("::")[2] for line in collected.splitlines() if file in line]
        assert names, file
        for word in set(re.findall(r"\w+", choice)) - {"and", "or"}:
            assert any(word in name for name in names), (file, word)


STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"


def test_counters_are_read(counters: Any) -> None:
    names = ["ID", "Kernel Name", *counters.METRICS.values()]
    names += [STALL.format(reason) for reason in ("wait", "barrier", "math_pipe_throttle")]
    units = [""] * len(names)
    first = ["0", "sgd_step", *["1"] * len(counters.METRICS), "0.5", "0.1", "2.5"]
    last = ["1", "sgd_step", *["1,024"] * len(counters.METRICS), "2.5", "n/a", "0.25"]
    decode = ["2", "pooled_decode", *[""] * len(counters.METRICS), "1", "2", "3"]
    other = ["3", "sweep_chunks", *["1"] * len(counters.METRICS), "1", "2", "3"]
    rows = [names, units, first, last, decode, other]
    lines = ["==PROF== Connected to process 1"]
    lines += [",".join(f'"{value}"' for value in row) for row in rows]
    lines.insert(3, "what the program prints")
    found = counters.parse(lines, 4096)
    assert [row["kernel"] for row in found] == ["pooled_decode", "sgd_step"]
    step = found[1]
    assert (step["registers"], step["instructions_a_value"]) == (1024, 8)
    assert list(step["stall_cycles"].items()) == [("wait", 2.5), ("math_pipe_throttle", 0.25)]
    assert found[0]["instructions_a_value"] is None


@pytest.mark.parametrize("name", ["sanitize", "counters"])
def test_a_missing_tool_is_said(
    name: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = request.getfixturevalue(name)
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit) as caught:
        module.main()
    assert caught.value.code == 2
    assert "must be on the PATH, found none" in capsys.readouterr().err
