"""Real vLLM in the trainer's process, on one rank and on two, beside the engine whose weights it is given."""

import json
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from isolated_cases import require, run_cases
from transformers import AutoConfig, LlamaConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
from family_configs import BASE, COMPASS, GLM5, QWEN4, TEXT, VISION

from rlkit.data.media import Video
from rlkit.data.samples import prompt_sample
from rlkit.rollout import Sampling
from rlkit.rollout.adapters import ADAPTER_ID
from rlkit.rollout.inference_requests import finished_sample
from rlkit.rollout.serve import command, serving
from rlkit.rollout.vllm import SUPPORTED, VllmRollout, cpu_options, import_vllm, loading_error
from rlkit.rollout.vllm_cpu import OBSTACLES, cpu_dtype_and_options, has_avx512, with_family_options
from rlkit.rollout.vllm_families import (
    check_weight_updates_work,
    check_windows_work,
    config_or_empty,
    family_options,
    runs_by_transformers,
)
from rlkit.rollout.vllm_prepared import has_prepared, normalization_options, takes_prepared
from rlkit.rollout.vllm_requests import request_seed, vllm_prompt, vllm_sampling_params
from rlkit.vlm.families import has_bidirectional_images
from rlkit.vlm.loading import load_config

KINDS = ["qwen2", "qwen2_tied", "qwen3_moe", "qwen3_vl", "qwen2_5_vl"]
SPLITS = ["two_ranks/qwen2_5_vl", "two_ranks/qwen2_5_vl:2"]  # data-parallel; two ranks share one engine
TOLERANCE = 2e-5  # seen: 1.1e-5 for merged adapters on a CPU without AVX, below 1e-5 elsewhere
TOLERANCES = {"zamba2": 1e-4}  # seen: 4e-5; it grows with each weight that is enlarged, so none is left behind
FAMILIES = [
    "internvl", "llava", "smolvlm", "idefics3", "glm4v", "glm4v_moe", "qwen2_vl", "qwen3_vl_moe",
    "llama", "mistral", "qwen3", "qwen2_moe", "gemma2", "gemma3_text", "mixtral", "gpt2",
    "deepseek_v3", "gemma4", "gpt_oss", "olmo3",
]  # fmt: skip
# the rest runs by `make families`
MORE_FAMILIES = [
    "ernie4_5", "ernie4_5_moe", "falcon_h1", "flex_olmo", "gemma3n", "gemma3n_text", "gemma4_text", "gemma4_unified",
    "glm46v", "glm4_moe", "glm_ocr", "granitemoehybrid", "lfm2", "lfm2_moe", "lfm2_vl", "llama4", "llama4_text",
    "ministral3", "mistral3", "mistral4", "nemotron_h", "olmo2", "paddleocr_vl", "qwen2_5_omni_thinker",
    "qwen3_omni_moe_thinker", "seed_oss", "smollm3", "llava_next", "llava_onevision", "phi3", "granite", "glm4",
    "exaone4", "hunyuan_v1_dense", "hunyuan_v1_moe", "olmoe", "starcoder2", "dots1",
    "exaone4_5", "video_llama_3", "cohere2", "glm4_moe_lite", "afmoe", "apertus", "arcee", "cohere", "cohere2_moe",
    "cwm", "deepseek_v2", "exaone_moe", "gemma", "glm", "gpt_bigcode", "gpt_neox", "granite_swa", "granitemoe",
    "granitemoe_swa", "granitemoeshared", "helium", "hy_v3", "hyperclovax", "jais2", "mellum", "minicpm3", "ministral",
    "nanochat", "olmo", "opt", "phi", "phimoe", "solar_open", "vaultgemma", "hyperclovax_vision_v2",
    "axk1", "zamba2", "llava_next_video", "gemma4_unified_text",
]  # fmt: skip
BFLOAT16 = ["qwen3_5", "qwen3_next"]  # vLLM's kernel for the gated delta rule has no other dtype on a CPU
MORE_BFLOAT16 = ["minicpmv4_6", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"]
BFLOAT16_TOLERANCE = 0.08
OTHER_CPU = "deepseek_v3/other_cpu"
# cases whose images and videos the trainer prepares for vLLM
PREPARED = ["qwen2_5_vl", "qwen3_vl", *SPLITS]
PREPARED += [f"family/{name}" for name in ("glm4v", "glm4v_moe", "llava", "qwen2_vl", "qwen3_vl_moe", "smolvlm")]
POSITIONS = ["Qwen2VL", "Qwen2_5_VL"]
REFUSED = {
    "gemma3": "expected a family whose image tokens attend to earlier ones only",
    # the last one, as vLLM keeps some state when it fails
    "diffllama": "Layer 0 does not dispatch through the Transformers attention interface",
}
OF_TRANSFORMERS = "rlkit.rollout.vllm_transformers"
BY_TRANSFORMERS = ["olmo3", "flex_olmo", "olmo2", "seed_oss", "smollm3"]  # the first is in FAMILIES
BY_TRANSFORMERS += ["hunyuan_v1_dense", "hunyuan_v1_moe", "starcoder2", "dots1", "video_llama_3", "arcee", "cwm"]
BY_TRANSFORMERS += ["glm", "gpt_bigcode", "gpt_neox", "helium", "jais2", "mellum", "ministral", "nanochat", "olmo"]
BY_TRANSFORMERS += ["phi", "solar_open", "vaultgemma", "hyperclovax_vision_v2", "gemma4_unified_text"]
OF_TEXT = {"qwen4_exp_text": QWEN4, "glm5_next_text": GLM5, "cohere_compass_text": COMPASS}


class Facts(Mapping):
    """Measurements of a case on a rank; a failed case raises when it is read."""

    def __init__(self, folder, rank=0):
        self.folder, self.rank = folder, rank

    def __getitem__(self, name):
        require(self.folder, name)
        return json.loads((self.folder / f"{name.replace('/', '_')}.{self.rank}.json").read_text())

    def __iter__(self):
        raise TypeError("look cases up by their names")

    __len__ = __iter__


def run(folder, names):
    script = str(Path(__file__).with_name("on_vllm.py"))
    run_cases([sys.executable, script, str(folder)], folder, names, timeout=1800)
    return [Facts(folder, rank) for rank in range(2)]


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory):
    """Measurements of all cases, on each rank."""
    names = [*KINDS, "films", "nccl", *(f"family/{name}" for name in [*FAMILIES, *BFLOAT16, OTHER_CPU, *REFUSED])]
    names += [*(f"positions/{name}" for name in POSITIONS), "long_rope/0", "long_rope/160", *SPLITS]
    names += ["two_ranks/recipe", "two_ranks/failed_start"]
    return run(tmp_path_factory.mktemp("vllm"), names)


