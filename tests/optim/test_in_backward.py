"""Steps in backward: bits of an optimizer for each parameter, gradients freed, loops unchanged."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_adam import stepped_by_torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch.optim.sgd import sgd as torch_sgd
from torch.utils.checkpoint import checkpoint

import lct
from lct import ops
from lct.errors import ArenaExhaustedError
from lct.nn import CompressedWeight
from training import BF16, Mlp, assert_same_bits, assert_same_model, plain

Options = dict[str, Any]
KINDS: dict[str, tuple[str, Options]] = {
    "sgd": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "sgd-foreach": ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "foreach": True}),
    "sgd-plain": ("SGD", {"lr": 0.1, "foreach": True}),
    "adam": ("Adam", {"lr": 1e-2, "amsgrad": True}),
    "adamw": ("AdamW", {"lr": 1e-2, "weight_decay": 0.1}),
    "adamw-foreach": ("AdamW", {"lr": 1e-2, "foreach": True}),
    "muon": ("Muon", {"lr": 1e-2}),
}
# Every parameter at once; some together, the rest at the end; all at the end.
BATCHES = [0, 3000, 1 << 30]


class Mixed(nn.Module):
    """Matrices, of which ``plain`` is never compressed, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.mlp = Mlp()
        self.plain = nn.Linear(64, 32)
        self.wide = nn.Linear(32, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(self.plain(self.mlp(self.norm(x))))


def make(compressed: bool, build: Callable[[], nn.Module] = Mixed) -> nn.Module:
    torch.manual_seed(3)
    model = build().to(BF16)
    if compressed:
        lct.compress_(model, filter_fn=lambda name, parameter: "plain" not in name)
    return model


def stepped(kind: str, model: nn.Module) -> list[nn.Parameter]:
    """The parameters that an optimizer of ``kind`` takes; the others stay as they are."""
    for parameter in model.parameters():
        if kind == "muon" and parameter.dim() != 2:
            parameter.requires_grad_(False)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def ours(
    kind: str, model: nn.Module, batch_bytes: int
) -> tuple[torch.optim.Optimizer, lct.optim.StepInBackward]:
    name, options = KINDS[kind]
    optimizer = getattr(lct.optim, name)(stepped(kind, model), **options)
    return optimizer, lct.optim.step_in_backward(optimizer, batch_bytes=batch_bytes)


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(BF16)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(batch(step)).float().square().mean()


def dense_optimizers(kind: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """An optimizer for each parameter: what torch's users write for steps in backward."""
    name, options = KINDS[kind]
    return [getattr(torch.optim, name)([p], **options) for p in stepped(kind, model)]


def train_dense(
    kind: str, steps: int, micro_batches: int = 1
) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = make(False)
    optimizers = dense_optimizers(kind, model)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers]
    for step in range(steps):
        for micro in range(micro_batches):
            loss_of(model, step * micro_batches + micro).backward()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return model, optimizers


def assert_same(
    model: nn.Module, optimizer: Any, expected: nn.Module, dense: Sequence[torch.optim.Optimizer]
) -> None:
    for theirs, param in zip(expected.parameters(), model.parameters(), strict=True):
        assert_same_bits(theirs, param)
    members = [p for group in optimizer.param_groups for p in group["params"]]
    for param, one in zip(members, dense, strict=True):
        (theirs,) = one.param_groups[0]["params"]
        for name, value in one.state[theirs].items():
            if value is not None:
                assert_same_bits(value, plain(optimizer.state[param][name]), name)


def by_torch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let torch stand for the kernels where there is no GPU, two updates a launch; gives the
    numbers of updates that launches took, which grow.
    """
    launches: list[int] = []

    def sgd(updates: Any, grads: Any, **update: Any) -> None:
        launches.append(len(updates))
        rounding = update.pop("rounding")
        for tensors, grad in zip(updates, grads, strict=True):
            weight, buffer = dense = [
                ops.decode(stored, layout, torch.empty(layout.num_values, dtype=BF16))
                for stored, layout in tensors
            ]
            torch_sgd(
                [weight], [grad.reshape(-1)], [buffer], foreach=rounding == "foreach", **update
            )
            for (stored, layout), values in zip(tensors, dense, strict=True):
                stored.spill = ops.encode(values, layout, (0,), stored).spill

    def adam(updates: Any, grads: Any, **update: Any) -> None:
        launches.append(len(updates))
        stepped_by_torch(updates, grads, **update)

    def in_twos(updates: Sequence[Any]) -> Iterator[range]:
        for first in range(0, len(updates), 2):
            yield range(first, min(first + 2, len(updates)))

    monkeypatch.setattr(ops, "can_step_fused", lambda stored, layout: layout.preset.pooled)
    monkeypatch.setattr(ops, "fused_sgd", sgd)
    monkeypatch.setattr(ops, "fused_adam", adam)
    monkeypatch.setattr(ops, "fused_launches", in_twos)
    return launches


@pytest.mark.parametrize("batch_bytes", BATCHES)
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (kind, how)
        for kind in KINDS
        for how in ("dense", "compressed", "kernels")
        if (kind, how) != ("muon", "kernels")  # its kernel takes one parameter: test_muon.py
    ],
)
def test_bits_of_an_optimizer_for_each_parameter(
    kind: str, how: str, batch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, dense = train_dense(kind, 4)
    launches = by_torch(monkeypatch) if how == "kernels" else []
    model = make(how != "dense")
    assert any(isinstance(p, CompressedWeight) for p in model.parameters()) == (how != "dense")
    optimizer, _ = ours(kind, model, batch_bytes)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(4):
        loss_of(model, step).backward()
        assert all(p.grad is None for p in model.parameters())
        # What an ordinary loop does after backward stays, and does nothing.
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert_same(model, optimizer, expected, dense)
    if how == "kernels" and kind not in ("adam", "sgd-plain"):
        assert launches and (max(launches) == 2 if batch_bytes == BATCHES[-1] else True)


@pytest.mark.parametrize("batch_bytes", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_join_later(kind: str, batch_bytes: int) -> None:
    """Frozen for some steps: in a batch some have state and some none, or count other steps."""
    runs = []
    for compressed in (False, True):
        model = make(compressed)
        if compressed:
            optimizer, _ = ours(kind, model, batch_bytes)
        else:
            dense = dense_optimizers(kind, model)
        late = [*model.mlp.parameters(), model.plain.bias][kind == "muon" :: 2]
        for step in range(5):
            if step < 3 or step == 4:
                for parameter in late:
                    parameter.requires_grad_(step >= 2)
            loss_of(model, step).backward()
            if not compressed:
                for one in dense:
                    one.step()
                    one.zero_grad()
        runs.append(model)
    assert_same(runs[1], optimizer, runs[0], dense)


class Odd(nn.Module):
    """What would send a whole list of foreach's another way: a sparse gradient, odd strides."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 64, sparse=True, dtype=BF16)
        self.bias = nn.Parameter(torch.randn(64).to(BF16))
        self.wide = nn.Parameter(torch.randn(64, dtype=torch.float64))
        self.strided = nn.Parameter(torch.randn(128).to(BF16)[::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.table((x[:, 0] > 0).long())
        return (rows + self.bias) * self.strided + self.wide.to(BF16)


def test_gradients_that_torch_does_not_take_with_others() -> None:
    torch.manual_seed(0)
    expected = Odd()
    torch.manual_seed(0)
    model = Odd()
    dense = dense_optimizers("sgd-plain", expected)
    optimizer, steps = ours("sgd-plain", model, 1 << 20)
    for step in range(3):
        for run in (expected, model):
            loss_of(run, step).backward()
        for one in dense:
            one.step()
            one.zero_grad()
    assert_same(model, optimizer, expected, dense)
    steps.remove()
    loss_of(model, 0).backward()
    kinds = {n: optimizer._kind({}, p) for n, p in model.named_parameters()}  # type: ignore[attr-defined]
    assert kinds["bias"] == kinds["wide"]
    assert len({kinds["bias"], kinds["strided"], kinds["table.weight"]}) == 3


@pytest.mark.parametrize("batch_bytes", BATCHES)
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_pitfall_14_accumulation(kind: str, batch_bytes: int) -> None:
    expected, dense = train_dense(kind, 3, micro_batches=3)
    model = make(True)
    optimizer, steps = ours(kind, model, batch_bytes)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(3):
        with steps.accumulate():
            for micro in range(2):
                loss_of(model, step * 3 + micro).backward()
            assert all(p.grad is not None for p in model.parameters())
            with pytest.raises(RuntimeError, match="twice"), steps.accumulate():
                pass
        loss_of(model, step * 3 + 2).backward()
        assert all(p.grad is None for p in model.parameters())
        scheduler.step()
    assert_same(model, optimizer, expected, dense)


@pytest.mark.parametrize("batch_bytes", [0, 8192, 20000])
def test_live_gradients_stay_below_a_batch_and_the_largest(batch_bytes: int) -> None:
    model = make(True, lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))))
    largest = 64 * 64 * 2
    storages: list[weakref.ref[torch.UntypedStorage]] = []
    most = waited = 0

    def count(param: torch.Tensor) -> None:
        nonlocal most, waited
        assert param.grad is not None
        storages.append(weakref.ref(param.grad.untyped_storage()))
        alive = [storage.nbytes() for ref in storages if (storage := ref()) is not None]
        most, waited = max(most, sum(alive)), max(waited, len(alive))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    lct.optim.step_in_backward(
        lct.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), batch_bytes=batch_bytes
    )
    for step in range(2):
        loss_of(model, step).backward()
        assert not any(ref() is not None for ref in storages)
    assert batch_bytes <= most <= batch_bytes + largest
    assert (waited == 1) == (batch_bytes == 0)


