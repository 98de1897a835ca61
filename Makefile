# One line per target; `make help` prints them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: help setup run test lint types layers unit search compliance bench clean

help:        ## show this help
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t14

setup: $(VENV)/.ready   ## create .venv with the package, all extras and the tools

$(VENV)/.ready: pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@$(PYTHON) scripts/system_packages.py
	@touch $@

run: setup   ## start the server on loopback and say how to use it
	@$(BIN)/exec-server --listen ws://127.0.0.1:0 --hello

test: lint types layers unit   ## everything that can fail here: lint, types, layers, tests

lint: setup  ## ruff
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: setup ## mypy --strict
	$(BIN)/mypy

layers: setup ## rooms import one way only
	$(BIN)/lint-imports

unit: setup  ## the test suite
	$(BIN)/pytest -n 4

search: setup ## the property tests with examples not tried before, until one fails or you stop it
	@while HYPOTHESIS_PROFILE=search $(BIN)/pytest -q -n 4 -m hypothesis; do :; done

compliance: setup  ## the real reference binary on the other end, both ways
	$(BIN)/python -m compliance

bench: setup ## ours and the reference side by side; writes benchmarks/results.json
	$(BIN)/python -m benchmarks

clean:       ## remove what the other targets made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .coverage .import_linter_cache
