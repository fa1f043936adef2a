"""FLOPs, bytes and links of each phase of a plan, with numbers worked by hand."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoConfig, LlamaConfig

sys.path.append(str(Path(__file__).parents[1]))
from published_configs import qwen_vl  # noqa: E402

from rlkit.engines.flops import forward_flops
from rlkit.engines.megatron.supported import ParallelDims
from rlkit.plan import megatron, megatron_links
from rlkit.plan.hardware import gpu_named
from rlkit.plan.links import Group, LinkBytes, all_gather, all_reduce, all_to_all, group, send
from rlkit.plan.recipes import load_recipe, recipe_options, recipe_roles
from rlkit.plan.rehearsal import ModelSize, Rehearsal, Roles, empty
from rlkit.plan.report import caveats, time_table
from rlkit.plan.roofline import Case, Cost, costs, generation, rows_flops, scoring, training, weight_sync
from rlkit.plan.sampler import SamplerMemory, sequence_bytes
from rlkit.plan.workload import PackedRows, Workload, optimizer_steps, packed_rows, passes

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000}
LLAMA = LlamaConfig(hidden_size=64, intermediate_size=64, **SIZES)
LARGER = LlamaConfig(hidden_size=128, intermediate_size=128, **SIZES)
ROWS = Workload(prompt=100, response=50, image_tokens=0, prompts=3, group_size=4)
NAMES = {"lora_rank": 0, "enable_gradient_checkpointing": False, "parallel": {}, "freeze_vision_tower": False}
FSDP2 = SimpleNamespace(engine="fsdp2", **NAMES)


def rehearsal(models, workload=ROWS, budget=400, data_parallel_size=16):
    packed = packed_rows(workload, budget, share_prompts=True)
    return Rehearsal({}, {}, 0, 0, 0, 0, workload, data_parallel_size, packed, models)


def test_what_16_gpus_on_two_machines_gather():
    """Of 1600 bytes a machine lacks half: each of its 8 adapters fetches 100, and NVLink brings 7/8 of the whole."""
    everyone = group(16, 1, gpus_per_node=8)
    assert everyone == Group(16, 8)
    assert all_gather(1600, everyone) == LinkBytes(machine=1400, network=100)
    assert all_reduce(1600, everyone) == LinkBytes(machine=2800, network=200)
    assert all_to_all(1600, everyone) == LinkBytes(machine=700, network=800)
    gpu = gpu_named("h100-80gb")
    seconds = Cost(link=all_gather(1600e9, everyone)).seconds(gpu)
    assert seconds["link"] == 1400 / 450 and seconds["network"] == 100 / 50


@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [
        (8, 1, LinkBytes(machine=1400)),  # tensor-parallel ranks of a machine
        (2, 8, LinkBytes(network=800)),  # one rank on each machine
        (4, 4, LinkBytes(machine=800, network=400)),  # two ranks on each
        (1, 1, LinkBytes()),
    ],
)
def test_groups_have_their_own_links(size, stride, expected):
    assert all_gather(1600, group(size, stride, gpus_per_node=8)) == expected


def test_a_full_machine_of_an_uneven_group():
    """12 ranks on machines of 8: of 1200 bytes the full one lacks 400, of which each of its 8 adapters fetches 50."""
    received = all_gather(1200, group(12, 1, gpus_per_node=8))
    assert received.network == pytest.approx(400 / 8) and received.machine == 1200 * 7 / 8


def test_stages_on_two_machines_use_the_network():
    assert send(5, group(2, 8, 8)) == LinkBytes(network=5) and send(5, group(2, 4, 8)) == LinkBytes(machine=5)


def test_fsdp_gathers_over_its_shards_alone():
    """W 800 bytes, of which 200 are outside of the layers, 100 trained weights; 3 micro-batches; 2 machines of 8."""
    models = {"policy": ModelSize(400, 800, root=200, trained=100, owned=100 / 8)}
    three = rehearsal(models)
    assert three.micro_batches == [PackedRows((4,))] * 3

    def links(function, **parallel):
        cfg = SimpleNamespace(**{**vars(FSDP2), "parallel": parallel})
        return function("policy", LLAMA, Case(cfg, three, world=16, gpus_per_node=8)).link

    assert links(scoring, fsdp_size=8) == all_gather(3 * 600 + 200, Group(8, 8)) == LinkBytes(machine=1750)
    gathered, reduced = 3 * (2 * 800 - 200), 3 * 4 * 100
    shards = LinkBytes(machine=(gathered + reduced) * 7 / 8)
    assert links(training, fsdp_size=8) == shards + LinkBytes(network=2 * reduced / 8 / 2)
    assert links(scoring, fsdp_size=1) == LinkBytes()
    assert links(training, fsdp_size=1) == LinkBytes(machine=2 * reduced * 7 / 8, network=2 * reduced / 2 / 8)


def test_every_rank_of_a_model_parallel_group_encodes_the_images():
    """Two ranks share the layers' work; Ulysses also that of the output layer, which tensor parallelism replicates."""
    config = qwen_vl("qwen2.5-vl-3b")
    rows = Workload(prompt=100, response=50, image_tokens=32, prompts=3, group_size=4)
    half = rehearsal({"policy": ModelSize(400, 800)}, rows, data_parallel_size=8)
    tower = forward_flops(config, [], 0, [32 * 4] * 3)
    rest = rows_flops(config, rows, 3) - tower
    head = 3 * 4 * 50 * 2 * 2048 * 151936
    for parallel, shared in (({}, rest), ({"tensor": 2}, rest - head)):
        cfg = SimpleNamespace(**{**vars(FSDP2), "parallel": parallel})
        found = scoring("policy", config, Case(cfg, half, 16, 8)).flops
        assert found == tower + rest - shared + shared / 2
    assert 0 < tower < rest


