"""Every recipe on two ranks does what it does on one. They share one pair of processes: a start costs ten seconds."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import helpers
from helpers import evaluation, numbers, run_here

DIGITS = ["--task", "helpers:few_digits"]
PROMPTS = [*DIGITS, "--prompts_per_step", 8, "--group_size", 4, "--max_new_tokens", 3, "--lr", 1e-3]
PAIRS = [*DIGITS, "--prompts_per_step", 6, "--lr", 1e-3, "--steps", 2]
DRAWS = ["--prompts_per_draw", 8, "--max_num_gen_batches", 2, "--mini_batches", 1, "--overlong_buffer", 0]
# recipe, options, and those of the run on two ranks alone
CASES = {
    "grpo_vlm": ("grpo_vlm", [*PROMPTS, "--steps", 1], []),
    "ulysses": ("grpo_vlm", [*PROMPTS, "--steps", 1], ["--ulysses_sequence_parallel_size", 2]),
    "reinforce": ("reinforce", [*PROMPTS, "--steps", 1, "--advantage", "reinforce_plus_plus_baseline"], []),
    "dapo": ("dapo", [*PROMPTS, "--steps", 1, *DRAWS], []),
    "ppo": ("ppo", [*PROMPTS, "--steps", 1, "--mini_batches", 2], []),
    "distill": ("distill", [*PROMPTS, "--steps", 1], []),
    "sft": ("sft", [*PAIRS, "--max_new_tokens", 2], []),
    "dpo": ("dpo", [*PAIRS, "--max_new_tokens", 3], ["--micro_batch_tokens", 300]),  # pairs are not torn apart
    "reward_model": ("reward_model", PAIRS, ["--micro_batch_tokens", 300]),
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The directory of runs on two ranks, and what all runs began from."""
    warm = helpers.built_warm(tmp_path_factory)
    shared, out = {name: ["--model", warm] for name in CASES}, tmp_path_factory.mktemp("two")
    shared["distill"] += ["--teacher", helpers.built(tmp_path_factory, "random", helpers.few_digits, warm_up_steps=0)]
    runs = [
        [recipe, *shared[name], *options, *more, "--out", out / name] for name, (recipe, options, more) in CASES.items()
    ]
    (out / "runs.json").write_text(json.dumps(runs, default=str))
    said = helpers.launch(Path(__file__).with_name("on_two_ranks.py"), out / "runs.json", ranks=2)
    assert said.stdout.count("before: ") >= len(CASES)  # rank 0 alone speaks
    return out, shared


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_do_what_one_does(two_ranks, tmp_path, name):
    out, shared = two_ranks
    recipe, options, _ = CASES[name]
    run_here(recipe, *shared[name], *options, "--out", tmp_path)
    assert len(numbers(tmp_path)) > 0
    for one, two in zip(numbers(tmp_path), numbers(out / name), strict=True):
        helpers.assert_same_step(one, two)
    for key, x in evaluation(tmp_path).items():
        assert evaluation(out / name)[key] == pytest.approx(x, rel=1e-3, abs=0.03), key
