# `make help` lists what can be done. Everything is kept in .venv and a model cache folder; `make clean` removes .venv.
#   PYTHON=python3.12   the Python to make .venv with (3.11 or newer)
#   SET=gpu             install the CUDA set instead of the CPU set
PYTHON ?= python3
SET ?= cpu
VENV := .venv
BIN := $(VENV)/bin
PINS := $(wildcard requirements/*)
STAMP := $(VENV)/installed-$(SET)

.PHONY: help setup engine image model quickstart test test-adapters lint clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## make .venv with every pinned package and this one

$(STAMP): $(PINS) pyproject.toml setup.py
	@sh requirements/install.sh "$(PYTHON)" "$(VENV)" "$(SET)"
	@touch $@

engine: setup ## make sure a Docker engine can be used (as root with apt: install and start one)
	@$(BIN)/python docker/ensure_engine.py

image: engine ## build the sandbox image
	@if $(BIN)/python docker/ensure_engine.py --check; then \
		$(BIN)/python -m roll_flash.sandboxes.images ensure; \
	else \
		echo "image: no Docker engine, so none is needed"; \
	fi

model: setup ## prepare SmolLM2-135M-Instruct in the model cache folder
	@$(BIN)/python -m roll_flash.models smollm2-135m

quickstart: image model ## set everything up, train, show the result
	@$(BIN)/roll-flash train configs/quickstart.yaml name=quickstart-$$(date +%Y%m%d-%H%M%S)

test: image model ## set everything up, run the tests
	@$(BIN)/python -m pytest

test-adapters: setup ## install reasoning-gym and textarena (one of their packages needs a compiler) and test the adapters
	@$(BIN)/pip install --quiet -e '.[reasoning-gym,textarena]'
	@$(BIN)/python -m pytest -m adapters tests/envs

lint: setup ## ruff, and mypy --strict on the packages as a wheel installs them
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@sh requirements/check_types.sh "$(BIN)"

clean: ## remove .venv and everything else that was built here
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