class _Fails(torch.autograd.Function):
    """The identity, whose backward raises when it is told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fails: bool) -> torch.Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.fails:
            raise ArithmeticError("no gradient")
        return grad, None


class Failing(Mixed):
    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(self.plain(_Fails.apply(self.mlp(self.norm(x)), self.fails)))


@pytest.mark.parametrize("drop", [True, False], ids=["zero_grad", "adds up"])
def test_a_backward_that_raises(drop: bool) -> None:
    """What it collected is not stepped by a later one; the gradients are there until dropped."""
    expected = make(False, Failing)
    dense = dense_optimizers("adamw", expected)
    model = make(True, Failing)
    optimizer, _ = ours("adamw", model, 1 << 30)
    loss_of(model, 0).backward()
    before = [plain(p).clone() for p in model.parameters()]
    model.fails = True
    with pytest.raises(ArithmeticError):
        loss_of(model, 1).backward()
    for old, param in zip(before, model.parameters(), strict=True):
        assert_same_bits(old, param)
    waiting = [p for p in model.parameters() if p.grad is not None]
    assert waiting and all(
        any(p is own for m in (model.plain, model.wide) for own in m.parameters()) for p in waiting
    )
    model.fails = False
    # One in between that has other parameters alone.
    model.mlp(batch(2)).float().square().mean().backward()
    assert all(p.grad is not None for p in waiting)
    if drop:
        optimizer.zero_grad()
    loss_of(model, 3).backward()
    assert all(p.grad is None for p in model.parameters())

    def step() -> None:
        for one in dense:
            one.step()
            one.zero_grad()

    loss_of(expected, 0).backward()
    step()
    expected.fails = True
    with pytest.raises(ArithmeticError):
        loss_of(expected, 1).backward()
    waited = [p.grad for p in expected.parameters()]
    for one in dense:
        one.zero_grad()
    expected.mlp(batch(2)).float().square().mean().backward()
    step()
    if not drop:
        for param, grad in zip(expected.parameters(), waited, strict=True):
            param.grad = grad
    expected.fails = False
    loss_of(expected, 3).backward()
    step()
    assert_same(model, optimizer, expected, dense)


class Checkpointed(Mixed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        x = checkpoint(self.mlp, x, use_reentrant=True)
        return checkpoint(self.wide, self.plain(x), use_reentrant=True)


@pytest.mark.parametrize("batch_bytes", BATCHES)
def test_a_backward_within_a_backward(batch_bytes: int) -> None:
    """Reentrant checkpoints: each has batches of its own, and the one around it keeps its."""
    expected, dense = train_dense("adamw", 3)
    model = make(True, Checkpointed)
    optimizer, _ = ours("adamw", model, batch_bytes)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    calls: list[int] = []
    step_params = optimizer.step_params

    def counted(group: Any, params: Any) -> None:
        calls.append(len(params))
        step_params(group, params)

    optimizer.step_params = counted  # type: ignore[attr-defined]
    for step in range(3):
        loss_of(model, step).backward()
        assert all(p.grad is None for p in model.parameters())
        scheduler.step()
    assert_same(model, optimizer, expected, dense)
    if batch_bytes == BATCHES[-1]:
        # The last block; of the first what is dense, and what is not; what is around them.
        assert calls == [1, 1, 2, 4] * 3


def test_a_gradient_that_is_dropped_while_it_waits() -> None:
    model = make(True)
    optimizer, _ = ours("sgd", model, 1 << 30)
    before = plain(model.wide.weight).clone()

    def drop(param: torch.Tensor) -> None:
        model.wide.weight.grad = None

    handle = model.norm.bias.register_post_accumulate_grad_hook(drop)
    loss_of(model, 0).backward()
    assert_same_bits(before, model.wide.weight)
    assert model.wide.weight not in optimizer.state
    assert model.plain.weight in optimizer.state
    handle.remove()
    loss_of(model, 0).backward()
    assert model.wide.weight in optimizer.state


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("batch_bytes", [30000, 1 << 30], ids=["in a hook", "at the end"])
def test_an_error_in_a_step(kind: str, batch_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches that were made count, once; the other parameters are as they were."""
    before, after = (train_dense(kind, steps)[0] for steps in (2, 3))
    by_torch(monkeypatch)
    model = make(True)
    optimizer, _ = ours(kind, model, batch_bytes)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(2):
        loss_of(model, step).backward()
        scheduler.step()
    name = {"sgd": "fused_sgd", "adamw": "fused_adam"}[kind]
    launch, launches = getattr(ops, name), 0

    def fails_at_the_second(*args: Any, **update: Any) -> None:
        nonlocal launches
        launches += 1
        if launches == 2:
            raise ArenaExhaustedError("no room")
        launch(*args, **update)

    with monkeypatch.context() as patch:
        patch.setattr(ops, name, fails_at_the_second)
        with pytest.raises(ArenaExhaustedError):
            loss_of(model, 2).backward()
    at_the_end = batch_bytes == 1 << 30
    for param, old, new in zip(*(m.parameters() for m in (model, before, after)), strict=True):
        # The first layer's norm has no gradient where the backward ended before it.
        reached = at_the_end or param.dim() == 2
        assert_same_bits(new if reached and param.grad is None else old, param)
    left = [isinstance(p, CompressedWeight) for p in model.parameters() if p.grad is not None]
    weights = [isinstance(p, CompressedWeight) for p in model.parameters()]
    assert sum(left) == sum(weights) - 2 > 0
    if at_the_end:
        optimizer.step()
        optimizer.zero_grad()
        assert_same_model(after, model)


