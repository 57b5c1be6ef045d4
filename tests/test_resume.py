"""A run that was killed and resumed is the run that was not, in every bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lct
from lct import ops
from lct.checkpoint import run as run_module
from lct.layout import PayloadLayout
from lct.nn import CompressedWeight
from lct.tensor import CompressedTensor
from resume_worker import KINDS, SAVED_STEP, STEPS, Training
from training import (
    BF16,
    Mlp,
    TiedTransformer,
    Zoo,
    assert_same_bits,
    assert_same_losses,
    assert_same_model,
    assert_same_state,
    make,
    random_bits,
)

TESTS = Path(__file__).resolve().parent


def assert_same_run(expected: Training, got: Training) -> None:
    assert_same_losses(expected.losses, got.losses)
    assert_same_model(expected.model, got.model)
    assert_same_state(expected.optimizer, got.optimizer)
    assert_same_state(expected.rest, got.rest)
    for a, b in zip(expected.schedulers, got.schedulers, strict=True):
        assert a.state_dict() == b.state_dict()


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def killed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, str]]:
    """The folder of a process that was killed while it trained past its checkpoints; the device."""
    folder = tmp_path_factory.mktemp("killed")
    paths = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    worker = subprocess.Popen(
        [sys.executable, str(TESTS / "resume_worker.py"), str(folder), request.param],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert worker.stdout is not None
    try:
        for line in worker.stdout:
            if int(line) == SAVED_STEP + 2:
                break
        worker.send_signal(signal.SIGKILL)
        assert worker.wait() == -signal.SIGKILL
    finally:
        worker.kill()
        worker.stdout.close()
    torch.use_deterministic_algorithms(request.param == "cuda")
    yield folder, request.param
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_goes_on_as_if_it_had_not_been(killed: tuple[Path, str], kind: str) -> None:
    """With LCT as before, or dense with torch's optimizers from the same checkpoints on."""
    folder, device = killed
    expected = Training(kind, with_lct=False, device=device)
    expected.train(STEPS)
    for with_lct in (True, False):
        for suffix in ("pt", "lct"):
            run = Training(kind, with_lct, seed=5, device=device)
            load = run.load_with_torch if suffix == "pt" else run.load_with_lct
            load(folder / f"{kind}.{suffix}")
            assert run.step == SAVED_STEP
            run.train(STEPS - SAVED_STEP)
            assert_same_run(expected, run)
            assert run.model.head.weight is run.model.embed.weight
            matrices = run.optimizer.param_groups[0]["params"]
            assert all(isinstance(p, CompressedWeight) == with_lct for p in matrices)
            for param in matrices:
                held = run.optimizer.state[param].values()
                assert any(isinstance(value, CompressedTensor) for value in held) == with_lct


@pytest.mark.parametrize("kind", KINDS)
def test_a_dense_run_goes_on_compressed(kind: str, tmp_path: Path) -> None:
    expected = Training(kind, with_lct=False)
    expected.train(2)
    expected.save_with_torch(tmp_path / "run.pt")
    expected.save_with_lct(tmp_path / "run.lct")
    expected.train(2)
    for load, file in ((Training.load_with_torch, "run.pt"), (Training.load_with_lct, "run.lct")):
        run = Training(kind, with_lct=True, seed=5)
        load(run, tmp_path / file)
        run.train(2)
        assert_same_run(expected, run)


def test_payloads_are_neither_decoded_nor_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Training("AdamW", with_lct=True)
    run.train(2)
    expected = [p.compressed.canonical_bytes() for p in run.optimizer.param_groups[0]["params"]]
    held = [value for state in run.optimizer.state.values() for value in state.values()]
    moments = [v.canonical_bytes() for v in held if isinstance(v, CompressedTensor)]
    other = Training("AdamW", with_lct=True, seed=3)

    encode, decode = ops.encode, ops.decode
    coded: list[torch.Tensor] = []

    def note(tensor: torch.Tensor, layout: PayloadLayout) -> None:
        if not layout.is_raw:
            coded.append(tensor)

    def noted_encode(dense: torch.Tensor, layout: PayloadLayout, *rest: Any) -> Any:
        note(dense, layout)
        return encode(dense, layout, *rest)

    def noted_decode(stored: Any, layout: PayloadLayout, out: torch.Tensor) -> torch.Tensor:
        note(out, layout)
        return decode(stored, layout, out)

    monkeypatch.setattr(ops, "encode", noted_encode)
    run.save_with_lct(tmp_path / "run.lct")
    monkeypatch.setattr(ops, "decode", noted_decode)
    other.load_with_lct(tmp_path / "run.lct")
    assert not coded
    matrices = other.optimizer.param_groups[0]["params"]
    assert [p.compressed.canonical_bytes() for p in matrices] == expected
    held = [value for state in other.optimizer.state.values() for value in state.values()]
    assert [v.canonical_bytes() for v in held if isinstance(v, CompressedTensor)] == moments
    assert_same_model(run.model, other.model)