def test_tensor_parallel_ranks_are_neighbours():
    """7 matrices in a layer, 2 of them split by rows; 2 ranks share each of 8 shards, 4 of which are on a machine."""
    size = ModelSize(400, 600, root=100, trained=300)  # 400 of 800 bytes are in shared matrices: 200 here
    half = rehearsal({"policy": size}, data_parallel_size=8)
    cfg = SimpleNamespace(**{**vars(FSDP2), "parallel": {"tensor": 2}, "rollout": "vllm_server"})
    case, tokens = Case(cfg, half, 16, 8), 3 * (100 + 4 * 50)
    reduced = LLAMA.num_hidden_layers * all_reduce(2 * tokens * 64, Group(2, 2))
    assert scoring("policy", LLAMA, case).link == all_gather(3 * 500 + 100, Group(8, 4)) + 2 * reduced
    sent = all_gather(3 * (2 * 600 - 100) + 3 * 4 * 300, Group(8, 4))
    assert training("policy", LLAMA, case).link == sent + 7 * reduced
    assert weight_sync(SamplerMemory(0, 0, 12, 12), case).link == all_gather(600, Group(8, 4)) + LinkBytes(200)


def test_training_reads_weights_and_writes_gradients():
    three = rehearsal({"policy": ModelSize(400, 800, trained=100, owned=10)})
    assert training("policy", LLAMA, Case(FSDP2, three, 16, 8)).memory == 3 * (2 * 800 + 2 * 100) + 28 * 10


MEGATRON = SimpleNamespace(**{**vars(FSDP2), "engine": "megatron", "parallel": {}})


@pytest.mark.parametrize("cfg", [FSDP2, MEGATRON])
def test_each_mini_batch_is_an_optimizer_step(cfg):
    """2 epochs of 3 micro-batches: 4 mini-batches have 4 at least. AdamW and Megatron's updates run 2 to 8 times."""
    three = rehearsal({"policy": ModelSize(400, 800, trained=100, owned=10)})
    found = {}
    for count in (1, 3, 4):
        options = {**vars(cfg), "ppo_epochs": 2, "mini_batches": count}
        found[count] = training("policy", LLAMA, Case(SimpleNamespace(**options), three, 16, 8))
    micro_batch, adamw = 2 * 800 + 2 * 100, 28 * 10
    assert found[1].memory == 2 * (3 * micro_batch + adamw)
    assert found[3].memory == 2 * 3 * (micro_batch + adamw)
    assert found[4].memory == 2 * 4 * (micro_batch + adamw)
    assert found[1].flops == found[3].flops == found[4].flops > 0
    if cfg is MEGATRON:
        update = megatron_links.update_link_bytes(three.models["policy"], megatron_links.groups(ParallelDims(), 16, 8))
        assert found[3].link == 6 * update and found[1].link == 2 * update != LinkBytes()
    several = SimpleNamespace(ppo_epochs=3, mini_batches=2)
    assert (passes(several), optimizer_steps(several)) == (3, 6)