@pytest.fixture(scope="module")
def alone(by_rank):
    """Measurements of cases with one rank."""
    return by_rank[0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_microscope_names_the_part_of_the_trainer_that_has_a_fault(alone, kind):
    named = alone[kind]["named"]
    assert named == {part: part for part in named}  # without a fault none
    parts = {"injected features", "layer 0: attention", "layer 0", "layer 1", "final norm", "sampling transform"}
    parts |= {"pixels", "positions", "vision tower"} if kind.endswith("vl") else set()
    parts |= {"layer 1: router"} if kind.endswith("moe") else set()
    assert parts | {""} <= set(named)


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_the_trainers_whenever_weights_were_synced(alone, kind):
    """At temperature 0.8, with image tokens and unused rows suppressed: before training, after each update, with
    LoRA, also above weights in NF4; and gross in between."""
    facts = alone[kind]
    assert facts["grad_norm"] > 0.1
    for stage in ("start", "synced", "synced_again", "lora", "nf4"):
        assert facts[stage] < TOLERANCE, (stage, facts[stage])
    for stage in ("unsynced", "lora_unsynced"):
        assert facts[stage] > 0.3, (stage, facts[stage])
    assert facts["nf4_is_not_lora"] > 0.01
    assert facts["version"] == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_samples_what_its_trainer_scores(alone, family):
    """The mismatch is rounding before an update and after the weights were sent, and large in between."""
    assert_sampled_as_scored(alone[f"family/{family}"])


@pytest.mark.parametrize("longest", [0, 160])
def test_vllm_and_the_trainer_have_the_same_factors_of_longrope(alone, longest):
    """At all lengths; a sampler and a trainer that are not told how long sequences become have those for 64 tokens."""
    facts = alone[f"long_rope/{longest}"]
    assert facts["difference"] < TOLERANCE and facts["max_model_len"] == (longest or 64)
    assert min(facts["lengths"]) < 30 and (max(facts["lengths"]) > 64) == (longest > 64)


@pytest.mark.parametrize("family", BFLOAT16)
def test_a_family_samples_what_its_trainer_scores_in_bfloat16(alone, family):
    assert_close_in_bfloat16(facts_of(alone, family))


@pytest.mark.parametrize("family", BFLOAT16)
def test_a_cast_before_weights_are_gathered_changes_nothing_in_vllm(alone, family):
    """vLLM keeps A_log in float32, which casting all weights would round."""
    assert_same_weights_after_a_cast(facts_of(alone, family))


@pytest.mark.parametrize("family", [family for family in [*FAMILIES, *BFLOAT16] if family != "gpt2"])
def test_the_planned_cache_is_that_of_vllm(alone, family):
    """Full, sliding and latent attention, shared keys and values, and the gated delta rule, by vLLM's specs.

    gpt2 has no key-value heads of its own; its tiny model sets a number that it ignores.
    """
    planned, of_vllm = facts_of(alone, family)["cache"]
    assert planned == of_vllm > 0


def test_latent_attention_works_with_and_without_amx(alone):
    """Its kernel for CPUs with AMX refuses float32; both are simulated."""
    assert_sampled_as_scored(alone[f"family/{OTHER_CPU}"])


@pytest.mark.parametrize("case", PREPARED)
def test_what_the_trainer_has_prepared_is_not_prepared_again_and_changes_no_response(alone, case):
    assert_same_as_prepared_by_vllm(alone[case])


def test_what_the_trainer_has_prepared_is_not_prepared_again_in_bfloat16(alone):
    assert_same_as_prepared_by_vllm(facts_of(alone, "qwen3_5"))


def test_no_rank_that_shares_an_engine_prepares_images_of_another(by_rank):
    assert_same_as_prepared_by_vllm(by_rank[1][SPLITS[1]])


def test_vllm_prepares_images_of_other_families(alone):
    other = alone["family/internvl"]
    assert "prepared" not in other and other["synced"] < TOLERANCE


def test_a_request_that_fails_leaves_none_in_the_engine(alone):
    facts = alone["qwen2_5_vl"]
    assert facts["broken"].startswith("compact_ids: expected ") and facts["left"] is False


def assert_same_as_prepared_by_vllm(facts):
    """Token by token and bit by bit, images and videos; the tensors, which the trainer needs, stay as they were."""
    facts = facts["prepared"]
    assert facts["greedy"] and facts["sampled"] and facts["unchanged"] and facts["distinct"] > 5, facts
    by_trainer, by_vllm = facts["calls"][::2], facts["calls"][1::2]
    assert by_trainer == [0, 0] and min(by_vllm) > 1, facts


def facts_of(alone, family):
    """The facts of a family; without AVX-512 a family with the gated delta rule is refused by name instead."""
    facts = alone[f"family/{family}"]
    if family in [*BFLOAT16, *MORE_BFLOAT16] and not has_avx512():
        assert facts["error"].startswith(f"model: expected a family that vLLM can compute on a CPU, got {family}: ")
        pytest.skip("vLLM's kernel for the gated delta rule needs AVX-512")
    return facts


def assert_sampled_as_scored(facts, tolerance=TOLERANCE):
    assert facts["start"] < tolerance and facts["synced"] < tolerance and facts["unsynced"] > 0.2, facts


def assert_same_weights_after_a_cast(facts):
    """In a model that computes in bfloat16."""
    assert facts["changed_by_cast"] == [] and any("A_log" in name for name in facts["changed_by_rounding"])
    assert facts["share_of_bytes"] < 0.52  # tiny matrices, so that vectors are 2 % of the bytes


def assert_close_in_bfloat16(facts):
    """The trainer computes in float32, with weights that bfloat16 can represent."""
    assert facts["start"] < BFLOAT16_TOLERANCE and facts["synced"] < BFLOAT16_TOLERANCE, facts
    assert facts["unsynced"] > 3 * BFLOAT16_TOLERANCE, facts


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_would_sample_something_else_is_refused_by_name(alone, family):
    facts = alone[f"family/{family}"]
    assert facts["error"].startswith("model: expected ") and REFUSED[family] in facts["error"]
    assert family in facts["error"] and facts["error"].endswith("use rollout 'hf'")
    assert "synced" not in facts


@pytest.mark.parametrize("name", POSITIONS)
def test_position_ids_are_vllms_with_its_rule_for_videos(alone, name):
    """On 200 random rows of images and videos; with transformers' rule they differ."""
    by_vllms_rule, by_transformers = alone[f"positions/{name}"]["equal"]
    assert by_vllms_rule == 200 > 150 > by_transformers > 20


def test_transformers_code_is_run_without_a_change_of_the_trainers_class(alone):
    """vLLM's own model would decorate it, after which the trainer's model has no `do_not_compile`."""
    by_transformers = [family for family in FAMILIES if alone[f"family/{family}"]["module"] == OF_TRANSFORMERS]
    assert by_transformers == BY_TRANSFORMERS[:1]


@pytest.mark.parametrize(
    ("architectures", "options", "expected"),
    [
        (["Olmo3ForCausalLM"], {}, True),
        (["Own"], {}, False),
        (["Own"], {"model_impl": "transformers"}, True),
        (["Unknown"], {}, True),
        (["Unknown", "Own"], {}, False),
        (["Unknown"], {"hf_overrides": {"architectures": ["Own"]}}, False),
        (["Unknown"], {"hf_overrides": {"text_config": {}}}, True),
        (None, {"hf_overrides": lambda config: config}, True),
    ],
)
def test_models_that_vllm_runs_by_transformers_code(architectures, options, expected):
    """With entries of vLLM's registry before and after a class was imported."""
    for of_vllm in ("vllm.model_executor.models.transformers", OF_TRANSFORMERS):
        for attributes in ({"module_name": of_vllm}, {"model_cls": SimpleNamespace(__module__=of_vllm)}):
            own = {name: f"{value}.llama" for name, value in attributes.items() if name == "module_name"}
            registered = {"Olmo3ForCausalLM": SimpleNamespace(**attributes), "Own": SimpleNamespace(**own)}
            config = LlamaConfig(architectures=architectures)
            assert runs_by_transformers(config, options, registered) == expected


def test_a_configuration_that_transformers_cannot_read_says_nothing_of_the_model_that_vllm_runs(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "of_a_later_release", "architectures": ["Own"]}')
    config = config_or_empty(str(tmp_path))
    assert not runs_by_transformers(config, {}, {}) and runs_by_transformers(config, {"model_impl": "transformers"}, {})


@pytest.mark.parametrize("kind", KINDS)
def test_prefix_cache_reset_after_weight_sync(alone, kind):
    """Otherwise responses to prompts that were seen before would use keys and values of the old weights."""
    assert alone[kind]["prefix_cache_kept"] > 0.1 > TOLERANCE > alone[kind]["synced_again"]


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_encoder_cache_reset_after_weight_sync(alone, kind):
    """The worker drops image features of the old weights; a scheduler that expects them would fail."""
    assert "Encoder cache miss" in str(alone[kind]["encoder_cache_kept"])


def test_tied_head_moves_with_the_embedding(alone):
    assert alone["qwen2_tied"]["synced"] < TOLERANCE and alone["qwen2_5_vl"]["synced"] < TOLERANCE


def test_calls_of_nccl_transfer_match_vllms_signatures(alone):
    """By vLLM's signatures; the transfer itself is tested in test_on_gpus.py."""
    assert alone["nccl"] == {"joined": True, "places": [1, 3, True, 0, 3, 5], "sent": [6, 4], "buffers": []}


def test_adapters_alone_are_enough(alone):
    facts = alone["qwen2_5_vl"]
    assert max(facts["adapter"], facts["adapter_again"]) < TOLERANCE
    assert min(facts["adapter_unsynced"], facts["adapter_moved"], facts["adapter_prefix_cache_kept"]) > 0.05
    assert facts["adapters_loaded"] == [ADAPTER_ID]  # in place of the one before
    assert facts["adapter_version"] == 3 and facts["left_in_memory"] == []
    assert "enable_lora=True" in facts["errors"]["adapter"]
    assert "expected a model without experts" in alone["qwen3_moe"]["errors"]["adapter"]


def test_adapters_that_would_not_be_used_as_they_were_trained_are_refused(alone):
    """Adapters of the vision tower, which vLLM would ignore, and adapters on weights that they are merged into."""
    facts = alone["qwen2_5_vl"]
    tower, experts, rank, replaced = facts["adapters_refused"]
    assert "experts.base_layer.lora_A.weight, of experts in one tensor" in experts
    assert "expected an adapter of at most rank 8 (max_lora_rank), got 9" in rank
    assert "visual.blocks.0" in tower and "expected adapters of the language model only" in tower
    assert facts["whole_after_adapter"] < TOLERANCE and "got those of a previous update_weights" in replaced


def test_a_recipe_sends_adapters_alone(by_rank):
    """To an engine on each of two ranks."""
    for facts in (part["two_ranks/recipe"] for part in by_rank):
        assert [row["step"] for row in facts["steps"]] == [0, 1, 2]
        assert all(row["mismatch/abs_dlogp"] < TOLERANCE for row in facts["steps"])
        (size,) = {row["weight_sync/bytes"] for row in facts["steps"]}
        assert size < 100_000  # merged weights have 2.9 MB
        assert all(row["grad_norm"] > 0 for row in facts["steps"])


def test_a_recipe_trains_on_videos(alone):
    steps = alone["films"]["steps"]
    assert [row["step"] for row in steps] == [0, 1] and all(row["grad_norm"] > 0 for row in steps)
    assert all(row["mismatch/abs_dlogp"] < TOLERANCE and row["skipped_rows"] == 0 for row in steps), steps


def test_an_engine_starts_after_one_that_could_not(by_rank):
    """vLLM kept the process groups of the first one, in which two ranks share an engine."""
    for facts in (part["two_ranks/failed_start"] for part in by_rank):
        assert "No available memory for the cache blocks" in facts["error"] and facts["responses"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_complete_and_in_order(alone, kind):
    facts = alone[kind]
    assert facts["groups"] == [group for group in range(4) for _ in range(3)]
    assert len({tuple(response) for response in facts["responses"]}) > 8  # the responses to one prompt differ
    assert facts["repeated"]  # the same seed, the same responses
    assert facts["each"] == facts["each_alone"] and max(map(len, facts["each"])) > 3  # each by its own parameters
    assert facts["finished"] and facts["under_way"][0] > 0 == facts["under_way"][-1]  # each as soon as it was written
    assert set(facts["reasons"]) <= {"stop", "length"} and not facts["sampled_forbidden"]
    assert facts["greedy"] == facts["greedy_hf"]
    assert facts["greedy_twice"] == [[i, ids] for ids in facts["greedy"] for i in range(2)]


def test_vllm_does_not_change_the_trainers_process(alone):
    """Threads can still be set, and closing the sampler does not touch torch.distributed."""
    for facts in (alone[kind] for kind in KINDS):
        assert facts["threads"] == 1 and facts["settable"] == "set_num_threads" and facts["group_alive"]


def test_two_ranks_sample_what_one_does(alone, by_rank):
    """Data-parallel and tensor-parallel: each rank gets the responses to its own prompts, with the same logprobs."""
    whole = alone["qwen2_5_vl"]
    for split in SPLITS:
        for rank, facts in enumerate(part[split] for part in by_rank):
            assert facts["groups"] == [group for group in (rank, rank + 2) for _ in range(3)]
            assert facts["responses"] == [
                a for a, g in zip(whole["responses"], whole["groups"], strict=True) if g % 2 == rank
            ]
            assert facts["greedy"] == whole["greedy"][rank::2] and facts["each"] == facts["each_alone"]
            for stage in ("start", "synced", "synced_again"):
                assert facts[stage] < TOLERANCE, (split, stage)
            assert facts["unsynced"] > 0.3 and facts["prefix_cache_kept"] > 0.1


def test_bad_input_says_what_to_do(alone):
    said = alone["qwen2_5_vl"]["errors"]
    assert "+ 500 (max_new_tokens)" in said["long"] and "raise max_model_len" in said["long"]
    assert "same image processor" in said["expansion"]
    assert said["model"].startswith("model: expected one that vLLM can load, got '/nowhere'")
    assert said["tensor"] == "tensor_parallel_size: expected a divisor of 1 ranks, got 2"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyError("layers.0.rotor"), r"KeyError at \S+test_vllm.py:\d+: 'layers.0.rotor'"),
        (AssertionError(), r"AssertionError at \S+test_vllm.py:\d+"),
        (ImportError("no kernel"), r"ImportError at \S+test_vllm.py:\d+: no kernel"),
        (NotImplementedError("Sparse Attention"), "Sparse Attention"),
    ],
)
def test_what_vllm_fails_with_at_the_start_is_named(error, words):
    with pytest.raises(type(error)) as raised:
        raise error
    rest = f"{words}; if vLLM does not support the family, use rollout 'hf'"
    said = str(loading_error("DIR", "rotor", raised.value))
    assert re.fullmatch(f"model: expected one that vLLM can load, got 'DIR' of the family rotor: {rest}", said)
    assert str(loading_error("DIR", "", raised.value)).startswith("model: expected one that vLLM can load, got 'DIR': ")


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0"])
def test_a_version_that_was_not_tried_is_refused(monkeypatch, version):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    with pytest.raises(
        ValueError, match=rf"rollout: expected vllm >=0\.32,<0\.33 for 'vllm', got {version}; pip install"
    ):
        import_vllm()
    assert SUPPORTED == ((0, 32), (0, 33))


