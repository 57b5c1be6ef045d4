"""``compress_`` and ``decompress_``: which weights, what stays, what a model can still do."""

from __future__ import annotations

import copy
import io
import logging
import pickle

import pytest
import torch
from torch import nn

import lct
from lct.nn import CompressedWeight, compression_report
from training import BF16, Mlp, TiedTransformer, Zoo, assert_same_bits, assert_same_model, make


def test_compresses_weights_and_leaves_the_rest() -> None:
    model = make(Mlp, False)
    before = copy.deepcopy(model)
    objects = dict(model.named_parameters())
    assert lct.compress_(model) is model
    assert dict(model.named_parameters()) == objects, "the parameters are the same objects"
    assert all(a is b for a, b in zip(objects.values(), model.parameters(), strict=True))
    assert isinstance(model.up.weight, CompressedWeight) and isinstance(
        model.up.weight, nn.Parameter
    )
    assert type(model.up.bias) is nn.Parameter
    assert_same_model(before, model)
    assert model.up.weight.requires_grad and model.up.weight.is_leaf


def test_report_and_log(caplog: pytest.LogCaptureFixture) -> None:
    model = make(Zoo, False)
    model.register_parameter("tiny", nn.Parameter(torch.randn(2, 2).to(BF16)))
    model.register_parameter("wide", nn.Parameter(torch.randn(64, 64).double()))
    model.register_parameter("holes", nn.Parameter(torch.randn(64, 128).to(BF16)[:, ::2]))
    model.register_parameter("small", nn.Parameter(torch.randn(32, 32).to(BF16)))
    with caplog.at_level(logging.DEBUG, "lct"):
        lct.compress_(model, filter_fn=lambda name, parameter: name != "small")
    report = lct.compression_report(model)
    assert [row.name for row in report.rows] == [name for name, _ in model.named_parameters()]
    reasons = {row.name: row.reason for row in report.rows}
    assert reasons["conv.bias"] == "it has fewer than 2 dimensions"
    assert reasons["tiny"] == "it would not get smaller"
    assert reasons["wide"] == "torch.float64 is not coded"
    assert reasons["holes"] == "it has holes or overlaps in memory"
    assert reasons["small"] == "filter_fn excludes it"
    assert reasons["gru.weight_hh_l1_reverse"] == ""
    for row in report.rows:
        parameter = model.get_parameter(row.name)
        assert isinstance(parameter, CompressedWeight) == (not row.reason)
        assert (row.stored_bytes < row.dense_bytes) == (not row.reason)
    assert report.stored_bytes < report.dense_bytes
    assert str(report) in caplog.text
    assert "left dense: tiny (2, 2): it would not get smaller" in caplog.text


def test_report_needs_a_compressed_model() -> None:
    with pytest.raises(KeyError, match=r"lct\.compress_"):
        compression_report(nn.Linear(2, 2))


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Sequential()])
def test_no_floating_point_parameters(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="floating-point parameters, got"):
        lct.compress_(model)


@pytest.mark.parametrize("function", [lct.compress_, lct.decompress_])
def test_no_module(function: object) -> None:
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, got list"):
        function([torch.zeros(3)])  # type: ignore[operator]


def test_lazy_modules_must_be_called_before() -> None:
    model = nn.Sequential(nn.LazyLinear(64, bias=False))
    with pytest.raises(ValueError, match=r"have a shape .*, got 0\.weight without"):
        lct.compress_(model)
    model(torch.zeros(1, 64))
    assert isinstance(lct.compress_(model)[0].weight, CompressedWeight)


def test_compressing_twice_changes_nothing() -> None:
    model = make(Mlp, True)
    payloads = [model.up.weight.payload, model.down.weight.payload]
    lct.compress_(model)
    assert [model.up.weight.payload, model.down.weight.payload] == payloads
    assert not compression_report(model).rows[0].reason


def test_decompress() -> None:
    model = make(TiedTransformer, True)
    objects = list(model.parameters())
    lct.decompress_(model)
    assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert model.head.weight is model.embed.weight
    assert_same_model(make(TiedTransformer, False), model)
    assert not any(module._state_dict_hooks for module in model.modules())


