"""What the command refuses, and the options that it advises, without a rehearsal."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig

from rlkit.plan import __main__ as command_line
from rlkit.plan.fit import GIB, LOADING, Plan, distinct_gib, least_bytes, ways_to_fit
from rlkit.plan.hardware import USABLE, gpu_named
from rlkit.plan.recipes import load_recipe, recipe_options, recipe_roles
from rlkit.plan.rehearsal import Rehearsal, Roles
from rlkit.plan.report import describe_rows, summary, verdict
from rlkit.plan.sampler import SamplerMemory, Servers, sampler_memory
from rlkit.plan.workload import Workload
from rlkit.runs.vllm_options import share_left

LLAMA = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8, vocab_size=1000)
H100 = gpu_named("h100-80gb")
OPTIONS = SimpleNamespace(nproc=4, image_tokens=None, gpus_per_node=4, host_memory=None)


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
        (["--host_memory", "0"], "host_memory: expected more than 0 GiB, got 0"),
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


def test_sampler_hf_has_weights_and_cache_in_the_dtype_of_the_computation():
    rehearsal = plan_of(10, SamplerMemory(0, 0, 0, 0)).rehearsal
    double = sampler_memory(config(rollout="hf", compute_dtype="float32"), LLAMA, rehearsal, 1, H100)
    for dtype in ("auto", "bfloat16"):
        found = sampler_memory(config(rollout="hf", compute_dtype=dtype), LLAMA, rehearsal, 1, H100)
        assert found.weights == 2 * 1000 and (double.weights, double.cache) == (2 * found.weights, 2 * found.cache)


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
    assert one == "1 prompt of 1 token (0 of images), 1 response of 2 tokens to each"


def ways(world, **options):
    """What is changed for a model that does not fit, without what comes first."""
    workload = Workload(8192, 8192, 0, prompts=1, group_size=2)
    plan = plan_of(900, SamplerMemory(0, 0, 2, 2))
    plan = replace(plan, rehearsal=replace(plan.rehearsal, workload=workload))
    cfg = replace(config(**options), enable_gradient_checkpointing=True, use_fused_kernels=True, micro_batch_tokens=1)
    return [way.changes for way in ways_to_fit(cfg, plan, LLAMA, world, 8)]


def test_long_rows_can_be_shared_by_ranks_and_frozen_weights_can_be_smaller():
    ulysses = [[f"--ulysses_sequence_parallel_size {size}"] for size in (2, 4)]  # of 12 ranks and 8 heads
    lora = ["--lora_rank 32", "--dtype bfloat16", "--quantize_base"]
    adapters = [lora[:1], lora[:2], lora]
    gpus = [[f"{number} GPUs in place of 12"] for number in (24, 48, 96)]
    both = [[*way, *number] for number in gpus for way in adapters[1:]]
    offload = ["--offload_between_phases"]
    assert ways(12) == [offload, *([*offload, *way] for way in (*ulysses, *adapters, *gpus, *both))]
    small = [["--dtype bfloat16"], ["--dtype bfloat16", "--quantize_base"]]
    assert ways(12, lora_rank=8, offload_between_phases=True) == [
        *ulysses, *small, *gpus, *([*way, *number] for number in gpus for way in small),
    ]  # fmt: skip
    sent_alone = {"lora_rank": 8, "sync_adapters": True, "rollout": "vllm", "offload_between_phases": True}
    both = [[*small[0], *number] for number in gpus]
    assert ways(12, **sent_alone) == [*ulysses, small[0], *gpus, *both]  # 4 bits: other base weights than the sampler's


@pytest.mark.parametrize(
    ("resident", "gpus_per_node", "gpus"),
    [(0, 8, ["2", "4", "4"]), (380, 8, ["2", "4", "8"]), (380, 4, ["2", "4", "4"])],
)
def test_a_sampler_is_split_over_gpus_that_there_are_not_yet(resident, gpus_per_node, gpus):
    """200 GiB beside the trainer, on 2, 4 and 8 GPUs of 73.6 GiB in place of one, which cannot split it."""
    weights = 200 << 30
    sampler = SamplerMemory(weights, 0, 0, 2, utilization=0.8, share=0.8)
    plan = plan_of(400, sampler, **{"weight sync": {"parameters": 20 << 30, "sampler's weights": weights}})
    plan = replace(plan, rehearsal=replace(plan.rehearsal, resident={"parameters": resident << 30}))
    found = list(ways_to_fit(config(rollout="vllm"), plan, LLAMA, 1, gpus_per_node))
    split = [way.cfg.rollout_options.get("tensor_parallel_size") for way in found if way.world > 1]
    assert split == [*gpus, *(number for number in gpus for _ in range(2))]  # and with LoRA in 16 and 4 bits
    assert not any(way.cfg.rollout_options for way in found if way.world == 1)
    wanted = [f"--rollout_options tensor_parallel_size {gpus[2]}", "--lora_rank 32", "--dtype bfloat16"]
    assert [*wanted, "8 GPUs in place of 1"] in [way.changes[-4:] for way in found]


@pytest.mark.parametrize(
    ("options", "world", "least"),
    [
        ({}, 1, 16),  # bytes for each parameter: weights, gradients and two moments
        ({}, 8, 2),
        ({"parallel": {"fsdp_size": 2}}, 8, 8),
        ({"dtype": "bfloat16"}, 1, 8),
        ({"lora_rank": 8}, 2, 2),
        ({"lora_rank": 8, "quantize_base": True}, 1, 0.5),
        ({"rollout": "vllm"}, 1, 16),
        ({"rollout": "vllm"}, 16, 2.25),  # two of vLLM, and the shard that is sent
        ({"rollout": "vllm", "rollout_options": {"tensor_parallel_size": "8"}, "lora_rank": 8}, 8, 0.25 + 0.5),
        ({"rollout": "vllm", "lora_rank": 8, "dtype": "bfloat16", "sync_adapters": True}, 8, 2),
        ({"rollout": "vllm_server", "lora_rank": 8}, 8, 0.5),
        ({"engine": "megatron"}, 1, 0),  # is not rehearsed
    ],
)
def test_the_least_of_a_gpu_is_arithmetic(options, world, least):
    plan = plan_of(1, SamplerMemory(0, 0, 2, 2))
    plan = replace(plan, rehearsal=replace(plan.rehearsal, parameters=4800, trainable=4800))
    assert least_bytes(config(**options), plan, LLAMA, world) == least * 4800


def test_megatron_splits_weights_over_tensor_ranks_and_stages():
    """LLAMA has 8 heads and 2 layers."""
    tensor = [[f"--parallel tensor {size} sequence_parallel 1"] for size in (2, 4, 8)]
    stages = [["--parallel pipeline 2"]]
    stages += [[f"--parallel tensor {size} pipeline 2 sequence_parallel 1"] for size in (2, 4, 8)]
    gpus = [[*stages[-1], f"{16 * factor} GPUs in place of 16"] for factor in (2, 4, 8)]
    offload = ["--offload_between_phases"]
    assert ways(16, engine="megatron") == [offload, *([*offload, *way] for way in (*tensor, *stages, *gpus))]
    assert ways(16, engine="megatron", offload_between_phases=True) == [*tensor, *stages, *gpus]
    given = {"parallel": {"tensor": 8, "sequence_parallel": 1}, "offload_between_phases": True}
    given = ways(16, engine="megatron", **given)
    assert given[0] == ["--parallel tensor 8 sequence_parallel 1 pipeline 2"] and len(given) == 1 + 3


def test_megatron_that_does_not_fit_gets_a_layout_that_does(tmp_path, capsys):
    """More GPUs shrink neither weights nor gradients."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 8}
    LlamaConfig(**sizes, vocab_size=32000, tie_word_embeddings=False).save_pretrained(tmp_path)
    options = ["--engine", "megatron", "--max_tokens", "64", "--micro_batch_tokens", "64", "--prompts_per_step", "8"]
    with pytest.raises(SystemExit) as end:
        command_line.main([
            "recipes/sft.py", "--model", str(tmp_path), "--nproc", "8", "--gpu", "x", "--gpu_memory", "0.3", *options,
            "--max_new_tokens", "0",
        ])  # fmt: skip
    lines = capsys.readouterr().out.strip().splitlines()
    fits = "fits with --offload_between_phases, --parallel tensor 2 sequence_parallel 1"
    assert end.value.code == 1 and lines[-1] == fits, lines


