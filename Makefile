# `make demo` and `make test` set up .venv by themselves; PYTHON=... chooses the interpreter.
BIN := .venv/bin
export PYTHON
# These compute and wait for nothing: one process a core, each of which takes over from the other when it is done. The
# other tests have processes, sockets and clocks of their own; they mostly wait, so four go side by side.
COMPUTING := tests/inference tests/kernels tests/kv tests/speculating tests/forging tests/protocol tests/queueing
SPREAD := -n auto --maxprocesses 8 --dist worksteal
BESIDE := -n 4 --dist worksteal

.PHONY: demo test prove check bench bench-peers setup clean

demo: setup
	$(BIN)/mtplx demo

test: setup check
	$(BIN)/python -m pytest -m "not prove" $(SPREAD) $(COMPUTING)
	$(BIN)/python -m pytest -m "not prove" $(BESIDE) $(COMPUTING:%=--ignore=%)

# Lint, format and types; the import rules and sizes are tests.
check: setup
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The long forms; they write bench/results.
prove: setup
	$(BIN)/python -m pytest -m prove $(SPREAD) $(COMPUTING)
	$(BIN)/python -m pytest -m prove $(COMPUTING:%=--ignore=%)
	$(BIN)/python bench/faults.py
	$(BIN)/python bench/soak.py
	$(MAKE) bench

bench: setup
	$(BIN)/python bench/broker.py
	$(BIN)/python bench/tracing.py
	$(BIN)/python bench/parity.py
	$(BIN)/python bench/parity.py --modes serial,hyper
	$(BIN)/python bench/prefix.py
	$(BIN)/python bench/decode_cpu.py
	$(BIN)/python bench/memory.py

# Against other queues, which it fetches first.
bench-peers: setup
	@scripts/peers
	$(BIN)/python bench/journal.py

setup:
	@scripts/setup

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
