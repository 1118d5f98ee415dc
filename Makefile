# Every target sets .venv up first; the second time that takes no time. PYTHON=... names a Python 3.11.

SHELL := bash
VENV  := .venv
BIN   := $(VENV)/bin
READY := $(VENV)/.ready
PYTHON ?=

# What an installed environment depends on; Python sources are used in place.
SET_UP := pyproject.toml setup.py scripts/setup.sh packaging/constraints.txt packaging/vllm-metadata/pyproject.toml \
	$(wildcard csrc/cpu/*)
# Tests that run an engine run once for each of vLLM's model runners.
END_TO_END := $(shell grep -lE '^(from|import) engine\b' tests/test_*.py)

.PHONY: help demo test lint bench clean
.DELETE_ON_ERROR:

help:  ## show this
	@grep -hE '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 8

demo: $(READY)  ## what policies save and lose in a small pool, then a server with its clients (results in out/demo)
	@$(BIN)/python examples/demo.py

# Two processes side by side, a file at a time: the models are tiny, and engines start and stop more than they compute.
PYTEST := $(BIN)/pytest -q -n 2 --dist loadfile
test: $(READY)  ## all tests, then the end-to-end tests again on Model Runner V2, then ruff
	$(PYTEST)
	VLLM_EVICT_TEST_RUNNER=v2 $(PYTEST) $(END_TO_END) -m "not v1_only"
	$(BIN)/ruff check .

lint: $(READY)  ## ruff
	$(BIN)/ruff check .

bench: $(READY)  ## policies against stock vLLM in a small pool, and the cost of running sums (results in out/pressure)
	@$(BIN)/python benchmarks/pressure.py
	@$(BIN)/python benchmarks/pressure.py --step

clean:  ## remove the environment, builds and results
	rm -rf $(VENV) build dist out *.egg-info vllm_evict/*.so packaging/*/build packaging/*/*.egg-info

$(READY): $(SET_UP)
	@PYTHON="$(PYTHON)" scripts/setup.sh $(VENV)
	@touch $@