def test_frozen_weights_are_not_copied_back_to_the_host():
    three = replace(rehearsal({"policy": ModelSize(400, 800)}), host=1000, copied_back=30)
    phases = costs(FSDP2, Roles(policy=LLAMA), three, SamplerMemory(0, 0, 12, 12), 16, 8)
    assert phases["train"].host == 1000 + 30


@pytest.mark.parametrize("recipe", ["sft", "dpo", "kto", "grpo_vlm"])
def test_recipes_with_given_responses_sample_for_evaluation_only(recipe):
    cfg = load_recipe(f"recipes/{recipe}.py").Config(model="MODEL", max_new_tokens=64)
    config = AutoConfig.for_model("qwen3_moe", num_hidden_layers=1)
    three = rehearsal(dict.fromkeys(("policy", "reference"), ModelSize(400, 800)))
    plan = SimpleNamespace(gpu=gpu_named("h100-80gb"), rehearsal=three, sampler=SamplerMemory(0, 0, 8, 8))
    table, trains_on_samples = time_table(cfg, Roles(config), plan, 8, 8), recipe == "grpo_vlm"
    for words in ("| generate |", "| weight sync |", "generate counts the weights of all experts"):
        assert (words in table) == trains_on_samples, words


def test_a_stage_of_megatron_reads_its_part_of_the_weights():
    """Qwen3 with tensor 2 and pipeline 2: a quarter of the matrices and one norm more than a quarter of the rest."""
    config = AutoConfig.for_model("qwen3", hidden_size=64, intermediate_size=128, head_dim=16, **SIZES)
    model, dims = empty(config, None), ParallelDims(tensor=2, pipeline=2)
    layer = 64 * (64 + 2 * 32 + 64) // 2 + 3 * 64 * 128 // 2 + 2 * 64 + 2 * 16
    size = megatron.model_size(model, dims, 8)
    assert size.weights == 2 * (layer + 500 * 64 + 64) and size.owned == size.trained / 2
    cfg = SimpleNamespace(**{**vars(FSDP2), "engine": "megatron", "parallel": {"tensor": 2, "pipeline": 2}})
    cost = scoring("policy", config, Case(cfg, rehearsal({"policy": size}, data_parallel_size=2), 8, 8))
    assert cost.memory == 3 * size.weights


def test_tensor_parallel_traffic_stays_on_its_machine():
    """8 tensor ranks, 2 data-parallel ones on 2 machines: all-reduces on NVLink, gradients over the network."""
    ranks = megatron_links.groups(ParallelDims(tensor=8), 16, gpus_per_node=8)
    assert (ranks.tensor, ranks.data) == (Group(8, 8), Group(2, 1))
    sent = megatron_links.activation_link_bytes(LLAMA, ParallelDims(tensor=8), ranks, 10, forwards=1, backwards=1)
    assert sent == LinkBytes(machine=2 * 2 * 2 * 2 * (10 * 2 * 64) * 7 / 8)  # layers, blocks, passes, all-reduce
    assert megatron_links.update_link_bytes(ModelSize(0, 0, trained=100), ranks) == LinkBytes(network=6 * 100 / 2)
    whole = ModelSize(parameters=800, weights=200)
    assert megatron_links.sync_link_bytes(whole, ParallelDims(tensor=8), ranks) == LinkBytes(machine=1600 * 7 / 8)


def test_the_last_round_of_decoding_has_fewer_caches():
    """5 responses, 4 at once: two rounds read the weights, and 5 caches are read, not 8."""
    three = rehearsal({"policy": ModelSize(400, 800)})
    cost = generation(SimpleNamespace(max_new_tokens=50), LLAMA, three, SamplerMemory(700, 0, sequences=4, rows=5))
    cache = 2 * 2 * 2 * 16 * 2 * 125  # keys and values, layers, heads, size of a head, bytes, tokens of half a response
    assert sequence_bytes(LLAMA, 125, 1) == cache
    assert cost.memory == 2 * 50 * 700 + 5 * 50 * cache


