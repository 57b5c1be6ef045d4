"""Time launch configurations and variants of the pooled kernels' sources on this GPU.

    python benchmarks/sweep.py --json sweep.json

A variant is a change of its row in ``backends/cuda/tuning.py`` or of a few lines of source. Times
are medians over a copy's of the same tensor (steps: over as many copies as move the bytes of the
dense step), taken in turn with it, at 2^28 values by events and at 2^24 values by replays of a CUDA
graph, those of single tensors also for what Qwen3-4B saves of 3,500 tokens, a few waves of blocks;
of kernels that take several tensors, over copies of all weights of a layer of Qwen3-4B, in two
launches as training makes them.
Bits are checked for every variant of a decode. The rows of tuning.py and docs/performance.md come
from its result files.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import lct
from lct.backends.cuda import jit, tuning
from lct.bench.results import describe_run, script_line, write_json
from lct.bench.timing import measure
from lct.tensor import decode_all, encode_all, live_tensors, sgd_all_

LARGE, SMALL, SETS = 2**28, 2**24, 8
SAVE = 3500 * 9728
# Values of a layer's weights: q, k, v, o, gate; up, down.
LAYER = (
    *((2560 * 4096, 2560 * 1024, 2560 * 1024, 4096 * 2560, 2560 * 9728),),
    *((2560 * 9728, 9728 * 2560),),
)
FLOOR_COPIES = {"sgd_step": 2.5, "adam_step": 3.5, "muon_step": 2.0}
UPDATE: dict[str, Any] = {
    "lr": 1e-7,
    "momentum": 0.9,
    "dampening": 0.0,
    "weight_decay": 0.0,
    "nesterov": False,
    "maximize": False,
    "rounding": "foreach",
    "grad_scale": None,
    "found_inf": None,
}


ADAM_UPDATE: dict[str, Any] = {
    "step": 1000.0,
    "lr": 1e-7,
    "beta1": 0.9,
    "beta2": 1 - 2**-20,  # second moments stay as they are, whatever the steps before
    "eps": 1e-8,
    "weight_decay": 1e-2,
    "decoupled_weight_decay": True,
    "maximize": False,
    "rounding": "foreach",
    "grad_scale": None,
    "found_inf": None,
}


@dataclass(frozen=True)
class Variant:
    """``launch``: fields of the kernel's LaunchConfig; ``source``: texts to replace."""

    entry: str
    name: str
    launch: dict[str, int] = dataclasses.field(default_factory=dict)
    source: tuple[tuple[str, str], ...] = ()


_PREFETCHES = ("prefetch(plane", "prefetch(first_value", "prefetch(grad", "prefetch_at_once(plane")
_NO_PREFETCH = tuple((text, f"if (0) {text}") for text in _PREFETCHES)
_LINES = (("prefetch_at_once(plane", "prefetch(plane"),)
_BULK = tuple((text, text.replace("(", "_at_once(")) for text in _PREFETCHES[:3])
_FURTHER = (("#define PREFETCH_STEPS 8", "#define PREFETCH_STEPS 16"),)
_NEARER = (("#define PREFETCH_STEPS 8", "#define PREFETCH_STEPS 4"),)


def _first_prefetch(steps: int) -> tuple[tuple[str, str], ...]:
    first = "prefetch(first_value, {} * 128 * VALUE_BYTES, lane)"
    return ((first.format("PREFETCH_STEPS"), first.format(steps)),)


