"""``lct.optim.Adam`` and ``AdamW`` equal torch's bit for bit on the CPU, and behave like them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_sgd import set_grads, weights
from torch import nn

import lct
from lct import ops
from lct.nn import CompressedWeight
from lct.optim import adam as adam_module
from lct.tensor import CompressedTensor
from training import (
    BF16,
    Mlp,
    TiedTransformer,
    assert_same_bits,
    assert_same_losses,
    assert_same_model,
    assert_same_state,
    check_checkpoints_go_to_torch_and_back,
    check_grad_scaler,
    make,
    mlp_batches,
    mlp_loss,
    token_batches,
    token_loss,
    train,
)

KINDS = ["Adam", "AdamW"]
MODELS: dict[str, tuple[Any, Any, Any]] = {
    "mlp": (Mlp, mlp_loss, mlp_batches),
    "transformer": (TiedTransformer, token_loss, token_batches),
}
OPTIONS = [
    {"weight_decay": weight_decay, "maximize": maximize, "amsgrad": amsgrad}
    for weight_decay, maximize, amsgrad in itertools.product((0, 0.1), (False, True), (False, True))
]


def kind_of(name: str, compressed: bool) -> Any:
    return getattr(lct.optim if compressed else torch.optim, name)


def compare(
    kind: str, dtype: torch.dtype = BF16, compressed: bool = True, steps: int = 4, **options: Any
) -> None:
    a, b = weights(False, dtype), weights(compressed, dtype)
    expected = kind_of(kind, False)(a.parameters(), **options)
    optimizer = kind_of(kind, True)(b.parameters(), **options)
    for step in range(steps):
        for model, opt in ((a, expected), (b, optimizer)):
            set_grads(model, step, skip="matrix" if step == 0 else "")
            opt.step()
        assert_same_model(a, b)
    assert_same_state(expected, optimizer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_twenty_steps_of_training(kind: str, name: str) -> None:
    """With everything on: activations, accumulation, clipping, a scheduler."""
    build, loss_of, batches = MODELS[name]
    torch.manual_seed(3)
    data = batches(40)
    runs = []
    for compressed in (False, True):
        model = make(build, compressed)
        optimizer = kind_of(kind, compressed)(model.parameters(), lr=0.01, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        losses = train(
            model,
            optimizer,
            loss_of,
            data,
            activations=compressed,
            accumulate=2,
            clip=0.5,
            scheduler=scheduler,
        )
        runs.append((losses, model, optimizer))
    assert_same_losses(runs[0][0], runs[1][0])
    assert_same_model(runs[0][1], runs[1][1])
    assert_same_state(runs[0][2], runs[1][2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(f"{v:g}" for v in o.values()))
def test_same_bits_for_all_options(kind: str, options: dict[str, Any], foreach: bool) -> None:
    compare(kind, lr=0.1, foreach=foreach, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"lr": 0.5}, {"lr": 0.0}, {"betas": (0.0, 0.0)}, {"betas": (0.5, 0.95)}, {"eps": 0.1}],
    ids=str,
)
def test_same_bits_for_numbers(options: dict[str, Any]) -> None:
    compare("AdamW", **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("options", OPTIONS[::3], ids=str)
def test_same_bits_for_fused(kind: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Torch's fused Adam repeats its own bits on the CPU for all three dtypes (2.13)."""
    compare(kind, dtype, lr=0.1, fused=True, **options)


