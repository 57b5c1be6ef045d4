"""Hardware counters of the pooled kernels and steps, by Nsight Compute: what bounds each of them.

    python benchmarks/counters.py --json counters.json

A row is a kernel at so many Gaussian values: instructions a value, share of issue slots used, warps
resident, bytes moved, and what a warp waits for between two instructions (in cycles, the longest
first). Kernels are run alone, with caches flushed and clocks as they are: times are those of
``lct bench``, not these. Needs ``ncu`` and the right to read counters.
"""

from __future__ import annotations

import argparse
import csv
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import lct
from lct.bench import optim
from lct.bench.codec import normal_values
from lct.bench.results import describe_run, script_line, write_json

KERNELS = ("pooled_encode", "pooled_decode", "sgd_step", "adam_step")
ROUNDING = "fused"
WARP = 32
# By field of a row. Ncu's names: https://docs.nvidia.com/nsight-compute/ProfilingGuide
METRICS = {
    "registers": "launch__registers_per_thread",
    "waves": "launch__waves_per_multiprocessor",
    "instructions": "smsp__inst_executed.sum",
    "issue_slots_pct": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "alu_pct": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "warps_resident": "sm__warps_active.avg.per_cycle_active",
    "dram_bytes": "dram__bytes.sum",
    "dram_pct": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "duration_ns": "gpu__time_duration.sum",
}
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
MOST_STALLS = 5


def run_kernels(num_values: int) -> None:
    """The child: steps as ``lct bench optim`` times them, an encode and a decode."""
    device = torch.device("cuda")
    for name in ("sgd", "adamw"):
        row = optim.OPTIMIZERS[name].timed()
        gradient = optim.make_gradient(num_values, 0, device)
        states = optim.make_states(row, gradient, 0)
        weight = optim.make_weight(num_values, 0, device)
        problem = optim.compressed_problem(row, ROUNDING, weight, gradient, states)
        problem.step(optim.FIRST_STEPS + 1)
    dense = normal_values(num_values, optim.WEIGHT_SCALE, optim.DTYPE, device, optim.SEED)
    for _ in range(2):
        lct.encode(dense).decode()
    torch.cuda.synchronize()


def parse(lines: Iterable[str], num_values: int) -> list[dict[str, Any]]:
    """Rows from ncu's raw page as CSV: the last launch of each kernel. None for what it lacks."""
    # What the program prints stands between ncu's own lines.
    names, _units, *launches = csv.reader(line for line in lines if line.startswith('"'))
    rows = {}
    for launch in launches:
        values = dict(zip(names, launch, strict=True))
        row: dict[str, Any] = {"kernel": values["Kernel Name"], "num_values": num_values}
        for field, metric in METRICS.items():
            row[field] = _number(values.get(metric))
        count = row.pop("instructions")
        row["instructions_a_value"] = None if count is None else count * WARP / num_values
        stalls = {
            found[1]: cycles
            for name, value in values.items()
            if (found := _STALL.fullmatch(name)) and (cycles := _number(value)) is not None
        }
        longest = sorted(stalls.items(), key=lambda item: -item[1])[:MOST_STALLS]
        row["stall_cycles"] = dict(longest)
        rows[row["kernel"]] = row
    return [rows[name] for name in KERNELS if name in rows]


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--values", type=int, default=2**26)
    parser.add_argument("--commit", help="commit to record instead of the git checkout's")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_kernels(options.values)
        return 0
    ncu = shutil.which("ncu")
    if ncu is None:
        parser.error("ncu (Nsight Compute) must be on the PATH, found none: it comes with CUDA")
    stalls = "regex:smsp__average_warps_issue_stalled_.*_per_issue_active"
    with tempfile.NamedTemporaryFile("r", suffix=".csv") as log:
        command = [ncu, "--clock-control", "none", "--csv", "--page", "raw", "--log-file", log.name]
        command += ["--kernel-name", f"regex:^({'|'.join(KERNELS)})$"]
        command += ["--metrics", ",".join([*METRICS.values(), stalls])]
        command += [sys.executable, __file__, "--child", "--values", str(options.values)]
        subprocess.run(command, check=True)
        rows = parse(Path(log.name).read_text().splitlines(), options.values)
    if len(rows) != len(KERNELS):
        print(f"expected rows of {', '.join(KERNELS)}, got {[row['kernel'] for row in rows]}")
        return 1
    for row in rows:
        counts = {name: value for name, value in row.items() if isinstance(value, float)}
        print(row["kernel"], *(f"{name} {value:,.1f}" for name, value in counts.items()), sep="  ")
        print("  waits", *(f"{name} {v:.2f}" for name, v in row["stall_cycles"].items()), sep="  ")
    if options.json is not None:
        head = describe_run(script_line(), "cuda", options.commit)
        write_json(options.json, {**head, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
