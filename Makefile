# `make infer` and `make test` each work as the first command on a fresh machine: both set up .venv first.
# `make help` prints the comment after "##" of each target.
# 13, 12 or cpu; .venv keeps what it was made for.
MADE_FOR := $(shell cat .venv/.installed 2>/dev/null)
CUDA ?= $(or $(MADE_FOR),13)
IS_CPU := $(filter cpu,$(CUDA))
CPU_WHEELS ?= https://download.pytorch.org/whl/cpu
TORCH := $(shell sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
IS_ALLOWED := import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c '$(IS_ALLOWED)' 2>/dev/null && echo $$p && break; done)
EXTRAS ?=
BIN := .venv/bin
COMMA := ,
PIP := $(BIN)/python -m pip --disable-pip-version-check
WHEEL_VENVS := .venv-wheel/newest .venv-wheel/oldest
EXTRA_VENVS := $(patsubst %,.venv-wheel/with-%,pyg reorder dgl metis molecules qm9 cuda13 cuda12)
TORCH_oldest := torch==2.6.0 # the least that pyproject.toml allows
CONFIG ?= configs/train/cora.yaml configs/infer/cora.yaml
TRAIN_CONFIG ?= configs/train/cora.yaml
FIGURES ?= paper
RESULTS ?= results
PROCESSES ?= 2
TABLE_SETS ?= cora citeseer pubmed musae-github elliptic yelp reddit ogbg-molhiv ogbg-molpcba ogbg-ppa ogbg-code2 zinc \
	peptides-func peptides-struct pascalvoc-sp coco-sp

.DEFAULT_GOAL := setup
.PHONY: help setup infer train tables reproduce-figures soak report check-figures test lint docs wheel check-wheel \
	check-types clean $(WHEEL_VENVS) $(EXTRA_VENVS)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: .venv/.installed ## install everything into .venv (CUDA=12: for CUDA 12; CUDA=cpu: without; PYTHON=/path/to/python; EXTRAS=metis)

.PHONY: check-cuda
check-cuda:
	@case "$(CUDA)" in 13 | 12 | cpu) ;; *) echo "CUDA=$(CUDA): allowed are 13, 12 and cpu"; exit 1 ;; esac
	@test "$(CUDA)" = "$(or $(MADE_FOR),$(CUDA))" || { \
		echo ".venv was made for CUDA=$(MADE_FOR), and this asks for CUDA=$(CUDA); run make clean first"; exit 1; }

# An environment that was not finished, or is of another Python, is made anew. clone.pth: `import models` from any folder.
.venv/.installed: pyproject.toml | check-cuda
	@test ! -L .venv || { echo ".venv links to $$(readlink .venv): setup would change the environment of another clone; \
	remove the link for one of your own, or call .venv/bin/python yourself"; exit 1; }
	@$(or $(PYTHON),false) -c '$(IS_ALLOWED)' || { \
		echo "PYTHON=$(PYTHON): Python 3.11 or 3.12 is needed; name one with PYTHON=/path/to/python3.12"; exit 1; }
	@echo "installing into .venv what pyproject.toml pins: PyTorch $(if $(IS_CPU),without CUDA,and CuPy for CUDA $(CUDA)), \
	DGL, PyG, ogb and tools; $(if $(IS_CPU),2 GB,6 GB) on disk, some minutes"
	test -s $@ && test "$$($(BIN)/python -V)" = "$$($(PYTHON) -V)" || $(PYTHON) -m venv --clear .venv
	echo '$(CURDIR)' > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/clone.pth"
ifdef IS_CPU
	$(PIP) install --no-deps --index-url $(CPU_WHEELS) '$(TORCH)' || { \
		echo "PyTorch without CUDA comes from $(CPU_WHEELS); if that is out of reach, name a mirror: CPU_WHEELS=URL"; exit 1; }
endif
	$(PIP) install --editable '.[$(if $(IS_CPU),,cuda$(CUDA)$(COMMA))clone,dev,docs$(EXTRAS:%=$(COMMA)%)]'
	@echo $(CUDA) > $@

# Ten blocks are the paper's model, for its time: they overfit Cora's 140 labels. Two layers predict it.
infer: setup ## Cora by two layers, for their accuracy, and by the paper's ten blocks, for their time (CONFIG=another.yaml)
	$(BIN)/python scripts/infer.py $(CONFIG:%=--config %)

