"""Saved activations that are encoded and decoded together: when, and that nothing is lost.

On the CPU, where batches are switched on; tests/nn/test_training_gpu.py has them on a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import lct
from lct import ops, tensor
from lct.errors import ArenaExhaustedError
from lct.nn import activations, little, saves
from lct.nn.room import Room
from lct.tensor import CompressedBatch, live_tensors
from training import BF16, assert_same_bits, store_small_tensors

SHAPE = 64, 64
SIZE = 64 * 64 * 2


class Counts:
    """How many tensors were encoded, and decoded, at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.encodes: list[int] = []
        self.decodes: list[int] = []
        self.failures = 0  # calls that find no room
        counts, decode_all = self, saves.decode_all

        class Batch(CompressedBatch):
            def __init__(self, tensors: Sequence[Any], *rest: Any) -> None:
                if counts.failures:
                    counts.failures -= 1
                    raise ArenaExhaustedError("no memory; nothing was overwritten")
                counts.encodes.append(len(tensors))
                super().__init__(tensors, *rest)

            def decode(self) -> list[torch.Tensor]:
                return counts.count_decodes(self.nbytes, super().decode)

        monkeypatch.setattr(tensor, "CompressedBatch", Batch)
        monkeypatch.setattr(
            saves, "decode_all", lambda some: self.count_decodes(some, lambda: decode_all(some))
        )

    def count_decodes(self, tensors: Sequence[Any], decode: Callable[[], Any]) -> Any:
        if self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError("no memory")
        self.decodes.append(len(tensors))
        return decode()


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """Batches on the CPU, of any share of what a block saves."""
    store_small_tensors(monkeypatch)
    monkeypatch.setattr(activations, "launches_kernels", lambda device: True)
    monkeypatch.setattr(activations, "BATCH_SHARE", 1e9)
    return Counts(monkeypatch)


def leaf() -> torch.Tensor:
    return torch.randn(SHAPE).to(BF16).requires_grad_()


def chain(x: torch.Tensor, length: int = 4) -> torch.Tensor:
    """Every sine saves its input, which the one before has made; ``x * 1`` saves nothing."""
    x = x * 1
    for _ in range(length):
        x = x.sin()
    return x


def gradient(x: torch.Tensor, length: int = 4) -> torch.Tensor:
    """Without LCT."""
    (grad,) = torch.autograd.grad(chain(x, length).sum(), x)
    return grad


def test_a_block_is_encoded_and_decoded_at_once(counts: Counts) -> None:
    x = leaf()
    expected = gradient(x)
    before = len(live_tensors())
    with lct.compress_activations() as saved:
        out = chain(x)
        assert counts.encodes == [] and len(live_tensors()) == before
    assert counts.encodes == [4] and len(live_tensors()) == before + 4
    assert saved.encoded == 4 and saved.dense_bytes == 4 * SIZE
    assert 0 < saved.stored_bytes < saved.dense_bytes
    out.sum().backward()
    assert counts.decodes == [4]
    assert x.grad is not None
    assert_same_bits(expected, x.grad)
    assert sum(site.decoded for site in saved.sites) == 4
    assert len(live_tensors()) == before
    assert not saves.decoded_saves.entries and not saves.decoded_saves.size_bytes


def test_a_full_batch_is_encoded(counts: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "save_batch_bytes", lambda: 3 * SIZE)
    x = leaf()
    with lct.compress_activations():
        out = chain(x, 8)
        assert counts.encodes == [3, 3]
    assert counts.encodes == [3, 3, 2]
    expected = gradient(x, 8)
    out.sum().backward()
    assert counts.decodes == [2, 3, 3]
    assert x.grad is not None
    assert_same_bits(expected, x.grad)


