# `make help` lists what can be done. Everything is kept in .venv, .venv-adapters, .venv-docs and a model cache folder;
# `make clean` removes the first three.
#   PYTHON=python3.12   the Python to make .venv with (3.11 or newer)
#   SET=gpu             install the CUDA set instead of the CPU set
#   PROCESSES=4         processes of `make test`, else 3: one more than most small machines have cores, as tests often wait
PYTHON ?= python3
SET ?= cpu
PROCESSES ?= 3
VENV := .venv
BIN := $(VENV)/bin
ADAPTERS := .venv-adapters
ADAPTERS_PINS := requirements/adapters.txt requirements/install_adapters.sh requirements/mcp_servers.txt requirements/mcp_servers_1.txt requirements/verifiers_0_4.txt
DOCS := .venv-docs
PINS := $(filter-out $(ADAPTERS_PINS) requirements/agents.txt requirements/docs.txt,$(wildcard requirements/*))
STAMP := $(VENV)/installed-$(SET)

.PHONY: help setup engine browser image agents-image browser-image training-image model quickstart gpu-check test test-nightly test-adapters benchmarks report lint docs clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## make .venv with every pinned package and this one

$(STAMP): $(PINS) pyproject.toml setup.py
	@sh requirements/install.sh "$(PYTHON)" "$(VENV)" "$(SET)"
	@touch $@

engine: setup ## make sure a Docker engine can be used (as root with apt: install and start one)
	@$(BIN)/python docker/ensure_engine.py

browser: setup ## make sure the dashboard's tests have Chromium (as root with apt: install it)
	@$(BIN)/python docker/ensure_browser.py

image: engine ## build the sandbox image
	@$(BIN)/python docker/ensure_image.py

agents-image: image ## build the image of the third-party agents (about a minute, once)
	@$(BIN)/python docker/agents_image.py

browser-image: engine ## build the image with Chromium, for MiniWoB-v0 (a minute, once)
	@$(BIN)/python docker/browser_image.py

training-image: engine ## build the image for nodes of a cluster (configs/cluster; SET=gpu for CUDA; minutes)
	@$(BIN)/python docker/training_image.py $(SET)

model: setup ## prepare SmolLM2-135M-Instruct in the model cache folder
	@$(BIN)/python -m roll_flash.models.prepare smollm2-135m

quickstart: image model ## set everything up, train, show the result
	@$(BIN)/roll-flash train configs/quickstart.yaml name=quickstart-$$(date +%Y%m%d-%H%M%S)

gpu-check: setup ## try everything that uses a GPU, about ten minutes, and write a report (SET=gpu; docs/gpu.md)
	@$(BIN)/python -m roll_flash gpu-check

test: agents-image model browser ## set everything up, run the tests, those of the adapters too
	@$(BIN)/python -m pytest -n $(PROCESSES)
	@$(MAKE) --no-print-directory test-adapters

test-nightly: agents-image model browser $(ADAPTERS)/installed ## run the tests that are too long for each change, and each benchmark briefly
	@$(BIN)/python -m pytest -m nightly tests
	@$(BIN)/python benchmarks/all.py --quick

test-adapters: browser-image $(ADAPTERS)/installed ## test adapters, exporters and Tinker's API with the packages that they are for
	@$(ADAPTERS)/bin/python -m pytest -m adapters tests/envs tests/monitor tests/tinker_api

$(ADAPTERS)/installed: $(ADAPTERS_PINS) | $(STAMP)
	@sh requirements/install_adapters.sh "$(VENV)" "$(ADAPTERS)"
	@touch $@

benchmarks: agents-image model $(ADAPTERS)/installed ## regenerate all of benchmarks/results and mark what changed (hours, on a quiet machine)
	@$(BIN)/python benchmarks/all.py

report: benchmarks ## the same, and write docs/report.md: claims, and what was measured
	@$(BIN)/python benchmarks/report.py

lint: setup ## ruff, mypy --strict, and the layers of the packages
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy .
	@$(BIN)/lint-imports --no-logo --no-cache

docs: $(DOCS)/installed ## build the documentation site into build/docs/site (needs no other target)
	@$(DOCS)/bin/python docs/tools/site.py

$(DOCS)/installed: requirements/docs.txt
	@rm -rf $(DOCS)
	@"$(PYTHON)" -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-compile --no-deps -r $<
	@touch $@

clean: ## remove .venv and everything else that was built here
	rm -rf $(VENV) $(ADAPTERS) $(DOCS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