def test_an_attention_back_end_that_refuses_the_dtype_is_named():
    with pytest.raises(ValueError, match="attention_backend: expected CPU_MLA with dtype float32, got AMX_MLA"):
        cpu_options("float32", {"attention_backend": "AMX_MLA"})
    assert cpu_options("bfloat16", {"attention_backend": "AMX_MLA"})["attention_backend"] == "AMX_MLA"
    assert cpu_options("float32", {})["attention_backend"] == "CPU_MLA"
    assert "attention_backend" not in cpu_options("float32", {"attention_config": {"backend": "CPU_ATTN"}})


@pytest.mark.parametrize("family", OBSTACLES)
def test_a_family_that_vllm_cannot_compute_on_a_cpu_is_named(tmp_path, family):
    options = VISION[family][0] if family in VISION else {**BASE, **(TEXT | OF_TEXT)[family]}
    AutoConfig.for_model(family, **options).save_pretrained(tmp_path)
    expected = f"model: expected a family that vLLM can compute on a CPU, got {family}: {OBSTACLES[family]}; use"
    with pytest.raises(ValueError, match=f"^{expected} rollout 'hf'$"):
        cpu_dtype_and_options(load_config(str(tmp_path)), None)


def test_the_gated_delta_rule_is_sampled_in_bfloat16_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr("rlkit.rollout.vllm_cpu.has_avx512", lambda: True)
    AutoConfig.for_model("qwen3_next", **{**BASE, **TEXT["qwen3_next"]}).save_pretrained(tmp_path)
    assert cpu_dtype_and_options(load_config(str(tmp_path)), None) == ("bfloat16", {"enable_prefix_caching": False})
    with pytest.raises(ValueError, match="^dtype: expected bfloat16 for qwen3_next in vLLM on a CPU, got float32$"):
        cpu_dtype_and_options(load_config(str(tmp_path)), "float32")
    AutoConfig.for_model("qwen3", **BASE).save_pretrained(tmp_path)
    assert cpu_dtype_and_options(load_config(str(tmp_path)), None) == ("float32", {})


