"""lct bench train: rows of every variant, LCT's bits those of the dense run, searches, sizes."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import lct
from lct.bench import isolate, profile, tokens, train, training_run
from lct.bench.isolate import ChildError, run_isolated
from lct.bench.models.causal_lm import CausalLm, count_parameters, materialize
from lct.bench.models.nanogpt import SIZES
from lct.bench.models.transformers_models import SHAPES, TransformersLm
from lct.bench.peak import items_at_peak
from lct.bench.search import longest, search_context
from lct.bench.tokens import load_tokens
from lct.bench.train import (
    OUT_OF_MEMORY,
    differences,
    is_out_of_memory,
    measure,
    measure_apart,
    measure_pairs,
)
from lct.bench.training_run import MODELS, Case, Run, build_model
from lct.bench.variants import (
    CONFIGURATIONS,
    DEFAULT_VARIANTS,
    LOSSY_OPTIMIZERS,
    SEARCH_VARIANTS,
    VARIANTS,
    OptimizerRow,
    compile_,
    from_host,
    to_host,
)
from lct.cli import bench_train
from lct.cli.app import app
from lct.cli.plots import _pareto_front
from lct.optim import step_in_backward
from training import assert_same_bits, assert_same_model

torch.set_num_threads(1)
RANDOM = load_tokens("random")
CASE = Case(
    *("qwen3-tiny", "eager", "dense", 24),
    device="cpu",
    warm_up=1,
    steps=1,
    identity=True,
    backend="aot_eager",
)
FIRST_KEYS = (
    *("model", "configuration", "variant", "sequence", "micro_batch"),
    *("peak_allocated_mib", "peak_active_mib", "peak_reserved_mib"),
    *("step_ms_median", "step_ms_iqr", "gpu_busy_ms", "tokens_per_s", "loss_sha256"),
)
LOSSLESS = [name for name in DEFAULT_VARIANTS if name in VARIANTS and not VARIANTS[name].optimizer]


def check_row(row: dict[str, Any], case: Case) -> None:
    assert tuple(row)[: len(FIRST_KEYS)] == FIRST_KEYS
    assert row["completed"] is True and row["error"] is None
    assert (row["model"], row["variant"]) == (case.model, case.variant)
    assert row["step_ms_median"] > 0
    seconds = row["step_ms_median"] / 1e3
    tokens_a_step = case.sequence * case.micro_batch * case.micro_steps
    assert row["tokens_per_s"] == pytest.approx(tokens_a_step / seconds)
    assert len(row["loss_sha256"]) == 64
    assert row["weights_mib"] > 0 and row["state_mib"] > 0
    assert len(row["losses"]) >= case.warm_up + case.steps
    assert all(math.isfinite(loss) for loss in row["losses"])
    assert ("graphs" in row) == (CONFIGURATIONS[case.configuration].compiled != "none")
    json.dumps(row, allow_nan=False)


@pytest.fixture(scope="module", autouse=True)
def of_the_size_of_the_models() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_run, "HELD_OUT_BATCHES", 1)
        # Otherwise all of their gradients would wait for the end of backward.
        stepping = functools.partial(step_in_backward, batch_bytes=4096)
        patch.setattr(training_run, "step_in_backward", stepping)
        yield


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    names = [*LOSSLESS, "lct-weights-state+recompute", "hooks-alone"]
    return {name: measure(replace(CASE, variant=name), RANDOM) for name in names}


def test_rows(rows: dict[str, dict[str, Any]]) -> None:
    for name, row in rows.items():
        check_row(row, replace(CASE, variant=name))
        assert ("activations" in row) == VARIANTS[name].storage.activations


def test_lct_has_the_bits_of_the_run_without(rows: dict[str, dict[str, Any]]) -> None:
    assert differences(list(rows.values())) == []
    for name, row in rows.items():
        for key in ("loss_sha256", "weights_sha256", "state_sha256", "validation_loss"):
            assert row[key] == rows["dense"][key], name


def test_compression_and_recompute_take_less_memory(rows: dict[str, dict[str, Any]]) -> None:
    peaks = {name: row["peak_allocated_mib"] for name, row in rows.items()}
    assert peaks["lct-all+recompute"] < peaks["lct-all"] < peaks["dense"]
    assert peaks["lct-all+recompute"] < peaks["recompute"] < peaks["dense"]
    held = {name: row["weights_mib"] + row["state_mib"] for name, row in rows.items()}
    assert held["lct-all"] < 0.85 * held["dense"] == 0.85 * held["lct-activations"]


def test_a_difference_is_seen(rows: dict[str, dict[str, Any]]) -> None:
    changed = [rows["dense"], {**rows["lct-all"], "state_sha256": "0"}]
    (line,) = differences(changed)
    assert "state_sha256 of lct-all" in line
    (line,) = differences([rows["lct-all"]])
    assert "lct-all: it and dense must both complete" in line
    failed = {**rows["dense"], "completed": False}
    assert len(differences([failed, rows["lct-all"]])) == 1


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_nanogpt_with_added_gradients(optimizer: str) -> None:
    text = load_tokens("bytes")
    case = replace(*(CASE,), model="nanogpt-tiny", optimizer=optimizer, micro_steps=2)
    found = [measure(replace(case, variant=name), text) for name in ("dense", "lct-all")]
    for row, name in zip(found, ("dense", "lct-all"), strict=True):
        check_row(row, replace(case, variant=name))
        assert row["tokens"] == "bytes" and len(row["tokens_sha256"]) == 64
    assert differences(found) == []


def test_gradients_of_micro_batches_add_up_to_one_step() -> None:
    case = replace(CASE, model="nanogpt-tiny", micro_steps=3)
    run = Run(case, RANDOM)
    before = [p.detach().clone() for p in run.model.parameters()]
    batches = run.batches()
    losses = [float(run.model(batch).detach()) / 3 for batch in batches]
    run.step(batches)
    assert float(run.losses[0]) == pytest.approx(sum(losses), rel=1e-2)
    assert all(p.grad is None for p in run.model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))


COMPILED = replace(
    CASE, model="nanogpt-tiny", configuration="lean", sequence=16, num_layers=1, identity=False
)


def test_compiled_layers() -> None:
    dense = measure(COMPILED, RANDOM)
    check_row(dense, COMPILED)
    assert dense["peak_allocated_mib"] is None  # not seen by a dispatch mode
    assert dense["graphs"] == 1
    recompute = measure(replace(COMPILED, variant="recompute"), RANDOM)
    assert recompute["loss_sha256"] == dense["loss_sha256"]


def test_compiled_as_a_whole_with_a_budget() -> None:
    # A backend that partitions as Inductor does, and needs no C++ compiler.
    case = replace(
        *(COMPILED,),
        configuration="whole",
        variant="budget-0.5",
        backend="aot_eager_decomp_partition",
    )
    with pytest.MonkeyPatch.context() as patch:
        seen: list[float] = []
        patch.setattr(Run, "next_step", lambda run: (seen.append(budget()), step(run))[1])
        check_row(measure(case, RANDOM), case)
    assert seen == [0.5]
    assert budget() == 1.0


def budget() -> float:
    import torch._functorch.config

    return torch._functorch.config.activation_memory_budget


step = Run.next_step


@pytest.mark.parametrize("same_rounding", [False, True])
def test_what_is_compiled(same_rounding: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda module, **options: calls.append((type(module).__name__, options)),
    )
    model = build_model("nanogpt-tiny")
    for row in CONFIGURATIONS.values():
        compile_(model, row, "inductor", same_rounding=same_rounding)
    names = [name for name, _ in calls]
    assert names == ["Block"] * 4 + ["NanoGpt"] * 2
    expected = {"emulate_precision_casts": True} if same_rounding else None
    for _, options in calls:
        assert (options.get("options"), options["dynamic"]) == (expected, False)


def test_chunks_give_the_loss_of_all_logits_at_once() -> None:
    for name in ("qwen3-tiny", "nanogpt-tiny"):
        model = build_model(name, 1)
        materialize(model, torch.device("cpu"), seed=1)
        batch = RANDOM.batch(1, 33, model.vocabulary, seed=2)
        if name == "qwen3-tiny":
            # Transformers shifts the labels within the sequence: one target fewer.
            plain = model(batch)
            model.chunk_tokens = 7
            chunked = model(batch[:, :-1])
        else:
            plain = model(batch)
            model.chunk_tokens = 7
            chunked = model(batch)
        assert float(chunked.detach()) == pytest.approx(float(plain.detach()), rel=2e-3)


@pytest.mark.parametrize("name", [name for name in MODELS if name in (*SHAPES, *SIZES)])
def test_sizes_are_the_public_ones(name: str) -> None:
    row = SHAPES[name] if name in SHAPES else SIZES[name]
    model = build_model(name)
    assert all(p.device.type == "meta" for p in model.parameters())
    assert count_parameters(model) == row.num_parameters
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    parts = {id(p) for part in model.parts() for p in part.parameters()}
    assert parts == {id(p) for p in model.parameters()}


def test_weights_made_part_by_part_are_the_same_compressed() -> None:
    seen: list[int] = []

    def compress(part: torch.nn.Module) -> None:
        # No other part is dense any more.
        seen.append(sum(p.device.type != "meta" for p in model.parameters()))
        lct.compress_(part)

    model: CausalLm = build_model("qwen3-tiny")
    materialize(model, torch.device("cpu"), seed=3, on_part=compress)
    assert seen == sorted(seen) and len(set(seen)) == len(seen)
    dense = build_model("qwen3-tiny")
    materialize(dense, torch.device("cpu"), seed=3)
    assert_same_model(dense, model)
    assert model.head.weight is model.model.model.embed_tokens.weight  # type: ignore[union-attr]
    kinds = {p.dim(): type(p) for p in model.parameters()}
    assert kinds[2] is lct.CompressedWeight


def limited(limit: int) -> Callable[[int], bool]:
    def completes(sequence: int) -> bool:
        tried.append(sequence)
        return sequence <= limit

    tried: list[int] = []
    completes.tried = tried  # type: ignore[attr-defined]
    return completes


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(0, 0), (249, 0), (250, 250), (999, 750), (1000, 1000), (4400, 4250), (10**9, 8000)],
)
def test_longest(limit: int, expected: int) -> None:
    completes = limited(limit)
    assert longest(completes, limit=8000) == expected
    tried = completes.tried  # type: ignore[attr-defined]
    assert len(set(tried)) == len(tried) <= 9
    assert all(n % 250 == 0 for n in tried)


def test_context_search_on_a_card_that_is_full_at_1600_tokens() -> None:
    def run(case: Case) -> dict[str, Any]:
        good = case.sequence <= 1600
        size = float(case.sequence) if good else None
        error = None if good else OUT_OF_MEMORY
        return {
            "sequence": case.sequence,
            "completed": good,
            "peak_reserved_mib": size,
            "error": error,
        }

    found = search_context(CASE, run)
    assert (found["longest_sequence"], found["reached_limit"]) == (1500, False)
    assert found["peak_reserved_mib"] == 1500
    assert [a["sequence"] for a in found["attempts"] if not a["completed"]] == [1750, 2000]
    assert search_context(CASE, run, limit=1500)["reached_limit"] is True
    none = search_context(
        CASE, lambda case: {**run(case), "completed": False, "error": OUT_OF_MEMORY}
    )
    assert none["longest_sequence"] == 0

    broken = search_context(CASE, lambda case: {**run(case), "completed": False, "error": "Bug: x"})
    assert broken["longest_sequence"] is None and broken["error"] == "Bug: x"
    assert len(broken["attempts"]) == 1


def test_a_search_begins_where_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def run(case: Case, tokens: Any) -> dict[str, Any]:
        tried.append(case.sequence)
        good = case.sequence <= 4250
        error = None if good else OUT_OF_MEMORY
        return {"completed": good, "peak_reserved_mib": None, "error": error}

    monkeypatch.setattr(train, "measure_apart", run)
    for sequences, first in (([4000], 4000), (None, 1000)):
        tried.clear()
        kind, search = bench_train._measurement(None, True, sequences)
        assert (kind, search(CASE, RANDOM)["longest_sequence"]) == ("searches", 4250)
        assert tried[0] == first


@pytest.mark.parametrize(
    ("raised", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (lct.ArenaExhaustedError("no chunks"), True),
        (RuntimeError("bug"), False),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_out_of_memory_is_a_result(
    raised: Exception, is_memory: bool, wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        if wrapped:
            raise ValueError("while stepping") from raised
        raise raised

    monkeypatch.setattr(Run, "next_step", fail)
    assert is_out_of_memory(raised) is is_memory
    row = measure_apart(CASE, RANDOM)
    assert tuple(row)[: len(FIRST_KEYS)] == FIRST_KEYS
    assert row["completed"] is False
    assert (row["error"] == OUT_OF_MEMORY) is is_memory
    if not is_memory:
        assert "fail" in row["traceback"]
        with pytest.raises((RuntimeError, ValueError)):
            measure(CASE, RANDOM)


def test_a_loss_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"losses must be finite.*step 1: nan"):
        measure(replace(CASE, lr=math.inf, model="nanogpt-tiny", sequence=8), RANDOM)


def test_pairs() -> None:
    row = measure_pairs(replace(CASE, variant="lct-all", identity=False), RANDOM, 2)
    assert row["base"] == "dense" and row["pairs"] == 2
    assert row["loss_sha256"] == row["base_loss_sha256"]
    assert row["first_difference"] is None
    assert row["ratio_median"] > 0 and row["gpu_busy_ratio"] is None
    control = measure_pairs(replace(CASE, variant="dense", identity=False), RANDOM, 2)
    assert control["base"] == "dense" and control["first_difference"] is None
    assert control["loss_sha256"] == row["base_loss_sha256"]


def test_variants_in_pairs() -> None:
    wanted = ["dense", "hooks-alone", "recompute", "save-on-cpu", "lct-all", "lct-all+recompute"]
    chosen = bench_train._with_counterparts(wanted, identity=False, pairs=True)
    assert chosen == ["dense", "hooks-alone", "lct-all", "lct-all+recompute"]


def test_pairs_say_where_losses_part(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([[1.0, 2.0, 3.0], [1.0, 2.5, 3.0]])
    monkeypatch.setattr(Run, "loss_values", lambda run: next(losses))
    row = measure_pairs(replace(CASE, variant="lct-all", identity=False), RANDOM, 1)
    assert row["first_difference"] == 1 and row["loss_sha256"] != row["base_loss_sha256"]


def test_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolate, "PRELOADED", ())
    assert run_isolated(math.gcd, 12, 18) == 6
    with pytest.raises(ChildError, match="ZeroDivisionError: integer division") as caught:
        run_isolated(divmod, 1, 0)
    assert "Traceback" in caught.value.traceback
    with pytest.raises(ChildError, match="exit code 3"):
        run_isolated(sys.exit, 3)


def test_tables() -> None:
    assert set(DEFAULT_VARIANTS) | set(SEARCH_VARIANTS) <= set(VARIANTS)
    for variant in VARIANTS.values():
        assert not (variant.saving.has_hooks and variant.storage.activations), variant.name
        assert (variant.equals is not None) == variant.name.startswith("lct")
        if variant.equals is not None:
            assert VARIANTS[variant.equals].equals is None
            assert VARIANTS[variant.equals].saving is variant.saving
    assert CASE.reason_against() is None
    assert "compiled" in str(replace(CASE, variant="budget-0.5").reason_against())
    assert replace(CASE, variant="budget-0.5", configuration="lean").reason_against() is None
    assert "context of 128" in str(
        replace(CASE, model="nanogpt-tiny", sequence=129).reason_against()
    )
    assert {row.compiled for row in CONFIGURATIONS.values()} == {"none", "layers", "model"}


@pytest.mark.parametrize("row", LOSSY_OPTIMIZERS, ids=lambda row: row.name)
def test_lossy_optimizers_are_marked(row: OptimizerRow) -> None:
    case = replace(CASE, variant=row.name)
    assert row.lossy and case.optimizer_row is row
    assert row.package is not None
    if importlib.util.find_spec(row.package) is None:
        assert f"{row.package} is not installed" in str(row.missing())


def test_8_bit_momentum_of_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes has no kernel for momentum in FP32, which it keeps for small ones by default."""
    seen: dict[str, Any] = {}

    class SGD8bit(torch.optim.SGD):
        def __init__(self, params: Any, lr: float, momentum: float, **options: Any) -> None:
            seen.update(options)
            super().__init__(params, lr, momentum)

    module = ModuleType("bitsandbytes.optim")
    module.__dict__["SGD8bit"] = SGD8bit
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", module)
    row = measure(replace(CASE, variant="sgd-8bit"), RANDOM)
    assert row["completed"] and row["lossy"] and row["peak_allocated_mib"] > 0
    assert seen == {"min_8bit_size": 1}


