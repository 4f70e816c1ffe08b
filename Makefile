# make demo        a fleet of four processes answers a question about a picture
# make test        what CI runs: lint, types, import contracts, protos, tests two at a time
# make test-full   the same tests at full counts; the summary lands in docs/test-full.txt
# make lint | format | stubs | lock | clean

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
MODEL  ?= models/shapes-vl
PYTEST ?=

.DELETE_ON_ERROR:
.PHONY: demo test test-full lint format stubs lock clean

demo: $(STAMP)
	$(BIN)/epd demo --model $(MODEL)

test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not full" -n 2 $(PYTEST)

test-full: lint
	EPD_TEST_FULL=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --summary-file=docs/test-full.txt $(PYTEST)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf format -d --exit-code

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format -w

# The package's build hook makes the stubs.
stubs: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --editable .

# Exact versions of everything, for any index: no local version suffix, no options.
lock: $(STAMP)
	$(BIN)/pip-compile --quiet --all-extras --allow-unsafe --strip-extras --no-annotate --no-header \
		--no-emit-index-url --no-emit-trusted-host --no-emit-find-links --no-emit-options \
		--output-file requirements.lock pyproject.toml
	sed -i -E 's/^([A-Za-z0-9._-]+==[^+ ]+)\+[A-Za-z0-9.]+/\1/' requirements.lock

clean:
	rm -rf $(VENV) epd/v1 build dist .mypy_cache .ruff_cache .pytest_cache

$(STAMP): requirements.lock pyproject.toml hatch_build.py $(wildcard protos/epd/v1/*.proto)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "epd needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1 || echo missing); name another with PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	@touch $@
