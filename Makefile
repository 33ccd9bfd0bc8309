# Two commands: `make build` runs the course, `make test` all tests. `make help` lists the rest.
# Written for GNU Make 3.81 and a POSIX shell, which is what macOS has.

CORPUS  ?= data/corpus
PROFILE ?= offline
ARGS    ?=
WORKERS ?= 2
VENV    := .venv
BIN     := $(VENV)/bin

# The newest Python of 3.11 to 3.13 that runs; a name on PATH alone proves nothing. `make build PYTHON=...` names another.
PYTHON ?= $(shell for name in python3.13 python3.12 python3.11 python3 python; do \
	"$$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1 \
	&& command -v "$$name" && break; done)

.DEFAULT_GOAL := help
.PHONY: help venv build test test-long lab lint clean

help: ## list the targets
	@echo "make build [CORPUS=dir] [PROFILE=offline|standard|qwen] [ARGS='--only 01 -p retrieve.top_n=30']"
	@grep -E '^[a-z-]+: .*## ' Makefile | sed -e 's/: [^#]*## /	/' | expand -t 12

venv: ## make .venv and install the pinned set (once; again when pyproject.toml or constraints.txt changed)
	@python="$(PYTHON)"; if [ -z "$$python" ]; then \
		echo "make: no Python 3.11, 3.12 or 3.13 found. Debian: apt-get install python3 python3-venv;" \
			"macOS: brew install python@3.13; or name one: make $(or $(MAKECMDGOALS),venv) PYTHON=/path/to/python3" >&2; exit 1; \
	fi; "$$python" .ci/install.py $(VENV)

build: venv ## run the course headless on CORPUS with PROFILE, into outputs/ (ARGS: more for `ragbuild build`)
	@code=0; $(BIN)/ragbuild build --corpus "$(CORPUS)" --profile "$(PROFILE)" $(ARGS) || code=$$?; \
	if [ $$code -ne 0 ]; then echo "ragbuild ended with exit code $$code" >&2; fi; exit $$code

test: venv ## run all tests, notebooks included (ARGS: more for pytest)
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

test-long: venv ## the same, with a writer killed at 100 random moments on each database instead of 10
	@RAGBUILD_TEST_LONG=1 $(MAKE) test

lab: venv ## open the notebooks in JupyterLab
	@$(BIN)/python -m jupyterlab notebooks

lint: venv ## check format, style and that notebooks hold no outputs
	@$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/nbstripout --verify notebooks/*.ipynb

clean: ## remove caches (outputs/ and .venv stay)
	@rm -rf .pytest_cache .ruff_cache .hypothesis build dist
	@find ragbuild tests notebooks benchmarks data .ci -type d \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +
