# Each target sets up .venv by itself; a second call starts at once. `make` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
FILES := $(VENV)/.files
PIP := PIP_NO_INPUT=1 $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
NATIVE := $(shell find native -type f 2>/dev/null)
PACKAGES := ctxreuse $(wildcard agents/ctxreuse_agents edge/ctxreuse_edge cloud/ctxreuse_cloud)

# 3.11 first: it is what CI runs. Any later one will do; PYTHON=... overrides.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	command -v $$p >/dev/null && $$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.PHONY: help demo test bench lint clean
help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

demo: $(READY) ## a context computed once, reused after a restart, in forks and on another device
	$(BIN)/ctxreuse demo

test: lint ## lint, then all tests (native ones and those with a small real model included)
	$(BIN)/python -m pytest -q --durations=10 $(PYTEST) </dev/null

lint: $(READY) ## ruff, mypy, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY) ## every benchmark, or NAME=store; QUICK=1 for less data; JSON goes to bench-out/
	@for name in $(or $(NAME),$$($(BIN)/ctxreuse bench ls | cut -d' ' -f1)); do \
		$(BIN)/ctxreuse bench $$name $(if $(QUICK),--quick) --out bench-out/$$name.json || missed="$${missed:-} $$name"; done; \
	if [ -n "$${missed:-}" ]; then echo "missed a bar:$$missed"; exit 1; fi

clean: ## remove what was built and cached (not .venv)
	rm -rf build dist bench-out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find $(PACKAGES) tests examples -name __pycache__ -prune -exec rm -rf {} +
	rm -f $(READY)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later with the venv module is needed; set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# An editable install maps module names to files once, so a moved or new module needs a new install.
$(FILES): FORCE | $(BIN)/python
	@find $(PACKAGES) -name '*.py' | LC_ALL=C sort >$@.new; if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

# Build tools first: without isolation the project is built by what stands in .venv, pinned as all else.
$(READY): pyproject.toml constraints.txt $(NATIVE) $(FILES) | $(BIN)/python
	$(PIP) -q scikit-build-core cmake ninja
	@echo "installing into $(VENV)$(if $(wildcard $(BIN)/ctxreuse),, (the first time takes some minutes))"
	$(PIP) $(if $(wildcard $(BIN)/ctxreuse),-q) --no-build-isolation -e '.[dev]'
	@touch $@

.PHONY: FORCE
FORCE:
