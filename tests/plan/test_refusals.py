"""What the command refuses because the run would be refused, too; and phases that a run does not have."""

import json
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import AutoConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from rlkit.plan import __main__ as command_line
from rlkit.plan import megatron, rehearsal
from rlkit.plan.fit import make_plan
from rlkit.plan.hardware import gpu_named
from rlkit.plan.recipes import load_recipe, recipe_options, recipe_roles
from rlkit.plan.rehearsal import Roles
from rlkit.plan.weights import weight_and_optimizer_bytes

FAMILY = f"model_type: expected a family that transformers {transformers.__version__} knows"
SHORT = ["--max_prompt_tokens", "64", "--max_new_tokens", "64", "--no_advice"]
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def refusal(model, *options):
    """The message with which the command ends."""
    with pytest.raises(SystemExit) as end:
        command_line.main(["recipes/grpo_vlm.py", "--model", str(model), *SHORT, *options])
    message = str(end.value)
    assert "\n" not in message
    return message


@pytest.fixture
def model(tmp_path):
    LlamaConfig(**SIZES, num_key_value_heads=4, vocab_size=1000).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["megatron", "--use_torch_compile"], "use_torch_compile: expected --engine fsdp2, got megatron, whose "),
        (
            ["megatron", "--ulysses_sequence_parallel_size", "2", "--nproc", "2"],
            "ulysses_sequence_parallel_size: expected 1 in the megatron engine, got 2; use --parallel context 2",
        ),
        (
            ["megatron", "--no_use_remove_padding"],
            "use_remove_padding: expected True in the megatron engine, got False; use --engine fsdp2",
        ),
        (
            ["megatron", "--parallel", "fsdp_size", "2", "--nproc", "2"],
            "parallel: expected tensor, pipeline, context, expert, sequence_parallel in the megatron engine, "
            "got fsdp_size; use --engine fsdp2",
        ),
        (
            ["fsdp2", "--parallel", "pipeline", "2", "--nproc", "2"],
            "parallel: expected fsdp_size, tensor in the fsdp2 engine, got pipeline; use --engine megatron",
        ),
        (
            ["fsdp2", "--freeze", "("],
            "freeze: expected a regular expression, got '(': missing ), unterminated subpattern",
        ),
    ],
)
def test_options_of_another_engine_are_named(model, options, sentence):
    assert refusal(model, "--engine", *options).startswith(f"plan: {sentence}")


def test_a_model_of_which_nothing_is_trained_is_one_sentence(model):
    for options in ([], ["--lora_rank", "2"], ["--engine", "megatron"]):
        assert refusal(model, "--freeze", ".*", *options) == (
            "plan: freeze: expected some weights to train, got none left by '.*'"
        )


SERVER_OPTIONS = "servers: expected none with --rollout {0}, which samples in the processes of the run, got http://a:1"


@pytest.mark.parametrize(
    ("recipe", "options", "sentence"),
    [
        ("grpo_vlm", ["--rollout", "vllm", "--servers", "http://a:1"], SERVER_OPTIONS.format("vllm")),
        ("sft", ["--servers", "http://a:1"], SERVER_OPTIONS.format("hf")),
        ("grpo_vlm", ["--rollout", "vllm_server"], "servers: expected URLs for --rollout vllm_server, got none; "),
        (
            "grpo_vlm",
            ["--rollout", "hf", "--rollout_options", "tensor_parallel_size", "2"],
            "hf rollout: expected options gathered, processor, ",
        ),
        ("grpo_vlm", ["--rollout", "ollama"], "rollout: expected one of hf, sglang, vllm, vllm_server, got 'ollama'"),
        ("grpo_vlm", ["--max_new_tokens", "0"], "max_new_tokens: expected at least 1, got 0"),
        ("grpo_vlm", ["--rollout", "vllm", "--temperature", "1e-9"], "temperature: expected one from "),
        ("sft", ["--keep_best"], "evaluate_every: expected at least 1 with --keep_best, got 0"),
        ("grpo_vlm", ["--group_size", "1"], "group_size: expected at least 2, got 1"),
        ("kto", ["--prompts_per_step", "1"], "prompts_per_step: expected at least 2 without --no_baseline, got 1"),
        ("dapo", ["--epochs", "1"], "epochs: expected --steps, as steps vary in size, got 1"),
    ],
)
def test_what_the_run_refuses_is_refused_before_anything_is_planned(recipe, options, sentence, tmp_path, monkeypatch):
    """Options that the recipe itself checks before it loads its task, and those that all runs check."""
    monkeypatch.setattr(command_line, "recipe_roles", lambda *_: pytest.fail("planned"))
    with pytest.raises(SystemExit) as end:
        command_line.main([f"recipes/{recipe}.py", "--model", str(tmp_path), *options])
    assert str(end.value).startswith(f"plan: {sentence}") and "\n" not in str(end.value)


