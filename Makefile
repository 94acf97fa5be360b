# Each target first installs the Python packages that it needs; the machine has Python >= 3.11 with venv, and make.

VENV := .venv
BIN := $(VENV)/bin
SHELL := /bin/bash

.PHONY: console demo test check faults drills soak validate bench pictures clean setup
.DELETE_ON_ERROR:

console: $(VENV)/.run
	@$(BIN)/nsa-console $(ARGS)

demo: $(VENV)/.run
	@$(BIN)/nsa-console launch cpu_smoke --wait

test: $(VENV)/.dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright --level error

faults: $(VENV)/.dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.faults $(ARGS)

drills: $(VENV)/.dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.drills $(ARGS)

soak: $(VENV)/.dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.soak $(ARGS)

validate: $(VENV)/.dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow or not slow" --hypothesis-profile=random tests/nsa tests/trainers tests/e2e/test_smoke.py $(ARGS)

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks $(ARGS)

pictures: $(VENV)/.dev
	$(BIN)/python -m docs.pictures

setup: $(VENV)/.dev

$(VENV)/.run: pyproject.toml constraints.txt setup.sh
	@./setup.sh run

$(VENV)/.dev: pyproject.toml constraints.txt setup.sh
	@./setup.sh dev

clean:
	rm -rf $(VENV)
