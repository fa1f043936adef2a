"""Families that `test_vllm.py` leaves out for time: `make families`."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_vllm import (
    MORE_BFLOAT16,
    MORE_FAMILIES,
    assert_close_in_bfloat16,
    assert_sampled_as_scored,
    facts_of,
    run,
)  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    names = [f"family/{name}" for name in [*MORE_FAMILIES, *MORE_BFLOAT16]]
    return run(tmp_path_factory.mktemp("alone"), names)[0]


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_a_family_samples_what_its_trainer_scores(alone, family):
    assert_sampled_as_scored(alone[f"family/{family}"])


@pytest.mark.parametrize("family", MORE_BFLOAT16)
def test_a_family_samples_what_its_trainer_scores_in_bfloat16(alone, family):
    assert_close_in_bfloat16(facts_of(alone, family))


@pytest.mark.parametrize("family", [*MORE_FAMILIES, *MORE_BFLOAT16])
def test_the_planned_cache_is_that_of_vllm(alone, family):
    """Mamba-2 beside attention too, in Falcon-H1."""
    planned, of_vllm = facts_of(alone, family)["cache"]
    assert planned == of_vllm > 0
