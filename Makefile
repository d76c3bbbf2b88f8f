# Two commands for a newcomer: `make demo` and `make test`. Both work on a fresh clone with Python, pip and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS := $(VENV)-docs
EXTRA := import sys, tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies'][sys.argv[1]], sep='\n')

.PHONY: demo test lint docs real scglue clean

demo: $(STAMP)
	$(BIN)/lightning-amp demo --out demo

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" tests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# reads the source only, so it installs neither torch nor this package
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	@echo "wrote site/index.html"

real: $(STAMP)
	$(BIN)/python -m pytest -m slow tests

# the package scglue, whose imports warn of much, joins the environment for its own tests only
scglue: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[test,scglue]' --constraint constraints.txt
	$(BIN)/python -m pytest tests/models/test_scglue.py

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch --constraint constraints.txt
	$(BIN)/python -m pip install --quiet --editable '.[test]' --constraint constraints.txt
	touch $(STAMP)

$(DOCS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -c "$(EXTRA)" docs > $(DOCS)/docs.txt
	$(DOCS)/bin/python -m pip install --quiet --requirement $(DOCS)/docs.txt --constraint constraints.txt
	touch $(DOCS)/.installed

clean:
	rm -rf $(VENV) $(DOCS) demo site build *.egg-info
