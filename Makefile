# Two commands do everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo demo-sglang test lint test-sglang test-faults fuzz soak test-vllm test-gpu test-frameworks docs clean

help:  ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

demo: $(INSTALLED)  ## install, then the main job on this machine: train, sync two servers, verify
	$(BIN)/fp8bridge demo $(ARGS)

demo-sglang: $(INSTALLED)  ## the same against real SGLang servers on this CPU (installs them the first time)
	@scripts/sglang_cpu/install.sh 0.5.23 .sglang/0.5.23
	FP8BRIDGE_SGLANG=".sglang/0.5.23/bin/python scripts/sglang_cpu/launch.py" $(BIN)/fp8bridge demo --server sglang $(ARGS)

test: lint  ## install, then ruff, mypy and pytest (ARGS="-k name" picks tests)
	$(BIN)/pytest $(ARGS)

lint: $(INSTALLED)  ## install, then ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	scripts/typecheck $(BIN)/python

test-sglang: $(INSTALLED)  ## real SGLang servers of two versions on the CPU (installs them the first time)
	@for version in 0.5.23 0.5.17; do scripts/sglang_cpu/install.sh $$version .sglang/$$version || exit 1; done
	$(BIN)/pytest -m "sglang and not faults" tests/sglang $(ARGS)

test-faults: $(INSTALLED)  ## every cell of the fault matrix (with SGLang's, where `make test-sglang` has installed it)
	$(BIN)/pytest -m "" tests/test_fault_matrix.py tests/sglang/test_fault_matrix_nccl.py $(ARGS)

fuzz: $(INSTALLED)  ## coverage-guided fuzzing of what peers can send, a million frames
	@$(PIP_INSTALL) -e ".[fuzz]"
	$(BIN)/python scripts/fuzz.py $(ARGS)

test-vllm: $(INSTALLED)  ## real vLLM servers on the CPU (installs vLLM the first time)
	@scripts/vllm_cpu/install.sh .vllm
	$(BIN)/pytest -m vllm tests/vllm $(ARGS)

soak: $(INSTALLED)  ## 500 updates while servers are killed and restarted; soak/soak.json and soak/soak.png
	$(BIN)/python benchmarks/soak.py --out soak $(ARGS)

test-gpu:  ## the tests that need a CUDA device
	bash scripts/test_gpu.sh

test-frameworks: $(INSTALLED)  ## install each framework by itself and run its adapter's tests (FRAMEWORKS="trl ray")
	@OMP_NUM_THREADS=1 PYTHON=$(BIN)/python scripts/test_frameworks.sh $(FRAMEWORKS)

docs: $(INSTALLED)  ## build the documentation site into site/; a warning is an error (with --quiet it would not be)
	@$(PIP_INSTALL) -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:  ## remove the virtual environment, caches and builds
	rm -rf $(VENV) build dist site soak *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# megatron-core goes in by itself: its metadata says Python >= 3.12, its wheels work on 3.11.
# Transformer Engine's Python layer goes beside site-packages: without its CUDA half it would break
# `import megatron.core` there. The tests of its tensor classes put it on the path (tests/adapters/te_stub.py).
$(INSTALLED): pyproject.toml constraints.txt Makefile
	@echo "Installing into $(VENV): a few minutes the first time."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) -e ".[dev,engine,megatron,serve,bench,metrics]"
	@$(PIP_INSTALL) --no-deps --ignore-requires-python megatron-core
	@$(PIP_INSTALL) --upgrade --no-deps --target $(VENV)/te transformer-engine
	@touch $@
