"""What vLLM in the trainer's process is started with, from a recipe's options and the memory that is left."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
from helpers import load

from rlkit.runs import check_ranges, models, parse_options
from rlkit.runs.vllm_options import longest_sequence, optimizer_bytes, share_left

GIB = 2**30


def options(recipe, *arguments):
    return parse_options(load(recipe).Config, "", [str(x) for x in arguments])


def engine(parameters, *, offload=False):
    weights = [torch.zeros(parameters)]
    optimizer = SimpleNamespace(param_groups=[{"params": weights}])
    found = SimpleNamespace(optimizer=optimizer, offload_between_phases=offload)
    return SimpleNamespace(**vars(found), gathered=None, model_parallel_group=None)


def started_with(monkeypatch, cfg, *engines, gpu=None):
    """The options that `make_rollout` is called with; `gpu`: its free and its total bytes."""
    if gpu:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: gpu)
    monkeypatch.setattr(models, "make_rollout", lambda *_, **given: given)
    return models.build_rollout(cfg, "model", None, engines[0], beside=engines[1:])


def test_the_sampler_gets_what_the_trainer_leaves(monkeypatch):
    """80 GiB of 100 are free, 7 are reserved; the optimizers of policy and critic will take two numbers a parameter."""
    cfg, gpu = options("grpo_vlm", "--rollout", "vllm"), (80 * GIB, 100 * GIB)
    given = started_with(monkeypatch, cfg, engine(1000), engine(1000), gpu=gpu)
    assert given["gpu_memory_utilization"] == 0.72  # rounded down
    assert optimizer_bytes([engine(1000), engine(500)]) == 2 * 4 * 1500
    assert optimizer_bytes([engine(1000, offload=True), SimpleNamespace()]) == 0
    assert share_left(80 * GIB, 100 * GIB, 20 * GIB) == 0.53
    with pytest.raises(
        ValueError, match="gpu_memory_utilization: .* 20.0 of 80.0 GiB are free, .* take 14.0; try --off"
    ):
        share_left(20 * GIB, 80 * GIB, 14 * GIB)


def test_a_share_that_is_given_counts(monkeypatch):
    cfg = options("grpo_vlm", "--rollout", "vllm", "--gpu_memory_utilization", 0.3)
    gpu = (10 * GIB, 100 * GIB)
    assert started_with(monkeypatch, cfg, engine(1), gpu=gpu)["gpu_memory_utilization"] == 0.3
    assert started_with(monkeypatch, options("grpo_vlm"), engine(1), gpu=gpu)["gpu_memory_utilization"] == 0.8
    with pytest.raises(ValueError, match="gpu_memory_utilization: expected 0 to 1, got 1.5"):
        check_ranges(options("grpo_vlm", "--gpu_memory_utilization", 1.5))


@pytest.mark.parametrize(
    ("recipe", "arguments", "longest"),
    [
        ("grpo_vlm", ["--max_prompt_tokens", 2048, "--max_new_tokens", 512], 2560),
        ("grpo_vlm", ["--max_new_tokens", 512], None),  # prompts may fill the context
        ("grpo_tools", ["--max_prompt_tokens", 2048, "--max_new_tokens", 512, "--max_response_tokens", 4096], 6144),
        ("grpo_tools", ["--max_prompt_tokens", 2048, "--max_new_tokens", 512], None),  # and so may several turns
        ("sft", ["--max_new_tokens", 512], None),
    ],
)
def test_the_longest_sequence_follows_from_prompt_and_answer(monkeypatch, recipe, arguments, longest):
    cfg = options(recipe, *arguments, "--rollout", "vllm")
    assert longest_sequence(cfg) == longest
    assert started_with(monkeypatch, cfg, engine(1)).get("max_model_len") == longest


def test_rollout_options_come_last(monkeypatch):
    given = ["tensor_parallel_size", "2", "quantization", "fp8", "enforce_eager", "true", "max_model_len", "4096"]
    cfg = options("grpo_vlm", "--rollout", "vllm", "--max_prompt_tokens", 64, "--rollout_options", *given)
    found = started_with(monkeypatch, cfg, engine(1))
    assert (found["tensor_parallel_size"], found["quantization"], found["enforce_eager"]) == (2, "fp8", True)
    assert found["max_model_len"] == 4096
    with pytest.raises(ValueError, match="hf rollout: expected options .*; got quantization"):
        monkeypatch.undo()
        cfg = options("grpo_vlm", "--rollout_options", "quantization", "fp8")
        models.build_rollout(cfg, "model", None, engine(1))
