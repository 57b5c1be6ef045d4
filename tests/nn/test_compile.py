"""``torch.compile`` with compressed weights: the bits of the compiled dense model, one graph for
all layers and steps, and nothing decoded that outlives its use.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import checkpoint

import lct
from lct.nn import CompressedWeight
from lct.nn.handles import root_of
from lct.tensor import CompressedTensor
from training import (
    BF16,
    TiedTransformer,
    assert_same_bits,
    assert_same_losses,
    assert_same_model,
    assert_same_state,
    make,
    needs_compiler,
    random_bits,
    store_small_tensors,
    token_batches,
    token_loss,
    train,
)

# cuBLAS is deterministic with a workspace of its own for each stream; it reads this once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
WIDTH = 64
BACKENDS = ["aot_eager", pytest.param("inductor", marks=needs_compiler)]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    store_small_tensors(monkeypatch)
    torch.compiler.reset()
    # Without it Inductor keeps the results of fused operations in FP32 and rounds once, so that
    # what it fuses decides about bits.
    with inductor_config.patch(emulate_precision_casts=True):
        yield
    torch.compiler.reset()


class Counter:
    """A backend that counts the graphs that are compiled."""

    def __init__(self, backend: str = "aot_eager") -> None:
        self.backend = backend
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return torch._dynamo.lookup_backend(self.backend)(graph, inputs)


class Layer(nn.Module):
    def __init__(self, simple: bool) -> None:
        super().__init__()
        self.norm = nn.Identity() if simple else nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=not simple)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Deep(nn.Module):
    """A tied embedding and head, which stay eager where the layers are compiled one by one."""

    layer_count, simple = 2, False

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, WIDTH)
        self.layers = nn.ModuleList(Layer(self.simple) for _ in range(self.layer_count))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.embed.weight)


class Deeper(Deep):
    """More layers, of few kernels: Inductor compiles each with the C++ compiler."""

    layer_count, simple = 3, True


def batches(count: int) -> list[tuple[torch.Tensor, ...]]:
    return [(torch.randint(0, 48, (2, 13)),) for _ in range(count)]


def compile_layers(model: nn.Module, backend: Any) -> nn.Module:
    for layer in model.layers:
        layer.compile(backend=backend)
    return model


def compile_whole(model: nn.Module, backend: Any) -> nn.Module:
    model.compile(backend=backend)
    return model


def pair(
    build: Callable[[], nn.Module], compile_: Callable[[nn.Module, Any], nn.Module], backend: Any
) -> tuple[nn.Module, nn.Module]:
    """The dense model and the compressed one, compiled by the same backend."""
    return compile_(make(build, False), backend), compile_(make(build, True), backend)


def check_training(
    dense: nn.Module, model: nn.Module, kind: str, data: Any, loss_of: Any, **options: Any
) -> None:
    update = {"lr": 0.01, "momentum": 0.9} if kind == "SGD" else {"lr": 0.01}
    expected_optimizer = getattr(torch.optim, kind)(dense.parameters(), **update)
    optimizer = getattr(lct.optim, kind)(model.parameters(), **update)
    expected = train(dense, expected_optimizer, loss_of, data, **options)
    losses = train(model, optimizer, loss_of, data, activations=True, **options)
    assert_same_losses(expected, losses)
    assert_same_model(dense, model)
    assert_same_state(expected_optimizer, optimizer)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_layers_are_the_same_to_the_bit_and_share_one_graph(backend: str) -> None:
    counters = [Counter(backend) for _ in range(2)]
    dense = compile_layers(make(Deeper, False), counters[0])
    model = compile_layers(make(Deeper, True), counters[1])
    check_training(dense, model, "SGD", batches(4), token_loss)
    assert [counter.graphs for counter in counters] == [1, 1]


def test_a_compiled_model_is_the_same_to_the_bit() -> None:
    counters = [Counter() for _ in range(2)]
    dense = compile_whole(make(Deep, False), counters[0])
    model = compile_whole(make(Deep, True), counters[1])
    check_training(dense, model, "AdamW", batches(4), token_loss, accumulate=2, clip=0.5)
    assert [counter.graphs for counter in counters] == [1, 1]


def test_attention_dropout_and_fullgraph() -> None:
    def compile_(model: nn.Module, backend: Any) -> nn.Module:
        return torch.compile(model, backend=backend, fullgraph=True)

    dense, model = pair(TiedTransformer, compile_, "aot_eager")
    check_training(dense, model, "SGD", token_batches(3), token_loss)


class Ops(nn.Module):
    """Ops other than F.linear on weights: by name, by view, with other layouts, on one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 64, 3, padding=1)
        self.conv.to(memory_format=torch.channels_last)
        self.embed = nn.Embedding(64, 48)
        self.bilinear = nn.Bilinear(16, 16, 48)
        self.norm = nn.LayerNorm((16, 48))
        self.scale = nn.Parameter(torch.randn(64, 48))
        self.transposed = nn.Parameter(torch.randn(48, 64).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).flatten(2)[..., :16]
        y = self.bilinear(y, y) + self.embed.weight * self.scale.tanh()
        first, second = self.scale.view(2, 32, 48)
        y = torch.cat([y[:, :32] + first, y[:, 32:] - second], 1)
        y = self.norm(y.unflatten(1, (4, 16))).flatten(1, 2)
        return F.linear(y @ self.transposed.t(), self.embed.weight.t()) + self.scale[3]


