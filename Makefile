# Every target sets up .venv by itself; `make train` on a bare machine needs Python 3.11+, make and a package index only.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN  := $(VENV)/bin
PIP   = $(BIN)/python -m pip --disable-pip-version-check --no-input install --progress-bar off

# Options for the command itself, e.g. make train ARGS="--policy fp16 --epochs 1"
ARGS ?=

# The data sets: $TPUFLOW_DATA, else a shared folder beside the checkout; without either they are downloaded once into the user's cache.
ifeq ($(strip $(TPUFLOW_DATA)),)
TPUFLOW_DATA := $(abspath $(wildcard ../shared/data))
endif
export TPUFLOW_DATA

# Tests start a few hundred processes. Where bytecode may not be written, each would compile all of tpuflow: a second of its three.
unexport PYTHONDONTWRITEBYTECODE

# A comma in a call's argument would end it.
TORCH := .[torch,torch-models]

# pip talks to a log; only a failure is shown.
quietly = $(1) >>$(VENV)/pip.log 2>&1 || { tail -n 40 $(VENV)/pip.log; echo "set-up failed; the whole log: $(VENV)/pip.log"; exit 1; }

.PHONY: help train parity check lint test docs bench conformance release clean

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 12

train: $(VENV)/.runtime  ## train the MNIST example: five epochs, mixed precision
	@mkdir -p build
	$(BIN)/python -m train mnist --policy mixed --epochs 5 --json build/mnist.json $(ARGS)

parity: $(VENV)/.runtime  ## train in fp32, fp16 and mixed; compare every documented figure; writes parity.json
	$(BIN)/python -m train.parity $(ARGS)

check: lint  ## format, lint, types, layers, fast tests
	$(BIN)/python -m pytest -q tests/test_layers.py
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -m "not slow and not torch" --deselect tests/test_layers.py $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

test: $(VENV)/.dev $(VENV)/.torch  ## every test, the slow ones too
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(ARGS)

docs: $(VENV)/.docs $(VENV)/.torch  ## the pages and the Python reference as HTML: build/docs/index.html
	$(BIN)/sphinx-build -q -W --keep-going -E -b html -d build/doctrees docs build/docs
	@echo "open build/docs/index.html"

bench: $(VENV)/.dev $(VENV)/.torch  ## the table of bench/
	$(BIN)/python -m bench $(ARGS)

conformance: $(VENV)/.dev $(if $(EXAMPLES),$(VENV)/.examples)  ## public programs (EXAMPLES=folder of checkouts), JAX's tests (JAX_TESTS=) and StableHLO's (STABLEHLO=); writes docs/conformance.md
	@test -n "$(EXAMPLES)$(JAX_TESTS)$(STABLEHLO)" || { echo "say where checkouts of flax and others, of JAX or of StableHLO are: make conformance EXAMPLES=path JAX_TESTS=path STABLEHLO=path"; exit 2; }
	$(if $(EXAMPLES),$(BIN)/python -m bench.conformance $(EXAMPLES)/flax)
	$(if $(EXAMPLES),$(BIN)/python -m bench.public $(EXAMPLES) $(ARGS))
	$(if $(JAX_TESTS),$(BIN)/python -m bench.jax_tests $(JAX_TESTS) $(ARGS))
	$(if $(STABLEHLO),$(BIN)/python -m bench.stablehlo_data $(STABLEHLO) $(ARGS))

release: $(VENV)/.dev  ## wheel and sdist in dist/, checked, and the wheel tried in a fresh environment
	$(BIN)/python -m tests.release $(ARGS)

clean:  ## remove .venv and build products
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer with venv and pip found; install one or say make PYTHON=/path/to/python"; exit 1; }
	@echo "setting up $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml | $(BIN)/python
	@echo "installing tpuflow"
	@$(call quietly,$(PIP) -e .)
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@echo "installing tpuflow and the tools for its tests"
	@$(call quietly,$(PIP) -e '.[dev]')
	@touch $@ $(VENV)/.runtime

$(VENV)/.docs: pyproject.toml | $(VENV)/.dev
	@echo "installing Sphinx"
	@$(call quietly,$(PIP) -e '.[docs]')
	@touch $@

# The programs of numpyro want its version as their checkout has it.
$(VENV)/.examples: $(VENV)/.dev
	@echo "installing what public programs need"
	@$(call quietly,$(PIP) diffrax networkx numpyro==0.21.0)
	@touch $@

$(VENV)/.torch: pyproject.toml | $(VENV)/.dev
	@echo "installing PyTorch and models of it, which some tests and the benchmark compare with"
	@$(call quietly,$(PIP) -e '$(TORCH)')
	@touch $@
