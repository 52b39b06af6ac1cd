# Targets: install demo test test-slow check accuracy bench clean. Each says what it does; all are safe to repeat.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# One thread per process: tests and benchmarks start several processes themselves.
export OMP_NUM_THREADS ?= 1

.PHONY: help install demo test test-slow check accuracy bench clean

help:
	@echo "install    create $(VENV) with pinned versions (skipped when up to date)"
	@echo "demo       plan Llama-3-8B on 64 H100, search, train a small model on 4 CPU processes; results in out/"
	@echo "test       all tests that need neither a GPU nor patience (10 to 15 minutes on 2 cores)"
	@echo "test-slow  the tests left out of 'test' for their length"
	@echo "check      ruff, formatting, mypy, import rules; prints the longest files and functions"
	@echo "accuracy   the cost models' error on measurements"
	@echo "bench      every benchmark, quick sizes, one JSON line each"
	@echo "clean      remove $(VENV), caches, out/ and build products"

install: $(STAMP)
	@echo "install: $(VENV) is up to date; try: $(BIN)/piper simulate llama3-8b --gpus 64 --strategy pp=4,dp=16,zero=1"

$(STAMP): pyproject.toml constraints.txt
	@echo "install: creating $(VENV) with the versions of constraints.txt (torch is large: this takes minutes once)"
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "install: Python 3.11 or newer is needed; try: make install PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,hf]' -c constraints.txt
	$(BIN)/python -m compileall -q piper simulator cost_models
	@touch $(STAMP)

demo: $(STAMP)
	@echo "demo: plan, compare, search, train; results in out/"
	$(BIN)/python examples/demo.py

test: $(STAMP)
	@echo "test: everything that needs neither a GPU nor patience"
	$(BIN)/python -m pytest -q -n auto --dist worksteal

test-slow: $(STAMP)
	@echo "test-slow: the long tests"
	$(BIN)/python -m pytest -q -n auto --dist worksteal -m "slow and not gpu"; status=$$?; [ $$status -eq 5 ] && echo "test-slow: no long tests yet" || exit $$status

check: $(STAMP)
	@echo "check: lint, formatting, types, import rules, sizes"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/architecture/longest.py

accuracy: $(STAMP)
	@echo "accuracy: the cost models against measurements"
	$(BIN)/python benchmarks/accuracy.py
	$(BIN)/python benchmarks/published_accuracy.py

bench: $(STAMP)
	@echo "bench: quick sizes; without --quick each script takes its full size"
	@for script in benchmarks/bench_*.py benchmarks/capture_speed.py benchmarks/compile_time.py benchmarks/engine_speed.py benchmarks/pricing_speed.py benchmarks/unfolded_scale.py benchmarks/evaluation_orderings.py benchmarks/schedule_synthesis.py benchmarks/search_rate.py benchmarks/runtime_parity.py benchmarks/cpu_loop.py benchmarks/gpu_check.py; do $(BIN)/python $$script --quick --json || exit 1; done

clean:
	@echo "clean: removing $(VENV), caches, out/ and build products"
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