def test_other_statements_of_a_recipe_are_not_run(tmp_path):
    """Such as those of a copy that logs in somewhere, or whose `main` has a decorator."""
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        "import functools, os\n"
        "from pathlib import Path\n"
        "from recipes.grpo_vlm import *\n"
        "def decorated(f):\n    return functools.wraps(f)(lambda cfg: f(cfg))\n"
        "@decorated\n"
        "def main(cfg: Config) -> None:\n"
        f"    Path({str(tmp_path / 'made')!r}).touch()\n"
        "    if int(os.environ['NO_SUCH_RANK']) == 0:\n        raise ValueError('not reached')\n"
        "    runs.check_range('undefined', undefined, 2)\n"
        "    runs.check_range('group_size', cfg.group_size, 2)\n"
        "    task = runs.load_named_task(cfg, cfg.task)\n"
    )
    with pytest.raises(SystemExit, match="plan: group_size: expected at least 2, got 1"):
        command_line.main([str(recipe), "--model", str(tmp_path), "--lr", "1e-6", "--group_size", "1"])
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("grpo_vlm", ["--rollout", "vllm_server", "--server_gpus", "2"]),
        ("grpo_async", ["--rollout", "vllm_server"]),  # the recipe starts servers itself
        ("reinforce", ["--advantage", "remax", "--group_size", "1"]),
        ("sft", ["--max_new_tokens", "0", "--rollout_options", "dtype", "float32"]),  # nothing is sampled
        ("grpo_vlm", ["--rollout", "vllm", "--rollout_options", "max_num_seqs", "8"]),
    ],
)
def test_what_the_run_takes_is_planned(recipe, options, tmp_path, monkeypatch):
    def planned(*_):
        raise ValueError("planned")

    monkeypatch.setattr(command_line, "recipe_roles", planned)
    with pytest.raises(SystemExit, match="^plan: planned$"):
        command_line.main([f"recipes/{recipe}.py", "--model", str(tmp_path), *options])


def test_padded_rows_are_not_planned_but_their_weights_are(model, capsys):
    sentence = "plan: use_remove_padding: expected True in a plan, got False: masks of padded rows are not counted"
    assert refusal(model, "--no_use_remove_padding") == f"{sentence}; use --weights_only"
    assert refusal(model, "--no_use_remove_padding", "--weights_only") == "0"  # the exit status
    assert "weights, gradients and optimizer state alone take 0.0 GiB" in capsys.readouterr().out


def test_quantized_files_cannot_be_trained(tmp_path):
    config = Qwen3Config(**SIZES, num_key_value_heads=2, vocab_size=1000).to_dict()
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))
    said = "expected weights that are not quantized, got fp8; pass the model in bfloat16"
    for changes in ([], ["--model_config", "rope_theta", "1e6"]):
        assert said in refusal(tmp_path, *changes)


@pytest.mark.parametrize("family", ["bert", "t5", "bart"])
def test_a_family_without_a_causal_language_model_is_one_sentence(tmp_path, family):
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    said = f"expected a causal language model, got an encoder or encoder-decoder of the family {family}"
    assert refusal(tmp_path) == f"plan: model {str(tmp_path)!r}: {said}"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"model_type": "frobnicator"}, f"{FAMILY}, got 'frobnicator'"),
        ({"model_type": ["llama"]}, f"{FAMILY}, got ['llama']"),
        ({"hidden_size": 64}, f"{FAMILY}, got None"),
        ({"model_type": "frobnicator", "auto_map": {"AutoConfig": "x.Y"}}, f"{FAMILY}, got 'frobnicator'; the model "
         "brings its own code, which runs with --trust_remote_code (trust_remote_code=True)"),
        ([], "config.json: expected a mapping of names to values, got list"),
    ],
)  # fmt: skip
def test_a_config_without_a_known_family_is_one_sentence(tmp_path, content, said):
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert refusal(tmp_path) == f"plan: model {str(tmp_path)!r}: {said}"
    file = tmp_path / "config.json"  # also where the configuration alone names the model, or is changed
    named = f"plan: model {str(tmp_path)!r}: {said}"
    assert refusal(file) == refusal(file, "--model_config", "hidden_size=64") == named
    assert refusal(tmp_path, "--model_config", "hidden_size=64") == named


