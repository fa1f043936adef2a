"""The longest rows that options allow, and the largest micro-batches of them: what a plan rehearses."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, LlamaConfig

from rlkit.data.samples import collate
from rlkit.engines.packing.micro_batches import micro_batches
from rlkit.engines.packing.shared_prompts import shared_prompt_groups
from rlkit.plan import megatron
from rlkit.plan.hardware import gpu_named
from rlkit.plan.recipes import load_recipe, recipe_options, recipe_roles
from rlkit.plan.rehearsal import ModelSize, Rehearsal, Roles
from rlkit.plan.report import describe_rows
from rlkit.plan.roofline import costs, rows_flops
from rlkit.plan.sampler import SamplerMemory, sampler_memory
from rlkit.plan.workload import (
    Workload,
    _group,
    largest_micro_batches,
    longest_batch,
    packed_rows,
    with_limited_rows,
)
from rlkit.runs.vllm_options import longest_sequence

LLAMA = LlamaConfig(
    hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=1000,
    max_position_embeddings=8192,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "llava"])
def test_tokens_of_images_are_rehearsed(family):
    """Also those of a family whose patches are not known: only its tower is left out."""
    recipe = load_recipe("recipes/grpo_vlm.py").Config
    cfg = recipe(max_prompt_tokens=1024, max_new_tokens=256, prompts_per_step=8, group_size=4)
    config = AutoConfig.for_model(family)
    workload = longest_batch(cfg, config, 1, None)
    batch = largest_micro_batches(workload, config, 16384, share_prompts=True)
    assert workload.image_tokens == 960 and set(batch.lengths) == {1024 + 256}
    assert bool(batch.vision[0]) == (family == "qwen2_5_vl")


@pytest.mark.parametrize(
    ("options", "prompt", "response"),
    [
        ({"max_prompt_tokens": 1024}, 1024, 8192 - 1024),
        ({"max_prompt_tokens": 1024, "max_response_tokens": 4096}, 1024, 4096),
        ({"max_response_tokens": 4096}, 4096, 4096),
        ({}, 4096, 4096),
        ({"max_prompt_tokens": 1024, "max_response_tokens": 4096, "max_turns": 1}, 1024, 128),
    ],
)
def test_an_episode_may_be_longer_than_a_turn(options, prompt, response):
    cfg = load_recipe("recipes/grpo_tools.py").Config(max_new_tokens=128, **options)
    workload = longest_batch(cfg, LLAMA, 1, None)
    assert (workload.prompt, workload.response) == (prompt, response)
    if longest := longest_sequence(cfg):
        assert longest == prompt + response  # what vLLM is started with


def test_dapo_samples_more_prompts_than_it_trains_on():
    """--gen_batch_size. The sampler and the host have all of them, the trainer those of a step."""
    cfg = load_recipe("recipes/dapo.py").Config(gen_batch_size=48, prompts_per_step=16, group_size=4)
    workload = longest_batch(cfg, LLAMA, 8, None)
    assert (workload.prompts, workload.rows, workload.sampled_prompts, workload.sampled_rows) == (2, 8, 6, 24)
    rehearsal = Rehearsal({}, {}, 0, 1000, 1000, 500, workload, 8)
    for rollout in ("hf", "vllm", "sglang"):
        assert sampler_memory(replace(cfg, rollout=rollout), LLAMA, rehearsal, 8, gpu_named("h100-80gb")).rows == 24
    assert "2 prompts of" in describe_rows(workload) and "of 6 drawn" in describe_rows(workload)
    small = longest_batch(replace(cfg, gen_batch_size=1), LLAMA, 8, None)
    assert small.sampled_rows == small.rows == 8


def test_an_episode_beyond_the_context_is_named():
    cfg = load_recipe("recipes/grpo_tools.py").Config(max_prompt_tokens=8000, max_response_tokens=4096)
    with pytest.raises(ValueError, match=r"^max_prompt_tokens \+ max_response_tokens: expected at most 8192"):
        longest_batch(cfg, LLAMA, 1, None)


@pytest.mark.parametrize(("recipe", "others"), [("dpo", ["--max_new_tokens", "0"]), ("reward_model", [])])
def test_both_responses_of_a_pair_are_in_one_micro_batch(recipe, others, tmp_path):
    """Even if one of them fills the budget."""
    LLAMA.save_pretrained(tmp_path)
    module = load_recipe(f"recipes/{recipe}.py")
    options = ["--model", str(tmp_path), "--max_tokens", "1024", "--prompts_per_step", "8", *others]
    cfg = recipe_options(module, options)
    roles = recipe_roles(module, cfg)
    assert roles.rows_together == 2
    workload = longest_batch(cfg, LLAMA, 2, None, rows_together=2)
    assert (workload.prompts, workload.rows) == (4, 8)
    assert len(largest_micro_batches(workload, LLAMA, 1024, share_prompts=True)) == 2 * 2
    assert len(largest_micro_batches(workload, LLAMA, 4 * 1024, share_prompts=True)) == 2 * 4
    single = replace(workload, group_size=1, rows_together=1)
    assert rows_flops(LLAMA, workload, 4) > 1.5 * rows_flops(LLAMA, single, 4)


@pytest.mark.parametrize(("recipe", "expected"), [("dpo", True), ("simpo", False)])
def test_a_loss_without_reference_is_planned_without_one(recipe, expected, tmp_path):
    LLAMA.save_pretrained(tmp_path)
    module = load_recipe(f"recipes/{recipe}.py")
    options = ["--model", str(tmp_path), "--lora_rank"]
    assert (recipe_roles(module, recipe_options(module, [*options, "0"])).reference is not None) == expected
    assert recipe_roles(module, recipe_options(module, [*options, "8"])).adapter_reference == expected


@pytest.mark.parametrize(("share", "tokens", "keys"), [(True, 512 + 2 * 512, 2 * 512), (False, 2 * 1024, 0)])
def test_a_pair_is_one_micro_batch_of_megatron(share, tokens, keys):
    workload = Workload(512, 512, 0, prompts=4, group_size=2, rows_together=2)
    small, large = (
        megatron.largest_micro_batch(workload, packed_rows(workload, budget, share_prompts=share))
        for budget in (1024, 4096)
    )
    assert (small.tokens, small.scored, small.keys, small.count) == (tokens, 1024, tokens + keys, 4)
    assert (small.prompts, large.tokens) == (1 if share else 2, 2 * tokens)


@pytest.mark.parametrize("pair", [1, 2])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(("prompt", "response", "group"), [(20, 10, 8), (40, 6, 4), (7, 90, 2), (90, 30, 6)])
def test_rows_are_packed_as_an_engine_packs_them(prompt, response, group, share, pair):
    workload = Workload(prompt, response, 0, prompts=5, group_size=group, rows_together=pair)
    batch = collate([row for number in range(5) for row in _group(workload, LLAMA, number)])
    if pair > 1:
        batch.add(micro_batch_group=torch.arange(len(batch)) // pair)
    found = []
    for rows, _ in micro_batches(batch, 100, LLAMA, share_prompts=share):
        part = batch.select(rows)
        computed = shared_prompt_groups(part) if share else [[row] for row in rows]
        found.append((len(rows), len(computed)))
    packed = packed_rows(workload, 100, share_prompts=share)
    assert sorted(found) == sorted((one.rows, one.prompts) for one in packed)


def test_passes_that_score_a_batch_take_time():
    """PPO's estimates, and old log-probabilities of a batch that is used more than once."""

    def phases(recipe, critic=None, **options):
        cfg = load_recipe(f"recipes/{recipe}.py").Config(max_prompt_tokens=64, max_new_tokens=64, **options)
        models = dict.fromkeys(("policy", "critic", "reference"), ModelSize(1000, 2000))
        workload = longest_batch(cfg, LLAMA, 1, None)
        packed = packed_rows(workload, 16384, share_prompts=True)
        rehearsal = Rehearsal({}, {}, 0, 1000, 1000, 500, workload, 1, packed, models)
        return costs(cfg, Roles(LLAMA, critic, LLAMA), rehearsal, SamplerMemory(0, 0, 8, 8), 1, 8)

    ppo = phases("ppo", critic=LLAMA)
    assert list(ppo) == ["generate", "old logprobs", "reference", "values", "train", "weight sync"]
    assert ppo["old logprobs"] == ppo["reference"]
    workload = longest_batch(load_recipe("recipes/ppo.py").Config(max_prompt_tokens=64), LLAMA, 1, None)
    head = 2 * 64 * 1000 * 64 * workload.rows  # hidden size, vocabulary, tokens of a response
    assert ppo["old logprobs"].flops - ppo["values"].flops == head
    assert "old logprobs" not in phases("grpo_vlm") and "values" not in phases("grpo_vlm")
    assert "old logprobs" in phases("grpo_vlm", ppo_epochs=2) and "old logprobs" in phases("grpo_vlm", mini_batches=2)
    assert "old logprobs" in phases("dapo", mini_batches=2) and "old logprobs" not in phases("dapo", mini_batches=1)


