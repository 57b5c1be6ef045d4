"""Files of compressed tensors: bits, damage, hostile contents, kills."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

import lct
from lct.checkpoint import (
    compress_file,
    container,
    decompress_file,
    load_file,
    read_metadata,
    save_file,
)
from lct.checkpoint.container import FOOTER, PREFIX, ContainerReader
from lct.checkpoint.header import FILE_DTYPES, make_header, parse_header
from lct.checkpoint.sources import find_files, read_tensors

Tensors = dict[str, torch.Tensor]
METADATA = {"format": "pt", "ключ": "värde"}
SRC = Path(__file__).resolve().parents[1] / "src"


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    assert found.dtype == expected.dtype, name
    assert found.shape == expected.shape, name
    assert bits(found) == bits(expected), name


def assert_same_tensors(found: Tensors, expected: Tensors) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert_same(found[name], tensor, name)


def decoded(tensors: dict[str, Any]) -> Tensors:
    return {
        name: value.decode() if isinstance(value, lct.CompressedTensor) else value
        for name, value in tensors.items()
    }


def weight(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


@pytest.fixture
def tensors(rng: np.random.Generator) -> Tensors:
    """Every dtype of safetensors that torch has, and every shape that is special."""
    result = {}
    for row in FILE_DTYPES.values():
        if row.torch_dtype is not None:
            raw = torch.from_numpy(rng.integers(0, 256, row.bits * 6 // 8 * row.packed, np.uint8))
            raw = raw % 2 if row.name == "BOOL" else raw
            result[row.name] = raw.view(row.torch_dtype).reshape(2, 3)
    result |= {
        "weight": weight(48, 256),
        "weight.fp16": weight(48, 256, dtype=torch.float16),
        "weight.fp32": weight(48, 256, dtype=torch.float32),
        "weight.upcast": weight(48, 256).float(),
        "noise": torch.from_numpy(rng.integers(-(2**15), 2**15, (32, 512), np.int16)).view(
            torch.bfloat16
        ),
        "zeros": torch.zeros(64, 256, dtype=torch.bfloat16),
        "scalar": torch.tensor(-0.0),
        "empty": torch.empty(0, 3, dtype=torch.bfloat16),
        "empty.int": torch.empty(2, 0, dtype=torch.int64),
        'name "quoted" \\ \n ünï': torch.tensor([float("nan"), float("-inf")]),
    }
    return result


@pytest.fixture
def source(tmp_path: Path, tensors: Tensors) -> Path:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(tensors, path, metadata=METADATA)
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A `.lct` file small enough to damage in every byte."""
    path = tmp_path / "small.lct"
    save_file({"w": weight(4, 256), "n": torch.arange(3)}, path, {"key": "value"})
    assert {type(value) for value in load_file(path).values()} == {
        lct.CompressedTensor,
        torch.Tensor,
    }
    return path


def test_safetensors_file_comes_back_byte_for_byte(
    source: Path, tensors: Tensors, tmp_path: Path
) -> None:
    packed, back = tmp_path / "model.lct", tmp_path / "back.safetensors"
    summary = compress_file(source, packed)
    assert summary.num_tensors == len(tensors)
    assert summary.num_coded == 5
    assert summary.dense_file_bytes == source.stat().st_size
    assert summary.compressed_file_bytes == packed.stat().st_size
    assert summary.ratio > 1.4
    assert decompress_file(packed, back).compressed_file_bytes == packed.stat().st_size
    assert back.read_bytes() == source.read_bytes()
    assert_same_tensors(safetensors.torch.load_file(back), tensors)
    with safetensors.safe_open(back, "pt") as file:
        assert file.metadata() == METADATA


@pytest.mark.parametrize("preset", ["clean", "medium", "high", "pooled"])
def test_presets(source: Path, tmp_path: Path, preset: str) -> None:
    packed, back = tmp_path / "model.lct", tmp_path / "back.safetensors"
    compress_file(source, packed, preset=preset, distribution="gaussian")
    assert load_file(packed)["weight"].preset == preset  # type: ignore[union-attr]
    decompress_file(packed, back)
    assert back.read_bytes() == source.read_bytes()


