# The README's two commands are `make demo` and `make test`; each sets itself up from a fresh clone.
#
#   make test-all TRITON=3.6.0     the suite on another Triton
#   make test PYTHON=python3.12    what of it finds faults soonest, on another Python
#
#   make matrix MATRIX=full        both suites on every pair of them; without MATRIX, parts of both on some
#
#   make bench BENCH='--suite forward --jobs 16'    a part of the benchmark, compiled in parallel first
#   make test-gpu GPU='--minutes=9 --resume=gpu.txt'  a part of the GPU tests; repeated, the tests that are left
#   make accuracy ACCURACY='--jobs 8'               errors beside torch's, in so many processes
#   make mutants MUTANTS="--only 'rows-*'"          some of the edits that tests have to notice
#   make sanitize SANITIZE='--tool memcheck'        one of compute-sanitizer's tools
#
# Each such choice gets a virtual environment of its own, so none is silently reused for another.

PYTHON ?= python3
TRITON ?=
BENCH ?=
GPU ?=
ACCURACY ?=
SANITIZE ?=
MATRIX ?=
MUTANTS ?=

VENV := .venv$(if $(filter file,$(origin PYTHON)),,-$(subst /,_,$(PYTHON)))$(if $(TRITON),-$(TRITON))
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.ready-runtime
READY := $(VENV)/.ready
CLIENTS := $(VENV)/.ready-clients
DOCS := $(VENV)/.ready-docs
DIST := $(VENV)/.ready-dist
LINKS := $(VENV)/links
# Where `make dist` installs the wheel and nothing else.
TRIAL := $(abspath $(VENV)-dist)

