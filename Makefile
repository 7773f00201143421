# What a developer types and what CI runs. Needs python3 (3.11 or newer) with pip, make and git.

PYTHON ?= python3
# More arguments for pytest: make bench ARGS="-k gemm", make test ARGS="tests/test_units.py".
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help bench test lint clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-6s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

bench: $(STAMP) ## measure the cases on the hardware that is here
	$(BIN)/pytest cases/ --gpu auto $(ARGS)

test: $(STAMP) ## run the tests; at least 90 % of the lines that need no device must be covered
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -ra -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --fail-under=90
	$(BIN)/python scripts/coverage_device_lines.py

lint: $(STAMP) ## ruff and mypy, changing nothing
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean: ## remove caches, coverage data and build outputs; .venv and reports/ stay
	rm -rf build dist htmlcov coverage.xml .coverage .coverage.* .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# One resolver run under the constraints, so that torch's version is settled before anything asks for it.
# A Python without ensurepip makes an environment without pip; the pip that is here then puts one in.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
		|| { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install pip; }
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@
