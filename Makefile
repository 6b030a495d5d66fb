# Thin targets: what they run can be run by hand from .venv as well.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test pure mutants lint fuzz bench bench-peers kernels-report test-triton engines test-engines

setup: $(STAMP)

# One pip command. torch is named here because only its exact release fits the other pins (see constraints.txt).
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0 -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/radixkv demo

test: setup
	$(BIN)/python -m pytest

# The part of the tests without processes, sockets and torch: under a minute, stops at the first failure.
pure: setup
	$(BIN)/python -m fuzz.mutants.pure

# Each deliberate bug must be found by the pure part: make mutants, or make mutants PATCHES=DIR for patches of your own.
PATCHES ?= fuzz/mutants/patches

mutants: setup
	$(BIN)/python -m fuzz.mutants $(PATCHES)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fuzz: setup
	$(BIN)/python -m fuzz smoke
	$(BIN)/python -m fuzz.kernels
	RADIXKV_KILLS=150 $(BIN)/python -m pytest -q -o faulthandler_timeout=900 tests/contract/test_resume.py -k again_and_again
	$(BIN)/python -m pytest -m long

bench: setup
	$(BIN)/python -m bench

bench-peers: setup
	$(BIN)/python -m bench.peers

kernels-report: setup
	$(BIN)/python -m bench.kernels_report --write

# The Triton kernels, interpreted, under another Triton than the one that torch asks for: make test-triton-3.6.0
test-triton-%: setup
	test -d .venv/triton-$* || $(BIN)/python -m pip install --quiet --no-deps --target .venv/triton-$* triton==$*
	PYTHONPATH=.venv/triton-$* TRITON_INTERPRET=1 $(BIN)/python -m pytest -p no:cacheprovider tests/unit/kernels/interpreted

test-triton: test-triton-3.9.0 test-triton-3.6.0

# Real serving engines in environments of their own. `engines` installs what is missing: 3.5 GB, minutes.
engines: setup
	$(BIN)/python -m bench.peers.recipes vllm

test-engines: setup
	$(BIN)/python -m pytest -m engine tests/engines -s -v -o faulthandler_timeout=900
