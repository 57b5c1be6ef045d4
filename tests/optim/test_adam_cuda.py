"""The fused Adam step on CUDA: bits of torch's own paths on dense tensors, hostile ones too."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from test_sgd_cuda import COUNT, DEVICE, ROUNDINGS, bits, gradients, scaled_by
from torch import nn

import lct
from lct import ops
from lct.nn import CompressedWeight
from lct.tensor import CompressedTensor

pytestmark = pytest.mark.gpu
KINDS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module", autouse=True)
def compiled_kernels() -> None:
    """Every variant of the kernel: each takes seconds to compile, but all can at the same time."""
    from lct.backends.cuda import jit
    from lct.dtypes import DTYPES
    from lct.presets import get_preset

    roundings = [(), ("RECIPROCAL",), ("ROUNDING",)]
    decays = [(), ("L2_DECAY",), ("DECOUPLED_DECAY",)]
    chosen = [
        frozenset((*a, *b, *c))
        for a, b, c in itertools.product(roundings, decays, [(), ("MAXIMIZE",)])
        if (a, b) != (("ROUNDING",), ("L2_DECAY",))
    ]
    chosen += [
        frozenset({"ROUNDING", "SCALED", "DECOUPLED_DECAY"}),
        frozenset({"ROUNDING", "SCALED"}),
    ]
    preset, dtype = get_preset("pooled"), DTYPES["bfloat16"]
    major, minor = torch.cuda.get_device_capability()

    def compile_one(options: frozenset[str]) -> None:
        variant = jit.Variant(preset, dtype, options)
        jit._cached_code(jit.KERNELS["adam_step"], variant, f"sm_{major}{minor}")

    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_one, chosen))


def assert_bits(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    different = (bits(got) != bits(expected)).flatten().nonzero()
    assert not len(different), (
        f"{what} differs in {len(different)} values, first at {different[0].item()}: "
        f"{bits(got).flatten()[different[0]].item():#x} instead of "
        f"{bits(expected).flatten()[different[0]].item():#x}"
    )


def compare(
    kind: str,
    rounding: str,
    steps: int,
    capacity: int | str = "exact",
    optimizer: str = "AdamW",
    lr: float = 0.013,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    maximize: bool = False,
    count: int = COUNT,
    scale: float | None = None,
) -> None:
    start = (torch.randn(count, generator=torch.Generator().manual_seed(99)) * 0.02).bfloat16()
    dense = torch.nn.Parameter(start.to(DEVICE))
    numbers: dict[str, Any] = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
    torch_adam = KINDS[optimizer](
        [dense], betas=betas, maximize=maximize, **numbers, **ROUNDINGS[rounding]
    )
    scaler = scaled_by(torch_adam, scale)
    tensors: list[CompressedTensor] = []
    for step in range(steps):
        grad = gradients(kind, step, count).to(DEVICE)
        dense.grad = grad.clone()
        torch_adam.step()
        state = torch_adam.state[dense]
        expected = [dense.detach(), *(state[name] for name in MOMENTS)]
        if not tensors:
            # Torch makes the moments at its first step; the kernel takes over from there.
            tensors = [lct.encode(value, capacity=capacity) for value in expected]
            continue
        tensors[0].adam_(
            *tensors[1:],
            grad,
            step=state["step"] if rounding == "fused" else state["step"].item(),
            beta1=betas[0],
            beta2=betas[1],
            decoupled_weight_decay=optimizer == "AdamW",
            maximize=maximize,
            rounding=rounding,
            **scaler,
            **numbers,
        )
        for name, compressed, value in zip(("parameter", *MOMENTS), tensors, expected, strict=True):
            assert_bits(compressed.decode(), value, f"{name} at step {step}")
    # What a step leaves is what an encode of the same values with the same book gives.
    for compressed in tensors:
        again = CompressedTensor.from_canonical(
            compressed.canonical_bytes(), compressed.shape, DEVICE
        )
        assert torch.equal(bits(again.decode()), bits(compressed.decode()))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decay", ["none", "L2", "decoupled"])
def test_bits_of_torch(decay: str, maximize: bool, rounding: str) -> None:
    if (decay, rounding) == ("L2", "fused"):
        with pytest.raises(ValueError, match="L2 decay must not be asked of the fused"):
            compare("gaussian", rounding, 2, optimizer="Adam", weight_decay=0.1, maximize=maximize)
        return
    compare(
        "gaussian",
        rounding,
        12,
        optimizer="AdamW" if decay == "decoupled" else "Adam",
        weight_decay=0.0 if decay == "none" else 0.1,
        maximize=maximize,
    )


@pytest.mark.parametrize("count", [2**22, 2**22 + 1])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "decay", "rounding"),
    [
        case
        for case in itertools.product(KINDS, (0.0, 0.1), ROUNDINGS)
        if case != ("Adam", 0.1, "fused")
    ],
)
def test_bits_of_many_values(
    optimizer: str, decay: float, rounding: str, maximize: bool, count: int
) -> None:
    """As ``test_sgd_cuda`` says."""
    compare(
        *("gaussian", rounding, 4),
        optimizer=optimizer,
        weight_decay=decay,
        maximize=maximize,
        count=count,
    )


@pytest.mark.parametrize("count", [2**22, 2**22 + 1])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_bits_of_many_scaled_values(decay: float, maximize: bool, count: int) -> None:
    compare("gaussian", "fused", 4, weight_decay=decay, maximize=maximize, count=count, scale=3.1)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(
    "numbers",
    [
        {"betas": (0.3, 0.95), "lr": 0.1},
        {"betas": (0.5, 0.99)},
        {"betas": (0.0, 0.0), "lr": 1},
        {"betas": (0.9, 1e-9)},
        {"betas": (0.95, 0.9999999), "eps": 1e-15},
        {"eps": 0.0, "lr": 0.3},
        {"eps": 0.1, "lr": 1e-6},
        {"lr": 0.0, "weight_decay": 0.5},
    ],
    ids=str,
)
def test_bits_for_numbers(numbers: dict[str, Any], rounding: str) -> None:
    # Room for any values: a layout that stores them dense has nothing for the kernel.
    compare("gaussian", rounding, 8, 1024, **numbers)
    compare("sparse", rounding, 4, 1024, **numbers)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("kind", ["sparse", "random bits", "extremes", "nan"])
@pytest.mark.parametrize("capacity", [200, 768])
def test_hostile_gradients(kind: str, rounding: str, capacity: int) -> None:
    compare(kind, rounding, 20, capacity, lr=0.1, weight_decay=0.01)


def test_large_slots_take_fewer_warps() -> None:
    compare("gaussian", "foreach", 3, 1536)


def test_small_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    from lct.backends.cuda import arena

    monkeypatch.setattr(arena.of(0), "limit_chunks", 6)
    compare("random bits", "foreach", 10, 68, lr=0.1)
    assert arena.of(0).counters().failed_groups == 0


class Model(nn.Module):
    """Two matrices, a channels-last kernel and a vector, all with random gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        kernel = torch.randn(64, 32, 3, 3) * 0.02
        self.first = nn.Parameter(torch.randn(300, 257) * 0.02)
        self.second = nn.Parameter(torch.randn(128, 512) * 0.02)
        self.kernel = nn.Parameter(kernel.contiguous(memory_format=torch.channels_last))
        self.vector = nn.Parameter(torch.randn(100))
        self.to(DEVICE, torch.bfloat16)

    def set_grads(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for parameter in self.parameters():
            values = torch.randn(parameter.shape, generator=generator).to(DEVICE, torch.bfloat16)
            grad = torch.empty_strided(
                parameter.shape, parameter.stride(), device=DEVICE, dtype=torch.bfloat16
            )
            parameter.grad = grad.copy_(values)


def count_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by the rounding of every parameter that a kernel steps."""
    taken: list[str] = []
    fused_adam = ops.fused_adam

    def counted(updates: Any, grads: Any, **update: Any) -> None:
        taken.extend([update["rounding"]] * len(updates))
        fused_adam(updates, grads, **update)

    monkeypatch.setattr(ops, "fused_adam", counted)
    return taken


def assert_same(model: Model, optimizer: Any, dense: Model, expected: Any) -> None:
    for (name, got), (_, want) in zip(
        model.named_parameters(), dense.named_parameters(), strict=True
    ):
        plain = got.dense() if isinstance(got, CompressedWeight) else got
        assert_bits(plain.detach(), want.detach(), name)
        assert_bits(got.grad, want.grad, f"gradient of {name}")
    ours, theirs = optimizer.state_dict()["state"], expected.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for key, values in theirs.items():
        for name in MOMENTS:
            assert_bits(ours[key][name], values[name], f"{name} of parameter {key}")
        assert ours[key]["step"].item() == values["step"].item()
        assert ours[key]["step"].device == values["step"].device


@pytest.mark.parametrize("rounding", [None, *ROUNDINGS])
@pytest.mark.parametrize("kind", KINDS)
def test_optimizer(kind: str, rounding: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = count_kernels(monkeypatch)
    choice = ROUNDINGS[rounding] if rounding else {}
    dense, model = Model(), Model()
    lct.compress_(model)
    expected = KINDS[kind](dense.parameters(), lr=0.01, weight_decay=0.1, **choice)
    optimizer = getattr(lct.optim, kind)(model.parameters(), lr=0.01, weight_decay=0.1, **choice)
    for step in range(10):
        for one, its in ((dense, expected), (model, optimizer)):
            one.set_grads(step)
            its.step()
    assert_same(model, optimizer, dense, expected)
    # The first step makes the moments; vectors are never compressed.
    # Nor does the kernel take fused steps with L2 decay.
    launches = 0 if (kind, rounding) == ("Adam", "fused") else 9 * 3
    assert taken == [rounding or "foreach"] * launches


def test_what_no_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = count_kernels(monkeypatch)
    dense, model = Model(), Model()
    lct.compress_(model)
    options: dict[str, Any] = {"amsgrad": True, "foreach": True}
    expected = torch.optim.Adam(dense.parameters(), **options)
    optimizer = lct.optim.Adam(model.parameters(), **options)
    for step in range(3):
        for one, its in ((dense, expected), (model, optimizer)):
            one.set_grads(step)
            its.step()
    assert_same(model, optimizer, dense, expected)
    assert not taken


@pytest.mark.parametrize("kind", KINDS)
def test_grad_scale_and_found_inf(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = count_kernels(monkeypatch)
    decay = 0.0 if kind == "Adam" else 0.1
    dense, model = Model(), Model()
    lct.compress_(model)
    expected = KINDS[kind](dense.parameters(), lr=0.01, weight_decay=decay, fused=True)
    optimizer = getattr(lct.optim, kind)(
        model.parameters(), lr=0.01, weight_decay=decay, fused=True
    )
    for step, found in enumerate([0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0]):
        for one, its in ((dense, expected), (model, optimizer)):
            one.set_grads(step)
            its.grad_scale = torch.tensor(3.1 if step % 2 else 65536.0, device=DEVICE)
            its.found_inf = torch.tensor(found, device=DEVICE)
            its.step()
        assert_same(model, optimizer, dense, expected)
    assert taken == ["fused"] * (6 * 3)


def named_weights(compress: bool) -> nn.ParameterDict:
    """Matrices of several sizes and a vector, from one seed."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"a": (256, 512), "b": (3, 64), "c": (1030, 2048), "bias": (512,)}
    made = {
        name: nn.Parameter((torch.randn(shape, generator=generator) * 0.02).bfloat16().to(DEVICE))
        for name, shape in shapes.items()
    }
    model = nn.ParameterDict(made)
    if compress:
        lct.compress_(model)
    return model


def set_grads(model: nn.ParameterDict, seed: int, names: tuple[str, ...] | None = None) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.items():
        grad = (torch.randn(param.shape, generator=generator) * 1e-2).bfloat16().to(DEVICE)
        param.grad = grad if names is None or name in names else None


def assert_same_optimizers(
    expected: nn.ParameterDict, theirs: Any, model: nn.ParameterDict, ours: Any
) -> None:
    state = ours.state_dict()["state"]
    for number, (name, param) in enumerate(model.items()):
        got = param.dense() if isinstance(param, CompressedWeight) else param.detach()
        assert_bits(got, expected[name].detach(), name)
        for key, value in theirs.state[expected[name]].items():
            assert_bits(state[number][key].to(DEVICE), value, f"{key} of {name}")


@pytest.mark.parametrize("kind", KINDS)
def test_captured_optimizer_step(kind: str) -> None:
    """``step()`` as a whole in a CUDA graph, which counts its replays; a dense vector beside."""
    decay = 0.1 if kind == "AdamW" else 0.0
    options = {"lr": 0.01, "weight_decay": decay, "fused": True, "capturable": True}
    dense, model = named_weights(False), named_weights(True)
    theirs = KINDS[kind](dense.values(), **options)
    ours = getattr(lct.optim, kind)(model.values(), **options)
    for seed in range(2):
        for some, optimizer in ((dense, theirs), (model, ours)):
            set_grads(some, seed)
            optimizer.step()
    lct.reserve_arena(32 << 20)  # all chunks that a step may take, beside those in use
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    for _ in range(5):
        graph.replay()
        theirs.step()
    assert_same_optimizers(dense, theirs, model, ours)


def test_captures_that_are_refused() -> None:
    """Before anything changes: counts on the CPU, a first step, what no kernel takes."""
    for options, steps, match in (
        ({"fused": True}, 2, "needs fused=True and capturable=True"),
        ({}, 2, "needs fused=True and capturable=True"),
        ({"fused": True, "capturable": True}, 0, "stepped before its capture"),
        ({"fused": True, "capturable": True, "amsgrad": True}, 2, "no amsgrad"),
        ({"fused": True, "capturable": True, "weight_decay": 0.1}, 2, "or L2 decay"),
    ):
        model = named_weights(True)
        optimizer = lct.optim.Adam(model.values(), **options)
        set_grads(model, 0)
        for _ in range(steps):
            optimizer.step()
        before = model["a"].dense()
        lct.reserve_arena(8 << 20)
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(RuntimeError, match=match), torch.cuda.graph(graph):
            optimizer.step()
        assert_bits(model["a"].dense(), before, "a")


def test_fused_steps_of_many_share_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever each parameter's count of steps is."""
    from lct.backends.cuda import jit

    options = {"lr": 0.01, "fused": True}
    dense, model = named_weights(False), named_weights(True)
    theirs = torch.optim.AdamW(dense.values(), **options)
    ours = lct.optim.AdamW(model.values(), **options)
    launches: list[str] = []
    launch = jit.Call.launch

    def counted(call: Any, *how: Any, **more: Any) -> None:
        launches.append(type(call.args).__name__)
        launch(call, *how, **more)

    for seed, names in enumerate((None, ("a",), ("a", "c"), None, None)):
        if seed == 4:
            monkeypatch.setattr(jit.Call, "launch", counted)
        for some, optimizer in ((dense, theirs), (model, ours)):
            set_grads(some, seed, names)
            optimizer.step()
    assert launches.count("StepList") == 1
    assert_same_optimizers(dense, theirs, model, ours)