def test_updates_of_a_launch() -> None:
    """As the kernel takes them: at most 16, and of half of the arena at worst."""

    def payload(groups: int, limit_chunks: int) -> Any:
        arena = SimpleNamespace(limit_chunks=limit_chunks)
        stored = SimpleNamespace(
            payload=SimpleNamespace(is_cuda=True), spill=SimpleNamespace(arena=arena)
        )
        return [(stored, SimpleNamespace(num_groups=groups))] * 2

    def launches(*groups: int, limit_chunks: int = 400) -> list[list[int]]:
        return [list(n) for n in ops.fused_launches([payload(g, limit_chunks) for g in groups])]

    assert launches(*[1] * 20) == [list(range(16)), list(range(16, 20))]
    assert launches(60, 30, 20, 500, 10) == [[0, 1], [2], [3], [4]]
    assert launches(500) == [[0]] and launches() == [[]]


@pytest.mark.parametrize("within", [False, True], ids=["after an error", "within a backward"])
def test_remove_while_gradients_wait(within: bool) -> None:
    model = make(True, Failing)
    optimizer, steps = ours("sgd", model, 1 << 30)
    before = [plain(p).clone() for p in model.parameters()]
    if within:
        model.norm.bias.register_post_accumulate_grad_hook(lambda param: steps.remove())
        loss_of(model, 0).backward()
    else:
        model.fails = True
        with pytest.raises(ArithmeticError):
            loss_of(model, 0).backward()
        steps.remove()
        model.fails = False
        model.zero_grad()
        loss_of(model, 0).backward()
    # An ordinary optimizer now.
    for old, param in zip(before, model.parameters(), strict=True):
        assert_same_bits(old, param)
        assert param.grad is not None
    expected = make(False)
    dense = dense_optimizers("sgd", expected)
    loss_of(expected, 0).backward()
    for one in (*dense, optimizer):
        one.step()
    assert_same(model, optimizer, expected, dense)