def test_steps_that_are_compiled_have_no_peak_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    make = CASE.optimizer_row.make
    compiled = OptimizerRow("compiled", make, package="torch", lossy=True, compiles=True)
    monkeypatch.setitem(VARIANTS, "compiled", replace(VARIANTS["dense"], optimizer=compiled))
    row = measure(replace(CASE, variant="compiled"), RANDOM)
    assert row["completed"] and row["peak_allocated_mib"] is None


def test_gpt2_tokens_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"lct-torch\[bench\].*--tokens bytes"):
        load_tokens("gpt2")


def test_tokens_must_fit_the_vocabulary() -> None:
    wide = replace(RANDOM, kind="gpt2", vocabulary=50257)
    with pytest.raises(ValueError, match="nanogpt-tiny takes tokens below 256, got gpt2"):
        measure(replace(CASE, model="nanogpt-tiny"), wide)
    assert {row.tokens for row in MODELS.values()} == {"random", "gpt2", "bytes"}


def test_batches_repeat_and_hold_out() -> None:
    text = load_tokens("bytes")
    assert torch.equal(text.batch(2, 9, 256, seed=4), text.batch(2, 9, 256, seed=4))
    assert not torch.equal(text.batch(2, 9, 256, seed=4), text.batch(2, 9, 256, seed=5))
    batch = text.batch(1, 40, 256, seed=4, held_out=True)[0]
    assert bytes(batch.tolist()) in text.held_out.astype("uint8").tobytes()
    assert RANDOM.batch(3, 5, 10, seed=0).max() < 10 and RANDOM.sha256 is None


