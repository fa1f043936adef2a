"""The memory and time of sampling in a plan: options of vLLM, and ways to make it fit."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoConfig

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "engines")]
from family_configs import BASE, TEXT, VISION  # noqa: E402
from published_configs import qwen_vl  # noqa: E402

from rlkit.engines.flops import flops_obstacle, forward_flops  # noqa: E402
from rlkit.plan.__main__ import server_advice  # noqa: E402
from rlkit.plan.fit import GIB, Plan, ways_to_fit  # noqa: E402
from rlkit.plan.hardware import gpu_named  # noqa: E402
from rlkit.plan.recipes import load_recipe  # noqa: E402
from rlkit.plan.rehearsal import ModelSize, Rehearsal, Roles  # noqa: E402
from rlkit.plan.report import describe_servers, not_planned, time_table, verdict  # noqa: E402
from rlkit.plan.roofline import costs  # noqa: E402
from rlkit.plan.sampler import (  # noqa: E402
    SamplerMemory,
    Servers,
    sampler_memory,
    sequence_bytes,
    server_memory,
    workspace_bytes,
)
from rlkit.plan.workload import Workload, packed_rows  # noqa: E402

PARAMETERS, H100 = 33_721_153_792, gpu_named("h100-80gb")
WORKLOAD = Workload(2048, 2048, 0, prompts=8, group_size=16)


@pytest.fixture(scope="module")
def config():
    return qwen_vl("qwen2.5-vl-32b")


def options(**rollout_options):
    return load_recipe("recipes/grpo_vlm.py").Config(
        model="32B", rollout="vllm", lora_rank=32, max_prompt_tokens=2048, max_new_tokens=2048,
        rollout_options={name: str(x) for name, x in rollout_options.items()},
    )  # fmt: skip


def rehearsal(resident=8.2):
    peaks = {"weight sync": {"parameters": int(11.1 * GIB)}}
    held = {"parameters": int(resident * GIB)}
    models = {"policy": ModelSize(PARAMETERS, 2 * PARAMETERS, trained=268_435_456)}
    packed = packed_rows(WORKLOAD, 16384, share_prompts=True)
    return Rehearsal(peaks, held, 0, PARAMETERS, 268_435_456, 778_567_680, WORKLOAD, 8, packed, models)


def sampler(config, gpu=H100, **rollout_options):
    return sampler_memory(options(**rollout_options), config, rehearsal(), 8, gpu)


def test_gpus_share_the_weights_and_the_heads(config):
    alone, two, eight = (sampler(config, tensor_parallel_size=n) for n in (1, 2, 8))
    assert alone.weights / GIB == pytest.approx(62.8, abs=0.1)
    assert eight.weights / GIB == pytest.approx(7.9, abs=0.1)
    assert (alone.rows, eight.rows) == (128, 8 * 128)
    assert sequence_bytes(config, 4096, 8) == sequence_bytes(config, 4096, 1) / 8
    assert sequence_bytes(config, 4096, 16) == sequence_bytes(config, 4096, 8)  # of 8 key-value heads
    assert eight.sequences == eight.cache // sequence_bytes(config, 4096, 8) > 5 * two.sequences > 0
    latent = AutoConfig.for_model("deepseek_v3")
    assert sequence_bytes(latent, 4096, 8) == sequence_bytes(latent, 4096, 1)


def test_vllm_takes_memory_for_a_batch_of_prompts_and_for_logits(config):
    """Of 16,384 tokens on an H100: hidden states of 5,120 twice, a gated layer of 27,648; 1,024 rows of logits."""
    gpus = {n: sampler(config, tensor_parallel_size=n) for n in (1, 2, 8)}
    logits = 14 * 1024 * config.get_text_config().vocab_size
    assert gpus[1].workspace == 2 * 16384 * (2 * 5120 + 3 * 27648) > logits
    assert gpus[8].workspace == logits == sampler(config, tensor_parallel_size=8, max_num_batched_tokens=4096).workspace
    few = {"max_num_batched_tokens": 4096, "max_num_seqs": 64}
    assert sampler(config, tensor_parallel_size=2, **few).workspace == 2 * 4096 * (2 * 5120 + 3 * 27648 // 2)
    share = gpus[2].utilization * H100.memory
    assert gpus[2].weights + gpus[2].workspace + gpus[2].cache == pytest.approx(share, abs=1)
    h100, a100 = (
        server_memory(Servers(8, 1), config, rehearsal(), gpu_named(f"{name}-80gb")) for name in ("h100", "a100")
    )
    assert h100.workspace == logits > 2 * 8192 * (2 * 5120 + 3 * 27648) and a100.workspace == logits / 4
    experts = AutoConfig.for_model("qwen3_moe")
    assert workspace_bytes(experts, 100, 1, 1) == 2 * 100 * (2 * 2048 + max(2 * (32 + 4) * 64, 3 * 8 * 768))


def family_config(family, **more):
    options = dict(VISION[family][0] if family in VISION else {**BASE, **TEXT[family]})
    kind = options.pop("model_type", family.removesuffix("_sliding"))
    return AutoConfig.for_model(kind, **options, **more)


@pytest.mark.parametrize("family", [*TEXT, *VISION])
def test_every_family_has_a_workspace_and_flops_or_a_reason(family):
    """And layers that hold as much for a token as its own MLP, at least."""
    config = family_config(family)
    inner = config.get_text_config().intermediate_size
    inner = max(inner) if isinstance(inner, list) else inner
    assert workspace_bytes(config, 1000, 1, 1) >= 2 * 1000 * (2 * 32 + 3 * inner)
    assert flops_obstacle(config) or forward_flops(config, [(5, 0)], 1) > 0


def test_the_widest_layer_and_the_largest_experts_count():
    """4 heads and 2 key-value heads of 8 in some layers and of 16 in others; 2 experts of a token with 40 or 8 each."""
    attention = 2 * (4 + 2) * 16
    assert workspace_bytes(family_config("gemma4_unified"), 100, 1, 1) == 2 * 100 * (2 * 32 + max(attention, 3 * 48))
    ernie = family_config("ernie4_5_vl_moe")
    ernie.get_text_config().moe_intermediate_size = [40, 8]
    assert workspace_bytes(ernie, 100, 1, 1) == 2 * 100 * (2 * 32 + 3 * 2 * 40)
    shared = family_config("gemma4_text", attention_k_eq_v=True, num_global_key_value_heads=1)
    assert sequence_bytes(shared, 8, 2) == sequence_bytes(shared, 8, 1) > 0  # one head cannot be divided
    assert workspace_bytes(family_config("mixtral"), 100, 1, 1) == 2 * 100 * (2 * 32 + 3 * 2 * 48)


def test_fp8_halves_all_but_embeddings_and_output_layer(config):
    halved = sampler(config, quantization="fp8")
    assert halved.weights == PARAMETERS + 2 * config.get_text_config().vocab_size * 5120
    assert sampler(config, quantization="awq").weights == sampler(config).weights  # of other kinds nothing is known


def test_sequences_are_those_that_vllm_decodes_at_once(config):
    assert sampler(config, tensor_parallel_size=8, max_num_seqs=5).sequences == 5
    small = AutoConfig.for_model("llama", num_hidden_layers=1, num_key_value_heads=1)
    assert sampler(small, gpu_named("h200-141gb")).sequences == 1024
    assert (
        sampler_memory(options(), small, replace(rehearsal(), parameters=0), 8, gpu_named("a100-80gb")).sequences == 256
    )


def test_vllm_needs_room_for_the_longest_sequence(config):
    fitting, longer = (sampler(config, tensor_parallel_size=2, max_model_len=n) for n in (4096, 1 << 18))
    assert fitting.sequences > 0 and longer.sequences == 0
    assert sampler(config, tensor_parallel_size=2, gpu_memory_utilization=0.4).cache < GIB


def test_a_cache_of_given_size_is_not_a_share_of_the_gpu(config):
    """vLLM then ignores gpu_memory_utilization."""
    size = 3 * sequence_bytes(config, 4096, 8)
    given = {"tensor_parallel_size": 8, "kv_cache_memory_bytes": size}
    memory = sampler(config, **given, gpu_memory_utilization=0.01)
    assert (memory.cache, memory.sequences, memory.share) == (size, 3, None)
    small = sampler(config, **{**given, "kv_cache_memory_bytes": size // 4})
    plan = Plan(rehearsal(), small, {"train": {}, "weight sync": {}}, H100)
    said = verdict(options(**given), plan)
    assert "no room for one sequence; raise --rollout_options kv_cache_memory_bytes, or split the sampler" in said


def test_what_vllm_saves_and_the_plan_does_not_read_is_named(config):
    cfg, memory = options(kv_cache_dtype="fp8", cpu_offload_gb=10), sampler(config)
    saving = "what vLLM saves with --rollout_options kv_cache_dtype and cpu_offload_gb"
    assert not_planned(cfg, config, WORKLOAD, memory) == [saving]
    large, small = (Plan(rehearsal(), memory, {"train": {"parameters": n * GIB}}, H100) for n in (90, 1))
    assert verdict(cfg, large).endswith(f"; {saving} is not counted")
    assert small.fits == (saving not in verdict(cfg, small))
    servers = SimpleNamespace(rollout="vllm_server", max_new_tokens=0, rollout_options={"kv_cache_dtype": "fp8"})
    assert not_planned(servers, config, WORKLOAD, memory) == []


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"kv_cache_memory_bytes": "4G"}, "kv_cache_memory_bytes: expected a number of bytes, got 4G"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size: expected a divisor of 8 ranks, got 3"),
        ({"tensor_parallel_size": "two"}, "tensor_parallel_size: expected a divisor of 8 ranks, got two"),
        ({"max_model_len": 4095}, "max_model_len: expected at least the 4096 tokens of prompt and response, got 4095"),
    ],
)
def test_what_vllm_would_refuse_is_refused(config, given, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        sampler(config, **given)


def test_heads_that_cannot_be_split_are_named():
    config = AutoConfig.for_model("llama", hidden_size=384, num_attention_heads=6, num_key_value_heads=6)
    with pytest.raises(ValueError, match="^tensor_parallel_size: expected a divisor of the 6 attention heads, got 4$"):
        sampler(config, tensor_parallel_size=4)


def test_a_sampler_that_is_split_is_a_way_to_fit(config):
    """A 32B with adapters takes 74 GiB of the 73.6 if each GPU has all of the sampler's weights."""
    cfg, step = options(quantization="none"), rehearsal()
    memory = sampler_memory(cfg, config, step, 8, H100)
    phases = {
        "weight sync": {**step.peaks["weight sync"], "sampler's weights": memory.weights},
        "generate": {**step.resident, "sampler's weights": memory.weights, "sampler's cache": memory.cache},
    }
    plan = Plan(step, memory, phases, H100)
    assert plan.too_large == ["weight sync"]
    first = next(ways_to_fit(cfg, plan, config, 8, 8))
    assert first.changes == ["--rollout_options quantization none tensor_parallel_size 2"]
    assert first.cfg.rollout_options["tensor_parallel_size"] == "2"
    fits = replace(plan, rehearsal=rehearsal(resident=6.0), phases={**phases, "weight sync": {}})
    assert not any("tensor_parallel" in way.changes[0] for way in ways_to_fit(cfg, fits, config, 8, 8))


