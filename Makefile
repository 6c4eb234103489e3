# Two commands on a fresh machine: `make demo` and `make test`.
VENV ?= .venv
PYTHON ?= python3
# The pinned build first, with the torchvision that belongs to it (timm imports it): a plain range
# would pull gigabytes of CUDA packages on Linux.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin

.PHONY: demo test lint clean

demo: $(VENV)/ready
	$(BIN)/python -m benchmarks.demo

test: $(VENV)/ready
	$(BIN)/python -m pytest -n auto

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$(TORCH)" torchvision
	$(BIN)/pip install --quiet --editable ".[test]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
