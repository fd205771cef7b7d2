# Bare `make` lists the targets. Every target does its own set-up, in .venv.
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help install demo test test-end-to-end scenarios test-architectures check format clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 28

install: .venv/installed ## create .venv with all that is needed but for test-architectures, in the tested versions

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[engine,service,dev]'
	touch $@

demo: install ## tune a real two-rank training run from start to end (under two minutes)
	$(BIN)/dear-tune demo

test: install ## run the test suite, with the engine's scenarios (under ten minutes)
	$(BIN)/python -m pytest --ignore=tests/end_to_end --ignore=tests/architectures

test-end-to-end: install ## run wheels in fresh environments, the demo and the examples, whole
	$(BIN)/python -m pytest tests/end_to_end

scenarios: install ## run the engine's scenarios, and write the table in docs/engine.md from what came out
	$(BIN)/python -m pytest tests/engine/test_scenarios.py tests/engine/test_scenario_processes.py --write-scenarios

test-architectures: .venv/installed-architectures ## train public architectures, which it installs first, on the engine
	$(BIN)/python -m pytest tests/architectures

.venv/installed-architectures: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[engine,architectures]'
	touch $@

check: install ## formatting, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove .venv, builds and caches
	rm -rf .venv dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