_EVICT_FIRST = (
    ("*(const u32*)(plane + (step0 + k) * 128)", "__ldcs((const u32*)(plane + (step0 + k) * 128))"),
    ("*(const uint2*)((const u16*)p + i)", "__ldcs((const uint2*)((const u16*)p + i))"),
)
_CHUNK_4 = (("#define CHUNK_STEPS 8", "#define CHUNK_STEPS 4"),)
_TWO_PAIRS = (("#define PAIRS_AT_ONCE 1", "#define PAIRS_AT_ONCE 2"),)
VARIANTS = (
    *(
        variant
        for entry in ("pooled_decode", "pooled_encode")
        for variant in (
            Variant(entry, "as it is"),
            Variant(entry, "evict-first loads", source=_EVICT_FIRST),
            Variant(entry, "no prefetch", source=_NO_PREFETCH),
            Variant(entry, "prefetch 16 steps", source=_FURTHER),
            Variant(entry, "4 warps a block", {"warps": 4, "measured_min_blocks": 7}),
            Variant(entry, "16 warps a block", {"warps": 16, "measured_min_blocks": 2}),
        )
    ),
    Variant("pooled_decode", "4 steps loaded together", source=_CHUNK_4),
    *(
        Variant(entry, f"{warps} warps, {blocks} blocks{', even waves' * even}{where}", launch)
        for entry, where, shapes in (
            ("pooled_decode", "", ((4, 7), (8, 4), (8, 5), (16, 2))),
            ("pooled_decode_list", "", ((4, 7), (8, 4), (8, 5), (16, 2))),
            ("pooled_encode_list", "", ((8, 3),)),
            ("sgd_step", ", a layer", ((8, 2), (10, 2), (20, 1))),
        )
        for warps, blocks in shapes
        for even in (False, True)
        for launch in ({"warps": warps, "measured_min_blocks": blocks, "even_waves": even},)
    ),
    *(
        Variant(entry, f"FP32 from BF16, {blocks} blocks", {"other_min_blocks": blocks})
        for entry, most in (("pooled_encode_list", 3), ("pooled_decode_list", 5))
        for blocks in (most - 1, most)
    ),
    Variant("pooled_encode", "64 registers", {"measured_min_blocks": 4}),
    Variant("pooled_encode", "waves as they fall", {"even_waves": False}),
    Variant("pooled_encode", "bulk prefetch, waves as they fall", {"even_waves": False}, _BULK),
    Variant("pooled_encode", "prefetch 4 steps", source=_NEARER),
    *(
        Variant(
            "pooled_encode",
            f"{steps} steps fetched before the book is known",
            source=_first_prefetch(steps),
        )
        for steps in (16, 32, 64)
    ),
    Variant("pooled_encode", "4 warps, 6 blocks", {"warps": 4, "measured_min_blocks": 6}),
    Variant("pooled_encode", "12 warps, 2 blocks", {"warps": 12, "measured_min_blocks": 2}),
    Variant("pooled_encode", "24 warps", {"warps": 24, "measured_min_blocks": 1}),
    *(
        Variant(f"pooled_{kernel}{of}", name, source=source)
        for kernel, name, source in (
            ("decode", "prefetch line by line", _LINES),
            ("encode", "bulk prefetch", _BULK),
        )
        for of in ("", "_list")
    ),
    Variant("sgd_step", "as it is"),
    Variant("sgd_step", "no prefetch", source=_NO_PREFETCH),
    Variant("sgd_step", "prefetch 16 steps", source=_FURTHER),
    Variant("sgd_step", "bulk prefetch", source=_BULK),
    *(
        Variant("sgd_step", f"{warps} warps, {blocks} blocks", launch)
        for warps, blocks in ((8, 2), (10, 2), (16, 1), (20, 1))
        for launch in ({"warps": warps, "measured_min_blocks": blocks},)
    ),
    Variant("adam_step", "as it is"),
    Variant("adam_step", "bulk prefetch", source=_BULK),
    Variant("adam_step", "2 pairs at once", source=_TWO_PAIRS),
    Variant("adam_step", "12 warps a block", {"warps": 12}),
    Variant("adam_step", "12 warps a block, 2 pairs at once", {"warps": 12}, _TWO_PAIRS),
    *(
        Variant(
            "muon_step",
            f"{warps} warps, {blocks} blocks",
            {"warps": warps, "measured_min_blocks": blocks},
        )
        for warps, blocks in ((12, 2), (8, 2), (8, 3), (10, 2), (16, 1), (20, 1), (24, 1))
    ),
)


@contextmanager
def applied(variant: Variant) -> Iterator[None]:
    """The variant in place of the kernel as it is."""
    row, source, cached = tuning.LAUNCH[variant.entry], jit.source, jit._cached_code

    def changed(kernel: jit.Kernel, *rest: Any) -> str:
        text = source(kernel, *rest)
        if kernel.entry != variant.entry or not variant.source:
            return text
        other = text
        for old, new in variant.source:
            other = other.replace(old, new)
        if other == text:
            raise SystemExit(f"{variant.name}: none of its texts stands in {kernel.entry}")
        return other

    def forget() -> None:
        for key in [key for key in jit._loaded if key[1] == variant.entry]:
            del jit._loaded[key]
        for tensor in live_tensors():  # calls that stand ready
            tensor.layout.__dict__.pop("_cuda_ready", None)

    tuning.LAUNCH[variant.entry] = dataclasses.replace(row, **variant.launch)
    jit.source, jit._cached_code = changed, lambda *a: jit.compile_kernel(*a)[0]
    forget()
    try:
        yield
    finally:
        tuning.LAUNCH[variant.entry], jit.source, jit._cached_code = row, source, cached
        forget()