def test_a_share_of_what_is_saved_waits(counts: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the block has saved so far, or the one before."""
    monkeypatch.setattr(activations, "BATCH_SHARE", 1 / 4)
    monkeypatch.setattr(activations, "_last", None)
    x = leaf()
    with lct.compress_activations():
        out = chain(x, 12)
    assert counts.encodes == [1, 1, 1, 1, 1, 1, 2, 2, 2]
    counts.encodes.clear()
    with lct.compress_activations():
        out = chain(x, 12)
    assert counts.encodes == [3, 3, 3, 3]
    del out


@pytest.mark.parametrize(
    ("saved_mib", "setting", "batch_mib"),
    [
        (160, None, 10),  # a sixteenth
        (4000, None, 64),
        (12800, None, 100),  # a 128th
        (80000, None, 256),
        (80000, "1000", 625),
        (12800, "70", 70),
        (160, "70", 10),
        (12800, "0", 0),
    ],
)
def test_a_batch_grows_with_what_is_saved(
    saved_mib: int, setting: str | None, batch_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LCT_SAVE_BATCH_MIB", raising=False)
    if setting is not None:
        monkeypatch.setenv("LCT_SAVE_BATCH_MIB", setting)
    block = activations.SavedActivations()
    block._expected_bytes = saved_mib << 20
    assert block._batch_bytes() == batch_mib << 20


def test_a_batch_of_more_than_a_launch_takes(
    counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "launch_counts", lambda layouts, device: [1, 3, len(layouts) - 4])
    x = leaf()
    with lct.compress_activations() as saved:
        out = chain(x, 9)
    assert counts.encodes == [1, 3, 5]
    assert sum(site.stored_bytes for site in saved.sites) == saved.stored_bytes > 0
    out.sum().backward()
    assert counts.decodes == [5, 3, 1]
    assert x.grad is not None
    assert_same_bits(gradient(x, 9), x.grad)


@pytest.mark.parametrize("reason", ["larger than a batch", "LCT_SAVE_BATCH_MIB=0", "profile"])
def test_what_is_encoded_alone(
    reason: str, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "larger than a batch":
        monkeypatch.setattr(activations, "save_batch_bytes", lambda: SIZE - 1)
    elif reason != "profile":
        monkeypatch.setenv("LCT_SAVE_BATCH_MIB", "0")
    with lct.compress_activations(profile=reason == "profile"):
        out = chain(leaf())
        assert counts.encodes == [1, 1, 1, 1]
    out.sum().backward()
    assert counts.decodes == [1, 1, 1, 1]


def test_the_cpu_has_no_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    store_small_tensors(monkeypatch)
    counts = Counts(monkeypatch)
    with lct.compress_activations():
        chain(leaf())
    assert counts.encodes == [1, 1, 1, 1]


def test_backward_within_the_block_gets_what_waits(counts: Counts) -> None:
    x = leaf()
    with lct.compress_activations():
        chain(x).sum().backward()
    assert counts.encodes == counts.decodes == []
    assert x.grad is not None
    assert_same_bits(gradient(x), x.grad)


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_captures_hold_the_encodes_of_what_they_compute(
    begins: bool, ends: bool, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block may begin, and end, within a capture; what waits then is encoded within it too."""
    captures = begins
    monkeypatch.setattr(activations, "captures", lambda: captures)
    monkeypatch.setattr(activations, "is_capturing", lambda device: captures)
    x = leaf()
    with lct.compress_activations():
        out = chain(x)
        assert counts.encodes == []
        captures = ends
        out = chain(out, 2)
    # The last ones at once, where the first ones wait for the other end; those stay dense.
    assert counts.encodes == ([6] if begins == ends else [1, 1])
    out.sum().backward()
    assert x.grad is not None
    assert_same_bits(gradient(x, 6), x.grad)


def test_a_dropped_graph_is_not_encoded(counts: Counts) -> None:
    with lct.compress_activations():
        out = chain(leaf())
        kept = out * 2  # saves nothing
        del out, kept
    assert counts.encodes == []


def test_the_graph_alone_keeps_what_waits(counts: Counts) -> None:
    """No cycle: without the collector."""
    gc.collect()
    gc.disable()
    try:
        with lct.compress_activations():
            x = leaf() * 1
            storage = weakref.ref(x.untyped_storage())
            out = x.sin()
            del x
            assert storage() is not None
            del out
            assert storage() is None
    finally:
        gc.enable()


def test_an_error_in_the_block_encodes_nothing(counts: Counts) -> None:
    x = leaf()
    with pytest.raises(KeyError), lct.compress_activations():
        out = chain(x)
        raise KeyError
    assert counts.encodes == []
    out.sum().backward()
    assert x.grad is not None
    assert_same_bits(gradient(x), x.grad)


@pytest.mark.parametrize("when", ["while it waits", "after its encode"])
def test_a_change_in_place_is_an_error(when: str, counts: Counts) -> None:
    x = leaf() * 1
    with lct.compress_activations():
        out = x.sin().cos()
        if when == "while it waits":
            x.add_(1)
    if when == "after its encode":
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_storage_that_is_emptied_stays_as_it_is(
    counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As sharded training does with what it gathers again for backward."""
    # Torch resizes no storage that NumPy has seen.
    monkeypatch.setattr(Room, "look", lambda *_: None)
    x = leaf() * 1
    values = x.detach().clone()
    with lct.compress_activations():
        out = x.sin()
        x.untyped_storage().resize_(0)
    assert counts.encodes == []
    x.untyped_storage().resize_(SIZE)
    x.data.copy_(values)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert_same_bits(values.cos(), grad)


def test_where_there_is_no_room_what_waits_stays_dense(counts: Counts) -> None:
    x = leaf()
    counts.failures = 1
    with pytest.raises(ArenaExhaustedError), lct.compress_activations():
        out = chain(x)
    out.sum().backward()
    assert x.grad is not None
    assert_same_bits(gradient(x), x.grad)


def test_where_there_is_no_room_for_all_one_is_decoded(counts: Counts) -> None:
    x = leaf()
    with lct.compress_activations():
        out = chain(x)
    counts.failures = 1
    out.sum().backward()
    assert counts.decodes == [1, 3]
    assert x.grad is not None
    assert_same_bits(gradient(x), x.grad)


def test_a_graph_that_is_kept_may_be_asked_again(counts: Counts) -> None:
    x = leaf()
    with lct.compress_activations():
        out = chain(x).sum()
    grads = [torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2)]
    grads += torch.autograd.grad(out, x)
    for grad in grads:
        assert_same_bits(gradient(x), grad)
    del out
    assert not saves.decoded_saves.entries


def test_what_waits_decoded_stays_within_its_limit(
    counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saves, "SHARED_DECODED_BYTES", 2 * SIZE)
    x = leaf()
    with lct.compress_activations():
        out = chain(x, 8)
    out.sum().backward()
    assert x.grad is not None
    assert_same_bits(gradient(x, 8), x.grad)
    assert not saves.decoded_saves.entries and not saves.decoded_saves.size_bytes


def test_what_no_gradient_needs_is_let_go(counts: Counts) -> None:
    """Its batch is decoded for another one's sake."""
    x, y = leaf(), leaf()
    with lct.compress_activations():
        one, other = chain(x), chain(y)
    one.sum().backward()
    assert saves.decoded_saves.size_bytes == 4 * SIZE, "the other graph may still ask"
    del other
    assert not saves.decoded_saves.entries and not saves.decoded_saves.size_bytes


def test_what_all_layers_share_is_decoded_without_its_neighbours(
    counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the batch of the first layer would wait, decoded, all through backward."""
    monkeypatch.setattr(activations, "save_batch_bytes", lambda: 2 * SIZE)
    x, shared = leaf(), leaf() * 1

    def layers(x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        for _ in range(6):
            x = (x * shared).sin()
        return x

    expected = torch.autograd.grad(layers(x).sum(), x)[0]
    with lct.compress_activations():
        out = layers(x)
    largest = 0
    keep = saves.decoded_saves.keep

    def watch(*args: Any) -> None:
        nonlocal largest
        keep(*args)
        largest = max(largest, saves.decoded_saves.size_bytes)

    monkeypatch.setattr(saves.decoded_saves, "keep", watch)
    (found,) = torch.autograd.grad(out.sum(), x)
    assert_same_bits(expected, found)
    # The shared one, and the other of a batch.
    assert largest <= 3 * SIZE
    assert counts.decodes[1] == 1 and max(counts.decodes) == 2
    assert not saves.decoded_saves.entries


def test_layers_may_ask_for_their_batches_in_any_order(
    counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer of many batches: what is asked for out of turn is no reason to decode it alone."""
    monkeypatch.setattr(activations, "save_batch_bytes", lambda: 2 * SIZE)
    chooser = random.Random(0)

    x = leaf()
    kept = []
    with lct.compress_activations() as saved:
        for _ in range(16):
            # Ten graphs of a layer, saved one after another and asked for in any order.
            kept.append([(x * (k + 1)).sin() for k in range(10)])
    assert counts.encodes == [2] * 80
    for layer in reversed(kept):
        chooser.shuffle(layer)
        for out in layer:
            torch.autograd.grad(out.sum(), x, retain_graph=False)
    assert counts.decodes == [2] * 80
    assert saved.encoded == 160
    assert not saves.decoded_saves.entries


def random_graph(
    chooser: random.Random, leaves: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[int]]:
    """Some outputs of a graph of ops that save what others have made, and an order of them."""
    pool, outs = list(leaves), []
    for _ in range(chooser.randint(3, 25)):
        a, b = chooser.choice(pool), chooser.choice(pool)
        made: Callable[[], torch.Tensor] = chooser.choice(
            [
                a.sin,
                lambda a=a, b=b: a * b,
                lambda a=a, b=b: a @ b / 64,
                lambda a=a, b=b: a.t() * b,
                lambda a=a, b=b: torch.where(a > 0, a, b),
                lambda a=a, b=b: (a.float() * b.float()).to(BF16),
                lambda a=a: a.reshape(-1)[: a.numel() // 2].cos().repeat(2).view(SHAPE),
            ]
        )
        pool.append(made())
        if chooser.random() < 0.2:
            outs.append(pool[-1])
    outs.append(pool[-1])
    return outs, chooser.sample(range(len(outs)), len(outs))


def random_gradients(seed: int, within: Callable[[], Any]) -> list[torch.Tensor | None]:
    """Gradients of those outputs, one after another; some graphs are kept, some never asked."""
    chooser = random.Random(seed)
    torch.manual_seed(seed)
    leaves = [leaf() for _ in range(3)]
    with within():
        outs, order = random_graph(chooser, leaves)
    found: list[torch.Tensor | None] = []
    for number in order:
        last = number == order[-1] and chooser.random() < 0.7
        if outs[number].requires_grad and chooser.random() < 0.85:
            loss = outs[number].float().sum()
            found += torch.autograd.grad(loss, leaves, retain_graph=not last, allow_unused=True)
    return found


@pytest.mark.parametrize("part", range(4))
def test_random_graphs(part: int, counts: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(12 * part, 12 * part + 12):
        chooser = random.Random(~seed)
        limit = chooser.choice([1, 2, 3, 5, 100]) * SIZE
        monkeypatch.setattr(activations, "save_batch_bytes", lambda limit=limit: limit)
        monkeypatch.setattr(saves, "SHARED_DECODED_BYTES", chooser.choice([1, 3, 99]) * SIZE)
        monkeypatch.setattr(saves, "EARLY_SHARE", chooser.choice([0, 1 / 4, 1]))
        monkeypatch.setattr(little, "LITTLE_SHARE", chooser.choice([0, 1 / 16]))
        most = chooser.choice([1, 2, 16])
        monkeypatch.setattr(ops, "MOST_TOGETHER", most)
        expected = random_gradients(seed, contextlib.nullcontext)
        found = random_gradients(seed, lct.compress_activations)
        for want, got in zip(expected, found, strict=True):
            assert (want is None) == (got is None), seed
            if want is not None and got is not None:
                assert_same_bits(want, got, f"seed {seed}")
        gc.collect()
        assert not saves.decoded_saves.entries and not saves.decoded_saves.size_bytes, seed
    assert max(counts.encodes) > 1 and max(counts.decodes) > 1