# One sentence where there is no GPU; $(1) is what needs none.
needs_gpu = $(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("make $@ needs a GPU, and torch finds none here; what runs without one: $(1)")'

.DEFAULT_GOAL := help
.PHONY: help demo smoke test test-all test-gpu test-clients accuracy sanitize mutants matrix venv bench lint format generate check docs dist clean

help:
	@echo "make demo          run ten modes and compare them with an fp64 reference: 5 seconds after the installation"
	@echo "make smoke         check generated/, run the demo and a few tests: a minute after the installation"
	@echo "make test          run the tests that find faults soonest: minutes, no GPU needed"
	@echo "make test-all      run them, and then all the others"
	@echo "make test-gpu      run the tests that need a GPU"
	@echo "make test-clients  run the tests of patched models in transformers, timm, diffusers and others, which it installs"
	@echo "make accuracy      measure every kernel's error against fp64 beside torch's, and record it"
	@echo "make sanitize      run compute-sanitizer over every kernel on this machine's GPU, and record it"
	@echo "make mutants       break the product on purpose and see that tests notice"
	@echo "make matrix        run parts of the suite on several versions of Python and Triton"
	@echo "make bench         time normforge and its peers on this machine's GPU"
	@echo "make lint          formatting, lint and types"
	@echo "make format        format the sources"
	@echo "make generate      regenerate generated/ from instances.yaml"
	@echo "make check         fail if generated/ is not what instances.yaml says"
	@echo "make docs          build the documentation site into site/, which fails at a broken link"
	@echo "make dist          build sdist and wheel into dist/, check them, and run the demo from the wheel in a clean environment"
	@echo "make clean         remove the virtual environments and caches"

demo: $(RUNTIME)
	@$(BIN)/normforge demo

# Interpreter and compiler cannot share a process: Triton reads the variable when it is imported. Bytecode is kept: a
# third of the collection is pytest's rewriting of files, and many tests start a Python of their own.
interpret = @echo "Kernels interpreted, $(1): collecting the tests first" && env -u PYTHONDONTWRITEBYTECODE TRITON_INTERPRET=1 $(BIN)/pytest -q -n auto -m "not compile and not gpu and $(2)"
compile = @echo "Kernels compiled, $(1): collecting the tests first" && env -u PYTHONDONTWRITEBYTECODE -u TRITON_INTERPRET $(BIN)/pytest -q -n auto -m "compile and $(2)"

smoke: $(READY)
	$(BIN)/python generate.py --check
	TRITON_INTERPRET=1 $(BIN)/normforge demo
	TRITON_INTERPRET=1 $(BIN)/pytest -q tests/test_import.py tests/test_house.py tests/tools/test_explain.py

test: $(READY)
	@echo "make test runs the tests that find faults soonest, without a GPU: interpreted, then compiled; this takes 6 to 7 minutes on 2 idle cores"
	$(call interpret,what finds faults soonest,not thorough)
	$(call compile,what finds faults soonest,not thorough)

# `make test test-all`, as .ci/run has it, runs no test twice.
test-all: test
	$(call interpret,the rest,thorough)
	$(call compile,the rest,thorough)

test-gpu: $(READY)
	@$(call needs_gpu,make test-all)
	env -u TRITON_INTERPRET $(BIN)/pytest -q -m gpu $(GPU)

test-clients: $(CLIENTS)
	TRITON_INTERPRET=1 $(BIN)/pytest -q -n auto -m "not compile and not gpu" tests/clients

accuracy: $(READY)
	env -u TRITON_INTERPRET $(BIN)/python -m proving accuracy --record . $(ACCURACY)

sanitize: $(READY)
	env -u TRITON_INTERPRET $(BIN)/python -m proving sanitizer --record . $(SANITIZE)

mutants: $(READY)
	$(BIN)/python -m proving mutants $(or $(MUTANTS),--record .)

matrix:
	$(PYTHON) -m proving matrix --record . $(if $(filter full,$(MATRIX)),--full,$(MATRIX))

# Prints where an environment's programs are, once it is there.
venv: $(READY)
	@echo $(BIN)

bench: $(READY)
	@$(call needs_gpu,make demo)
	env -u TRITON_INTERPRET $(BIN)/python -m benchmarks run $(BENCH)

# mypy and mkdocs read folders, not setuptools' package-dir; the links lay them out as they are installed.
.PHONY: links
links: $(READY)
	@rm -rf $(LINKS) && mkdir -p $(LINKS)/normforge
	@ln -s $(CURDIR)/runtime/* $(CURDIR)/codegen $(CURDIR)/tools $(LINKS)/normforge/

lint: $(READY) links
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	MYPYPATH=$(LINKS) $(BIN)/mypy generate.py benchmarks examples proving tests $(LINKS)/normforge

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

generate: $(READY)
	$(BIN)/python generate.py

docs: $(DOCS) links
	NO_MKDOCS_2_WARNING=1 DOCS_PACKAGES=$(LINKS) $(BIN)/mkdocs build --strict

check: $(READY)
	$(BIN)/python generate.py --check

# The demo runs away from the clone, whose folders it must not import.
dist: $(DIST)
	rm -rf dist $(TRIAL)
	$(BIN)/python -m build --no-isolation
	rm -rf *.egg-info
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	$(PYTHON) -m venv $(TRIAL)
	@echo "Installing the wheel into a clean environment: PyTorch and Triton are gigabytes, downloaded unless pip has them in its cache"
	$(TRIAL)/bin/python -m pip install -c constraints.txt dist/*.whl
	cd $(TRIAL) && bin/normforge demo

clean:
	rm -rf .venv* build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# --no-deps at the end: torch's CUDA build asks for one exact Triton, and this target is for the others.
$(RUNTIME): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "normforge needs Python 3.10 or newer, and there is no '$(PYTHON)' on PATH; install one or name yours: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; old = sys.version_info < (3, 10); sys.exit("normforge needs Python 3.10 or newer, and $(PYTHON) is %d.%d; name a newer one: make PYTHON=python3.12" % sys.version_info[:2] if old else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt setuptools
	@echo "Installing what normforge runs on: PyTorch and Triton, 3 GB with CUDA's libraries, and a few small packages"
	$(BIN)/python -m pip install -c constraints.txt --no-build-isolation -e .
	$(if $(TRITON),$(BIN)/python -m pip install -q --no-deps triton==$(TRITON))
	@touch $@

$(READY): $(RUNTIME)
	@echo "Installing what the tests and the linters need, without pip's progress: JAX, pytest, mypy, ruff and others; pip downloads 0.3 GB"
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[test,lint]'
	$(if $(TRITON),$(BIN)/python -m pip install -q --no-deps triton==$(TRITON))
	@touch $@

$(CLIENTS): $(READY)
	@echo "Installing the libraries whose models are patched, without pip's progress: transformers, timm, diffusers and others"
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[test,clients]'
	$(if $(TRITON),$(BIN)/python -m pip install -q --no-deps triton==$(TRITON))
	@touch $@

$(DIST): $(RUNTIME)
	@echo "Installing what builds and checks a distribution: build, twine and others"
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[dist]'
	@touch $@

$(DOCS): $(READY)
	@echo "Installing what builds the site: mkdocs-material and mkdocstrings"
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[docs]'
	@touch $@