def test_a_hook_that_is_called_by_hand() -> None:
    """Outside of a backward nobody would step what waits."""
    parameter = nn.Parameter(torch.ones(4))
    lct.optim.step_in_backward(lct.optim.SGD([parameter], lr=0.5))
    parameter.grad = torch.ones(4)
    (hook,) = parameter._post_accumulate_grad_hooks.values()
    hook(parameter)
    assert parameter.tolist() == [0.5] * 4 and parameter.grad is None


def test_compiled_autograd() -> None:
    """Its graphs never come to the callback at the end of a backward."""
    expected, dense = train_dense("sgd", 2)
    model = make(True)
    optimizer, _ = ours("sgd", model, 1 << 30)
    for step in range(2):
        loss = loss_of(model, step)
        with compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
        assert all(p.grad is None for p in model.parameters())
    assert_same(model, optimizer, expected, dense)


def test_at_most_one_gradient_exists() -> None:
    model = make(True)
    optimizer = lct.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    alive: list[int] = []
    step = optimizer.step

    def counted(*args: Any) -> Any:
        alive.append(sum(p.grad is not None for p in model.parameters()))
        return step(*args)

    optimizer.step = counted  # type: ignore[method-assign]
    lct.optim.step_in_backward(optimizer)
    loss_of(model, 0).backward()
    assert alive == [1] * len(list(model.parameters()))


