"""`recipes/vapo.py` as a person runs it."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlkit.data import Batch
from rlkit.losses import clipped_policy_loss, token_mean

sys.path.insert(0, str(Path(__file__).parent))
import helpers
from helpers import numbers, run_here

warm_dir, text_dir = helpers.warm_dir, helpers.text_dir

LEARNING = [
    "--task", "helpers:few_digits", "--seed", 0, "--steps", 12, "--prompts_per_step", 32, "--group_size", 8,
    "--mini_batches", 2, "--max_new_tokens", 4, "--warmup_steps", 2, "--critic_lr", 2e-3, "--critic_warmup", 2,
    "--save_every", 6, "--threads", 1,
]  # fmt: skip
SMALL = [
    "--task", "helpers:few_digits", "--seed", 0, "--prompts_per_step", 4, "--group_size", 4, "--mini_batches", 1,
    "--max_new_tokens", 3, "--lr", 1e-3, "--critic_lr", 1e-3, "--warmup_steps", 1,
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(warm_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("vapo") / "whole"
    run_here("vapo", "--model", warm_dir, "--out", out, "--lr", 1.5e-3, *LEARNING)
    return out


def test_learns_and_not_without_a_learning_rate(whole, warm_dir, tmp_path):
    assert helpers.learned(whole)
    helpers.assert_nothing_changes(tmp_path / "still", "vapo", warm_dir, *LEARNING, "--critic_warmup", 1)


def test_the_critic_is_trained_first(whole):
    rows = helpers.rows(whole)
    assert ["loss" in row for row in rows] == [False] * 2 + [True] * 10 and all("critic/loss" in row for row in rows)
    assert rows[0]["value/explained_variance"] == 0 != rows[1]["value/explained_variance"]  # a head of zeros
    assert rows[-1]["value/squared_error"] < rows[0]["value/squared_error"]
    assert 0 < rows[-1]["lm_loss"] < rows[2]["lm_loss"]  # right answers become likelier


def test_resume_is_exact(warm_dir, tmp_path):
    helpers.assert_resume_is_exact(
        tmp_path, "vapo", "--model", warm_dir, *SMALL, "--mini_batches", 2, "--critic_warmup", 1
    )


def test_right_responses_are_imitated():
    """Clip-higher, the mean over all tokens, and the paper's mean over the tokens of correct responses."""
    recipe = helpers.load("vapo")
    g = torch.Generator().manual_seed(0)
    logprobs, old = -torch.rand(2, 3, 5, generator=g)
    mask = torch.tensor([[False, True, True, True, False], [False, True, True, True, True], [False] * 4 + [True]])
    mb = Batch(torch.zeros(3, 5, dtype=torch.long), mask, [5] * 3)
    mb.add(old_logprobs=old, rollout_logprobs=old, advantages=torch.randn(3, 5, generator=g))
    mb.add(rewards=torch.tensor([1.0, 0.0, 1.0]))
    out, total = SimpleNamespace(logprobs=logprobs, entropy=torch.zeros(3, 5)), torch.tensor(4)
    loss, metrics = recipe.policy_loss(out, mb, total, recipe.Config())
    clipped = token_mean(clipped_policy_loss(logprobs, old, mb.advantages, mask, 0.2, 0.28), mask)
    nll = -(logprobs[0, 1:4].sum() + logprobs[2, 4]) / 4
    torch.testing.assert_close(loss, clipped + 0.1 * nll)
    torch.testing.assert_close(metrics["lm_loss"], nll)
    half, _ = recipe.policy_loss(out, mb, 2 * total, recipe.Config())  # twice as many on all ranks
    torch.testing.assert_close(half, clipped + 0.05 * nll)


def first(out, model, *arguments):
    run_here("vapo", "--out", out, "--model", model, "--steps", 1, *SMALL, "--critic_warmup", 0, *arguments)
    return numbers(out)[0]


def test_options_change_what_they_should(warm_dir, tmp_path):
    usual = first(tmp_path / "usual", warm_dir)
    assert usual["loss"] == pytest.approx(0.1 * usual["lm_loss"], abs=1e-5)  # whitened advantages, ratios of 1
    without = first(tmp_path / "without", warm_dir, "--lm_coef", 0.0)
    assert without["loss"] == pytest.approx(0, abs=1e-5)
    smaller = first(tmp_path / "smaller", warm_dir, "--length_adaptive_alpha", 0.6)
    # not its loss, which the whitening makes that of the imitation alone
    assert smaller["grad_norm"] != usual["grad_norm"] and smaller["critic/loss"] == usual["critic/loss"]


def test_lambdas_of_policy_and_critic(warm_dir, tmp_path):
    """The critic's targets are the rewards themselves, whatever it says; a smaller lambda mixes its values in."""
    options = ["--model", warm_dir, *SMALL, "--steps", 3, "--critic_warmup", 1, "--critic_lr", 1e-2]
    for lam in (1.0, 0.0):
        run_here("vapo", *options, "--critic_lam", lam, "--out", tmp_path / f"{lam}")
    rewards, values = (numbers(tmp_path / f"{lam}") for lam in (1.0, 0.0))
    assert rewards[0]["value/squared_error"] == pytest.approx(rewards[0]["reward/mean"], abs=0.2)
    assert rewards[1]["value/squared_error"] != values[1]["value/squared_error"]


def test_text(text_dir, tmp_path):
    row = first(tmp_path / "run", text_dir, "--task", "sorting")
    assert row["unscored"] == 0 and row["grad_norm"] >= 0


def test_help_names_every_option(capsys):
    helpers.assert_help_names_every_option("vapo", capsys)


def test_bad_input_is_one_clear_message(tmp_path):
    for message, arguments in {
        "vapo: mini_batches: expected 1 to 4, got 5": ["--mini_batches", 5],
        "vapo: length_adaptive_alpha: expected a number above 0, got 0": ["--length_adaptive_alpha", 0],
        "vapo: task: expected a built-in": ["--task", "digit"],
        "vapo: critic_warmup: expected 0 to 4 .less than --steps., got 10": ["--steps", 5],  # trains no policy
    }.items():
        with pytest.raises(SystemExit, match=message):
            run_here("vapo", "--out", tmp_path / "run", *SMALL, *arguments)