def offloaded(gib):
    """A plan with this many GiB of a rank on the host, between phases."""
    plan = plan_of(50, SamplerMemory(0, 0, 2, 2))
    return replace(plan, rehearsal=replace(plan.rehearsal, host=gib << 30))


def with_host(plan, cfg, monkeypatch, gib):
    monkeypatch.setattr(command_line, "make_plan", lambda *_: plan)
    options = SimpleNamespace(**{**vars(OPTIONS), "host_memory": gib})
    return command_line.whole_plan(cfg, Roles(policy=LLAMA), 4, H100, None, options)


def test_host_memory_is_checked_if_it_is_known(monkeypatch):
    """Weights and optimizer that are pinned on the host between phases, of four ranks; it was printed only."""
    cfg = config(offload_between_phases=True)
    enough, too_little = (with_host(offloaded(100), cfg, monkeypatch, gib) for gib in (401, 399))
    assert enough.fits and verdict(cfg, enough).endswith("; 400.0 GiB of a machine's 401.0 GiB of host memory")
    assert verdict(cfg, enough).startswith("fits: 50.0 GiB of 73.6 GiB usable")
    assert not too_little.fits and verdict(cfg, too_little).startswith("does not fit: 50.0 GiB of 73.6 GiB usable")
    assert verdict(cfg, too_little).endswith("; 400.0 GiB of a machine's 399.0 GiB of host memory, which is too little")
    unknown = with_host(offloaded(100), cfg, monkeypatch, None)
    assert unknown.fits and "host memory" not in verdict(cfg, unknown)
    shown = summary(cfg, too_little)["host_memory"]
    assert shown["weights and optimizer, between phases"] == 400 << 30


