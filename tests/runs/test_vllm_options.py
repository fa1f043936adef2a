"""What vLLM in the trainer's process is started with, from a recipe's options and the memory that is left."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
from helpers import load

from rlkit.runs import check_rollout_takes_adapters, models, parse_options
from rlkit.runs.option_types import check_ranges
from rlkit.runs.options import check_quantize_base, check_sampling, check_sync_adapters
from rlkit.runs.vllm_options import (
    adapter_flags,
    length_flags,
    longest_sequence,
    optimizer_bytes,
    share_left,
    vllm_options,
)

GIB = 2**30


def options(recipe, *arguments):
    return parse_options(load(recipe).Config, "", [str(x) for x in arguments])


def engine(parameters, *, offload=False):
    optimizer = torch.optim.AdamW([torch.zeros(parameters, requires_grad=True)])
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
    stepped = engine(1000)
    stepped.optimizer.param_groups[0]["params"][0].grad = torch.ones(1000)
    stepped.optimizer.step()
    assert optimizer_bytes([stepped, engine(500)]) == 2 * 4 * 500
    assert share_left(80 * GIB, 100 * GIB, 20 * GIB) == 0.53
    with pytest.raises(
        ValueError, match="gpu_memory_utilization: .* 20.0 of 80.0 GiB are free, .* take 14.0; try --off"
    ):
        share_left(20 * GIB, 80 * GIB, 14 * GIB)


def test_the_sampler_runs_code_of_the_models_repository_if_the_trainer_does(monkeypatch):
    for given, expected in [([], False), (["--trust_remote_code"], True)]:
        cfg = options("grpo_vlm", *given)
        assert started_with(monkeypatch, cfg, engine(1))["trust_remote_code"] is expected
    cfg = options("grpo_vlm", "--rollout_options", "trust_remote_code", "true")
    assert started_with(monkeypatch, cfg, engine(1))["trust_remote_code"] is True


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
def test_the_longest_sequence_follows_from_prompt_and_response(monkeypatch, recipe, arguments, longest):
    cfg = options(recipe, *arguments, "--rollout", "vllm")
    assert longest_sequence(cfg) == longest
    assert started_with(monkeypatch, cfg, engine(1)).get("max_model_len") == longest


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (3, 8), (32, 32), (33, 64), (512, 512)])
def test_vllm_has_room_for_an_adapter_that_is_sent_alone(monkeypatch, rank, room):
    cfg = options("grpo_vlm", "--rollout", "vllm", "--lora_rank", rank, "--sync_adapters")
    given = vllm_options(cfg, [])
    assert given["enable_lora"] is True and given["max_lora_rank"] == room
    assert adapter_flags(cfg) == ["--enable-lora", "--max-lora-rank", str(room)]
    merged = options("grpo_vlm", "--rollout", "vllm", "--lora_rank", rank)
    assert "enable_lora" not in vllm_options(merged, []) and adapter_flags(merged) == []


def test_a_server_of_the_run_has_room_for_a_prompt_and_its_response():
    limited = options("grpo_async", "--max_prompt_tokens", 100, "--max_new_tokens", 20)
    unlimited, phi3 = options("grpo_async", "--max_new_tokens", 20), AutoConfig.for_model("phi3")
    assert length_flags(limited, phi3) == ["--max-model-len", "120"] and length_flags(unlimited, phi3) == []
    phi3.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    assert length_flags(limited, phi3) == ["--max-model-len", "120"]
    assert length_flags(unlimited, phi3) == ["--max-model-len", "64"]


def test_an_adapter_that_vllm_has_no_room_for_is_named():
    with pytest.raises(ValueError, match="lora_rank: expected at most 512 with --sync_adapters, got 513"):
        vllm_options(options("grpo_vlm", "--rollout", "vllm", "--lora_rank", 513, "--sync_adapters"), [])


@pytest.mark.parametrize(
    ("recipe", "arguments", "problem"),
    [
        ("grpo_vlm", ["--rollout", "vllm"], "expected adapters (--lora_rank), got none"),
        ("grpo_vlm", ["--rollout", "sglang", "--lora_rank", 4], "expected --rollout vllm or vllm_server, got sglang"),
        ("reward_model", ["--lora_rank", 4], "expected a recipe that samples, got one that sends no weights"),
    ],
)
def test_adapters_alone_are_refused_where_nothing_can_use_them(recipe, arguments, problem):
    with pytest.raises(ValueError, match=re.escape(f"sync_adapters: {problem}")):
        check_sync_adapters(options(recipe, *arguments, "--sync_adapters"))
    check_sync_adapters(options(recipe, *arguments))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "expected adapters (--lora_rank), got none"),
        (["--lora_rank", 4, "--engine", "fsdp1"], "expected --engine fsdp2, got fsdp1"),
        (["--lora_rank", 4, "--engine", "megatron"], "expected --engine fsdp2, got megatron"),
        (["--lora_rank", 4, "--sync_adapters", "--rollout", "vllm"], "expected no --sync_adapters, got it"),
    ],
)
def test_quantized_weights_are_refused_where_they_cannot_be(arguments, problem):
    with pytest.raises(ValueError, match=re.escape(f"quantize_base: {problem}")):
        check_quantize_base(options("grpo_vlm", *arguments, "--quantize_base"))
    check_quantize_base(options("grpo_vlm", *arguments))
    check_quantize_base(options("sft", "--lora_rank", 4, "--quantize_base"))
    check_quantize_base(options("grpo_vlm", "--lora_rank", 4, "--quantize_base", "--sync_adapters"))  # nothing is sent


@pytest.mark.parametrize("temperature", [0.005, 2.5])
def test_temperatures_at_which_vllm_does_not_sample_are_refused(temperature):
    for rollout in ("vllm", "vllm_server"):
        with pytest.raises(ValueError, match=f"temperature: expected one from 0.01 to 2 for vLLM, got {temperature}"):
            check_sampling(options("grpo_vlm", "--rollout", rollout, "--temperature", temperature))
        check_sampling(options("grpo_vlm", "--rollout", rollout, "--temperature", 0.01))
    check_sampling(options("grpo_vlm", "--temperature", temperature))
    check_sampling(options("sft"))


def test_two_shares_of_gpu_memory_are_refused():
    """Those of --rollout_options would have counted."""
    shares = (["--gpu_memory_utilization", 0.5], ["--rollout_options", "gpu_memory_utilization", "0.7"])
    expected = "gpu_memory_utilization: expected it in one place, got 0.5, and 0.7 in --rollout_options"
    with pytest.raises(ValueError, match=f"^{expected}$"):
        check_sampling(options("grpo_vlm", "--rollout", "vllm", *shares[0], *shares[1]))
    for share in shares:
        check_sampling(options("grpo_vlm", "--rollout", "vllm", *share))


def test_hf_says_that_it_needs_no_adapters(capsys, monkeypatch):
    """It samples with the trained model; a back end that is not known to take adapters is refused."""
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    cfg = options("grpo_vlm", "--lora_rank", 4, "--sync_adapters")
    check_rollout_takes_adapters(cfg, None, SimpleNamespace())
    assert "sync_adapters: nothing to send, because hf samples with the trained model" in capsys.readouterr().out
    with pytest.raises(ValueError, match="sync_adapters: expected --rollout vllm or vllm_server, got mine"):
        check_rollout_takes_adapters(replace(cfg, rollout="mine"), None, SimpleNamespace())


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
