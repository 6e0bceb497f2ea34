# Every target sets itself up: it makes its own .venv and installs what it needs, once.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.PHONY: help install demo test test-all test-families test-arm test-page peers mutants mutants-drawn check bench clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# The laboratory is a distribution of its own, beside headway: here both are, from these sources.
LAB := -e "packages/lab[zh]"
ASKED := pyproject.toml packages/lab/pyproject.toml packages/lab/hatch_build.py constraints.txt hatch_build.py
WORKERS ?= 2
# Of the native kernels: auto (go on without where they do not compile), require, off.
HEADWAY_BUILD ?= auto
export HEADWAY_BUILD
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

help:
	@echo "make install   the package, its command, server and laboratory, in $(VENV)"
	@echo "make demo      train a small model, sample from it, show why to trust it (writes runs/demo)"
	@echo "make test      the tests, within 10 minutes on 2 cores"
	@echo "make test-all  every test, the slow ones too, then the demo; a skipped test fails"
	@echo "make test-families  what loads here, beside the newest transformers"
	@echo "make test-arm  the kernels of aarch64 in QEMU (apt-get install g++-aarch64-linux-gnu qemu-user), within an hour"
	@echo "make test-page the page of headway serve in a browser (apt-get install chromium chromium-driver); pictures in runs/page"
	@echo "make peers     what llama.cpp, built here for this processor (20 minutes), makes of our files"
	@echo "make mutants   break the code in many places, one at a time: a test must fail each time"
	@echo "make mutants-drawn SEED=text   the same with 400 faults that the seed draws from all of src (hours; it goes on)"
	@echo "make check     lint, format, types, floors"
	@echo "make wheels    the sdist and the wheels of a release, from what is committed, in dist (half an hour)"
	@echo "make bench     measure attention and whole models on this machine, beside what is installed"

# A stamp is younger than what it was made from, so that a second run starts at once.
$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "headway needs Python 3.11 or newer; choose one with make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(ASKED) | $(VENV)/pyvenv.cfg
	$(PIP) -e ".[serve,plots]" $(LAB)
	@touch $@

$(VENV)/.installed-test: $(ASKED) | $(VENV)/pyvenv.cfg
	$(PIP) -e ".[test]" $(LAB)
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-all: $(ASKED) | $(VENV)/pyvenv.cfg
	$(PIP) -e ".[test,conformance,release]" $(LAB)
	@touch $@ $(VENV)/.installed $(VENV)/.installed-test

# One job: its largest sources take a GiB of memory each.
$(VENV)/.installed-peers: $(ASKED) | $(VENV)/.installed-test
	CMAKE_ARGS="-DGGML_NATIVE=ON" CMAKE_BUILD_PARALLEL_LEVEL=1 $(PIP) --no-binary llama-cpp-python -e ".[test,peers]" $(LAB)
	@touch $@

$(VENV)/.installed-check: $(ASKED) | $(VENV)/pyvenv.cfg
	$(PIP) -e ".[test,check]" $(LAB)
	@touch $@ $(VENV)/.installed $(VENV)/.installed-test

# Renew the kernels when their sources change; what is up to date is left alone. Running needs those of this machine's
# level, which are minutes of compiling; tests need every level's.
KERNELS := src/headway/native/build.py src/headway/native/levels.py $(wildcard src/headway/native/csrc/*)
$(VENV)/.native-best: $(KERNELS) | $(VENV)/pyvenv.cfg
	HEADWAY_LEVELS=native PYTHONPATH=src $(BIN)/python -m headway.native.build
	@touch $@

$(VENV)/.native: $(KERNELS) | $(VENV)/pyvenv.cfg
	HEADWAY_LEVELS=all PYTHONPATH=src $(BIN)/python -m headway.native.build
	@touch $@ $(VENV)/.native-best

install: $(VENV)/.installed $(VENV)/.native-best
	@echo "installed: $(BIN)/headway"

demo: $(VENV)/.installed $(VENV)/.native-best
	$(BIN)/headway demo

test: $(VENV)/.installed-test $(VENV)/.native
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-all: $(VENV)/.installed-all $(VENV)/.native
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --slow --no-skips
	$(BIN)/headway demo

# Beside the newest transformers, in an environment of its own; tests/newest.toml has the differences and their reasons.
$(VENV)-newest/.installed: $(ASKED)
	$(PYTHON) -m venv $(VENV)-newest
	grep -v "^transformers==" constraints.txt > $(VENV)-newest/constraints.txt
	HEADWAY_BUILD=off $(VENV)-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade \
	  -c $(VENV)-newest/constraints.txt -e ".[test]" $(LAB) transformers
	@touch $@

test-families: $(VENV)-newest/.installed $(VENV)/.native
	$(ONE_THREAD) $(VENV)-newest/bin/python -m pytest -n $(WORKERS) --dist worksteal --newest tests/checkpoints tests/integrations

# Calls whose float64 results are known, and a decoding, made by each level of aarch64; `build/arm` keeps what was built.
test-arm: $(VENV)/.installed-test $(VENV)/.native-best
	$(ONE_THREAD) $(BIN)/python -m tests.native.arm.run --keep build/arm
	if [ -e build/arm/driver ]; then $(ONE_THREAD) $(BIN)/python -m tests.native.arm.loops build/arm; fi

test-page: $(VENV)/.installed-all $(VENV)/.native
	$(ONE_THREAD) $(BIN)/python -m pytest --slow --no-skips tests/serve/page

peers: $(VENV)/.installed-peers $(VENV)/.native
	$(ONE_THREAD) $(BIN)/python -m pytest --peers --no-skips

mutants: $(VENV)/.installed-all $(VENV)/.native
	$(BIN)/python tests/mutants -j $(WORKERS)

# First the map of which test runs which line, kept in .mutants; then the faults. HOURS ends it, and the same call goes on.
SEED ?= $(shell git rev-parse HEAD)
HOURS ?= 6
mutants-drawn: $(VENV)/.installed-test $(VENV)/.native
	$(BIN)/python -m tests.mutants.drawn map -j $(WORKERS)
	$(BIN)/python -m tests.mutants.drawn run -j $(WORKERS) --seed $(SEED) --hours $(HOURS)

check: $(VENV)/.installed-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src/headway src/headway_lab
	$(BIN)/lint-imports

bench: $(VENV)/.installed $(VENV)/.native-best
	$(BIN)/headway bench attention
	$(BIN)/headway bench growth
	$(BIN)/headway bench decode
	$(BIN)/headway bench prefill
	$(BIN)/headway bench train

$(VENV)/.installed-release: $(ASKED) | $(VENV)/pyvenv.cfg
	HEADWAY_BUILD=off $(PIP) -e ".[release]"
	@touch $@

.PHONY: wheels
wheels: $(VENV)/.installed-release
	$(BIN)/python packages/wheels.py

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
