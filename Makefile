# Two commands from clone to result: `make run` and `make test`. Both need only Python 3.11+ and make.
PYTHON ?= python3
TORCH ?= cpu# or cuda; scripts/install.sh says where it comes from
BIN := .venv/bin
export PYTHON TORCH

.PHONY: run test quick docs bench audit nightly dist clean

run: .venv/core ## install and run the quickstart
	$(BIN)/mutirao run quickstart

test: .venv/dev ## install what tests need, then lint, type-check and test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir .venv/site
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder # the slow ones first: they wait for a network

quick: .venv/dev ## the tests without the slow ones, for while you work
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

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