@pytest.mark.parametrize("metadata", [None, {}, METADATA])
def test_save_and_load(tensors: Tensors, tmp_path: Path, metadata: dict[str, str] | None) -> None:
    path = tmp_path / "file.lct"
    save_file(tensors, path, metadata)
    loaded = load_file(path)
    assert_same_tensors(decoded(loaded), tensors)
    assert read_metadata(path) == metadata
    kinds = {name for name, value in loaded.items() if isinstance(value, lct.CompressedTensor)}
    assert kinds == {"weight", "weight.fp16", "weight.fp32", "weight.upcast", "zeros"}
    assert loaded["weight.upcast"].ratio > 2.7  # type: ignore[union-attr]
    again, back = tmp_path / "again.lct", tmp_path / "back.safetensors"
    save_file(loaded, again, metadata)
    assert again.read_bytes() == path.read_bytes()
    decompress_file(path, back)
    assert_same_tensors(safetensors.torch.load_file(back), tensors)


def test_no_tensors(tmp_path: Path) -> None:
    path, back = tmp_path / "empty.lct", tmp_path / "empty.safetensors"
    save_file({}, path)
    assert load_file(path) == {}
    decompress_file(path, back)
    assert safetensors.torch.load_file(back) == {}


def test_views_are_saved_as_what_they_show(tmp_path: Path) -> None:
    base = weight(256, 96)
    views = {"t": base.t(), "slice": base[::3, 5:], "expanded": base[:1].expand(64, 96)}
    pair = torch.randn(64, dtype=torch.complex64)
    views |= {"conj": pair.conj(), "neg": pair.conj().imag}
    save_file(views, tmp_path / "views.lct")
    expected = {name: view.clone().resolve_conj().resolve_neg() for name, view in views.items()}
    assert_same_tensors(decoded(load_file(tmp_path / "views.lct")), expected)


def test_saving_what_is_no_tensor(tmp_path: Path) -> None:
    path = tmp_path / "file.lct"
    with pytest.raises(TypeError, match="save_file takes tensors, got list for 'w'"):
        save_file({"w": [1.0]}, path)  # type: ignore[dict-item]
    with pytest.raises(TypeError, match=r"got torch\.sparse_coo"):
        save_file({"w": torch.eye(3).to_sparse()}, path)
    with pytest.raises(TypeError, match=r"dtype must be one of .* got complex128"):
        save_file({"w": torch.zeros(3, dtype=torch.complex128)}, path)
    with pytest.raises(TypeError, match="metadata must map strings to strings"):
        save_file({}, path, {"step": 3})  # type: ignore[dict-item]
    assert not path.exists()


def test_dtypes_that_torch_does_not_have_pass_through(tmp_path: Path) -> None:
    data = bytes(range(9))
    text = json.dumps({"w": {"dtype": "F6_E2M3", "shape": [3, 4], "data_offsets": [0, 9]}}).encode()
    path, packed, back = (tmp_path / n for n in ("a.safetensors", "a.lct", "b.safetensors"))
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    compress_file(path, packed)
    decompress_file(packed, back)
    assert back.read_bytes() == path.read_bytes()
    with pytest.raises(TypeError, match="no dtype for F6_E2M3 tensor 'w'"):
        load_file(packed)