def test_merged_intervals() -> None:
    assert profile.merged_length([]) == 0
    assert profile.merged_length([(5, 6), (0, 2), (1, 3), (1.5, 2), (3, 4)]) == 5


def test_a_profile_is_of_the_gpu_and_of_calls_to_it() -> None:
    def event(name: str, start: float, end: float, cuda: bool, annotation: bool = False) -> Any:
        device = profile.DeviceType.CUDA if cuda else profile.DeviceType.CPU
        time = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(
            name=name, time_range=time, device_type=device, is_user_annotation=annotation
        )

    found = profile.summarize_events(
        [
            event("kernel", 0, 4000, True),
            event("kernel", 3000, 5000, True),
            event("a range", 0, 90000, True, annotation=True),
            event("cudaLaunchKernel", 0, 300, False),
            event("cudaLaunchKernel", 500, 600, False),
            event("cuLaunchKernel", 700, 720, False),
            event("aten::mm", 0, 900, False),
        ],
        num_steps=2,
    )
    assert found["gpu_busy_ms"] == 2.5 and found["gpu_kernels_ms"] == {"kernel": 3.0}
    assert found["host_calls_ms"] == {"cudaLaunchKernel": 0.2, "cuLaunchKernel": 0.01}
    assert found["host_calls"] == {"cudaLaunchKernel": 1.0, "cuLaunchKernel": 0.5}
    assert profile.summarize_events([], 1)["gpu_busy_ms"] is None


