# Two doors: `make demo` and `make test`. Both make .venv when it is missing.
# PYTHON picks the interpreter, PIP_ARGS goes to pip (another index, say), WORKERS is for pytest.

PYTHON ?= python3
PIP_ARGS ?=
WORKERS ?= 2
TESTS ?= tests
VENV := .venv
BIN := $(VENV)/bin
SOURCES := src tests benchmarks docs

.PHONY: help demo test test-fast ci format format-check lint types imports docs tables golden clean
.NOTPARALLEL:

help:
	@echo "make demo         diagnose a real ViT, clean and with planted artifacts: runs/demo/report.html"
	@echo "make test         all tests          make test-fast    without the slow ones"
	@echo "make ci           every check: format, lint, types, imports, docs, tests"
	@echo "make format       let ruff format and fix"
	@echo "make docs         build the pages into site/"
	@echo "make tables       rewrite the generated tables in README.md"
	@echo "make golden       rewrite the lists of public names and command options"
	@echo "make clean        remove .venv and what was built"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "Python 3.10 or newer is needed: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "no venv in this Python (on Debian: apt install python3-venv)"; exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/demo.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install $(PIP_ARGS) --editable '.[demo]'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install $(PIP_ARGS) --editable '.[dev,demo,transformers,open-clip]'
	@touch $(VENV)/demo.stamp $@

demo: $(VENV)/demo.stamp
	$(BIN)/regista demo

# One torch thread a worker: more of them only fight for the cores.
test: $(VENV)/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(TESTS)

test-fast: $(VENV)/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "not slow" $(TESTS)

ci: format-check lint types imports docs test

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

format-check: $(VENV)/dev.stamp
	$(BIN)/ruff format --check $(SOURCES)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check $(SOURCES)

types: $(VENV)/dev.stamp
	$(BIN)/mypy

imports: $(VENV)/dev.stamp
	$(BIN)/lint-imports

docs: $(VENV)/dev.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

tables: $(VENV)/dev.stamp
	$(BIN)/python docs/tables.py

golden: $(VENV)/dev.stamp
	$(BIN)/python -m tests.guards.golden

clean:
	rm -rf $(VENV) site build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
