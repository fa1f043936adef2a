"""`recipes/pf_ppo.py` as a person runs it, and what it draws."""

import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import helpers
from helpers import numbers, run_here

warm_dir, text_dir = helpers.warm_dir, helpers.text_dir

LEARNING = [
    "--task", "helpers:few_digits", "--seed", 0, "--steps", 10, "--prompts_per_step", 32, "--group_size", 8,
    "--mini_batches", 2, "--max_new_tokens", 4, "--warmup_steps", 2, "--critic_lr", 2e-3, "--threads", 1,
]  # fmt: skip
SMALL = [
    "--task", "helpers:few_digits", "--seed", 0, "--prompts_per_step", 4, "--group_size", 4, "--mini_batches", 1,
    "--max_new_tokens", 3, "--lr", 1e-3, "--critic_lr", 1e-3, "--warmup_steps", 1,
]  # fmt: skip


def test_learns_and_not_without_a_learning_rate(warm_dir, tmp_path):
    out = tmp_path / "run"
    run_here("pf_ppo", "--model", warm_dir, "--out", out, "--lr", 1.5e-3, *LEARNING)
    assert helpers.learned(out)
    helpers.assert_nothing_changes(tmp_path / "still", "pf_ppo", warm_dir, *LEARNING)


def test_resume_is_exact(warm_dir, tmp_path):
    helpers.assert_resume_is_exact(tmp_path, "pf_ppo", "--model", warm_dir, *SMALL, "--mini_batches", 2)


def test_it_trains_on_the_responses_that_it_draws(warm_dir, tmp_path):
    """The critic's first values are 0, so that its squared error is the mean reward of the responses trained on."""

    def first(name, recipe, *arguments):
        run_here(recipe, "--out", tmp_path / name, "--model", warm_dir, "--steps", 1, *SMALL, *arguments)
        return numbers(tmp_path / name)[0]

    plain = first("plain", "ppo")
    best = first("best", "pf_ppo", "--pf_ppo_best", 1.0)  # no others
    worst = first("worst", "pf_ppo", "--pf_ppo_best", 0.0, "--pf_ppo_worst", 1.0)
    assert plain["reward/mean"] == best["reward/mean"] == worst["reward/mean"]
    assert worst["value/squared_error"] < plain["value/squared_error"] < best["value/squared_error"]


def six_samples():
    """Of the responses 0 to 3 the last is the best of its prompt; 4 and 5 tie."""
    rewards, prompts = [0.0, 0.1, 0.2, 1.0, 1.0, 1.0], [7, 7, 7, 7, 8, 8]
    rows = zip(range(6), rewards, prompts, strict=True)
    return [SimpleNamespace(i=i, reward=reward, group_id=prompt) for i, reward, prompt in rows]


def drawn(seed, step, rank, **options):
    recipe = helpers.load("pf_ppo")
    cfg, engine = recipe.Config(seed=seed, **options), SimpleNamespace(data_parallel_rank=rank)
    return [sample.i for sample in recipe.draw_by_reward(six_samples(), cfg, step, engine)]


def test_draws_are_by_reward():
    count = Counter(i for step in range(1000) for i in drawn(0, step, 0))
    shares = [count[i] / 6000 for i in range(6)]
    assert shares == pytest.approx([1 / 9, 1 / 9, 1 / 9, 1 / 3, 1 / 6, 1 / 6], abs=0.02)
    best_and_worst = [drawn(0, step, 0, pf_ppo_best=0.5, pf_ppo_worst=0.5) for step in range(20)]
    assert {i for draw in best_and_worst for i in draw} == {0, 3, 4, 5}


def test_runs_steps_and_ranks_draw_differently():
    draws = [drawn(seed, step, rank) for seed in (0, 1, 2**64) for step in range(3) for rank in range(3)]
    assert len({*map(tuple, draws)}) > 20 and draws[-1] == drawn(2**64, 2, 2)  # of 27, each one of 6 responses
    of_ranks = [{tuple(drawn(0, step, rank)) for rank in range(4)} for step in range(4)]
    assert min(map(len, of_ranks)) > 1


def test_text(text_dir, tmp_path):
    options = ["--model", text_dir, "--task", "sorting", "--kl_coef", 0.01, "--steps", 1, "--out", tmp_path / "run"]
    run_here("pf_ppo", *SMALL, *options)
    row = numbers(tmp_path / "run")[0]
    assert row["unscored"] == 0 and row["grad_norm"] >= 0 and row["kl"] >= 0


def test_help_names_every_option(capsys):
    helpers.assert_help_names_every_option("pf_ppo", capsys)


def test_bad_input_is_one_clear_message(tmp_path):
    for message, arguments in {
        "pf_ppo: pf_ppo_best \\+ pf_ppo_worst: expected 0 to 1, got 1.2": ["--pf_ppo_best", 0.7, "--pf_ppo_worst", 0.5],
        "pf_ppo: group_size: expected .* 2.*, got 1": ["--group_size", 1],
        "pf_ppo: mini_batches: expected 1 to 4, got 5": ["--mini_batches", 5],
    }.items():
        with pytest.raises(SystemExit, match=message):
            run_here("pf_ppo", "--out", tmp_path / "run", *SMALL, *arguments)


def test_a_run_of_ppo_that_drew_by_reward_is_not_continued_without(warm_dir, tmp_path):
    """Its options were those of ppo.py once."""
    out = tmp_path / "run"
    run_here("ppo", "--model", warm_dir, "--out", out, *SMALL, "--steps", 1)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "pf_ppo_best": 0.5, "pf_ppo_worst": 0.0}))
    with pytest.raises(SystemExit, match="pf_ppo_best was 0.5 and is no option of this recipe"):
        run_here("ppo", "--model", warm_dir, "--out", out, *SMALL, "--steps", 1, "--resume")