@pytest.mark.parametrize("family", BFLOAT16)
@pytest.mark.parametrize("capability", ["AVX2", "DEFAULT"])
def test_the_gated_delta_rule_is_refused_by_name_where_a_cpu_lacks_avx512(tmp_path, monkeypatch, capability, family):
    config = {} if family == "qwen3_5" else {**BASE, **TEXT[family]}
    AutoConfig.for_model(family, **config).save_pretrained(tmp_path)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    obstacle = "its kernel for the gated delta rule needs AVX-512, which this CPU does not have"
    expected = f"got {family}: {obstacle}; use rollout 'hf'"
    with pytest.raises(ValueError, match=f"^model: expected a family that vLLM can compute on a CPU, {expected}$"):
        cpu_dtype_and_options(load_config(str(tmp_path)), None)
    with pytest.raises(ValueError, match=expected):
        command(str(tmp_path), load_config(str(tmp_path)), "127.0.0.1", 8000, 1, on_gpu=False)


def test_a_server_on_a_cpu_has_the_dtype_that_its_family_needs(tmp_path, monkeypatch):
    AutoConfig.for_model("qwen3_next", **{**BASE, **TEXT["qwen3_next"]}).save_pretrained(tmp_path)
    monkeypatch.setattr("rlkit.rollout.vllm_cpu.has_avx512", lambda: True)
    flags = command(str(tmp_path), load_config(str(tmp_path)), "127.0.0.1", 8000, 1, on_gpu=False)
    assert flags[flags.index("--dtype") + 1] == "bfloat16" and "--no-enable-prefix-caching" in flags


