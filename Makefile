# The commands of the README: each makes .venv when it is missing, installs, and does its job.
PYTHON ?= python3.11
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-all bench studies plan-validation lint clean

demo: $(INSTALLED)
	$(BIN)/optimus demo

test: $(INSTALLED) lint
	$(BIN)/python -m pytest -n 2 --durations=20 -m "not slow"

test-all: $(INSTALLED) lint
	$(BIN)/python -m pytest -n 2 --durations=20

# results in bench/results/*.json, then as tables in README.md
bench: $(INSTALLED)
	$(BIN)/python -m pytest bench --benchmark-enable --benchmark-disable-gc -s
	$(BIN)/python -m bench.report

# hours on two cores, resumable; of the sources of Python's library, or make studies CORPUS=folder
STUDIES := dense_and_moe routes model_scaling batch_scaling components restarts routing
studies: $(INSTALLED)
	for study in $(STUDIES); do $(BIN)/python -m bench.studies.$$study $(if $(CORPUS),--corpus $(CORPUS)) || exit 1; done
	$(BIN)/python -m bench.report

# about fifteen minutes: plans beside the paper's figures, and beside real runs on this machine
plan-validation: $(INSTALLED)
	$(BIN)/python -m bench.plan_validation
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.plan_measured
	$(BIN)/python -m bench.report

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy optimus_compiler tests bench

$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(INSTALLED)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