def test_a_split_sampler_reads_its_part_of_the_weights(config):
    seconds = {}
    for gpus in (1, 8):
        cfg = options(tensor_parallel_size=gpus)
        memory = sampler_memory(cfg, config, rehearsal(), 8, H100)
        seconds[gpus] = costs(cfg, Roles(policy=config), rehearsal(), memory, 8, 8)["generate"].seconds(H100)
    assert seconds[8]["compute"] == pytest.approx(seconds[1]["compute"])
    assert seconds[8]["memory"] < 0.1 * seconds[1]["memory"]  # which decodes two responses at once


def test_servers_take_nothing_of_the_trainers_gpus(config):
    cfg = SimpleNamespace(rollout="vllm_server", max_new_tokens=2048)
    memory = sampler_memory(cfg, config, rehearsal(), 8, H100)
    assert memory.weights == 0
    sentence = "the GPUs of the sampling servers (--server_gpus); for the seconds, one for each rank"
    assert not_planned(cfg, config, WORKLOAD, memory) == [sentence]
    planned = sampler_memory(cfg, config, rehearsal(), 8, H100, Servers(8, 4))
    assert not_planned(cfg, config, WORKLOAD, planned) == []
    assert not_planned(SimpleNamespace(rollout="vllm_server", max_new_tokens=0), config, WORKLOAD, memory) == []


