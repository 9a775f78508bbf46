# `make infer` and `make test` each work as the first command on a fresh machine: both set up .venv first.
CUDA ?= 13
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
CONFIG ?= configs/infer/cora.yaml
FIGURES ?= all
TABLE_SETS ?= cora citeseer pubmed musae-github elliptic ogbg-molhiv

.PHONY: setup infer tables reproduce-figures test lint clean
setup: .venv/.installed

.venv/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed; name one with PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[cuda$(CUDA),clone,dev]'
	@touch $@

infer: setup
	$(BIN)/python scripts/infer.py --config $(CONFIG)

# The paper's data set, decile and format tables; TABLE_SETS='--all --source synthetic' takes about ten minutes and 14 GiB.
tables: setup
	$(BIN)/python scripts/datasets.py stats $(TABLE_SETS)

# With a GPU: measures into results/local what FIGURES selects (all, smoke, kernels, ablation, end_to_end, ...), then draws
# that. Without one, or with FIGURES=none: draws results/figures from the recorded CSVs.
reproduce-figures: setup
	$(BIN)/python scripts/reproduce_figures.py $(FIGURES)

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf .venv *.egg-info .pytest_cache .ruff_cache