def test_items_at_the_peak() -> None:
    mib = 1 << 20

    def event(action: str, addr: int, size_mib: int) -> dict[str, Any]:
        return {"action": action, "addr": addr, "size": size_mib * mib}

    trace = [
        event("alloc", 1, 3),
        event("segment_alloc", 1, 20),
        event("free_requested", 1, 3),
        event("free_completed", 1, 3),
        event("free_completed", 99, 4),  # from before
        event("alloc", 1, 6),
        event("alloc", 2, 2),
        event("alloc", 3, 2),
        event("free_completed", 1, 6),
        event("alloc", 4, 1),
    ]
    found = items_at_peak(trace, 10 * mib)
    assert found["peak_held_mib"] == 6
    assert found["peak_items"] == [
        {"block_mib": 6, "blocks": 1, "mib": 6},
        {"block_mib": 2, "blocks": 2, "mib": 4},
    ]
    assert items_at_peak([], mib) == {"peak_held_mib": 1, "peak_items": []}


def test_pareto_front() -> None:
    points = [(1.0, 9.0), (2.0, 9.0), (2.0, 5.0), (3.0, 6.0), (4.0, 4.0)]
    assert _pareto_front(points) == [(1.0, 9.0), (2.0, 5.0), (4.0, 4.0)]


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench", "train", *map(str, arguments)])


