"""``lct bench train``: parsing and printing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import typer

from .options import CommitOption, DeviceOption, JsonPath, PlotPath, choose_device, parse_names
from .output import (
    check_outputs,
    command_line,
    print_line,
    progress_bar,
    stderr,
)
from .plots import check_suffix
from .training_tables import outcome_of, print_result, title_of

if TYPE_CHECKING:
    from ..bench.tokens import Tokens
    from ..bench.training_run import Case

Names = Optional[list[str]]  # noqa: UP045 - typer reads this at run time
Number = Optional[int]  # noqa: UP045
UNITS_MIB = {"MiB": 1, "GiB": 1024}
MODEL_SEARCH_SEQUENCE = 1024
DEFAULT_STEPS = 8
MODEL_SEARCH_STEPS = 10


def _names(flag: str, text: str) -> Any:
    return typer.Option(flag, metavar="NAME,…", help=text, show_default=False)


def _numbers(flag: str, text: str) -> Any:
    return typer.Option(flag, metavar="N,…", help=text, show_default=False)


def train(
    models: Annotated[
        Names,
        typer.Argument(metavar="MODEL,…", help="qwen3-4b, nanogpt-162m, …", show_default=False),
    ] = None,
    configurations: Annotated[
        Names,
        _names(
            "--configuration",
            "eager, lean (each layer compiled, loss over chunks of tokens), eager-chunked, layers "
            "(each layer compiled), whole, whole-chunked. Default: lean.",
        ),
    ] = None,
    variants: Annotated[
        Names, _names("--variants", "Ways to train; an unknown one lists them.")
    ] = None,
    sequences: Annotated[
        Names, _numbers("--sequence", "Tokens a sequence. Default: 500,1000; NanoGPT: 1024.")
    ] = None,
    micro_batches: Annotated[
        Names,
        _numbers("--micro-batch", "Sequences a forward pass. Default: 1; NanoGPT: 8,16,32."),
    ] = None,
    micro_steps: Annotated[
        Number,
        typer.Option(
            min=1, help="Forward passes a step, whose gradients add up. Default: 1; NanoGPT: 4."
        ),
    ] = None,
    optimizer: Annotated[
        Literal["sgd", "muon"],
        typer.Option(help="SGD with momentum; or Muon for layers' matrices, AdamW for the rest."),
    ] = "sgd",
    tokens: Annotated[
        Optional[Literal["gpt2", "bytes", "random"]],  # noqa: UP045
        typer.Option(
            "--tokens",
            help="Python's standard library as GPT-2 BPE or as bytes; or random ones. "
            "Default: random; NanoGPT: gpt2.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        Number, typer.Option(min=1, help="Timed steps. Default: 8; 10 for --model-search.")
    ] = None,
    warm_up: Annotated[int, typer.Option(min=1, help="Steps before, not timed.")] = 3,
    pairs: Annotated[
        Number,
        typer.Option(
            min=1,
            help="Time N pairs of steps, without LCT and with it, both models alive on the GPU.",
            show_default=False,
        ),
    ] = None,
    identity: Annotated[
        bool,
        typer.Option(
            "--identity",
            help="Deterministic kernels in all runs; compare losses, weights and state bit by bit.",
        ),
    ] = False,
    cuda_graph: Annotated[
        bool,
        typer.Option(
            "--cuda-graph",
            help="Capture a step into a CUDA graph after the warm-up; the others are its replays.",
        ),
    ] = False,
    context_search: Annotated[
        bool,
        typer.Option(
            "--context-search",
            help="The longest sequence that completes, in steps of 250; begins with --sequence, "
            "or 1000.",
        ),
    ] = False,
    model_search: Annotated[
        bool,
        typer.Option(
            "--model-search",
            help="Which models take full fine-tuning steps at 1024 tokens, under checkpointing.",
        ),
    ] = False,
    memory_limit: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--memory-limit",
            metavar="SIZE",
            help="Memory of the card to imitate, such as 24GiB; 600 MiB of it go to the context.",
            show_default=False,
        ),
    ] = None,
    peak_items: Annotated[
        bool,
        typer.Option("--peak-items", help="What the peak consists of, in one more step (JSON)."),
    ] = False,
    expandable_segments: Annotated[
        bool,
        typer.Option("--expandable-segments", help="Torch's allocator setting, for all runs."),
    ] = False,
    layers: Annotated[
        Number, typer.Option(min=1, help="Build so many layers only.", show_default=False)
    ] = None,
    lr: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Learning rate of all optimizers.", show_default=False),
    ] = None,
    device: DeviceOption = None,
    commit: CommitOption = None,
    json_path: JsonPath = None,
    plot_path: PlotPath = None,
) -> None:
    """Training steps with LCT and with its alternatives: peak memory, step time, loss bits.

    Models have the shapes of public configurations and random BF16 weights,
    made and compressed layer by layer; optimizers step in backward, all
    through the same hooks, without LCT torch's fused ones. Variants: dense;
    lct-weights-state, lct-activations, lct-all; recompute (every layer
    checkpointed), budget-0.9 … budget-0 (PyTorch's memory budget of
    compiled graphs), save-on-cpu, hooks-alone (saved-tensor hooks that
    change nothing); LCT with them, as in lct-all+recompute; sgd-8bit and
    adamw-8bit (bitsandbytes, torchao; [bold]lossy[/bold]). On CUDA every run has a
    process of its own; running out of memory is a result. Peaks are the
    allocator's over the timed steps; [bold]GPU busy[/bold] is the union of kernels and
    copies in a step of its own under torch's profiler.

    [bold]Examples[/bold]
      lct bench train qwen3-4b --json qwen.json --plot qwen.png
      lct bench train qwen3-4b --configuration eager --pairs 10
      lct bench train qwen3-4b --identity --variants lct-all
      lct bench train qwen3-4b --context-search --memory-limit 24GiB
      lct bench train --model-search --memory-limit 24GiB
      lct bench train nanogpt-162m --configuration layers,lean,whole

    [bold]Exit codes:[/bold] 0 done, 1 failed (a run broke, or --identity found
    other bits), 2 wrong usage.
    """
    from ..bench.models.transformers_models import SHAPES
    from ..bench.train import OUT_OF_MEMORY, differences
    from ..bench.training_run import MODELS, SEARCHED_MODELS, missing_package
    from ..bench.variants import CONFIGURATIONS, DEFAULT_VARIANTS, SEARCH_VARIANTS, VARIANTS

    check_outputs(json_path, plot_path)
    check_suffix(plot_path)
    modes = {
        "--pairs": pairs is not None,
        "--identity": identity,
        "--context-search": context_search,
        "--model-search": model_search,
    }
    chosen_modes = [flag for flag, wanted in modes.items() if wanted]
    if len(chosen_modes) > 1:
        raise ValueError(f"one of {', '.join(modes)} at a time, got {', '.join(chosen_modes)}")
    names = parse_names(models, "MODEL", MODELS) or (SEARCHED_MODELS if model_search else None)
    if names is None:
        raise typer.BadParameter(f"must be among {', '.join(MODELS)}", param_hint="MODEL")
    for name in names:
        if (reason := missing_package(name)) is not None:
            raise ValueError(reason)
        if context_search and name not in SHAPES:
            raise ValueError(f"--context-search takes models without a fixed context, got {name}")
    limit_mib = _parse_mib(memory_limit)
    place = choose_device(device)
    for flag, given in (
        ("--memory-limit", limit_mib is not None),
        ("--peak-items", peak_items),
        ("--cuda-graph", cuda_graph),
    ):
        if given and place != "cuda":
            raise ValueError(f"{flag} needs a CUDA device, got {place}")
    wanted = parse_names(variants, "--variants", VARIANTS)
    if wanted is None:
        wanted = list(SEARCH_VARIANTS if model_search else DEFAULT_VARIANTS)
    wanted = _with_counterparts(wanted, identity=identity, pairs=pairs is not None)
    available, absent = _leave_out(wanted, asked_for=variants is not None)
    default_steps = MODEL_SEARCH_STEPS if model_search else DEFAULT_STEPS
    cases = list(
        _cases(
            names,
            parse_names(configurations, "--configuration", CONFIGURATIONS) or ["lean"],
            available,
            parse_numbers(sequences, "--sequence")
            or ([MODEL_SEARCH_SEQUENCE] if model_search else None),
            parse_numbers(micro_batches, "--micro-batch"),
            one_sequence=context_search,
            micro_steps=micro_steps,
            optimizer=optimizer,
            device=place,
            warm_up=warm_up,
            steps=steps or default_steps,
            profiled=0 if identity or context_search else 1,
            itemized=peak_items,
            identity=identity,
            cuda_graph=cuda_graph,
            memory_limit_mib=limit_mib,
            num_layers=layers,
            lr=lr,
            expandable_segments=expandable_segments,
        )
    )
    text = _TextByModel(tokens)
    result: dict[str, Any] = {"rows": [], "pairs": [], "searches": [], "differences": []}
    kind, measure_case = _measurement(pairs, context_search, parse_numbers(sequences, "--sequence"))
    with _Report(json_path, place, commit, result) as report:
        for case in cases:
            report.start(case, len(cases))
            report.add(kind, measure_case(case, text.of(case.model)))
        if identity:
            result["differences"] = differences(result["rows"])
    for line in absent:
        print_line(line)
    print_result(result)
    if plot_path is not None:
        from .plots import plot_training

        plot_training(plot_path, result["rows"])
    failures = [row for row in result[kind] if row["error"] not in (None, OUT_OF_MEMORY)]
    for row in failures:
        stderr().print(
            f"failed: {title_of(row)}: {row['error']}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if failures or result["differences"]:
        raise typer.Exit(1)


def parse_numbers(texts: list[str] | None, flag: str) -> list[int] | None:
    """Whole numbers from ``500,1000``, each once; exit code 2 for anything else."""
    if not texts:
        return None
    numbers = [text.strip() for text in ",".join(texts).split(",")]
    for text in numbers:
        if not text.isdigit() or int(text) < 1:
            raise typer.BadParameter(
                f"must be whole numbers such as 500,1000, got {text!r}", param_hint=flag
            )
    return list(dict.fromkeys(map(int, numbers)))


def _parse_mib(text: str | None) -> int | None:
    """MiB from ``24GiB`` or ``8192MiB``; exit code 2 for anything else."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+) ?(MiB|GiB)", text.strip())
    size = int(found[1]) * UNITS_MIB[found[2]] if found else 0
    # Below, nothing would be left beside the context.
    if size < 1024:
        raise typer.BadParameter(
            f"must be at least 1GiB, such as 24GiB or 8192MiB, got {text!r}",
            param_hint="--memory-limit",
        )
    return size


