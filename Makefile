# Every target installs what it needs; if nothing changed, that takes a second.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# See tests/conftest.py; `ARGS="-n 0"` runs one test after the other, in one process.
WORKERS := -n auto --dist loadfile --no-loadscope-reorder

# Tests start hundreds of processes; without bytecode, each would compile the same modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install install-dev serve chat test test-long test-fast test-page test-gpu test-real test-clients check format bench docs clean help

install: $(VENV)/installed  ## Headrace in .venv, and the demo model (98 MB) in ~/.cache/headrace
	@$(BIN)/python -m headrace.demo.fetch || true

install-dev: $(VENV)/installed-dev  ## the same, with the tools for tests and checks

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch comes from the range in pyproject.toml; pip reports only problems. pip uses one core; the
# others compile the CPU kernels meanwhile, which the first start would otherwise wait for. If that
# fails, the first start reports why.
KERNELS := nice $(PYTHON) -c 'from kernels.cpu.build import build; build()' >/dev/null 2>&1
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
pip_install = $(KERNELS) & $(PIP) -e '$(1)'; status=$$?; wait; exit $$status
# pip would compile one file at a time, which is half of its time. The excluded files, and files
# that this Python cannot parse, are compiled when they are imported.
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '/(tests?|testing|models|_inductor|mypyc?|networkx)/' \
	$(VENV)/lib/python*/site-packages || true
$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	@echo "Installing Headrace and what it needs into $(VENV) (the first time takes a minute or two)"
	@$(call pip_install,.)
	@$(COMPILE)
	@touch $@

$(VENV)/installed-dev: pyproject.toml | $(VENV)/bin/python
	@echo "Installing Headrace and its test tools into $(VENV)"
	@$(call pip_install,.[dev])
	@$(COMPILE)
	@touch $@ $(VENV)/installed

serve: install  ## serve the demo model; make serve ARGS="--port 8000 --model-path DIR"
	$(BIN)/python -m server.launch $(ARGS)

chat: install  ## talk to the server that make serve started
	$(BIN)/headrace chat $(ARGS)

test: install-dev  ## all tests; make test ARGS="-k radix"
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

test-long: install-dev  ## all tests and the long forms of some, which show the same more often
	$(BIN)/python -m pytest $(WORKERS) --long $(ARGS)

test-fast: install-dev  ## the quick tests, in under two minutes on two cores
	$(BIN)/python -m pytest $(WORKERS) -m "not slow" tests/unit tests/structure $(ARGS)

test-page: install-dev  ## the tests of the page at /, in headless Chromium (Debian's package chromium)
	$(BIN)/python -m pytest -n 0 tests/page $(ARGS)

# One process: the GPU is not shared.
test-gpu: install-dev  ## the tests of what a GPU computes, on a machine with one or two
	$(BIN)/python -m pytest tests/gpu $(ARGS)

test-real: install-dev  ## the tests with three real GGUF models, which it fetches (840 MB)
	$(BIN)/python -m tools.real_models
	$(BIN)/python -m pytest -n 0 tests/real $(ARGS)

# Clients exclude one another's dependencies: tests/clients/environments.py makes one for each.
test-clients: install-dev  ## the tests with real clients, installed apart; make test-clients ARGS="litellm outlines"
	$(BIN)/python -m tests.clients $(ARGS)

check: install-dev  ## what CI checks besides the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -n 2
	$(BIN)/mypy tests/typing
	$(BIN)/lint-imports
	$(BIN)/python -m docs.generate --check

format: install-dev  ## rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install-dev  ## the CPU benchmark against transformers
	$(BIN)/python -m benchmarks.cpu_engine $(ARGS)

docs: install-dev  ## renew the generated pages
	$(BIN)/python -m docs.generate

clean:  ## remove .venv and everything that is built or cached
	rm -rf $(VENV) .venv-clients build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

help:  ## this list
	@awk -F ':.*## +' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
