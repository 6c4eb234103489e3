# Two commands on a fresh machine: `make demo` and `make test`.
VENV ?= .venv
PYTHON ?= python3
# The pinned build first, with the torchvision that belongs to it (timm imports it). On Linux PyPI's
# build comes with gigabytes of CUDA packages; TORCH_INDEX=https://download.pytorch.org/whl/cpu takes
# the one for CPU. It is no default: machines without a network to there have wheels of their own.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
BIN := $(VENV)/bin
# Beside the pinned one: the first and the last release that pyproject.toml admits, and some between.
VERSIONS ?= 2.11.0 2.12.1 2.14.1 2.15.0
# What reads private parts of PyTorch, or says what its operators do.
MATRIX := $(patsubst %,tests/test_%.py,available bypassed eager_paths fusion hooks modes new_tensors \
	operator_facts python_state refusals results returned rules signature sizes triton usage value_shapes versions)
WORKERS ?= auto

# What a machine with a GPU, PyTorch, transformers, typer and rich may lack, for its Python.
WHEELS_FOR ?= 3.12
WHEEL_PLATFORMS := manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux2014_x86_64
WHEELS := "highspy>=1.10,<1.16" "pulp>=3.3,<4" graphviz platformdirs liger-kernel \
	pytest pytest-timeout pytest-xdist hypothesis pluggy iniconfig packaging pygments execnet sortedcontainers

# With a build of PyTorch for CUDA 13, of 7 GB, for the stand-in; CUDA_VENV=... takes another one.
CUDA_VENV ?= .venv-cuda
CUDA_TORCH ?= torch==2.11.0
STAND_IN := build/stand_in

.PHONY: demo test sweep matrix libraries adapters wheels cuda lint clean always

demo: $(VENV)/ready
	$(BIN)/python -m benchmarks.demo

test: $(VENV)/ready
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# What `make test` leaves out of long sweeps (tests/sweeps.py), too.
sweep: $(VENV)/ready
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --sweep

# One environment a version, `.venv-2.15.0`, of about 6 GB each with PyPI's builds for Linux.
matrix: $(VERSIONS:%=build/matrix/%.xml)
	$(PYTHON) -m benchmarks.versions build/matrix $(VERSIONS)

build/matrix/%.xml: always
	rm -f $@
	$(MAKE) VENV=.venv-$* TORCH=torch==$* .venv-$*/ready
	-.venv-$*/bin/python -m pytest -n $(WORKERS) --dist worksteal --sweep --junitxml=$@ $(MATRIX)

# For a machine without a network: pip install --no-index --no-deps build/wheels/*.whl there, then
# python -m benchmarks.gpu.
wheels:
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version $(WHEELS_FOR) \
		--implementation cp $(WHEEL_PLATFORMS:%=--platform %) -d build/wheels $(WHEELS)

# What can be verified of CUDA without a device; PARTS="--only tests" takes some of it.
cuda: $(STAND_IN)/libcuda.so.1
	$(CUDA_VENV)/bin/python -m benchmarks.stand_in.report $(STAND_IN) $(PARTS)

$(STAND_IN)/libcuda.so.1: $(CUDA_VENV)/ready benchmarks/stand_in/device.c benchmarks/stand_in/build.sh
	sh benchmarks/stand_in/build.sh $(CUDA_VENV)/lib/python3*/site-packages $(STAND_IN)

$(CUDA_VENV)/ready:
	$(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/pip install --quiet "$(CUDA_TORCH)" "numpy<2.3" "transformers>=5.0,<6" pytest \
		pytest-timeout hypothesis expecttest
	$(CUDA_VENV)/bin/pip install --quiet --no-deps bitsandbytes==0.50.2
	$(CUDA_VENV)/bin/pip install --quiet --editable .
	touch $@

# The releases of benchmarks/libraries.txt, which are all that they need, beside the pinned build.
libraries: .venv-libraries/ready
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv-libraries/bin/python -m benchmarks.libraries

.venv-libraries/ready: pyproject.toml benchmarks/libraries.txt
	$(PYTHON) -m venv .venv-libraries
	.venv-libraries/bin/pip install --quiet --upgrade pip
	.venv-libraries/bin/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)" torchvision
	.venv-libraries/bin/pip install --quiet --no-deps --requirement benchmarks/libraries.txt
	.venv-libraries/bin/pip install --quiet --editable . pytest
	touch $@

# Quantized bases with adapters, in an environment with the libraries.
adapters:
	$(MAKE) VENV=.venv-adapters .venv-adapters/ready
	.venv-adapters/bin/pip install --quiet --no-deps bitsandbytes==0.50.2 torchao==0.18.0 \
		optimum-quanto==0.2.7 ninja hqq==0.2.8.post1 termcolor
	.venv-adapters/bin/pip install --quiet diffusers==0.42.1
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv-adapters/bin/python -m pytest tests/test_quantized.py
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv-adapters/bin/python -m benchmarks.adapters

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

# A wheel and an sdist, each installed in an empty environment and tried there.
dist: $(VENV)/ready
	rm -rf dist .venv-dist
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	for file in dist/*.whl dist/*.tar.gz; do \
		.venv-dist/bin/pip install --quiet --force-reinstall --no-deps $$file && \
		.venv-dist/bin/pip install --quiet $$file && \
		cp testing/smoke.py .venv-dist/smoke.py && \
		(cd .venv-dist && bin/python smoke.py) || exit 1; \
	done

clean:
	rm -rf $(VENV) .venv-cuda .venv-libraries .venv-dist $(VERSIONS:%=.venv-%) build dist *.egg-info
