# Two commands for a newcomer: `make demo` and `make test`. Both work on a fresh clone with Python, pip and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS := $(VENV)-docs
LOWEST := $(VENV)-lowest
WHEEL := $(VENV)-wheel
ZOO := $(VENV)-zoo
# two at a time, each with one thread; a file's tests stay together, for they share what is made once
PYTEST := -n 2 --dist loadfile
EXTRA := import sys, tomllib; found = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; \
	print(*(line for name in sys.argv[1:] for line in found[name]), sep='\n')

.PHONY: demo check fast test lowest full release mutants lint docs real extras libraries zoo wheel installed clean

demo: $(STAMP)
	$(BIN)/lightning-amp demo --out demo

# what one change is tried with again and again
check: $(STAMP)
	$(MAKE) --no-print-directory --jobs 2 --output-sync lint fast

fast: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST) -m "not (ranks or long or alone or full or exhaustive or slow)" tests

# the fast ones, and those of several ranks
test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST) -m "not (long or alone or full or exhaustive or slow or release)" tests

# those of `make test` too, and all that take longer: in one run, for files with tests of several kinds share what is
# made once; then ranks that fail
full: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST) -m "not (alone or slow or release)" tests
	$(BIN)/python -m pytest -m "alone and not slow" tests/lightning/faults

# the lowest versions that pyproject.toml allows, torch's CUDA build among them, in an environment apart; old packages
# warn of each other, so that here a warning is no error. Only the folders that call the most of other packages; before a
# release all
LOWEST_TESTS ?= tests/cli tests/data tests/sharding tests/footprint tests/graph tests/lightning tests/models
lowest: $(LOWEST)/.installed
	$(LOWEST)/bin/python -m pytest $(PYTEST) -o filterwarnings=default --disable-warnings \
		-m "not (ranks or long or alone or full or exhaustive or slow)" $(LOWEST_TESTS)
	$(LOWEST)/bin/lightning-amp demo --out $(LOWEST)/demo

# before a release: also the rows of matrices that `make full` leaves out, packages that few tests need, all tests with
# the lowest versions, public models
release: full
	$(BIN)/python -m pytest $(PYTEST) -m release tests
	$(MAKE) extras installed
	$(MAKE) lowest LOWEST_TESTS=tests
	$(MAKE) zoo

# edits of the files that matter, which their tests have to notice; before a release
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants

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
	$(BIN)/python -m pytest -m "slow and not release" tests

# the wheel has every file: a command runs from it alone
wheel: $(STAMP)
	rm -rf dist $(WHEEL)
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(BIN)/python -m pip install --quiet --no-deps --target $(WHEEL) dist/*.whl
	cd $(WHEEL) && PYTHONPATH=. ../$(BIN)/python -c "import lightning_amp.cli.main as command; \
		assert '$(WHEEL)' in command.__file__; command.main(['plan', '--help'])" > /dev/null

# what a user installs: the wheel in an environment that has nothing else, run outside of the sources
installed: wheel
	rm -rf $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install --quiet torch --constraint constraints.txt
	$(WHEEL)/bin/python -m pip install --quiet dist/*.whl --constraint constraints.txt
	cd $(WHEEL) && bin/lightning-amp demo --out demo
	test -s $(WHEEL)/demo/predictions/embedding.png

# what joins the environment for its own tests only: the package scglue, whose imports warn of much, and transformers,
# for the three of the examples that are HuggingFace's
extras: $(STAMP)
	$(BIN)/python -c "$(EXTRA)" scglue any-module > $(VENV)/extras.txt
	$(BIN)/python -m pip install --quiet --requirement $(VENV)/extras.txt --constraint constraints.txt
	$(BIN)/python -m pytest $(PYTEST) -m "not exhaustive" -k "scglue or geneformer or gpt2 or vit" \
		tests/models tests/footprint tests/graph

# one model of each public library that works without torchvision, under half of its bytes; they join the environment
libraries: $(STAMP)
	$(BIN)/python -c "$(EXTRA)" zoo | grep -vE "^(timm|torchvision|segmentation|vit-pytorch)" > $(VENV)/libraries.txt
	$(BIN)/python -m pip install --quiet --requirement $(VENV)/libraries.txt --constraint constraints.txt
	$(BIN)/python -m benchmarks zoo --quick

# one model of each public library under half of its bytes; before a release
zoo: $(ZOO)/.installed
	$(ZOO)/bin/python -m benchmarks zoo --quick

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch --constraint constraints.txt
	$(BIN)/python -m pip install --quiet --editable '.[test,lint]' --constraint constraints.txt
	touch $(STAMP)

$(LOWEST)/.installed: pyproject.toml constraints.txt .ci/lowest.py
	$(PYTHON) -m venv $(LOWEST)
	$(PYTHON) .ci/lowest.py > $(LOWEST)/lowest.txt
	$(LOWEST)/bin/python -m pip install --quiet --editable '.[test]' --constraint $(LOWEST)/lowest.txt
	touch $(LOWEST)/.installed

# with the torch of its torchvision, which is newer than that of constraints.txt
$(ZOO)/.installed: pyproject.toml
	$(PYTHON) -m venv $(ZOO)
	$(ZOO)/bin/python -m pip install --quiet --editable '.[test,zoo]'
	touch $(ZOO)/.installed

$(DOCS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -c "$(EXTRA)" docs > $(DOCS)/docs.txt
	$(DOCS)/bin/python -m pip install --quiet --requirement $(DOCS)/docs.txt --constraint constraints.txt
	touch $(DOCS)/.installed

clean:
	rm -rf $(VENV) $(LOWEST) $(DOCS) $(WHEEL) $(ZOO) demo dist site build *.egg-info
