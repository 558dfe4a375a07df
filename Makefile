# make help   lists what there is. Needs Python 3.11 or newer with venv and pip; everything else is installed into .venv.

PYTHON ?= python3
VENV   ?= .venv
# -e makes the environment read Paceline from src, so that a change counts at once. `make EDITABLE= ...` installs the built
# wheel in its place, as users do; .ci/run tests that.
EDITABLE ?= -e
READY  := $(VENV)/.ready
BIN    := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-system conformance campaign silentdist chaos compat lint format bench bench-many overhead scale gpu gpu2 compare docs examples dist clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: $(READY)  ## create the environment (the targets below do it by themselves)

demo: $(READY)  ## train on real digits with 1 process and with 2, and compare the models and their steps
	@$(BIN)/python examples/demo.py

# Test files that run at once. Many wait for processes that they have started, so that two keep two cores busy.
WORKERS ?= 2

test: $(READY)  ## all tests but the fuller matrices
	@$(PYTEST) -n $(WORKERS) --dist loadfile -m "not conformance and not full and not campaign and not system"

# PART=ci leaves out the tests marked `full`. .ci/run does so to stay short; run all of it before you close an issue.
conformance: $(VENV)/.trackers $(VENV)/.foreign $(VENV)/.onnx  ## the fuller matrices: jobs x strategies x world sizes against plain PyTorch; trackers; other libraries
	$(if $(filter-out ci,$(PART)),$(error make conformance PART=$(PART): there is no such part. Give PART=ci, or none for all))
	@$(PYTEST) -n $(WORKERS) --dist loadfile -m "(conformance or full) and not campaign$(if $(PART), and not full)"

# Needs root on Debian with slurm-wlm, munge, openmpi-bin, openssh-server, openssh-client, iproute2 and g++.
test-system: $(VENV)/.deepspeed $(VENV)/.system  ## with Slurm, Open MPI, sshd, hosts in network namespaces and DeepSpeed, all of them real; kills at random
	@$(PYTEST) -n $(WORKERS) --dist loadfile -m "system and not campaign" tests/system tests/strategies

campaign: $(VENV)/.deepspeed  ## what is too long for every change: the strategies on four replicas (half an hour on two cores)
	@$(PYTEST) -m campaign

# The cases are added to benchmarks/results/chaos.json. CASE="ddp-17" makes one again, and shows what its processes say.
CASES ?= 30
SEED ?= 0
chaos: $(READY)  ## kill processes of trainings at random times, and look at what is lost: CASES=500 (15 s each)
	@$(BIN)/python -m tests.chaos $(if $(CASE),--case "$(CASE)",--cases $(CASES) --seed $(SEED))

# Needs transformers, accelerate and lightning in the environment.
silentdist: $(READY)  ## score verify and doctor on 353 scripts, with silent faults or without (4 hours)
	@$(BIN)/python benchmarks/silentdist/score.py run
	@$(BIN)/python benchmarks/silentdist/score.py table

# What is tested is written in pyproject.toml and torch_private/support.py; environments are made in build/compat/.
VERSIONS ?= oldest newest

compat:  ## unit and two-process tests with the oldest and the newest Python and torch (6 GB each at the first time)
	@WORKERS=$(WORKERS) $(PYTHON) -m tests.compat $(VERSIONS)

# The data of the examples: make examples TEXT=FILE CIFAR10=FILE WIKITEXT=FOLDER BCCD=FILE. Each example says where to
# get it; a job whose data are not there is left out. JOBS="gan nanogpt" runs these alone.
TEXT     ?= data/tinyshakespeare/input.txt
CIFAR10  ?= data/cifar-10-python.tar.gz
WIKITEXT ?= data/wikitext-2
BCCD     ?= data/bccd.zip

examples: $(READY) $(VENV)/.foreign  ## the examples, small, on 1 and 2 processes: figures, and what verify says
	@TEXT="$(TEXT)" CIFAR10="$(CIFAR10)" WIKITEXT="$(WIKITEXT)" BCCD="$(BCCD)" \
	  $(BIN)/python benchmarks/all_examples.py $(if $(JOBS),--only $(JOBS))

lint: $(READY)  ## style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(READY)  ## lay the code out as `make lint` wants it
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# From the source tree, with the torch of .venv, or else of PYTHON: a machine with a GPU may have no network.
# PART is right, ranks, costs, steps or soak, each at most 9 minutes; each adds to the results, and writes their page.
GPU_PYTHON := $(if $(wildcard $(READY)),$(BIN)/python,$(PYTHON))
gpu:  ## what a machine with a CUDA device shows: make gpu PART=right; DRY=1 builds the checks and runs none
	@$(GPU_PYTHON) -c "import importlib.util as u, sys; sys.exit(not u.find_spec('torch'))" \
	  || { echo "make gpu: $(GPU_PYTHON) has no torch. Name one that has: make gpu PYTHON=..., or run make setup"; exit 1; }
	@PYTHONPATH=src $(GPU_PYTHON) -m benchmarks.gpu $(if $(PART),--part $(PART)) \
	  $(if $(DRY),--dry,--json $(or $(JSON),benchmarks/results/gpu.json) --page $(or $(PAGE),benchmarks/gpu.md))

gpu2:  ## what two CUDA devices show: NCCL between them, overlap, a rank that fails, Slurm's binding
	@$(MAKE) --no-print-directory gpu PART=several JSON=$(or $(JSON),benchmarks/results/gpu2.json) PAGE=$(or $(PAGE),benchmarks/gpu2.md)

