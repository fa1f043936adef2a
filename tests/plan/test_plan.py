"""`python -m rlkit.plan`: what it says is what a process takes, and what it refuses it refuses in one sentence."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoConfig, LlamaConfig

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from on_fake_ranks import CASES, LENGTHS, PREFIXES  # noqa: E402
from published_configs import qwen_vl, smollm2  # noqa: E402

from rlkit.engines.megatron.supported import ParallelDims  # noqa: E402
from rlkit.plan import __main__ as command_line  # noqa: E402
from rlkit.plan import megatron_links  # noqa: E402
from rlkit.plan.cache import cache_bytes  # noqa: E402
from rlkit.plan.fit import Plan, loading, make_plan, ways_to_fit  # noqa: E402
from rlkit.plan.hardware import DATA_SHEETS, gpu_named  # noqa: E402
from rlkit.plan.links import LinkBytes  # noqa: E402
from rlkit.plan.recipes import load_recipe, recipe_options, recipe_roles  # noqa: E402
from rlkit.plan.rehearsal import ModelSize, Rehearsal, Roles  # noqa: E402
from rlkit.plan.report import host_memory, not_planned, time_table  # noqa: E402
from rlkit.plan.roofline import Cost, costs  # noqa: E402
from rlkit.plan.sampler import SamplerMemory  # noqa: E402
from rlkit.plan.workload import Workload, longest_batch, packed_rows  # noqa: E402


def large_vocabulary():
    """Two layers and 200,000 tokens: logits are most of what training takes."""
    return LlamaConfig(
        hidden_size=512, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=200_000, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def found(tiny_dir, tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) for name in ("large_vocabulary", "smollm2")}
    large_vocabulary().save_pretrained(folders["large_vocabulary"])
    smollm2().save_pretrained(folders["smollm2"])
    out = tmp_path_factory.mktemp("plans") / "plans.json"
    script = [sys.executable, HERE / "on_fake_ranks.py", tiny_dir, *folders.values(), out]
    done = subprocess.run(list(map(str, script)), capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


OFFLOADED = ("offloaded", "offloaded_lora")
TOLERANCE = {"smollm2": 0.01, "frozen_tower": 0.06}  # the whole tower, which is gathered at once, is 2.4 %


@pytest.mark.parametrize("name", [*CASES, "smollm2"])
def test_planned_bytes_are_what_a_process_takes(found, name):
    """Parameters, gradients and optimizer exactly; peaks are those of torch's allocator, with attention on a CPU."""
    phases, resident, taken = (found[name][key] for key in ("phases", "resident", "taken"))
    for kind in ("parameters", "optimizer"):
        assert phases["optimizer step"][kind] == taken[kind] > 0, kind
    for role, size in taken["gradients"].items():
        assert phases[f"{PREFIXES[role]}optimizer step"]["gradients"] == size > 0, role
    assert "gradients" not in resident  # they are freed before sampling
    if name in OFFLOADED:
        assert "parameters" not in resident
        assert resident["optimizer"] < 1000  # step counters, which AdamW keeps on the host anyway
        assert found[name]["copied_back"] == pytest.approx(taken["copied_back"], abs=4000)
        assert (taken["copied_back"] < 0.5 * taken["host"]) == (name == "offloaded_lora")  # frozen weights stay there
        assert found[name]["host"] == taken["host"] == pytest.approx(taken["parameters"] + taken["optimizer"], abs=4000)
    compared = {phase: taken["peaks"][phase] for phase in phases if phase not in ("load", "generate")}
    assert len(compared) == 3 + ("reference" in phases) + 2 * (name == "critic")
    for phase, peak in compared.items():
        planned = total(phases, phase) - phases[phase].get("sampler's weights", 0)
        planned += taken["host"]  # this process has copies on the host in the same memory
        assert planned == pytest.approx(peak, rel=TOLERANCE.get(name, 0.1)), phase


