"""Ops on compressed weights: the same bits, strides and errors as on dense ones."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lct
from lct.nn import CompressedWeight
from training import BF16, assert_same_bits, bits, plain, random_bits


def pair(*shape: int, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, CompressedWeight]:
    dense = torch.randn(*shape).to(dtype)
    return dense.clone(), CompressedWeight.from_dense(dense)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(32, 32), (7, 100), (8, 4, 3, 16), (2, 1, 900)])
def test_decodes_to_the_same_bits_and_strides(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    dense, weight = pair(*shape, dtype=dtype)
    assert (weight.shape, weight.dtype, weight.device) == (dense.shape, dtype, dense.device)
    assert_same_bits(dense, weight)
    assert weight.dense().stride() == dense.stride() == weight.stride()


def test_keeps_the_strides_of_permuted_memory() -> None:
    dense = torch.randn(16, 8, 3, 3).to(BF16).to(memory_format=torch.channels_last)
    weight = CompressedWeight.from_dense(dense)
    assert weight.stride() == weight.dense().stride() == dense.stride()
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert_same_bits(dense, weight)
    weight.copy_(dense * 2)
    assert_same_bits(dense * 2, weight)
    weight.mul_(2)
    assert_same_bits(dense * 4, weight)


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "t": lambda w: w.t(),
    "transpose": lambda w: w.transpose(0, 1),
    "permute": lambda w: w.permute(1, 0),
    "view": lambda w: w.view(16, 64),
    "reshape": lambda w: w.reshape(-1),
    "slice": lambda w: w[3:17, ::2],
    "select": lambda w: w[5],
    "narrow of t": lambda w: w.t().narrow(0, 2, 5),
    "as_strided": lambda w: w.as_strided((4, 4), (33, 1), 7),
    "unsqueeze": lambda w: w[:, None],
    "expand": lambda w: w[0].expand(5, 32),
    "diagonal": lambda w: w.diagonal(1),
    "unfold": lambda w: w.unfold(1, 4, 2),
    "split": lambda w: w.split([8, 24]),
    "chunk": lambda w: w.chunk(3, dim=1),
    "unbind": lambda w: w.unbind(),
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "flatten": lambda w: w.flatten(),
    "swapaxes": lambda w: w.swapaxes(0, 1),
    "int16": lambda w: w.view(torch.int16),
    "uint8": lambda w: w.view(torch.uint8)[1:, 3:9],
    "view of a view": lambda w: w[4:].t()[2:5].unsqueeze(0),
}


def views_of(tensor: torch.Tensor, make: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
    made = make(tensor)
    return list(made) if isinstance(made, (tuple, list)) else [made]


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_lazy_and_equal(name: str) -> None:
    dense, weight = pair(32, 32)
    for a, b in zip(views_of(dense, VIEWS[name]), views_of(weight, VIEWS[name]), strict=True):
        assert isinstance(b, CompressedWeight), "a view decodes nothing"
        assert b.compressed is weight.compressed
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        assert a.storage_offset() == b.storage_offset()
        assert_same_bits(a, b, name)
        assert b.dense().stride() == a.stride()


@pytest.mark.parametrize("name", [name for name in VIEWS if name not in ("expand", "unfold")])
def test_writes_through_views_reach_the_weight(name: str) -> None:
    dense, weight = pair(32, 32)
    for a, b in zip(views_of(dense, VIEWS[name]), views_of(weight, VIEWS[name]), strict=True):
        source = torch.full_like(plain(a), 3)
        a.copy_(source)
        b.copy_(source)
        assert_same_bits(dense, weight, name)
        a.sub_(1)
        assert b.sub_(1) is b
        assert_same_bits(dense, weight, name)


IN_PLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda w: w.add_(torch.full((32, 32), 0.3, dtype=BF16), alpha=-0.7),
    "mul_": lambda w: w.mul_(0.37),
    "zero_": lambda w: w.zero_(),
    "addcmul_": lambda w: w.addcmul_(torch.ones(32, dtype=BF16), torch.ones(32, 1, dtype=BF16)),
    "lerp_": lambda w: w.lerp_(torch.ones(32, 32, dtype=BF16), 0.25),
    "index_put_": lambda w: w.__setitem__((torch.tensor([1, 5]), slice(2, 4)), 9.0),
    "masked_fill_": lambda w: w.masked_fill_(torch.eye(32, dtype=torch.bool), 2),
    "own rows": lambda w: w[:16].add_(w[16:]),
    "copy_ of itself": lambda w: w.copy_(w),
    "copy_ FP32": lambda w: w.copy_(torch.linspace(-3, 3, 1024).view(32, 32)),
    "copy_ row": lambda w: w.copy_(torch.linspace(-3, 3, 32)),
    "out=": lambda w: torch.add(torch.ones(32, 32, dtype=BF16), 1, out=w),
    "foreach": lambda w: torch._foreach_mul_([w, w[:3]], 1.1),
    "init": lambda w: nn.init.kaiming_uniform_(w, generator=torch.Generator().manual_seed(1)),
    "normal_": lambda w: w.normal_(0, 0.02, generator=torch.Generator().manual_seed(1)),
    "data": lambda w: w.data.mul_(3),
    "hostile": lambda w: w.copy_(random_bits(32, 32, generator=torch.Generator().manual_seed(1))),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_changes_in_place_are_encoded(name: str) -> None:
    dense, weight = pair(32, 32)
    alias = weight.detach()
    IN_PLACE[name](dense)
    IN_PLACE[name](weight)
    assert_same_bits(dense, weight, name)
    assert_same_bits(dense, alias, "alias")
    assert weight._version == dense._version or name == "foreach"
    assert (weight._version > 0) == (name != "data")


def test_a_failing_op_changes_nothing() -> None:
    dense, weight = pair(32, 32)
    with pytest.raises(RuntimeError):
        weight.add_(torch.ones(5))
    assert_same_bits(dense, weight)


def test_reads_give_plain_tensors() -> None:
    dense, weight = pair(32, 32)
    x = torch.randn(4, 32).to(BF16)
    for result, expected in (
        (weight + 1, dense + 1),
        (x @ weight, x @ dense),
        (torch.cat([weight, weight]), torch.cat([dense, dense])),
        (torch.stack([weight.t(), weight]), torch.stack([dense.t(), dense])),
        (weight.float(), dense.float()),
        (weight.t().contiguous(), dense.t().contiguous()),
        (weight[torch.tensor([3, 1])], dense[torch.tensor([3, 1])]),
        (weight.norm(), dense.norm()),
        (torch.einsum("ij,kj->ik", x, weight), torch.einsum("ij,kj->ik", x, dense)),
    ):
        assert type(result) is torch.Tensor
        assert_same_bits(expected, result)
    assert torch.equal(weight, dense)
    assert weight[2, 3].item() == dense[2, 3].item()
    assert weight.tolist() == dense.tolist()
    floats, wide = pair(32, 32, dtype=torch.float32)
    assert (wide.numpy() == floats.numpy()).all()


def test_numpy_of_a_parameter_is_refused_as_torch_does() -> None:
    weight = nn.Parameter(pair(32, 32, dtype=torch.float32)[1])
    with pytest.raises(RuntimeError, match="requires grad"):
        weight.numpy()


def test_factories() -> None:
    dense, weight = pair(32, 32)
    for make in (torch.zeros_like, torch.ones_like, lambda w: torch.full_like(w, 3)):
        made = make(weight)
        assert type(made) is torch.Tensor
        assert_same_bits(make(dense), made)
    assert torch.zeros_like(weight, dtype=torch.float32).dtype == torch.float32
    assert torch.zeros_like(weight.t()).stride() == torch.zeros_like(dense.t()).stride()
    assert type(weight.new_zeros(3)) is torch.Tensor
    assert weight.new_zeros(3).dtype == BF16
    torch.manual_seed(0)
    expected = torch.randn_like(dense)
    torch.manual_seed(0)
    assert_same_bits(expected, torch.randn_like(weight))
    empty = torch.empty_like(weight)
    assert isinstance(empty, CompressedWeight)
    assert empty.compressed is not weight.compressed
    assert empty.dense().shape == dense.shape


def test_clone_has_a_payload_of_its_own() -> None:
    dense, weight = pair(32, 32)
    clone = weight.clone()
    assert isinstance(clone, CompressedWeight)
    weight.zero_()
    assert_same_bits(dense, clone)


def test_casts_stay_compressed_without_gradients_only() -> None:
    dense, weight = pair(32, 32)
    assert type(weight.float()) is torch.Tensor
    with torch.no_grad():
        for dtype in (torch.float32, torch.float16):
            cast = weight.to(dtype)
            assert isinstance(cast, CompressedWeight)
            assert_same_bits(dense.to(dtype), cast)
        assert type(weight.double()) is torch.Tensor


def test_pitfall_23_data_assignment_is_not_lost() -> None:
    _, weight = pair(32, 32)
    parameter = nn.Parameter(weight)
    alias = parameter.detach()
    before = plain(alias).clone()
    for new in (torch.randn(16, 48).to(BF16), CompressedWeight.from_dense(random_bits(32, 32))):
        parameter.data = new
        assert isinstance(parameter, CompressedWeight)
        assert isinstance(parameter, nn.Parameter)
        assert parameter.shape == new.shape
        assert_same_bits(new, parameter)
    assert_same_bits(before, alias, "the alias keeps the values that it had")


@pytest.mark.parametrize(
    "change", [lambda w: w.resize_(3), lambda w: w.t_(), lambda w: w.unsqueeze_(0)]
)
def test_changes_of_shape_are_refused(change: Callable[[torch.Tensor], Any]) -> None:
    _, weight = pair(32, 32)
    with pytest.raises(RuntimeError, match="decompress_"):
        change(weight)


def test_shared_memory_is_refused() -> None:
    with pytest.raises(RuntimeError, match="shared memory"):
        pair(32, 32)[1].share_memory_()


def test_deepcopy_and_pickle() -> None:
    parameter = nn.Parameter(pair(32, 32)[1])
    parameter.tag = "kept"
    (parameter.float().sum() * 2).backward()
    assert parameter.grad is not None
    buffer = io.BytesIO()
    torch.save(parameter, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(parameter),
        pickle.loads(pickle.dumps(parameter)),
        torch.load(buffer, weights_only=False),
    ]
    assert_same_bits(parameter.grad, copies[0].grad)
    for made in copies:
        assert isinstance(made, CompressedWeight) and isinstance(made, nn.Parameter)
        assert made.compressed is not parameter.compressed
        assert made.requires_grad and made.tag == "kept"
        assert_same_bits(parameter, made)
    view = parameter.detach()[3:7].t()
    again = pickle.loads(pickle.dumps(view))
    assert_same_bits(view, again)
    assert again.stride() == view.stride()


def test_deepcopy_keeps_aliases() -> None:
    _, weight = pair(32, 32)
    first, second = copy.deepcopy([weight, weight.t()])
    first.zero_()
    assert not bits(second).any()


def test_repr() -> None:
    parameter = nn.Parameter(pair(32, 32)[1])
    assert repr(parameter).startswith("CompressedWeight(Parameter, shape=(32, 32), dtype=torch.bf")
    assert "view of (32, 32)" in repr(parameter.detach()[1:])


def test_backward_after_a_change_raises_autograds_error() -> None:
    """The payload is written in place: the version counter must tell."""
    x = torch.randn(4, 32, dtype=BF16, requires_grad=True)
    for multiply in (F.linear, lambda x, w: x @ w.t(), lambda x, w: x @ w[:]):
        parameter = nn.Parameter(pair(32, 32)[1])
        out = multiply(x, parameter)
        with torch.no_grad():
            parameter.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_double_backward() -> None:
    dense, weight = pair(32, 32)
    a, b = nn.Parameter(dense), nn.Parameter(weight)
    x = torch.randn(4, 32).to(BF16)
    results = []
    for w in (a, b):
        leaf = x.clone().requires_grad_()
        out = F.linear(leaf, w).tanh()
        (grad,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
        grad.square().sum().backward()
        results.append((grad, leaf.grad, w.grad))
    for first, second in zip(*results, strict=True):
        assert_same_bits(first, second)


@pytest.mark.parametrize("mode", ["bfloat16", "functorch"])
def test_autocast_and_functorch_go_around_the_fast_path(mode: str) -> None:
    dense, weight = pair(32, 32, dtype=torch.float32)
    x = torch.randn(4, 32)
    with torch.autocast("cpu", dtype=BF16, enabled=mode == "bfloat16"):
        if mode == "functorch":
            expected = torch.func.vmap(lambda row: F.linear(row, dense))(x)
            try:
                got = torch.func.vmap(lambda row: F.linear(row, weight))(x)
            except (RuntimeError, NotImplementedError):
                return  # refused, with an error
        else:
            expected, got = F.linear(x, dense), F.linear(x, weight)
    assert_same_bits(expected, got)


def test_public_names() -> None:
    assert lct.CompressedWeight is CompressedWeight
