"""Environment variables: their defaults and their rules, as docs/guide.md lists them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lct import config


@pytest.mark.parametrize(
    ("own", "xdg", "expected"),
    [
        ("own", "xdg", Path("own")),
        ("", "xdg", Path("xdg/lct")),
        (None, "xdg", Path("xdg/lct")),
        (None, "", Path("home/.cache/lct")),
        (None, None, Path("home/.cache/lct")),
    ],
)
def test_cache_of_kernels(
    monkeypatch: pytest.MonkeyPatch, own: str | None, xdg: str | None, expected: Path
) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("home"))
    for name, value in (("LCT_CACHE_DIR", own), ("XDG_CACHE_HOME", xdg)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert config.kernel_cache_dir() == expected


def test_limit_of_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LCT_ARENA_MIB", raising=False)
    assert config.arena_limit_bytes(24 << 30) == 48 << 20
    assert config.arena_limit_bytes(8 << 30) == 32 << 20
    monkeypatch.setenv("LCT_ARENA_MIB", "7")
    assert config.arena_limit_bytes(24 << 30) == 7 << 20
    for wrong in ("0", "-1", "1.5", "much", ""):
        monkeypatch.setenv("LCT_ARENA_MIB", wrong)
        with pytest.raises(ValueError, match="LCT_ARENA_MIB must be a whole number of MiB"):
            config.arena_limit_bytes(24 << 30)


@pytest.mark.parametrize(("limit_mib", "own_mib"), [(32, 16), (48, 24), (64, 32), (280, 35)])
def test_own_part_of_the_arena(limit_mib: int, own_mib: int) -> None:
    assert config.arena_own_bytes(limit_mib << 20) == own_mib << 20


@pytest.mark.parametrize(
    ("name", "size_bytes", "default"),
    [
        ("LCT_DECODE_AHEAD_MIB", config.decode_ahead_bytes, 128),
        ("LCT_SAVE_BATCH_MIB", config.save_batch_bytes, 256),
        ("LCT_ARENA_HOST_MIB", config.arena_host_bytes, 1024),
    ],
)
def test_bytes_that_go_together(
    name: str, size_bytes: Callable[[], int], default: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    assert size_bytes() == default << 20
    for value in (0, 7):
        monkeypatch.setenv(name, str(value))
        assert size_bytes() == value << 20
    for wrong in ("-1", "1.5", "much", ""):
        monkeypatch.setenv(name, wrong)
        with pytest.raises(ValueError, match=f"{name} must be a whole number of MiB"):
            size_bytes()


def test_payload_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LCT_PAYLOAD_POOL", raising=False)
    assert config.has_payload_pool() is None
    for value in ("0", "1"):
        monkeypatch.setenv("LCT_PAYLOAD_POOL", value)
        assert config.has_payload_pool() == (value == "1")
    monkeypatch.setenv("LCT_PAYLOAD_POOL", "yes")
    with pytest.raises(ValueError, match="LCT_PAYLOAD_POOL must be 0 or 1, got 'yes'"):
        config.has_payload_pool()


def test_variables_that_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in config.set_variables():
        monkeypatch.delenv(name)
    assert config.set_variables() == {}
    monkeypatch.setenv("LCT_CACHE_DIR", "somewhere")
    monkeypatch.setenv("LCT_SAVE_BATCH_MIB", "3")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert config.set_variables() == {
        "LCT_SAVE_BATCH_MIB": "3",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
