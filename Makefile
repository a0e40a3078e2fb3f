PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: train test lint format

train: $(INSTALLED)
	$(BIN)/python examples/train.py

test: $(INSTALLED)
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch goes first and alone: resolved together with its dependants, pip may prefer a newer CUDA build.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(BIN)/pip install -e '.[dev,plot]' -c constraints.txt
	touch $@