def test_a_teacher_costs_what_its_own_size_costs():
    roles = Roles(policy=LLAMA, reference=LARGER)
    cfg = SimpleNamespace(**vars(FSDP2))
    three = rehearsal({"policy": ModelSize(400, 800), "reference": ModelSize(1600, 3200)})
    phases = costs(cfg, roles, three, SamplerMemory(0, 0, 12, 12), 16, 8)
    assert phases["reference"].memory == 3 * 3200
    assert phases["reference"].flops == rows_flops(LARGER, ROWS, 3) > 2 * rows_flops(LLAMA, ROWS, 3)


@pytest.mark.parametrize("rank", ["0", "8"])
@pytest.mark.parametrize("kl_coef", ["0", "0.1"])
def test_a_kl_in_the_reward_takes_one_more_forward_pass(kl_coef, rank, tmp_path):
    """reinforce.py scores rows by the reference and by the policy before it trains; grpo_vlm.py by the reference."""
    LLAMA.save_pretrained(tmp_path)
    three = rehearsal(dict.fromkeys(("policy", "reference"), ModelSize(400, 800, trained=100)))
    forwards, expected = {}, {"0": (0, 0), "0.1": (2, 1)}[kl_coef]
    for recipe in ("reinforce", "grpo_vlm"):
        module = load_recipe(f"recipes/{recipe}.py")
        lengths = ["--max_prompt_tokens", "100", "--max_new_tokens", "50"]
        options = ["--model", str(tmp_path), "--kl_coef", kl_coef, "--lora_rank", rank, *lengths]
        cfg = recipe_options(module, options)
        phases = costs(cfg, recipe_roles(module, cfg), three, SamplerMemory(0, 0, 12, 12), 16, 8)
        scored = [phases[name] for name in ("old logprobs", "reference") if name in phases]
        assert all(cost.flops == rows_flops(LLAMA, ROWS, 3) for cost in scored)
        forwards[recipe] = len(scored)
    assert (forwards["reinforce"], forwards["grpo_vlm"]) == expected


def test_an_unknown_teacher_has_no_floor_of_seconds():
    roles, plan = Roles(LLAMA, reference=AutoConfig.for_model("deepseek_v3")), SimpleNamespace(gpu=gpu_named("l4-24gb"))
    assert time_table(None, roles, plan, 8, 8).startswith("no floor of seconds, since the FLOPs of deepseek_v3 are not")


@pytest.mark.parametrize(
    ("budget", "share", "expected"),
    [
        (300, True, [(4,), (4,), (4,)]),  # 100 + 4 * 50 tokens
        (250, True, [(3,), (3,), (3,), (1,), (1,), (1,)]),  # each part has the prompt again
        (300, False, [(1, 1)] * 6),
        (100, False, [(1,)] * 12),  # a row is longer than the budget
    ],
)
def test_prompts_are_counted_as_often_as_they_are_packed(budget, share, expected):
    packed = packed_rows(ROWS, budget, share_prompts=share)
    assert packed == [PackedRows(responses) for responses in expected]
    prompts = sum(one.prompts for one in packed)
    segments = [(100, 0)] * prompts + [(50, 100)] * 12
    assert rows_flops(LLAMA, ROWS, prompts) == forward_flops(LLAMA, segments, scored=12 * 50)


def test_images_of_a_micro_batch_without_shared_prompts():
    """Four rows of 4096 tokens fill 16384: each has its own images."""
    rows = Workload(2048, 2048, 1984, prompts=4, group_size=16)
    shared, own = (
        megatron.largest_micro_batch(rows, packed_rows(rows, 16384, share_prompts=share)).prompts
        for share in (True, False)
    )
    assert (shared, own) == (1, 4)


def seeing():
    """A tower of 2 blocks with 16 and 32 units."""
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    text = {"hidden_size": 64, "intermediate_size": 64, **SIZES}
    return AutoConfig.for_model("qwen2_5_vl", text_config=text, vision_config=vision)


