# The targets create the virtual environment .venv and use it; no other setup is needed.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
SPHINX := $(BIN)/python -W ignore -m sphinx --quiet --nitpicky --fail-on-warning --doctree-dir build/doctrees

# Some containers set it; each process of pytest would compile all tests anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-all unit test-store lint simulate soak bench test-recipes docs linkcheck screenshots lock servers test-compose test-oldest build clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

.venv/installed: requirements.lock pyproject.toml
	@echo "==> creating the virtual environment .venv and installing requirements.lock"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is required (select one with PYTHON=...)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' || { echo "install Python's venv first: apt-get install python3-venv"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: .venv/installed ## rdzv demo: train with three agents, kill one, train on [ENDPOINT=redis://...]
	@$(BIN)/rdzv demo $(if $(ENDPOINT),--rdzv-endpoint "$(ENDPOINT)")

test: ## Install the test dependencies and run the tests, most of them on one store
	@$(MAKE) --no-print-directory --jobs 2 .venv/installed servers
	@$(MAKE) --no-print-directory --jobs 2 lint .venv/compiled
	@echo "==> running the tests"
	@$(PYTEST) --numprocesses 8 --dist loadgroup --no-loadscope-reorder $(SELECTION)

test-all: ## Run the tests on each store and with more seeds
	@$(MAKE) --no-print-directory test SELECTION='-m "not soak"'

unit: .venv/installed ## Run the quick tests: no servers, hardly any threads
	@$(PYTEST) --numprocesses 3 --dist worksteal tests/unit

test-store: .venv/installed servers ## Run the tests of one store [STORE=redis]
	@$(PYTEST) --numprocesses 2 --dist loadgroup -m "not soak" -k $(or $(STORE),redis) tests/integration

# Otherwise each process of pytest compiles all tests. What fails here fails there, and is shown.
.venv/compiled: .venv/installed $(wildcard tests/*.py tests/*/*.py)
	@$(PYTEST) --collect-only --quiet >/dev/null 2>&1 || true
	@touch $@

lint: .venv/installed ## Run ruff and mypy --strict; check that the generated docs are up to date
	@echo "==> checking style and types"
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/python -W ignore -m docs.generate --check

SEEDS ?= 100000
FIRST_SEED ?= 1
simulate: .venv/installed ## Simulate the protocol under faults on virtual time [SEEDS=100000 FIRST_SEED=1]
	@$(BIN)/python -m tests.simulation --seeds $(SEEDS) --first $(FIRST_SEED)

soak: .venv/installed servers ## Every torchrun scenario on every store; or hours of faults [HOURS=1 STORE=redis SEED=1]
ifdef HOURS
	@$(BIN)/python -m tests.faults --store $(or $(STORE),redis) --seed $(or $(SEED),1) --hours $(HOURS)
else
	@scripts/install-servers kubernetes s3 azure
	@$(PYTEST) -m "soak or not soak" tests/integration tests/faults
endif

test-recipes: .venv/installed ## Run the recipes of docs/recipes on real launchers, and kill a node in each
	@scripts/test-recipes

bench: .venv/installed servers ## Measure all stores and torch's own backends; writes docs/benchmarks.* [ARGS=--quick]
	@$(BIN)/python -W ignore -m benchmarks $(ARGS)

docs: .venv/installed ## Generate docs/options.md and docs/stores.md; build the site into build/site
	@$(BIN)/python -W ignore -m docs.generate
	@rm -rf build/site
	@$(SPHINX) -b html docs build/site

linkcheck: .venv/installed ## Check the links from the docs to other sites
	@$(SPHINX) -b linkcheck docs build/linkcheck

screenshots: .venv/installed servers ## Take the pictures in docs/ of real runs
	@$(BIN)/python -W ignore -m docs.screenshots

lock: ## Update requirements.lock from pyproject.toml
	@scripts/lock "$(PYTHON)"

servers: ## Install the servers for the integration tests (Debian, without Docker)
	@echo "==> installing the servers for the tests"
	@scripts/install-servers

test-oldest: servers ## Run the tests on the oldest versions that pyproject.toml allows
	@scripts/test-oldest "$(PYTHON)" -m "not soak" tests/unit tests/handlers tests/integration

test-compose: .venv/installed ## Run the conformance tests against docker-compose.yml
	@scripts/test-compose

# What `rdzv docs` opens where the wheel is installed.
PACKED := rdzv_plugins/cli/site
build: docs ## Build the wheel and the source distribution, with the site, and check them
	@rm -rf dist $(PACKED) && cp -r build/site $(PACKED)
	@$(BIN)/python -m build --no-isolation; status=$$?; rm -rf $(PACKED); exit $$status
	@$(BIN)/twine check --strict dist/*
	@$(BIN)/check-wheel-contents dist

clean: ## Remove everything that these targets created
	@rm -rf .venv .servers .compose .recipes build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -prune -exec rm -rf {} +