SMALL = ("--device", "cpu", "--steps", 1, "--warm-up", 1, "--layers", 1)


def test_command(tmp_path: Path) -> None:
    report, plot = tmp_path / "r.json", tmp_path / "plot.png"
    result = run(
        *("qwen3-tiny", "--configuration", "eager", "--sequence", "16,24", "--identity"),
        *("--variants", "lct-weights-state", *SMALL),
        *("--commit", "abc", "--json", report, "--plot", plot),
    )
    assert result.exit_code == 0, result.output
    assert "identical bits" in result.stdout
    written = json.loads(report.read_text(encoding="utf-8"))
    assert written["commit"] == "abc"
    places = [(row["sequence"], row["variant"]) for row in written["rows"]]
    assert places == [(n, v) for n in (16, 24) for v in ("dense", "lct-weights-state")]
    assert plot.stat().st_size > 0


def test_command_fails_on_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "hash_losses", lambda losses: str(id(losses)))
    result = run(
        *("nanogpt-tiny", "--configuration", "eager", "--sequence", 8, "--micro-batch", 1),
        *("--tokens", "random", "--identity", "--variants", "lct-activations", *SMALL),
    )
    assert result.exit_code == 1
    assert "differs: nanogpt-tiny eager 8: loss_sha256 of lct-activations" in result.stdout


