# Every target sets up .venv by itself, once; `make help` lists them.
# PYTHON=…      the interpreter that creates .venv (3.11 or newer)
# JOBS=…        test processes; each gets its share of the cores
# PYTEST_ARGS=… more arguments for pytest, e.g. PYTEST_ARGS="-k codec --tensors DIR"
PYTHON ?= python3
JOBS ?= 2
PYTEST_ARGS ?=
# Threads of torch that wait for others give their core away: where more runs on the machine than it has cores,
# spinning made a training step ten times slower.
export OMP_WAIT_POLICY ?= passive

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# torch is installed before the project: its plain name may be a CUDA build of several GB. Where pip finds CPU
# builds is a matter of the machine's pip configuration.
TORCH := $(if $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null),cuda,cpu)
KERNELS := $(wildcard src/lct/backends/cuda/kernels/*.cu src/lct/backends/cuda/kernels/*.cuh tests/backends/warp/*.hpp)
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help venv demo test lint format clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

venv: $(READY)  ## create .venv and install everything into it

$(READY): pyproject.toml requirements/$(TORCH).txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "lct needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Set PYTHON=…" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -r requirements/$(TORCH).txt
	$(PIP) install -e '.[dev]'
	@touch $@

demo: $(READY)  ## train a small GPT without LCT and with it, and compare every bit
	$(BIN)/lct demo

test: $(READY)  ## run the tests; those that need a GPU are skipped, by name, where there is none
	$(BIN)/python -m pytest -n $(JOBS) tests $(PYTEST_ARGS)

lint: $(READY)  ## check style, types and kernel formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(if $(KERNELS),$(BIN)/clang-format --dry-run -Werror $(KERNELS))

format: $(READY)  ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix --exit-zero
	$(BIN)/ruff format
	$(if $(KERNELS),$(BIN)/clang-format -i $(KERNELS))

clean:  ## remove .venv and everything that was generated
	rm -rf $(VENV) build dist demo .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
