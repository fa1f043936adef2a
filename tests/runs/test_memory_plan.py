"""The plan at the start of a run on a GPU: refuses what does not fit, and never stops a run because it fails itself."""

import importlib.util
import json
import shlex
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from rlkit.data.tables import Rows
from rlkit.plan import __main__ as command_line
from rlkit.plan.rehearsal import Roles
from rlkit.plan.workload import with_limited_rows
from rlkit.rollout import vllm
from rlkit.runs import PolicySampler, TrainingOptions, memory_plan
from rlkit.runs.memory_plan import _have_images, planned_memory
from rlkit.tracking import Run, read_metrics
from rlkit.vlm import load_processor
from rlkit.vlm.loading import load_config

RECIPE = Path(__file__).parents[2] / "recipes" / "grpo_vlm.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """20 million parameters: 0.3 GiB in training, without activations."""
    path = tmp_path_factory.mktemp("model")
    LlamaConfig(
        hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=40_000, max_position_embeddings=65536, tie_word_embeddings=False,
    ).save_pretrained(path)  # fmt: skip
    return str(path)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A copy of a recipe that a person has changed, beside a module of their own."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "my_lr.py").write_text("LR = 1e-3\n")
    text = RECIPE.read_text().replace("\n@dataclass\n", "\nfrom my_lr import LR\n\n@dataclass\n", 1)
    steps = "    steps: runs.PositiveInt"
    assert steps in text
    text = text.replace(steps, f'    own: float = LR\n    """An option."""\n{steps}', 1)
    (folder / "my_recipe.py").write_text(text)
    return load(folder / "my_recipe.py")


def load(path):
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(path.parent))
    return module


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 16 GiB of a kind that no data sheet here has."""
    properties = SimpleNamespace(name="NVIDIA Future 16GB", total_memory=16 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    return properties


def options(recipe, model, **changed):
    return recipe.Config(model=model, micro_batch_tokens=4096, max_new_tokens=512, prompts_per_step=4, **changed)


def test_a_run_that_fits_has_planned_metrics(recipe, model, gpu, tmp_path, capsys, monkeypatch):
    """Rows that no option limits fill a micro-batch; the plan of a resumed run is the one that it started with."""
    cfg = options(recipe, model)
    planned = planned_memory(cfg, tmp_path)
    assert set(planned) == {"train", "weight_sync", "generate"} and 0.3 < planned["train"] < 14
    said = capsys.readouterr().out
    assert said.startswith("memory: fits: ") and "GiB usable on NVIDIA Future 16GB (93% of 16.0)" in said
    assert "4 prompts of 3584 tokens (0 of images), 16 responses of 512 tokens to each" in said
    monkeypatch.setattr(memory_plan, "_planned_by_command", lambda *_: pytest.fail("was planned already"))
    assert planned_memory(cfg, tmp_path) == planned
    run = Run(tmp_path, {}, planned_memory=planned)
    monkeypatch.setattr("rlkit.tracking.run.gpu_peak", lambda _: 0.5)
    run.phase("train")
    run.phase("checkpoint")
    run.log(0, {})
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row["memory/train"] == 0.5 and row["planned_memory/train"] == planned["train"]
    assert "planned_memory/generate" not in row  # this phase has not come


@pytest.mark.parametrize(
    ("rows", "of_images"),
    [
        ((), True),
        ([{"question": "q", "images": []}] * 300, False),
        ([{"question": "q", "images": []}] * 5 + [{"question": "q", "images": ["a.png"]}], True),
        ([{"question": "q", "video": "a.mp4"}], True),
        ([{"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]}], True),
        ([{"question": "", "unreadable": "row 1: no question"}], True),
    ],
)
def test_a_task_without_images_has_no_images_in_its_prompts(recipe, model, gpu, tmp_path, monkeypatch, rows, of_images):
    """A vision-language model would otherwise be planned with images that fill every prompt."""
    planned_with = []

    def plan(arguments, _):
        planned_with.append(arguments)
        return {"fits": True, "verdict": "fits", "rows": "rows", "phases": {}}

    monkeypatch.setattr(memory_plan, "_planned_by_command", plan)
    planned_memory(options(recipe, model), tmp_path, rows)
    assert ("--image_tokens 0" in " ".join(planned_with[0])) != of_images


def arguments_of_a_start(cfg, out, monkeypatch):
    """The plan's arguments and their values, of a GPU with 16 GiB."""
    planned_with = []

    def plan(arguments, _):
        planned_with.extend(arguments)
        return {"fits": True, "verdict": "fits", "rows": "rows", "phases": {}}

    monkeypatch.setattr(memory_plan, "_planned_by_command", plan)
    planned_memory(cfg, out)
    return dict(zip(planned_with, planned_with[1:], strict=False))


def test_a_server_that_the_run_starts_on_its_gpu_has_its_share(model, gpu, tmp_path, monkeypatch):
    """recipes/grpo_async.py without --servers; one with GPUs to spare has the whole GPU for training."""
    recipe = load(RECIPE.with_name("grpo_async.py"))
    for gpus, servers, expected in ((1, (), 0.6 * 16), (2, (), 16), (1, ("http://a:1",), 16)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        cfg = recipe.Config(model=model, servers=servers)
        (out := tmp_path / f"{gpus}{len(servers)}").mkdir()
        found = arguments_of_a_start(cfg, out, monkeypatch)
        assert float(found["--gpu_memory"]) == pytest.approx(expected)


def test_the_machines_memory_is_known_at_the_start(recipe, model, gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_plan, "CGROUP", tmp_path / "no limit")
    found = arguments_of_a_start(options(recipe, model), tmp_path, monkeypatch)
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
    assert float(found["--host_memory"]) == pytest.approx(int(total.split()[1]) / 2**20, rel=0.01)


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("0::/", ["memory.max"]),
        ("0::/job_7/step_0", ["memory.max", "job_7/memory.max", "job_7/step_0/memory.max"]),
        ("4:cpu,memory:/docker/1", ["memory/memory.limit_in_bytes", "memory/docker/1/memory.limit_in_bytes"]),
    ],
)
def test_the_limit_of_a_container_or_a_job_is_the_memory_of_its_host(tmp_path, line, files):
    """Of cgroups in version 2, and in version 1, where no limit is a large number."""
    (of_process := tmp_path / "cgroup").write_text(f"9:pids:/other\n{line}\n")
    root = tmp_path / "sys"
    whole = memory_plan.host_memory(root, of_process)
    for file in files:
        (path := root / file).parent.mkdir(parents=True, exist_ok=True)
        for limit, expected in ((f"{64 << 20}\n", 64 << 20), ("max\n", whole), ("9223372036854771712\n", whole)):
            path.write_text(limit)
            assert memory_plan.host_memory(root, of_process) == expected


def test_a_limit_counts_if_no_file_names_the_cgroups(tmp_path):
    (tmp_path / "memory.max").write_text(f"{64 << 20}\n")
    assert memory_plan.host_memory(tmp_path, tmp_path / "none") == 64 << 20


def test_a_run_that_does_not_fit_is_refused(recipe, model, gpu, tmp_path):
    gpu.total_memory = 200 << 20
    with pytest.raises(ValueError) as refused:
        planned_memory(options(recipe, model), tmp_path)
    sentence = str(refused.value)
    assert sentence.startswith("the run does not fit: "), sentence
    assert "GiB of 0.2 GiB usable on NVIDIA" in sentence, sentence
    assert "forward and backward" in sentence and "--plan_seconds 0 starts the run all the same" in sentence
    saved = json.loads((tmp_path / "plan.json").read_text())
    assert "\n" not in sentence and quoted_arguments(sentence) == saved["arguments"]
    assert not saved["plan"]["fits"]
    assert planned_memory(options(recipe, model, plan_seconds=0), tmp_path) == {}


def quoted_arguments(sentence):
    """What follows `python -m rlkit.plan` in a refusal."""
    words = shlex.split(sentence.partition("named by: ")[2])
    assert words[:3] == ["python", "-m", "rlkit.plan"]
    return words[3:]


def test_the_command_in_a_refusal_plans_the_refused_run(recipe, model, gpu, tmp_path, monkeypatch):
    """The command filled the model's context of 65,536 tokens with images, where rows of 4,096 tokens were refused."""
    refused = {"fits": False, "verdict": "does not fit", "rows": "rows", "phases": {}}
    monkeypatch.setattr(memory_plan, "_planned_by_command", lambda *_: refused)
    changed = {
        "lr": 1e-6, "kl_coef": 0.1, "rollout": "vllm", "rollout_options": {"max_num_seqs": "8"},
        "enable_gradient_checkpointing": False, "trackers": ("tensorboard", "wandb"), "own": -1.5, "out": "a folder",
    }  # fmt: skip
    cfg = options(recipe, model, **changed)
    with pytest.raises(ValueError) as error:
        planned_memory(cfg, tmp_path, [{"question": "q", "images": []}])
    planned = []
    monkeypatch.setattr(command_line, "recipe_roles", lambda *_: Roles(policy=load_config(model)))
    monkeypatch.setattr(command_line, "whole_plan", lambda *given: planned.append(given) or sys.exit("planned"))
    with pytest.raises(SystemExit, match="^planned$"):
        command_line.main(quoted_arguments(str(error.value)))
    ((planned_cfg, _, world, planned_gpu, _, command),) = planned
    as_planned = with_limited_rows(replace(cfg, out="", threads=planned_cfg.threads), load_config(model))
    assert asdict(planned_cfg) == asdict(as_planned) and planned_cfg.max_prompt_tokens == 4096 - 512
    assert (world, command.image_tokens, planned_gpu.name, planned_gpu.memory) == (1, 0, gpu.name, gpu.total_memory)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"engine": "fsdp1"}, "plan: engine: expected fsdp2 or megatron in a plan, got fsdp1"),
        ({"plan_seconds": 0.01}, "it took more than 0.01 seconds (--plan_seconds)"),
    ],
)
def test_a_plan_that_fails_is_one_line(recipe, model, gpu, tmp_path, capsys, monkeypatch, changed, reason):
    monkeypatch.setattr(memory_plan, "_check_weights", lambda *_: None)
    assert planned_memory(options(recipe, model, **changed), tmp_path) == {}
    assert capsys.readouterr().out == f"memory is not planned: {reason}\n"
    assert not (tmp_path / "plan.json").exists()


