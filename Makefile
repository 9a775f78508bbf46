# `make infer` and `make test` each work as the first command on a fresh machine: both set up .venv first.
CUDA ?= 13
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
CONFIG ?= configs/infer/cora.yaml
FIGURES ?= all
PROCESSES ?= 2
TABLE_SETS ?= cora citeseer pubmed musae-github elliptic ogbg-molhiv

.PHONY: setup infer tables reproduce-figures test lint wheel check-wheel clean
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
	$(BIN)/python -m pytest -n $(PROCESSES) --dist worksteal

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# dist/fused3s-*.whl: the kernels alone, as the package fused3s.
wheel: setup
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

# Installs the wheel into an empty environment and runs one attention there, outside of the clone.
check-wheel: wheel
	rm -rf .venv-wheel && $(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet --disable-pip-version-check dist/fused3s-*.whl \
		$$($(BIN)/python -c "from importlib.metadata import version as v; print(f'torch=={v(\"torch\")} numpy=={v(\"numpy\")}')")
	cd / && $(CURDIR)/.venv-wheel/bin/python -P $(CURDIR)/tests/check_wheel.py

clean:
	rm -rf .venv .venv-wheel build dist *.egg-info .pytest_cache .ruff_cache
