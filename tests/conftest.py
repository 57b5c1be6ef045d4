"""What every test shares: the GPU marker, fixed seeds, real tensors from outside the repository."""

from __future__ import annotations

import os
import random
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

GPU_REASON = "needs a CUDA GPU"
TENSOR_SUFFIXES = (".npy", ".safetensors")
EXTRA_TENSORS = pytest.StashKey[list[Path]]()

# The examples are the same in every run, so that a red run can be repeated; hunt for new ones with
# `--hypothesis-profile=explore`. No deadline: the first example pays for compilation.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", settings.get_profile("repeatable"), derandomize=False)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tensors",
        metavar="DIR",
        default=None,
        # With a space, pytest takes DIR for a test path until it knows the option, which it learns
        # here: so name a test path too (`pytest tests --tensors DIR`).
        help="also test the real tensors (.npy, .safetensors) in DIR; write --tensors=DIR",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[EXTRA_TENSORS] = _find_tensors(config.getoption("--tensors"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        # OpenMP threads spin while they wait: processes that share cores would starve each other.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def _find_tensors(directory: str | None) -> list[Path]:
    if directory is None:
        return []
    if not Path(directory).is_dir():
        raise pytest.UsageError(f"--tensors needs a directory, got {directory!r}")
    files = sorted(path for path in Path(directory).iterdir() if path.suffix in TENSOR_SUFFIXES)
    if not files:
        wanted = " or ".join(TENSOR_SUFFIXES)
        raise pytest.UsageError(
            f"--tensors needs a directory with {wanted} files, got {directory!r}"
        )
    return files


def pytest_report_header(config: pytest.Config) -> list[str]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    directory = config.getoption("--tensors")
    files = config.stash[EXTRA_TENSORS]
    extra = f"{len(files)} files in {directory}" if directory else "none (--tensors DIR)"
    return [f"torch: {torch.__version__}, GPU: {gpu}", f"extra tensors: {extra}"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason=GPU_REASON)
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes ``extra_tensor_path`` once for each file of ``--tensors DIR``."""
    if "extra_tensor_path" not in metafunc.fixturenames:
        return
    files = metafunc.config.stash[EXTRA_TENSORS]
    if files:
        metafunc.parametrize("extra_tensor_path", files, ids=[path.stem for path in files])
    else:
        skip = pytest.mark.skip(reason="no extra tensors: pass --tensors DIR")
        metafunc.parametrize("extra_tensor_path", [pytest.param(None, marks=skip, id="none")])


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of the test's own: the same in every run and order, another for every test."""
    return zlib.crc32(request.node.nodeid.encode())


@pytest.fixture(autouse=True)
def _seed_global_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - code under test may use the global generator
    torch.manual_seed(seed)  # seeds CUDA lazily: initialises nothing


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)
