"""Weights decoded ahead: whose are decoded together, and that nobody gets old values."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lct
from lct import CompressedTensor, CompressedWeight, ops
from lct.backends import meta
from lct.nn import ahead
from training import BF16, assert_same_bits, assert_same_model, assert_same_state

SIZE = 64  # a square weight of a layer: 8 KiB
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU counts as a device where decoding ahead pays, and all weights may wait."""
    monkeypatch.setattr(ahead, "launches_kernels", lambda device: True)
    monkeypatch.setattr(ahead, "SHARE", 1)
    for name in ("_aheads", "_last", "_kept"):
        monkeypatch.setattr(ahead, name, {})
    yield


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each launch decoded."""
    found: list[int] = []
    alone = CompressedTensor.decode

    def decode(self: CompressedTensor, out: torch.Tensor | None = None) -> torch.Tensor:
        found.append(1)
        return alone(self, out)

    def decode_all(tensors: Sequence[CompressedTensor]) -> list[torch.Tensor]:
        found.append(len(tensors))
        return [alone(tensor) for tensor in tensors]

    monkeypatch.setattr(CompressedTensor, "decode", decode)
    monkeypatch.setattr(ahead, "decode_all", decode_all)
    return found


def waiting() -> int:
    """Decoded weights that nobody has asked for yet."""
    return sum(len(root.place.waiting) for root in ahead.live_tensors() if root.place is not None)


def layers(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(count))).to(BF16)


def rows() -> torch.Tensor:
    return torch.randn(8, SIZE).to(BF16).requires_grad_()


def test_neighbours_are_decoded_together(launches: list[int]) -> None:
    model = lct.compress_(layers())
    x = rows()
    first = model(x)
    assert launches == [1] * 4  # who follows whom is not known yet
    launches.clear()
    second = model(x)
    assert launches == [4] and waiting() == 0
    assert_same_bits(first, second)
    launches.clear()
    second.sum().backward()
    assert launches == [4] and waiting() == 0


def test_a_group_holds_no_more_than_its_limit(
    launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "decode_ahead_bytes", lambda: 2 * SIZE * SIZE * 2)
    model = lct.compress_(layers(5))
    for expected in ([1] * 5, [2, 2, 1]):
        launches.clear()
        model(rows())
        assert launches == expected


def test_nothing_waits_where_the_limit_is_zero(
    launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LCT_DECODE_AHEAD_MIB", "0")
    model = lct.compress_(layers())
    for _ in range(3):
        model(rows())
    assert launches == [1] * 12


def test_a_share_of_what_is_held_may_wait(
    launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    others = sum(tensor.dense_nbytes for tensor in ahead.live_tensors())
    model = lct.compress_(layers())
    size = SIZE * SIZE * 2
    monkeypatch.setattr(ahead, "SHARE", 2 * size / (4 * size + others))
    for expected in ([1] * 4, [2, 2]):
        launches.clear()
        model(rows())
        assert launches == expected


class Chunks(nn.Module):
    """A layer, and a head that reads its output chunk by chunk."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = (nn.Linear(SIZE, SIZE, bias=False).to(BF16) for _ in range(2))

    def forward(self, x: torch.Tensor, chunks: int) -> torch.Tensor:
        hidden = self.layer(x)
        parts = hidden.split(len(hidden) // chunks)
        return torch.stack(
            [checkpoint(self.one, part, use_reentrant=False) for part in parts]  # type: ignore[misc]
        ).sum()

    def one(self, part: torch.Tensor) -> torch.Tensor:
        return self.head(part).float().square().sum()


@pytest.mark.parametrize("chunks", [1, 2, 8])
def test_a_weight_that_is_read_again_and_again_is_kept(chunks: int, launches: list[int]) -> None:
    """In forward, and for the first time that backward reads it."""
    losses, grads = [], []
    for model in (Chunks(), lct.compress_(Chunks())):
        for _ in range(2):
            launches.clear()
            x = torch.arange(8.0 * SIZE).sin().view(8, SIZE).to(BF16).requires_grad_()
            loss = model(x, chunks)
            assert len(ahead._kept) == (chunks > 1 and len(launches) > 0)
            loss.backward()
            assert not ahead._kept, "nothing is kept beside gradients"
            losses.append(loss.detach())
            grads.append(x.grad)
    head = 3 if chunks == 1 else 2 + 2 * chunks - 1
    assert sum(launches) == head + 2
    for loss, grad in zip(losses, grads, strict=True):
        assert_same_bits(loss, losses[0])
        assert_same_bits(grad, grads[0])


def test_a_kept_weight_goes_when_another_comes(launches: list[int]) -> None:
    first, second = (lct.compress_(layers(1)) for _ in range(2))
    x = rows()
    with torch.no_grad():
        for model, kept in ((first, 0), (first, 1), (first, 1), (second, 0), (first, 0)):
            model(x)
            assert len(ahead._kept) == kept
    assert len(launches) == 4


def test_a_kept_weight_goes_with_its_model() -> None:
    model = lct.compress_(layers(1))
    with torch.no_grad():
        model(rows()), model(rows())
    assert ahead._kept
    del model
    gc.collect()
    assert not ahead._kept and not ahead._last


def changes() -> dict[str, object]:
    def step(weight: CompressedWeight, value: torch.Tensor) -> None:
        weight.compressed.encode_(value)

    def take(weight: CompressedWeight, value: torch.Tensor) -> None:
        weight.compressed.copy_(lct.encode(value))

    def copy(weight: CompressedWeight, value: torch.Tensor) -> None:
        with torch.no_grad():
            weight.copy_(value)

    def data(weight: CompressedWeight, value: torch.Tensor) -> None:
        weight.data = value

    return {"encode_": step, "CompressedTensor.copy_": take, "copy_": copy, "data": data}


@pytest.mark.parametrize("change", changes().values(), ids=changes())
def test_a_weight_that_is_written_to_while_it_is_kept(change) -> None:  # type: ignore[no-untyped-def]
    model = lct.compress_(layers(1))
    x, value = rows(), torch.randn(SIZE, SIZE).to(BF16)
    with torch.no_grad():
        model(x), model(x)
        assert ahead._kept
        change(model[0].weight, value)
        assert_same_bits(model(x), F.linear(x, value))
        assert_same_bits(model(x), F.linear(x, value))


@pytest.mark.parametrize("change", changes().values(), ids=changes())
def test_a_weight_that_is_written_to_while_it_waits(change) -> None:  # type: ignore[no-untyped-def]
    model = lct.compress_(layers(3))
    x = rows()
    model(x)
    y = model[0](x)
    assert waiting() == 2
    value = torch.randn(SIZE, SIZE).to(BF16)
    change(model[1].weight, value)
    assert_same_bits(F.linear(y, value), model[1](y))


def test_a_second_use_while_others_wait(launches: list[int]) -> None:
    model = lct.compress_(layers(3))
    x = rows()
    model(x)
    launches.clear()
    y = model[0](model[0](x))
    assert launches == [3, 1] and waiting() == 2
    model[2](model[1](y))
    assert launches == [3, 1] and waiting() == 0


def test_what_nobody_asks_for_is_not_decoded_for_long(launches: list[int]) -> None:
    model, other = lct.compress_(layers(3)), lct.compress_(layers(1))
    x = rows()
    model(x)
    ahead._aheads[CPU]._open = None  # `other` begins a group
    other(x)
    for expected in ([3, 1], [3, 1], [2, 1], [2, 1]):
        launches.clear()
        model[1](model[0](x))
        other(x)
        assert launches == expected and waiting() == 0
    # In backward it is asked for: there it is a case of its own.
    model(x).sum().backward()
    assert launches[-1] == 3


def test_nothing_waits_for_a_model_that_is_gone() -> None:
    model = lct.compress_(layers(3))
    x = rows()
    model(x)
    model[0](x)
    assert waiting() == 2
    (tensor, _, _) = model[1].weight.compressed.place.waiting[0]
    reference = weakref.ref(tensor)
    del model, tensor
    gc.collect()
    assert reference() is None and waiting() == 0


def test_memory_for_one_weight_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lct.compress_(layers(3))
    x = rows()
    expected = model(x)
    tries = []

    def no_memory(tensors: Sequence[CompressedTensor]) -> list[torch.Tensor]:
        tries.append(len(tensors))
        raise torch.OutOfMemoryError("no memory for several")

    monkeypatch.setattr(ahead, "decode_all", no_memory)
    for _ in range(3):
        assert_same_bits(expected, model(x))
    assert tries == [3]


def test_inference_mode_keeps_to_itself() -> None:
    model = lct.compress_(layers(3))
    x = rows()
    model(x)
    with torch.inference_mode():
        model(x)
        assert waiting() == 0
    model(x).sum().backward()


def test_several_threads() -> None:
    """Backward has a thread of its own on CUDA; here forwards of two threads take turns."""
    import threading

    model = lct.compress_(layers(6))
    x = rows().detach()
    expected = model(x)
    wrong = []

    def run() -> None:
        for _ in range(30):
            if not torch.equal(model(x).view(torch.int16), expected.view(torch.int16)):
                wrong.append(1)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Block(nn.Module):
    """Weights in a linear, a convolution's form and an embedding's, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(SIZE, SIZE)
        self.down = nn.Linear(SIZE, SIZE)
        self.mix = nn.Conv1d(SIZE, SIZE, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(F.gelu(self.up(x)))
        y = y + self.mix(y.transpose(-1, -2)).transpose(-1, -2)
        return x + self.down(y)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_run_keeps_its_bits(compiled: bool, reentrant: bool | None, in_backward: bool) -> None:
    runs = []
    for compress in (False, True):
        torch.manual_seed(1)
        embedding = nn.Embedding(100, SIZE)
        blocks = nn.ModuleList(Block() for _ in range(3))
        model = nn.ModuleDict({"embedding": embedding, "blocks": blocks}).to(BF16)
        if compress:
            lct.compress_(model)
        kind = lct.optim.SGD if compress else torch.optim.SGD
        optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
        if in_backward:
            lct.optim.step_in_backward(optimizer)
        if compiled:
            for block in blocks:
                block.compile(backend="aot_eager", dynamic=False)
        losses = []
        for _ in range(4):
            y = embedding(torch.randint(0, 100, (2, 16)))
            for block in blocks:
                y = block(y) if reentrant is None else checkpoint(block, y, use_reentrant=reentrant)
            loss = F.cross_entropy(F.linear(y, embedding.weight).flatten(0, 1), torch.arange(32))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        runs.append((losses, model, optimizer))
    (expected, dense, dense_optimizer), (losses, model, optimizer) = runs
    for a, b in zip(expected, losses, strict=True):
        assert_same_bits(a, b)
    assert_same_model(dense, model)
    assert_same_state(dense_optimizer, optimizer)


def test_planning_decodes_ahead_too() -> None:
    """Where ``meta`` stands for CUDA, what waits takes the bytes that it would take there."""
    device = torch.device("meta")
    assert ops.launches_kernels(device) and ops.launches_kernels(torch.device("cuda"))
    assert not ops.launches_kernels(CPU)
    with meta.stands_for("cpu"):
        assert not ops.launches_kernels(device)
    roots = [lct.encode(torch.empty(SIZE, SIZE, dtype=BF16, device=device)) for _ in range(3)]
    for root in roots:
        ahead.decode_for_op(root)
    ahead.decode_for_op(roots[0])
    assert [len(root.place.waiting) for root in roots] == [0, 1, 1]
    assert all(root.place.waiting[0][0].nbytes == SIZE * SIZE * 2 for root in roots[1:])


def on_cuda(count: int = 4) -> tuple[nn.Sequential, nn.Sequential, torch.Tensor]:
    """A dense model, the same compressed, and rows."""
    dense = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(count)))
    dense = dense.to("cuda", BF16)
    compressed = lct.compress_(copy.deepcopy(dense))
    return dense, compressed, torch.randn(8, 256, device="cuda").to(BF16).requires_grad_()


@pytest.mark.gpu
def test_bits_on_cuda() -> None:
    dense, compressed, x = on_cuda()
    for _ in range(3):
        expected, found = dense(x), compressed(x)
        assert_same_bits(expected, found)
        (a,) = torch.autograd.grad(expected.float().square().sum(), x)
        (b,) = torch.autograd.grad(found.float().square().sum(), x)
        assert_same_bits(a, b)
        assert waiting() == 0
    assert compressed[3].weight.compressed.place is not None


@pytest.mark.gpu
def test_another_stream_waits_for_nothing() -> None:
    dense, compressed, x = on_cuda()
    compressed(x)
    y = compressed[0](x)
    assert waiting() == 3
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = compressed[1](y)
    torch.cuda.current_stream().wait_stream(side)
    assert_same_bits(dense[1](dense[0](x)), found)


@pytest.mark.gpu
def test_a_graph_that_steps_the_weights() -> None:
    """Replays change weights without a call: what was decoded before them is not used after."""
    dense, compressed, x = on_cuda(3)
    makers = (torch.optim.SGD, lct.optim.SGD)
    models = (dense, compressed)
    optimizers = [
        make(model.parameters(), lr=0.1, momentum=0.9)
        for make, model in zip(makers, models, strict=True)
    ]
    grads = [torch.randn(256, 256, device="cuda").to(BF16) for _ in range(3)]
    for model, optimizer in zip(models, optimizers, strict=True):
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            optimizer.step()
            optimizer.step()
        torch.cuda.current_stream().wait_stream(side)
    assert_same_bits(dense(x), compressed(x))
    lct.reserve_arena(32 << 20)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[1].step()
    for _ in range(3):
        y = compressed[0](x)  # others may be decoded with it
        graph.replay()
        optimizers[0].step()
        assert_same_bits(dense[2](dense[1](y)), compressed[2](compressed[1](y)))
