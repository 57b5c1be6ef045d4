"""Steps on compressed weights and state against dense steps and a copy: ``lct bench optim``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .. import CompressedTensor, CompressedWeight, compress_
from .. import optim as compressed_optim
from ..errors import LctError
from .codec import check_bits, normal_values
from .timing import REPETITIONS, measure, rotations_for

DTYPE = torch.bfloat16
PART_VALUES = 2**24
SEED = 20261201
WEIGHT_SCALE = 0.02
GRADIENT_SCALE = 1e-2
GATE_STEPS = 3
# Steps before anything is timed: they compile.
FIRST_STEPS = 2
# State is timed as training leaves it, an average over many gradients: squares of a single one
# have twice the range in octaves, as moments have it in the first steps alone.
AVERAGED_GRADIENTS = 32
# Thousands of timed steps have one gradient: with a larger rate the weights' scale would drift as
# it does not in training, and with it the room that they need.
TIMED_LR = 1e-7
MAX_COLUMNS = 4096
DEFAULT_SIZES = {"cpu": (2**20,), "cuda": (2**24, 2**28)}
ROUNDINGS: dict[str, dict[str, bool]] = {"foreach": {"foreach": True}, "fused": {"fused": True}}


@dataclass(frozen=True)
class OptimizerRow:
    """An optimizer of torch and LCT's of the same name, with the arguments that both are given.

    ``floor_copies``: bytes that a dense step moves over those of a copy. ``no_graph``: why its
    steps cannot be captured. ``not_on_cpu``: roundings whose bits torch does not repeat there.
    """

    name: str
    class_name: str
    arguments: Mapping[str, Any]
    num_states: int
    no_graph: str | None = None
    not_on_cpu: Mapping[str, str] = field(default_factory=dict)

    @property
    def floor_copies(self) -> float:
        # Reads weight, states and gradient, writes weight and states; a copy reads and writes one.
        return (2 * (1 + self.num_states) + 1) / 2

    def timed(self) -> OptimizerRow:
        """The row with the learning rate of what is timed."""
        return replace(self, arguments={**self.arguments, "lr": TIMED_LR})

    def make(self, module: Any, params: list[torch.Tensor], rounding: str) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(module, self.class_name)(
            params, **self.arguments, **ROUNDINGS[rounding]
        )
        return optimizer


_ON_CPU = "torch counts its steps on the CPU"
# Learning rates that move a weight by about 1e-4 a step: less would vanish in BF16's rounding.
OPTIMIZERS = {
    row.name: row
    for row in (
        OptimizerRow(
            "sgd",
            "SGD",
            {"lr": 1e-2, "momentum": 0.9},
            num_states=1,
            not_on_cpu={"fused": "torch's fused SGD on the CPU reads unset memory for BF16"},
        ),
        OptimizerRow("adam", "Adam", {"lr": 1e-4}, num_states=2, no_graph=_ON_CPU),
        OptimizerRow("adamw", "AdamW", {"lr": 1e-4}, num_states=2, no_graph=_ON_CPU),
    )
}
DEFAULT_OPTIMIZERS = ("sgd", "adamw")


@dataclass
class Problem:
    """One weight with its gradient, dense or compressed, and the optimizer that steps it."""

    weight: torch.Tensor
    optimizer: torch.optim.Optimizer

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weight and state of its shape by name, dense."""
        weight = self.weight
        found = {
            "weight": weight.dense() if isinstance(weight, CompressedWeight) else weight.detach()
        }
        (states,) = self.optimizer.state_dict()["state"].values()
        for name, value in states.items():
            if isinstance(value, torch.Tensor) and value.shape == weight.shape:
                found[name] = value
        return found

    def stored(self) -> list[torch.Tensor | CompressedTensor]:
        """What holds weight and state: compressed tensors, or dense ones where LCT keeps them."""
        weight = self.weight
        found: list[Any] = [weight.compressed if isinstance(weight, CompressedWeight) else weight]
        found += [v for v in self.optimizer.state[weight].values() if v.shape == weight.shape]
        return found


def shape_for(num_values: int) -> tuple[int, int]:
    """A matrix of so many values, with the most columns that are a power of two up to 4096."""
    columns = min(num_values & -num_values, MAX_COLUMNS)
    return num_values // columns, columns


def make_weight(num_values: int, number: int, device: torch.device) -> torch.Tensor:
    """The weight of set ``number`` of buffers before its first step: the same at each call."""
    weight = normal_values(num_values, WEIGHT_SCALE, DTYPE, device, SEED + 2 * number)
    return weight.view(shape_for(num_values))


