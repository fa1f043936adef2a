"""Every recipe for two steps in bfloat16 on one GPU, some also with vLLM: `pytest -m gpu`. Not run yet."""

import gzip
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
import helpers
from helpers import RECIPES, rows, run
from test_two_ranks import CASES

from rlkit.runs import RunOptions, run_recipe, start_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
MORE = {"dapo": ["--task", "helpers:even_lengths"]}  # a model with random weights gets the same reward for all digits
OWN = {  # recipes that the test on two ranks does not have
    "grpo_tools": ["--prompts_per_step", 8, "--group_size", 4],
    "grpo_async": ["--prompts_per_step", 8, "--group_size", 4],
    "pf_ppo": CASES["ppo"][1],
}
warm_dir = helpers.warm_dir
BUILD_THEIR_MODEL = ("grpo_tools", "grpo_async")
TRAINED = sorted({path.stem for path in RECIPES.glob("*.py")} - {"evaluate"})
assert set(TRAINED) <= CASES.keys() | OWN.keys()  # also without a GPU, when tests are collected
IN_VLLM = ["--rollout", "vllm", "--gpu_memory_utilization", 0.3]


def two_steps(recipe, model_dir, out, *more):
    """What two steps of a recipe logged; its own process is also that of vLLM, which takes one engine."""
    options = CASES[recipe][1] if recipe in CASES else OWN[recipe]
    model = [] if recipe in BUILD_THEIR_MODEL else ["--model", model_dir]
    teacher = ["--teacher", model_dir] if recipe == "distill" else []
    chosen = ["--steps", 2, "--compute_dtype", "bfloat16", "--out", out]
    run(recipe, *options, *model, *teacher, *chosen, *more, ranks=1)
    logged = rows(out)
    assert len(logged) == 2 and all(row["memory/train"] > 0 for row in logged)
    losses = [x for row in logged for name, x in row.items() if name.rpartition("/")[2] in ("loss", "grad_norm")]
    assert losses and all(map(math.isfinite, losses))
    return logged


@pytest.mark.parametrize("recipe", TRAINED)
def test_two_steps(recipe, tiny_dir, tmp_path):
    two_steps(recipe, tiny_dir, tmp_path / "out", *MORE.get(recipe, []))


@pytest.mark.parametrize("recipe", ["dapo", "distill", "grpo_tools", "grpo_vlm", "ppo"])
def test_two_steps_with_vllm(recipe, warm_dir, tmp_path):
    """Both compute the same from an image: the model is trained on images, and all prompts have one."""
    logged = two_steps(recipe, warm_dir, tmp_path / "out", *IN_VLLM)
    assert all(row["mismatch/abs_dlogp"] < 0.05 for row in logged)


def test_a_profile_has_the_kernels_of_its_step(tiny_dir, tmp_path):
    two_steps("grpo_vlm", tiny_dir, tmp_path / "out", "--profile_steps", 1)
    with gzip.open(tmp_path / "out" / "profile" / "step-1-rank-0.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    assert "phase: train" in {event.get("name") for event in events}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_adapters_alone_go_to_vllm_over_two_gpus(tiny_dir, tmp_path):
    """The run ends by itself if the sampler lacks the trained adapters."""
    sampler = ["--rollout", "vllm", "--gpu_memory_utilization", 0.4, "--rollout_options", "tensor_parallel_size", 2]
    adapters = ["--lora_rank", 4, "--sync_adapters", "--offload_between_phases", "--ppo_epochs", 2]
    options = [*CASES["grpo_vlm"][1], *MORE["dapo"], *sampler, *adapters, "--lr", 1e-2, "--steps", 3]
    run("grpo_vlm", *options, "--model", tiny_dir, "--out", tmp_path / "out", ranks=2)
    logged = rows(tmp_path / "out")
    size = sum(p.nbytes for n, p in load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors").items())
    assert len(logged) == 3 and all(row["mismatch/abs_dlogp"] < 0.05 for row in logged)
    assert all(row["weight_sync/bytes"] <= size for row in logged)


def test_an_out_of_memory_error_leaves_a_snapshot(tmp_path, monkeypatch):
    def main(cfg: RunOptions):
        start_run(cfg, "task")
        torch.empty(2**50, dtype=torch.uint8, device="cuda")

    monkeypatch.setattr(sys, "argv", ["recipe", "--out", str(tmp_path / "run"), "--memory_snapshot"])
    with pytest.raises(torch.OutOfMemoryError) as error:
        run_recipe(main)
    assert "ran out of memory in the phase set_up" in error.value.__notes__[0]
    assert (tmp_path / "run" / "memory-rank-0.pickle").stat().st_size
