"""The fused SGD step on CUDA: bits of torch's own paths on dense tensors, hostile ones too."""

import itertools
from typing import Any

import pytest
import torch

import lct

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
COUNT = 8192 * 5 + 1234
ROUNDINGS = {"foreach": {"foreach": True}, "single": {"foreach": False}, "fused": {"fused": True}}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.int16)


def random_bits(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, (count,), generator=generator, dtype=torch.int32).to(
        torch.int16
    )


def gradients(kind: str, step: int, count: int = COUNT) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    normal = torch.randn(count, generator=generator) * 1e-2 * 4.0 ** (step % 5)
    if kind == "gaussian":
        return normal.bfloat16()
    if kind == "sparse":
        return (normal * (torch.rand(count, generator=generator) > 0.9)).bfloat16()
    if kind == "random bits":
        return random_bits(count, step).view(torch.bfloat16)
    if kind == "extremes":
        return (
            torch.tensor([1e-38, -3e38, 0.0, 1.0])
            .repeat(count // 4 + 1)[:count]
            .roll(step)
            .bfloat16()
        )
    return (random_bits(count, step) | 0x7F80).view(torch.bfloat16)  # NaN payloads and infinities


def scaled_by(optimizer: torch.optim.Optimizer, scale: float | None) -> dict[str, Any]:
    """Let ``optimizer`` divide gradients, as a GradScaler does; the same for a step of a kernel."""
    scaler = dict.fromkeys(("grad_scale", "found_inf"))
    if scale is not None:
        scaler = {"grad_scale": torch.tensor(scale, device=DEVICE)}
        scaler["found_inf"] = torch.zeros((), device=DEVICE)
        for name, value in scaler.items():
            setattr(optimizer, name, value)
    return scaler


def compare(
    kind: str,
    rounding: str,
    steps: int,
    capacity: int | str,
    count: int = COUNT,
    scale: float | None = None,
    **options: Any,
) -> None:
    start = (
        (torch.randn(count, generator=torch.Generator().manual_seed(99)) * 0.02)
        .bfloat16()
        .to(DEVICE)
    )
    dense = torch.nn.Parameter(start.clone())
    torch_sgd = torch.optim.SGD([dense], **options, **ROUNDINGS[rounding])
    scaler = scaled_by(torch_sgd, scale)
    param = state = None
    for step in range(steps):
        grad = gradients(kind, step, count).to(DEVICE)
        dense.grad = grad.clone()
        torch_sgd.step()
        if param is None:
            # Torch makes the buffer at its first step; the kernel takes over from there.
            param = lct.encode(dense.detach(), capacity=capacity)
            state = lct.encode(torch_sgd.state[dense]["momentum_buffer"], capacity=capacity)
            continue
        param.sgd_(
            state,
            grad,
            lr=options["lr"],
            momentum=options["momentum"],
            dampening=options.get("dampening", 0.0),
            weight_decay=options.get("weight_decay", 0.0),
            nesterov=options.get("nesterov", False),
            maximize=options.get("maximize", False),
            rounding=rounding,
            **scaler,
        )
        for name, got, expected in (
            ("parameter", param.decode(), dense.detach()),
            ("momentum", state.decode(), torch_sgd.state[dense]["momentum_buffer"]),
        ):
            different = (bits(got) != bits(expected)).nonzero()
            assert not len(different), (
                f"{name} differs at step {step} in {len(different)} values, first at "
                f"{different[0].item()}: {bits(got)[different[0]].item():#x} instead of "
                f"{bits(expected)[different[0]].item():#x}"
            )
    # What a step leaves is what an encode of the same values with the same book gives.
    for compressed in (param, state):
        again = lct.CompressedTensor.from_canonical(
            compressed.canonical_bytes(), compressed.shape, DEVICE
        )
        assert torch.equal(bits(again.decode()), bits(compressed.decode()))


OPTIONS = [
    {"nesterov": nesterov, "maximize": maximize, "weight_decay": decay}
    for nesterov, maximize in itertools.product((False, True), repeat=2)
    for decay in (0.0, 0.1)
]
OPTIONS += [{"dampening": 0.3}, {"dampening": 0.3, "weight_decay": 0.1}]
OPTIONS.append({"dampening": 0.1, "weight_decay": 0.01, "maximize": True})
CASES = [
    (rounding, options)
    for rounding, options in itertools.product(ROUNDINGS, OPTIONS)
    if not (rounding == "fused" and options.get("maximize"))
]


@pytest.mark.parametrize("count", [2**22, 2**22 + 1])
@pytest.mark.parametrize(("rounding", "options"), CASES, ids=str)
def test_bits_of_many_values(rounding: str, options: dict, count: int) -> None:
    """A product that torch's kernel does not contract shows in few values. Which it contracts may
    depend on a value's place in its thread, and on whether loads are of four.
    """
    compare("gaussian", rounding, 4, "exact", count, lr=0.013, momentum=0.9, **options)


@pytest.mark.parametrize("count", [2**22, 2**22 + 1])
@pytest.mark.parametrize("options", [o for rounding, o in CASES if rounding == "fused"], ids=str)
def test_bits_of_many_scaled_values(options: dict, count: int) -> None:
    compare("gaussian", "fused", 4, "exact", count, 3.1, lr=0.013, momentum=0.9, **options)


@pytest.mark.parametrize("options", [o for o in OPTIONS if o.get("maximize")], ids=str)
def test_fused_maximize_is_stepped_by_torch(options: dict) -> None:
    with pytest.raises(ValueError, match="maximize must not be asked of the fused"):
        compare("gaussian", "fused", 2, "exact", lr=0.013, momentum=0.9, **options)
    start = gradients("gaussian", 99, 2**22).view(2048, 2048).to(DEVICE)
    dense, model = (torch.nn.ParameterDict({"weight": start.clone()}) for _ in range(2))
    lct.compress_(model)
    expected = torch.optim.SGD(dense.parameters(), 0.013, 0.9, fused=True, **options)
    optimizer = lct.optim.SGD(model.parameters(), 0.013, 0.9, fused=True, **options)
    for step in range(4):
        grad = gradients("gaussian", step, 2**22).view(2048, 2048).to(DEVICE)
        for some, its in ((dense, expected), (model, optimizer)):
            some["weight"].grad = grad.clone()
            its.step()
    assert torch.equal(bits(model["weight"].dense()), bits(dense["weight"].detach()))


@pytest.mark.parametrize(("rounding", "options"), CASES, ids=str)
def test_bits_of_torch(rounding: str, options: dict) -> None:
    compare("gaussian", rounding, 12, "exact", lr=0.013, momentum=0.9, **options)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("kind", ["sparse", "random bits", "extremes", "nan"])
@pytest.mark.parametrize("capacity", [200, 768])
def test_hostile_gradients(kind: str, rounding: str, capacity: int) -> None:
    compare(kind, rounding, 50, capacity, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)


def test_found_inf_skips_the_step() -> None:
    start = gradients("gaussian", 0).to(DEVICE)
    param, state = lct.encode(start), lct.encode(start)
    before = param.canonical_bytes(), state.canonical_bytes()
    found = torch.ones((), device=DEVICE)
    options = dict(
        lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False
    )
    param.sgd_(state, start, **options, rounding="fused", grad_scale=None, found_inf=found)
    assert (param.canonical_bytes(), state.canonical_bytes()) == before
    param.sgd_(
        state,
        start,
        **options,
        rounding="fused",
        grad_scale=None,
        found_inf=torch.zeros((), device=DEVICE),
    )
    assert param.canonical_bytes() != before[0]


def test_small_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    from lct.backends.cuda import arena

    monkeypatch.setattr(arena.of(0), "limit_chunks", 4)
    compare("random bits", "foreach", 50, 68, lr=0.1, momentum=0.9)
    assert arena.of(0).counters().failed_groups == 0


def test_graph_replay() -> None:
    start = gradients("gaussian", 0).to(DEVICE)
    param, state = lct.encode(start), lct.encode(start)
    dense, buffer = start.clone(), start.clone()
    grad = torch.empty_like(start)
    options = dict(
        lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False
    )
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        param.sgd_(state, grad, **options, rounding="foreach", grad_scale=None, found_inf=None)
    for step in range(10):
        grad.copy_(gradients("gaussian" if step % 3 else "random bits", step))
        graph.replay()
        torch._foreach_mul_([buffer], 0.9)
        torch._foreach_add_([buffer], [grad], alpha=1)
        torch._foreach_add_([dense], [buffer], alpha=-0.1)
        torch.cuda.synchronize()
        assert torch.equal(bits(param.decode()), bits(dense))
        assert torch.equal(bits(state.decode()), bits(buffer))


def two_weights() -> list[torch.nn.Parameter]:
    """Equal weights with one gradient: dense ones, and ones that LCT compressed."""
    start = (torch.randn(256, 512, generator=torch.Generator().manual_seed(1)) * 0.02).bfloat16()
    dense = torch.nn.Parameter(start.to(DEVICE))
    model = torch.nn.ParameterList([dense.detach().clone()])
    (ours,) = lct.compress_(model).parameters()
    grad = (torch.randn(256, 512, generator=torch.Generator().manual_seed(2)) * 1e-2).bfloat16()
    dense.grad, ours.grad = grad.to(DEVICE), grad.to(DEVICE)
    return [dense, ours]


def test_captured_optimizer_step() -> None:
    """``step()`` as a whole in a CUDA graph, with whatever the arena did before."""
    dense, ours = two_weights()
    options = {"lr": 0.1, "momentum": 0.9}
    expected, optimizer = torch.optim.SGD([dense], **options), lct.optim.SGD([ours], **options)
    for _ in range(2):
        expected.step()
        optimizer.step()
    lct.reserve_arena(8 << 20)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(5):
        graph.replay()
        expected.step()
    assert torch.equal(bits(ours.dense()), bits(dense.detach()))


def test_dropped_payloads_are_no_reason_to_look_at_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks of payloads that are gone stay in use until a sweep: a step must not wait for them."""
    from lct import ops

    _, ours = two_weights()
    optimizer = lct.optim.SGD([ours], lr=0.1, momentum=0.9)
    optimizer.step()
    hostile = random_bits(8192 * 500, 3).view(torch.bfloat16).to(DEVICE)
    for _ in range(3):
        assert lct.encode(hostile).group_counts().spilled == 500
    looks: list[int] = []
    settle = ops.settle_arena
    monkeypatch.setattr(ops, "settle_arena", lambda d: looks.append(1) or settle(d))
    steps_that_looked = 0
    for _ in range(40):
        looks.clear()  # one look settles twice where others hold many chunks
        optimizer.step()
        steps_that_looked += bool(looks)
    assert steps_that_looked <= 1


def test_many_tensors_take_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of weights of all sizes: bits of torch's foreach, in launches of up to 16."""
    from lct.backends.cuda import jit

    shapes = [(3 + 37 * k, 64) for k in range(40)] + [(2048, 1030)]

    def parameters() -> list[torch.nn.Parameter]:
        generator = torch.Generator().manual_seed(5)
        return [
            torch.nn.Parameter((torch.randn(s, generator=generator) * 0.02).bfloat16().to(DEVICE))
            for s in shapes
        ]

    dense = parameters()
    model = torch.nn.ParameterList(parameters())
    lct.compress_(model)
    ours = list(model.parameters())
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
    expected, optimizer = torch.optim.SGD(dense, **options), lct.optim.SGD(ours, **options)
    launches: list[str] = []
    launch = jit.Call.launch
    kernels = {}

    def counted(call: jit.Call, *how: Any, **more: Any) -> None:
        launches.append(kernels.get(call.function, ""))
        launch(call, *how, **more)

    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for ours_one, dense_one in zip(ours, dense, strict=True):
            grad = (torch.randn(dense_one.shape, generator=generator) * 1e-2).bfloat16().to(DEVICE)
            ours_one.grad, dense_one.grad = grad, grad.clone()
        expected.step()
        if step == 3:
            kernels.update({row.function: key[1] for key, row in jit._loaded.items()})
            monkeypatch.setattr(jit.Call, "launch", counted)
        optimizer.step()
        for ours_one, dense_one in zip(ours, dense, strict=True):
            is_compressed = isinstance(ours_one, lct.CompressedWeight)
            got = ours_one.dense() if is_compressed else ours_one.detach()
            assert torch.equal(bits(got), bits(dense_one.detach()))
    for ours_one, dense_one in zip(ours, dense, strict=True):
        state = optimizer.state[ours_one]["momentum_buffer"]
        got = state.decode() if isinstance(state, lct.CompressedTensor) else state
        assert torch.equal(bits(got), bits(expected.state[dense_one]["momentum_buffer"]))
    compressed = sum(isinstance(p, lct.CompressedWeight) for p in ours)
    assert launches.count("sgd_step") == -(-compressed // 16)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_channels_last(rounding: str) -> None:
    """A payload holds values in the order of memory, and so must the gradient."""
    kernel = (torch.randn(64, 32, 3, 3) * 0.02).to(memory_format=torch.channels_last)
    dense = torch.nn.Parameter(kernel.bfloat16().to(DEVICE))
    module = torch.nn.ParameterList([torch.nn.Parameter(dense.detach().clone())])
    lct.compress_(module)
    ours = module[0]
    options = {"lr": 0.1, "momentum": 0.9, **ROUNDINGS[rounding]}
    expected, optimizer = torch.optim.SGD([dense], **options), lct.optim.SGD([ours], **options)
    # Torch's fused step takes no gradient that lies otherwise than its weight; the last one does.
    for step in range(3 if rounding == "fused" else 4):
        grad = torch.randn(64, 32, 3, 3, generator=torch.Generator().manual_seed(step)) * 1e-2
        grad = grad.bfloat16().to(DEVICE)
        if step < 3:
            grad = grad.to(memory_format=torch.channels_last)
        dense.grad, ours.grad = grad.clone(), grad.clone()
        expected.step()
        optimizer.step()
        assert torch.equal(bits(ours.dense().contiguous()), bits(dense.detach().contiguous()))
