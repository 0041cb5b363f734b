# Two commands: `make tables` and `make test`. Each creates its own virtual environment with pinned packages.
# `make test PYTHON=python3.12` chooses the interpreter.

CANDIDATES := python3 python3.12 python3.13 python3.14 python3.11 python
PYTHON ?= $(shell for p in $(CANDIDATES); do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
ifeq ($(VERSION),)
  $(error no usable Python ("$(PYTHON)"): Python 3.11 or newer is needed, name it with PYTHON=...)
endif

VENV := .venv/$(VERSION)
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: tables test slow lint types unit clean
tables: $(STAMP)
	$(BIN)/python -m experiments.tables --out build/tables

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright --pythonpath $(BIN)/python

unit: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -q $(TESTS)

slow: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -q -m slow $(TESTS)

$(STAMP): requirements.txt setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

clean:
	rm -rf build .venv