def test_weights_that_do_not_fit_are_refused_also_without_a_plan(recipe, model, gpu, tmp_path, capsys, monkeypatch):
    """A step that cannot be rehearsed, or not in time."""
    cfg = options(recipe, model, engine="fsdp1")
    for fits, verdict in ((True, "weights alone take 1 GiB"), (False, "does not fit: weights alone take 9 GiB")):

        def plan(arguments, _, fits=fits, verdict=verdict):
            if "--weights_only" not in arguments:
                raise memory_plan._NotPlannedError("it took too long")
            assert "--engine fsdp1" in " ".join(arguments) and "--gpu_memory" in arguments
            return {"fits": fits, "verdict": verdict}

        monkeypatch.setattr(memory_plan, "_planned_by_command", plan)
        if fits:
            assert planned_memory(cfg, tmp_path) == {}
            assert capsys.readouterr().out == f"memory is not planned: it took too long\nmemory: {verdict}\n"
        else:
            with pytest.raises(ValueError, match=f"^the run {verdict}; --plan_seconds 0 starts the run all the same$"):
                planned_memory(cfg, tmp_path)


@pytest.mark.parametrize("error", [memory_plan._NotPlannedError("no time"), OSError("no space")])
def test_weights_that_cannot_be_counted_do_not_end_the_run(recipe, model, gpu, tmp_path, capsys, monkeypatch, error):
    """Megatron's, which has no --weights_only, or a model that cannot be made in time."""
    commands = []

    def plan(arguments, _):
        commands.append("--weights_only" in arguments)
        raise error

    monkeypatch.setattr(memory_plan, "_planned_by_command", plan)
    assert planned_memory(options(recipe, model), tmp_path) == {}
    assert commands == [False, True]
    assert capsys.readouterr().out == f"memory is not planned: {error}\n"


