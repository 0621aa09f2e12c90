# Concordia. `make help` lists what there is. Everything happens in .venv; nothing outside it is installed.

VENV  := .venv
PY    := $(VENV)/bin/python
STAMP := $(VENV)/.setup-done
ARGS  ?=
CODE  := tiers engine gateway ops bench tests
UNIT  := $(wildcard tests/tiers tests/gateway tests/engine tests/ops)

# Bytecode is kept, whatever the environment says: every process that is started would compile all of this anew, and the tests too.
unexport PYTHONDONTWRITEBYTECODE

# Small models in tests: more torch threads only get in each other's way.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

# Unit tests run in two processes. Those with processes wait more than they compute, so three of them keep two cores busy; tests of one
# running system run in the same one (tests/system/conftest.py), the longest first (tests/order.py). One at a time: ARGS="-n 0".
SIDE_BY_SIDE := -n 2 --dist worksteal
WITH_SYSTEMS := -n 3 --dist loadgroup --no-loadscope-reorder
# Unit tests sync thousands of small files: they lie in memory, where there is room, and are gone with the run. Systems write to the disk.
IN_MEMORY := room=$$(df --output=avail /dev/shm 2>/dev/null | tail -1); \
	files=$$(mktemp -d $$(test "$${room:-0}" -gt 4000000 && echo /dev/shm/check-XXXXXX)); \
	trap 'rm -rf "$$files"' EXIT; trap 'exit 130' INT TERM;
# What a check at the keyboard leaves to `make test`.
SLOW := soak or system or kinds or process

.DEFAULT_GOAL := help
.PHONY: help setup serve test check format demo soak bench gpu pins clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make the environment in .venv (about two minutes the first time)

$(STAMP): pyproject.toml constraints.txt ops/setup.sh
	@bash ops/setup.sh $(VENV)
	@touch $@

serve: $(STAMP)  ## start gateway, host agent and two engines on 127.0.0.1:8080 (ARGS="--port 9000 ...")
	@exec $(VENV)/bin/concordia serve $(ARGS)

test: $(STAMP)  ## run the whole suite, in about fourteen minutes on two cores (fetches the demo model the first time)
	@$(VENV)/bin/concordia pull --if-missing smollm2
	@$(IN_MEMORY) TESTS_IN_MEMORY="$$files" $(ONE_THREAD) $(PY) -m pytest -m "not soak" $(WITH_SYSTEMS) $(ARGS)

check: $(STAMP)  ## format, lint, types, quick unit tests; under a minute on two cores
	@$(PY) -m ruff format --check $(CODE)
	@$(PY) -m ruff check $(CODE)
	@$(PY) -m mypy
	@$(IN_MEMORY) $(ONE_THREAD) $(PY) -m pytest -q -m "not ($(SLOW))" $(SIDE_BY_SIDE) --basetemp="$$files/tests" $(UNIT) $(ARGS)

format: $(STAMP)  ## format the code and fix what the linter can fix
	@$(PY) -m ruff format $(CODE)
	@$(PY) -m ruff check --fix $(CODE)

demo: $(STAMP)  ## an answer streams, its engine is killed, the stream goes on; then everything is killed
	@exec $(VENV)/bin/concordia demo $(ARGS)

soak: $(STAMP)  ## the long runs: an hour of random work and kills on the store, an hour beside a noisy neighbour (FALSE_ALARM_MINUTES), a kill at every token, the demo
	@$(VENV)/bin/concordia pull --if-missing smollm2
	@exec $(PY) -m pytest -m soak -s --timeout 7200 $(ARGS)

bench: $(STAMP)  ## every figure with its baseline, tables and plots into bench/results/ (ARGS=--quick: into bench/results/quick/)
	@$(VENV)/bin/concordia pull --if-missing smollm2
	@$(VENV)/bin/concordia pull --if-missing gemma3-270m
	@exec $(PY) -m bench $(ARGS)

gpu: $(STAMP)  ## on a machine with a GPU: check the device handlers, then measure them, in under eight minutes (ARGS=--quick)
	@exec $(PY) -m bench.gpu $(ARGS)

pins: $(STAMP)  ## write what is installed now into constraints.txt
	@bash ops/pins.sh $(VENV)

clean:  ## remove caches and build leftovers (the environment: rm -rf .venv)
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
