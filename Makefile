# make demo · make test · make check · make bench: each sets up what it needs first, and skips set-up when up to date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: setup demo test test-slow check lint types bench bench-report bench-baseline clean

setup: $(STAMP)

# A GPU build of torch is not wanted on a machine without one: constraints.txt pins the exact version to take.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python >= 3.11 is needed: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@command -v git >/dev/null || { echo "git is needed: install it with your system's package manager"; exit 1; }
	@command -v g++ >/dev/null || command -v clang++ >/dev/null || { echo "a C++ compiler is needed (torch.compile uses it): install g++ with your system's package manager"; exit 1; }
	@command -v bwrap >/dev/null || if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing bubblewrap (the sandbox for proposed patches)"; { apt-get update -qq && apt-get install -y -qq bubblewrap; } >/dev/null 2>&1 || echo "bubblewrap could not be installed: the sandbox makes its namespaces itself where the kernel lets it ('factory doctor' tells)"; \
	else echo "bubblewrap is missing: the sandbox makes its namespaces itself where the kernel lets it ('factory doctor' tells), else install it with your system's package manager"; fi
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing pinned packages into $(VENV) (some minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)
	@$(BIN)/factory demo

# Some minutes: every package and every promise. The rest is whole gate runs, kills and long simulations, each with its reason.
test: $(STAMP)
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-slow: $(STAMP)
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

lint: $(STAMP)
	@$(BIN)/ruff check .

types: $(STAMP)
	@$(BIN)/mypy

check: lint types

bench: $(STAMP)
	@$(BIN)/python -m pytest benchmarks --benchmark-enable

# Three processes over every op × implementation × shape; some minutes.
bench-report: $(STAMP)
	@$(BIN)/python -m benchmarks.kernel_report

bench-baseline: $(STAMP)
	@$(BIN)/python -m benchmarks.kernel_report --baseline

clean:
	rm -rf $(VENV) workspace .pytest_cache .mypy_cache .ruff_cache
