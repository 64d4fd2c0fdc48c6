# The two commands of the README are `make demo` and `make test`; `make check` is what CI asks of the code.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
RUN ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)
INSTALLED := $(VENV)/.installed

.PHONY: demo test check format base clean

demo: $(INSTALLED)  ## train the tiny policy with GRPO, evaluate it on unseen databases, write the report
	$(BIN)/sqlenv train --config configs/tiny.yaml --output_dir $(RUN)

test: $(INSTALLED)
	$(BIN)/python -m pytest

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

base: $(INSTALLED)  ## rebuild the shipped base policy from nothing (about half an hour)
	$(BIN)/python -m trainer.tiny.build

clean:
	rm -rf $(VENV) build *.egg-info

$(INSTALLED): pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[train,dev]'
	touch $@