@pytest.mark.parametrize("family", ["gemma4", "gemma4_unified"])
def test_images_of_gemma4_are_refused_on_a_cpu_if_they_attend_to_later_tokens(family):
    rollout = VllmRollout.__new__(VllmRollout)
    rollout.asleep, rollout.on_gpu, rollout.max_model_len = False, False, 99
    rollout.processor, rollout.takes_prepared, rollout.group = None, False, None
    rollout.config = AutoConfig.for_model(family, text_config={"use_bidirectional_attention": "vision"})
    assert not has_bidirectional_images(AutoConfig.for_model(family, text_config={"use_bidirectional_attention": None}))
    with pytest.raises(ValueError, match=f"attend to earlier ones only, .* on a CPU, got {family}; use rollout 'hf'"):
        rollout.generate([prompt_sample([5], images=[object()])], Sampling(3))


def test_a_server_on_a_cpu_computes_the_rope_of_lfm2_in_pytorch(tmp_path, monkeypatch):
    AutoConfig.for_model("lfm2", **{**BASE, **TEXT["lfm2"]}).save_pretrained(tmp_path)
    flags = command(str(tmp_path), load_config(str(tmp_path)), "127.0.0.1", 8000, 1, on_gpu=False)
    assert flags[flags.index("--compilation-config") + 1] == '{"custom_ops": ["-rotary_embedding"]}'
    assert "--no-enable-prefix-caching" in flags
    option = '-cc={"custom_ops": ["-rms_norm"]}'
    expected = "^compilation-config: expected none for this model, which needs .*-rotary_embedding.*, got one$"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=expected), serving(str(tmp_path), options=[option]):
        pass


