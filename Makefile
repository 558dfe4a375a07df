# make help   lists what there is. Needs Python 3.11 or newer with venv and pip; everything else is installed into .venv.

PYTHON ?= python3
VENV   ?= .venv
READY  := $(VENV)/.ready
BIN    := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup demo test conformance campaign corpus deepspeed compat lint format bench gpu compare docs examples dist clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: $(READY)  ## create the environment (the targets below do it by themselves)

demo: $(READY)  ## train on real digits with 1 process and with 2, and compare the models and their steps
	@$(BIN)/python examples/demo.py

# Test files that run at once. Many wait for processes that they have started, so that two keep two cores busy.
WORKERS ?= 2

test: $(READY)  ## all tests but the fuller matrices
	@$(PYTEST) -n $(WORKERS) --dist loadfile -m "not conformance and not campaign"

conformance: $(VENV)/.trackers $(VENV)/.foreign  ## the fuller matrices: jobs x strategies x world sizes against plain PyTorch; trackers; other libraries
	@$(PYTEST) -n $(WORKERS) --dist loadfile -m conformance

campaign: $(READY)  ## what is too long for every change: the strategies on four replicas (half an hour on two cores)
	@$(PYTEST) -m campaign

# Needs transformers, accelerate and lightning beside the environment; a script that asks for a missing one is left out.
corpus: $(READY)  ## what verify and doctor make of 171 scripts that were written without them in mind (an hour)
	@for tool in verify doctor; do \
	  $(BIN)/python -m tests.corpus.measure run $$tool build/corpus_$$tool.json \
	    && $(BIN)/python -m tests.corpus.measure table build/corpus_$$tool.json || exit 1; done

deepspeed: $(VENV)/.deepspeed  ## strategy deepspeed against plain PyTorch (installs DeepSpeed; needs a C++ compiler)
	@$(PYTEST) tests/strategies/test_deepspeed.py tests/strategies/test_deepspeed_stages.py

# What is tested is written in pyproject.toml and torch_private/support.py; environments are made in build/compat/.
VERSIONS ?= oldest newest

compat:  ## unit and two-process tests with the oldest and the newest Python and torch (6 GB each at the first time)
	@WORKERS=$(WORKERS) $(PYTHON) -m tests.compat $(VERSIONS)

# The data of the examples: make examples TEXT=FILE CIFAR10=FILE. Each example says where to get it.
TEXT    ?= data/tinyshakespeare/input.txt
CIFAR10 ?= data/cifar-10-python.tar.gz

examples: $(READY)  ## run the examples on 2 processes, some hundred steps each (half an hour on two cores)
	@$(BIN)/paceline run --nproc 2 examples/digits.py
	@$(BIN)/python examples/before_and_after/image_before.py
	@$(BIN)/paceline run --nproc 2 examples/before_and_after/image_after.py
	@$(BIN)/python examples/before_and_after/text_before.py --data "$(TEXT)" --epochs 1
	@$(BIN)/paceline run --nproc 2 examples/before_and_after/text_after.py --data "$(TEXT)" --epochs 1
	@$(BIN)/paceline run --nproc 2 examples/char_gpt.py --data "$(TEXT)" --steps 600
	@$(BIN)/paceline run --nproc 2 examples/cifar10_mobilenetv2.py --data "$(CIFAR10)" --limit 12800 --epochs 3

lint: $(READY)  ## style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(READY)  ## lay the code out as `make lint` wants it
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# From the source tree, with the torch of .venv, or else of PYTHON: a machine with a GPU may have no network.
# PART is right, ranks or costs.
GPU_PYTHON := $(if $(wildcard $(READY)),$(BIN)/python,$(PYTHON))
gpu:  ## what a machine with a CUDA device shows: make gpu PART=right JSON=FILE; DRY=1 builds the checks and runs none
	@$(GPU_PYTHON) -c "import importlib.util as u, sys; sys.exit(not u.find_spec('torch'))" \
	  || { echo "make gpu: $(GPU_PYTHON) has no torch. Name one that has: make gpu PYTHON=..., or run make setup"; exit 1; }
	@PYTHONPATH=src $(GPU_PYTHON) -m benchmarks.gpu $(if $(PART),--part $(PART)) \
	  $(if $(DRY),--dry,--json $(or $(JSON),benchmarks/results/gpu.json))

bench: $(READY)  ## what a step costs beside hand-written DDP
	@$(BIN)/paceline run --nproc 2 benchmarks/overhead.py

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
	@rm -rf $(VENV)
	@echo "Setting up $(VENV) with $$($(PYTHON) --version): about 1 GB to fetch, one to five minutes, once."
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "make: '$(PYTHON) -m venv' failed. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools \
	  && $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]' \
	  || { echo "make: installing into $(VENV) failed (pip's message is above). Nothing half done is kept: run make again." >&2; \
	       rm -rf $(VENV); exit 1; }
	@touch $@
	@echo "$(VENV) is ready."

$(VENV)/.trackers: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[mlflow,wandb]'
	@touch $@

$(VENV)/.foreign: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[foreign]'
	@touch $@

$(VENV)/.deepspeed: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[deepspeed]'
	@touch $@

$(VENV)/.docs: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[docs]'
	@touch $@