@pytest.mark.parametrize("name", ["three_ranks", "two_by_two", "tensor", "lora", "nf4"])
def test_fsdp_sends_what_is_planned(found, name):
    """Weights and gradients of two micro-batches; beside them the padding of shards, and metrics."""
    planned, sent = found[name]["sent"], found[name]["taken"]["sent"]
    assert planned == pytest.approx(sum(sent.values()), rel=0.01), sent


def total(phases, name):
    return sum(phases[name].values())


def test_phases_take_what_they_should(found):
    one, lora = found["one_rank"], found["lora"]
    assert list(one["phases"]) == [
        "load", "reference", "forward and backward", "optimizer step", "weight sync", "generate",
    ]  # fmt: skip
    assert "reference" not in lora["resident"] and 2 * one["resident"]["reference"] == one["resident"]["parameters"]
    assert lora["resident"]["optimizer"] < 0.2 * found["three_ranks"]["resident"]["optimizer"]
    for phases in (found[name]["phases"] for name in CASES if name not in OFFLOADED):
        for name in ("forward and backward", "optimizer step"):
            assert phases[name]["optimizer"] == phases["generate"]["optimizer"]  # from the second step on
        assert "gradients" not in phases["generate"] and phases["optimizer step"]["gradients"] > 0


def test_adapters_alone_take_little_of_a_weight_sync(found):
    """On the GPU, over the link and in memory; but vLLM's base model goes to the host and back."""
    phases, resident = found["lora"]["phases"], found["lora"]["resident"]
    adapters = resident["optimizer"] / 2  # AdamW has two numbers for each of their numbers
    beside = sum(phases["weight sync"].values()) - sum(resident.values()) - phases["weight sync"]["sampler's weights"]
    assert adapters < beside < 6 * adapters  # gathered, and one bucket of them
    cfg = load_recipe("recipes/grpo_vlm.py").Config(
        model="MODEL", rollout="vllm", lora_rank=4, max_prompt_tokens=8, max_new_tokens=8, sync_adapters=True
    )
    workload = longest_batch(cfg, large_vocabulary(), 2, None)
    models = {"policy": ModelSize(1000, 2 * 1000, trained=30)}
    rehearsal = Rehearsal({}, {}, 0, 1000, 30, 500, workload, 2, models=models)
    sampler = SamplerMemory(2 * 1000, 1 << 20, 8, 8)

    def sync(cfg):
        return costs(cfg, Roles(policy=large_vocabulary()), rehearsal, sampler, 2, 8)["weight sync"]

    assert sync(cfg) == Cost(memory=2 * 2 * 30, link=LinkBytes(2 * 30 / 2), host=2 * 2 * 1000)
    assert sync(replace(cfg, sync_adapters=False)) == Cost(memory=2 * 2 * 1000, link=LinkBytes(2 * 1000 / 2))
    assert sync(replace(cfg, rollout="vllm_server")) == Cost(memory=2 * 2 * 30, link=LinkBytes(2 * 30 / 2))
    plan = SimpleNamespace(rehearsal=rehearsal, sampler=sampler)
    config = large_vocabulary()
    kept = host_memory(cfg, config, plan, 16, 8)["vLLM's base model, while it sleeps"]
    assert kept == 8 * sampler.weights and len(host_memory(replace(cfg, sync_adapters=False), config, plan, 16, 8)) == 2


