# The two commands: `make demo` and `make test`. Each makes its own virtual environment first, once.
#
#   make demo             train a small MoE language model on a rank per core, without and with balancing; writes out/demo/
#   make test             run the packages' tests
#   make test-benchmarks  run the benchmarks' tests
#   make test-docs        run what the pages show, the tutorial among it
#   make test-families    convert and train every family of transformers that has experts
#   make test-all         run all tests, the slow ones too (faults on an emulated cluster among them)
#   make lint             ruff, its formatter and mypy
#   make wheel            build sdist and wheel, and use the wheel alone in an empty environment
#   make docs             build the documentation site, build/docs/index.html
#   make test-peers       run peers' own tests and examples (PEERS_TUTEL=folder, PEERS_DEEPSPEED=folder: checkouts)
#   make bench            run the benchmarks (BENCH=name for one of them)
#   make clean            remove the environment and everything that was made
#
# PYTHON=python3.12 picks the interpreter, VENV=folder the environment, PIP_FLAGS="…" adds options to pip install (an
# index of CPU-only wheels, say), ARGS="…" is passed on to the demo or to pytest. WORKERS=4 runs the tests in as many
# processes; WORKERS=0 runs them in one, where a debugger works. TORCH=2.14.1 takes that release of PyTorch instead of
# the pinned one, in an environment beside it.

PYTHON ?= python3
TORCH ?=
VENV ?= .venv$(TORCH:%=-torch%)
PIP_FLAGS ?=
ARGS ?=
WORKERS ?= 2
BENCH ?= $(notdir $(patsubst %/,%,$(dir $(wildcard benchmarks/*/__main__.py))))

BIN := $(VENV)/bin
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_FLAGS) -c $(CONSTRAINTS)
# A worker takes tests from the other once it has none left, so that both cores are busy to the end.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test test-benchmarks test-docs test-families test-all test-peers lint wheel docs bench clean

help:
	@sed -n 's/^#   make/make/p' Makefile

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "moe-prophet needs Python 3.11 or newer; name one with PYTHON=…" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/constraints.txt: constraints.txt | $(BIN)/python
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt >$@

# What the compiled core is built from. Where it cannot be built, only the docs go on: pages need no planner.
CORE := setup.py $(wildcard prophet/planner/core/*.cpp prophet/planner/core/*.h)
docs: export PROPHET_WITHOUT_CORE = 1

# Stamps: a second `make` installs nothing. The interpreter is order-only, it is older than everything else.
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) $(CORE) | $(BIN)/python
	@echo "Installing into $(VENV) (a few minutes the first time)"
	$(INSTALL) -e '.[report]'
	@touch $@

$(VENV)/.installed-test: pyproject.toml $(CONSTRAINTS) $(CORE) | $(BIN)/python
	@echo "Installing into $(VENV) (a few minutes the first time)"
	$(INSTALL) -e '.[test]'
	@touch $(VENV)/.installed $@

$(VENV)/.installed-dev: pyproject.toml $(CONSTRAINTS) $(CORE) | $(BIN)/python
	@echo "Installing into $(VENV) (a few minutes the first time)"
	$(INSTALL) -e '.[dev]'
	@touch $(VENV)/.installed $(VENV)/.installed-test $@

$(VENV)/.installed-docs: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing into $(VENV) (a few minutes the first time)"
	$(INSTALL) -e '.[docs]'
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/prophet demo $(ARGS)

# Folders of tests that `make test` leaves to targets of their own.
OWN_TARGETS := benchmarks docs families peers
test test-benchmarks test-docs test-families test-all test-peers: export OMP_NUM_THREADS ?= 1
test: $(VENV)/.installed-test
	$(PYTEST) -m "not slow" --hypothesis-profile=ci $(OWN_TARGETS:%=--ignore=tests/%) $(ARGS)

test-benchmarks: $(VENV)/.installed-test
	$(PYTEST) -m "not slow" --hypothesis-profile=ci tests/benchmarks $(ARGS)

test-docs: $(VENV)/.installed-test
	$(PYTEST) tests/docs $(ARGS)

test-families: $(VENV)/.installed-test
	$(PYTEST) tests/families $(ARGS)

test-all: $(VENV)/.installed-test
	$(PYTEST) --ignore=tests/peers $(ARGS)

# Tutel is in no index of packages: it is built from the checkout, for the CPU where NO_CUDA=1 is set, and the tests that
# need it run. Without a checkout a peer's tests are skipped, and say so.
PEERS_TUTEL ?=
PEERS_DEEPSPEED ?=
TUTEL_TESTS := tests/convert/test_tutel.py tests/integrations/test_tutel.py tests/processes/test_tutel_example.py

$(VENV)/.installed-tutel: $(VENV)/.installed-test
	$(INSTALL) wheel
	$(INSTALL) --no-build-isolation --no-deps $(abspath $(PEERS_TUTEL))
	@touch $@

test-peers: export PEERS_TUTEL := $(abspath $(PEERS_TUTEL))
test-peers: export PEERS_DEEPSPEED := $(abspath $(PEERS_DEEPSPEED))
test-peers: $(VENV)/.installed-test $(if $(PEERS_TUTEL),$(VENV)/.installed-tutel)
	$(PYTEST) tests/peers $(if $(PEERS_TUTEL),$(TUTEL_TESTS)) $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

wheel: $(VENV)/.installed-dev
	$(BIN)/python tests/wheel.py $(ARGS)

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict $(ARGS)

bench: $(VENV)/.installed-test
	@for name in $(BENCH); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name $(ARGS) || exit 1; done

clean:
	rm -rf $(VENV) build dist out *.egg-info prophet/planner/core/*.so prophet/planner/core/not_built.txt
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
