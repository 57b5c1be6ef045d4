"""``benchmarks/run.py``: every measurement is a command that can be run, and failures are said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lct.bench.variants import VARIANTS
from lct.cli.app import app
from scripts import load_script


@pytest.fixture(scope="module")
def runner() -> Any:
    return load_script("run")


def test_commands_have_options_that_exist(runner: Any) -> None:
    for row in runner.MEASUREMENTS.values():
        if row.script is not None:
            assert row.script.exists()
            continue
        words = row.arguments.split()
        path = [word for word in words[:2] if word in ("bench", "codec", "optim", "host", "train")]
        help_text = CliRunner().invoke(app, [*(path or words[:1]), "--help"]).output
        for word in words:
            if word.startswith("--"):
                assert word in help_text, (row.name, word)
        if "--variants" in words:
            wanted = words[words.index("--variants") + 1].split(",")
            assert set(wanted) <= set(VARIANTS), row.name


def test_it_lists_and_refuses(runner: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["--list"]) == 0
    assert "train-models-24gib" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        runner.main(["codecs"])
    assert caught.value.code == 2
    assert "got codecs" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
def test_no_gpu_is_said(runner: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["host", "--out", str(tmp_path)]) == 1
    assert "host needs a CUDA GPU, found none" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("source", "limit_s", "reason"),
    [
        ("import sys; open(sys.argv[-1], 'w').write('{}')", 60, None),
        ("raise SystemExit(3)", 60, "exit code 3"),
        ("import time; time.sleep(60)", 1, "took longer than 1 s"),
    ],
)
def test_runs(
    runner: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    source: str,
    limit_s: int,
    reason: str | None,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(source)
    row = replace(runner.MEASUREMENTS["codec-cpu"], script=script, limit_s=limit_s)
    monkeypatch.setattr(runner, "MEASUREMENTS", {row.name: row})
    out = tmp_path / "results"
    assert runner.main(["--out", str(out), "--commit", "abc"]) == (0 if reason is None else 1)
    assert (reason or "") in capsys.readouterr().err
    names = [path.name for path in out.iterdir()]
    assert all(name.startswith("codec-CPU-2") for name in names)
    assert len(names) == (1 if reason is None else 0)
