# make demo · make test · make check · make bench: each sets up what it needs first, and skips set-up when up to date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Test workers: one more than there are cores, because a worker often waits for a process it started. Each takes up to 3 GB of memory.
COUNT := import os; cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1; \
	memory = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE'); print(max(2, min(16, cores + 1, memory // 3_000_000_000)))
WORKERS ?= $(shell $(PYTHON) -c "$(COUNT)")
SET_UP = @$(PYTHON) -I factory/set_up/__main__.py

.PHONY: setup setup-dev serve-env demo demo-import test test-slow test-long test-portable check lint types bench bench-gpu bench-report bench-baseline doctor-suite chaos \
	judge-calibration clean

# The script looks whether .venv is up to date (a hash of pyproject.toml and constraints.txt), so that no target here has to.
setup:
	$(SET_UP)

setup-dev:
	$(SET_UP) --dev

# vLLM for 'factory serve --engine vllm', in .venv-serve: some GB.
serve-env:
	$(SET_UP) --serve

demo: setup
	@$(BIN)/factory demo

# A public model of 135 M weights, trained further, judged and served: sized for about 15 minutes. It downloads 93 MB. Your own model, a
# folder or a file: make demo-import MODEL=/where/it/is
MODEL ?= smollm2
demo-import: setup
	@$(BIN)/factory demo --from $(MODEL) --workspace workspace-import

# Some minutes: every package and every promise. The rest is whole gate runs, kills and long simulations, each with its reason.
test: setup-dev
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not long"

test-slow: setup-dev
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "slow and not long"

# What CI has no time for: the demo, whole gates over honest patches, and more cases of what the other tiers test with one or two.
test-long: setup-dev
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m long

# A short selection for a processor of another class: ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 make test-portable
# In one process: its tests take some fourteen seconds of a core, and each worker ten to begin.
test-portable: setup-dev
	@$(BIN)/python -m pytest tests/kernels tests/trainer tests/factory/gates -m portable

# Every durable effect of every scenario killed at; one of each other fault; the night in miniature. Hours; goes on where it was stopped.
# The kills alone: make chaos CHAOS="--way kill". A part: make chaos CHAOS="--scenario merge". Every injection, days: make chaos CHAOS="--each 0"
chaos: setup-dev
	@$(BIN)/python -m tests.chaos $(CHAOS)
	@$(BIN)/python -m tests.night

lint: setup-dev
	@$(BIN)/ruff check .

types: setup-dev
	@$(BIN)/mypy

check: lint types

bench: setup-dev
	@$(BIN)/python -m pytest benchmarks --benchmark-enable

# Is it right on this GPU, and how fast? Eight minutes at most; writes benchmarks/results/<card>-<commit>.md. Without a GPU: make bench-gpu GPU=--dry
bench-gpu: setup
	@$(BIN)/python -m benchmarks.gpu $(GPU)

# Three processes over every op × implementation × shape; some minutes.
bench-report: setup-dev
	@$(BIN)/python -m benchmarks.ops.kernel_report

# The loss doctor on injected faults and healthy runs: a line a run, then the confusion matrix. Five minutes a seed on an idle core; goes on
# where it was stopped. One fault alone, and what each replay showed: python -m benchmarks.loss_doctor.suite --help
doctor-suite: setup-dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.loss_doctor.suite --seeds 3 --results workspace/doctor-suite.jsonl

# The release judge on simulated pairs of models: false promotions, power, broken guards, coverage of its intervals. Some minutes.
judge-calibration: setup-dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.judge.calibration

bench-baseline: setup-dev
	@$(BIN)/python -m benchmarks.ops.kernel_report --baseline

clean:
	rm -rf $(VENV) .venv-serve workspace workspace-import .pytest_cache .mypy_cache .ruff_cache
