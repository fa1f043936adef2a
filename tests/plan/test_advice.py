"""What the command refuses, and the options that it advises, without a rehearsal."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig

from rlkit.plan import __main__ as command_line
from rlkit.plan.fit import Plan, ways_to_fit
from rlkit.plan.hardware import USABLE, gpu_named
from rlkit.plan.recipes import load_recipe, recipe_options, recipe_roles
from rlkit.plan.rehearsal import Rehearsal, Roles
from rlkit.plan.report import describe_rows, verdict
from rlkit.plan.sampler import SamplerMemory, Servers
from rlkit.plan.workload import Workload
from rlkit.runs.vllm_options import share_left

LLAMA = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8, vocab_size=1000)
H100 = gpu_named("h100-80gb")
OPTIONS = SimpleNamespace(nproc=4, image_tokens=None, gpus_per_node=4)


def plan_of(gib, sampler, **phases):
    rehearsal = Rehearsal({}, {}, 0, 1000, 1000, 500, Workload(32, 32, 0, prompts=1, group_size=2), 1)
    phases = {"train": {"parameters": gib << 30}, "weight sync": {}, **phases}
    return Plan(rehearsal, sampler, phases, H100)


def config(**options):
    return load_recipe("recipes/grpo_vlm.py").Config(model="MODEL", micro_batch_tokens=64, **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--gpu_memory", "0"], "gpu_memory: expected more than 0 GiB, got 0"),
        (["--nproc", "0"], "nproc: expected at least 1 GPU, got 0"),
        (["--gpus_per_node", "0"], "gpus_per_node: expected at least 1 GPU, got 0"),
        (["--server_gpus", "-1"], "server_gpus: expected at least 0 GPUs, got -1"),
        (
            ["--server_tensor_parallel", "2"],
            "server_tensor_parallel: expected it with --server_gpus N, got 2 without",
        ),
    ],
)
def test_numbers_of_gpus_are_checked(options, sentence):
    with pytest.raises(SystemExit) as end:
        command_line.main(["recipes/grpo_vlm.py", *options])
    assert str(end.value) == f"plan: {sentence}"


def test_whole_distributions_need_a_teacher_here(tmp_path):
    LLAMA.save_pretrained(tmp_path)
    module, model = load_recipe("recipes/distill.py"), str(tmp_path)
    options = ["--model", model, "--teacher", model, "--teacher_servers", "http://a:1", "--loss", "jsd"]
    with pytest.raises(ValueError, match="^teacher_top_k: expected at least 1 for --loss jsd without a teacher here"):
        recipe_roles(module, recipe_options(module, options))
    assert not recipe_roles(module, recipe_options(module, [*options, "--teacher_top_k", "8"])).whole_vocabulary


def test_a_share_that_is_too_small_for_the_sampler_is_raised(monkeypatch):
    small = plan_of(10, SamplerMemory(1 << 30, 0, 0, 2, utilization=0.8, share=0.01))
    cfg = config(rollout="vllm", gpu_memory_utilization=0.01)
    assert "raise --gpu_memory_utilization, at most to 0.8, or split the sampler" in verdict(cfg, small)
    way = next(ways_to_fit(cfg, small, LLAMA, 1, 8))
    assert way.changes == ["--gpu_memory_utilization 0.8"] and way.cfg.gpu_memory_utilization == 0.8
    automatic = replace(small, sampler=replace(small.sampler, share=0.8))
    assert "--gpu_memory_utilization" not in verdict(cfg, automatic)
    monkeypatch.setattr(command_line, "make_plan", lambda *_: automatic)
    sentence = command_line.advice(cfg, Roles(policy=LLAMA), small, OPTIONS)
    assert sentence == "does not fit with any of these options: the sampler's cache has no room for one sequence"


def test_the_share_among_vllms_options_is_the_one_to_raise():
    """It has precedence over the recipe's option."""
    small = plan_of(10, SamplerMemory(1 << 30, 0, 0, 2, utilization=0.8, share=0.01))
    said = verdict(config(rollout="vllm", rollout_options={"gpu_memory_utilization": "0.01"}), small)
    assert "raise --rollout_options gpu_memory_utilization, at most to 0.8, or" in said


def test_a_way_that_is_refused_does_not_end_the_search(monkeypatch, capsys):
    def attempt(cfg, *_):
        if not cfg.offload_between_phases:
            raise ValueError("model: expected another one")
        return plan_of(50, SamplerMemory(0, 0, 2, 2))

    monkeypatch.setattr(command_line, "make_plan", attempt)
    too_large = plan_of(100, SamplerMemory(0, 0, 2, 2))
    sentence = command_line.advice(config(), Roles(policy=LLAMA), too_large, OPTIONS)
    assert sentence.startswith("fits with ") and sentence.endswith("--offload_between_phases")
    assert "not possible: model: expected another one" in capsys.readouterr().out


def test_servers_and_trainers_both_get_advice(monkeypatch):
    sampler = SamplerMemory(90 << 30, 0, 0, 2, servers=Servers(8, 1))
    monkeypatch.setattr(command_line, "make_plan", lambda *_: plan_of(50, sampler, servers={"weights": 90 << 30}))
    monkeypatch.setattr(command_line, "server_advice", lambda *_: "servers fit with more GPUs")
    cfg, roles = config(rollout="vllm_server"), Roles(policy=LLAMA)
    both = command_line.advice(cfg, roles, plan_of(100, sampler, servers={"weights": 90 << 30}), OPTIONS)
    assert both.startswith("servers fit with more GPUs\nfits with --")
    one = command_line.advice(cfg, roles, plan_of(50, sampler, servers={"weights": 90 << 30}), OPTIONS)
    assert one == "servers fit with more GPUs"


@pytest.mark.parametrize(("gpus_per_node", "most"), [(4, "4"), (8, "8")])
def test_a_sampler_is_split_over_one_machine_at_most(gpus_per_node, most):
    huge = plan_of(10, SamplerMemory(900 << 30, 0, 0, 2, utilization=0.8, share=0.8))
    way = next(ways_to_fit(config(rollout="vllm"), huge, LLAMA, 16, gpus_per_node))
    assert way.cfg.rollout_options["tensor_parallel_size"] == most


def test_a_run_leaves_as_much_memory_as_the_plan():
    assert share_left(100, 100, 0) == pytest.approx(USABLE, abs=0.01)


def test_one_row_is_singular():
    one = describe_rows(Workload(1, 2, 0, prompts=1, group_size=1))
    assert one == "1 prompt of 1 token (0 of images), 1 answer of 2 tokens to each"