def test_other_ops_than_linear() -> None:
    dense, model = pair(Ops, compile_whole, "aot_eager")
    assert {type(p) for p in model.parameters() if p.dim() > 1} == {CompressedWeight}

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]).float().square().mean()

    data = [(torch.randn(2, 8, 6, 6).to(BF16),) for _ in range(3)]
    check_training(dense, model, "SGD", data, loss_of)


def test_frozen_weights_and_adapters() -> None:
    class Adapted(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)
            for layer in self.layers:
                layer.up = nn.Sequential(layer.up, nn.Linear(3 * WIDTH, 3 * WIDTH, bias=False))

    counter = Counter()
    dense, model = pair(Adapted, compile_layers, counter)
    data = batches(3)
    runs = []
    for run in (dense, model):
        trained = [p for p in run.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01)
        runs.append(train(run, optimizer, token_loss, data, activations=run is model))
    assert_same_losses(*runs)
    assert_same_model(dense, model)
    # Each model has a graph for the first layer, whose input needs no gradient, and one for others.
    assert counter.graphs == 4


def checkpointed(reentrant: bool) -> type[Deep]:
    class Checkpointed(Deep):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return F.linear(x, self.embed.weight)

    return Checkpointed


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_around_compiled_layers(reentrant: bool) -> None:
    dense, model = pair(checkpointed(reentrant), compile_layers, "aot_eager")
    check_training(dense, model, "SGD", batches(3), token_loss)


def test_checkpoints_within_a_compiled_model() -> None:
    dense, model = pair(checkpointed(False), compile_whole, "aot_eager")
    check_training(dense, model, "SGD", batches(3), token_loss)


def test_no_gradients_and_other_lengths() -> None:
    counters = [Counter() for _ in range(2)]
    dense = compile_layers(make(Deep, False), counters[0])
    model = compile_layers(make(Deep, True), counters[1])
    for context, length in (
        (torch.no_grad, 4),
        (torch.no_grad, 5),  # from here on for all lengths
        (torch.no_grad, 6),
        (torch.inference_mode, 4),
    ):
        tokens = torch.randint(0, 48, (2, length))
        with context():
            assert_same_bits(dense(tokens), model(tokens))
    assert counters[0].graphs == counters[1].graphs