def gaussian(scale: float) -> torch.Tensor:
    """``LARGE`` BF16 values."""
    out = torch.empty(LARGE, device="cuda", dtype=torch.bfloat16)
    for piece in out.split(2**26):
        piece.copy_(torch.randn(piece.numel(), device="cuda") * scale)
    return out


class Bench:
    """Tensors of both sizes, and the calls of each kernel on them."""

    def __init__(self) -> None:
        lct.reserve_arena(2**30)
        torch.manual_seed(0)
        self.dense, self.grad = gaussian(0.02), gaussian(1e-3)
        # Moments that a constant gradient leaves as they are.
        self.momentum = self.grad / (1 - UPDATE["momentum"])
        self.out = torch.empty_like(self.dense)
        self.small = list(self.dense.split(SMALL)[:SETS])
        self.small_out = list(self.out.split(SMALL)[:SETS])
        self.small_grad = list(self.grad.split(SMALL)[:SETS])
        self.coded = lct.encode(self.dense)
        self.saved = self.dense[:SAVE]
        self.saved_coded, self.saved_out = lct.encode(self.saved), self.out[:SAVE]
        self.small_coded = [lct.encode(t) for t in self.small]
        self.weight = lct.encode(self.dense, capacity="exact")
        self.state = lct.encode(self.momentum, capacity="exact")
        self.average = lct.encode(self.grad, capacity="exact")
        # As training leaves second moments: averages over many gradients' squares.
        squares = sum(gaussian(1e-3).square_() for _ in range(16)) / 16
        self.squares = lct.encode(squares, capacity="exact")
        parts = iter(self.dense[: sum(map(sum, LAYER))].split([n for some in LAYER for n in some]))
        self.layer = [[next(parts) for _ in some] for some in LAYER]
        self.layer_coded = [[lct.encode(t, capacity="exact") for t in some] for some in self.layer]
        # As a norm saves it: FP32 that holds BF16 values.
        self.upcast = [tensor.float() for tensor in self.layer[0]]
        self.upcast_out = [torch.empty_like(tensor) for tensor in self.upcast]
        self.upcast_coded = encode_all(self.upcast, [748] * 5, [True] * 5)
        self.layer_state = [
            [lct.encode(t / 10, capacity="exact") for t in some] for some in self.layer
        ]
        self.small_average = [lct.encode(t, capacity="exact") for t in self.small_grad]
        self.small_squares = [lct.encode(t, capacity="exact") for t in squares.split(SMALL)[:SETS]]
        self.small_weight = [lct.encode(t, capacity="exact") for t in self.small]
        self.small_state = [
            lct.encode(t, capacity="exact") for t in self.momentum.split(SMALL)[:SETS]
        ]

    def calls(self, entry: str) -> tuple[Callable[[int], object], Callable[[int], object]]:
        """The call that uses kernel ``entry``, on a large tensor and on small ones."""
        if entry == "pooled_decode":
            return (
                lambda i: self.coded.decode(self.out),
                lambda i: self.small_coded[i].decode(self.small_out[i]),
            )
        if entry == "pooled_encode":
            return lambda i: lct.encode(self.dense), lambda i: lct.encode(self.small[i])
        if entry == "adam_step":
            return (
                lambda i: self.weight.adam_(self.average, self.squares, self.grad, **ADAM_UPDATE),
                lambda i: self.small_weight[i].adam_(
                    self.small_average[i], self.small_squares[i], self.small_grad[i], **ADAM_UPDATE
                ),
            )
        if entry == "muon_step":  # momentum is the gradient, and stays so
            return (
                lambda i: self.average.muon_(self.grad, momentum=0.9),
                lambda i: self.small_average[i].muon_(self.small_grad[i], momentum=0.9),
            )
        return (
            lambda i: self.weight.sgd_(self.state, self.grad, **UPDATE),
            lambda i: self.small_weight[i].sgd_(self.small_state[i], self.small_grad[i], **UPDATE),
        )

    def saved_call(self, entry: str) -> Callable[[int], object]:
        """The call that uses kernel ``entry`` on what a model saves."""
        if entry == "pooled_decode":
            return lambda i: self.saved_coded.decode(self.saved_out)
        return lambda i: lct.encode(self.saved)

    def upcast_call(self, entry: str) -> Callable[[int], object]:
        """The call that uses kernel ``entry`` on FP32 that was cast from BF16."""
        if entry == "pooled_decode_list":
            return lambda i: decode_all(self.upcast_coded)
        return lambda i: encode_all(self.upcast, [748] * 5, [True] * 5)

    def copy_upcast(self, i: int) -> None:
        for out, tensor in zip(self.upcast_out, self.upcast, strict=True):
            out.copy_(tensor)

    def layer_call(self, entry: str) -> Callable[[int], object]:
        """The calls that use kernel ``entry`` on all weights of a layer."""
        if entry == "pooled_decode_list":
            return lambda i: [decode_all(some) for some in self.layer_coded]
        if entry == "pooled_encode_list":
            return lambda i: [
                encode_all(some, [748] * len(some), [False] * len(some)) for some in self.layer
            ]
        return lambda i: [
            sgd_all_(list(zip(weights, states, strict=True)), grads, **UPDATE)
            for weights, states, grads in zip(
                self.layer_coded, self.layer_state, self.layer, strict=True
            )
        ]

    def copy_layer(self, i: int) -> None:
        for some in self.layer:
            for tensor in some:
                self.out[: tensor.numel()].copy_(tensor)

    def measure(self, variant: Variant, repetitions: int) -> dict[str, Any]:
        """One row."""
        copies = FLOOR_COPIES.get(variant.entry, 1.0)
        row: dict[str, Any] = {"kernel": variant.entry, "variant": variant.name}
        if variant.name.startswith("FP32"):
            sizes = [("layer", self.upcast_call(variant.entry), self.copy_upcast, 1)]
        elif variant.entry.endswith("_list") or variant.name.endswith("a layer"):
            sizes = [("layer", self.layer_call(variant.entry), self.copy_layer, 1)]
        else:
            large, small = self.calls(variant.entry)
            sizes = [
                ("2^28", large, lambda i: self.out.copy_(self.dense), 1),
                ("2^24", small, lambda i: self.small_out[i].copy_(self.small[i]), SETS),
            ]
            if variant.entry in ("pooled_encode", "pooled_decode"):
                call = self.saved_call(variant.entry)
                sizes.append(("save", call, lambda i: self.saved_out.copy_(self.saved), 1))
        for name, call, copy, sets in sizes:
            measured = measure(
                {"copy": copy, "call": call},
                torch.device("cuda"),
                rotations=sets,
                repetitions=repetitions,
                no_graph="captured encodes sweep once for each" if name == "layer" else None,
            )
            row[name] = measured.over("call", "copy") / copies
            row[f"{name} timing"] = measured.method
            row[f"{name} iqr"] = (
                measured.timings["call"].iqr_ms / measured.timings["copy"].median_ms
            )
        if variant.entry == "pooled_decode":
            self.coded.decode(self.out)
            if not torch.equal(self.out.view(torch.int16), self.dense.view(torch.int16)):
                raise SystemExit(f"wrong bits: {variant}")
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="PATH", help="write the rows here")
    parser.add_argument("--commit", help="commit to record instead of the git checkout's")
    parser.add_argument("--kernels", metavar="NAME,…", help="of these alone")
    parser.add_argument("--variants", metavar="NAME,…", help="whose names contain one of these")
    parser.add_argument("--repetitions", type=int, default=9)
    options = parser.parse_args()
    bench, rows = Bench(), []
    wanted = options.kernels.split(",") if options.kernels else {v.entry for v in VARIANTS}
    names = options.variants.split(",") if options.variants else [""]
    chosen = [v for v in VARIANTS if v.entry in wanted and any(n in v.name for n in names)]
    for variant in chosen:
        with applied(variant):
            row = bench.measure(variant, options.repetitions)
        rows.append(row)
        print(
            f"{row['kernel']:18} {row['variant']:32} "
            + "  ".join(
                f"{row[size]:.3f}" for size in ("2^28", "2^24", "save", "layer") if size in row
            ),
            flush=True,
        )
    if options.json:
        head = describe_run(script_line(), "cuda", options.commit)
        write_json(options.json, {**head, "rows": rows})


if __name__ == "__main__":
    main()
