"""``CompressedTensor``, ``encode``, ``decode`` on the CPU: arguments, copies, changes of layout."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch

import inputs
import lct
from compare import assert_same_bits
from lct import ops
from lct.dtypes import DTYPES
from lct.errors import CorruptPayloadError
from lct.ops import patterns
from lct.presets import PRESETS
from lct.tensor import CompressedBatch, decode_all

BF16 = DTYPES["bfloat16"]
SIZE = 20_000  # two groups and a partial one
CALM = inputs.to_torch(inputs.gaussian(BF16, SIZE), BF16)
HOSTILE = inputs.to_torch(inputs.random_bits(BF16, SIZE), BF16)


def assert_holds(compressed: lct.CompressedTensor, dense: torch.Tensor) -> None:
    found = compressed.decode()
    assert found.shape == dense.shape and found.dtype == dense.dtype and found.is_contiguous()
    assert_same_bits(patterns(found), patterns(dense.contiguous()), "values")


@pytest.mark.parametrize("preset", [None, *PRESETS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_shape_and_strides(preset: str | None, dtype: str) -> None:
    dense = CALM.to(getattr(torch, dtype))[:19_200].view(3, 80, 80)
    for view in (dense, dense.transpose(0, 2), dense[:, 1::2], dense[0, 0, 0], dense[:0]):
        assert_holds(lct.encode(view, preset=preset), view)


def test_a_pending_negation_is_a_part_of_the_values() -> None:
    pairs = CALM.float().view(-1, 2)
    lazy = torch.view_as_complex(pairs).conj().imag
    assert lazy.is_neg()
    expected = -pairs[:, 1]
    compressed = lct.encode(lazy)
    assert_holds(compressed, expected)
    compressed.encode_(torch.zeros_like(expected))
    compressed.encode_(lazy)
    assert_holds(compressed, expected)


def test_many_decode_as_each_does_alone() -> None:
    stored = [
        lct.encode(CALM.view(4, 50, 100)),
        lct.encode(CALM, capacity=200),
        lct.encode(CALM.float(), preset="clean"),
        lct.encode(CALM[:0]),
        lct.encode(torch.tensor(1.5).bfloat16()),
        lct.encode(torch.ones(3, 8192).half()),
        lct.encode(HOSTILE, capacity="exact"),
        lct.encode(HOSTILE),
        lct.encode(CALM.float(), upcast=True),
        lct.encode(HOSTILE.float() + 1, upcast=True),
    ]
    assert {tensor.preset for tensor in stored} == {"pooled", "clean", "raw"}
    assert sum(tensor.group_counts().spilled > 0 for tensor in stored) == 3
    assert stored[5].group_counts().constant == 3
    found = decode_all(stored)
    for tensor, dense in zip(stored, found, strict=True):
        assert_holds(tensor, dense)
    assert len({dense.untyped_storage().data_ptr() for dense in found if dense.numel()}) == 9
    assert decode_all([]) == []


def test_many_decode_where_each_is() -> None:
    found = decode_all([lct.encode(CALM), lct.encode(CALM.view(100, -1).to("meta"))])
    assert_same_bits(patterns(found[0]), patterns(CALM), "values")
    assert found[1].is_meta and found[1].shape == (100, 200)


@pytest.mark.parametrize("capacity", ["exact", None, 784])
def test_a_tensor_comes_back_from_dense_storage(capacity: int | str | None) -> None:
    compressed = lct.encode(CALM, capacity=capacity)
    compressed.encode_(HOSTILE)
    assert compressed.preset == "raw"
    assert_holds(compressed, HOSTILE)
    copies = [compressed, compressed.clone(), pickle.loads(pickle.dumps(compressed))]
    for stored in copies:
        assert stored.encode_(HOSTILE).preset == "raw"  # it does not pay yet
        assert stored.encode_(CALM) is stored
        assert stored.preset == "pooled" and stored.ratio > 1.3
        assert_holds(stored, CALM)


def test_repack_finds_the_room_that_the_values_need() -> None:
    for capacity in (0, 200, 2112):
        compressed = lct.encode(CALM, capacity=capacity)
        assert compressed.repack().layout == lct.encode(CALM, capacity="exact").layout
        assert_holds(compressed, CALM)
    raw = lct.encode(HOSTILE, capacity="exact")
    assert raw.preset == raw.repack().preset == "raw"
    assert lct.encode(CALM[:0]).repack().preset == "raw"


def test_fixed_presets_keep_their_layout() -> None:
    compressed = lct.encode(CALM, preset="clean")
    layout = compressed.layout
    assert compressed.encode_(HOSTILE).repack().layout == layout
    assert_holds(compressed, HOSTILE)
    small = lct.encode(CALM[:10], preset="clean")
    assert small.encode_(CALM[10:20]).preset == "raw"
    assert_holds(small, CALM[10:20])


def test_copies_do_not_share_memory() -> None:
    for dense in (CALM, HOSTILE):
        compressed = lct.encode(dense.view(100, 200))
        copies = [compressed.clone(), copy.deepcopy(compressed)]
        copies.append(pickle.loads(pickle.dumps(compressed)))
        assert compressed.to("cpu") is compressed
        expected = compressed.canonical_bytes()
        compressed.encode_(torch.zeros(100, 200, dtype=torch.bfloat16))
        for other in copies:
            assert other.canonical_bytes() == expected
            assert_holds(other, dense.view(100, 200))


def test_every_byte_is_counted() -> None:
    calm, hostile = lct.encode(CALM), lct.encode(HOSTILE)
    assert calm.ndim == CALM.ndim and calm.dense_nbytes == CALM.nbytes
    assert calm.nbytes == calm.payload.nbytes and calm.ratio == CALM.nbytes / calm.nbytes > 1.4
    counts = hostile.group_counts()
    assert counts.spilled == counts.groups == 3
    assert hostile.nbytes == len(hostile.canonical_bytes()) > hostile.payload.nbytes


OTHERS = ("arenas", "activations")


def test_stats_sum_up_all_tensors() -> None:
    gc.collect()
    before = lct.stats()
    calm, hostile = lct.encode(CALM), lct.encode(HOSTILE)
    raw = lct.encode(HOSTILE, capacity=0)  # no room: every group spills from its first step on
    constant = lct.encode(torch.zeros(SIZE, dtype=torch.bfloat16))
    now = lct.stats()
    added = {key: now[key] - before[key] for key in before if key not in OTHERS}
    tensors = (calm, hostile, raw, constant)
    assert added == {
        "tensors": 4,
        "dense_bytes": 4 * CALM.nbytes,
        "payload_bytes": sum(t.payload.nbytes for t in tensors),
        "spilled_bytes": sum(t.nbytes - t.payload.nbytes for t in tensors),
        "groups": 12,
        "constant_groups": 3,
        "spilled_groups": 6,
        "raw_groups": 3,
    }
    assert added["spilled_bytes"] > 0
    del calm, hostile, raw, constant, tensors
    assert lct.stats() == before


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of nested and quantized tensors
def test_arguments_are_checked() -> None:
    compressed = lct.encode(CALM)
    for wrong in (CALM[1:], CALM.float(), CALM.view(100, 200)):
        with pytest.raises(ValueError, match=r"encode_ takes a torch\.bfloat16 tensor of"):
            compressed.encode_(wrong)
        with pytest.raises(ValueError, match=r"out must be a contiguous torch\.bfloat16 tensor"):
            compressed.decode(wrong)
    assert_holds(compressed, CALM)
    with pytest.raises(TypeError, match=r"encode takes a torch\.Tensor, got list"):
        lct.encode([1.0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="dtype must be one of bfloat16"):
        lct.encode(CALM.double())
    with pytest.raises(TypeError, match="encode takes a dense"):
        lct.encode(CALM.float().to_sparse())
    with pytest.raises(TypeError, match="encode_ takes a dense"):
        lct.encode(CALM.float()).encode_(CALM.float().to_sparse())
    with pytest.raises(TypeError, match="got a nested one"):
        lct.encode(torch.nested.as_nested_tensor([CALM, CALM[1:]]))
    with pytest.raises(TypeError, match=r"encode takes no quantized tensor, got torch\.qint8"):
        lct.encode(torch.quantize_per_tensor(CALM.float(), 0.1, 0, torch.qint8))
    with pytest.raises(ValueError, match="must be a multiple of 4 words a group from 0 to 2112, g"):
        lct.encode(CALM, capacity=3)
    with pytest.raises(ValueError, match="must be 1 to 64 words a stream, got 65"):
        lct.encode(CALM, preset="clean", capacity=65)
    with pytest.raises(TypeError, match=r"upcast takes a torch\.float32 tensor"):
        lct.encode(CALM, upcast=True)
    with pytest.raises(ValueError, match="capacity must be a number of words"):
        lct.encode(CALM, capacity="large")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="decode takes a CompressedTensor, got Tensor"):
        lct.decode(CALM)  # type: ignore[arg-type]


def test_devices_are_checked() -> None:
    compressed = lct.encode(CALM)
    data = compressed.canonical_bytes()
    for device in ("mps", torch.device("mps")):
        with pytest.raises(ValueError, match="device must be one of cpu, cuda, meta, got mps"):
            compressed.to(device)
        with pytest.raises(ValueError, match="device must be one of cpu, cuda, meta, got mps"):
            lct.CompressedTensor.from_canonical(data, (SIZE,), device)
    with pytest.raises(ValueError, match="device must be a CUDA device, got cpu"):
        lct.reserve_arena(1 << 20, "cpu")
    with pytest.raises(ValueError, match="size_bytes must be positive, got 0"):
        lct.reserve_arena(0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
def test_cuda_is_refused_where_there_is_none() -> None:
    compressed = lct.encode(CALM)
    for move in (compressed.cuda, lambda: compressed.to("cuda:0"), lambda: lct.reserve_arena(1)):
        with pytest.raises(ValueError, match=r"device cuda(:0)? needs a CUDA GPU"):
            move()


def test_damaged_bytes_are_refused() -> None:
    data = lct.encode(HOSTILE).canonical_bytes()
    for damaged in (data[:8], data[:-1], data + b"\0", b"\xff" + data[1:]):
        with pytest.raises(CorruptPayloadError):
            lct.CompressedTensor.from_canonical(damaged, (SIZE,))
    with pytest.raises(CorruptPayloadError, match="must have 20000 values"):
        lct.CompressedTensor.from_canonical(data, (SIZE - 1,))


def test_what_cannot_shrink_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA that would wait for the device, in an optimizer at every step."""
    monkeypatch.setattr(ops, "group_needs", lambda *_: pytest.fail("was measured"))
    assert lct.encode(torch.randn(256).bfloat16(), capacity="exact").preset == "raw"


@pytest.mark.parametrize("count", [1, 3])
def test_a_batch_of_tensors(count: int) -> None:
    dense = [CALM, CALM.view(100, -1), CALM[:9000]][:count]
    batch = CompressedBatch(dense, [748, 784, 800][:count], [False] * count)
    assert batch.device == CALM.device
    assert batch.nbytes == [tensor.payload.nbytes for tensor in batch.tensors()]
    for number, (expected, found) in enumerate(zip(dense, batch.decode(), strict=True)):
        assert found.shape == expected.shape
        alone = batch.tensor(number).decode()
        assert_same_bits(patterns(found), patterns(expected), "values")
        assert_same_bits(patterns(alone), patterns(expected), "values of one")
    before = lct.stats()["tensors"]
    del batch
    assert lct.stats()["tensors"] == before - count