def test_a_users_compilation_config_keeps_what_the_family_needs():
    """vLLM would compute the positions of LFM2 wrongly with its own kernel."""
    needed = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}, "enable_prefix_caching": False}
    assert with_family_options(needed, {"max_num_seqs": 3}) == {**needed, "max_num_seqs": 3}
    found = with_family_options(needed, {"compilation_config": {"mode": 0, "custom_ops": ["-rms_norm"]}})
    assert found["compilation_config"] == {"mode": 0, "custom_ops": ["-rotary_embedding", "-rms_norm"]}
    assert with_family_options({}, {"compilation_config": 3}) == {"compilation_config": 3}
    with pytest.raises(ValueError, match="^compilation_config: expected a dict for this model, which needs .*, got 3$"):
        with_family_options(needed, {"compilation_config": 3})


def test_a_users_overrides_keep_what_the_family_needs():
    """Without the class of rlkit, vLLM would keep old experts of gpt-oss on a CPU."""
    needed = {"hf_overrides": {"architectures": ["Own"], "text_config": {"model_type": "known"}}}
    assert with_family_options(needed, {"max_num_seqs": 3}) == {**needed, "max_num_seqs": 3}
    found = with_family_options(needed, {"hf_overrides": {"text_config": {"hidden_size": 8}, "max_length": 9}})
    assert found["hf_overrides"] == {
        "architectures": ["Own"], "text_config": {"model_type": "known", "hidden_size": 8}, "max_length": 9,
    }  # fmt: skip
    assert with_family_options({}, {"hf_overrides": {"architectures": ["Mine"]}})["hf_overrides"] == {
        "architectures": ["Mine"]
    }
    for given, error in [
        ({"architectures": ["Mine"]}, r"expected architectures \['Own'\], which this model needs, got \['Mine'\]"),
        (lambda config: config, "expected a dict for this model, which needs .*Own.*, got <function"),
        ({"text_config": 3}, "expected a dict for this model, which needs .*known.*, got 3"),
    ]:
        with pytest.raises(ValueError, match=f"^hf_overrides: {error}"):
            with_family_options(needed, {"hf_overrides": given})


