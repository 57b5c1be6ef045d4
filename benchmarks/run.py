"""All measurements of the documents, or some: each a command, a result file and a limit of time.
Run it in the project's root.

    python benchmarks/run.py --list
    python benchmarks/run.py codec optim train-qwen3-4b-lean-500 --out benchmarks/results

Files are called after the measurement, the GPU and the date. What fails or takes too long leaves no
file, is named at the end, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Measurement:
    """``arguments`` of ``lct``, without ``--json`` and ``--commit``; ``limit_s`` for all of it.

    ``script``: what is run instead of ``lct``. A GPU is needed unless ``cpu``.
    """

    name: str
    arguments: str
    limit_s: int
    script: Path | None = None
    cpu: bool = False

    def command(self, path: Path, commit: str | None) -> list[str]:
        """What is run to write ``path``."""
        start = [str(self.script)] if self.script is not None else ["-m", "lct"]
        more = ["--commit", commit] if commit is not None else []
        return [sys.executable, *start, *shlex.split(self.arguments), *more, "--json", str(path)]


_QWEN = "bench train qwen3-4b"
_24GIB = "--memory-limit 24GiB --expandable-segments --warm-up 2 --steps 2"
MEASUREMENTS = {
    row.name: row
    for row in (
        Measurement("codec", "bench codec --device cuda", 180),
        Measurement("optim", "bench optim --device cuda", 90),
        Measurement("host", "bench host", 60),
        Measurement("demo", "demo --device cuda", 120),
        Measurement("thresholds", "--device cuda", 60, script=FOLDER / "thresholds.py"),
        Measurement("counters", "", 120, script=FOLDER / "counters.py"),
        Measurement("sanitizer", "", 900, script=FOLDER / "sanitize.py"),
        Measurement(
            "plan-qwen3-4b-500",
            "plan qwen3-4b --tokens 500 --step-in-backward --check-device cuda",
            120,
        ),
        *(
            Measurement(
                f"train-qwen3-4b-lean-{tokens}",
                f"{_QWEN} --sequence {tokens} --peak-items --variants {variants}",
                300,
            )
            for tokens, variants in (
                (500, "dense,lct-weights-state,lct-all,lct-in-graphs,recompute,lct-all+recompute"),
                (1000, "dense,lct-all,lct-in-graphs"),
            )
        ),
        # What one would take instead; 8-bit momentum (lossy) needs lct-torch[peers].
        Measurement(
            "train-qwen3-4b-alternatives-500",
            f"{_QWEN} --sequence 500 --variants dense,lct-activations,lct-all,save-on-cpu,sgd-8bit",
            200,
        ),
        *(
            Measurement(
                f"train-qwen3-4b-eager-pairs-{tokens}",
                f"{_QWEN} --configuration eager --sequence {tokens} --pairs 10 "
                f"--variants {variants}",
                200,
            )
            for tokens, variants in (
                (500, "dense,hooks-alone,lct-weights-state,lct-all,lct-large"),
                (1000, "dense,lct-weights-state,lct-all"),
                (3500, "dense,lct-all"),
            )
        ),
        Measurement(
            "train-qwen3-4b-eager-500",
            f"{_QWEN} --configuration eager --sequence 500 --peak-items "
            "--variants dense,lct-weights-state,lct-all",
            150,
        ),
        *(
            Measurement(
                f"train-qwen3-4b-captured-{name}",
                f"{_QWEN} --configuration {configuration} --sequence {tokens} --cuda-graph "
                f"--variants {variants}",
                150,
            )
            for name, configuration, tokens, variants in (
                ("500", "lean", 500, "dense,lct-weights-state,lct-all"),
                ("eager-500", "eager", 500, "dense,lct-weights-state,lct-all"),
                ("eager-3500", "eager", 3500, "dense,lct-all"),
            )
        ),
        *(
            Measurement(
                f"train-qwen3-4b-identity-{tokens}",
                f"{_QWEN} --configuration eager,lean --sequence {tokens} --identity "
                "--expandable-segments --variants lct-all,lct-in-graphs",
                400,
            )
            for tokens in (500, 3500)
        ),
        Measurement(
            "train-qwen3-4b-recompute-3500",
            f"{_QWEN} --sequence 3500 --variants recompute,lct-all+recompute",
            120,
        ),
        Measurement(
            "train-qwen3-4b-context-24gib-lct",
            f"{_QWEN} --context-search --sequence 4250 {_24GIB} --variants lct-all,lct-in-graphs",
            300,
        ),
        Measurement(
            "train-qwen3-4b-context-24gib-dense",
            f"{_QWEN} --context-search --sequence 1500 {_24GIB} --variants dense",
            120,
        ),
        Measurement(
            "train-models-24gib",
            "bench train --model-search --memory-limit 24GiB --expandable-segments "
            "--variants recompute,lct-all+recompute",
            600,
        ),
        Measurement(
            "train-nanogpt-162m-lean",
            "bench train nanogpt-162m --micro-batch 32 --micro-steps 4 --variants "
            "dense,lct-all,budget-0.9,budget-0.5,budget-0.1,budget-0,lct-all+budget-0.9,"
            "lct-all+budget-0.5,lct-all+budget-0.1,lct-all+budget-0",
            360,
        ),
        Measurement(
            "train-nanogpt-162m-configurations",
            "bench train nanogpt-162m --configuration eager,eager-chunked,layers,lean,whole,"
            "whole-chunked --micro-batch 8 --micro-steps 2 --steps 3 --warm-up 2 --optimizer muon "
            "--identity --variants lct-all",
            500,
        ),
        Measurement(
            "train-nanogpt-162m-identity-lean",
            "bench train nanogpt-162m --micro-batch 32 --micro-steps 4 --identity "
            "--expandable-segments --variants lct-all,lct-in-graphs",
            200,
        ),
        Measurement(
            "train-nanogpt-162m-identity",
            "bench train nanogpt-162m --configuration eager --micro-batch 16 --micro-steps 1 "
            "--steps 200 --identity --variants lct-all",
            300,
        ),
        Measurement("codec-cpu", "bench codec --device cpu --tensors tests/data", 600, cpu=True),
        Measurement("optim-cpu", "bench optim --device cpu", 600, cpu=True),
        Measurement("demo-cpu", "demo --device cpu", 600, cpu=True),
        *(
            Measurement(
                f"plan-byte-gpt-{optimizer}-cpu",
                f"plan byte-gpt-cpu --optimizer {optimizer} --batch 4 --tokens 256 --device cpu "
                "--check-device cpu",
                120,
                cpu=True,
            )
            for optimizer in ("sgd", "adamw")
        ),
        Measurement("analyze-tensors-cpu", "analyze --tensors tests/data", 120, cpu=True),
        Measurement(
            "thresholds-cpu", "--device cpu", 120, script=FOLDER / "thresholds.py", cpu=True
        ),
    )
}


def result_path(measurement: Measurement, folder: Path) -> Path:
    """Where the figures of a measurement go: ``codec-H200-2026-12-01.json``."""
    device = "CPU"
    if not measurement.cpu:
        import torch

        if not torch.cuda.is_available():
            raise ValueError(f"{measurement.name} needs a CUDA GPU, found none")
        device = torch.cuda.get_device_name().split()[-1]
    name = measurement.name.removesuffix("-cpu")
    return folder / f"{name}-{device}-{datetime.date.today()}.json"


def run(measurement: Measurement, folder: Path, commit: str | None) -> str | None:
    """Why there is no result; None where there is one."""
    try:
        path = result_path(measurement, folder)
        command = measurement.command(path, commit)
        done = subprocess.run(command, timeout=measurement.limit_s, check=False)
    except subprocess.TimeoutExpired:
        return f"took longer than {measurement.limit_s} s"
    except ValueError as error:
        return str(error)
    return None if done.returncode == 0 else f"exit code {done.returncode}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to measure; all by default")
    parser.add_argument("--list", action="store_true", help="list them and run none")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the result files")
    parser.add_argument("--commit", help="commit to record instead of the git checkout's")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(MEASUREMENTS))
    if unknown:
        parser.error(f"NAME must be one of {', '.join(MEASUREMENTS)}, got {', '.join(unknown)}")
    chosen = [MEASUREMENTS[name] for name in options.names or MEASUREMENTS]
    if options.list:
        for row in chosen:
            what = row.script.name if row.script is not None else "lct"
            print(f"{row.name:36} {what} {row.arguments}")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    failed = {}
    for number, row in enumerate(chosen, start=1):
        print(f"[{number}/{len(chosen)}] {row.name}: {row.arguments}", flush=True)
        start = time.monotonic()
        reason = run(row, options.out, options.commit)
        print(f"{reason or 'done'}, {time.monotonic() - start:.0f} s", flush=True)
        if reason is not None:
            failed[row.name] = reason
    for name, reason in failed.items():
        print(f"no result: {name}: {reason}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