def test_a_changed_recipe_model_or_version_is_planned_again(model, gpu, tmp_path, monkeypatch):
    folder, planned = tmp_path / "model", []
    shutil.copytree(model, folder)
    shutil.copy(RECIPE, tmp_path / "own.py")
    found = {"fits": True, "verdict": "fits", "rows": "rows", "phases": {}}
    monkeypatch.setattr(memory_plan, "_planned_by_command", lambda *_: planned.append(1) or found)
    cfg = options(load(tmp_path / "own.py"), str(folder))

    def plans():
        planned.clear()
        planned_memory(cfg, tmp_path)
        return len(planned)

    assert (plans(), plans()) == (1, 0)
    for path in (tmp_path / "own.py", folder / "config.json"):
        path.write_text(path.read_text() + "\n")
        assert (plans(), plans()) == (1, 0)
    monkeypatch.setattr(memory_plan, "versions", lambda: {"torch": "99"})
    assert (plans(), plans()) == (1, 0)
    (tmp_path / "plan.json").write_text("[]")
    assert (plans(), plans()) == (1, 0)


def test_a_plan_that_cannot_be_written_does_not_end_the_run(recipe, model, gpu, tmp_path, capsys, monkeypatch):
    def no_space(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(memory_plan, "_planned_by_command", no_space)
    assert planned_memory(options(recipe, model), tmp_path) == {}
    assert capsys.readouterr().out == "memory is not planned: No space left on device\n"


def test_options_that_are_in_no_file_are_not_planned(model, gpu, tmp_path, capsys):
    shutil.copy(RECIPE, tmp_path / "gone.py")
    cfg = options(load(tmp_path / "gone.py"), model)
    del sys.modules["gone"]
    assert planned_memory(cfg, tmp_path) == {}
    assert capsys.readouterr().out.startswith(
        "memory is not planned: recipe: expected options that are declared in a file"
    )


def test_there_is_no_plan_without_a_gpu_or_for_a_tiny_model(recipe, model, gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_plan, "_plan", lambda *_: pytest.fail("planned"))
    assert planned_memory(TrainingOptions(model="tiny"), tmp_path) == {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert planned_memory(options(recipe, model), tmp_path) == {}


def test_planned_memory_is_without_what_vllm_holds():
    """Its weights and its cache are subtracted from what is measured; its workspace is not."""
    phases = {
        "load": {"parameters": 9 << 30},
        "reference": {"parameters": 1 << 30},
        "critic: forward and backward": {"parameters": 3 << 30},
        "generate": {
            "parameters": 1 << 30, "sampler's weights": 2 << 30, "sampler's workspace": 1 << 29,
            "sampler's cache": 4 << 30,
        },
    }  # fmt: skip
    assert memory_plan._by_phase_of_run(phases, with_vllm=True) == {"train": 3.0, "generate": 1.5}
    assert memory_plan._by_phase_of_run(phases, with_vllm=False) == {"train": 3.0, "generate": 7.5}


def test_what_vllm_holds_is_subtracted_from_each_phase(tiny_dir, tmp_path, monkeypatch):
    """torch counts vLLM's memory pool also while vLLM sleeps: 40 GiB beside 30 of the trainer. No GPU has run this."""
    run, allocated = Run(tmp_path, {}), [5 << 30]

    def start(**_):
        allocated[0] += 40 << 30
        engine = MagicMock()
        engine.model_config.hf_config = load_config(tiny_dir)
        engine.model_config.try_get_generation_config.return_value = {}
        return engine

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: allocated[0])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: (40 + 30) << 30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(vllm, "_start_engine", start)
    monkeypatch.setattr(vllm, "takes_prepared", lambda _: False)
    rollout = vllm.VllmRollout(model=str(tiny_dir), processor=load_processor(tiny_dir))
    cfg = SimpleNamespace(reward_threads=0)
    PolicySampler(cfg, run, SimpleNamespace(reward=None), None, None, rollout)
    run.phase("train")
    run.phase("checkpoint")
    run.log(0, {})
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row["memory/train"] == 30.0


def test_a_row_function_that_fails_does_not_end_the_plan_of_rank_0():
    """The other ranks wait for it. Rows after the first one with images are not read."""

    def row(i):
        if i == 1:
            raise KeyError("column")
        return {"question": "q", "images": [b"1"] if i == 0 else []}

    assert _have_images(Rows(row, np.arange(3)))
    assert _have_images(Rows(row, np.arange(1, 3)))