def test_new_values_and_capacities_compile_nothing() -> None:
    """Layers whose payloads differ in size share a graph, and keep it when they are stored anew."""
    counter = Counter()
    dense, model = make(Deep, False), make(Deep, True)
    with torch.no_grad():
        for run in (dense, model):
            run.layers[1].up.weight.copy_(random_bits(3 * WIDTH, WIDTH, generator=seeded(1)))
            run.layers[1].up.weight.nan_to_num_(0.5, 0.5, 0.5).clamp_(-1, 1)
    weights = [layer.up.weight for layer in model.layers]
    assert len({weight.payload.nbytes for weight in weights}) > 1
    compile_layers(model, counter)
    compile_layers(dense, "aot_eager")
    check_training(dense, model, "SGD", batches(2), token_loss)
    with torch.compiler.set_stance("fail_on_recompile"):
        for step in range(2):
            with torch.no_grad():
                for run in (dense, model):
                    for layer in run.layers:
                        layer.up.weight.copy_(
                            torch.randn(3 * WIDTH, WIDTH, generator=seeded(step)) * (step or 1e-30)
                        )
            sizes = [weight.payload.nbytes for weight in weights]
            for weight in weights:
                weight.compressed.repack()
            changed = sizes != [weight.payload.nbytes for weight in weights]
            check_training(dense, model, "SGD", batches(2), token_loss)
    assert changed and counter.graphs == 1


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def saved_by(model: nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    model(tokens).sum().backward()  # compiles
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens).sum()
    return saved


@pytest.mark.parametrize(
    ("compile_", "budget"), [(compile_layers, 1.0), (compile_whole, 1.0), (compile_whole, 0.4)]
)
def test_backward_gets_no_decoded_weight(compile_: Any, budget: float) -> None:
    tokens = torch.randint(0, 48, (2, 13))
    with torch._functorch.config.patch(activation_memory_budget=budget):
        dense, model = pair(Deep, compile_, "aot_eager")
        of_dense, of_model = saved_by(dense, tokens), saved_by(model, tokens)
    sizes = {weight.numel() for weight in model.parameters() if weight.dim() > 1}
    assert sizes & {t.numel() for t in of_dense}
    assert not sizes & {t.numel() for t in of_model if type(t) is torch.Tensor}
    roots = {id(p.compressed) for p in model.parameters() if isinstance(p, CompressedWeight)}
    handles = {id(root_of(t)) for t in of_model if t.dtype == torch.int64 and t.shape == (1,)}
    assert handles <= roots and handles