train: setup ## train on Cora into runs/cora (TRAIN_CONFIG=configs/mine.yaml, RUN=folder); continues a stopped run
	$(BIN)/python scripts/train.py --config $(TRAIN_CONFIG) $(if $(RUN),--output $(RUN)) --resume

# 16 of the 32 sets in results/datasets. Left out: artist, com-amazon, amazon0505, blog, igb-small, igb-medium,
# ogbn-products, amazon-products of the paper, and the eight beyond it (questions to ego-twitter, zinc12k-val-test).
# TABLE_SETS='--all --source synthetic' has them all, and b3db, as surrogates: about 15 minutes and 14 GiB. A real graph is
# read from datasets/NAME.npz, or by TABLE_SETS='NAME --path FILE'.
tables: setup ## the paper's data set, decile and format tables into results/local; downloads the sets (TABLE_SETS='cora pubmed')
	$(BIN)/python scripts/datasets.py stats $(TABLE_SETS)

# With a GPU: measures into results/local what FIGURES selects (paper, all, smoke, kernels, ablation, ...), then draws that.
# Without one, or with FIGURES=none: draws results/figures from the recorded CSVs.
reproduce-figures: setup ## with a GPU download graphs and measure; then draw (FIGURES=smoke: minutes; all: beyond the paper; none: only draw; SOURCE=auto: with surrogates)
	$(BIN)/python scripts/reproduce_figures.py $(FIGURES) $(if $(SOURCE),--source $(SOURCE))

# Without a GPU: eager and compiled steps alone, 300 of each case.
soak: setup ## steps of every layer, each with a new graph; fail if memory grew (STEPS=20000, ONLY=GATConv, OUTPUT=folder)
	$(BIN)/python scripts/soak.py $(STEPS:%=--steps %) $(ONLY:%=--only %) $(OUTPUT:%=--output %)

report: setup ## RESULTS.md, CLAIMS.md, figures and the README's tables from the CSVs (RESULTS=results/local: your own)
	$(BIN)/python scripts/report.py --results $(RESULTS)

check-figures: setup ## fail if a recorded figure or table is not what the recorded CSVs give
	$(BIN)/python scripts/report.py --check

test: setup ## all tests; those that need a GPU or a browser are skipped where there is none
	$(BIN)/python -m pytest -n $(PROCESSES) --dist worksteal

lint: setup ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

docs: setup ## the pages of docs/ with the API reference, into build/docs; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# dist/fused3s-*.whl: the package fused3s alone. Needs no more of a clone than pip.
wheel: ## build dist/fused3s-*.whl, the package alone
	rm -rf build dist
	$(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

check-wheel: setup wheel ## install the wheel beside the oldest and the newest PyTorch (10 GB), train a PyG model there; each extra alone
	$(MAKE) --no-print-directory --output-sync -j 2 check-types $(WHEEL_VENVS) $(EXTRA_VENVS)
	rm -rf .venv-wheel

# An environment with the wheel, one PyTorch and PyG; the program runs outside of the clone.
$(WHEEL_VENVS): .venv-wheel/%:
	$(PYTHON) -m venv --clear --without-pip $@
	$(BIN)/uv pip install --quiet --python $@/bin/python dist/fused3s-*.whl torch_geometric $(TORCH_$*)
	cd / && $(CURDIR)/$@/bin/python -W ignore -P $(CURDIR)/tests/check_wheel.py

# An environment with the wheel and one extra.
$(EXTRA_VENVS): .venv-wheel/with-%:
	$(PYTHON) -m venv --clear --without-pip $@
	$(BIN)/uv pip install --quiet --python $@/bin/python "$$(ls dist/fused3s-*.whl)[$*]"
	cd / && $(CURDIR)/$@/bin/python -W ignore -P $(CURDIR)/tests/check_extra.py $*

check-types: .venv-wheel/newest
	$(BIN)/mypy --strict --no-incremental --python-executable $</bin/python tests/typed_client.py

clean: ## remove environments, builds and caches
	rm -rf .venv .venv-wheel build dist *.egg-info .pytest_cache .ruff_cache
