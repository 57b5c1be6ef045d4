"""Tensors without values: the sizes that payloads of Gaussian values have."""

from __future__ import annotations

import pytest
import torch

import lct
from lct.backends import meta
from lct.nn import CompressedWeight
from lct.tensor import CompressedBatch
from training import BF16, TiedTransformer


@pytest.mark.parametrize("capacity", [None, 784, "exact"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_values", [0, 128, 3000, 2**17 + 5000])
def test_sizes_are_those_of_gaussian_values(num_values, dtype, capacity) -> None:
    dense = torch.randn(num_values).to(dtype)
    expected = lct.encode(dense, capacity=capacity)
    got = lct.encode(dense.to("meta"), capacity=capacity)
    assert got.device.type == "meta" and got.group_counts().spilled == 0
    # Few values have no mean: 1,000 may need some words more or less than others.
    assert got.payload.nbytes == pytest.approx(expected.payload.nbytes, rel=0.03)
    if capacity != "exact":
        assert got.layout == expected.layout
    back = got.decode()
    assert (back.shape, back.dtype, back.device.type) == (dense.shape, dtype, "meta")
    assert expected.to("meta").payload.nbytes == expected.payload.nbytes


def test_a_model_without_values() -> None:
    with torch.device("meta"):
        model = lct.compress_(TiedTransformer().to(BF16))
    assert isinstance(model.head.weight, CompressedWeight)
    assert model.head.weight is model.embed.weight
    with torch.device("cpu"):
        real = lct.compress_(TiedTransformer().to(BF16))
    sizes = [lct.compression_report(m).stored_bytes for m in (model, real)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.02)


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Muon"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_steps_without_values(kind: str, device: str) -> None:
    options = {"momentum": 0.9} if kind == "SGD" else {}
    with torch.device("meta"):
        linear = lct.compress_(torch.nn.Linear(128, 256, bias=False, dtype=BF16))
        optimizer = getattr(lct.optim, kind)(linear.parameters(), **options)
        with meta.stands_for(device):
            for _ in range(2):
                linear.weight.grad = torch.empty(256, 128, dtype=BF16)
                optimizer.step()
            state = optimizer.state[linear.weight]
            name = "exp_avg" if kind == "AdamW" else "momentum_buffer"
            assert isinstance(state[name], lct.CompressedTensor)
            assert linear.weight.compressed.can_step_fused(state[name]) == (device == "cuda")


@pytest.mark.parametrize(("device", "shares"), [("cuda", True), ("cpu", False)])
def test_payloads_share_a_buffer_as_on_the_device(device: str, shares: bool) -> None:
    dense = [torch.empty(20_000 + k, dtype=torch.bfloat16, device="meta") for k in range(3)]
    with meta.stands_for(device):
        batch = CompressedBatch(dense, [748] * 3, [False] * 3)
        storages = {one.payload.untyped_storage()._cdata for one in batch.tensors()}
        assert len(storages) == (1 if shares else 3)
        assert [out.shape for out in batch.decode()] == [tensor.shape for tensor in dense]
        assert batch.nbytes == [one.payload.nbytes for one in batch.tensors()]