def test_servers_share_the_responses_of_all_ranks(config):
    alone, fours = (server_memory(Servers(8, gpus), config, rehearsal(), H100) for gpus in (1, 4))
    assert (alone.rows, fours.rows) == (128, 512)
    assert fours.weights == pytest.approx(alone.weights / 4, abs=1) and fours.cache > 5 * alone.cache
    assert describe_servers(fours) == (
        f"servers: 2 on 4 GPUs each; each generates 512 responses in a step, {fours.sequences} of them at once"
    )
    assert fours.sequences == fours.cache // sequence_bytes(config, 4096, 4)
    cfg = options()
    slow, fast = (
        costs(cfg, Roles(policy=config), rehearsal(), memory, 8, 8)["generate"].memory
        for memory in (alone, SamplerMemory(0, 0, 128, 128))
    )
    assert slow > 5 * fast  # with room for all responses at once


@pytest.mark.parametrize("gpus", [0, 3, 16])
def test_servers_are_on_equally_many_gpus(config, gpus):
    with pytest.raises(ValueError, match=f"^server_tensor_parallel: expected a divisor of the 8 GPUs .*, got {gpus}$"):
        server_memory(Servers(8, gpus), config, rehearsal(), H100)


def plan_on_servers(config, gpu, count):
    memory = server_memory(count, config, rehearsal(), gpu)
    phases = {"train": {"parameters": GIB}, "servers": {"sampler's weights": memory.weights, "cache": memory.cache}}
    return Plan(rehearsal(), memory, phases, gpu)