def test_pitfall_21_tied_weights_are_encoded_once() -> None:
    model = make(TiedTransformer, True)
    assert model.head.weight is model.embed.weight
    assert isinstance(model.head.weight, CompressedWeight)
    names = [row.name for row in compression_report(model).rows]
    assert "embed.weight" in names and "head.weight" not in names
    state = model.state_dict()
    assert state["head.weight"] is state["embed.weight"]


def test_parameters_that_share_memory_share_a_payload() -> None:
    model = nn.ModuleList([nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)]).to(BF16)
    model[1].weight = nn.Parameter(model[0].weight.data)
    lct.compress_(model)
    assert model[0].weight is not model[1].weight
    assert model[0].weight.compressed is model[1].weight.compressed
    with torch.no_grad():
        model[0].weight.zero_()
    assert not model[1].weight.dense().any()
    state = model.state_dict()
    assert state["0.weight"] is state["1.weight"]
    lct.decompress_(model)
    assert model[0].weight.data_ptr() == model[1].weight.data_ptr()


def test_parameters_that_overlap_stay_dense() -> None:
    buffer = torch.randn(64, 32).to(BF16)
    model = nn.Module()
    model.a, model.b = nn.Parameter(buffer[:40]), nn.Parameter(buffer[20:60])
    model.c = nn.Parameter(buffer[60:])
    lct.compress_(model, filter_fn=lambda name, _: name != "c")
    assert compression_report(model).rows[0].reason == "it overlaps another parameter in memory"
    assert compression_report(model).rows[1].reason == "it overlaps another parameter in memory"


def test_dense_parameters_let_go_of_a_shared_buffer() -> None:
    """RNN weights on CUDA are views of one buffer: a bias must not keep all of it alive."""
    buffer = torch.randn(64 * 32 + 64).to(BF16)
    model = nn.Linear(32, 64).to(BF16)
    model.weight = nn.Parameter(buffer[: 64 * 32].view(64, 32))
    model.bias = nn.Parameter(buffer[64 * 32 :])
    bias = model.bias
    lct.compress_(model)
    assert model.bias is bias
    assert model.bias.untyped_storage().nbytes() == model.bias.nbytes
    assert_same_bits(buffer[64 * 32 :], model.bias)


def test_gradients_hooks_and_attributes_survive() -> None:
    model = make(Mlp, False)
    weight = model.up.weight
    calls = []
    weight.register_hook(lambda grad: calls.append("hook"))
    handle = weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    weight.tag = "kept"
    weight.grad = torch.ones_like(weight)
    grad = weight.grad
    lct.compress_(model)
    assert weight.grad is grad and weight.tag == "kept"
    model(torch.randn(2, 64).to(BF16)).sum().backward()
    assert calls == ["hook", "accumulated"]
    handle.remove()
    model(torch.randn(2, 64).to(BF16)).sum().backward()
    assert calls == ["hook", "accumulated", "hook"]
    lct.decompress_(model)
    model(torch.randn(2, 64).to(BF16)).sum().backward()
    assert calls == ["hook", "accumulated", "hook", "hook"]