@pytest.mark.parametrize("engine", ["fsdp2", "megatron"])
@pytest.mark.parametrize("new_tokens", [0, 8])
def test_a_run_that_generates_nothing_sends_no_weights(model, monkeypatch, engine, new_tokens):
    module = load_recipe("recipes/sft.py")
    options = ["--model", str(model), "--engine", engine, "--max_tokens", "64", "--max_new_tokens", str(new_tokens)]
    cfg = recipe_options(module, options)
    if engine == "megatron":
        phases = make_plan(cfg, recipe_roles(module, cfg), 1, gpu_named("h100-80gb"), None).phases
    else:
        phases = []
        monkeypatch.setattr(rehearsal, "_train", lambda *_: None)
        monkeypatch.setattr(rehearsal, "_send_weights", lambda *_: phases.append("weight sync"))
        rehearsal._run_phases(cfg, Roles(policy=1), {"policy": 1}, None, SimpleNamespace(bytes={}))
    assert ("weight sync" in phases) == (new_tokens > 0)


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ([], 16),  # weights, gradients and two moments, in float32
        (["--dtype", "bfloat16"], 8),
        (["--nproc", "4"], 4),
        (["--nproc", "4", "--parallel", "fsdp_size", "2"], 8),
        (["--engine", "fsdp1"], 16),
        (["--lora_rank", "1", "--target_modules", "nothing|.*0.self_attn.q_proj"], 4),  # frozen, but for 128 numbers
    ],
)
def test_weights_gradients_and_optimizer_alone(model, options, numbers):
    """Bytes for each parameter on a rank, for a step that cannot be rehearsed."""
    module = load_recipe("recipes/sft.py")
    world = int(options[1]) if options[:1] == ["--nproc"] else 1
    cfg = recipe_options(module, ["--model", str(model), *(options[2:] if world > 1 else options)])
    roles = recipe_roles(module, cfg)
    parameters = sum(p.numel() for p in rehearsal.empty(roles.policy, torch.float32).parameters())
    assert weight_and_optimizer_bytes(cfg, roles, world) == pytest.approx(numbers * parameters, rel=0.02)


def test_adapters_of_experts_take_no_memory_before_a_rehearsal(tmp_path):
    """Those of all experts of a published model take tens of GiB."""
    sizes = {**SIZES, "num_key_value_heads": 2, "vocab_size": 1000, "num_experts": 4, "moe_intermediate_size": 64}
    Qwen3MoeConfig(**sizes).save_pretrained(tmp_path)
    module = load_recipe("recipes/ppo.py")
    cfg = recipe_options(module, ["--model", str(tmp_path), "--lora_rank", "4"])
    models = rehearsal._models(cfg, recipe_roles(module, cfg))
    assert models.keys() == {"policy", "critic"}
    for model in models.values():
        adapters = {name: p for name, p in model.named_parameters() if "lora_" in name}
        assert any("experts" in name for name in adapters)
        assert [name for name, p in adapters.items() if not p.is_meta] == []


def test_offloaded_megatron_engines_are_on_the_gpu_one_at_a_time(model):
    """Between phases nothing is; the bytes of each phase are those of the models that it uses."""
    module, found = load_recipe("recipes/ppo.py"), []
    for options in ([], ["--offload_between_phases"]):
        cfg = recipe_options(module, ["--model", str(model), "--engine", "megatron", "--kl_coef", "0.1", *options])
        found.append(megatron.estimate(cfg, recipe_roles(module, cfg), 2, None))
    kept, moved = found
    assert not kept.host and not moved.resident and moved.host == sum(kept.resident.values())
    assert 0 < moved.copied_back == moved.host - kept.resident["reference"]
    policy, critic = moved.peaks["optimizer step"], moved.peaks["critic: optimizer step"]
    for kind in ("parameters", "optimizer"):
        assert policy[kind] + critic[kind] == kept.resident[kind]
    assert moved.peaks["reference"].keys() == {"reference", "activations"}
    assert "optimizer" not in moved.peaks["weight sync"]
    assert all(sum(phase.values()) < sum(kept.peaks[name].values()) for name, phase in moved.peaks.items())


def test_a_critic_beside_the_policy_counts_unless_they_are_offloaded_in_turn(model):
    module, sizes = load_recipe("recipes/ppo.py"), []
    for options in ([], ["--offload_between_phases"]):
        cfg = recipe_options(module, ["--model", str(model), *options])
        sizes.append(weight_and_optimizer_bytes(cfg, recipe_roles(module, cfg), 1))
    assert sizes[0] > 1.5 * sizes[1]


def test_weights_only_need_no_rehearsal(model, monkeypatch, capsys):
    monkeypatch.setattr(command_line, "make_plan", lambda *_: pytest.fail("rehearsed"))
    arguments = ["recipes/sft.py", "--model", str(model), "--engine", "fsdp1", "--gpu", "x", "--weights_only"]
    for memory, status in (("1", 0), ("0.001", 1)):
        with pytest.raises(SystemExit) as end:
            command_line.main([*arguments, "--gpu_memory", memory])
        assert end.value.code == status
    alone = "weights, gradients and optimizer state alone take "
    fits, not_enough = f"{alone}0.0 GiB, of 0.9 GiB usable on x", f"{alone}0.003 GiB, of 0.001 GiB usable on x"
    assert capsys.readouterr().out == f"{fits}\ndoes not fit: {not_enough}\n"
