"""What compiled graphs save is encoded within them: the same bits, and nothing of it is kept."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import lct
from lct.nn import graph_saves
from lct.nn.graph_saves import SavesEncoded
from training import BF16, assert_same_bits, needs_compiler

WIDTH = 64
ROWS = 256  # a saved tensor: 32 KiB in BF16


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    gc.collect()
    assert not graph_saves._saved


class Graphs:
    """A backend that traces and partitions as Inductor does, and runs the graphs as they are."""

    def __init__(self) -> None:
        self.saves: list[int] = []  # tensors of each save_all
        self.loads = 0
        self.views = 0  # of what a load_all has decoded

    def __call__(self, module: GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
        ops = torch.ops.lct
        for node in module.graph.nodes:
            if node.target is ops.save_all.default:
                self.saves.append(len(node.args[0]))
            self.loads += node.target is ops.load_all.default
            if node.target is torch.ops.aten.as_strided.default:
                source = node.args[0].args[0]
                self.views += getattr(source, "target", None) is ops.load_all.default
        return make_boxed_func(module.forward)

    @property
    def backend(self) -> Any:
        return aot_autograd(fw_compiler=self, bw_compiler=self, partition_fn=SavesEncoded(None))


@pytest.fixture
def graphs() -> Graphs:
    return Graphs()


class Block(nn.Module):
    """Saves products, a permuted one, and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (
            nn.Linear(WIDTH, WIDTH, bias=False, dtype=BF16) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.silu(self.gate(x)) * self.up(x).view(-1, 4, WIDTH // 4).transpose(0, 1).reshape(
            x.shape
        )
        return x + self.down(h)


Module = Callable[[torch.Tensor], torch.Tensor]


def encoding() -> Any:
    """A block whose graphs encode what they save."""
    return lct.compress_activations(in_graphs=True)


def same_model(*blocks: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(blocks or (Block(), Block(), Block())))


def run(
    model: nn.Module,
    within: Callable[[], Any] = contextlib.nullcontext,
    *,
    steps: int = 2,
    rows: Sequence[int] = (ROWS,),
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
) -> list[torch.Tensor]:
    """Losses and gradients of some steps; ``within`` is entered around every forward."""
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(rows[step % len(rows)], WIDTH, generator=generator).to(BF16)
        x.requires_grad_()
        torch.manual_seed(step)  # of dropout
        with within():
            loss = model(x).float().square().mean()
        backward(loss)
        assert x.grad is not None
        found += [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
        model.zero_grad()
    return found


def compiled(model: nn.Sequential, backend: Any, **options: Any) -> nn.Sequential:
    model = copy.deepcopy(model)
    for block in model:
        block.compile(backend=backend, dynamic=False, **options)
    return model


def check(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> None:
    for a, b in zip(expected, found, strict=True):
        assert_same_bits(a, b)


def expected_of(model: nn.Sequential, **options: Any) -> list[torch.Tensor]:
    """Of the same graphs, without LCT."""
    plain = Graphs()
    try:
        return run(compiled(model, plain.backend), **options)
    finally:
        assert not plain.saves
        torch._dynamo.reset()


def test_the_same_bits_and_one_op_a_graph(graphs: Graphs) -> None:
    model = same_model()
    expected = expected_of(model)
    check(expected, run(compiled(model, graphs.backend), encoding))
    assert len(graphs.saves) == graphs.loads == 1, "all blocks share their graphs"
    seen = lct.stats()["activations"]
    assert seen["encoded"] >= 3 * graphs.saves[0] > 3
    places = {site["place"] for site in seen["sites"]}
    assert any(place.startswith(__file__) for place in places)
    assert {"mm"} <= {site["producer"] for site in seen["sites"]}
    assert all(site["decoded"] for site in seen["sites"])
    assert seen["stored_bytes"] < 0.72 * seen["dense_bytes"]


@needs_compiler
@pytest.mark.parametrize("turn", ["as it is compiled", "from the cache on disk"])
def test_inductor(turn: str) -> None:
    model = same_model()
    with inductor_config.patch(emulate_precision_casts=True):
        expected = run(compiled(model, "inductor"))
        torch._dynamo.reset()
        found = run(compiled(model, "inductor"), encoding)
    check(expected, found)
    # A graph from the cache on disk names the places of the process that compiled it.
    places = {
        Path(site["place"].rpartition(":")[0]).name
        for site in lct.stats()["activations"]["sites"]
        if site["producer"] == "mm"
    }
    assert places == {Path(__file__).name}


def test_whole_models(graphs: Graphs) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = same_model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    whole, plain = Model(), Model()
    plain.compile(backend=Graphs().backend, dynamic=False)
    expected = run(plain)
    torch._dynamo.reset()
    whole.compile(backend=graphs.backend, dynamic=False)
    check(expected, run(whole, encoding))
    assert sum(graphs.saves) >= 3 * 3


def test_compressed_weights_and_state(graphs: Graphs) -> None:
    model = same_model()
    expected = expected_of(model)
    weights = lct.compress_(copy.deepcopy(model), filter_fn=lambda name, module: True)
    check(expected, run(compiled(weights, graphs.backend), encoding))
    assert graphs.saves


def test_a_graph_runs_without_the_block_too(graphs: Graphs) -> None:
    model = same_model()
    expected = expected_of(model)
    inside = compiled(model, graphs.backend)
    run(inside, encoding, steps=1)
    seen = lct.stats()["activations"]["encoded"]
    check(expected, run(inside))
    assert graphs.saves and lct.stats()["activations"]["encoded"] == seen


def test_a_graph_that_was_compiled_before_the_block_is_left_to_the_hooks(graphs: Graphs) -> None:
    model = same_model()
    expected = expected_of(model)
    outside = compiled(model, graphs.backend)
    run(outside, steps=1)
    check(expected, run(outside, encoding))
    assert not graphs.saves and lct.stats()["activations"]["encoded"]


def test_other_blocks_change_no_graph(graphs: Graphs) -> None:
    """So that their kernels, and the places where those round, are those of the run without LCT."""
    model = same_model()
    expected = expected_of(model)
    check(expected, run(compiled(model, graphs.backend), lct.compress_activations))
    assert not graphs.saves and lct.stats()["activations"]["encoded"]


def test_backward_twice(graphs: Graphs) -> None:
    def twice(loss: torch.Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    model = same_model()
    with torch._functorch.config.patch(donated_buffer=False):
        expected = expected_of(model, backward=twice)
        check(
            expected,
            run(compiled(model, graphs.backend), encoding, backward=twice),
        )
    assert graphs.saves


def test_what_no_backward_asks_for_is_dropped(graphs: Graphs) -> None:
    model = compiled(same_model(), graphs.backend)
    run(model, encoding, backward=lambda loss: loss.backward())
    with encoding():
        y = model(torch.randn(ROWS, WIDTH).to(BF16))
    assert len(graph_saves._saved) == 3
    del y
    gc.collect()
    assert not graph_saves._saved


def test_hooks_that_copy_lose_the_ticket(graphs: Graphs) -> None:
    """Within a block of their own, around a graph that was compiled in one of LCT's."""
    model = compiled(same_model(), graphs.backend)
    run(model, encoding, steps=1)

    def copying() -> Any:
        return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda packed: packed)

    with pytest.raises(RuntimeError, match="must not copy what they get"):
        run(model, copying, steps=1)


def test_a_ticket_of_nothing() -> None:
    with pytest.raises(RuntimeError, match="saved for backward is gone"):
        torch.ops.lct.load_all(torch.tensor([0]), [], [], [], [], torch.device("cpu"))


class Casts(nn.Module):
    """Saves FP32 that was cast from BF16, and FP32 in general."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = (x * 3).float()
        return (wide.exp() * wide.sin() * wide).to(x.dtype) + x


class Masks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.bernoulli(torch.full_like(x, 0.5)).bool()
        return torch.where(kept, x, x.detach() * 0) * 2


class Transposed(nn.Module):
    """Saves a tensor and its transpose, which share their memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).sin()
        return y @ (y.t() @ x)


class Hostile(nn.Module):
    """Saves values that have every exponent."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bits = torch.randint(-(2**15), 2**15, x.shape, dtype=torch.int32).to(torch.int16)
        return torch.where(bits > 0, x * bits.view(BF16), x).nan_to_num(0, 1, -1)


@pytest.mark.parametrize("kind", [Casts, Masks, Transposed, Hostile], ids=lambda k: k.__name__)
def test_kinds_of_saves(kind: type[nn.Module], graphs: Graphs) -> None:
    model = same_model(kind(), nn.Linear(WIDTH, WIDTH, dtype=BF16))
    expected = expected_of(model, steps=12)
    found = run(compiled(model, graphs.backend), encoding, steps=12)
    check(expected, found)
    assert graphs.saves


class SavesAll(CustomPartitionerFn):
    """Nothing is computed again in backward, so that views are saved beside what they are of."""

    def __call__(self, gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        kwargs.pop("static_lifetime_input_indices", None)
        return default_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        return "saves all"


def test_views_of_a_storage_are_encoded_once(graphs: Graphs) -> None:
    model = same_model(Transposed(), nn.Linear(WIDTH, WIDTH, dtype=BF16))
    found = {}
    for save in (contextlib.nullcontext, encoding):
        torch._dynamo.reset()
        partition = SavesEncoded(SavesAll())
        backend = aot_autograd(fw_compiler=graphs, bw_compiler=graphs, partition_fn=partition)
        found[save] = run(compiled(model, backend), save)
    check(found[contextlib.nullcontext], found[encoding])
    assert graphs.views > 0, "the others are views of what is decoded"
    sites = lct.stats()["activations"]["sites"]
    assert sum(site["encoded"] for site in sites if site["producer"] in ("sin", "t")) == 1


def test_masks_become_bits() -> None:
    model = same_model(Masks(), nn.Linear(WIDTH, WIDTH, dtype=BF16))
    run(compiled(model, Graphs().backend), encoding)
    sites = [site for site in lct.stats()["activations"]["sites"] if site["dtype"] == "bool"]
    assert sites and all(8 * site["stored_bytes"] == site["dense_bytes"] for site in sites)


def test_unknown_sizes_are_left_to_the_hooks(graphs: Graphs) -> None:
    model = same_model()
    rows = (ROWS, ROWS + 64, ROWS + 128)
    plain, dynamic = copy.deepcopy(model), copy.deepcopy(model)
    for block in plain:
        block.compile(backend=Graphs().backend, dynamic=True)
    expected = run(plain, steps=3, rows=rows)
    torch._dynamo.reset()
    for block in dynamic:
        block.compile(backend=graphs.backend, dynamic=True)
    check(expected, run(dynamic, encoding, steps=3, rows=rows))
    assert not graphs.saves and lct.stats()["activations"]["encoded"]


def test_min_bytes(graphs: Graphs) -> None:
    model = same_model()
    expected = expected_of(model)

    def within() -> Any:
        return lct.compress_activations(min_bytes=1 << 20, in_graphs=True)

    check(expected, run(compiled(model, graphs.backend), within))
    assert not graphs.saves and not lct.stats()["activations"]["encoded"]


@pytest.mark.parametrize(("limit", "most"), [(1, 1), (3 * ROWS * WIDTH * 2, 3)])
def test_groups_are_batches(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch, limit: int, most: int
) -> None:
    model = same_model()
    expected = expected_of(model)
    monkeypatch.setattr(graph_saves, "save_batch_bytes", lambda: limit)
    check(expected, run(compiled(model, graphs.backend), encoding))
    assert max(graphs.saves, default=0) == most
    assert graphs.loads == len(graphs.saves)
    assert lct.stats()["activations"]["encoded"]


def test_groups_are_what_one_launch_takes(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    model = same_model()
    expected = expected_of(model)
    monkeypatch.setattr(graph_saves, "MOST_TOGETHER", 2)
    check(expected, run(compiled(model, graphs.backend), encoding))
    assert max(graphs.saves) == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks(graphs: Graphs, reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, blocks: nn.Sequential) -> None:
            super().__init__()
            self.blocks = blocks

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    model = same_model()
    expected = expected_of(model)
    blocks = compiled(model, graphs.backend)
    check(expected, run(Checkpointed(blocks), encoding))
    # Compiled within a block, a graph is run under a checkpoint all the same.
    torch._dynamo.reset()
    blocks = compiled(model, graphs.backend)
    run(blocks, encoding, steps=1)
    check(expected, run(Checkpointed(blocks), encoding))
    assert graphs.saves


def test_a_profile_has_seconds(graphs: Graphs) -> None:
    def within() -> Any:
        return lct.compress_activations(profile=True, in_graphs=True)

    run(compiled(same_model(), graphs.backend), within)
    sites = [s for s in lct.stats()["activations"]["sites"] if s["place"].startswith(__file__)]
    assert sites
    assert all(site["encode_seconds"] > 0 and site["decode_seconds"] > 0 for site in sites)


class Own(CustomPartitionerFn):
    """A user's own partitioner."""

    def __init__(self, name: Any = "own") -> None:
        self.name = name
        self.called = 0

    def __call__(self, gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        self.called += 1
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        return self.name


def test_partitioners_of_users_come_first() -> None:
    own = Own()
    with inductor_config.patch(custom_partitioner_fn=own):
        with encoding():
            installed: Any = inductor_config.custom_partitioner_fn
        assert isinstance(installed, SavesEncoded) and installed.first is own
        with encoding():
            assert inductor_config.custom_partitioner_fn is installed
    graphs = Graphs()
    backend = aot_autograd(fw_compiler=graphs, bw_compiler=graphs, partition_fn=installed)
    run(compiled(same_model(), backend), encoding)
    assert own.called == 1 and graphs.saves


class Renaming(Own):
    """The backward graph's inputs have names of their own."""

    def __call__(self, gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        forward, backward = super().__call__(gm, joint_inputs, **kwargs)
        for node in backward.graph.find_nodes(op="placeholder"):
            node._rename(f"own_{node.name}")
        return forward, backward


def test_graphs_that_do_not_fit_are_left_to_the_hooks(graphs: Graphs) -> None:
    model = same_model()
    expected = expected_of(model)
    partition = SavesEncoded(Renaming())
    backend = aot_autograd(fw_compiler=graphs, bw_compiler=graphs, partition_fn=partition)
    check(expected, run(compiled(model, backend), encoding))
    assert not graphs.saves and lct.stats()["activations"]["encoded"]


def test_what_graphs_on_disk_are_known_by() -> None:
    outside = SavesEncoded(None).uuid()
    with lct.compress_activations():
        assert SavesEncoded(None).uuid() == outside
    with encoding():
        inside = SavesEncoded(None).uuid()
        assert SavesEncoded(Own()).uuid() not in (None, inside)
        assert SavesEncoded(Own(None)).uuid() is None
    with lct.compress_activations(min_bytes=1 << 20, in_graphs=True):
        larger = SavesEncoded(None).uuid()
    assert len({outside, inside, larger}) == 3


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1, dtype=BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv((x.sin() * 2).unsqueeze(1)).squeeze(1)


def test_convolutions_are_left_to_the_hooks(graphs: Graphs) -> None:
    """Inductor may lay out their tensors anew."""
    model = same_model(Convolution(), nn.Linear(WIDTH, WIDTH, dtype=BF16))
    expected = expected_of(model)
    check(expected, run(compiled(model, graphs.backend), encoding))
    assert not graphs.saves and lct.stats()["activations"]["encoded"]


class Statistics(nn.Module):
    """Saves FP32 that is little beside its BF16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.repeat(1, 256)
        scale = wide.float().square().mean(-1, keepdim=True).rsqrt()
        table = scale.expand(-1, 32).exp().sin()
        return ((wide * wide).sin() * table.mean(-1, keepdim=True).to(x.dtype))[:, :WIDTH]


def test_little_beside_the_rest_is_copied(graphs: Graphs) -> None:
    model = same_model(Statistics(), nn.Linear(WIDTH, WIDTH, dtype=BF16))
    expected = expected_of(model)
    check(expected, run(compiled(model, graphs.backend), encoding))
    assert graphs.saves
    assert lct.stats()["activations"]["kept"].get("it is little beside what is saved with it")