class LiveDecoded:
    """Bytes of decoded tensors that are alive, and the most that ever were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.peak = self.decodes = 0
        decode = CompressedTensor.decode

        def counted(root: CompressedTensor, out: torch.Tensor | None = None) -> torch.Tensor:
            dense = decode(root, out)
            storage = dense.untyped_storage()
            self.alive[id(storage)] = storage
            self.decodes += 1
            self.peak = max(self.peak, sum(s.nbytes() for s in self.alive.values()))
            return dense

        monkeypatch.setattr(CompressedTensor, "decode", counted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_about_one_layer_is_decoded_at_a_time(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = compile_layers(make(Deeper, True), backend)
    tokens = batches(1)[0][0][:, :-1]  # Inductor may have kernels for this shape already
    model(tokens).float().sum().backward()
    largest = 2 * 3 * WIDTH * WIDTH

    with monkeypatch.context() as patch:
        live = LiveDecoded(patch)
        loss = model(tokens).float().sum()
        assert live.decodes == 2 + 2 * 3  # embedding, head and layers
        loss.backward()
        assert live.decodes == 2 + 2 * 3 + 1 + 2 * 3  # the embedding's backward needs no values
        assert live.peak == largest  # one weight at a time
        del loss
        gc.collect()
        assert not live.alive

    with monkeypatch.context() as patch:
        live = LiveDecoded(patch)
        with lct.compress_activations() as saved:
            loss = model(tokens).float().sum()
        assert live.peak == largest
        loss.backward()
        # What one layer saved, and one weight; all that is saved is more than that.
        assert saved.encoded >= 3 * 3
        assert largest < live.peak <= saved.dense_bytes // 3 + largest < saved.dense_bytes
        del loss
        gc.collect()
        assert not live.alive


def test_whole_model_decodes_one_weight_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = compile_whole(make(Deep, True), "aot_eager")
    tokens = torch.randint(0, 48, (2, 13))
    model(tokens).sum().backward()
    live = LiveDecoded(monkeypatch)
    model(tokens).sum().backward()
    # Embedding, layers and head in forward; all but the embedding in backward.
    assert live.peak == 2 * 3 * WIDTH * WIDTH and live.decodes == 6 + 5


def compiled_linear() -> tuple[nn.Linear, torch.Tensor]:
    """A compiled layer whose payload has more room than its values need."""
    model = make(lambda: nn.Linear(WIDTH, WIDTH, bias=False), False)
    dense = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.copy_(torch.randn(WIDTH, WIDTH).exp())
        lct.compress_(model).weight.copy_(dense)
    model.compile(backend="aot_eager")
    return model, torch.randn(4, WIDTH, dtype=BF16, requires_grad=True)


def test_backward_after_a_change_raises_autograds_error() -> None:
    def write(model: nn.Linear) -> None:
        with torch.no_grad():
            model.weight.add_(1)

    def copy_hostile(model: nn.Linear) -> None:
        with torch.no_grad():  # which stores the payload anew
            payload = model.weight.payload
            model.weight.copy_(random_bits(WIDTH, WIDTH))
        assert model.weight.payload is not payload

    def copy_compressed(model: nn.Linear) -> None:
        with torch.no_grad():
            model.weight.copy_(CompressedWeight.from_dense(torch.randn(WIDTH, WIDTH).to(BF16)))

    def repack_and_write(model: nn.Linear) -> None:
        payload = model.weight.payload
        model.weight.compressed.repack()
        assert model.weight.payload is not payload
        write(model)

    def step(model: nn.Linear) -> None:
        model.weight.grad = torch.ones(WIDTH, WIDTH, dtype=BF16)
        lct.optim.SGD([model.weight], lr=0.1, momentum=0.9).step()

    for change in (write, copy_hostile, copy_compressed, repack_and_write, step):
        model, x = compiled_linear()
        out = model(x)
        change(model)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_backward_after_storing_anew_or_dropping_the_weight() -> None:
    model, x = compiled_linear()
    weight = model.weight
    dense, payload = weight.dense(), weight.payload
    out = model(x)
    weight.compressed.repack()
    assert weight.payload is not payload
    root = weakref.ref(weight.compressed)
    del model, weight
    assert root() is not None
    out.backward(torch.ones_like(out))
    assert_same_bits(torch.ones(4, WIDTH, dtype=BF16) @ dense, x.grad)
    del out
    gc.collect()
    assert root() is None


def test_copies_and_loaded_weights_compile_nothing() -> None:
    counter = Counter()
    model = compile_whole(make(Deep, True), counter)
    tokens = torch.randint(0, 48, (2, 13))
    model(tokens).sum().backward()
    other = copy.deepcopy(model)
    dense = make(Deep, False, seed=5)
    other.load_state_dict(dense.state_dict())
    expected = dense(tokens)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_same_bits(expected, other(tokens))
    assert counter.graphs == 1


def test_compress_and_decompress_a_model_that_ran_compiled() -> None:
    model = make(Deep, False)
    model.compile(backend="aot_eager")
    tokens = torch.randint(0, 48, (2, 13))
    outs = []
    for change in (None, lct.compress_, lct.decompress_):
        if change is not None:
            change(model)
        model.zero_grad()
        out = model(tokens)
        out.sum().backward()
        outs.append(out)
    assert_same_bits(outs[0], outs[1])
    assert_same_bits(outs[0], outs[2])


@pytest.mark.parametrize("kind", ["lct", "torch", "in backward"])
def test_steps_within_compiled_functions_run_as_they_are(kind: str) -> None:
    data = [torch.randn(4, WIDTH).to(BF16) for _ in range(3)]
    runs = []
    for compressed in (False, True):
        model = make(lambda: nn.Linear(WIDTH, WIDTH, bias=False), compressed)
        source = lct.optim if compressed and kind != "torch" else torch.optim
        optimizer = source.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if kind == "in backward":
            lct.optim.step_in_backward(optimizer)

        @torch.compile(backend="aot_eager")
        def step(x: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> Any:
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        runs.append(([step(x).detach() for x in data], model))
    assert_same_losses(runs[0][0], runs[1][0])
    assert_same_model(runs[0][1], runs[1][1])


def test_what_runs_eagerly_below_a_compiled_function_is_not_compiled() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)
            self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)  # which Dynamo does not trace

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, _ = self.gru(self.up(x))
            return y * y

    frames = []
    data = torch.randn(2, 9, WIDTH).to(BF16)
    for compressed in (False, True):
        torch.compiler.reset()  # Dynamo remembers frames that it could not compile
        torch._dynamo.utils.counters.clear()
        model = compile_whole(make(Recurrent, compressed), "aot_eager")
        with lct.compress_activations() if compressed else contextlib.nullcontext():
            model(data).sum().backward()
        frames.append(torch._dynamo.utils.counters["frames"]["total"])
    assert frames[0] == frames[1] > 0


def test_a_write_breaks_the_graph() -> None:
    weight = nn.Parameter(CompressedWeight.from_dense(torch.randn(64, 64).to(BF16)))
    expected = weight.dense() * 0.5

    def halve(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            weight.mul_(0.5)
        return x @ weight

    x = torch.randn(4, 64).to(BF16)
    assert_same_bits(x @ expected, torch.compile(halve, backend="aot_eager")(x))
    assert_same_bits(expected, weight)
    torch.compiler.reset()
    with pytest.raises(Exception, match="fake tensors"):
        torch.compile(halve, backend="aot_eager", fullgraph=True)(x)


def test_views_that_a_graph_returns() -> None:
    dense = torch.randn(64, 48).to(BF16)
    weight = CompressedWeight.from_dense(dense)

    def views(w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return w.t(), w.detach(), w[3:7], w.chunk(2)[1], torch.zeros_like(w), w.clone(), w.float()

    got = torch.compile(views, backend="aot_eager")(weight)
    for expected, result in zip(views(dense), got, strict=True):
        assert_same_bits(expected, result)
        assert result.stride() == expected.stride()


def test_views_with_gradients_are_no_results() -> None:
    weight = nn.Parameter(CompressedWeight.from_dense(torch.randn(64, 48).to(BF16)))
    with pytest.raises(Exception, match=r"cannot return a view .* got one of shape \(4, 48\)"):
        torch.compile(lambda w: w[3:7], backend="aot_eager")(weight)


def test_autocast() -> None:
    runs = []
    tokens = torch.randint(0, 48, (2, 13))
    for compressed in (False, True):
        torch.manual_seed(0)
        model = Deep()
        if compressed:
            lct.compress_(model)
        compile_layers(model, "aot_eager")
        with torch.autocast("cpu", dtype=BF16):
            loss = token_loss(model, (tokens,))
        loss.backward()
        runs.append(model)
    assert_same_model(*runs)


def test_the_op_is_a_well_behaved_custom_op() -> None:
    weight = CompressedWeight.from_dense(torch.randn(64, 48).to(BF16))
    for after in ([], [torch.randn(3, requires_grad=True)]):
        arguments = (weight.handle, [64, 48], BF16, after)
        torch.library.opcheck(torch.ops.lct.decode.default, arguments)
        assert_same_bits(weight, torch.ops.lct.decode(*arguments))
        assert not torch.ops.lct.decode(*arguments).requires_grad


def test_handles() -> None:
    weight = CompressedWeight.from_dense(torch.randn(64, 48).to(BF16))
    handle = weight.handle
    assert handle is weight.handle is weight.detach().handle is weight.t().handle
    assert handle is not CompressedWeight(weight.compressed.clone()).handle
    for stand_in in (handle, handle.detach(), handle.clone()):
        assert root_of(stand_in) is weight.compressed
    with pytest.raises(RuntimeError, match=r"shape \(48, 64\), got one of .*\(64, 48\)"):
        torch.ops.lct.decode(handle, [48, 64], BF16, [])
    for other in (torch.tensor([0]), torch.zeros(1), torch.tensor([1, 2])):
        with pytest.raises(RuntimeError, match="must be one of a compressed weight that exists"):
            torch.ops.lct.decode(other, [64, 48], BF16, [])
    del weight, stand_in
    copied = handle.clone()
    assert root_of(copied) is root_of(handle)
    del handle
    with pytest.raises(RuntimeError, match="stands for none"):
        root_of(copied)


def test_hooks_that_copy_what_is_saved() -> None:
    dense, model = pair(Deep, compile_layers, "aot_eager")
    tokens = torch.randint(0, 48, (2, 13))
    for run in (dense, model):
        with torch.autograd.graph.save_on_cpu():
            loss = token_loss(run, (tokens,))
        loss.backward()
    assert_same_model(dense, model)


@pytest.mark.gpu
class TestOnCuda:
    """The same on CUDA with Inductor; matrix products must repeat their bits."""

    @pytest.fixture(autouse=True)
    def _deterministic(self) -> Iterator[None]:
        torch.use_deterministic_algorithms(True)
        yield
        torch.use_deterministic_algorithms(False)

    @staticmethod
    def check(compile_: Any, kind: str, steps: int = 10, **options: Any) -> Counter:
        counter = Counter("inductor")
        data = [tuple(t.cuda() for t in batch) for batch in token_batches(steps)]
        dense = make(TiedTransformer, False).eval().cuda()
        model = lct.compress_(make(TiedTransformer, False).eval().cuda())
        compile_(dense, "inductor")
        compile_(model, counter)
        check_training(dense, model, kind, data, token_loss, **options)
        return counter

    @staticmethod
    def blocks(model: nn.Module, backend: Any) -> None:
        for block in model.blocks:
            block.compile(backend=backend)

    @pytest.mark.parametrize("kind", ["SGD", "AdamW"])
    def test_compiled_layers(self, kind: str) -> None:
        assert self.check(self.blocks, kind).graphs == 1

    @pytest.mark.parametrize("kind", ["SGD", "AdamW"])
    def test_a_compiled_model(self, kind: str) -> None:
        assert self.check(compile_whole, kind, accumulate=2, clip=0.5).graphs == 1

    def test_fused_steps_between_forward_and_backward_raise(self) -> None:
        model = lct.compress_(nn.Linear(256, 256, bias=False, device="cuda", dtype=BF16))
        optimizer = lct.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model.compile()
        x = torch.randn(4, 256, device="cuda", dtype=BF16, requires_grad=True)
        for step in range(3):  # the kernel steps from the second step on
            out = model(x)
            if step < 2:
                out.sum().backward()
            optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    def test_reduce_overhead(self) -> None:
        """CUDA graphs leave the decodes out: their payloads may move."""
        models = []
        data = [t.cuda() for (t,) in token_batches(6)]
        for compressed in (False, True):
            model = make(TiedTransformer, False).eval().cuda()
            if compressed:
                lct.compress_(model)
            forward = torch.compile(model, mode="reduce-overhead")
            optimizer = (lct.optim if compressed else torch.optim).SGD(model.parameters(), lr=0.01)
            for step, tokens in enumerate(data):
                torch.compiler.cudagraph_mark_step_begin()
                token_loss(forward, (tokens,)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if compressed and step == 3:
                    for block in model.blocks:
                        block.up.weight.compressed.repack()
            models.append(model)
        assert_same_model(*models)
