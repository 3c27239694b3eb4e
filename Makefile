# The two commands: `make demo` and `make test`. Each makes its own virtual environment first, once.
#
#   make demo             train a small MoE language model on four ranks, without and with balancing; writes out/demo/
#   make test             run the packages' tests
#   make test-benchmarks  run the benchmarks' tests
#   make test-all         run all tests, the slow ones too (faults on an emulated cluster among them)
#   make lint             ruff, its formatter and mypy
#   make wheel            build sdist and wheel, and use the wheel alone in an empty environment
#   make docs             build the documentation site, build/docs/index.html
#   make bench            run the benchmarks (BENCH=name for one of them)
#   make clean            remove the environment and everything that was made
#
# PYTHON=python3.12 picks the interpreter, VENV=folder the environment, PIP_FLAGS="…" adds options to pip install (an
# index of CPU-only wheels, say), ARGS="…" is passed on to the demo or to pytest. WORKERS=4 runs the tests in as many
# processes; WORKERS=0 runs them in one, where a debugger works.

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
ARGS ?=
WORKERS ?= 2
BENCH ?= $(notdir $(patsubst %/,%,$(dir $(wildcard benchmarks/*/__main__.py))))

BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_FLAGS) -c constraints.txt
# A worker takes tests from the other once it has none left, so that both cores are busy to the end.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test test-benchmarks test-all lint wheel docs bench clean

help:
	@sed -n 's/^#   make/make/p' Makefile

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "moe-prophet needs Python 3.11 or newer; name one with PYTHON=…" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# What the compiled core is built from. Everything but the demo and the docs is an error where it cannot be built.
CORE := setup.py $(wildcard prophet/planner/core/*.cpp prophet/planner/core/*.h)
test test-benchmarks test-all lint wheel bench: export PROPHET_REQUIRE_CORE = 1

# Stamps: a second `make` installs nothing. The interpreter is order-only, it is older than everything else.
$(VENV)/.installed: pyproject.toml constraints.txt $(CORE) | $(BIN)/python
	@echo "Installing into $(VENV) (a few minutes the first time)"
	$(INSTALL) -e '.[report]'
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt $(CORE) | $(BIN)/python
	@echo "Installing into $(VENV) (a few minutes the first time)"
	$(INSTALL) -e '.[test]'
	@touch $(VENV)/.installed $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt $(CORE) | $(BIN)/python
	@echo "Installing into $(VENV) (a few minutes the first time)"
	$(INSTALL) -e '.[dev]'
	@touch $(VENV)/.installed $(VENV)/.installed-test $@

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV) (a few minutes the first time)"
	$(INSTALL) -e '.[docs]'
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/prophet demo $(ARGS)

test test-benchmarks test-all: export OMP_NUM_THREADS ?= 1
test: $(VENV)/.installed-test
	$(PYTEST) -m "not slow" --hypothesis-profile=ci --ignore=tests/benchmarks $(ARGS)

test-benchmarks: $(VENV)/.installed-test
	$(PYTEST) -m "not slow" --hypothesis-profile=ci tests/benchmarks $(ARGS)

test-all: $(VENV)/.installed-test
	$(PYTEST) $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

wheel: export PIP_FLAGS := $(PIP_FLAGS)
wheel: $(VENV)/.installed-dev
	$(BIN)/python tests/wheel.py $(ARGS)

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict $(ARGS)

bench: $(VENV)/.installed-test
	@for name in $(BENCH); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name $(ARGS) || exit 1; done

clean:
	rm -rf $(VENV) build dist out *.egg-info prophet/planner/core/*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