# PROCESSES=4 measures 4 processes of each contender. MODELS="mlp gpt" measures these alone, SECONDS each, and
# CONTENDERS="hand ddp" those whose names contain one of these words; what the file has of other models stays.
# TensorFlow has an environment of its own, since it and torch want other versions of the same packages. An hour for
# all, on a machine with nothing else to do.
SECONDS ?= 180
bench: $(VENV)/.foreign $(VENV)/.deepspeed build/tensorflow/.ready  ## Paceline beside hand-written steps, Accelerate, Fabric, DeepSpeed and tf.distribute: docs/benchmarks.md
	@$(BIN)/python -m benchmarks.suite --processes $(or $(PROCESSES),2) --seconds $(SECONDS) --cifar10 "$(CIFAR10)" --text "$(TEXT)" \
	  $(if $(MODELS),--models $(MODELS)) $(if $(CONTENDERS),--contenders $(CONTENDERS)) $(if $(NOTE),--note "$(NOTE)")

scale: $(READY)  ## memory, messages and store operations of one of 2 to 1,024 emulated ranks: docs/plan.md
	@$(BIN)/python benchmarks/scale.py --json $(or $(JSON),benchmarks/results/scale.json)

overhead: $(READY)  ## what a step costs beside hand-written DDP, in microseconds
	@$(BIN)/paceline run --nproc 2 benchmarks/overhead.py

# For a machine with at least as many cores as processes: with fewer, the processes wait for cores.
bench-many: $(READY)  ## sums and steps of PROCESSES=8 processes of this machine, beside gloo and hand-written DDP: five minutes
	@$(BIN)/paceline run --nproc $(or $(PROCESSES),8) benchmarks/shared_memory.py --json benchmarks/results/shared_memory_$(or $(PROCESSES),8).json
	@$(BIN)/paceline run --nproc $(or $(PROCESSES),8) benchmarks/many.py --seconds 60 --json benchmarks/results/many_$(or $(PROCESSES),8).json

build/tensorflow/.ready: benchmarks/suite/tensorflow.txt
	@rm -rf build/tensorflow
	@$(PYTHON) -m venv build/tensorflow
	@build/tensorflow/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/suite/tensorflow.txt \
	  && touch $@ || echo "make bench: TensorFlow cannot be installed (pip's message is above); tf.distribute is left out."

compare: $(READY)  ## every strategy on two examples, a table for each (docs/compare.md)
	@$(BIN)/paceline compare --nproc 2 examples/digits.py
	@if [ -f "$(TEXT)" ]; then $(BIN)/paceline compare --nproc 2 examples/char_gpt.py --data "$(TEXT)"; \
	  else echo "make compare: examples/char_gpt.py is left out, since there is no '$(TEXT)': make compare TEXT=FILE"; fi

docs: $(VENV)/.docs  ## build the site into site/ (its tools are installed at the first time)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "site/index.html is ready; \`$(BIN)/mkdocs serve\` shows it at http://127.0.0.1:8000"

dist: $(READY)  ## build wheel and sdist into dist/ (RELEASING.md)
	@rm -rf dist
	@$(BIN)/python -c 'from setuptools import build_meta; build_meta.build_sdist("dist"); build_meta.build_wheel("dist")' >/dev/null
	@ls dist

clean:  ## remove the environment, caches and builds
	@rm -rf $(VENV) site build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment is whole only when the last command has written $(READY). A set-up that was interrupted has no such
# file, and a changed pin makes it old: either way the next one starts from nothing.
$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make: there is no '$(PYTHON)'. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: '$(PYTHON)' is $$($(PYTHON) --version 2>&1). The pinned environment (constraints.txt) needs Python 3.11 or newer;" >&2; \
	  echo "      Paceline itself runs on 3.10 too. Name one: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@test ! -e $(VENV) || test -e $(VENV)/.by-make || test -e $@ || { \
	  echo "make: $(VENV) was not made by make, and setting it up would delete it. Move it, or name another: make VENV=env $(MAKECMDGOALS)" >&2; exit 1; }
	@rm -rf $(VENV) && mkdir -p $(VENV) && touch $(VENV)/.by-make
	@echo "Setting up $(VENV) with $$($(PYTHON) --version): about 1 GB to fetch, one to five minutes, once."
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "make: '$(PYTHON) -m venv' failed. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools \
	  && $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation $(EDITABLE) '.[dev]' \
	  || { echo "make: installing into $(VENV) failed (pip's message is above). Nothing half done is kept: run make again." >&2; \
	       rm -rf $(VENV); exit 1; }
	@touch $@
	@echo "$(VENV) is ready."

$(VENV)/.trackers: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation $(EDITABLE) '.[mlflow,wandb]'
	@touch $@

$(VENV)/.foreign: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation $(EDITABLE) '.[foreign]'
	@touch $@

$(VENV)/.onnx: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation $(EDITABLE) '.[onnx]'
	@touch $@

$(VENV)/.deepspeed: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation $(EDITABLE) '.[deepspeed]'
	@echo "Compiling DeepSpeed's extension for CPUs, once (a minute or two; not within a test's deadline)."
	@DS_ACCELERATOR=cpu PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -c \
	  'from deepspeed.accelerator import get_accelerator as on; on().create_op_builder("ShareMemCommBuilder").load()' >/dev/null
	@touch $@

$(VENV)/.system: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation $(EDITABLE) '.[system]'
	@touch $@

$(VENV)/.docs: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation $(EDITABLE) '.[docs]'
	@touch $@