def test_images_of_prompts_as_long_as_they_may_be_are_not_scored():
    host = {LOADING: 8 << 30, "export, at most": 2 << 30, "images of two steps": 900 << 30}
    plan = replace(plan_of(50, SamplerMemory(0, 0, 2, 2)), host=host, host_limit=9 << 30)
    assert plan.fits and plan.host_peak == 8 << 30


def test_offloading_is_not_advised_to_a_host_without_room():
    plan = plan_of(90, SamplerMemory(0, 0, 2, 2))
    plan = replace(plan, rehearsal=replace(plan.rehearsal, resident={"parameters": 60 << 30}))
    for limit, advised in ((239, False), (240, True), (None, True)):
        limited = replace(plan, host_limit=limit and limit << 30)
        changes = [change for way in ways_to_fit(config(), limited, LLAMA, 4, 8) for change in way.changes]
        assert ("--offload_between_phases" in changes) == advised


def test_numbers_that_rounding_makes_equal_have_more_decimals():
    """It was "does not fit: ... 1.1 GiB, of 1.1 GiB"."""
    assert distinct_gib([int(1.14 * GIB), 2 * GIB], 1.11 * GIB) == (["1.14", "2.00"], "1.11")
    assert distinct_gib([2 * GIB], GIB) == (["2.0"], "1.0") and distinct_gib([GIB], GIB) == (["1.0000"], "1.0000")
    usable = int(USABLE * H100.memory)
    large = plan_of(1, SamplerMemory(0, 0, 2, 2), backward={"activations": usable + (10 << 20)})
    assert verdict(config(), large).startswith("does not fit: backward 73.57 GiB of 73.56 GiB usable on h100-80gb")
    small = replace(large, phases={"train": {"parameters": usable - (1 << 20)}})
    assert verdict(config(), small).startswith("fits: 73.562 GiB of 73.563 GiB usable")


def test_advice_for_a_host_that_is_too_small(monkeypatch):
    cfg = config(offload_between_phases=True)
    small = with_host(offloaded(100), cfg, monkeypatch, 300)
    options = SimpleNamespace(**{**vars(OPTIONS), "host_memory": 300})
    sentence = command_line.advice(cfg, Roles(policy=LLAMA), small, options)
    assert sentence == "does not fit with any of these options: the least is 400.0 GiB of host memory, of 300.0 GiB"
    monkeypatch.setattr(command_line, "make_plan", lambda cfg, *_: offloaded(30 if cfg.lora_rank else 100))
    assert command_line.advice(cfg, Roles(policy=LLAMA), small, options).endswith("--lora_rank 32")


@pytest.mark.parametrize(
    ("start", "way", "sentence"),
    [
        (
            (80, 20), (60, 130),
            "those that fit on the host take at least 80.0 GiB, of 73.6 GiB usable; "
            "those that fit on the GPU take at least 130.0 GiB of host memory, of 128.0 GiB",
        ),  # it was "the least is 60.0 GiB, of 73.6 GiB usable"
        (
            (60, 130), (80, 20),
            "those that fit on the host take at least 80.0 GiB, of 73.6 GiB usable; "
            "those that fit on the GPU take at least 130.0 GiB of host memory, of 128.0 GiB",
        ),  # it was "the sampler's cache has no room for one sequence"
        ((90, 20), (80, 30), "the least is 80.0 GiB, of 73.6 GiB usable"),
        ((90, 20), (80, 130), "those that fit on the host take at least 90.0 GiB, of 73.6 GiB usable"),
        ((60, 140), (50, 130), "the least is 130.0 GiB of host memory, of 128.0 GiB"),
        ((60, 140), (80, 130), "those that fit on the GPU take at least 140.0 GiB of host memory, of 128.0 GiB"),
        (
            (90, 140), (80, 130),
            "the least is 80.0 GiB, of 73.6 GiB usable; the least is 130.0 GiB of host memory, of 128.0 GiB",
        ),
    ],
)  # fmt: skip
def test_what_is_too_small_is_named_for_gpu_and_host(monkeypatch, start, way, sentence):
    """GiB of a GPU and of the host, at the start and with each of the ways."""

    def plan(gpu, host):
        return replace(plan_of(gpu, SamplerMemory(0, 0, 2, 2)), host={LOADING: host << 30}, host_limit=128 << 30)

    monkeypatch.setattr(command_line, "whole_plan", lambda *_: plan(*way))
    advice = command_line.advice(config(), Roles(policy=LLAMA), plan(*start), OPTIONS)
    assert advice == f"does not fit with any of these options: {sentence}"
