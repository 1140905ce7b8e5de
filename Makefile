# From a clean clone: `make run` or `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Without the slow tests; `make test-all` runs all.
TESTS ?= -m "not slow"
# Test files in parallel; 0: one after another, which tests with real processes need.
WORKERS ?= auto

.PHONY: install run test test-all lint format types bench clean

install: $(STAMP)

# torch first: the pinned version is the CPU build where one is offered, and later packages do not
# replace it.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,fast,figures,watch,flower]"
	touch $(STAMP)

run: install
	$(BIN)/latecomer run

test: install
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile $(TESTS)

test-all: install
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: install
	$(BIN)/mypy

bench: install
	$(BIN)/python benchmarks/simulator.py --quick
	$(BIN)/python benchmarks/events.py --quick
	$(BIN)/python benchmarks/aggregation.py --quick
	$(BIN)/python benchmarks/scaling.py --quick
	$(BIN)/python benchmarks/memory.py --quick
	$(BIN)/python benchmarks/watching.py --rounds 2

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache
