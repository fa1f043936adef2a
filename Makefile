# make demo: the main job on its built-in default.  make test: lint, types, tests.  make setup: the environment alone.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: setup demo test lint learn bench peers bench-peers docs clean

setup: $(VENV)/.installed

$(VENV)/.installed: setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "rlkit needs Python >= 3.11; $(PYTHON) is older. Name another: make setup PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	$(BIN)/torchrun --nproc-per-node=1 recipes/grpo_vlm.py

test: setup lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

# the five-seed table of the README
learn: setup
	$(BIN)/python benchmarks/learn.py

bench: setup
	$(BIN)/python -m pytest benchmarks --benchmark-enable

# losses and advantages against verl and TRL themselves, which want an environment of their own (some minutes to make)
peers: .venv-peers/.installed
	.venv-peers/bin/python -m pytest tests/peers/live.py

# every function beside a loop, verl and TRL: benchmarks/results/functions.md
bench-peers: .venv-peers/.installed
	mkdir -p .benchmarks
	OMP_NUM_THREADS=1 .venv-peers/bin/python -m pytest benchmarks/test_functions.py --benchmark-enable --benchmark-json=.benchmarks/functions.json
	.venv-peers/bin/python benchmarks/table.py .benchmarks/functions.json benchmarks/results/functions.md

.venv-peers/.installed: setup.cfg
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 -e '.[peers]'
	@touch $@

# the reference pages, from the docstrings
docs: setup
	$(BIN)/python docs/make_reference.py

clean:
	rm -rf $(VENV) .venv-peers build *.egg-info