@pytest.mark.parametrize(("options", "passes"), [({"freeze_vision_tower": True}, 3), ({"lora_rank": 4}, 2)])
def test_a_frozen_tower_has_no_backward_pass(options, passes):
    rows, config = Workload(10, 5, 8, prompts=3, group_size=1), seeing()
    images = rehearsal({"policy": ModelSize(400, 800)}, rows)
    flops = training("policy", config, Case(SimpleNamespace(**{**vars(FSDP2), **options}), images, 16, 8)).flops
    text = rows_flops(config, Workload(10, 5, 0, prompts=3, group_size=1), 3)
    assert flops == passes * text + 3 * forward_flops(config, [], image_patches=[32])


def test_the_tower_keeps_the_images_of_all_prompts():
    """Three prompts of 8 image tokens, 32 patches each."""
    config = seeing()
    rows = Workload(10, 5, 8, prompts=3, group_size=1)
    (largest,) = packed = packed_rows(rows, 400, share_prompts=False)
    trained, frozen = (
        megatron.activation_bytes(
            SimpleNamespace(enable_gradient_checkpointing=False, freeze_vision_tower=frozen),
            config, ParallelDims(), megatron.largest_micro_batch(rows, packed), 0, rows,
        )
        for frozen in (False, True)
    )  # fmt: skip
    assert largest.prompts == 3 and trained - frozen == 3 * 32 * 2 * (52 * 16 + 8 * 32)


def test_windows_and_chunks_are_not_full_attention():
    """Positions 0 to 4 see 1 2 3 4 5 keys, 1 2 3 3 3 in a window of 3, and 1 2 3 1 2 in chunks of 3."""
    one_pair = 4 * 4 * 16  # heads, size of a head

    def pairs(config, segments):
        layers = LlamaConfig(hidden_size=64, intermediate_size=64, **SIZES)
        full_attention = forward_flops(layers, segments) - forward_flops(layers, [(1, 0)] * sum(n for n, _ in segments))
        full = sum(n * b + n * (n + 1) // 2 for n, b in segments) - sum(n for n, _ in segments)
        assert full_attention == 2 * one_pair * full
        base = forward_flops(config, [(1, 0)] * sum(n for n, _ in segments))
        return (forward_flops(config, segments) - base) / one_pair + 2 * sum(n for n, _ in segments)

    common = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, **SIZES}
    window = AutoConfig.for_model("gemma2", **common, sliding_window=3)
    assert set(window.layer_types) == {"sliding_attention", "full_attention"}
    assert pairs(window, [(5, 0)]) == (1 + 2 + 3 + 3 + 3) + 15
    assert pairs(window, [(2, 3)]) == (3 + 3) + (4 + 5)
    mistral = AutoConfig.for_model("mistral", **common, sliding_window=3)
    assert pairs(mistral, [(5, 0)]) == 2 * 12
    kinds = ["chunked_attention", "full_attention"]
    chunks = AutoConfig.for_model("llama", **common, layer_types=kinds, attention_chunk_size=3)
    assert pairs(chunks, [(5, 0)]) == (1 + 2 + 3 + 1 + 2) + 15
    assert pairs(chunks, [(2, 2)]) == (3 + 1) + (3 + 4)


def test_few_sequences_use_a_part_of_the_experts():
    """One of two sequences uses 1 of 4 experts: 1 - (3/4)^2 = 44 %."""
    config = AutoConfig.for_model("qwen3_moe", num_experts=4, num_experts_per_tok=1)
    plan = SimpleNamespace(sampler=SamplerMemory(0, 0, 2, 8))
    (line,) = caveats(Roles(policy=config), plan)
    assert line.endswith("2 sequences at once use 44% of them if tokens are spread evenly")
    assert not caveats(Roles(policy=config), SimpleNamespace(sampler=SamplerMemory(0, 0, 64, 64)))
    assert not caveats(Roles(policy=LLAMA), plan)


def test_pcie_of_the_gpu():
    """64 GB/s is PCIe 5.0; an A100 and cards without NVLink have PCIe 4.0."""
    seconds = {name: Cost(host=64e9).seconds(gpu_named(name))["host"] for name in ("h100-80gb", "a100-80gb", "l4-24gb")}
    assert seconds == {"h100-80gb": 1, "a100-80gb": 2, "l4-24gb": 2}