def test_host_memory_counts_images_and_weights_that_are_not_read_in_slices(tmp_path):
    """On a machine with 8 of 16 ranks, each of which has 500 of 8,000 held-out rows."""
    config = qwen_vl("qwen2.5-vl-3b")
    cfg = load_recipe("recipes/grpo_vlm.py").Config(model=str(tmp_path), heldout_rows=8000)
    workload = Workload(prompt=400, response=100, image_tokens=256, prompts=3, group_size=4)
    rehearsal = Rehearsal({"train": {}}, {}, 0, 1000, 1000, 100, workload, 16, fully_read=50)
    plan = Plan(rehearsal, SamplerMemory(0, 0, 12, 12), {}, gpu_named("h100-80gb"))
    image = 2 * (256 * 4) * (3 * 2 * 14 * 14)
    taken = host_memory(cfg, config, plan, 16, 8)
    assert taken == {
        "loading, at most": 8 * 4 * (100 + 50),
        "export, at most": 2 * 1000,
        "images of two steps": 8 * 2 * 3 * image,
        "images of 8000 held-out rows (--heldout_rows)": 8 * 500 * image,
    }
    assert len(host_memory(cfg, large_vocabulary(), plan, 16, 8)) == 2
    assert loading(cfg, rehearsal) == {"largest tensor": 4 * 100}
    (tmp_path / "pytorch_model.bin").touch()
    assert host_memory(cfg, config, plan, 16, 8)["loading, at most"] == 8 * 4 * 1000
    assert loading(cfg, rehearsal) == {"largest tensor": 4 * 1000}
    (tmp_path / "model.safetensors").touch()
    assert loading(cfg, rehearsal) == {"largest tensor": 4 * 100}


def test_the_baseline_of_kto_is_a_pass_of_policy_and_reference():
    cfg = load_recipe("recipes/kto.py").Config(model="MODEL")
    workload = Workload(32, 32, 0, prompts=2, group_size=1)
    sizes = {"policy": ModelSize(1000, 2000), "reference": ModelSize(1000, 2000)}
    rehearsal = Rehearsal(
        {}, {}, 0, 1000, 1000, 500, workload, 2, packed_rows(workload, 512, share_prompts=True), sizes
    )
    config = large_vocabulary()
    roles, sampler = Roles(policy=config, reference=config), SamplerMemory(0, 0, 2, 2)
    phases = costs(cfg, roles, rehearsal, sampler, 2, 8)
    assert phases["baseline"].flops == 2 * phases["reference"].flops > 0
    assert phases["baseline"].memory == 2 * phases["reference"].memory > 0
    cfg = replace(cfg, baseline=False)
    assert "baseline" not in costs(cfg, roles, rehearsal, sampler, 2, 8)


def test_a_weight_sync_takes_its_buckets(found):
    """The tiny model is one bucket: gathered from a third on each rank, and copied tensor by tensor to be sent."""
    phases = found["three_ranks"]["phases"]
    model = 3 * phases["weight sync"]["parameters"] / 2  # in bfloat16
    beside = sum(phases["weight sync"].values()) - sum(found["three_ranks"]["resident"].values())
    assert beside == pytest.approx((1 / 3 + 1 + 1) * model, rel=0.15)


def test_options_that_save_memory_do(found):
    resident = found["nf4"]["resident"]["parameters"]
    assert resident < 0.6 * found["one_rank"]["resident"]["parameters"] / 2  # most of the tiny model are embeddings
    name = "forward and backward"
    plain = found["one_rank"]["phases"][name]
    assert found["two_by_two"]["phases"][name]["activations"] < 0.8 * plain["activations"]
    assert found["ulysses"]["phases"][name]["activations"] < 0.7 * plain["activations"]
    assert found["two_by_two"]["resident"]["optimizer"] == pytest.approx(
        found["one_rank"]["resident"]["optimizer"] / 2, rel=0.01
    )


@pytest.mark.parametrize("name", ["dense", "unshared", "recomputed", "experts", "tensor", "context"])
def test_the_arithmetic_for_megatron_is_what_a_process_takes(found, name):
    """Parameters, gradients and optimizer up to padding and step counters; activations and output layer to 15 %."""
    if "megatron" not in found:
        pytest.skip("needs megatron-core and triton")
    planned, taken = (found["megatron"][name][key] for key in ("planned", "taken"))
    for kind in ("parameters", "gradients", "optimizer"):
        assert planned[kind] == pytest.approx(taken[kind], rel=1e-3), kind
    assert planned["activations"] == pytest.approx(taken["activations"], rel=0.15)
    if name == "tensor":  # 3072 tokens of 256 bfloat16 numbers: scattered after the embedding, gathered for the head
        planned["sent"] += 2 * 2 * 3072 * 256
    assert planned["sent"] == pytest.approx(taken["sent"], rel=0.01, abs=100)


