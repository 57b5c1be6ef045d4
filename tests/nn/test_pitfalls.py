"""Failures that trackers report for software of this kind, by number (eager mode).

Others of the list stand where what they are about is tested: 10, 13, 27 and 28 on a GPU in
test_training_gpu.py; 11 in test_training.py; 14 and 15 in optim/test_in_backward.py; 17, 19 and 24
in optim/test_sgd.py and test_adam.py; 20, 21 and 23 in test_compress.py and
test_compressed_weight.py; 29 in backends/test_cuda.py.
"""

from __future__ import annotations

import gc
import io
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch.distributed.fsdp
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import lct
from lct.nn import saves
from lct.tensor import live_tensors
from training import (
    BF16,
    TiedTransformer,
    assert_same_bits,
    assert_same_model,
    assert_same_state,
    make,
    random_bits,
    store_small_tensors,
    token_loss,
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    store_small_tensors(monkeypatch)


def hidden(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=BF16, requires_grad=True) * 1


@pytest.mark.parametrize("inside", [True, False])
def test_pitfall_01_compiled_functions_under_the_hooks(inside: bool) -> None:
    """The graph is captured by torch.compile; what its backward keeps passes the hooks."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(BF16)
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(16, 64).to(BF16)
    grads = []
    for activate in (False, True):
        model.zero_grad()
        if activate:
            with lct.compress_activations() as saved:
                loss = compiled(x).float().square().sum()
                if inside:
                    loss.backward()
            assert saved.encoded > 0
        else:
            loss = compiled(x).float().square().sum()
        if not (activate and inside):
            loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        assert_same_bits(a, b)
    torch.compiler.reset()


def test_pitfall_01_with_a_memory_budget() -> None:
    """What the partitioner saves passes the hooks; what it computes again does not."""
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Tanh(), nn.Linear(128, 64)).to(BF16)
    x = torch.randn(64, 64).to(BF16)

    def run(budget: float) -> list[torch.Tensor]:
        torch.compiler.reset()
        model.zero_grad()
        with torch._functorch.config.patch(activation_memory_budget=budget):
            compiled = torch.compile(model, backend="aot_eager_decomp_partition")
            loss = compiled(x).float().square().sum()
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    expected = run(1.0)
    sizes = []
    for budget in (1.0, 0.3):
        with lct.compress_activations() as saved:
            got = run(budget)
        sizes.append(saved.dense_bytes)
        for a, b in zip(expected, got, strict=True):
            assert_same_bits(a, b)
    assert 0 < sizes[1] < sizes[0]
    torch.compiler.reset()


def test_pitfall_04_pack_leaves_its_input_alone_and_makes_no_cycle() -> None:
    gc.collect()
    gc.disable()
    try:
        x = hidden(64, 64)
        before = x.detach().clone()
        with lct.compress_activations():
            y = x.exp()  # saves its own output
            small = hidden(4, 4).exp()  # kept as it is
        assert_same_bits(before, x)
        storages = [weakref.ref(t.untyped_storage()) for t in (x, y, small)]
        stored = len(live_tensors())
        assert stored > 0
        del x, y, small
        assert [ref() for ref in storages] == [None, None, None]
        assert len(live_tensors()) < stored
    finally:
        gc.enable()


def test_pitfall_05_unpack_is_idempotent() -> None:
    x = torch.randn(64, 64, dtype=BF16, requires_grad=True)
    results = []
    for activate in (False, True):
        with lct.compress_activations() if activate else torch.enable_grad():
            y = (x * 1).exp().tanh().square().sum()
        first = torch.autograd.grad(y, x, retain_graph=True)
        again = torch.autograd.grad(y, x, create_graph=True)
        second = torch.autograd.grad(again[0].sum(), x)
        results.append([first[0], again[0], second[0]])
    assert_same_bits(results[0][0], results[0][1])
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


def test_pitfall_06_the_graph_owns_what_is_stored() -> None:
    gc.collect()
    before = len(live_tensors())
    with lct.compress_activations() as saved:
        out = hidden(64, 64).exp().sin().cos()
        assert len(live_tensors()) == before + 2, "exp saves its output, sin its input: one storage"
        del out
        assert len(live_tensors()) == before, "no backward, nothing left, block still open"
        out = hidden(64, 64).exp().sin().cos()
    out.sum().backward()
    assert len(live_tensors()) == before, "backward frees as it goes"
    assert not saved._stored and not saves.decoded_saves.entries


def test_pitfall_07_parameters_and_their_views_are_not_stored() -> None:
    weight = nn.Parameter(torch.randn(64, 64).to(BF16))
    x = torch.randn(64, 64, dtype=BF16, requires_grad=True)
    with lct.compress_activations() as saved:
        outs = [x @ weight, x @ weight.t(), F.linear(x, weight), x @ weight.view(64, 64)[:, :64].T]
    assert saved.encoded == 0
    sum(out.sum() for out in outs).backward()


def test_pitfall_08_views_at_one_address_are_told_apart() -> None:
    x = hidden(64, 64)
    views = [x, x.t(), x.view(32, 128), x[:32], x.view(-1)[: 64 * 63].view(63, 64)]
    expected = [v.detach().cos() for v in views]
    for v in views:
        v.retain_grad()
    with lct.compress_activations() as saved:
        outs = [v.sin() for v in views]
    assert saved.encoded == 1 and saved.reused == len(views) - 1
    for out, v, cos in zip(outs, views, expected, strict=True):
        (grad,) = torch.autograd.grad(out.sum(), v)
        assert_same_bits(cos, grad)


@pytest.mark.parametrize("save", ["stored", "kept", "view", "own output"])
def test_pitfall_09_inplace_change_raises(save: str) -> None:
    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        x = hidden(4, 4) if save == "kept" else hidden(64, 64)
        if save == "own output":
            y = x.exp()
            return y, y
        return x, (x.t() if save == "view" else x).sin()

    messages = []
    for activate in (False, True):
        with lct.compress_activations() if activate else torch.enable_grad():
            x, y = forward()
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
            y.sum().backward()
        messages.append(str(error.value))
    assert "is at version 1; expected version 0 instead" in messages[0]
    assert "is at version 1; expected version 0 instead" in messages[1]


def test_pitfall_09_a_change_and_a_new_save_are_two() -> None:
    x = hidden(64, 64)
    with lct.compress_activations() as saved:
        (x.detach() * 2).requires_grad_()
        a = x.detach().requires_grad_() * 1
        first = a.sin()
        a = a + 1
        second = a.sin()
        b = hidden(64, 64)
        b.mul_(2)
        third = b.sin()
    assert saved.encoded == 3
    (first + second + third).sum().backward()


def test_pitfall_11_selective_checkpointing_keeps_bits() -> None:
    """Torch caches what a policy saves outside of the hooks: it stays dense, and right."""

    def policy(ctx, op, *args, **kwargs):
        save = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
        drop = torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
        return save if op is torch.ops.aten.addmm.default else drop

    models = [make(TiedTransformer, compressed) for compressed in (False, True)]
    tokens = torch.randint(0, 64, (2, 16))
    for model, activate in zip(models, (False, True), strict=True):
        model.eval()
        with lct.compress_activations() if activate else torch.enable_grad():
            x = checkpoint(
                model.blocks[0],
                model.embed(tokens),
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(policy),
            )
            loss = model.head(x).float().square().mean()
        loss.backward()
    assert_same_model(*models)


@pytest.mark.parametrize("reentrant", [True, False])
def test_pitfall_11_hooks_inside_a_checkpoint(reentrant: bool) -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        with lct.compress_activations():
            return x.sin().cos()

    x = torch.randn(64, 64, dtype=BF16, requires_grad=True)
    if reentrant:
        checkpoint(region, x, use_reentrant=True).sum().backward()
        expected = torch.autograd.grad(x.sin().cos().sum(), x)[0]
        assert_same_bits(expected, x.grad)
    else:
        with pytest.raises(RuntimeError, match="outside of checkpointed regions"):
            checkpoint(region, x, use_reentrant=False)


def test_hooks_of_others() -> None:
    x = hidden(64, 64)
    with (
        torch.autograd.graph.save_on_cpu(),
        pytest.warns(UserWarning, match="only the innermost"),
        lct.compress_activations(),
    ):
        x.sin()
    with lct.compress_activations() as outer, lct.compress_activations() as inner:
        assert inner is outer
        y = x.sin()
        with torch.autograd.graph.save_on_cpu():
            z = x.sin()
    assert outer.encoded == 1
    (y + z).sum().backward()


def test_pitfall_12_torch_func_is_refused_by_torch() -> None:
    x = torch.randn(64)
    with lct.compress_activations():
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            torch.func.grad(lambda v: v.sin().sum())(x)
        assert_same_bits(x.sin(), torch.func.vmap(torch.sin)(x))


def test_pitfall_13_values_come_back_to_their_own_device() -> None:
    x = hidden(64, 64)
    with lct.compress_activations():
        y = x.exp().masked_fill(torch.eye(64, dtype=torch.bool), 0)
    with torch.device("meta"):
        y.sum().backward()
    weight = lct.CompressedWeight.from_dense(torch.randn(32, 32).to(BF16))
    hostile = random_bits(32, 32)
    with torch.device("meta"):
        assert weight.dense().device.type == "cpu"
        weight.copy_(hostile)
        weight.mul_(2)
        assert lct.encode(weight.dense()).device.type == "cpu"


def test_pitfall_18_a_step_is_done_before_the_next_forward() -> None:
    """On one stream by order; here: nothing is written after step() returned."""
    model = make(TiedTransformer, True)
    optimizer = lct.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tokens = torch.randint(0, 64, (2, 16))
    token_loss(model, (tokens,)).backward()
    optimizer.step()
    after = {name: p.clone() for name, p in model.state_dict().items()}
    gc.collect()
    for name, value in model.state_dict().items():
        assert_same_bits(after[name], value, name)


def test_pitfall_16_steps_in_backward_use_post_accumulate_hooks() -> None:
    """Hooks of ``register_hook`` get what flows into a gradient, and never fire for DTensors."""
    model = make(TiedTransformer, True)
    steps = lct.optim.step_in_backward(lct.optim.SGD(model.parameters(), lr=0.1))
    for parameter in model.parameters():
        assert len(parameter._post_accumulate_grad_hooks) == 1
        assert not parameter._backward_hooks
    steps.remove()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Muon"])
def test_pitfall_19_state_saves_at_step_1_and_round_trips_in_its_own_dtype(kind: str) -> None:
    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make(lambda: nn.Linear(64, 96, bias=False), True, seed)
        options = {"momentum": 0.9} if kind == "SGD" else {}
        return model, getattr(lct.optim, kind)(model.parameters(), lr=0.01, **options)

    model, optimizer = build(0)
    model.weight.grad = torch.randn(96, 64).to(BF16)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other_model, other = build(1)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert_same_state(optimizer, other)
    name = "exp_avg" if kind == "AdamW" else "momentum_buffer"
    assert isinstance(other.state[other_model.weight][name], lct.CompressedTensor)
    assert other.state[other_model.weight][name].dtype == BF16


@pytest.fixture
def one_process() -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_pitfall_22_parallel_wrappers_of_one_process(wrapper: str) -> None:
    """They find all ops that they need. Weights stay compressed under DDP; shards of FSDP2 are
    dense (docs/guide.md, Limits).
    """
    x = torch.randn(8, 64).to(BF16)
    models = []
    for compressed in (False, True):
        model = make(lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), compressed)
        wrapped: Any = model
        if compressed and wrapper == "DDP":
            wrapped = nn.parallel.DistributedDataParallel(model)
            assert isinstance(model[0].weight, lct.CompressedWeight)
        elif compressed:
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
            wrapped = torch.distributed.fsdp.fully_shard(model, mesh=mesh)
            assert type(model[0].weight.to_local()) is torch.Tensor
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for _ in range(2):
            wrapped(x).float().square().sum().backward()
            optimizer.step()
        models.append(model)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        local = b.to_local() if isinstance(b, torch.distributed.tensor.DTensor) else b
        assert_same_bits(a, local)


def test_pitfall_23_gradients_are_plain_tensors() -> None:
    model = make(TiedTransformer, True)
    tokens = torch.randint(0, 64, (2, 16))
    token_loss(model, (tokens,)).backward()
    for parameter in model.parameters():
        assert type(parameter.grad) is torch.Tensor
        assert parameter.grad.stride() == parameter.stride()
    model.zero_grad(set_to_none=False)
    assert not any(p.grad.any() for p in model.parameters())
    token_loss(model, (tokens,)).backward()
    model.embed.weight.grad = torch.ones(64, 32, dtype=BF16)
    assert model.embed.weight.grad.all()


@pytest.mark.parametrize("layout", ["contiguous", "channels last", "transposed"])
def test_pitfall_27_decoded_tensors_lie_as_the_dense_ones(layout: str) -> None:
    """A matrix library may choose another kernel, and other bits, by strides and alignment."""
    dense = torch.randn(32, 16, 3, 3).to(BF16)
    if layout == "channels last":
        dense = dense.to(memory_format=torch.channels_last)
    elif layout == "transposed":
        dense = torch.randn(96, 64).to(BF16).t()
    weight = lct.CompressedWeight.from_dense(dense)
    fresh = torch.empty_like(dense)
    for decoded in (weight.dense(), weight.t() if dense.dim() == 2 else weight.detach()):
        plain = decoded.dense() if isinstance(decoded, lct.CompressedWeight) else decoded
        expected = dense.t() if plain.shape != dense.shape else dense
        assert plain.stride() == expected.stride() and plain.storage_offset() == 0
        assert_same_bits(expected, plain)
        # Torch aligns all CPU memory to 64 bytes.
        assert plain.data_ptr() % 64 == fresh.data_ptr() % 64 == 0


def test_pitfall_28_payloads_of_activations_have_few_sizes() -> None:
    """Capacities are classes: a caching allocator finds the blocks of the step before."""
    model = make(TiedTransformer, True)
    optimizer = lct.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sizes: Counter[int] = Counter()
    for _ in range(8):
        held = set(live_tensors())
        with lct.compress_activations() as saved:
            loss = token_loss(model, (torch.randint(0, 64, (2, 17)),))
        sizes.update(t.payload.nbytes for t in live_tensors() if t not in held)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(sizes) <= 2 * len(saved.sites)
    assert sizes.total() == 8 * saved.encoded


def test_pitfall_30_all_bit_patterns_come_back_from_everywhere() -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16).view(256, 256)
    weight = nn.Parameter(lct.CompressedWeight.from_dense(every))
    assert_same_bits(every, weight)
    with lct.compress_activations() as saved:
        out = torch.where(torch.ones(256, 256, dtype=torch.bool), every.requires_grad_() * 1, 0)
        kept = (every * 1).abs()  # saves its input
    assert saved.encoded == 2, "the mask and abs's input"
    (node,) = [out.grad_fn, kept.grad_fn][1:]
    assert_same_bits(every.detach() * 1, node._saved_self)
    # Momentum of an optimizer: the gradient of the first step, as it is.
    parameter = nn.Parameter(torch.zeros(256, 256, dtype=BF16))
    parameter.grad = every.detach().clone()
    optimizer = lct.optim.SGD([parameter], lr=0.0, momentum=0.9)
    optimizer.step()
    assert_same_bits(every, optimizer.state[parameter]["momentum_buffer"])


def test_pitfall_31_eager_calls_bypass_torch_library() -> None:
    """A custom op costs tens of microseconds a call; eager code calls the backends itself."""
    namespaces: Counter[str] = Counter()

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(issubclass(kind, lct.CompressedWeight) for kind in types):
                return NotImplemented
            namespaces[func.namespace] += 1
            return func(*args, **(kwargs or {}))

    model = make(TiedTransformer, True)
    optimizer = lct.optim.AdamW(model.parameters(), lr=0.01)
    with Record():
        with lct.compress_activations() as saved:
            loss = token_loss(model, (torch.randint(0, 64, (2, 17)),))
        loss.backward()
        optimizer.step()
    assert saved.encoded > 0
    assert namespaces.keys() <= {"aten", "prim", "profiler"}
