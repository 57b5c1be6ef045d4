"""compute-sanitizer over GPU tests of all kernels, in small sizes: bad accesses and races.

    python benchmarks/sanitize.py --json sanitizer.json

A row is a tool and a file of tests: how many passed under it, and what it reported. The exit code
is 1 where a test fails, a tool reports anything, or a row takes longer than ``--limit``. Rows run
side by side, a process each. memcheck looks at all memory, racecheck at what warps of a block do in
shared memory.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lct.bench.results import describe_run, write_json

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck")
# By file: which of its tests, small ones that between them run every kernel.
FILES = {
    "tests/backends/test_cuda.py": "test_inputs or test_sizes",
    "tests/backends/test_cuda_lists.py": "",
    "tests/backends/test_cuda_arena.py": "given_back or being_closed or is_reserved_stays",
    "tests/optim/test_sgd_cuda.py": "hostile or graph_replay",
    "tests/optim/test_adam_cuda.py": "hostile",
    "tests/optim/test_muon_cuda.py": "hostile or spills",
}
# cuda-bindings asks the driver for functions that it need not find. Backtraces through Python keep
# frames, and what their variables hold, alive: payloads would not be dropped.
OPTIONS = ("--report-api-errors", "no", "--show-backtrace", "no")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")
_TESTS = re.compile(r"(\d+) (passed|failed|errors?)")


def run_row(sanitizer: str, tool: str, file: str, choice: str, limit_s: float) -> dict[str, Any]:
    """One row; ``reports`` is None where the tool did not come to its end."""
    with tempfile.NamedTemporaryFile("r", suffix=".txt") as log:
        command = [sanitizer, "--tool", tool, *OPTIONS, "--log-file", log.name, sys.executable]
        command += ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", file]
        command += ["-k", choice] if choice else []
        try:
            done = subprocess.run(
                command, cwd=ROOT, timeout=limit_s, capture_output=True, text=True, check=False
            )
            printed, code = done.stdout, done.returncode
        except subprocess.TimeoutExpired as error:
            printed, code = str(error), None
        found = _SUMMARY.findall(Path(log.name).read_text())
        details = Path(log.name).read_text()[:4000]
    counts = {kind.rstrip("s"): int(count) for count, kind in _TESTS.findall(printed[-400:])}
    row = {
        "tool": tool,
        "tests": file,
        "chosen": choice or "all",
        "passed": counts.get("passed", 0),
        "failed": counts.get("failed", 0) + counts.get("error", 0),
        "reports": sum(map(int, found)) if found else None,
    }
    if code or row["reports"] != 0:
        print(f"{tool} {file}: exit code {code}\n{printed[-2000:]}\n{details}", flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--limit", type=float, default=540, help="seconds a row")
    parser.add_argument("--jobs", type=int, default=len(TOOLS) * len(FILES), help="rows at a time")
    parser.add_argument("--commit", help="commit to record instead of the git checkout's")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        parser.error("compute-sanitizer must be on the PATH, found none: it comes with CUDA")
    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=True)
    todo = [(tool, *row) for tool in TOOLS for row in FILES.items()]
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda row: run_row(sanitizer, *row, options.limit), todo))
    for row in rows:
        print(
            f"{row['tool']:10} {row['tests']:38} {row['passed']:4} passed, "
            f"{row['failed']} failed, {row['reports']} reported"
        )
    if options.json is not None:
        found = re.search(r"Version (\S+)", version.stdout)
        head = describe_run("python benchmarks/sanitize.py", "cuda", options.commit)
        head["versions"]["compute-sanitizer"] = found[1] if found else None
        write_json(options.json, {**head, "rows": rows})
    clean = all(row["passed"] and not row["failed"] and row["reports"] == 0 for row in rows)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
