# Two commands for a newcomer: `make demo` and `make test`. Both work on a fresh clone with Python, pip and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint real scglue clean

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

# the package scglue, whose imports warn of much, joins the environment for its own tests only
scglue: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[test,scglue]' --constraint constraints.txt
	$(BIN)/python -m pytest tests/test_scglue.py

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch --constraint constraints.txt
	$(BIN)/python -m pip install --quiet --editable '.[test]' --constraint constraints.txt
	touch $(STAMP)

clean:
	rm -rf $(VENV) demo build *.egg-info
