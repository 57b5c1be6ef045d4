"""The layers of the package: imports go downward only, and ``import lct`` is light.

The order is the one of docs/architecture.md. A module that is in no layer fails: add it to LAYERS.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src"

# Lowest first. A name stands for the module and, for a package, everything in it. Modules of one
# layer may import each other; the backends may not (BACKENDS).
LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "lct.errors",
        "lct.text",
        "lct.config",
        "lct.dtypes",
        "lct.presets",
        "lct.distributions",
        "lct.codebook",
        "lct.layout",
    ),
    ("lct.backends",),  # the arena is a part of the CUDA backend
    ("lct.ops",),
    ("lct.tensor",),
    (
        "lct.nn",
        "lct.optim",
        "lct.checkpoint",
        "lct.analysis",
        "lct.memory",
        "lct.report",
        "lct.plan",
        "lct.atomic",
    ),
    ("lct",),  # the public API: the file src/lct/__init__.py alone
    ("lct.cli", "lct.bench", "lct.demo", "lct.__main__"),
)
BACKENDS = (
    "lct.backends.reference",
    "lct.backends.cpu",
    "lct.backends.cuda",
    "lct.backends.meta",
)
# Pure Python and NumPy: the format can be read without torch.
TORCH_FREE_LAYER = 0
HEAVY = (
    *("numba", "cuda.core", "cuda.bindings", "matplotlib", "transformers", "typer"),
    *("torch._dynamo", "torch._inductor"),
)


@dataclass(frozen=True)
class Import:
    importer: str
    target: str
    where: str  # file:line


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def layer_of(module: str) -> int | None:
    """The index of ``module``'s layer; ``None`` if LAYERS does not name it."""
    for index, names in enumerate(LAYERS):
        if any(module == name if name == "lct" else within(module, name) for name in names):
            return index
    return None


def backend_of(module: str) -> str | None:
    return next((name for name in BACKENDS if within(module, name)), None)


def modules_under(src: Path) -> dict[str, Path]:
    """Module name -> file, for every Python file of the package."""
    found = {}
    for path in sorted((src / "lct").rglob("*.py")):
        parts = path.relative_to(src).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(module: str, path: Path, known: dict[str, Path]) -> Iterator[Import]:
    """Every import in a file: at the top, in functions, for type checkers, and by name."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}"
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(module, alias.name, where)
            case ast.ImportFrom(module=source, names=names, level=level):
                base = source or ""
                if level:
                    parents = package.split(".")
                    base = ".".join(
                        parents[: len(parents) - level + 1] + ([source] if source else [])
                    )
                for alias in names:
                    submodule = f"{base}.{alias.name}"
                    yield Import(module, submodule if submodule in known else base, where)
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield Import(module, name, where)


def all_imports(src: Path) -> list[Import]:
    known = modules_under(src)
    return [found for name, path in known.items() for found in imports_of(name, path, known)]


def violations(src: Path) -> list[str]:
    problems = [
        f"{name} is in no layer: add it to LAYERS"
        for name in modules_under(src)
        if layer_of(name) is None
    ]
    for found in all_imports(src):
        if not within(found.target, "lct"):
            continue
        own, other = layer_of(found.importer), layer_of(found.target)
        if own is not None and other is not None and other > own:
            problems.append(f"{found.where}: {found.importer} imports upward: {found.target}")
        backends = backend_of(found.importer), backend_of(found.target)
        if None not in backends and backends[0] != backends[1]:
            problems.append(f"{found.where}: backend {found.importer} imports {found.target}")
    return problems


def test_the_package_is_found() -> None:
    assert "lct" in modules_under(SRC)


def test_every_name_of_a_layer_is_a_module() -> None:
    names = [name for layer in LAYERS for name in layer]
    assert sorted(set(names) - set(modules_under(SRC))) == []
    assert len(set(names)) == len(names)


def test_imports_go_downward_and_backends_are_strangers() -> None:
    assert violations(SRC) == []


def test_lowest_layer_does_not_import_torch() -> None:
    assert [
        f"{found.where}: {found.importer} imports {found.target}"
        for found in all_imports(SRC)
        if layer_of(found.importer) == TORCH_FREE_LAYER and within(found.target, "torch")
    ] == []


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("dtypes.py", "import lct.tensor", "imports upward: lct.tensor"),
        ("tensor.py", "from lct import encode", "imports upward: lct"),
        ("ops.py", "from lct import tensor", "imports upward: lct.tensor"),
        ("ops.py", "from .tensor import CompressedTensor", "imports upward: lct.tensor"),
        ("ops.py", "def f():\n    from . import tensor", "imports upward: lct.tensor"),
        ("backends/cuda/jit.py", "from ...tensor import encode", "imports upward: lct.tensor"),
        ("layout.py", "import importlib\nimportlib.import_module('lct.ops')", "upward: lct.ops"),
        ("backends/cpu.py", "from lct.backends import reference", "backend lct.backends.cpu"),
        ("backends/cuda/codec.py", "from ..cpu import encode", "backend lct.backends.cuda.codec"),
        ("helpers.py", "", "lct.helpers is in no layer"),
    ],
)
def test_a_violation_is_seen(tmp_path: Path, file: str, source: str, expected: str) -> None:
    def write(name: str, text: str) -> None:
        path = tmp_path / "lct" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    for name in ("__init__.py", "tensor.py", "ops.py", "backends/reference.py", "backends/cpu.py"):
        write(name, "")
    assert violations(tmp_path) == []
    write(file, source)
    (problem,) = violations(tmp_path)
    assert expected in problem


def test_import_lct_is_light() -> None:
    """In a fresh process: no CUDA context, no compiler, no plotting, no command line."""
    code = (
        "import json, sys\n"
        "import torch\n"
        "before = set(sys.modules)\n"
        "import lct\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules and name not in before]\n"
        "print(json.dumps({'initialised': torch.cuda.is_initialized(), 'heavy': heavy}))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SRC)!r})\n{code}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {"initialised": False, "heavy": []}
