"""``memory_report``: every byte of weights, gradients, buffers and state, by class."""

import pytest
import torch
from torch import nn

import lct
from lct.nn import CompressedWeight


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(256, 128, dtype=torch.bfloat16)
        self.second = nn.Linear(128, 256, bias=False, dtype=torch.bfloat16)
        self.tied = nn.Linear(128, 256, bias=False, dtype=torch.bfloat16)
        self.tied.weight = self.second.weight
        self.register_buffer("mask", torch.ones(100, dtype=torch.bool))


def stepped(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = lct.compress_(Model())
    optimizer = getattr(lct.optim, kind)(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = torch.randn(param.shape).bfloat16() * 0.01
    optimizer.step()
    return model, optimizer


def test_bytes_by_class() -> None:
    model, optimizer = stepped("AdamW")
    report = lct.memory_report(model, optimizer)
    rows = {row.name: row for row in report.rows}
    assert list(rows) == ["weights", "gradients", "buffers", "step", "exp_avg", "exp_avg_sq"]
    weights = [p for p in model.parameters() if isinstance(p, CompressedWeight)]
    bias = 128 * 2
    assert (rows["weights"].tensors, rows["weights"].compressed) == (3, 2)
    assert rows["weights"].dense_bytes == 2 * 256 * 128 * 2 + bias
    assert rows["weights"].stored_bytes == sum(p.compressed.nbytes for p in weights) + bias
    assert rows["gradients"].stored_bytes == rows["gradients"].dense_bytes
    assert rows["gradients"].dense_bytes == rows["weights"].dense_bytes
    assert (rows["buffers"].dense_bytes, rows["buffers"].compressed) == (100, 0)
    assert rows["exp_avg"].compressed == 2
    assert rows["exp_avg"].saved_bytes > 0.25 * rows["exp_avg"].dense_bytes
    total = report.total
    assert total.dense_bytes == sum(row.dense_bytes for row in report.rows)
    assert total.saved_bytes == sum(row.saved_bytes for row in report.rows)


def test_what_spills_counts() -> None:
    model, _ = stepped("SGD")
    weight = model.second.weight
    before, held = lct.memory_report(model).total.stored_bytes, weight.compressed.nbytes
    bits = torch.randint(-(2**15), 2**15, weight.shape, dtype=torch.int16)
    weight.compressed.encode_(bits.view(torch.bfloat16))
    after = lct.memory_report(model).total.stored_bytes
    assert weight.compressed.nbytes > held
    assert after == before - held + weight.compressed.nbytes


def test_table_and_numbers() -> None:
    model, optimizer = stepped("SGD")
    report = lct.memory_report(model, optimizer)
    lines = str(report).splitlines()
    assert lines[0].split() == [
        *("tensors", "compressed", "dense", "MB", "stored", "MB", "saved", "MB"),
        *("spilled", "groups"),
    ]
    assert lines[1].startswith("weights") and lines[-1].startswith("total")
    numbers = report.as_dict()
    assert numbers["weights"]["compressed"] == 2
    assert numbers["total"]["saved_bytes"] == report.total.saved_bytes
    arenas = lct.stats()["arenas"].values()
    assert numbers["arena_bytes"] == sum(arena["reserved_bytes"] for arena in arenas)


def test_dense_model_and_no_optimizer() -> None:
    report = lct.memory_report(nn.Linear(4, 4))
    assert [row.name for row in report.rows] == ["weights"]
    assert (report.total.compressed, report.total.saved_bytes) == (0, 0)


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, got int"):
        lct.memory_report(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"takes a torch\.optim\.Optimizer, got str"):
        lct.memory_report(nn.Linear(2, 2), "sgd")  # type: ignore[arg-type]
