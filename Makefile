# Two commands for a newcomer: `make demo` and `make test`. Both work on a fresh clone with Python, pip and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint real clean

demo: $(STAMP)
	$(BIN)/lightning-amp demo --out demo

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" tests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

real: $(STAMP)
	$(BIN)/python -m pytest -m slow tests

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch --constraint constraints.txt
	$(BIN)/python -m pip install --quiet --editable '.[test]' --constraint constraints.txt
	touch $(STAMP)

clean:
	rm -rf $(VENV) demo build *.egg-info
