# Two commands on a fresh machine: `make demo` and `make test`.
VENV ?= .venv
PYTHON ?= python3
# The pinned build first, with the torchvision that belongs to it (timm imports it). On Linux PyPI's
# build comes with gigabytes of CUDA packages; TORCH_INDEX=https://download.pytorch.org/whl/cpu takes
# the one for CPU. It is no default: machines without a network to there have wheels of their own.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
BIN := $(VENV)/bin

.PHONY: demo test lint clean

demo: $(VENV)/ready
	$(BIN)/python -m benchmarks.demo

test: $(VENV)/ready
	$(BIN)/python -m pytest -n auto --dist worksteal

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)" torchvision
	$(BIN)/pip install --quiet --editable ".[test]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
