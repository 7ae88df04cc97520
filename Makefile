# Every target but `clean` does the whole set-up first; scripts/setup.sh says what it does and does nothing twice.
#   make demo PYTHON=python3.12        another interpreter
#   make demo TORCH_INDEX=URL          take torch from this package index
#   make test PYTEST_ARGS='-k shard'   more arguments for pytest
#   make bench BENCH=NAME ARGS=--save  one benchmark, with arguments

# Servers run on loopback: a proxy must not come between.
comma := ,
unproxied := $(or $(NO_PROXY),$(no_proxy))
export NO_PROXY := 127.0.0.1,localhost$(if $(unproxied),$(comma)$(unproxied))
export no_proxy := $(NO_PROXY)
# Without bytecode every start compiles torch again.
unexport PYTHONDONTWRITEBYTECODE

bin := .venv/bin
# as many processes as cores, each computing with one thread
pytest := OMP_NUM_THREADS=1 $(bin)/python -m pytest -n logical --maxprocesses 8 --dist loadfile

.PHONY: help setup demo test test-vllm check bench clean

help:
	@echo 'make demo    the first evening: a real teacher, its cache, a student that learns from it'
	@echo 'make test    the tests; those that need vLLM too, where make test-vllm has run before'
	@echo 'make test-vllm  makes .venv-vllm, vLLM for a CPU (2.4 GB, Linux on x86_64), and runs the tests that need it'
	@echo 'make check   format, lint, types, import arrows, then the tests'
	@echo 'make bench   every script in benchmarks/, or one with BENCH=NAME'
	@echo 'make clean   removes .venv and what the tools left behind'

setup:
	@sh scripts/setup.sh

demo: setup
	@$(bin)/teachercache demo $(ARGS)

test: setup
	@$(pytest) $(PYTEST_ARGS)
	@[ ! -e .venv-vllm/stamp ] || $(MAKE) test-vllm

test-vllm: setup
	@sh scripts/setup_vllm.sh
	@.venv-vllm/bin/python -m pytest -m vllm tests/test_service_*.py $(PYTEST_ARGS)

check: setup
	$(bin)/ruff format --check .
	$(bin)/ruff check .
	MYPYPATH=.venv/house $(bin)/mypy -p teachercache
	$(bin)/lint-imports --no-logo
	$(pytest) $(PYTEST_ARGS)

bench: setup
	@set -e; for script in benchmarks/$(or $(BENCH),[!_]*).py; do \
	    echo "== $$script"; $(bin)/python "$$script" $(ARGS); \
	done

clean:
	rm -rf .venv .venv-vllm build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