def test_the_file_is_one_that_the_tools_read(tmp_path: Path) -> None:
    run = Training("AdamW", with_lct=True)
    run.train(1)
    run.save_with_lct(tmp_path / "run.lct")
    tensors = lct.load_file(tmp_path / "run.lct")
    assert isinstance(tensors["model.blocks.0.up.weight"], CompressedTensor)
    assert isinstance(tensors["optimizer.state.1.exp_avg"], CompressedTensor)
    # Tied weights stand once, under the first of their names.
    assert "model.embed.weight" in tensors and "model.head.weight" not in tensors
    assert_same_bits(run.model.embed.weight, tensors["model.embed.weight"])


def test_parts_that_are_not_asked_for_come_back(tmp_path: Path) -> None:
    run = Training("AdamW", with_lct=True)
    run.train(1)
    values = {
        "text": "ключ",
        "none": None,
        "nested": {1: {"a": (1, [2.5, True])}, "empty": {}, "t": torch.arange(3)},
        "matrix": random_bits(64, 128),
        "payload": lct.encode(random_bits(64, 128) * 0 + 1),
    }
    lct.save_checkpoint(tmp_path / "run.lct", **run.parts(), **values)
    got = lct.load_checkpoint(tmp_path / "run.lct")
    assert got["text"] == "ключ" and got["none"] is None
    assert got["nested"][1] == {"a": (1, [2.5, True])} and got["nested"]["empty"] == {}
    assert_same_bits(torch.arange(3), got["nested"]["t"])
    assert type(got["matrix"]) is torch.Tensor
    assert_same_bits(values["matrix"], got["matrix"])
    assert isinstance(got["payload"], CompressedTensor)
    assert_same_bits(values["payload"], got["payload"])
    assert_same_bits(run.model.embed.weight, got["model"]["head.weight"])
    assert got["schedule"] == run.schedulers[0].state_dict()


