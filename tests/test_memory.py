"""``LiveBytes`` counts every storage once, from the op that makes it until it is freed."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lct
from lct.bench.models.byte_gpt import ByteGpt, GptSize
from lct.memory import LiveBytes
from lct.tensor import live_tensors
from training import BF16, TiedTransformer, make, random_bits, store_small_tensors, token_loss

KIB = 1024


def bf16(kib: int) -> torch.Tensor:
    return torch.ones(kib * 512, dtype=BF16)


def test_counts_storages_once_and_frees_them() -> None:
    with LiveBytes() as live:
        a = bf16(4)
        assert live.live_bytes == 4 * KIB
        b = a.view(2, -1).t()[3:]
        assert live.live_bytes == 4 * KIB, "a view is no storage"
        c = a + 1
        del a
        assert live.live_bytes == 8 * KIB, "b holds it"
        del b
        assert live.live_bytes == 4 * KIB
        c.untyped_storage().resize_(KIB)
        c.resize_(KIB // 2)
        assert live.live_bytes == KIB
    assert live.peak_bytes == 8 * KIB
    assert [size for _, size in live.timeline] == [0, 4 * KIB, 8 * KIB, 4 * KIB, KIB]
    assert [op for op, _ in live.timeline] == sorted(op for op, _ in live.timeline)
    assert live.num_ops > 0


def test_baseline_takes_what_exists() -> None:
    model = nn.Linear(64, 64).to(BF16)
    model.register_buffer("table", bf16(2))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 64, dtype=BF16)).sum().backward()
    optimizer.step()
    weights = 64 * 64 * 2 + 64 * 2
    assert LiveBytes(model, optimizer).live_bytes == 3 * weights + 2 * KIB
    compressed = lct.encode(torch.randn(128, 128).to(BF16))
    live = LiveBytes([compressed, {"more": (bf16(1),)}])
    assert live.live_bytes == compressed.nbytes, "nobody holds the other"


def test_baseline_of_a_compressed_run() -> None:
    model = make(TiedTransformer, True)
    optimizer = lct.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    token_loss(model, (torch.randint(0, 64, (2, 16)),)).backward()
    optimizer.step()
    optimizer.zero_grad()
    held = lct.compression_report(model).stored_bytes
    live = LiveBytes(model)
    # Where every group has room nothing spilled, and payloads are all there is.
    assert live.live_bytes == pytest.approx(held, rel=0.02)
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    assert LiveBytes(model, optimizer).live_bytes == live.live_bytes + state


def test_compressing_a_model_frees_its_dense_weights_one_by_one() -> None:
    model = make(TiedTransformer, False)
    largest = max(p.nbytes for p in model.parameters())
    with LiveBytes(model) as live:
        dense = live.live_bytes
        lct.compress_(model)
        stored = lct.compression_report(model).stored_bytes
        assert live.live_bytes == pytest.approx(stored, rel=0.02)
        assert live.peak_bytes < dense + 2 * largest
        lct.decompress_(model)
        assert live.live_bytes == dense


def test_sees_payloads_spills_and_decoded_tensors() -> None:
    dense, hostile = torch.randn(128, 128).to(BF16), random_bits(128, 128)
    with LiveBytes() as live:
        compressed = lct.encode(dense)
        assert live.live_bytes == dense.nbytes + compressed.nbytes
        values = compressed.decode()
        assert live.live_bytes == 2 * dense.nbytes + compressed.nbytes
        del values
        before = live.live_bytes
        spilt = lct.encode(hostile, capacity=256)
        assert spilt.group_counts().spilled == 2
        gc.collect()
        assert live.live_bytes - before == hostile.nbytes + spilt.nbytes


def test_sees_into_the_ops_of_a_compressed_weight() -> None:
    """The decoded weight and its gradient lie within ops that a plain mode does not look into."""
    weight = nn.Parameter(lct.CompressedWeight.from_dense(torch.randn(256, 256).to(BF16)))
    size = 256 * 256 * 2
    x = torch.randn(1, 256).to(BF16).requires_grad_()
    for multiply in (F.linear, lambda x, w: x @ w.t()):
        weight.grad = None
        with LiveBytes(weight) as live:
            start = live.live_bytes
            out = multiply(x, weight)
            assert size < live.peak_bytes - start < size + 16 * KIB
            assert live.live_bytes < start + 16 * KIB, "only the op had it decoded"
            middle = live.num_ops
            out.sum().backward()
        backward = [bytes_ for op, bytes_ in live.timeline if op > middle]
        # The gradient, and the weight decoded again for the gradient of x.
        assert max(backward) - start < 2 * size + 16 * KIB
        assert max(backward) - start > size


def test_sees_the_backward_thread_and_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    store_small_tensors(monkeypatch)
    x = torch.randn(64, 64, dtype=BF16, requires_grad=True)
    with LiveBytes(x) as live:
        with lct.compress_activations() as saved:
            y = (x * 1).sin().sum()
        held = live.live_bytes - x.nbytes
        assert saved.stored_bytes <= held < saved.stored_bytes + 200
        ops = live.num_ops
        y.backward()
        assert live.num_ops > ops
        assert live.live_bytes < 2 * x.nbytes + 200, "x and its gradient"


def test_the_mode_is_restored_for_wrapper_subclasses() -> None:
    seen = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    weight = lct.CompressedWeight.from_dense(torch.randn(64, 64).to(BF16))
    with Record(), LiveBytes():
        weight.mul_(2)
    assert torch.ops.aten.mul_.Tensor in seen


def test_a_step_with_lct_takes_less(monkeypatch: pytest.MonkeyPatch) -> None:
    store_small_tensors(monkeypatch)
    tokens = torch.randint(0, 64, (4, 33))
    peaks = []
    for compressed in (False, True):
        torch.manual_seed(0)
        model = TiedTransformer(width=128).to(BF16)
        if compressed:
            lct.compress_(model)
        kind = lct.optim.SGD if compressed else torch.optim.SGD
        optimizer = kind(model.parameters(), lr=0.01, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            with LiveBytes(model, optimizer) as live:
                with lct.compress_activations() if compressed else torch.enable_grad():
                    loss = token_loss(model, (tokens,))
                loss.backward()
                optimizer.step()
            del loss
        peaks.append(live.peak_bytes)
    assert peaks[1] < 0.95 * peaks[0]


def test_nothing_but_what_the_format_predicts_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """After forward: weights, state and what was saved. After the step: weights and state."""
    store_small_tensors(monkeypatch)
    gc.collect()
    others = set(live_tensors())
    model = ByteGpt(GptSize("test", 2, 256, 4, 128, "native")).to(BF16)
    dense_bytes = 3 * sum(p.nbytes for p in model.parameters())
    lct.compress_(model)
    optimizer = lct.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (4, 129))
    live = LiveBytes(model, tokens)

    def predicted() -> int:
        """Layouts, what spilled past them, and the parameters and states that stay dense."""
        coded = [tensor for tensor in live_tensors() if tensor not in others]
        dense = [p for p in model.parameters() if not isinstance(p, lct.CompressedWeight)]
        states = [value for state in optimizer.state.values() for value in state.values()]
        dense += [value for value in states if isinstance(value, torch.Tensor)]
        spills = sum(tensor.group_counts().spill_bytes for tensor in coded)
        return (
            sum(tensor.layout.size_bytes for tensor in coded)
            + spills
            + sum(t.nbytes for t in dense)
            + tokens.nbytes
        )

    at_rest = []
    for step in range(4):
        with live:
            with lct.compress_activations() as saved:
                loss = model.loss(tokens)
            if step > 0:
                # What cross entropy saves stays dense, and so do means and deviations of norms.
                log_probabilities = 4 * 128 * 256 * 4
                norms = 5 * 2 * 4 * 128 * 2
                expected = predicted() + log_probabilities + norms
                assert live.live_bytes == pytest.approx(expected, rel=0.01)
                assert saved.stored_bytes > 0.3 * at_rest[-1], "activations are a good part of it"
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
        gc.collect()
        weights_and_state = [tensor for tensor in live_tensors() if tensor not in others]
        assert len(weights_and_state) == 3 * sum(p.dim() > 1 for p in model.parameters())
        assert live.live_bytes == pytest.approx(predicted(), rel=0.01)
        assert live.live_bytes < 0.75 * dense_bytes
        at_rest.append(live.live_bytes)
    assert max(at_rest) < 1.01 * min(at_rest), "no step leaves anything behind"