def test_headers_are_those_of_safetensors(tensors: Tensors, tmp_path: Path) -> None:
    """Order, padding and offsets: safetensors reads ours, and ours are as dense and aligned."""
    header = make_header({n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}, METADATA)
    assert len(header.text) % 8 == 0
    path = tmp_path / "ours.safetensors"
    ordered = b"".join(bits(tensors[entry.name]) for entry in header.entries)
    path.write_bytes(struct.pack("<Q", len(header.text)) + header.text + ordered)
    assert_same_tensors(safetensors.torch.load_file(path), tensors)
    for entry in header.entries:
        assert entry.begin % max(entry.dtype.bits // 8, 1) == 0


# --- damage


def corrupt_error(path: Path, out: Path) -> str:
    """The one error that reading ``path`` gives; there is no output and nothing left behind."""
    before = set(path.parent.iterdir())
    with pytest.raises(lct.CorruptFileError) as caught:
        decompress_file(path, out)
    assert set(path.parent.iterdir()) == before
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_every_truncation_is_found(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    path, out = tmp_path / "cut.lct", tmp_path / "out"
    for size in [*range(0, len(data), 13), *range(90), *range(len(data) - 60, len(data))]:
        path.write_bytes(data[:size])
        message = corrupt_error(path, out)
        assert "truncated" in message or "not an LCT file" in message
    path.write_bytes(data + b"\0")
    assert "truncated or damaged" in corrupt_error(path, out)


def test_every_flipped_bit_is_found(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    path, out = tmp_path / "flipped.lct", tmp_path / "out"
    choose = random.Random(0)
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << choose.randrange(8)
        path.write_bytes(changed)
        corrupt_error(path, out)
        if position % 16 == 0:
            with pytest.raises(lct.CorruptFileError):
                load_file(path)


def test_damage_names_the_tensor(small: Path, tmp_path: Path) -> None:
    with ContainerReader(small) as reader:
        places = {entry.name: record.offset for entry, record in reader}
    path = tmp_path / "damaged.lct"
    for name, offset in places.items():
        data = bytearray(small.read_bytes())
        data[offset + 3] ^= 0x10
        path.write_bytes(data)
        assert f"tensor {name!r} is damaged" in corrupt_error(path, tmp_path / "out")


@pytest.mark.parametrize(
    "content",
    [b"", b"\x89", b"\x89LCT", b"PK\x03\x04" + bytes(200), b"{}", bytes(5000), os.urandom(4096)],
    ids=["empty", "1 byte", "4 bytes", "zip", "json", "zeros", "random"],
)
def test_foreign_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(content)
    message = corrupt_error(path, tmp_path / "out")
    assert "is not an LCT file" in message or "is truncated" in message
    with pytest.raises(lct.CorruptFileError, match="is not a safetensors file"):
        compress_file(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_text_mode_transfer_is_known(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.lct"
    path.write_bytes(small.read_bytes().replace(b"\r\n", b"\n"))
    assert "is not an LCT file" in corrupt_error(path, tmp_path / "out")


def test_newer_version_is_named(small: Path, tmp_path: Path) -> None:
    data = bytearray(small.read_bytes())
    data[8] = 2
    path = tmp_path / "newer.lct"
    path.write_bytes(data)
    assert "has file version 2, this LCT reads version 1" in corrupt_error(path, tmp_path / "out")


# --- hostile files: every digest is right, the contents are not


def forge(
    path: Path, index: object, records: bytes = b"", *, raw: bytes | None = None, shift: int = 0
) -> Path:
    prefix = PREFIX.pack(container.MAGIC, container.FILE_VERSION, 0)
    text = json.dumps(index).encode() if raw is None else raw
    places = struct.pack("<QQ", len(prefix) + len(records) + shift, len(text) - shift)
    digest = hashlib.blake2b(prefix + text[shift:] + places, digest_size=32).digest()
    path.write_bytes(prefix + records + text + places + digest + container.END_MAGIC)
    return path


def index_of(header: object, *records: object) -> dict[str, object]:
    text = header if isinstance(header, str) else json.dumps(header)
    return {"header": text, "records": list(records)}


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def record(data: bytes, encoding: str = "plain", **more: Any) -> dict[str, Any]:
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    fields = {"encoding": encoding, "size_bytes": len(data), "blake2b": digest, **more}
    return fields | ({"dense_blake2b": digest} if encoding == "lct" else {})


U8 = entry("U8", [4], 0, 4)
HOSTILE_INDICES: dict[str, object] = {
    "a list": [],
    "no records": {"header": "{}"},
    "more keys": {"header": "{}", "records": [], "x": 1},
    "header is no text": {"header": {}, "records": []},
    "header is no object": index_of([]),
    "header is no JSON": index_of("{"),
    "lone surrogate": {"header": "\ud800", "records": []},
    "records missing": index_of({"w": U8}),
    "records too many": index_of({}, record(b"")),
    "unknown dtype": index_of({"w": entry("F128", [1], 0, 16)}, record(bytes(4))),
    "negative size": index_of({"w": entry("U8", [-4], 0, 4)}, record(bytes(4))),
    "fractional size": index_of({"w": entry("U8", [4.0], 0, 4)}, record(bytes(4))),
    "bool as size": index_of({"w": entry("U8", [True], 0, 1)}, record(bytes(4))),
    "huge shape": index_of({"w": entry("U8", [2**62, 2**62], 0, 4)}, record(bytes(4))),
    "endless shape": index_of({"w": entry("U8", [2**62] * 50_000, 0, 4)}, record(bytes(4))),
    "shape and offsets": index_of({"w": entry("U8", [5], 0, 4)}, record(bytes(4))),
    "gap in the data": index_of({"w": entry("U8", [4], 8, 12)}, record(bytes(4))),
    "overlap": index_of({"a": U8, "b": entry("U8", [4], 2, 6)}, record(bytes(4)), record(b"")),
    "half a byte": index_of({"w": entry("F4", [3], 0, 1)}, record(bytes(4))),
    "metadata is no text": index_of({"__metadata__": {"a": 1}, "w": U8}, record(bytes(4))),
    "name twice": index_of('{"w":%s,"w":%s}' % ((json.dumps(U8),) * 2), record(bytes(4))),
    "record size": index_of({"w": U8}, record(bytes(4)) | {"size_bytes": 5}),
    "record size negative": index_of({"w": U8}, record(bytes(4)) | {"size_bytes": -4}),
    "record size huge": index_of({"w": U8}, record(bytes(4), "lct") | {"size_bytes": 2**60}),
    "record size is text": index_of({"w": U8}, record(bytes(4)) | {"size_bytes": "4"}),
    "unknown encoding": index_of({"w": U8}, record(bytes(4)) | {"encoding": "pickle"}),
    "digest missing": index_of({"w": U8}, {"encoding": "plain", "size_bytes": 4}),
    "digest is no text": index_of({"w": U8}, record(bytes(4)) | {"blake2b": 7}),
    "digest is wrong": index_of({"w": U8}, record(bytes(3) + b"x")),
    "payload is too short": index_of({"w": U8}, record(bytes(4), "lct")),
}


@pytest.mark.parametrize("name", HOSTILE_INDICES)
def test_hostile_index(tmp_path: Path, name: str) -> None:
    path = forge(tmp_path / "hostile.lct", HOSTILE_INDICES[name], bytes(4))
    corrupt_error(path, tmp_path / "out")
    with pytest.raises(lct.CorruptFileError):
        load_file(path)


@pytest.mark.parametrize(
    "raw",
    [b"[" * 200_000, b'{"header":"{}","records":' + b"9" * 10_000 + b"}", b"\xff\xfe", b""],
    ids=["nesting", "long number", "not UTF-8", "empty"],
)
def test_hostile_json(tmp_path: Path, raw: bytes) -> None:
    corrupt_error(forge(tmp_path / "hostile.lct", None, raw=raw), tmp_path / "out")


def test_footer_that_points_elsewhere(tmp_path: Path) -> None:
    path = forge(tmp_path / "hostile.lct", index_of({}), shift=0)
    data = bytearray(path.read_bytes())
    for offset, size in ((2**63, 8), (0, len(data)), (16, 2**64 - 1), (16, 0)):
        data[-FOOTER.size : -FOOTER.size + 16] = struct.pack("<QQ", offset, size)
        path.write_bytes(data)
        corrupt_error(path, tmp_path / "out")


def payload_of(tensor: torch.Tensor) -> bytearray:
    return bytearray(lct.encode(tensor, capacity="exact").canonical_bytes())


def other_count(payload: bytearray) -> None:
    payload[8:16] = struct.pack("<Q", 2**60)


def other_dtype(payload: bytearray) -> None:
    payload[2] = 3


def other_meta(payload: bytearray) -> None:
    payload[-16:] = b"\xff" * 16


def other_streams(payload: bytearray) -> None:
    payload[16:200] = b"\x5a" * 184


@pytest.mark.parametrize("change", [other_count, other_dtype, other_meta, other_streams])
def test_hostile_payload(tmp_path: Path, change: Callable[[bytearray], None]) -> None:
    """Right digest, wrong payload: the checks of the payload or the dense digest see it."""
    tensor = weight(8, 256)
    payload = payload_of(tensor)
    dense = hashlib.blake2b(bits(tensor), digest_size=16).hexdigest()
    header = {"w": entry("BF16", [8, 256], 0, 4096)}
    good = index_of(header, record(bytes(payload), "lct") | {"dense_blake2b": dense})
    decompress_file(forge(tmp_path / "good.lct", good, bytes(payload)), tmp_path / "good")
    change(payload)
    bad = index_of(header, record(bytes(payload), "lct") | {"dense_blake2b": dense})
    path = forge(tmp_path / "bad.lct", bad, bytes(payload))
    assert "tensor 'w' is damaged" in corrupt_error(path, tmp_path / "out")


def test_payload_of_another_dtype(tmp_path: Path) -> None:
    payload = bytes(payload_of(weight(8, 256)))
    header = {"w": entry("F16", [8, 256], 0, 4096)}
    path = forge(tmp_path / "bad.lct", index_of(header, record(payload, "lct")), payload)
    assert "payload holds torch.bfloat16, the header says F16" in corrupt_error(
        path, tmp_path / "o"
    )


def safetensors_bytes(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 100) + b"{}",
        safetensors_bytes({"w": U8}, bytes(3)),
        safetensors_bytes({"w": U8}, bytes(5)),
        safetensors_bytes({"w": entry("F32", [2**40], 0, 2**42)}, bytes(4)),
        safetensors_bytes([1], b""),
    ],
    ids=["huge header", "long header", "truncated", "longer", "huge tensor", "list"],
)
def test_damaged_safetensors(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(content)
    with pytest.raises(lct.CorruptFileError, match=r"damaged.safetensors: is not a safetensors"):
        compress_file(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(path, "pt").__enter__()


# --- writing


def test_wrong_bits_are_never_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(self: lct.CompressedTensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.dtype)

    monkeypatch.setattr(lct.CompressedTensor, "decode", wrong)
    with pytest.raises(lct.LctError, match="does not decode to its own bits"):
        compress_file(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_old_file_stays_on_an_error(source: Path, small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_bytes(b"old")
    before = set(tmp_path.iterdir())
    data = bytearray(small.read_bytes())
    data[20] ^= 1
    small.write_bytes(data)
    with pytest.raises(lct.CorruptFileError):
        decompress_file(small, out)
    with pytest.raises(FileExistsError):
        compress_file(source, out, overwrite=False)
    with pytest.raises(ValueError, match="output must be another file than the input"):
        compress_file(source, source)
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(ValueError, match="output must be another file than the input"):
        compress_file(source, tmp_path / "link")
    (tmp_path / "link").unlink()
    assert out.read_bytes() == b"old"
    assert set(tmp_path.iterdir()) == before


def test_progress_counts_dense_bytes(source: Path, tensors: Tensors, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    compress_file(source, tmp_path / "out", progress=lambda *call: calls.append(call))
    assert [name for name, _, _ in calls[:-1]].count("weight") == 1
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)
    total = sum(len(bits(tensor)) for tensor in tensors.values())
    assert calls[-1] == ("", total, total)


# Each child writes one of two files over OUT again and again until it is killed. Forked before
# anything starts threads; the parent copies what each kill left.
KILLED = """
import os, random, shutil, signal, sys, time
from lct.checkpoint import compress_file, save_file
first, second, out, rounds = sys.argv[1:4] + [int(sys.argv[4])]
choose = random.Random(7)
for k in range(rounds):
    child = os.fork()
    if child == 0:
        compress_file(first, out + ".warm")  # loads compiled code: from here on time goes to files
        open(out + ".ready", "w").close()
        while True:
            compress_file(second, out)
            compress_file(first, out)
    while not os.path.exists(out + ".ready"):
        time.sleep(0.01)
    time.sleep(choose.uniform(0.0, 0.4))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.remove(out + ".ready")
    shutil.copy(out, out + f".{k}")
"""


def test_kill_in_the_middle_of_a_write_leaves_a_whole_file(tmp_path: Path) -> None:
    paths = []
    for seed in (1, 2):
        paths.append(tmp_path / f"{seed}.safetensors")
        model = {f"w{i}": weight(256, 512, seed=seed + 10 * i) for i in range(4)}
        safetensors.torch.save_file(model, paths[-1])
    directory = tmp_path / "out"
    directory.mkdir()
    out = directory / "model.lct"
    compress_file(paths[0], out)
    rounds = 4
    subprocess.run(
        [sys.executable, "-c", KILLED, *map(str, paths), str(out), str(rounds)],
        check=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    expected = {path.read_bytes() for path in paths}
    for k in range(rounds):
        decompress_file(directory / f"model.lct.{k}", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() in expected


def test_termination_leaves_no_hidden_file(source: Path, tmp_path: Path) -> None:
    """SIGTERM, as a scheduler sends it, runs the clean-up of the command."""
    directory = tmp_path / "out"
    directory.mkdir()
    loop = (
        "import sys\nfrom lct.checkpoint import compress_file\nfrom lct.cli import main\n"
        "import lct.atomic, os, time\n"
        "os.fsync = lambda _: (print('writing', flush=True), time.sleep(60))\n"
        "main()\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", loop, "compress", str(source), "-o", str(directory / "model.lct")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "writing\n"
    assert len(list(directory.iterdir())) == 1
    time.sleep(0.1)
    run.send_signal(signal.SIGTERM)
    assert run.wait(timeout=30) == 128 + signal.SIGTERM
    assert list(directory.iterdir()) == []


# --- reading of any kind of file


def test_read_tensors_of_all_kinds(source: Path, tensors: Tensors, tmp_path: Path) -> None:
    packed = tmp_path / "model.lct"
    compress_file(source, packed)
    for path in (source, packed):
        seen = {}
        for item in read_tensors(path):
            assert (item.load is not None) == (item.dtype in ("BF16", "F16", "F32"))
            assert (item.stored_bytes is not None) == (path == packed)
            if item.load is not None:
                seen[item.name] = item.load()
        coded = ("torch.bfloat16", "torch.float16", "torch.float32")
        assert_same_tensors(seen, {n: t for n, t in tensors.items() if str(t.dtype) in coded})
    array = np.arange(12, dtype=np.uint16).reshape(3, 4)
    np.save(tmp_path / "bits.npy", array)
    (item,) = read_tensors(tmp_path / "bits.npy")
    assert (item.name, item.dtype, item.shape) == ("bits", "BF16", (3, 4))
    assert item.load is not None
    assert item.load().view(torch.int16).numpy().tobytes() == array.tobytes()
    assert [path.name for path in find_files(tmp_path)] == [
        "bits.npy",
        "model.lct",
        "model.safetensors",
    ]


def test_unreadable_arrays(tmp_path: Path) -> None:
    path = tmp_path / "array.npy"
    np.save(path, np.zeros(3))
    with pytest.raises(lct.CorruptFileError, match=r"array must be of uint16, .* got float64"):
        list(read_tensors(path))
    np.save(path, np.array([{"a": 1}]), allow_pickle=True)
    with pytest.raises(lct.CorruptFileError, match=r"not a readable .npy"):
        list(read_tensors(path))
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(lct.CorruptFileError, match=r"not a readable .npy"):
        list(read_tensors(path))


def test_find_files_names_the_rule(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such directory"):
        find_files(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"must have .npy, .safetensors, .lct files"):
        find_files(tmp_path)


def test_parse_header_accepts_what_safetensors_writes(source: Path) -> None:
    data = source.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = parse_header(data[8 : 8 + length])
    with safetensors.safe_open(source, "pt") as file:
        assert [e.name for e in header.entries] == file.offset_keys()
        for e in header.entries:
            assert file.get_slice(e.name).get_dtype() == e.dtype.name
            assert file.get_slice(e.name).get_shape() == list(e.shape)
