"""What a saved tensor's size costs and saves: bytes of payloads and times, by dtype and size.

    python benchmarks/thresholds.py --device cpu --json thresholds.json

A row is a dtype of saved activations at 2^10 to 2^20 Gaussian values (masks: half of them True):
stored over dense bytes, fixed parts included, which are the same on every device, and medians of
an encode and a decode as ``lct.compress_activations`` makes them. ``SAVE_RULES`` of
``nn/activations.py`` takes a dtype from the size on at which its ratio is within 1 % of that of a
large tensor.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import lct
from lct.bench.results import describe_run, script_line, write_json
from lct.bench.timing import measure
from lct.nn.bits import pack_bits
from lct.nn.room import CAPACITY_WORDS

SIZES = tuple(2**power for power in range(10, 21))
WITHIN = 0.01  # of the ratio of a large tensor


@dataclass(frozen=True)
class Kind:
    """A dtype of saved tensors. ``upcast``: FP32 that was cast from BF16."""

    name: str
    dtype: torch.dtype
    upcast: bool = False

    def values(self, count: int, device: torch.device) -> torch.Tensor:
        generator = torch.Generator().manual_seed(count)
        values = torch.randn(count, generator=generator)
        if self.dtype == torch.bool:
            return (values > 0).to(device)
        if self.upcast:
            values = values.to(torch.bfloat16)
        return values.to(self.dtype).to(device)

    def encode(self, values: torch.Tensor) -> Any:
        if self.dtype == torch.bool:
            return pack_bits(values)
        return lct.encode(values, capacity=CAPACITY_WORDS, upcast=self.upcast)


KINDS = (
    Kind("bfloat16", torch.bfloat16),
    Kind("float16", torch.float16),
    Kind("float32", torch.float32),
    Kind("float32, cast from bfloat16", torch.float32, upcast=True),
    Kind("bool", torch.bool),
)


def measure_row(kind: Kind, count: int, device: torch.device, repetitions: int) -> dict[str, Any]:
    """One row; RuntimeError for wrong bits."""
    values = kind.values(count, device)
    stored = kind.encode(values)
    if not torch.equal(stored.decode().view(torch.uint8), values.view(torch.uint8)):
        raise RuntimeError(f"{count} values of {kind.name} came back with other bits")
    calls: dict[str, Callable[[int], object]] = {
        "encode": lambda i: kind.encode(values),
        "decode": lambda i: stored.decode(),
        "copy": lambda i: values.clone(),
    }
    # The arena takes chunks only where groups spill, and a capture could not give them back.
    measured = measure(calls, device, repetitions=repetitions, no_graph="host time is a part of it")
    return {
        "kind": kind.name,
        "num_values": count,
        "dense_bytes": values.nbytes,
        "stored_bytes": stored.payload.nbytes,
        "stored_over_dense": stored.payload.nbytes / values.nbytes,
        "timing": measured.method,
        **{f"{name}_us": 1e3 * measured.timings[name].median_ms for name in calls},
    }


def thresholds(rows: list[dict[str, Any]]) -> dict[str, int]:
    """By kind: dense bytes of the least size that has the ratio of a large tensor."""
    found = {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = sorted(
            (row for row in rows if row["kind"] == kind), key=lambda row: row["num_values"]
        )
        limit = own[-1]["stored_over_dense"] * (1 + WITHIN)
        found[kind] = next(row["dense_bytes"] for row in own if row["stored_over_dense"] <= limit)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", metavar="PATH", help="write the rows here")
    parser.add_argument("--commit", help="commit to record instead of the git checkout's")
    parser.add_argument("--repetitions", type=int, default=9)
    options = parser.parse_args()
    rows = []
    for kind in KINDS:
        for count in SIZES:
            row = measure_row(kind, count, torch.device(options.device), options.repetitions)
            rows.append(row)
            print(
                f"{kind.name:28} {count:>9,}  {row['stored_over_dense']:.4f}  "
                f"encode {row['encode_us']:8.1f} us  decode {row['decode_us']:8.1f} us  "
                f"copy {row['copy_us']:7.1f} us",
                flush=True,
            )
    print(thresholds(rows))
    if options.json:
        head = describe_run(script_line(), options.device, options.commit)
        write_json(options.json, {**head, "rows": rows, "thresholds": thresholds(rows)})


if __name__ == "__main__":
    main()
