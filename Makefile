# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: demo test test-all lint format docs docs-table paper paper-quick clean

demo: $(INSTALLED)  ## prune the embedded ResNet20 to 1:4
	$(BIN)/snows prune

test: $(INSTALLED) lint  ## lint, types, import rules and the default tests
	$(BIN)/python -m pytest -n auto --dist worksteal

test-all: $(INSTALLED)  ## also the slow tests, on models of torchvision, timm and transformers
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,models]'
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not gpu"

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(INSTALLED)  ## make the site: build/docs/index.html
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "open build/docs/index.html"

docs-table: $(INSTALLED)  ## write the tables of README and docs from benchmarks/results
	$(BIN)/python benchmarks/tables.py
	$(BIN)/python benchmarks/laptop_tables.py

paper: $(INSTALLED)  ## tables and figures of the paper: what there is, or ENTRY="nm flops"; SHARED=folder; JOBS=6
	cd benchmarks && ../$(BIN)/python -m paper $(ENTRY) $(if $(SHARED),--shared $(abspath $(SHARED))) $(if $(JOBS),--jobs $(JOBS))

paper-quick: $(INSTALLED)  ## all of them scaled down, on the embedded network
	cd benchmarks && ../$(BIN)/python -m paper --quick

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache
