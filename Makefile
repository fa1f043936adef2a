# make demo: the main job on its built-in default.  make test: lint, types, tests.  make setup: the environment alone.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: setup demo test lint learn bench clean

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

clean:
	rm -rf $(VENV) build *.egg-info