@pytest.mark.parametrize(
    ("family", "towers"),
    [
        ("qwen2_5_vl", []),  # videos have as many patches a token as images
        ("qwen2_5_omni_thinker", ["the audio tower"]),
        ("internvl", ["the vision tower, whose patches are not known here"]),
        ("gemma4", ["the vision tower, whose patches are not known here", "the audio tower"]),
    ],
)
def test_towers_that_are_not_counted_are_named(family, towers):
    config = AutoConfig.for_model(family, **({"audio_config": {}} if family == "gemma4" else {}))
    workload = Workload(prompt=100, response=5, image_tokens=36, prompts=3, group_size=2)
    expected = [f"activations and FLOPs of {' and '.join(towers)}"] if towers else []
    here = SamplerMemory(0, 0, 6, 6)
    assert not_planned(SimpleNamespace(), config, workload, here) == expected
    servers = SimpleNamespace(teacher_servers=["http://host:8000"])
    assert not_planned(servers, config, workload, here) == ["the GPUs of the teacher's servers", *expected]
    without_images = replace(workload, image_tokens=0)
    assert not_planned(SimpleNamespace(), AutoConfig.for_model("internvl"), without_images, here) == []


def test_what_experts_send():
    """A token goes to 2 experts and back in each of 3 passes, half of the times to the other of 2 ranks."""
    options = {"hidden_size": 32, "num_hidden_layers": 2, "num_experts_per_tok": 2, "num_attention_heads": 4}
    config, dims = AutoConfig.for_model("qwen3_moe", **options), ParallelDims(expert=2)
    ranks = megatron_links.groups(dims, 4, gpus_per_node=8)
    sent = megatron_links.activation_link_bytes(config, dims, ranks, 60, forwards=2, backwards=1)
    assert sent == LinkBytes(2 * 60 * 2 * 3 * 2 * 2 * 32 / 2)
    size = ModelSize(200, 400, trained=200, trained_experts=100)
    assert megatron_links.update_link_bytes(size, ranks) == LinkBytes(6 * (100 * 3 / 4 + 100 * 1 / 2))


def test_what_stages_send():
    """The first of two stages sends each token on, the second its gradient back; a stage between them does both."""
    config = AutoConfig.for_model("qwen3", hidden_size=32, num_hidden_layers=6, num_attention_heads=4)
    for pipeline, expected in ((1, 0), (2, 1), (3, 2)):
        dims = ParallelDims(pipeline=pipeline)
        for gpus_per_node, link in ((3, LinkBytes(machine=1)), (2, LinkBytes(network=1))):
            ranks = megatron_links.groups(dims, pipeline, gpus_per_node)
            sent = megatron_links.activation_link_bytes(config, dims, ranks, 60, forwards=2, backwards=1)
            assert sent == expected * 2 * 60 * 32 * (LinkBytes(machine=1) if pipeline <= gpus_per_node else link)


def test_a_teacher_of_whole_distributions_takes_a_copy_of_its_output_layer(found):
    whole, top = found["distilled"]["0"], found["distilled"]["8"]
    for phase in ("forward and backward", "optimizer step", "weight sync", "generate"):
        assert whole[phase]["reference"] - top[phase]["reference"] == 2 * 200_000 * 512, phase
    name = "forward and backward"
    assert whole[name]["logits"] > top[name]["logits"]


def test_what_a_teacher_changes_in_the_text(found):
    shown = found["commands"]["servers"]
    assert shown["end"] == 0 and "not planned: the GPUs of the teacher's servers" in shown["printed"]
    assert "| reference |" not in shown["printed"]