def test_command_reports_what_broke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_some(case: Case, _: object) -> dict[str, Any]:
        if case.variant == "recompute":
            raise RuntimeError("it broke\nin two lines")
        return {"completed": False, "error": OUT_OF_MEMORY}

    monkeypatch.setattr(train, "measure", break_some)
    path = tmp_path / "r.json"
    result = run("--model-search", "--configuration", "eager", *SMALL, "--json", path)
    assert result.exit_code == 1
    written = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert {row["model"] for row in written} == set(SHAPES) - {"qwen3-tiny"}
    assert {row["variant"] for row in written} == set(SEARCH_VARIANTS)
    assert {row["sequence"] for row in written} == {1024}
    errors = {row["variant"]: row["error"] for row in written}
    assert errors["recompute"] == "RuntimeError: it broke"
    assert errors["lct-all+recompute"] == OUT_OF_MEMORY
    assert result.stderr.count("failed: ") == len(written) / len(SEARCH_VARIANTS)


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        ((), 2, "MODEL"),
        (("qwen3-5b",), 2, "qwen3-4b"),
        (("qwen3-tiny", "--variants", "best"), 2, "lct-all+recompute"),
        (("qwen3-tiny", "--sequence", "0"), 2, "500,1000"),
        (("qwen3-tiny", "--memory-limit", "24"), 2, "24GiB"),
        (("qwen3-tiny", "--memory-limit", "500MiB"), 2, "at least 1GiB"),
        (("qwen3-tiny", "--device", "cpu", "--memory-limit", "24GiB"), 1, "CUDA device"),
        (("qwen3-tiny", "--device", "cpu", "--cuda-graph"), 1, "CUDA device"),
        (("qwen3-tiny", "--device", "cpu", "--identity", "--pairs", "3"), 1, "one of"),
        (
            ("qwen3-tiny", "--device", "cpu", "--pairs", "3", "--variants", "recompute"),
            1,
            "with LCT",
        ),
        (
            (
                "qwen3-tiny",
                "--device",
                "cpu",
                "--configuration",
                "eager",
                "--variants",
                "budget-0.5",
            ),
            1,
            "compiled graphs",
        ),
        (("nanogpt-tiny", "--device", "cpu", "--sequence", "4096"), 1, "context of 128"),
        (("nanogpt-tiny", "--device", "cpu", "--context-search"), 1, "fixed context"),
        (
            ("qwen3-tiny", "--device", "cpu", "--context-search", "--sequence", "600"),
            1,
            "multiple of 250",
        ),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], exit_code: int, words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == exit_code
    assert words in result.stderr.replace("│", "").replace("\n", " ") or words in " ".join(
        result.stderr.split()
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_offloading_keeps_strides(device: str) -> None:
    values = torch.arange(24.0, device=device).reshape(2, 3, 4)
    for tensor in (values, values.transpose(1, 2), values[:, :, ::2], values[:0], values[0, 0, 0]):
        back = from_host(to_host(tensor))
        assert (back.stride(), back.device) == (tensor.stride(), tensor.device)
        assert torch.equal(back, tensor)
    assert torch.equal(
        from_host(to_host(values[:, :1].expand(2, 3, 4))), values[:, :1].expand(2, 3, 4)
    )


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_a_capture_makes_no_masks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where transformers takes them from its caller: attention is then what it is outside."""
    model = TransformersLm(replace(SHAPES["qwen3-tiny"], family=family), num_layers=2)
    materialize(model, torch.device("cpu"), seed=3)
    batch = RANDOM.batch(1, 13, model.vocabulary, seed=2)
    expected = [model.hidden(batch), model.plain_loss(batch)]
    with monkeypatch.context() as captured:
        captured.setattr(torch.cuda, "is_initialized", lambda: True)
        captured.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        masks = model._masks()
    assert (masks is None) == (family == "llama")
    monkeypatch.setattr(model, "_masks", lambda: masks)
    for outside, within in zip(
        expected, [model.hidden(batch), model.plain_loss(batch)], strict=True
    ):
        assert_same_bits(outside, within)


@pytest.mark.gpu
@pytest.mark.parametrize("configuration", ["eager", "lean"])
@pytest.mark.parametrize("model", ["qwen3-tiny", "nanogpt-tiny"])
def test_captured_steps(model: str, configuration: str) -> None:
    """Replays have the bits of captured dense steps, and read a batch of their own each."""
    case = replace(CASE, device="cuda", configuration=configuration, sequence=128, cuda_graph=True)
    case = replace(case, model=model, backend="inductor", steps=4, micro_steps=2)
    text = RANDOM if model == "qwen3-tiny" else load_tokens("bytes")
    found = []
    for name in ("dense", "lct-weights-state", "lct-all"):
        row = measure_apart(replace(case, variant=name), text)
        found.append(row)
        assert row["error"] is None, row.get("traceback")
        check_row(row, replace(case, variant=name))
        assert len(set(row["losses"])) == len(row["losses"]) >= 5
    assert differences(found) == []


@pytest.mark.gpu
@pytest.mark.parametrize("configuration", ["eager", "lean"])
def test_on_a_gpu(configuration: str) -> None:
    case = replace(CASE, device="cuda", configuration=configuration, sequence=256, profiled=1)
    case = replace(case, backend="inductor", memory_limit_mib=4096, itemized=True)
    found = []
    for name in ("dense", "recompute", "save-on-cpu", "hooks-alone", "lct-all"):
        row = measure_apart(replace(case, variant=name), RANDOM)
        found.append(row)
        assert row["error"] is None, row.get("traceback")
        check_row(row, replace(case, variant=name))
        assert row["peak_reserved_mib"] >= row["peak_allocated_mib"] > 0
        assert row["gpu_busy_ms"] is None or row["gpu_busy_ms"] > 0
        assert row["peak_held_mib"] > 0 and row["peak_items"]
    assert differences(found) == []
    # The child had its limit to itself.
    too_long = replace(case, sequence=60_000, micro_batch=64)
    assert measure_apart(too_long, RANDOM)["error"] == OUT_OF_MEMORY
