# `make help` lists the targets. Everything is installed into .venv; nothing outside this folder is touched.

PYTHON ?= python3.11
# Where pip's index gives the CUDA build of torch, TORCH_ARGS="--index-url <PyTorch's CPU index>" saves gigabytes.
TORCH_ARGS ?=
PIP = .venv/bin/python -m pip install --quiet --disable-pip-version-check
DEMO_MODEL = models/smollm2-135m-instruct
SOURCES = worker submitter infra tests benchmarks examples

# The worker's image. BASE_IMAGE and VLLM_DIGEST take another base, BUILD_ARGS what else the builder is to be told.
BUILDER ?= $(firstword $(foreach name,docker podman buildah,$(shell $(name) images >/dev/null 2>&1 && echo $(name))))
IMAGE ?= llm-array:$(ENGINE)
ENGINE ?= gpu
BASE_IMAGE ?= $(if $(filter cpu,$(ENGINE)),docker.io/library/python:3.11-slim-bookworm)
VLLM_DIGEST ?=
# What the hosts of job_definitions/ are.
PLATFORM ?= linux/amd64
BUILD_ARGS ?=
REVISION = $(shell git describe --always --dirty 2>/dev/null)
# Where `make push` puts it: an ECR repository's URI, and a tag that is not there yet. The stack's job definitions ask for this one at first.
REPOSITORY ?=
TAG ?= $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' pyproject.toml)

# The stack on AWS, and what its parameters are to be other than their defaults.
STACK ?= llm-array
PARAMETERS ?=

.PHONY: help demo test check lint types format bench soak repository image push image-test template deploy clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/engine.stamp $(DEMO_MODEL)/config.json ## from prompts to answers on this machine, with a real model
	rm -rf runs/demo
	.venv/bin/submit examples/prompts.jsonl --run runs/demo --model $(DEMO_MODEL) --partitions 3 --local \
	  --engines 2 --engine-arg max_model_len=2048
	.venv/bin/python examples/show_answers.py runs/demo

test: .venv/dev.stamp ## the whole test suite, the real engine included
	@# Side by side, file by file; the engines alone, since each fills a machine.
	.venv/bin/python -m pytest tests/unit tests/property tests/integration tests/infra tests/fault -n auto --dist loadfile --no-loadscope-reorder
	.venv/bin/python -m pytest tests/engine tests/image

check: lint types test ## all that CI checks

lint: .venv/dev.stamp ## style and likely mistakes
	.venv/bin/ruff check $(SOURCES)
	.venv/bin/ruff format --check $(SOURCES)
	.venv/bin/hadolint Dockerfile

types: .venv/dev.stamp ## static types
	.venv/bin/mypy

format: .venv/dev.stamp ## write the standard format
	.venv/bin/ruff check --fix $(SOURCES)
	.venv/bin/ruff format $(SOURCES)

bench: .venv/dev.stamp ## the figures in README
	.venv/bin/python -m benchmarks.split
	.venv/bin/python -m benchmarks.engine
	.venv/bin/python -m benchmarks.hostpath
	.venv/bin/python -m benchmarks.status

soak: .venv/dev.stamp ## kill workers and engines for SOAK_S seconds (default 3600), from SOAK_SEED
	.venv/bin/python -m tests.storm

# Before an hour of building.
repository:
	@case "$(REPOSITORY)" in *.dkr.ecr.*/*) ;; *) echo 'make: REPOSITORY=ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME is needed'; exit 1 ;; esac

image: $(if $(filter push,$(MAKECMDGOALS)),repository) ## the worker's image, as IMAGE; ENGINE=cpu for one without GPUs
	@[ -n "$(BUILDER)" ] || { echo 'make: neither docker nor podman nor buildah answers here'; exit 1; }
	$(BUILDER) $(if $(filter buildah,$(BUILDER)),bud,build) --platform $(PLATFORM) --tag $(IMAGE) --build-arg ENGINE=$(ENGINE) \
	  $(if $(BASE_IMAGE),--build-arg BASE_IMAGE=$(BASE_IMAGE)) $(if $(VLLM_DIGEST),--build-arg VLLM_DIGEST=$(VLLM_DIGEST)) \
	  $(if $(TORCH_ARGS),--build-arg TORCH_ARGS='$(TORCH_ARGS)') --build-arg REVISION=$(REVISION) $(BUILD_ARGS) .

push: repository ## IMAGE to the ECR repository REPOSITORY, as TAG (this version, unless given)
	@[ -n "$(BUILDER)" ] || { echo 'make: neither docker nor podman nor buildah answers here'; exit 1; }
	@# Through a pipe: the password is in no argument and on no screen.
	aws ecr get-login-password --region $(word 4,$(subst ., ,$(REPOSITORY))) | \
	  $(BUILDER) login --username AWS --password-stdin $(firstword $(subst /, ,$(REPOSITORY)))
	$(BUILDER) tag $(IMAGE) $(REPOSITORY):$(TAG)
	$(BUILDER) push $(REPOSITORY):$(TAG)

image-test: .venv/dev.stamp ## build the CPU image on LLM_ARRAY_TEST_BASE_IMAGE, and have its worker do a partition
	.venv/bin/python -m pytest tests/image

template: .venv/template.stamp ## the CloudFormation template of infra/, as build/llm-array.template.json
	.venv/bin/python infra/render.py

deploy: template ## make or update the stack STACK on AWS; PARAMETERS="HostKind=8gpu-p5 …"
	@# An account that has never had a Spot host lacks the role for them.
	@aws iam get-role --role-name AWSServiceRoleForEC2Spot >/dev/null 2>&1 || \
	  aws iam create-service-linked-role --aws-service-name spot.amazonaws.com >/dev/null
	aws cloudformation deploy --stack-name $(STACK) --template-file build/llm-array.template.json --capabilities CAPABILITY_IAM \
	  --no-fail-on-empty-changeset $(if $(PARAMETERS),--parameter-overrides $(PARAMETERS))
	@aws cloudformation describe-stacks --stack-name $(STACK) --query 'Stacks[0].Outputs[].[OutputKey,OutputValue]' --output text

clean: ## remove what the targets made
	rm -rf .venv models runs/demo build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

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

.venv/template.stamp: requirements/core.txt | .venv/bin/python
	$(PIP) --constraint requirements/core.txt PyYAML
	@touch $@

.venv/dev.stamp: requirements/dev.txt .venv/engine.stamp
	$(PIP) --no-deps -r requirements/dev.txt
	@touch $@

$(DEMO_MODEL)/config.json: | .venv/engine.stamp
	TQDM_DISABLE=1 .venv/bin/python examples/build_smollm2.py $(DEMO_MODEL)