def test_a_server_refuses_overrides_in_place_of_those_that_its_family_needs(tmp_path, monkeypatch):
    AutoConfig.for_model("gpt_oss").save_pretrained(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    expected = "^hf-overrides: expected none for this model, which needs .*UpdatableGptOss.*, got one$"
    for option in ("--hf-overrides", "--hf_overrides.max_position_embeddings"):
        with pytest.raises(ValueError, match=expected), serving(str(tmp_path), options=[option, "{}"]):
            pass


def test_a_value_of_a_servers_option_is_no_option(tmp_path):
    """Values such as .9 and ./chat.jinja begin with a dot."""
    AutoConfig.for_model("llama4_text").save_pretrained(tmp_path)
    options = ["--gpu-memory-utilization", ".9", "--chat-template", "./chat.jinja"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"^port {port}: "), serving(str(tmp_path), port=port, options=options):
            pass


def test_servers_read_the_files_that_the_trainer_reads(tmp_path):
    """By default vLLM reads those of Mistral's own format, where a repository has both."""
    AutoConfig.for_model("mistral3", text_config={"model_type": "mistral4"}).save_pretrained(tmp_path)
    flags = command(str(tmp_path), load_config(str(tmp_path)), "127.0.0.1", 8000, 1, on_gpu=True)
    options = dict(zip(flags[3:], flags[4:], strict=False))
    assert {options[f"--{name}"] for name in ("config-format", "load-format", "tokenizer-mode")} == {"hf"}
    of_text = json.loads(options["--hf-overrides"])["text_config"]
    assert of_text == {"architectures": ["Mistral4ForCausalLM"], "model_type": "deepseek_v3"}
    for name in ("model.safetensors", "consolidated.safetensors"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match="^model: expected one set of weights .* got model.safetensors and consol"):
        command(str(tmp_path), load_config(str(tmp_path)), "127.0.0.1", 8000, 1, on_gpu=True)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("exaone4_5", {"mm_device_do_normalize": False}),
        ("cohere2", {"hf_overrides": {"sliding_window": 4095}}),
        ("cohere2_moe", {"hf_overrides": {"sliding_window": 4095}}),
        ("hyperclovax_vision_v2", {"hf_overrides": {"text_config": {"logit_scale": 1.0}}}),
        ("phimoe", {"hf_overrides": {"architectures": ["PhiMoEForCausalLM"]}}),
        ("exaone4", {}),
    ],
)
def test_options_by_which_vllm_computes_as_the_trainer(family, expected):
    config = AutoConfig.for_model(family)
    assert family_options("some/model", config) == {**family_options("some/model", LlamaConfig()), **expected}


def test_a_window_that_transformers_ignores_is_taken_from_vllm():
    """`family/llama` compares log-probabilities with such a window."""
    text = {"model_type": "llama", "sliding_window": 7}
    llava, apertus = AutoConfig.for_model("llava", text_config=text), AutoConfig.for_model("apertus", sliding_window=7)
    for config, expected in (
        (LlamaConfig(sliding_window=7), {"sliding_window": None}),
        (llava, {"text_config": {"sliding_window": None}}),
        (apertus, {"architectures": ["ExactApertusForCausalLM"], "sliding_window": None}),
    ):
        assert family_options("some/model", config)["hf_overrides"] == expected
    for family in ("mistral", "gemma4", "inkling_text"):
        assert "hf_overrides" not in family_options("some/model", AutoConfig.for_model(family))


def test_windows_that_vllm_leaves_out_are_refused_for_longer_sequences(tmp_path):
    config = AutoConfig.for_model("qwen2_moe", use_sliding_window=True, sliding_window=64, max_window_layers=2)
    expected = "^max_model_len: expected at most the sliding window of 64 tokens for qwen2_moe, .*, got 65; .* 'hf'"
    with pytest.raises(ValueError, match=expected):
        check_windows_work(config, 65)
    check_windows_work(config, 64)
    check_windows_work(AutoConfig.for_model("qwen2_moe"), None)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="^max_model_len: .*, got 32768"):
        VllmRollout(model=str(tmp_path), processor=None)


def test_the_dtype_auto_is_the_default(tiny_dir, monkeypatch):
    started = []

    class Started(Exception):
        pass

    def start(**options):
        started.append(options["dtype"])
        raise Started

    monkeypatch.setattr("rlkit.rollout.vllm._start_engine", start)
    for dtype in ("auto", None, "bfloat16"):
        with pytest.raises(Started):
            VllmRollout(model=tiny_dir, processor=None, dtype=dtype)
    assert started[0] == started[1] and started[2] == "bfloat16"
    with pytest.raises(ValueError, match="^dtype: expected auto, bfloat16, float16, float32, got 'fp8'"):
        VllmRollout(model=tiny_dir, processor=None, dtype="fp8")


def test_too_many_suppressed_tokens_are_refused_before_the_engine_starts(tiny_dir, monkeypatch):
    """gpt-oss has 1,069, of which only vLLM's runner V2, on a GPU, takes no more than 1,024."""

    class Started(Exception):
        pass

    def start(**_):
        raise Started

    monkeypatch.setattr("rlkit.rollout.vllm._start_engine", start)
    monkeypatch.setattr("rlkit.rollout.vllm.suppressed_token_ids", lambda *_: torch.arange(1069))
    with pytest.raises(Started):
        VllmRollout(model=tiny_dir, processor=None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    with pytest.raises(ValueError, match="^model: expected at most 1024 suppressed tokens, .*, got 1069 .*RUNNER=0"):
        VllmRollout(model=tiny_dir, processor=None)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(Started):
        VllmRollout(model=tiny_dir, processor=None)


def test_a_quantized_model_takes_no_weights():
    """vLLM would scale new weights by the old scales."""
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = LlamaConfig(name_or_path="some/model-FP8", quantization_config=method)
    with pytest.raises(ValueError, match="model 'some/model-FP8': expected weights that are not quantized, got fp8"):
        check_weight_updates_work(config, on_cpu=True)


def test_gpt_oss_takes_weights_on_a_cpu_only():
    """Some attention back ends of GPUs copy the sinks, and would keep the old ones."""
    config = AutoConfig.for_model("gpt_oss")
    check_weight_updates_work(config, on_cpu=True)
    expected = "^model: expected a family whose weights vLLM replaces completely on a GPU, got gpt_oss; use rollout"
    with pytest.raises(ValueError, match=expected):
        check_weight_updates_work(config, on_cpu=False)


def test_no_vllm_is_an_error_that_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match="got an import error .* pip install -e"):
        import_vllm()