def test_megatron_frees_gradients_before_it_samples(tmp_path):
    large_vocabulary().save_pretrained(tmp_path)
    options = ["--model", str(tmp_path), "--engine", "megatron", "--kl_coef", "0.1", *LENGTHS]
    module = load_recipe("recipes/ppo.py")
    cfg = recipe_options(module, options)
    phases = make_plan(cfg, recipe_roles(module, cfg), 2, gpu_named("h100-80gb"), None).phases
    trained = phases["forward and backward"]
    assert trained["gradients"] == 2 * trained["parameters"] - phases["critic: forward and backward"]["gradients"] > 0
    for name in ("forward and backward", "optimizer step"):
        assert phases[name]["gradients"] == trained["gradients"]
    assert not any("gradients" in phases[name] for name in ("reference", "weight sync", "generate"))


def test_megatron_is_planned_by_arithmetic(found):
    shown = found["commands"]["megatron"]
    assert shown["end"] == 0 and "| weight sync |" in shown["printed"]
    assert "Megatron is not rehearsed: an estimate by arithmetic" in shown["printed"]


def test_command_prints_tables_and_a_verdict(found):
    shown = found["commands"]["fits"]
    assert shown["end"] == 0
    assert "llama: 0.11B parameters, 0.106B trained, on 2 x l4-24gb; planned without a GPU" in shown["printed"]
    assert "| forward and backward |" in shown["printed"] and "host memory of a machine" in shown["printed"]
    assert shown["printed"].strip().splitlines()[-1].startswith("fits: ")


def test_a_recipe_that_does_not_sample_has_no_weight_sync(found):
    shown = found["commands"]["reward_model"]
    assert shown["end"] == 0 and "| train |" in shown["printed"] and "weight sync" not in shown["printed"]


def test_advice_names_options_with_which_it_fits(found):
    shown = found["commands"]["too_large"]
    lines = shown["printed"].strip().splitlines()
    assert shown["end"] == 1
    assert any(line.startswith("does not fit: forward and backward") for line in lines)
    assert lines[-1].startswith("fits with --use_fused_kernels")
    tried = [float(line.split()[-2]) for line in lines if line.startswith("  with ")]
    assert tried == sorted(tried, reverse=True) and tried[-1] < 6.5


@pytest.mark.parametrize(("name", "rehearsed"), [("weights_too_large", 1), ("nothing_left_to_save", 3)])
def test_what_cannot_fit_is_said_after_few_rehearsals(found, name, rehearsed):
    """A way is not rehearsed if its weights alone are too large: 106M, in 4 bits at best, on eight GPUs at most."""
    lines = found["commands"][name]["printed"].strip().splitlines()
    tried = [line for line in lines if line.startswith("  with ")]
    sizes = [float(line.split()[-2]) for line in tried if ": at least " not in line]
    least = {
        "weights_too_large": "each takes at least 0.012 GiB, of 0.008",  # in 4 bits on four GPUs
        "nothing_left_to_save": f"the least is {min(sizes)} GiB, of 0.0",
    }[name]
    assert found["commands"][name]["end"] == 1
    assert lines[-1] == f"does not fit with any of these options: {least} GiB usable"
    assert len(sizes) == rehearsed, tried


def test_what_never_fits_is_one_sentence_with_the_least_that_was_reached(monkeypatch, capsys):
    cfg = load_recipe("recipes/grpo_vlm.py").Config(model="MODEL", rollout="vllm_server", micro_batch_tokens=64)
    rehearsal = Rehearsal({}, {}, 0, 1000, 1000, 500, Workload(32, 32, 0, prompts=1, group_size=2), 1)
    sizes = iter([900, 850, 840, 820, 830, 825, 826, 810, *range(815, 823)])

    def attempt(*_):
        taken = {"train": {"parameters": next(sizes) << 30}}
        return Plan(rehearsal, SamplerMemory(0, 0, 2, 2), taken, gpu_named("h100-80gb"))

    monkeypatch.setattr(command_line, "make_plan", attempt)
    options = SimpleNamespace(nproc=1, image_tokens=None, gpus_per_node=8, host_memory=None)
    sentence = command_line.advice(cfg, Roles(policy=large_vocabulary()), attempt(), options)
    assert sentence == ("does not fit with any of these options: the least is 810.0 GiB, of 73.6 GiB usable")
    assert len(capsys.readouterr().out.splitlines()) == 15


