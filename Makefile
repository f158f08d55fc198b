# Two commands from clone to result: `make run` and `make test`. Both need only Python 3.11+ and make.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: run test quick docs bench audit nightly clean

run: .venv/core ## install and run the quickstart
	$(BIN)/mutirao run quickstart

test: .venv/dev ## install what tests need, then lint, type-check and test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir .venv/site
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder # the slow ones first: they wait for a network

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

.venv/torch: constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0
	touch $@

.venv/core: .venv/torch pyproject.toml $(wildcard src/mutirao/training/engine/*.[ch])
	$(PIP) --editable .
	touch $@

.venv/dev: .venv/core
	$(PIP) --editable '.[flower,slides,onnx,ranking,recsys,privacy,dash,parquet,mlflow,tensorboard,tune]' $$($(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['dependency-groups']['dev'])")
	$(PIP) --no-deps timm # alone: its torchvision is of another build than our torch, and tests bring a stand-in
	touch $@

clean:
	rm -rf .venv site .mypy_cache .ruff_cache .pytest_cache .hypothesis