def test_inputs_are_prepared_where_vllm_does_not_normalize_them_again():
    def model(architecture, normalizes):
        of_media = SimpleNamespace(mm_device_do_normalize=normalizes)
        return SimpleNamespace(architecture=architecture, multimodal_config=of_media)

    assert takes_prepared(model("Qwen3VLForConditionalGeneration", False))
    assert takes_prepared(model("SmolVLMForConditionalGeneration", False))
    assert not takes_prepared(model("Qwen3VLForConditionalGeneration", True))
    assert not takes_prepared(model("TransformersMultiModalForCausalLM", False))
    assert not takes_prepared(SimpleNamespace(architecture="LlavaForConditionalGeneration", multimodal_config=None))
    options = [
        normalization_options(AutoConfig.for_model("qwen3_vl", architectures=names))
        for names in (["Qwen3VLForConditionalGeneration"], ["Qwen3ForCausalLM"], None)
    ]
    assert options == [{"mm_device_do_normalize": False}, {}, {}]


def test_prompts_of_other_inputs_are_prepared_by_vllm():
    pixels = {"pixel_values": torch.zeros(1, 3, 2, 2)}
    request = prompt_sample([8, 8], [8], images=[object()], placeholders={8: [2]}, vision=pixels)
    assert has_prepared(request)
    others = (
        {"vision": {**pixels, "image_sizes": torch.ones(1, 2)}},
        {"audios": [object()]},
        {"vision": {}},
        {"images": []},
    )
    assert not any(has_prepared(replace(request, **other)) for other in others)


def test_frames_of_smolvlm_are_images_that_the_trainer_has_prepared():
    """As many as the video has frames; the mask of tiles says that it is this family."""
    video = Video(np.zeros((3, 2, 2, 3), "uint8"), 2.0)
    vision = {"pixel_values": torch.zeros(1, 4, 3, 2, 2), "pixel_attention_mask": torch.ones(1, 4, 2, 2)}
    media = {"images": [object()], "videos": [video], "vision": vision}
    request = prompt_sample([8] * 8, [8] * 4, placeholders={8: [2] * 4}, **media)
    assert has_prepared(request) and not has_prepared(replace(request, videos=[]))
    assert not has_prepared(replace(request, vision={"pixel_values": vision["pixel_values"]}))


def test_a_request_has_the_compact_ids():
    images = [object()]
    request = prompt_sample([7, 8, 8, 8, 9], [7, 8, 9], images=images, placeholders={8: [3]})
    assert vllm_prompt(request, None) == {"prompt_token_ids": [7, 8, 9], "multi_modal_data": {"image": images}}
    assert vllm_prompt(prompt_sample([1, 2]), None) == {"prompt_token_ids": [1, 2]}


def test_seeds_differ_by_prompt_step_and_turn():
    first = prompt_sample([1, 2], group_id=3)
    others = [prompt_sample([1, 2], group_id=4), replace(first, number=1), replace(first, mask=[False, True])]
    seeds = {request_seed((0, 1), request) for request in [first, *others]} | {request_seed((0, 2), first)}
    assert len(seeds) == 5 and request_seed((0, 1), first) == request_seed((0, 1), prompt_sample([5], group_id=3))


def test_sampling_is_the_trainers_distribution():
    options = vllm_sampling_params(
        Sampling(9, 0.7, (1,)), prompt_sample([1]), n=4, suppressed_token_ids=[5, 6], end_token_ids=[2]
    )
    assert options["temperature"] == 0.7 and options["max_tokens"] == 9 and options["n"] == 4
    assert options["logit_bias"] == {5: -1e30, 6: -1e30} and options["stop_token_ids"] == [2]
    assert json.loads(json.dumps(options))["seed"] == options["seed"]


@pytest.mark.parametrize("temperature", [0.005, 2.5])
def test_temperatures_that_vllm_changes_or_refuses_are_named(temperature):
    with pytest.raises(ValueError, match=f"^temperature: expected one from 0.01 to 2 for vLLM, got {temperature}; use"):
        vllm_sampling_params(
            Sampling(9, temperature), prompt_sample([1]), n=1, suppressed_token_ids=[], end_token_ids=[2]
        )


def test_an_aborted_response_is_not_used():
    with pytest.raises(
        RuntimeError, match="group 5: expected finish_reason 'stop' or 'length' from the sampler, got 'abort'"
    ):
        finished_sample(prompt_sample([1], group_id=5), [2], [-1.0], "abort", processor=None, version=0)
