# Two commands do everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test lint test-gpu clean

help:  ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

demo: $(INSTALLED)  ## install, then the main job on this machine: train, sync two servers, verify
	$(BIN)/fp8bridge demo $(ARGS)

test: lint  ## install, then ruff, mypy and pytest (ARGS="-k name" picks tests)
	$(BIN)/pytest $(ARGS)

lint: $(INSTALLED)  ## install, then ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	scripts/typecheck $(BIN)/python

test-gpu:  ## the tests that need a CUDA device
	bash scripts/test_gpu.sh

clean:  ## remove the virtual environment, caches and builds
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# megatron-core goes in by itself: its metadata says Python >= 3.12, its wheels work on 3.11.
# Transformer Engine's Python layer goes beside site-packages: without its CUDA half it would break
# `import megatron.core` there. The tests of its tensor classes put it on the path (tests/adapters/te_stub.py).
$(INSTALLED): pyproject.toml constraints.txt Makefile
	@echo "Installing into $(VENV): a few minutes the first time."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) -e ".[dev,megatron,serve,bench,metrics]"
	@$(PIP_INSTALL) --no-deps --ignore-requires-python megatron-core
	@$(PIP_INSTALL) --upgrade --no-deps --target $(VENV)/te transformer-engine
	@touch $@
