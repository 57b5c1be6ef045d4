"""Peers in lct bench codec: rows like LCT's, checked bits, one line where a peer is not there."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import lct
from lct.bench import peers
from lct.bench.codec import Input, gaussian
from lct.bench.peers import PEERS, Peer, measure_peer, merge, split
from lct.cli.app import app

CPU = torch.device("cpu")
NVCOMP = PEERS["nvcomp-ans"]


class Zlib:
    """A peer that the standard library has."""

    def __init__(
        self,
        planes: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        options: Mapping[str, Any],
    ) -> None:
        self.planes, self.outputs, self.options = planes, outputs, options
        self.payloads: list[bytes] = [b""] * len(planes)
        for i in range(len(planes)):
            self.encode(i)

    def encode(self, i: int) -> None:
        self.payloads[i] = zlib.compress(self.planes[i].numpy().tobytes(), **self.options)

    def decode(self, i: int) -> None:
        data = np.frombuffer(bytearray(zlib.decompress(self.payloads[i])), np.uint8)
        self.outputs[i].copy_(torch.from_numpy(data))

    def size_bytes(self, i: int) -> int:
        return len(self.payloads[i])


class WrongZlib(Zlib):
    def decode(self, i: int) -> None:
        super().decode(i)
        self.outputs[i][9] ^= 1


class IdleZlib(Zlib):
    def decode(self, i: int) -> None:
        pass


ZLIB = Peer(
    name="zlib",
    package="python",
    module="zlib",
    device_type="cpu",
    open=Zlib,
    note="as a test",
    options={"level": 1},
)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench", "codec", *map(str, arguments)])


def test_planes() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    dense = bits.view(torch.bfloat16)
    exponents, sign_fractions = split(dense)
    patterns = bits.int() & 0xFFFF
    assert torch.equal(exponents.int(), patterns >> 7 & 0xFF)
    assert torch.equal(sign_fractions.int(), patterns >> 8 & 0x80 | patterns & 0x7F)
    assert torch.equal(merge(exponents, sign_fractions).view(torch.int16), bits)


def test_planes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PIECE_VALUES", 1000)
    dense = gaussian(4321, 0, torch.bfloat16, CPU).dense
    assert torch.equal(merge(*split(dense)), dense)


def test_row() -> None:
    given = gaussian(2**14, 2, torch.bfloat16, CPU)
    row = measure_peer(given, ZLIB, repetitions=2)
    assert (row["layout"], row["default"], row["input"]) == ("zlib", False, "gaussian")
    assert (row["num_values"], row["phase"], row["bits_equal"]) == (2**14, 2, True)
    assert row["compressed_bytes"] == len(zlib.compress(split(given.dense)[0].numpy().tobytes(), 1))
    assert row["allocated_bytes"] == row["compressed_bytes"] + 2**14
    assert row["ratio"] == 2**15 / row["allocated_bytes"]
    assert row["encode_over_copy"] == pytest.approx(row["encode_ms"] / row["copy_ms"])
    assert row["decode_gb_s"] == pytest.approx(2**15 / row["decode_ms"] / 1e6)
    assert row["timing_note"] == "as a test"
    assert row["options"] == {"level": 1}
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize("wrong", [WrongZlib, IdleZlib])
def test_wrong_bits_give_no_figures(wrong: Any) -> None:
    given = Input("x", torch.zeros(4096, dtype=torch.bfloat16), {})
    with pytest.raises(lct.LctError, match="wrong bits in zlib before it is timed"):
        measure_peer(given, replace(ZLIB, open=wrong), repetitions=1)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"bfloat16 tensors, got torch\.float32"):
        measure_peer(Input("x", torch.zeros(64), {}), ZLIB)


def test_a_peer_in_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "zlib", ZLIB)
    bits = np.arange(4096, dtype=np.uint16)
    np.save(tmp_path / "weight_bf16.npy", bits)
    np.save(tmp_path / "act_fp32.npy", bits.astype(np.float32))
    report, plot = tmp_path / "r.json", tmp_path / "p.svg"
    result = run(
        *("--device", "cpu", "--sizes", 4096, "--repetitions", 1, "--preset", "pooled"),
        *("--tensors", tmp_path, "--json", report, "--plot", plot),
    )
    assert result.exit_code == 0, result.output
    figures = json.loads(report.read_text())
    rows = [row for row in figures["rows"] if row["layout"] == "zlib"]
    assert [row["input"] for row in rows] == ["gaussian"] * 8 + ["weight_bf16"]
    assert set(figures["sums"]) == {"pooled"}
    assert "left out nvcomp-ans: it needs device cuda, got cpu" in result.stdout
    assert "<svg" in plot.read_text()
    common = ("--device", "cpu", "--sizes", 4096, "--repetitions", 1)
    result = run(*common, "--dtype", "float32", "--peers", "zlib")
    assert result.exit_code == 1
    assert "--peers needs --dtype bfloat16, got float32" in result.stderr


def test_none() -> None:
    arguments = ("--device", "cpu", "--sizes", 64, "--repetitions", 1, "--preset", "pooled")
    result = run(*arguments, "--peers", "none")
    assert result.exit_code == 0, result.output
    assert "nvcomp" not in result.stdout


def test_a_peer_that_was_asked_for_and_is_not_there() -> None:
    result = run("--device", "cpu", "--peers", "nvcomp-ans")
    assert result.exit_code == 1
    assert "peer nvcomp-ans cannot be measured: it needs device cuda" in result.stderr
    assert result.stdout == ""


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", None)
    reason = NVCOMP.missing(torch.device("cuda"))
    assert reason is not None
    assert reason.startswith("nvidia-nvcomp-cu13 is not installed (pip install 'lct-torch[peers]')")


@pytest.mark.gpu
@pytest.mark.parametrize("num_values", [1000, 2**20 + 3, 2**24])
def test_nvcomp(num_values: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    reason = NVCOMP.missing(device)
    if reason is not None:
        pytest.skip(reason)
    row = measure_peer(gaussian(num_values, 0, torch.bfloat16, device), NVCOMP, repetitions=3)
    assert row["bits_equal"] is True
    assert row["timing"] == "events"
    assert num_values < 2**20 or 1.45 < row["ratio"] < 1.52