def _with_counterparts(wanted: list[str], *, identity: bool, pairs: bool) -> list[str]:
    """The variants to run: with those that LCT's are compared with; for pairs LCT's, and the dense
    ones.
    """
    from ..bench.variants import DENSE, VARIANTS

    equals = {name: VARIANTS[name].equals for name in wanted}
    if pairs:
        dense = (DENSE, "hooks-alone")
        return [name for name in wanted if equals[name] is not None or name in dense]
    if identity:
        counterparts = [name for name in equals.values() if name is not None]
        return list(dict.fromkeys([*counterparts, *wanted]))
    return wanted


def _leave_out(names: list[str], *, asked_for: bool) -> tuple[list[str], list[str]]:
    """The variants whose packages are installed, and a line for each other one.

    ValueError for a missing one that was asked for.
    """
    from ..bench.variants import VARIANTS

    available, absent = [], []
    for name in names:
        row = VARIANTS[name].optimizer
        reason = row.missing() if row is not None else None
        if reason is None:
            available.append(name)
        elif asked_for:
            raise ValueError(f"variant {name} cannot run: {reason}")
        else:
            absent.append(f"left out {name}: {reason}")
    return available, absent


def _cases(
    models: Sequence[str],
    configurations: Sequence[str],
    variants: Sequence[str],
    sequences: Sequence[int] | None,
    micro_batches: Sequence[int] | None,
    *,
    one_sequence: bool,
    micro_steps: int | None,
    **options: Any,
) -> Iterator[Case]:
    """All combinations that make sense, variants innermost. ValueError where there are none."""
    from ..bench.training_run import MODELS, Case

    reasons: dict[str, None] = {}
    num_cases = 0
    for name in models:
        model = MODELS[name]
        for configuration in configurations:
            for sequence in (sequences or model.sequences)[: 1 if one_sequence else None]:
                for micro_batch in micro_batches or model.micro_batches:
                    for variant in variants:
                        case = Case(
                            name,
                            configuration,
                            variant,
                            sequence,
                            micro_batch,
                            micro_steps or model.micro_steps,
                            **options,
                        )
                        reason = case.reason_against()
                        if reason is None:
                            num_cases += 1
                            yield case
                        else:
                            reasons[reason] = None
    if not num_cases:
        raise ValueError(f"nothing to run: {'; '.join(reasons) or 'no variant with LCT given'}")