@pytest.mark.parametrize("compressed", [True, False], ids=["compressed", "dense"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.float64])
def test_same_bits_for_dtypes_and_dense_weights(dtype: torch.dtype, compressed: bool) -> None:
    compare("AdamW", dtype, compressed, lr=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_tensor_numbers_and_groups(kind: str) -> None:
    results = []
    for compressed in (False, True):
        model = weights(compressed)
        optimizer = kind_of(kind, compressed)(
            [
                {"params": [model.matrix], "lr": torch.tensor(0.05)},
                {"params": [model.cube], "weight_decay": 0.1, "betas": (0.8, 0.9)},
            ],
            lr=0.1,
        )
        optimizer.add_param_group({"params": [model.vector, model.tiny], "maximize": True})
        for step in range(3):
            set_grads(model, step)
            optimizer.step()
        results.append((model, optimizer))
    assert_same_model(results[0][0], results[1][0])
    assert_same_state(results[0][1], results[1][1])
    compare(kind, betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False)


@pytest.mark.parametrize("compressed", [True, False], ids=["compressed", "dense"])
def test_moments_are_compressed(compressed: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(128, 256).to(BF16)
    if compressed:
        lct.compress_(model)
    optimizer = lct.optim.AdamW(model.parameters(), amsgrad=True)
    for step in range(30):
        set_grads(model, step)
        optimizer.step()
    state = optimizer.state[model.weight]
    names = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    assert list(state) == ["step", *names]
    for name in names:
        assert isinstance(state[name], CompressedTensor), name
        assert state[name].ratio > 1.3, f"{name}: {state[name].ratio}"
    assert type(state["step"]) is torch.Tensor
    assert state["step"].item() == 30
    assert all(type(value) is torch.Tensor for value in optimizer.state[model.bias].values())
    payload = state["exp_avg_sq"].payload
    set_grads(model, 30)
    optimizer.step()
    assert state["exp_avg_sq"].payload is payload, "its memory is used again"


def test_memory_after_training() -> None:
    """Second moments have twice the range of gradients: where one does not pay it stays dense."""
    model = make(lambda: TiedTransformer(512, 64), True)
    optimizer = lct.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, token_loss, token_batches(30))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    for name in ("exp_avg", "exp_avg_sq"):
        held = [optimizer.state[p][name] for p in matrices]
        dense = [2 * p.numel() for p in matrices]
        assert all(v.nbytes <= size for v, size in zip(held, dense, strict=True)), name
        assert sum(v.nbytes for v in held) < 0.85 * sum(dense), name
        assert sum(isinstance(v, CompressedTensor) for v in held) >= len(held) - 1


def test_one_parameter_is_decoded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    torch_adam = adam_module.adam

    def spy(params: Any, grads: Any, *args: Any, **kwargs: Any) -> None:
        calls.append([tuple(p.shape) for p in params])
        torch_adam(params, grads, *args, **kwargs)

    monkeypatch.setattr(adam_module, "adam", spy)
    model = weights(True)
    optimizer = lct.optim.Adam(model.parameters(), foreach=True)
    set_grads(model, 0)
    optimizer.step()
    assert calls == [[(33, 32)], [(5, 7, 32)], [(2, 3)], [(37,)]]


def test_nothing_changes_where_torchs_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = weights(True)
    optimizer = lct.optim.AdamW(model.parameters())
    torch_adam = adam_module.adam

    def fail(*args: Any, **kwargs: Any) -> None:
        torch_adam(*args, **kwargs)
        raise RuntimeError("out of memory")

    for before_any_step in (True, False):
        set_grads(model, 0)
        if not before_any_step:
            optimizer.step()
        weight, saved = model.matrix.dense(), copy.deepcopy(optimizer.state_dict())
        with monkeypatch.context() as patch:
            patch.setattr(adam_module, "adam", fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                optimizer.step()
        assert_same_bits(weight, model.matrix)
        now = optimizer.state_dict()["state"]
        assert now.keys() == saved["state"].keys()
        for key, values in saved["state"].items():
            for name, value in values.items():
                assert_same_bits(value, now[key][name], f"{name} of {key}")


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_torchs_optimizer(kind: str) -> None:
    model = weights(True)
    optimizer = kind_of(kind, True)(model.parameters())
    dense = weights(False)
    reference = kind_of(kind, False)(dense.parameters())
    assert isinstance(optimizer, kind_of(kind, False))
    assert optimizer.defaults == reference.defaults
    assert repr(optimizer) == repr(reference)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *args: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *args: calls.append("post"))
    for m, opt in ((model, optimizer), (dense, reference)):
        set_grads(m, 0)
        opt.step()
    assert calls == ["pre", "post"]
    ours, theirs = optimizer.state_dict()["state"], reference.state_dict()["state"]
    for key, values in theirs.items():
        assert list(ours[key]) == list(values) == ["step", "exp_avg", "exp_avg_sq"]
        for name, value in values.items():
            mine = ours[key][name]
            assert type(mine) is torch.Tensor
            assert (mine.shape, mine.dtype) == (value.shape, value.dtype), name


def test_closure() -> None:
    runs = []
    for compressed in (False, True):
        model = make(TiedTransformer, compressed).eval()
        optimizer = kind_of("AdamW", compressed)(model.parameters())
        tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))

        def closure(model: Any = model, optimizer: Any = optimizer, tokens: Any = tokens) -> Any:
            optimizer.zero_grad()
            loss = token_loss(model, (tokens,))
            loss.backward()
            return loss

        runs.append([optimizer.step(closure) for _ in range(3)])
    assert_same_losses(*runs)