LAYERS = [  # config, bytes of a sequence of 10 tokens; test_vllm.py compares these and others with vLLM itself
    (("llama", {}), 10 * 2 * 2 * 2 * 8 * 2),
    (("gemma2", {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}), 14 * 2 * 2 * 8 * 2),
    (("deepseek_v3", {"kv_lora_rank": 6, "qk_rope_head_dim": 4}), 10 * 2 * (6 + 4) * 2),
    (("lfm2", {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}), (2 * 32 + 10 * 2 * 2 * 8) * 2),
    (
        (
            "kimi_linear",
            {
                "layer_types": ["linear_attention", "full_attention"],
                "linear_num_heads": 2,
                "linear_head_dim": 8,
                "kv_lora_rank": 6,
                "qk_rope_head_dim": 4,
            },
        ),
        2 * 3 * 3 * 16 + 4 * 2 * 8 * 8 + 10 * 2 * (6 + 4),
    ),
    (
        ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_d_conv": 4}),
        (2 * 32 * (3 + 8) + 10 * 2 * 2 * 8) * 2,
    ),
]


@pytest.mark.parametrize(("case", "expected"), LAYERS, ids=[name for (name, _), _ in LAYERS])
def test_cache_of_a_sequence(case, expected):
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    name, own = case
    assert cache_bytes(AutoConfig.for_model(name, **sizes, head_dim=8, **own), 10) == expected


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            LlamaConfig(layer_types=["linear_attention"], num_hidden_layers=1),
            "model: expected recurrent layers whose state is known, got those of llama",
        ),
        (
            LlamaConfig(layer_types=["indexed_attention"], num_hidden_layers=1),
            "model: expected layers whose cache is known, got indexed_attention of llama",
        ),
    ],
)
def test_layers_whose_cache_is_unknown_are_named(config, sentence):
    with pytest.raises(ValueError) as error:
        cache_bytes(config, 10)
    assert str(error.value) == sentence


def test_layers_whose_cache_is_unknown_are_named_before_a_rehearsal(tmp_path, monkeypatch):
    LlamaConfig(layer_types=["indexed_attention"], num_hidden_layers=1).save_pretrained(tmp_path)
    monkeypatch.setattr("rlkit.plan.fit.rehearse", lambda *_: pytest.fail("rehearsed"))
    module = load_recipe("recipes/grpo_vlm.py")
    cfg = recipe_options(module, ["--model", str(tmp_path), "--rollout", "vllm", *LENGTHS])
    roles = Roles(policy=AutoConfig.from_pretrained(tmp_path))
    with pytest.raises(ValueError, match="expected layers whose cache is known, got indexed_attention of llama"):
        make_plan(cfg, roles, 2, gpu_named("h100-80gb"), None)


def test_a_family_whose_flops_are_unknown_has_no_floor_of_seconds():
    roles, plan = Roles(policy=AutoConfig.for_model("deepseek_v3")), SimpleNamespace(gpu=gpu_named("h100-80gb"))
    text = time_table(None, roles, plan, 8, 8)
    assert text.startswith("no floor of seconds, since the FLOPs of deepseek_v3 are not known: ") and "\n" not in text


