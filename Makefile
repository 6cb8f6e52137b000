# Everything from a clean clone, with only Python (3.11 or later) and make. `make help` lists the targets.
# Another Python: make setup PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_STAMP := $(VENV)/.installed-for-tests
# A file's tests share what they start (ranks, workers). In the order of the folders, so that short files come last.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint format docs clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-14s %s\n", $$1, $$2 }'

setup: $(STAMP) ## build .venv with redline in it, once

demo: setup ## climb the ladder on the embedded tiny workload: ends with a table and an HTML page
	$(BIN)/redline ladder tiny

test: lint ## lint, check types, run the tests (those that need a GPU skip themselves without one)
	$(PYTEST) -m "not long"

test-all: lint ## the same with the tests that take minutes: ranks that are killed or hang, real ladders of own models
	$(PYTEST)

lint: $(TEST_STAMP) ## ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(TEST_STAMP) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup ## write docs/rungs and the README's tables from the rungs and the newest records
	$(BIN)/python tools/generate_docs.py

clean: ## remove the environment, caches and build products; runs/ and records/ stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find redline tests tools benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# The constraints pin torch: without them pip takes the newest, with gigabytes of CUDA packages.
# The stamp is touched last, so an install that failed half way is tried again.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
		echo "problem: there is no $(PYTHON) on the PATH"; \
		echo "why:     redline needs Python 3.11 or later"; \
		echo "fix:     install it, or name yours: make setup PYTHON=/path/to/python3.11"; exit 2; } >&2
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "problem: $(PYTHON) is $$($(PYTHON) --version 2>&1)"; \
		echo "why:     redline needs Python 3.11 or later"; \
		echo "fix:     name a newer one: make setup PYTHON=python3.11"; exit 2; } >&2
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e .
	@touch $@

$(TEST_STAMP): $(STAMP)
	$(BIN)/python -m pip install -c constraints.txt -e '.[test]'
	@touch $@