@pytest.mark.parametrize("kind", KINDS)
def test_bad_arguments(kind: str) -> None:
    model = weights(True)
    new = kind_of(kind, True)
    with pytest.raises(ValueError, match="each parameter once, got 3 parameters of which 1 repeat"):
        new([model.matrix, model.cube, model.matrix])
    with pytest.raises(ValueError, match=r"differentiable must be False.*got True"):
        new(model.parameters(), differentiable=True)
    with pytest.raises(ValueError, match=r"capturable must be False.*got True"):
        new(model.parameters(), capturable=True)
    with pytest.raises(ValueError, match=r"capturable must be False.*got True"):
        new([{"params": [model.matrix], "capturable": True}])
    with pytest.raises(ValueError, match="Invalid learning rate"):
        new(model.parameters(), lr=-1)
    with pytest.raises(RuntimeError, match="cannot be `True` together"):
        new(model.parameters(), fused=True, foreach=True)
    optimizer = new(model.parameters(), lr=torch.tensor(0.1))
    with pytest.raises(ValueError, match="differentiable must be False"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "differentiable": True})
    assert len(optimizer.param_groups) == 1
    fused = new(model.parameters(), fused=True, capturable=True)
    saved = kind_of(kind, False)(weights(False).parameters(), capturable=True, fused=True)
    fused.load_state_dict(saved.state_dict())
    assert fused.param_groups[0]["capturable"] is True
    saved = kind_of(kind, False)(weights(False).parameters(), capturable=True).state_dict()
    with pytest.raises(ValueError, match="capturable must be False"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["capturable"] is False


def test_refusals_come_before_anything_changes() -> None:
    """A later group is at fault; the first one keeps its values."""
    model = weights(True)
    optimizer = lct.optim.AdamW(
        [{"params": [model.matrix]}, {"params": [model.cube, model.vector]}], lr=0.1
    )
    set_grads(model, 0)
    optimizer.step()
    before, group = model.matrix.dense(), optimizer.param_groups[1]
    for changes, match in (
        ({"amsgrad": True}, "must have max_exp_avg_sq from a parameter's first step on"),
        ({"capturable": True}, "capturable must be False"),
        ({"foreach": True, "lr": torch.tensor(0.5)}, r"lr and betas must be numbers.*lr=0\.5"),
    ):
        kept = dict(group)
        group.update(changes)
        with pytest.raises(ValueError, match=match):
            optimizer.step()
        group.update(kept)
    model.vector.grad = model.vector.grad.to_sparse()
    with pytest.raises(RuntimeError, match="gradients must be dense, got one of layout"):
        optimizer.step()
    assert_same_bits(before, model.matrix)
    assert optimizer.state[model.matrix]["step"].item() == 1


@pytest.mark.parametrize("at", [1, 5])
@pytest.mark.parametrize("options", [{}, {"fused": True, "amsgrad": True}], ids=str)
def test_save_load_and_resume(at: int, options: dict[str, Any]) -> None:
    data = token_batches(8)

    def build() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = make(TiedTransformer, True).eval()
        optimizer = lct.optim.AdamW(model.parameters(), lr=0.01, **options)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    model, optimizer, scheduler = build()
    expected = train(model, optimizer, token_loss, data, scheduler=scheduler)
    first, first_optimizer, first_scheduler = build()
    losses = train(first, first_optimizer, token_loss, data[:at], scheduler=first_scheduler)
    saved = copy.deepcopy([first.state_dict(), first_optimizer.state_dict()])
    second, second_optimizer, second_scheduler = build()
    second.load_state_dict(saved[0])
    second_scheduler.load_state_dict(first_scheduler.state_dict())
    second_optimizer.load_state_dict(saved[1])
    assert isinstance(
        second_optimizer.state[second.blocks[0].up.weight]["exp_avg_sq"], CompressedTensor
    )
    losses += train(second, second_optimizer, token_loss, data[at:], scheduler=second_scheduler)
    assert_same_losses(expected, losses)
    assert_same_model(model, second)
    assert_same_state(optimizer, second_optimizer)
    assert_same_state(optimizer, copy.deepcopy(optimizer))


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_go_to_torch_and_back(kind: str, tmp_path: Path) -> None:
    check_checkpoints_go_to_torch_and_back(kind, tmp_path / "checkpoint.pt", lr=0.01)


def test_memory_formats() -> None:
    """Channels last, and a square matrix that lies transposed in memory."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            conv = torch.randn(16, 8, 3, 3).to(memory_format=torch.channels_last)
            self.conv = nn.Parameter(conv)
            self.square = nn.Parameter(torch.randn(40, 40).t())

    results = []
    for compressed in (False, True):
        model = make(Odd, compressed)
        optimizer = kind_of("AdamW", compressed)(model.parameters())
        for step in range(3):
            set_grads(model, step)
            optimizer.step()
        results.append((model, optimizer))
    (a, expected), (b, optimizer) = results
    assert isinstance(b.conv, CompressedWeight)
    assert isinstance(optimizer.state[b.conv]["exp_avg_sq"], CompressedTensor)
    assert isinstance(optimizer.state[b.square]["exp_avg_sq"], CompressedTensor)
    assert_same_model(a, b)
    assert_same_state(expected, optimizer)
    for key, values in expected.state_dict()["state"].items():
        for name, value in values.items():
            assert optimizer.state_dict()["state"][key][name].stride() == value.stride()


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_fused_honours_grad_scale_and_found_inf(found: float) -> None:
    results = []
    for compressed in (False, True):
        model = weights(compressed)
        optimizer = kind_of("AdamW", compressed)(model.parameters(), fused=True)
        assert optimizer._step_supports_amp_scaling
        for step in range(3):
            set_grads(model, step)
            if step != 1:
                optimizer.grad_scale = torch.tensor(4.0)
                optimizer.found_inf = torch.tensor(found)
            optimizer.step()
            optimizer.grad_scale = optimizer.found_inf = None
        results.append((model, optimizer))
    assert_same_model(results[0][0], results[1][0])
    assert_same_state(results[0][1], results[1][1])


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(fused: bool) -> None:
    check_grad_scaler(
        lambda compressed, params: kind_of("Adam", compressed)(params, fused=fused),
    )


def stepped_by_torch(
    updates: Sequence[Sequence[ops.Part]],
    grads: Sequence[torch.Tensor],
    *,
    step: float,
    rounding: str,
    **update: Any,
) -> None:
    """What a kernel does to payloads, in three passes: stands for it where there is no GPU."""
    for tensors, grad in zip(updates, grads, strict=True):
        dense = [
            ops.decode(stored, layout, torch.empty(layout.num_values, dtype=BF16))
            for stored, layout in tensors
        ]
        weight, *moments = dense
        adam_module.adam(
            [weight],
            [grad.reshape(-1)],
            *([moment] for moment in moments),
            [],
            [torch.tensor(step - 1)],
            amsgrad=False,
            foreach=rounding == "foreach",
            **update,
        )
        for (stored, layout), values in zip(tensors, dense, strict=True):
            stored.spill = ops.encode(values, layout, (0,), stored).spill


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_a_kernel_is_asked_for(
    kind: str, foreach: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way to the kernel without one: its arguments, the count of steps, memory formats."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(33, 32))
            conv = torch.randn(16, 8, 3, 3).to(memory_format=torch.channels_last)
            self.conv = nn.Parameter(conv)
            self.square = nn.Parameter(torch.randn(40, 40).t())
            self.vector = nn.Parameter(torch.randn(7))

    calls = []

    def counted(updates: Any, grads: Any, **update: Any) -> None:
        calls.extend([update["step"]] * len(updates))
        stepped_by_torch(updates, grads, **update)

    monkeypatch.setattr(CompressedTensor, "can_step_fused", lambda *tensors: True)
    monkeypatch.setattr(ops, "fused_adam", counted)
    a, b = make(Odd, False), make(Odd, True)
    options = {**options, "lr": 0.1, "foreach": foreach}
    expected = kind_of(kind, False)(a.parameters(), **options)
    optimizer = kind_of(kind, True)(b.parameters(), **options)
    for step in range(4):
        for model, opt in ((a, expected), (b, optimizer)):
            set_grads(model, step)
            for weight in model.parameters():
                like = torch.empty_strided(weight.shape, weight.stride(), dtype=BF16)
                weight.grad = like.copy_(weight.grad)
            opt.step()
        assert_same_model(a, b)
    assert_same_state(expected, optimizer)
    assert calls == ([] if options["amsgrad"] else [2.0] * 3 + [3.0] * 3 + [4.0] * 3)
    # Gradients that lie otherwise than their weights do not have the order of the payload.
    for model, opt in ((a, expected), (b, optimizer)):
        for weight in model.parameters():
            weight.grad = weight.grad.contiguous()
        opt.step()
    assert_same_model(a, b)
