"""compute-sanitizer over GPU tests of all kernels, in small sizes: bad accesses and races.

    python benchmarks/sanitize.py --json sanitizer.json

A row is a tool and a file of tests: how many passed under it, and what it reported. The exit code
is 1 where a test fails, a tool reports anything, or a row takes longer than ``--limit``. memcheck
looks at all memory, racecheck at what warps of a block do in shared memory.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lct.bench.results import describe_run, script_line, write_json

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck")
# By file: which of its tests, small ones that between them run every kernel.
FILES = {
    "tests/backends/test_cuda.py": "test_inputs or test_sizes or test_capacities",
    "tests/backends/test_cuda_lists.py": "hostile or captured or alignment or turn or 17",
    "tests/backends/test_cuda_arena.py": "memory_comes_back or keeps_its_segment",
    "tests/optim/test_sgd_cuda.py": "hostile_gradients and 200 and (random or nan) or graph_replay",
    "tests/optim/test_adam_cuda.py": "hostile_gradients and 200 and (random or nan)",
    "tests/optim/test_muon_cuda.py": "hostile_gradients and 200 and (random or nan) or spills",
}
# cuda-bindings asks the driver for functions that it need not find. Backtraces through Python keep
# frames, and what their variables hold, alive: payloads would not be dropped.
OPTIONS = ("--report-api-errors", "no", "--show-backtrace", "no")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) ")
_TESTS = re.compile(r"(\d+) (passed|failed|error)")


def run_row(sanitizer: str, tool: str, file: str, choice: str, limit_s: float) -> dict[str, Any]:
    """One row; ``reports`` is None where the tool did not come to its end."""
    started = time.monotonic()
    with tempfile.NamedTemporaryFile("r", suffix=".txt") as log:
        command = [sanitizer, "--tool", tool, *OPTIONS, "--log-file", log.name, sys.executable]
        command += ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", file]
        command += ["-k", choice] if choice else []
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            printed, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tests are a child of the tool
            printed, _ = process.communicate()
        code = process.returncode
        report = Path(log.name).read_text()
    passed, failed = count_tests(printed)
    row = {
        "tool": tool,
        "tests": file,
        "chosen": choice or "all",
        "passed": passed,
        "failed": failed,
        "reports": count_reports(report),
    }
    if code or row["reports"] != 0:
        print(f"{tool} {file}: exit code {code}\n{printed[-2000:]}\n{report[:4000]}", flush=True)
    print(
        f"{row['tool']:10} {row['tests']:38} {row['passed']:4} passed, {row['failed']} failed, "
        f"{row['reports']} reported, {time.monotonic() - started:.0f} s",
        flush=True,
    )
    return row


def count_tests(printed: str) -> tuple[int, int]:
    """(passed, failed) by pytest's last line; an error of a fixture is a failure."""
    counts = {
        kind: int(count) for count, kind in _TESTS.findall(printed.strip().rpartition("\n")[2])
    }
    return counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0)


def count_reports(report: str) -> int | None:
    """What a tool has reported, of all processes; None where it did not come to its end."""
    found = _SUMMARY.findall(report)
    return sum(map(int, found)) if found else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--limit", type=float, default=540, help="seconds a row")
    parser.add_argument("--jobs", type=int, default=2, help="rows at a time")
    parser.add_argument("--tool", choices=TOOLS, help="this one alone")
    parser.add_argument("--commit", help="commit to record instead of the git checkout's")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        parser.error("compute-sanitizer must be on the PATH, found none: it comes with CUDA")
    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=True)
    tools = [options.tool] if options.tool else TOOLS
    todo = [(tool, *row) for tool in tools for row in FILES.items()]
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda row: run_row(sanitizer, *row, options.limit), todo))
    if options.json is not None:
        found = re.search(r"Version (\S+)", version.stdout)
        head = describe_run(script_line(), "cuda", options.commit)
        head["versions"]["compute-sanitizer"] = found[1] if found else None
        write_json(options.json, {**head, "rows": rows})
    clean = all(row["passed"] and not row["failed"] and row["reports"] == 0 for row in rows)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