def make_gradient(num_values: int, number: int, device: torch.device) -> torch.Tensor:
    """The gradient of set ``number``."""
    gradient = normal_values(num_values, GRADIENT_SCALE, DTYPE, device, SEED + 2 * number + 1)
    return gradient.view(shape_for(num_values))


def make_states(row: OptimizerRow, gradient: torch.Tensor, number: int) -> dict[str, torch.Tensor]:
    """State of the optimizer for set ``number``, by torch's keys, as after many steps.

    First moments are what ``gradient`` alone would have led to, so that steps with it leave their
    distribution as it is.
    """
    if row.num_states == 1:
        return {"momentum_buffer": gradient / (1 - row.arguments["momentum"])}
    squares = torch.zeros_like(gradient)
    # By parts: in FP32 they would take several times the memory of what is measured.
    seed = SEED + 1000 * (number + 1)
    for part in squares.view(-1).split(PART_VALUES):
        generator = torch.Generator(gradient.device).manual_seed(seed := seed + 1)
        total = torch.zeros(part.numel(), device=gradient.device)
        for _ in range(AVERAGED_GRADIENTS):
            total += torch.randn(part.numel(), device=gradient.device, generator=generator) ** 2
        part.copy_(total * (GRADIENT_SCALE**2 / AVERAGED_GRADIENTS))
    return {"step": torch.tensor(1000.0), "exp_avg": gradient, "exp_avg_sq": squares}


def with_states(problem: Problem, states: dict[str, torch.Tensor] | None) -> Problem:
    """``problem`` with a copy of ``states``, or with none."""
    if states is not None:
        own = {name: value.clone() for name, value in states.items()}
        groups = problem.optimizer.state_dict()["param_groups"]
        problem.optimizer.load_state_dict({"state": {0: own}, "param_groups": groups})
    return problem


def dense_problem(
    row: OptimizerRow,
    rounding: str,
    weight: torch.Tensor,
    gradient: torch.Tensor,
    states: dict[str, torch.Tensor] | None = None,
) -> Problem:
    """Torch's optimizer on a dense weight, which it changes."""
    parameter = torch.nn.Parameter(weight)
    parameter.grad = gradient
    return with_states(Problem(parameter, row.make(torch.optim, [parameter], rounding)), states)


def compressed_problem(
    row: OptimizerRow,
    rounding: str,
    weight: torch.Tensor,
    gradient: torch.Tensor,
    states: dict[str, torch.Tensor] | None = None,
) -> Problem:
    """LCT's optimizer on the compressed weight. ValueError where LCT leaves the weight dense."""
    model = compress_(torch.nn.ParameterList([weight]))
    (parameter,) = model.parameters()
    if not isinstance(parameter, CompressedWeight):
        raise ValueError(
            f"sizes must be large enough for lct.compress_ to compress, got {weight.numel()}"
        )
    parameter.grad = gradient
    problem = Problem(parameter, row.make(compressed_optim, [parameter], rounding))
    return with_states(problem, states)


def compare(expected: Problem, found: Problem, where: str) -> None:
    """LctError unless both problems have the same tensors with the same bits."""
    tensors, others = expected.tensors(), found.tensors()
    if tensors.keys() != others.keys():
        raise LctError(
            f"no figures for other state in {where}: expected {', '.join(tensors)}, "
            f"got {', '.join(others)}"
        )
    for name, tensor in tensors.items():
        if tensor.shape != others[name].shape:
            raise LctError(f"no figures for another shape of {name} in {where}")
        check_bits(tensor, others[name], f"{name} in {where}")


def check_steps(row: OptimizerRow, rounding: str, num_values: int, device: torch.device) -> None:
    """The gate: LctError unless steps with changing gradients leave torch's bits, each of them."""
    weight = make_weight(num_values, 0, device)
    gradient = torch.empty_like(weight)
    dense = dense_problem(row, rounding, weight.clone(), gradient)
    compressed = compressed_problem(row, rounding, weight, gradient)
    for step in range(1, GATE_STEPS + 1):
        gradient.copy_(make_gradient(num_values, step, device))
        dense.step()
        compressed.step()
        compare(dense, compressed, f"{row.name} ({rounding}), step {step}")


def choose_roundings(
    row: OptimizerRow, device: torch.device, wanted: Sequence[str] | None = None
) -> list[str]:
    """The roundings to measure: ``wanted``, or all. ValueError for one that torch cannot repeat."""
    refused = row.not_on_cpu if device.type == "cpu" else {}
    for name in wanted or ():
        if name not in ROUNDINGS:
            raise ValueError(f"rounding must be one of {', '.join(ROUNDINGS)}, got {name!r}")
        if name in refused:
            raise ValueError(
                f"rounding {name} of {row.name} needs device cuda: {refused[name]}, got {device}"
            )
    return list(wanted or (name for name in ROUNDINGS if name not in refused))


