# `make help` lists the targets. Everything is installed into .venv; nothing outside this folder is touched.

PYTHON ?= python3.11
# Where pip's index gives the CUDA build of torch, TORCH_ARGS="--index-url <PyTorch's CPU index>" saves gigabytes.
TORCH_ARGS ?=
PIP = .venv/bin/python -m pip install --quiet --disable-pip-version-check
DEMO_MODEL = models/smollm2-135m-instruct
SOURCES = worker submitter tests benchmarks examples

.PHONY: help demo test check lint types format bench soak clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/engine.stamp $(DEMO_MODEL)/config.json ## from prompts to answers on this machine, with a real model
	rm -rf runs/demo
	.venv/bin/submit examples/prompts.jsonl --run runs/demo --model $(DEMO_MODEL) --partitions 3 --local \
	  --engines 2 --engine-arg max_model_len=2048
	.venv/bin/python examples/show_answers.py runs/demo

test: .venv/dev.stamp ## the whole test suite, the real engine included
	@# Side by side, file by file; the engines alone, since each fills a machine.
	.venv/bin/python -m pytest tests/unit tests/property tests/integration tests/infra tests/fault -n auto --dist loadfile --no-loadscope-reorder
	.venv/bin/python -m pytest tests/engine

check: lint types test ## all that CI checks

lint: .venv/dev.stamp ## style and likely mistakes
	.venv/bin/ruff check $(SOURCES)
	.venv/bin/ruff format --check $(SOURCES)

types: .venv/dev.stamp ## static types
	.venv/bin/mypy

format: .venv/dev.stamp ## write the standard format
	.venv/bin/ruff check --fix $(SOURCES)
	.venv/bin/ruff format $(SOURCES)

bench: .venv/dev.stamp ## the figures in README
	.venv/bin/python -m benchmarks.split
	.venv/bin/python -m benchmarks.engine
	.venv/bin/python -m benchmarks.hostpath

soak: .venv/dev.stamp ## kill workers and engines for SOAK_S seconds (default 3600), from SOAK_SEED
	.venv/bin/python -m tests.storm

clean: ## remove what the targets made
	rm -rf .venv models runs build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	  { echo 'make: Python 3.11 is needed; name it with PYTHON=…'; exit 1; }
	@# Debian keeps venv's other half in a package of its own.
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { [ "$$(id -u)" = 0 ] && \
	  apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y python3-venv >/dev/null; } || \
	  { echo 'make: Python has no venv; install it: sudo apt-get install python3-venv'; exit 1; }
	$(PYTHON) -m venv .venv

# torch first and with its dependencies, the rest whole and pinned: requirements/engine-cpu.txt says why.
.venv/engine.stamp: requirements/core.txt requirements/engine-cpu.txt requirements/demo.txt pyproject.toml | .venv/bin/python
	@echo 'installing the CPU engine (about 2.5 GB, two minutes)'
	$(PIP) $(TORCH_ARGS) --constraint requirements/core.txt --constraint requirements/engine-cpu.txt torch==2.13.0
	$(PIP) --no-deps -r requirements/core.txt -r requirements/engine-cpu.txt -r requirements/demo.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

.venv/dev.stamp: requirements/dev.txt .venv/engine.stamp
	$(PIP) --no-deps -r requirements/dev.txt
	@touch $@

$(DEMO_MODEL)/config.json: | .venv/engine.stamp
	TQDM_DISABLE=1 .venv/bin/python examples/build_smollm2.py $(DEMO_MODEL)