def test_ways_to_fit_accumulate_but_for_lora_and_more_gpus():
    """Nothing is read from the text: a model may be called "GPUs"."""
    cfg = load_recipe("recipes/grpo_vlm.py").Config(
        model="GPUs", rollout="vllm", gpu_memory_utilization=0.9, micro_batch_tokens=2_000_000
    )
    workload = SimpleNamespace(prompt=1_000_000, response=234_567)
    plan = SimpleNamespace(
        sampler=SamplerMemory(0, 0, 8, 8, utilization=0.57, share=0.9),
        rehearsal=SimpleNamespace(workload=workload, resident={}),
        phases={"weight sync": {}},
        gpu=gpu_named("h200-141gb"),
        host_limit=None,
    )
    shared = ["--gpu_memory_utilization 0.57", "--use_fused_kernels", "--enable_gradient_checkpointing"]
    shared += ["--micro_batch_tokens 1234567", "--offload_between_phases"]
    ways = list(ways_to_fit(cfg, plan, large_vocabulary(), 3, 8))
    assert [way.changes for way in ways] == [
        *(shared[: i + 1] for i in range(5)),
        [*shared, "--lora_rank 32"],
        [*shared, "--lora_rank 32", "--dtype bfloat16"],
        [*shared, "--lora_rank 32", "--dtype bfloat16", "--quantize_base"],
        *([*shared, f"{gpus} GPUs in place of 3"] for gpus in (6, 12, 24)),
        *(
            [*shared, "--lora_rank 32", "--dtype bfloat16", *in_4_bits, f"{gpus} GPUs in place of 3"]
            for gpus in (6, 12, 24)
            for in_4_bits in ([], ["--quantize_base"])
        ),
    ]
    assert [way.world for way in ways] == [3] * 8 + [6, 12, 24] + [6, 6, 12, 12, 24, 24]
    assert [way.cfg.lora_rank for way in ways] == [0] * 5 + [32] * 3 + [0] * 3 + [32] * 6
    assert [way.cfg.dtype for way in ways[5:8]] == ["float32", "bfloat16", "bfloat16"] and ways[7].cfg.quantize_base
    assert ways[10].cfg.offload_between_phases and ways[10].cfg.micro_batch_tokens == 1234567
    with_lora = ways_to_fit(ways[5].cfg, plan, large_vocabulary(), 3, 8)
    assert not any(way.changes[0].startswith("--lora") for way in with_lora)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("unknown_gpu", "plan: gpu: expected one of a100-40gb"),
        ("no_ranks", "plan: nproc: expected at least 1 GPU, got 0"),
        (
            "too_long",
            "plan: max_prompt_tokens + max_new_tokens: expected at most 8192, the model's context, got 0 + 9000",
        ),
        ("three_of_four", "plan: ulysses_sequence_parallel_size: expected a divisor of the 4 ranks, got 3"),
        ("images_of_text", "plan: image_tokens: expected 0 for llama, a text model, got 5"),
        ("fsdp1", "plan: engine: expected fsdp2 or megatron in a plan, got fsdp1"),
        ("megatron_adapters", "plan: lora_rank: expected 0 in the megatron engine, got 4; use --engine fsdp2"),
        ("megatron_heads", "plan: tensor: expected a divisor of the 4 key-value heads, got 8"),
        (
            "megatron_teacher",
            "plan: loss: expected sampled_token, or --teacher_top_k, in the megatron engine, got jsd over the whole",
        ),
        ("tiny", 'plan: model: expected a directory or hub id, got "tiny"'),
        ("tiny_teacher", 'plan: teacher: expected a directory or hub id, got "tiny"'),
    ],
)
def test_bad_options_are_one_sentence(found, name, sentence):
    message = found["commands"][name]["end"]
    assert message.startswith(sentence) and "\n" not in message


def test_a_recipe_without_py_is_named(tmp_path):
    """Python finds no loader for such a file."""
    (tmp_path / "recipe").write_text("")
    with pytest.raises(ValueError, match="^recipe: expected a file such as recipes/grpo_vlm.py, got '.*recipe'$"):
        load_recipe(str(tmp_path / "recipe"))


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_every_gpu_has_numbers(name):
    gpu = gpu_named(name)
    assert 1e13 < gpu.flops < 1e16 and 20e9 < gpu.memory < 300e9 and gpu.memory_bandwidth > gpu.link_bandwidth


def test_published_sizes():
    """Parameters of the vision-language models, as their report counts them."""
    from rlkit.plan.rehearsal import empty

    for name, billions in (("qwen2.5-vl-3b", 3.75), ("qwen2.5-vl-7b", 8.29), ("qwen2.5-vl-32b", 33.45)):
        size = sum(p.numel() for p in empty(qwen_vl(name), None).parameters())
        assert size / 1e9 == pytest.approx(billions, abs=0.01)