def test_tokens_of_tools_are_not_generated():
    module = load_recipe("recipes/grpo_tools.py")
    long, short = (
        module.Config(max_prompt_tokens=64, max_response_tokens=4096, max_new_tokens=n, max_turns=2) for n in (32, 64)
    )
    models = {"policy": ModelSize(1000, 2000)}
    rehearsal = Rehearsal({}, {}, 0, 1000, 1000, 500, longest_batch(long, LLAMA, 1, None), 1, models=models)
    sampler = SamplerMemory(0, 0, 8, 8)
    memory = [costs(cfg, Roles(policy=LLAMA), rehearsal, sampler, 1, 8)["generate"].memory for cfg in (long, short)]
    assert memory[1] == 2 * memory[0]


@pytest.mark.parametrize(
    ("response", "prompt"),
    [(1024, 15360), (12288, 4096), (15000, 4096), (16384, 4096), (65536, 4096), (131072 - 100, 100)],
)
def test_prompts_beside_long_responses_are_not_empty(response, prompt):
    """Responses that fill a micro-batch left a prompt of one token, without an image."""
    config = AutoConfig.for_model("qwen2_5_vl")
    config.text_config.max_position_embeddings = 131072
    recipe = load_recipe("recipes/grpo_vlm.py").Config
    workload = longest_batch(with_limited_rows(recipe(model="MODEL", max_new_tokens=response), config), config, 8, None)
    assert (workload.prompt, workload.response) == (prompt, response)
    assert workload.image_tokens == (prompt - 64) // 2 * 2


def test_an_episode_beside_a_long_prompt_is_not_one_token():
    tools = load_recipe("recipes/grpo_tools.py").Config(model="MODEL", max_prompt_tokens=4096, micro_batch_tokens=4096)
    assert tools.max_turns > 1
    assert with_limited_rows(tools, LLAMA).max_response_tokens == 1024


@pytest.mark.parametrize(("family", "options", "ids"), [
    ("mistral3", {}, {10}),  # that of published models
    ("exaone4_5", {"image_token_id": 12, "video_token_id": 11}, {11, 12}),
])  # fmt: skip
def test_placeholder_text_has_no_tokens_of_images(family, options, ids):
    """The engine refuses image tokens without an image."""
    workload = Workload(prompt=8, response=4, image_tokens=0, prompts=4, group_size=2)
    config = AutoConfig.for_model(family, **options)
    samples = [sample for number in range(4) for sample in _group(workload, config, number)]
    assert not ids & {token for sample in samples for token in sample.token_ids}
    assert len({sample.token_ids[0] for sample in samples}) == 4  # groups differ
