# Two commands from clone to result: `make run` and `make test`. Both need only Python 3.11+ and make.
PYTHON ?= python3
TORCH ?= cpu# or cuda; scripts/install.sh says where it comes from
BIN := .venv/bin
WORKERS ?= 4# processes of tests: many of them wait for a network or a browser
export PYTHON TORCH

.PHONY: run test test-slow lint type site unit docs bench audit nightly dist clean

run: .venv/core ## install and run the quickstart
	$(BIN)/mutirao run quickstart

test: lint type site unit ## all that is checked before a commit: within ten minutes on two cores

lint: .venv/dev ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: .venv/dev ## mypy, strict
	$(BIN)/mypy

site: .venv/dev ## the documentation builds without a warning
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir .venv/site

unit: .venv/dev ## the quick tests, those that are not marked slow
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow"

test-slow: .venv/dev ## what waits or repeats, and property tests with many examples; measures coverage
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "slow or hypothesis" \
	  --hypothesis-profile=thorough --cov=mutirao --cov-report=
	@echo "coverage of the slow tests: $$($(BIN)/coverage report --format=total) % of the lines of src"

docs: .venv/dev ## build the documentation site into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

audit: .venv/dev ## known holes and licences of what is installed
	$(BIN)/python scripts/audit.py

nightly: .venv/dev ## the tests that touch Flower, with the newest Flower that installs
	$(BIN)/python scripts/nightly.py

bench: .venv/core ## compare with Flower, pfl-research and a plain loop; BENCH="--job M" for less
	$(BIN)/python -m benchmarks $(BENCH)

dist: .venv/dev ## build the sdist and, from it, the wheel, into dist/
	rm -rf dist
	$(BIN)/uv build

.venv/torch-$(TORCH): constraints.txt
	scripts/install.sh torch
	touch $@

.venv/core: .venv/torch-$(TORCH) pyproject.toml $(wildcard src/mutirao/training/engine/*.[ch])
	scripts/install.sh core
	touch $@

.venv/dev: .venv/core
	scripts/install.sh dev
	touch $@

clean:
	rm -rf .venv dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
