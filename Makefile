# Two commands do everything on a fresh machine: `make serve` and `make test`. Everything lives in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PIP_ARGS ?=  # such as an index of CPU-only torch builds
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup serve test soak test-vllm bench bench-peers bench-gateways bench-gateway-peers check format model clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

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

# What only tests need: the SDKs of clients, NIXL, and the clients from npm where there is Node.js.
$(VENV)/.tests: $(VENV)/.engine
	$(PIP) install --quiet $(PIP_ARGS) --constraint constraints.txt --editable '.[engine,dev,clients,nixl]'
	@touch $@

tests/clients/node_modules/.installed: tests/clients/package-lock.json
	@mkdir -p $(@D)
	@if npm install --prefix tests/clients --no-save --no-audit --no-fund --loglevel error; then touch $@; \
	else echo "The clients can't be had from npm here: tests that drive them are skipped." >&2; fi

test: setup $(VENV)/.tests tests/clients/node_modules/.installed ## set up, then run the tests
	$(BIN)/python -m pytest $(ARGS)

soak: setup ## 1,000 requests with random aborts and 20 kills of either side of the split engine
	SOAK_REQUESTS=1000 SOAK_KILLS=20 $(BIN)/python -m pytest -s tests/e2e/test_e2e_soak.py $(ARGS)

test-vllm: setup $(VENV)/.tests ## drive a real vLLM prefill/decode pair on the CPU (see bench-peers)
	$(BIN)/python -m pytest -s -m vllm tests/vllm $(ARGS)

bench: setup ## measure this engine against others that are installed (ARGS=--quick for a smoke run)
	$(BIN)/kvgate bench $(ARGS)

bench-peers: $(VENV)/.engine ## install the engines to compare with into .peers (vLLM 3.5 GB, llama.cpp)
	$(BIN)/kvgate bench --install $(ARGS)

bench-gateways: $(VENV)/.engine ## measure what this gateway and others add to an upstream (ARGS=--quick for a smoke run)
	$(BIN)/kvgate bench gateway $(ARGS)

bench-gateway-peers: $(VENV)/.engine ## install the gateways to compare with into .peers (LiteLLM, Portkey, vllm-router)
	$(BIN)/kvgate bench gateway --install $(ARGS)

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
