"""Environment variables: the one module that reads them. docs/guide.md lists them."""

from __future__ import annotations

import os
from pathlib import Path

MIB = 1 << 20


def set_variables() -> dict[str, str]:
    """What is set of this module's variables and of those of torch's allocator, but for paths."""
    wanted = ("LCT_", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    names = sorted(name for name in os.environ if name.startswith(wanted))
    return {name: os.environ[name] for name in names if name != "LCT_CACHE_DIR"}


def kernel_cache_dir() -> Path:
    """``LCT_CACHE_DIR``: where compiled kernels are kept (default: ``lct`` in the user's cache)."""
    own = os.environ.get("LCT_CACHE_DIR")
    if own:
        return Path(own)
    # Empty means unset, as the XDG specification says.
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lct"


def arena_limit_bytes(device_bytes: int) -> int:
    """``LCT_ARENA_MIB``: bytes up to which a device's arena grows so that a launch need not go in
    pieces; to half of it, so that launches need not wait for one another.

    Default: 1/512 of the device's memory, at least 32 MiB (48 MiB on a 24 GiB card). Data that
    really spills may take more.
    """
    value = os.environ.get("LCT_ARENA_MIB")
    if value is None:
        return max(32 * MIB, device_bytes // 512)
    if not value.isdigit() or int(value) < 1:
        raise ValueError(f"LCT_ARENA_MIB must be a whole number of MiB, at least 1, got {value!r}")
    return int(value) * MIB


def arena_own_bytes(limit_bytes: int) -> int:
    """Of a device's arena's limit: what it has of the device's memory before any data spills, where
    the host's backs the rest. An eighth, and up to a half where that is less than 32 MiB: in a
    captured graph kernels ask for room on the device, a chunk of 8 KiB for each warp that runs.
    """
    return max(limit_bytes // 8, min(limit_bytes // 2, 32 * MIB))


def arena_host_bytes() -> int:
    """``LCT_ARENA_HOST_MIB``: bytes of pinned memory of the host, taken as they are needed, that
    stand for the part of a device's arena which launches in flight might need and hardly ever do.

    Default: 1024 MiB. 0: the device's own memory alone, and launches wait for one another.
    """
    value = os.environ.get("LCT_ARENA_HOST_MIB", "1024")
    if not value.isdigit():
        raise ValueError(f"LCT_ARENA_HOST_MIB must be a whole number of MiB, got {value!r}")
    return int(value) * MIB


def has_payload_pool() -> bool | None:
    """``LCT_PAYLOAD_POOL``: whether payloads have a pool of their own in torch's allocator while
    gradients go within backward (1) or share the common one (0).

    Default: None, as torch's allocator has expandable segments or not.
    """
    value = os.environ.get("LCT_PAYLOAD_POOL")
    if value not in (None, "0", "1"):
        raise ValueError(f"LCT_PAYLOAD_POOL must be 0 or 1, got {value!r}")
    return None if value is None else value == "1"


def decode_ahead_bytes() -> int:
    """``LCT_DECODE_AHEAD_MIB``: dense bytes of weights that are decoded together at most.

    Default: 128 MiB. 0: every weight by itself.
    """
    value = os.environ.get("LCT_DECODE_AHEAD_MIB", "128")
    if not value.isdigit():
        raise ValueError(f"LCT_DECODE_AHEAD_MIB must be a whole number of MiB, got {value!r}")
    return int(value) * MIB


def save_batch_bytes() -> int:
    """``LCT_SAVE_BATCH_MIB``: dense bytes of saved activations that wait for one another at most.

    Default: 256 MiB. 0: every one is encoded by itself.
    """
    value = os.environ.get("LCT_SAVE_BATCH_MIB", "256")
    if not value.isdigit():
        raise ValueError(f"LCT_SAVE_BATCH_MIB must be a whole number of MiB, got {value!r}")
    return int(value) * MIB
