"""transformers, PEFT and Accelerate do with compressed models what they do with dense ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lct
from lct.nn import CompressedWeight
from lct.tensor import CompressedTensor
from models import LENGTH, qwen3, text_batches, text_loss
from training import (
    BF16,
    assert_same_bits,
    assert_same_losses,
    assert_same_model,
    assert_same_state,
    make,
    store_small_tensors,
    train,
)

transformers = pytest.importorskip("transformers")
# cuBLAS is deterministic with a workspace of its own for each stream; it reads this once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    store_small_tensors(monkeypatch)


@pytest.fixture(autouse=True)
def _no_accelerator_of_others() -> Iterator[None]:
    """Accelerate keeps one device a process, which Trainer chooses too."""
    yield
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(True)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cuda":
        torch.use_deterministic_algorithms(True)
    yield request.param
    torch.use_deterministic_algorithms(False)


def compressed_names(model: nn.Module) -> set[str]:
    return {n for n, p in model.named_parameters() if isinstance(p, CompressedWeight)}


def matrix_names(model: nn.Module) -> set[str]:
    return {n for n, p in model.named_parameters() if p.dim() >= 2}


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "20KB"}], ids=str)
def test_save_pretrained_writes_the_files_of_the_dense_model(
    shards: dict[str, Any], tied: bool, device: str, tmp_path: Path
) -> None:
    models = [make(lambda: qwen3(tie_word_embeddings=tied), False).to(device) for _ in range(2)]
    lct.compress_(models[1])
    assert compressed_names(models[1]) == matrix_names(models[1])
    for name, model in zip(("dense", "lct"), models, strict=True):
        model.save_pretrained(tmp_path / name, **shards)
    expected = files_in(tmp_path / "dense")
    assert files_in(tmp_path / "lct") == expected
    assert len([name for name in expected if name.endswith(".safetensors")]) > len(shards)


def test_from_pretrained_and_compress(device: str, tmp_path: Path) -> None:
    saved = make(qwen3, True)
    saved.save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    dense, model = (load(tmp_path, dtype=BF16).to(device) for _ in range(2))
    assert not compressed_names(model)
    for (name, expected), got in zip(saved.named_parameters(), model.parameters(), strict=True):
        assert_same_bits(expected.cpu(), got.cpu(), name)
    lct.compress_(model)
    assert compressed_names(model) == matrix_names(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same_model(dense, model)
    prompt = torch.arange(8, device=device).view(1, 8)
    expected, got = (
        m.eval().generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
        for m in (dense, model)
    )
    assert torch.equal(expected, got)
    # A checkpoint of a dense model into a compressed one.
    other = make(qwen3, True, seed=1).to(device)
    other.load_state_dict(dense.state_dict())
    assert compressed_names(other) == matrix_names(other)
    assert_same_model(saved.to(device), other)


def test_new_tokens() -> None:
    models = [make(qwen3, compressed) for compressed in (False, True)]
    for model in models:
        torch.manual_seed(1)
        model.resize_token_embeddings(256 + 8)
        assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same_model(*models)


def lora(model: nn.Module, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS, **options)
    return peft.get_peft_model(model, config)


def train_adapters(model: nn.Module, source: Any, device: str, activations: bool) -> Any:
    optimizer = source.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    batches = [tuple(t.to(device) for t in batch) for batch in text_batches(6)]
    return optimizer, train(model, optimizer, text_loss, batches, activations=activations)


@pytest.mark.parametrize(
    ("order", "options"),
    [
        ("base first", {"lora_dropout": 0.1}),
        ("base first", {"use_dora": True}),
        ("base first", {"modules_to_save": ["lm_head"]}),
        ("base first", {"init_lora_weights": "pissa"}),
        ("adapters first", {"lora_dropout": 0.1}),
        ("adapters first", {"modules_to_save": ["lm_head"]}),
    ],
    ids=str,
)
def test_lora_on_a_frozen_compressed_base(
    order: str, options: dict[str, Any], device: str, tmp_path: Path
) -> None:
    build = {"tie_word_embeddings": "modules_to_save" not in options}
    dense = lora(make(lambda: qwen3(**build), False).to(device), **options)
    base = make(lambda: qwen3(**build), False).to(device)
    if order == "base first":
        model = lora(lct.compress_(base), **options)
    else:
        model = lct.compress_(lora(base, **options))
    frozen = {
        name: p.compressed.canonical_bytes()
        for name, p in model.named_parameters()
        if isinstance(p, CompressedWeight) and not p.requires_grad
    }
    trained = (".lora_", ".modules_to_save.")
    assert len(frozen) == len([n for n in matrix_names(base) if not any(t in n for t in trained)])
    assert_same_model(dense, model)

    expected_optimizer, expected = train_adapters(dense, torch.optim, device, False)
    optimizer, losses = train_adapters(model, lct.optim, device, True)
    assert_same_losses(expected, losses)
    assert_same_model(dense, model)
    assert_same_state(expected_optimizer, optimizer)
    for name, before in frozen.items():
        assert model.get_parameter(name).compressed.canonical_bytes() == before

    for name, m in (("dense", dense), ("lct", model)):
        m.save_pretrained(tmp_path / name)
    assert files_in(tmp_path / "lct") == files_in(tmp_path / "dense")
    if "init_lora_weights" not in options:  # PiSSA changes the base, which is not saved
        peft = pytest.importorskip("peft")
        fresh = make(lambda: qwen3(**build), True).to(device)
        loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "lct")
        batch = text_batches(1)[0][0].to(device)
        with torch.no_grad():
            assert_same_bits(dense.eval()(batch).logits, loaded.eval()(batch).logits)

    merged = [m.merge_and_unload() for m in (dense, model)]
    assert_same_model(*merged)
    assert isinstance(merged[1].model.layers[0].self_attn.q_proj.weight, CompressedWeight)


def trainer_class(activations: bool) -> Any:
    class Activations(transformers.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            with lct.compress_activations() as saved:
                loss = super().compute_loss(*args, **kwargs)
            assert saved.encoded > 0
            return loss

    return Activations if activations else transformers.Trainer


def run_trainer(
    folder: Path, model: nn.Module, source: Any, activations: bool, resume: bool, **options: Any
) -> tuple[Any, list[dict[str, Any]]]:
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=6,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_steps=3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=3,
        dataloader_pin_memory=False,
        **options,
    )
    rows = [row for (batch,) in text_batches(12) for row in batch]
    kind = () if source is None else (source.AdamW, {"lr": 5e-3})
    trainer = trainer_class(activations)(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        optimizer_cls_and_kwargs=kind or None,
    )
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
    timed = ("runtime", "per_second")
    logs = [
        {name: value for name, value in entry.items() if not name.endswith(timed)}
        for entry in trainer.state.log_history
    ]
    return trainer, logs


@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 0.5, "lr_scheduler_type": "cosine", "weight_decay": 0.1},
        {"gradient_accumulation_steps": 2, "gradient_checkpointing": True},
    ],
    ids=["plain", "accumulation and checkpointing"],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    """Logs, weights and state of the dense run; resumed from its own checkpoint in the middle."""
    dense, expected = run_trainer(
        tmp_path / "dense", make(qwen3, False), torch.optim, False, False, **options
    )
    model = make(qwen3, True)
    trainer, logs = run_trainer(tmp_path / "lct", model, lct.optim, True, False, **options)
    assert logs == expected and len(logs) == 7
    assert_same_model(dense.model, model)
    optimizers = [t.optimizer.optimizer for t in (dense, trainer)]  # in Accelerate's wrapper
    assert type(optimizers[1]) is lct.optim.AdamW
    assert_same_state(*optimizers)
    assert compressed_names(model) == matrix_names(model)

    other = make(qwen3, True, seed=1)
    again, logs = run_trainer(tmp_path / "lct", other, lct.optim, True, True, **options)
    assert logs[:6] == expected[:6]
    assert_same_model(model, other)
    assert_same_state(optimizers[1], again.optimizer.optimizer)
    assert compressed_names(other) == matrix_names(other)
    assert other.lm_head.weight is other.model.embed_tokens.weight


def test_trainer_with_its_own_optimizer(tmp_path: Path) -> None:
    runs = [run_trainer(tmp_path / str(c), make(qwen3, c), None, c, False) for c in (False, True)]
    assert runs[0][1] == runs[1][1]
    assert_same_model(runs[0][0].model, runs[1][0].model)


def test_accelerate(device: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    results = []
    for compressed in (False, True):
        accelerator = accelerate.Accelerator(
            cpu=device == "cpu", gradient_accumulation_steps=2, mixed_precision="no"
        )
        model = make(qwen3, compressed)
        source = lct.optim if compressed else torch.optim
        optimizer = source.AdamW(model.parameters(), lr=5e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        rows = torch.cat([batch for (batch,) in text_batches(8)])
        assert rows.shape == (16, LENGTH)
        loader = torch.utils.data.DataLoader(rows, batch_size=2)
        prepared = accelerator.prepare(model, optimizer, loader, scheduler)
        model, optimizer, loader, scheduler = prepared
        losses = []
        for index, batch in enumerate(loader):
            with accelerator.accumulate(model):
                loss = text_loss(model, (batch,))
                accelerator.backward(loss)
                losses.append(loss.detach())
                if accelerator.sync_gradients:
                    losses.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).detach())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if index == 3:
                accelerator.save_state(str(tmp_path / str(compressed)))
        results.append((losses, model, optimizer.optimizer))
        middle = make(qwen3, compressed).to(device)
        middle.load_state_dict(model.state_dict())
        accelerator.load_state(str(tmp_path / str(compressed)))
        results[-1] += (middle, model, optimizer.optimizer)
    expected, got = results
    assert_same_losses(expected[0], got[0])
    for index in (3, 4):  # at the end; as it was saved
        assert_same_model(expected[index], got[index])
    assert_same_state(expected[5], got[5])
    assert compressed_names(got[4]) == matrix_names(got[4])
    held = [value for state in got[5].state.values() for value in state.values()]
    assert any(isinstance(value, CompressedTensor) for value in held)
