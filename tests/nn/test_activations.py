"""``compress_activations``: what is stored, how it comes back, and that nothing else changes."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lct
from lct.nn import activations, garbage, little, saves
from lct.nn.activations import is_exact_upcast
from lct.nn.bits import pack_bits
from lct.tensor import live_tensors
from training import BF16, assert_same_bits, random_bits, store_small_tensors


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    store_small_tensors(monkeypatch)


def hidden(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A tensor with a history, as activations are."""
    return (torch.randn(*shape).to(dtype)).requires_grad_() * 1


class Keep(torch.autograd.Function):
    """Saves its input and hands out what comes back."""

    seen: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        Keep.seen.append(x)
        return torch.zeros(x.shape, dtype=x.dtype) + grad


@pytest.fixture
def keep() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """What a tensor looks like after it was saved and asked for."""

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        with lct.compress_activations():
            out = Keep.apply(x)
        torch.autograd.grad(out, x) if x.requires_grad else None
        return Keep.seen.pop()

    yield there_and_back
    Keep.seen.clear()


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2),
    "permuted": lambda x: x.permute(2, 0, 1),
    "slice": lambda x: x[:, 2:5],
    "columns": lambda x: x[..., 16:48],
    "every other": lambda x: x[:, :, ::2],
    "offset": lambda x: x.flatten()[3:].view(-1, 1)[:2000],
    "expanded": lambda x: x[:, :, None].expand(-1, -1, 3, -1),
    "diagonal": lambda x: x[:, :, :8].diagonal(0, 1, 2),
}


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", LAYOUTS)
def test_comes_back_with_the_same_bits_strides_and_offset(
    name: str, dtype: torch.dtype, keep: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = LAYOUTS[name](hidden(4, 8, 64, dtype=dtype))
    back = keep(x)
    assert_same_bits(x, back)
    assert back.stride() == x.stride()
    assert back.storage_offset() == x.storage_offset()
    assert back.data_ptr() % 64 == x.data_ptr() % 64, "kernels choose by alignment"


def test_hostile_values_come_back(keep: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = random_bits(64, 64).requires_grad_().view(-1)
    assert_same_bits(x, keep(x))


def test_counts() -> None:
    x = hidden(64, 64)
    with lct.compress_activations() as saved:
        y = x.exp() + x.sin() + x.transpose(0, 1).cos()
        z = y.masked_fill(torch.rand(64, 64) < 0.5, 0)
    assert saved.encoded == 3, "x, exp(x), the mask"
    assert saved.reused == 1, "the transpose of x"
    assert saved.dense_bytes == 2 * x.nbytes + x.numel()
    assert saved.stored_bytes < 0.75 * saved.dense_bytes
    z.sum().backward()


def test_what_is_kept() -> None:
    parameter = nn.Parameter(torch.randn(64, 64).to(BF16))
    leaf = torch.randn(64, 64, dtype=BF16, requires_grad=True)
    table = nn.Parameter(torch.randn(64, 64).to(BF16))
    x = hidden(64, 64)
    tokens = torch.randint(0, 64, (2000,))
    with lct.compress_activations() as saved:
        leaf.sin()
        out = x @ parameter.t() @ parameter.view(64, 64)
        F.embedding(tokens, table)
        hidden(4, 4).sin()
        (hidden(64, 64)[0] * 2).sin()
        loss = F.cross_entropy(x.float(), tokens[:64])
    reasons = saved.kept
    assert reasons["a loss saves it, which backward asks for first"] == 2, "log_softmax, nll_loss"
    assert reasons["it is a view of a parameter"] == 2
    assert reasons["it is a leaf, which its owner keeps alive"] == 1
    assert reasons["torch.int64 is not compressed"] == 2, "tokens of the embedding and of the loss"
    assert reasons["it is small"] >= 1
    (out.sum() + loss).backward()


def test_a_small_part_of_a_large_storage_is_kept_unless_the_storage_is_stored() -> None:
    x = hidden(64, 64)
    with lct.compress_activations() as saved:
        first = x[0].sin()
        assert saved.kept == {"it is a small part of its storage": 1}
        whole = x.sin()
        second = x[1].sin()
    assert (saved.encoded, saved.reused) == (1, 1)
    (first.sum() + second.sum() + whole.sum()).backward()


def test_upcast_is_found_in_the_history() -> None:
    x = hidden(64, 64)
    assert is_exact_upcast(x.float())
    assert is_exact_upcast(x.float().view(32, 2, 64).transpose(0, 1)[..., :3])
    assert is_exact_upcast(torch.randn(3, dtype=BF16, requires_grad=True).float()), "a leaf"
    assert not is_exact_upcast(x.float() + 1)
    assert not is_exact_upcast(x.half().float())
    assert not is_exact_upcast(x)
    assert not is_exact_upcast(torch.randn(3))
    changed = x.float()
    changed.add_(1)
    assert not is_exact_upcast(changed)


def test_upcasts_are_stored_as_bf16_and_a_wrong_hint_costs_no_bit(
    keep: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    wide = hidden(64, 64).float()
    with lct.compress_activations() as saved:
        wide.sin().sum().backward()
    assert saved.stored_bytes < 0.4 * saved.dense_bytes
    wide = hidden(64, 64).float()
    wide.data.copy_(torch.randn(64, 64))  # leaves no trace in the history
    assert is_exact_upcast(wide)
    assert_same_bits(wide, keep(wide))


@given(st.integers(0, 300), st.integers(0, 9), st.integers(0, 2**32 - 1))
def test_masks_are_bits(length: int, offset: int, seed: int) -> None:
    mask = torch.rand(length + offset, generator=torch.Generator().manual_seed(seed)) < 0.5
    packed = pack_bits(mask[offset:])
    assert packed.payload.nbytes == -(-length // 8)
    assert torch.equal(packed.decode(), mask[offset:])


def test_several_consumers_share_one_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    x = hidden(64, 64)
    weights = [torch.randn(64, 64).to(BF16).requires_grad_() for _ in range(3)]
    with lct.compress_activations() as saved:
        loss = sum((x @ w).float().sum() for w in weights)
    assert (saved.encoded, saved.reused) == (1, 2)
    decodes = count_decodes(monkeypatch)
    loss.backward()
    assert len(decodes) == 1
    assert not saves.decoded_saves.entries and saves.decoded_saves.size_bytes == 0


def count_decodes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    decodes: list[int] = []
    decode = lct.CompressedTensor.decode
    monkeypatch.setattr(
        lct.CompressedTensor, "decode", lambda self: (decodes.append(1), decode(self))[1]
    )
    return decodes


def test_decoded_copies_stay_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "SHARED_DECODED_BYTES", 10_000)
    tensors = [hidden(64, 64) for _ in range(4)]
    with lct.compress_activations():
        first = [Keep.apply(x) for x in tensors]
        second = [Keep.apply(x) for x in tensors]
    for out in first:
        out.backward(retain_graph=True)
        assert saves.decoded_saves.size_bytes <= 10_000
    for out in second:
        out.backward(retain_graph=True)
    for x, seen in zip(tensors * 2, Keep.seen, strict=True):
        assert_same_bits(x, seen)
    Keep.seen.clear()
    del first, second
    assert not saves.decoded_saves.entries and saves.decoded_saves.size_bytes == 0


def test_a_consumer_that_writes_into_its_copy_spoils_no_other() -> None:
    class Spoil(Keep):
        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return x.zero_() + grad

    x = hidden(64, 64)
    with lct.compress_activations():
        kept, spoilt = Keep.apply(x), Spoil.apply(x)
    spoilt.backward(retain_graph=True)
    kept.backward(retain_graph=True)
    assert_same_bits(x, Keep.seen.pop())


def test_the_last_consumer_frees_the_payload() -> None:
    class Ask(Keep):
        @staticmethod
        def backward(ctx, grad):
            before = len(live_tensors())
            Keep.seen += [*ctx.saved_tensors, *ctx.saved_tensors]
            freed.append(before - len(live_tensors()))
            return torch.zeros(64, 64, dtype=BF16) + grad

    freed: list[int] = []
    x = hidden(64, 64)
    for retain in (True, False):
        with lct.compress_activations():
            out = Ask.apply(x)
        out.backward(retain_graph=retain)
        for seen in Keep.seen:
            assert_same_bits(x, seen)
        Keep.seen.clear()
    assert freed == [0, 1], "a graph that is kept may be asked again"


def test_a_consumer_that_writes_into_what_it_got_gets_no_second_copy() -> None:
    class Spoil(Keep):
        @staticmethod
        def backward(ctx, grad):
            ctx.saved_tensors[0].zero_()
            return ctx.saved_tensors[0] + grad

    with lct.compress_activations():
        out = Spoil.apply(hidden(64, 64))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_grads_of_a_part_leave_no_decoded_copy() -> None:
    x = hidden(64, 64)
    with lct.compress_activations():
        a, b = x.sin().sum(), x.cos().sum()
    a.backward(retain_graph=True)
    assert saves.decoded_saves.size_bytes == x.nbytes, "b may still ask"
    del a, b
    assert saves.decoded_saves.size_bytes == 0


def test_memory_of_activations_is_freed() -> None:
    x = hidden(64, 64)
    storage = weakref.ref(x.untyped_storage())
    with lct.compress_activations():
        y = x.exp().exp()
        del x
        gc.disable()
        try:
            assert storage() is None, "what is stored holds no dense tensor"
        finally:
            gc.enable()
    y.sum().backward()


def test_a_storage_at_the_address_of_a_freed_one_is_another() -> None:
    inputs, outs = [], []
    with lct.compress_activations() as saved:
        for _ in range(20):
            leaf = torch.randn(64, 64, dtype=BF16, requires_grad=True)
            inputs.append(leaf)
            outs.append(((leaf * 1) ** 2).sum())  # leaf * 1 dies here
    assert saved.encoded == 20
    sum(outs).backward()
    for leaf in inputs:
        assert_same_bits(leaf.grad, leaf.detach() * 2)


def test_compressed_weights_and_activations_together() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(BF16)
    lct.compress_(model)
    x = hidden(32, 64)
    with lct.compress_activations() as saved:
        out = model(x)
    assert saved.kept["it is a parameter or a subclass"] >= 1
    assert saved.encoded == 2, "x, and ReLU's result once for it and the next layer"
    out.sum().backward()


def test_as_a_decorator() -> None:
    @lct.compress_activations()
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    x = hidden(64, 64)
    assert type(forward(x).grad_fn._raw_saved_self.data).__name__ == "_Saved"


def test_sites_say_where_what_was_saved_comes_from() -> None:
    def feed_forward(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x * 2)  # saves x * 2, made on this line

    line = f"{__file__}:{feed_forward.__code__.co_firstlineno + 1}"
    others = set(live_tensors())
    x = hidden(64, 64)
    with lct.compress_activations() as saved:
        outs = [feed_forward(x) for _ in range(3)]
        mask = outs[0] > 0
        outs += [x.exp(), outs[1].masked_fill(mask, 0), outs[2].masked_fill(mask, 1)]
    by_site = {(site.place, site.producer, site.dtype): site for site in saved.sites}
    gelu = by_site[line, "Mul", BF16]
    assert (gelu.encoded, gelu.reused, gelu.decoded, gelu.shape) == (3, 0, 0, (64, 64))
    assert gelu.dense_bytes == 3 * 64 * 64 * 2
    assert gelu.stored_bytes < 0.8 * gelu.dense_bytes
    (bits,) = [site for site in saved.sites if site.dtype == torch.bool]
    assert (bits.encoded, bits.reused, bits.stored_bytes) == (1, 1, 64 * 64 / 8)
    assert ("Exp", 1) in {(site.producer, site.encoded) for site in saved.sites}
    payloads = [t.payload.nbytes for t in live_tensors() if t not in others]
    assert saved.stored_bytes == sum(payloads) + bits.stored_bytes
    assert saved.dense_bytes == sum(site.dense_bytes for site in saved.sites)
    sum(out.sum() for out in outs).backward()
    assert gelu.decoded == 3
    assert gelu.encode_seconds == gelu.decode_seconds == 0.0


def test_sites_of_modules_are_lines_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(BF16)
    line = test_sites_of_modules_are_lines_of_the_model.__code__.co_firstlineno + 4
    with lct.compress_activations() as saved:
        out = lct.compress_(model)(hidden(32, 64))
    assert {site.place for site in saved.sites} == {f"{__file__}:{line}"}, (
        "no frame of torch or lct"
    )
    out.sum().backward()


def test_stats_have_the_sites_of_the_last_block() -> None:
    with lct.compress_activations(profile=True) as saved:
        out = hidden(64, 64).exp()
    out.sum().backward()
    numbers = lct.stats()["activations"]
    assert numbers == saved.as_dict()
    json.dumps(numbers)
    assert numbers["encoded"] == len(numbers["sites"]) == 1
    (site,) = numbers["sites"]
    assert site["dtype"] == "bfloat16" and site["shape"] == [64, 64]
    head, row, *kept = str(saved).splitlines()
    assert head.split()[:2] == ["saved", "at"] and head.endswith("decode ms")
    assert row.startswith(__file__) and "64 × 64" in row and not kept
    assert site["encode_seconds"] > 0 and site["decode_seconds"] > 0
    assert site["saved_bytes"] == site["dense_bytes"] - site["stored_bytes"] > 0


@pytest.mark.parametrize("threshold", [700, 0, 10**6])
def test_fewer_collections_within_a_block(threshold: int) -> None:
    """As long as those are rare or off that the user asked for; whatever ends the block."""
    counts: list[str] = []
    before = gc.get_threshold()
    x = hidden(64, 64)
    gc.collect()
    gc.set_threshold(threshold, 11, 12)
    gc.callbacks.append(lambda phase, _: counts.append(phase))
    try:
        with lct.compress_activations():
            outs = [(x * k).sin() for k in range(500)]
            with lct.compress_activations():
                assert gc.get_threshold()[0] == {700: garbage.THRESHOLD}.get(threshold, threshold)
            assert counts == [] and len(outs) == 500
        assert gc.get_threshold() == (threshold, 11, 12)
        with pytest.raises(ZeroDivisionError), lct.compress_activations():
            raise ZeroDivisionError
        assert gc.get_threshold() == (threshold, 11, 12)
    finally:
        gc.callbacks.pop()
        gc.set_threshold(*before)


def test_what_is_little_beside_the_rest_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as it is little in all; what the block before has saved says what the rest is."""
    monkeypatch.setattr(little, "LITTLE_SHARE", 1 / 16)
    monkeypatch.setattr(little, "MOST_LITTLE_SHARE", 1 / 4)
    monkeypatch.setattr(activations, "_last", None)
    large, small = hidden(64, 512), hidden(64, 16)
    rows = []
    for count in (2, 2, 40):
        with lct.compress_activations() as saved:
            outs = [large.sin(), *[(small * 1).sin() for _ in range(count)]]
        rows.append((saved.encoded, saved.kept["it is little beside what the block saves"]))
        del outs
    # A fourth of the 68 KiB that the second block has saved: eight of 2 KiB.
    assert rows == [(3, 0), (1, 2), (41 - 8, 8)]
    monkeypatch.setattr(little, "LITTLE_BYTES", 2048)
    with lct.compress_activations() as saved:
        outs = [large.sin(), (small * 1).sin()]
    assert (saved.encoded, len(saved.kept)) == (2, 0)
    del outs


def test_the_smallest_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many larger ones come before them; a save that two ops make counts once."""
    monkeypatch.setattr(little, "LITTLE_SHARE", 1 / 2)
    monkeypatch.setattr(little, "MOST_LITTLE_SHARE", 1 / 4)
    monkeypatch.setattr(activations, "_last", None)
    middle, small = hidden(64, 32), hidden(64, 16)  # 4 and 2 KiB
    for first in (True, False, False):
        with lct.compress_activations() as saved:
            values = [(middle * 1).sin() for _ in range(10)]
            made = [small * 1 for _ in range(4)]
            values += [one.sin() for one in made] + [one.cos() for one in made]
        # A fourth of 48 KiB: all small ones, 8 KiB, and one of the others.
        if first:
            assert (saved.encoded, saved.reused) == (14, 4)
        else:
            assert (saved.encoded, saved.reused) == (9, 0)
            assert saved.kept["it is little beside what the block saves"] == 1 + 8
        del values, made


def test_min_bytes_leaves_more_as_it_is() -> None:
    large, small = (torch.randn(n, 1024).to(BF16).requires_grad_() for n in (64, 16))
    with lct.compress_activations(min_bytes=64 << 10) as saved:
        out = (large * 2).sigmoid().sum() + (small * 2).sigmoid().sum()
    assert saved.encoded == 1 and saved.kept["it is small"] == 1
    out.backward()
    with pytest.raises(ValueError, match="min_bytes must be at least 0, got -1"):
        lct.compress_activations(min_bytes=-1).__enter__()