def test_an_optimizer_from_before_survives() -> None:
    results = []
    for compress in (False, True):
        model = make(Mlp, False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(4):
            if compress and step == 2:
                lct.compress_(model)
            x = torch.linspace(-1, 1, 128).view(2, 64).to(BF16)
            model(x).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(model)
    assert_same_model(*results)


def test_within_a_graph_it_says_what_is_wrong() -> None:
    model = make(Mlp, False)
    out = model(torch.randn(2, 64).to(BF16))
    with pytest.raises(RuntimeError, match="no forward awaits its backward"):
        lct.compress_(model)
    del out


@pytest.mark.parametrize("build", [Mlp, TiedTransformer, Zoo])
def test_pitfall_20_state_dict_is_plain_under_unchanged_names(build: type[nn.Module]) -> None:
    dense, model = make(build, False), make(build, True)
    expected, got = dense.state_dict(), model.state_dict()
    assert list(expected) == list(got)
    for name, value in got.items():
        assert type(value) is torch.Tensor
        assert value.data_ptr() != 0
        assert value.stride() == expected[name].stride()
        assert_same_bits(expected[name], value, name)
    assert got._metadata == expected._metadata
    buffer = io.BytesIO()
    torch.save(got, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    other = make(build, True, seed=7)
    keys = other.load_state_dict(loaded)
    assert not keys.missing_keys and not keys.unexpected_keys
    assert any(isinstance(p, CompressedWeight) for p in other.parameters())
    assert_same_model(dense, other)
    plain = make(build, False, seed=8)
    plain.load_state_dict(got)
    assert_same_model(dense, plain)


def test_state_dict_of_a_submodule_with_a_prefix_and_of_variables() -> None:
    model = make(TiedTransformer, True)
    part = model.blocks[0].state_dict(prefix="x.")
    assert type(part["x.qkv.weight"]) is torch.Tensor
    variables = model.state_dict(keep_vars=True)
    assert variables["embed.weight"] is model.embed.weight
    mine: dict[str, torch.Tensor] = {}
    model.blocks[0].qkv.state_dict(destination=mine)
    assert type(mine["weight"]) is torch.Tensor


def test_a_state_dict_is_a_snapshot() -> None:
    model = make(Mlp, True)
    first = model.state_dict()
    with torch.no_grad():
        model.up.weight.zero_()
    assert first["up.weight"].any()
    assert not model.state_dict()["up.weight"].any()


def test_deepcopy_and_pickle_of_a_model() -> None:
    model = make(TiedTransformer, True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.head.weight is other.embed.weight
        assert isinstance(other.head.weight, CompressedWeight)
        assert_same_model(model, other)
        assert type(other.state_dict()["head.weight"]) is torch.Tensor
        with torch.no_grad():
            other.head.weight.zero_()
        assert model.head.weight.dense().any()


def test_pitfall_23_module_to_keeps_weights_and_ties() -> None:
    dense, model = make(TiedTransformer, False), make(TiedTransformer, True)
    for dtype in (torch.float32, torch.float16, BF16):
        dense.to(dtype)
        model.to(dtype)
        assert model.head.weight is model.embed.weight
        assert isinstance(model.head.weight, CompressedWeight)
        assert model.head.weight.dtype == dtype
        assert_same_model(dense, model)
    model.to("cpu")
    assert_same_model(dense, model)


def test_module_to_with_gradients() -> None:
    dense, model = make(Mlp, False), make(Mlp, True)
    for m in (dense, model):
        m(torch.ones(2, 64, dtype=BF16)).sum().backward()
        m.to(torch.float32)
    assert_same_model(dense, model)


def test_to_empty_and_requires_grad() -> None:
    model = make(Mlp, True)
    model.requires_grad_(False)
    assert not model.up.weight.requires_grad
    model.to_empty(device="cpu")
    assert isinstance(model.up.weight, CompressedWeight)


def test_initialisers_give_the_same_bits() -> None:
    dense, model = make(Mlp, False), make(Mlp, True)
    for m in (dense, model):
        torch.manual_seed(4)
        m.up.reset_parameters()
        nn.init.xavier_normal_(m.down.weight)
    assert_same_model(dense, model)


def test_channels_last() -> None:
    results = []
    for compress in (False, True):
        torch.manual_seed(0)
        model = nn.Conv2d(8, 16, 3).to(BF16).to(memory_format=torch.channels_last)
        if compress:
            lct.compress_(model)
            assert isinstance(model.weight, CompressedWeight)
        x = torch.randn(2, 8, 6, 6).to(BF16).to(memory_format=torch.channels_last)
        out = model(x)
        out.float().square().sum().backward()
        results += [(model, out)]
    (a, out_a), (b, out_b) = results
    assert out_a.stride() == out_b.stride()
    assert a.weight.grad.stride() == b.weight.grad.stride()
    assert_same_bits(out_a, out_b)
    assert_same_model(a, b)


def test_parameters_to_vector_and_back() -> None:
    dense, model = make(Mlp, False), make(Mlp, True)
    for m in (dense, model):
        vector = nn.utils.parameters_to_vector(m.parameters())
        nn.utils.vector_to_parameters(vector * 2, m.parameters())
    assert isinstance(model.up.weight, CompressedWeight)
    assert_same_model(dense, model)
