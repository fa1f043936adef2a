"""Families that `test_vllm.py` leaves out for time: `make families`."""

import sys
from pathlib import Path

import pytest
from free_ports import free_ports

sys.path.insert(0, str(Path(__file__).parent))
from on_vllm_families import measure_on_server
from test_vllm import (
    BY_TRANSFORMERS,
    MORE_BFLOAT16,
    MORE_FAMILIES,
    OF_TRANSFORMERS,
    TOLERANCE,
    TOLERANCES,
    assert_close_in_bfloat16,
    assert_same_as_prepared_by_vllm,
    assert_sampled_as_scored,
    facts_of,
    run,
)  # fmt: skip

NAMED = ["cohere_compass", "ernie4_5_vl_moe", "glm5_next", "glm_moe_dsa", "kimi_k25", "kimi_linear"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    names = [f"family/{name}" for name in [*MORE_FAMILIES, *MORE_BFLOAT16]]
    names += [*(f"names/{name}" for name in NAMED), "chunks/kimi_k25", "audios/qwen2_5_omni_thinker"]
    return run(tmp_path_factory.mktemp("alone"), names)[0]


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_a_family_samples_what_its_trainer_scores(alone, family):
    assert_sampled_as_scored(alone[f"family/{family}"], TOLERANCES.get(family, TOLERANCE))


def test_transformers_code_is_run_without_a_change_of_the_trainers_class(alone):
    by_transformers = [family for family in MORE_FAMILIES if alone[f"family/{family}"]["module"] == OF_TRANSFORMERS]
    assert by_transformers == BY_TRANSFORMERS[1:]


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "olmo3"])
def test_a_server_samples_what_the_trainer_scores(tmp_path, family):
    """Experts, which are packed on a CPU, rlkit's class of gpt-oss, and vLLM's model that runs transformers' code."""
    assert_sampled_as_scored(measure_on_server(family, tmp_path, free_ports()))


@pytest.mark.parametrize("family", MORE_BFLOAT16)
def test_a_family_samples_what_its_trainer_scores_in_bfloat16(alone, family):
    assert_close_in_bfloat16(facts_of(alone, family))


def test_what_the_trainer_has_prepared_is_not_prepared_again_and_changes_no_response(alone):
    assert_same_as_prepared_by_vllm(facts_of(alone, "qwen3_5_moe"))


def test_a_recipe_trains_on_responses_to_audios(alone):
    """grpo_vlm.py; the second step samples by the weights that the first one sent."""
    steps = alone["audios/qwen2_5_omni_thinker"]["steps"]
    assert len(steps) == 2 and all(step["grad_norm"] > 0 and not step["skipped_rows"] for step in steps)
    assert max(step["mismatch/abs_dlogp"] for step in steps) < TOLERANCE


@pytest.mark.parametrize("family", [*MORE_FAMILIES, *MORE_BFLOAT16])
def test_the_planned_cache_is_that_of_vllm(alone, family):
    """Mamba-2 beside attention too, in Falcon-H1."""
    planned, of_vllm = facts_of(alone, family)["cache"]
    assert planned == of_vllm > 0


@pytest.mark.parametrize("family", NAMED)
def test_weights_are_handed_over_by_names_that_vllm_knows(alone, family):
    """Of families that vLLM does not compute on a CPU."""
    kept = alone[f"names/{family}"]["kept"]
    shared_indexer = {name for name in kept if family == "glm_moe_dsa" and ".layers.1.self_attn.indexer." in name}
    assert {*kept} == shared_indexer  # transformers' layer has none, as vLLM's by a setting of the published config


def test_vllms_processor_takes_the_images_and_videos_of_kimi_k25(alone):
    """As `vision_chunk`; pixels differ by little where vLLM resizes them, which Pillow does in its code."""
    found = alone["chunks/kimi_k25"]
    assert len(found) == 4 and all(one["tokens"] and all(one["sizes"]) for one in found)
    assert [len(one["levels"]) for one in found] == [1, 2, 2, 3]
    assert max(level for one in found for level in one["levels"]) < 2