def test_servers_that_do_not_fit_are_refused_with_the_way_to_fit(config):
    a100 = gpu_named("a100-40gb")
    alone, halves = (plan_on_servers(config, a100, Servers(8, gpus)) for gpus in (1, 2))
    assert not alone.fits and verdict(options(), alone).startswith("does not fit: servers 62.8 GiB of 36.6 GiB")
    assert server_advice(Servers(8, 1), config, alone) == "servers fit with --server_tensor_parallel 2"
    assert halves.fits and halves.peak == GIB  # of a GPU that trains
    assert server_advice(Servers(1, 1), config, alone) == (
        "servers do not fit on 1 GPU; raise --server_gpus and --server_tensor_parallel"
    )
    tight = plan_on_servers(config, gpu_named("h100-80gb", 68.5), Servers(8, 1))
    assert verdict(options(), tight).endswith("no room for one sequence; raise --server_tensor_parallel")
    assert not tight.fits


def test_generation_and_training_overlap_if_responses_are_sampled_ahead(config):
    """A step then takes the longer of both."""
    seconds, module = {}, load_recipe("recipes/grpo_async.py")
    for staleness in (0, 1):
        cfg = module.Config(max_prompt_tokens=2048, max_new_tokens=2048, max_staleness=staleness)
        memory = server_memory(Servers(8, 4), config, rehearsal(), H100)
        table = time_table(cfg, Roles(policy=config), Plan(rehearsal(), memory, {}, H100), 8, 8)
        rows = {row[1]: row for row in (line.split("|") for line in table.splitlines()) if len(row) > 6}
        rows = {name.strip(): row for name, row in rows.items()}
        phases = {name: float(rows[name][6]) for name in ("generate", "train", "weight sync")}
        seconds[staleness] = float(rows["step"][6])
    rest = phases["train"] + phases["weight sync"]
    assert seconds[0] == pytest.approx(phases["generate"] + rest, abs=0.2)
    assert seconds[1] == pytest.approx(max(phases["generate"], rest), abs=0.2)
    assert rows["step"][7] == " the longer of generate and the rest "
