# Everything a developer or a reader runs. `make` alone lists the targets.

PYTHON ?= python3
VENV := .venv
BENCH_VENV := .venv-bench
BIN := $(VENV)/bin
ARGS ?=
ENGINES ?= yes
WORKERS ?= 2
NOTEBOOK ?= 01_quickstart

# torch is installed first and by its exact version: pulled in as somebody's dependency it could be any build of it.
TORCH := $(shell grep '^torch==' constraints.txt)
PIP_INSTALL = -m pip install --disable-pip-version-check --quiet -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo lab test engines lint format bytecode bench bench-notebook bench-scale bench-links bench-faults clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z.-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# An editable install leaves no bytecode, and where Python is told to write none (PYTHONDONTWRITEBYTECODE) each agent, zygote
# and kernel would compile all that it imports.
bytecode: $(VENV)/.stamp
	@$(BIN)/python -m compileall -q monarch_kernel

demo: bytecode ## Run a notebook on this machine, the first or NOTEBOOK=04_actors_rl; the result is in build/demo
	$(BIN)/python notebooks/execute.py notebooks/$(NOTEBOOK).ipynb --out build/demo

lab: bytecode ## Open the notebooks in JupyterLab
	$(BIN)/jupyter lab --notebook-dir notebooks

test: lint bytecode engines ## Lint, then run the tests by two processes, or WORKERS=0 by one; ARGS="-k name" is passed to pytest
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

engines: ## Install sshd, Slurm and iproute2 for the tests, where that is possible; starts nothing; ENGINES=no leaves it out
	@ENGINES="$(ENGINES)" tests/engines.sh

lint: $(VENV)/.stamp ## Check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.stamp ## Rewrite the code in the project's style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(BENCH_VENV)/.stamp ## Measure, also against the peers; ARGS is passed on
	$(BENCH_VENV)/bin/python -m benchmarks $(ARGS)

bench-notebook: bytecode ## Measure what the user of a notebook waits for
	$(BIN)/python -m benchmarks.notebook $(ARGS)

bench-scale: bytecode ## Measure how it grows: 1,000 light ranks as 50 hosts on this machine, and 10,000 simulated
	$(BIN)/python -m benchmarks.scale $(ARGS)
	$(BIN)/python -m benchmarks.floor
	$(BIN)/python -m benchmarks.simulate

bench-links: bytecode ## Measure what a network between hosts costs, and how soon it is told that one is cut off
	$(BIN)/python -m benchmarks.links $(ARGS)

bench-faults: bytecode ## Make 200 random faults under traffic, and see that nothing is wrong; ARGS="--transfers 10000" for memory
	$(BIN)/python -m tests.failures.campaign $(ARGS)

clean: ## Remove what was built; the virtual environments stay
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path './.venv*' -prune -o -type d -name __pycache__ -exec rm -rf {} +

$(VENV)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) "$(TORCH)" hatchling
	$(BIN)/python $(PIP_INSTALL) --no-build-isolation -e ".[demo,dev,lab,test]"
	touch $@

$(BENCH_VENV)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python $(PIP_INSTALL) "$(TORCH)" hatchling
	$(BENCH_VENV)/bin/python $(PIP_INSTALL) --no-build-isolation -e ".[bench]"
	touch $@