class _TextByModel:
    """Tokens as a model wants them, read once a kind."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._read: dict[str, Tokens] = {}

    def of(self, model: str) -> Tokens:
        from ..bench.tokens import load_tokens
        from ..bench.training_run import MODELS

        kind = self._kind or MODELS[model].tokens
        if kind not in self._read:
            self._read[kind] = load_tokens(kind)
        return self._read[kind]


def _measurement(
    pairs: int | None, context_search: bool, sequences: Sequence[int] | None
) -> tuple[str, Callable[[Case, Tokens], dict[str, Any]]]:
    """The list of the result that rows go to, and what makes one."""
    from ..bench.search import GRANULARITY, START, search_context
    from ..bench.train import measure_apart, measure_pairs_apart

    if pairs is not None:
        return "pairs", lambda case, tokens: measure_pairs_apart(case, tokens, pairs)
    if context_search:
        start = sequences[0] if sequences else START
        if start % GRANULARITY:
            raise ValueError(
                f"--sequence must be a multiple of {GRANULARITY} where a search begins with it, "
                f"got {start}"
            )
        return "searches", lambda case, tokens: search_context(
            replace(case, warm_up=1, steps=2),
            lambda attempt: measure_apart(attempt, tokens),
            start=start,
        )
    return "rows", measure_apart


class _Report:
    """Progress on stderr, and the JSON file, written anew after every row: runs are long."""

    def __init__(
        self, path: Path | None, device: str, commit: str | None, result: dict[str, Any]
    ) -> None:
        from ..bench.results import describe_run

        self._path = path
        self._result = result
        self._head = describe_run(command_line(), device, commit)
        self._bar = progress_bar("train", count=True)
        self._done = 0

    def __enter__(self) -> _Report:
        self._progress = self._bar.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._bar.__exit__(*exception)
        self._write()

    def start(self, case: Case, total: int) -> None:
        what = f"{case.model} {case.configuration} {case.sequence} {case.variant}"
        self._progress(what, self._done, total)

    def add(self, kind: str, row: dict[str, Any]) -> None:
        self._done += 1
        self._result[kind].append(row)
        if not stderr().is_terminal:
            stderr().print(title_of(row), outcome_of(row), markup=False, highlight=False)
        self._write()

    def _write(self) -> None:
        from ..bench.results import write_json

        if self._path is not None:
            write_json(self._path, {**self._head, **self._result})