def test_removed_hooks_leave_an_ordinary_optimizer() -> None:
    model = make(True)
    optimizer = lct.optim.SGD(model.parameters(), lr=0.1)
    steps = lct.optim.step_in_backward(optimizer)
    steps.remove()
    before = [plain(p).clone() for p in model.parameters()]
    loss_of(model, 0).backward()
    assert all(p.grad is not None for p in model.parameters())
    for old, param in zip(before, model.parameters(), strict=True):
        assert_same_bits(old, param)


def test_torchs_own_optimizer() -> None:
    expected, dense = train_dense("sgd", 3)
    model = make(False)
    optimizer = torch.optim.SGD(model.parameters(), **KINDS["sgd"][1])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    lct.optim.step_in_backward(optimizer)
    for step in range(3):
        loss_of(model, step).backward()
        scheduler.step()
    assert_same(model, optimizer, expected, dense)


def test_groups_keep_their_options() -> None:
    model = make(True)
    params = list(model.parameters())
    groups = [{"params": params[:1], "lr": 0.0}, {"params": params[1:], "lr": 0.1}]
    optimizer = lct.optim.SGD(groups, lr=1.0)
    lct.optim.step_in_backward(optimizer)
    before = [plain(p).clone() for p in params]
    loss_of(model, 0).backward()
    assert_same_bits(before[0], params[0])
    moved = [not torch.equal(old, plain(p)) for old, p in zip(before[1:], params[1:], strict=True)]
    assert any(moved)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: lct.optim.step_in_backward(p), TypeError, "takes a torch.optim.Optimizer"),
        (
            lambda p: lct.optim.step_in_backward(torch.optim.SGD(p), max_norm=1.0),
            ValueError,
            "max_norm must be None: .* got 1.0",  # pitfall 15: or clip after backward
        ),
        (lambda p: lct.optim.step_in_backward(torch.optim.LBFGS(p)), ValueError, "no LBFGS"),
        (
            lambda p: lct.optim.step_in_backward(torch.optim.SGD([p[0].requires_grad_(False)])),
            ValueError,
            "require gradients, got one of shape",
        ),
        (
            lambda p: lct.optim.step_in_backward(lct.optim.SGD(p), batch_bytes=-1),
            ValueError,
            "batch_bytes must not be negative, got -1",
        ),
    ],
)
def test_refusals(
    call: Callable[[list[torch.Tensor]], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call([nn.Parameter(torch.zeros(2, 3))])