def measure_step(
    name: str,
    rounding: str,
    num_values: int,
    device: torch.device,
    *,
    repetitions: int = REPETITIONS,
) -> dict[str, Any]:
    """One row: ``optimizer.step()`` on compressed weight and state, over a copy's time.

    Dense steps of torch's (foreach and fused) and the copy take turns with it. Bits are checked
    before anything is timed and, on what the timed steps left, after it: LctError where they
    differ. ValueError for an unknown optimizer or rounding and for sizes that stay dense.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {name!r}")
    row = OPTIMIZERS[name]
    choose_roundings(row, device, [rounding])
    check_steps(row, rounding, num_values, device)
    row = row.timed()

    dense_bytes = num_values * DTYPE.itemsize
    # A set of buffers: gradient, output of the copy, weight and states three times.
    rotations = rotations_for(dense_bytes, device, dense_bytes * (2 + 3 * (1 + row.num_states)))
    gradients = [make_gradient(num_values, i, device) for i in range(rotations)]
    copies = [torch.empty_like(gradient) for gradient in gradients]
    problems: dict[str, list[Problem]] = {"step": []}
    for i in range(rotations):
        weight = make_weight(num_values, i, device)
        states = make_states(row, gradients[i], i)
        for other in ROUNDINGS:
            dense = dense_problem(row, other, weight.clone(), gradients[i], states)
            problems.setdefault(f"dense_{other}", []).append(dense)
        problems["step"].append(compressed_problem(row, rounding, weight, gradients[i], states))
    del dense, weight, states
    for many in problems.values():
        for problem in many:
            problem.step(FIRST_STEPS)

    measured = problems.pop("step")
    spills = any(counts.spilled for counts in _group_counts(measured))
    measurement = measure(
        {
            "copy": lambda i: copies[i].copy_(gradients[i]),
            "step": lambda i: measured[i].optimizer.step(),
            "dense_foreach": lambda i: problems["dense_foreach"][i].optimizer.step(),
            "dense_fused": lambda i: problems["dense_fused"][i].optimizer.step(),
        },
        device,
        rotations=rotations,
        repetitions=repetitions,
        no_graph=row.no_graph or ("the values spill" if spills else None),
    )
    problems.clear()
    steps = [FIRST_STEPS + runs for runs in measurement.runs["step"]]
    for i, problem in enumerate(measured):
        weight = make_weight(num_values, i, device)
        states = make_states(row, gradients[i], i)
        expected = dense_problem(row, rounding, weight, gradients[i], states)
        expected.step(steps[i])
        compare(expected, problem, f"{row.name} ({rounding}) after {steps[i]} steps, timed")

    times = measurement.timings
    floor_ms = row.floor_copies * times["copy"].median_ms
    stored = measured[0].stored()
    allocated_bytes = sum(tensor.nbytes for tensor in stored)
    counts = _group_counts(measured[:1])
    return {
        "optimizer": row.name,
        "rounding": rounding,
        "num_values": num_values,
        "step_over_copy": measurement.over("step", "copy"),
        "ratio": len(stored) * dense_bytes / allocated_bytes,
        "bits_equal": True,
        "floor_copies": row.floor_copies,
        **{
            f"{variant}_over_floor": times[variant].median_ms / floor_ms
            for variant in ("step", "dense_foreach", "dense_fused")
        },
        "step_over_dense": measurement.over("step", f"dense_{rounding}"),
        "copy_gb_s": dense_bytes / times["copy"].median_ms / 1e6,
        **{f"{variant}_ms": timing.median_ms for variant, timing in times.items()},
        **{f"{variant}_iqr_ms": timing.iqr_ms for variant, timing in times.items()},
        "repetitions": repetitions,
        "rotations": rotations,
        "timing": measurement.method,
        "timing_note": measurement.note,
        "dtype": str(DTYPE).removeprefix("torch."),
        "arguments": dict(row.arguments),
        "checked_steps": sum(steps),
        "dense_bytes": len(stored) * dense_bytes,
        "allocated_bytes": allocated_bytes,
        "groups": sum(c.groups for c in counts),
        "spilled_groups": sum(c.spilled for c in counts),
    }


def _group_counts(problems: Sequence[Problem]) -> list[Any]:
    return [
        tensor.group_counts()
        for problem in problems
        for tensor in problem.stored()
        if isinstance(tensor, CompressedTensor)
    ]