@pytest.mark.parametrize("compressed", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("build", [Mlp, TiedTransformer, Zoo, nn.BatchNorm2d])
def test_models(build: Any, compressed: tuple[bool, bool], tmp_path: Path) -> None:
    """Any model into any other of its kind; one with buffers; one with nothing to compress."""
    make_one = (lambda: nn.BatchNorm2d(16)) if build is nn.BatchNorm2d else build
    source, target = (make(make_one, c, seed) for seed, c in enumerate(compressed))
    lct.save_checkpoint(tmp_path / "model.lct", model=source)
    assert lct.load_checkpoint(tmp_path / "model.lct", model=target) == {}
    assert_same_model(source, target)
    same = lct.load_checkpoint(tmp_path / "model.lct")["model"]
    assert list(same) == list(source.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_not_contiguous(kind: str, tmp_path: Path) -> None:
    """Payloads hold values in the order of memory, files in the order of dimensions."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.square = nn.Parameter(torch.randn(64, 64).to(BF16).t())
            self.wide = nn.Parameter(torch.randn(32, 128).to(BF16).t())

    models = [lct.compress_(make(Turned, False, seed)) for seed in range(2)]
    options = {"momentum": 0.9} if kind == "SGD" else {}
    optimizers = [getattr(lct.optim, kind)(m.parameters(), lr=0.1, **options) for m in models]
    sum(p.float().square().mean() for p in models[0].parameters()).backward()
    optimizers[0].step()
    models[0].zero_grad()
    path = tmp_path / "run.lct"
    lct.save_checkpoint(path, model=models[0], optimizer=optimizers[0])
    lct.load_checkpoint(path, model=models[1], optimizer=optimizers[1])
    assert_same_model(*models)
    assert_same_state(*optimizers)
    assert models[1].square.stride() == (1, 64)


def test_mistakes_are_named_before_anything_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "run.lct"
    model = make(Mlp, True)
    lct.save_checkpoint(path, model=model, step=3)
    other = make(Mlp, True, seed=1)
    with pytest.raises(KeyError, match="has the parts model, step, got 'optimizer'"):
        lct.load_checkpoint(path, model=other, optimizer=torch.optim.SGD(other.parameters()))
    with pytest.raises(TypeError, match=r"values are returned.*got int for 'step'"):
        lct.load_checkpoint(path, model=other, step=0)
    assert_same_model(make(Mlp, True, seed=1), other)
    with pytest.raises(RuntimeError, match="Missing key"):
        lct.load_checkpoint(path, model=make(TiedTransformer, True))
    lct.save_file({"w": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match="takes a file of save_checkpoint"):
        lct.load_checkpoint(path)
    with pytest.raises(TypeError, match=r"got for 'step' what torch\.load"):
        lct.save_checkpoint(path, step=object())
    with pytest.raises(TypeError, match=r"got for 'f' what torch\.load"):
        lct.save_checkpoint(path, f=lambda: 0)
    with pytest.raises(ValueError, match=r"name of its own, got 'a\.1' again"):
        lct.save_checkpoint(path, a={1: torch.zeros(1), "1": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"must be identifiers, got 'a\.b'"):
        lct.save_checkpoint(path, **{"a.b": 1})
    with pytest.raises(TypeError, match="takes dense tensors"):
        lct.save_checkpoint(path, a=torch.zeros(2, 2).to_sparse())


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(
    "structure",
    [
        {"leaves": [((), "absent", None)], "payloads": [], "versions": None},
        {"leaves": [((), None, 1), ((1,), None, 2)], "payloads": [], "versions": None},
        {"leaves": 3, "payloads": [], "versions": None},
        {"leaves": [], "payloads": [], "versions": None},
        {"leaves": []},
        [1],
    ],
    ids=str,
)
def test_hostile_structures(structure: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.lct"
    torch.save(structure, tmp_path / "structure")
    data = torch.frombuffer(bytearray((tmp_path / "structure").read_bytes()), dtype=torch.uint8)
    for tensor in (data, torch.zeros(7, dtype=torch.uint8), data.clone().fill_(128)):
        lct.save_file(
            {"a" + run_module.STRUCTURE: tensor}, path, {run_module.VERSION_KEY: run_module.VERSION}
        )
        with pytest.raises(lct.CorruptFileError, match="structure of part 'a' cannot be read"):
            lct.load_checkpoint(path)


def test_damage_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "run.lct"
    lct.save_checkpoint(path, model=make(Mlp, True))
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    model = make(Mlp, True, seed=1)
    with pytest.raises(lct.CorruptFileError, match="damaged"):
        lct.load_checkpoint(path, model=model)
    assert_same_model(make(Mlp, True, seed=1), model)


def test_weights_as_a_file_of_tensors(tmp_path: Path) -> None:
    """Compressed weights in ``save_file``; a file that ``load_state_dict`` takes."""
    model = make(TiedTransformer, True)
    path = tmp_path / "model.lct"
    lct.save_file(model.state_dict(keep_vars=True), path)
    held = lct.load_file(path)["embed.weight"]
    assert isinstance(held, CompressedTensor)
    assert held.canonical_bytes() == model.embed.weight.compressed.canonical_bytes()
    for compressed in (False, True):
        other = make(TiedTransformer, compressed, seed=1)
        other.load_state_dict(lct.load_file(path, dense=True))
        assert_same_model(model, other)


@pytest.mark.parametrize("preset", ["clean", "pooled"])
def test_copies_between_compressed_tensors(preset: str) -> None:
    source = lct.encode((torch.randn(96, 128) * 0.02).to(BF16), preset=preset, capacity=None)
    target = lct.encode(random_bits(96, 128))
    assert target.copy_(source) is target and target.copy_(target) is target
    assert_same_bits(source, target)
    target.encode_(random_bits(96, 128))
    assert source.ratio > 1.3, "the payload is a copy"
    with pytest.raises(ValueError, match=r"got a torch\.bfloat16 tensor of shape"):
        target.copy_(lct.encode(random_bits(128, 96)))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_on_cuda(kind: str, tmp_path: Path) -> None:
    """From one process's GPU to itself and to a CPU, with payloads that spill."""
    runs = []
    for seed in range(2):
        model = lct.compress_(make(TiedTransformer, False, seed).cuda())
        matrices = [p for p in model.parameters() if p.dim() == 2]
        options = {"momentum": 0.9} if kind == "SGD" else {}
        runs.append((model, getattr(lct.optim, kind)(matrices, lr=0.01, **options)))
    (model, optimizer), (other, other_optimizer) = runs
    for _ in range(3):
        loss = model(torch.randint(0, 64, (2, 16), device="cuda")).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model.head.weight.copy_(random_bits(64, 32))
    path = tmp_path / "run.lct"
    lct.save_checkpoint(path, model=model, optimizer=optimizer)
    lct.load_checkpoint(path, model=other, optimizer=other_optimizer)
    assert_same_model(model, other)
    assert_same_state(optimizer, other_optimizer)
    held = [v for state in other_optimizer.state.values() for v in state.values()]
    assert any(isinstance(v, CompressedTensor) for v in held)
    assert all(v.device.type == "cuda" for v in held if isinstance(v, CompressedTensor))
    on_cpu = make(TiedTransformer, True, seed=3)
    lct.load_checkpoint(path, model=on_cpu)
    assert_same_model(model.cpu(), on_cpu)
