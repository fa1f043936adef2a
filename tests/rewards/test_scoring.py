import logging
import math
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlkit.data import Failures, load_task, prompt_sample
from rlkit.rewards import (
    boxed_match,
    boxes_iou,
    combine,
    exact_match,
    matches,
    maths_reward,
    multiple_choice,
    part_means,
    reward_stats,
    score,
    score_parts,
    scored,
    scoring_problem,
    within_length,
    without_thinking,
)
from rlkit.runs.interruption import Interrupted


def test_reward_failure_is_not_zero(caplog):
    def reward(text, row):
        if text == "raises":
            raise RuntimeError("the judge is down")
        return {"none": None, "nan": math.nan, "inf": math.inf, "text": "no number", "int": 1, "true": True}.get(
            text, 0.0
        )

    texts = ["raises", "none", "nan", "inf", "text", "int", "true", "wrong"]
    samples = [
        replace(prompt_sample([1]), text=text, row={"where": f"row {text}"}, group_id=i) for i, text in enumerate(texts)
    ]
    with caplog.at_level(logging.WARNING):
        rewards = score(reward, samples)
    assert rewards.dtype == torch.float32 and rewards.shape == (8,)
    assert rewards.isnan().tolist() == [True] * 5 + [False] * 3
    assert rewards[5:].tolist() == [1.0, 1.0, 0.0]
    assert "row raises" in caplog.text and "RuntimeError: the judge is down" in caplog.text
    kept = scored(samples, rewards)
    assert [(s.text, s.reward, s.group_id) for s in kept] == [("int", 1.0, 5), ("true", 1.0, 6), ("wrong", 0.0, 7)]
    assert all(math.isnan(s.reward) for s in samples)  # the samples that came in are untouched


def test_reward_may_not_swallow_an_interrupt():
    def reward(text, row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(reward, [prompt_sample([1])])


def test_a_reward_that_exits_does_not_end_the_run(caplog):
    """The run ended with the reward's exit code, 0 after `sys.exit()`, and without a message."""

    def reward(text, row):
        sys.exit(0)

    assert score(reward, [prompt_sample([1])]).isnan().all()
    assert "SystemExit: 0 (test_scoring.py, line " in caplog.text and "in reward\n" in caplog.text


def test_a_signal_during_a_reward_ends_the_run():
    def reward(text, row):
        raise Interrupted(0)

    with pytest.raises(Interrupted):
        score(reward, [prompt_sample([1])])


def test_score_of_nothing():
    assert score(exact_match, []).shape == (0,) and scored([], torch.zeros(0)) == []
    with pytest.raises(ValueError):
        scored([prompt_sample([1])], torch.zeros(2))


def test_rewards_that_wait_are_scored_together_and_stay_in_order():
    """Each waits for the next one to have begun: alone they would never end."""
    begun = [threading.Event() for _ in range(5)]

    def waits(text, row):
        begun[int(text)].set()
        assert begun[(int(text) + 1) % 5].wait(100)
        return float(text)

    samples = [replace(prompt_sample([1]), text=str(i)) for i in range(5)]
    assert score(waits, samples, threads=5).tolist() == [0, 1, 2, 3, 4]


def test_a_sample_that_was_aborted_is_not_scored():
    samples = [replace(prompt_sample([1]), text="1", finish_reason=reason) for reason in ("stop", "aborted")]
    first, second = score(lambda text, row: 1.0, samples).tolist()
    assert first == 1 and math.isnan(second)


def test_reasons_of_what_is_not_scored():
    def reward(text, row):
        return {"none": None, "inf": math.inf}[text]

    samples = [replace(prompt_sample([1]), text=text) for text in ("none", "none", "inf", "other")]
    samples.append(replace(prompt_sample([1]), finish_reason="aborted"))
    failures = Failures("reward")
    for threads in (1, 3):
        assert score(reward, samples, threads=threads, failures=failures).isnan().all()
        said = failures.take()
        assert said.startswith("2 x a reward of None; 1 x ") and said.count("; ") == 2
    assert score_parts(combine({"a": (1.0, reward)}), samples[:2], failures=failures)[0].isnan().all()
    assert failures.take() == "2 x a reward of None"


# --- too few scored


@pytest.mark.parametrize(
    ("responses", "scored", "share", "options", "problem"),
    [
        (64, 64, 0.0, {}, ""),
        (64, 52, 0.2, {}, ""),
        (64, 51, 0.2, {}, "responses: expected at least 80% of 64 scored, got 51"),
        (64, 0, 1.0, {"reasons": "64 x a reward of None"},
         "responses: expected at least one of 64 scored, got 0: 64 x a reward of None"),
        (0, 0, 0.2, {}, "responses: expected at least one, got none"),
        (0, 0, 0.2, {"skipped": ["t.jsonl row 3: no", "t.jsonl row 4: no"]},
         "responses: expected at least one, got none: 2 rows were skipped, the first because of t.jsonl row 3: no"),
    ],
)  # fmt: skip
def test_the_reason_behind_too_few_scored_responses(responses, scored, share, options, problem):
    assert scoring_problem(responses, scored, share, **options) == problem


# --- several parts


def samples(*texts):
    return [prompt_sample([1], text=text, row={"answer": "B", "where": f"row {i}"}) for i, text in enumerate(texts)]


def fails(text, row):
    raise RuntimeError("down")


def test_combine_is_a_weighted_sum_with_its_parts():
    reward = combine(
        {"right": (1.0, multiple_choice), "form": (0.25, matches(r"\(.\)")), "length": (0.0, within_length(2))}
    )
    batch = samples("(B)", "(A)", "B", "no")
    rewards, parts = score_parts(reward, batch)
    assert rewards.tolist() == [1.25, 0.25, 1.0, 0.0] and rewards.dtype == torch.float32
    assert {name: part.tolist() for name, part in parts.items()} == {
        "right": [1, 0, 1, 0], "form": [1, 1, 0, 0], "length": [-1, -1, 0, 0],
    }  # fmt: skip
    assert torch.equal(score(reward, batch), rewards)  # a plain reward wherever one is expected
    alone, none = score_parts(multiple_choice, batch)
    assert alone.tolist() == [1, 0, 1, 0] and none == {}


@pytest.mark.parametrize("broken", [fails, lambda text, row: None, lambda text, row: math.nan])
def test_a_part_that_is_not_scored(broken):
    """It takes the whole with it, where it has a weight; as a curve alone it does not."""

    def part(text, row):
        return broken(text, row) if text == "bad" else 2.0

    rewards, parts = score_parts(combine({"a": (1.0, multiple_choice), "b": (0.5, part)}), samples("B", "bad"))
    assert rewards[0] == 2.0 and rewards[1].isnan() and parts["a"].tolist() == [1.0, 0.0] and parts["b"][1].isnan()
    curve = combine({"a": (1.0, multiple_choice), "b": (0.0, part)})
    rewards, parts = score_parts(curve, samples("B", "bad"))
    assert rewards.tolist() == [1.0, 0.0] and parts["b"][1].isnan()
    assert score(curve, samples("B", "bad")).tolist() == [1.0, 0.0]
    both = score(combine({"a": (1.0, multiple_choice), "b": (0.5, part)}), samples("B", "bad"))
    assert both[0] == 2.0 and both[1].isnan()


def test_part_means_are_over_all_ranks():
    parts = {"right": torch.tensor([1.0, math.nan, 0.0, 0.0]), "form": torch.full((4,), math.nan)}
    two_ranks = part_means(parts, lambda x: x + torch.tensor([[3.0, 3.0], [0.0, 0.0]]).double())
    assert two_ranks["reward_part/right"] == pytest.approx(4 / 6) and math.isnan(two_ranks["reward_part/form"])
    assert list(two_ranks) == ["reward_part/right", "reward_part/form"] and part_means({}, fails) == {}


def test_reward_stats():
    rewards, ids = torch.tensor([1.0, 0.0, 0.5, 0.5, math.nan, 3.0]), torch.tensor([7, 7, 2, 2, 2, 9])
    assert reward_stats(rewards, ids, lambda x: x) == pytest.approx({
        "reward/mean": 1.0, "reward/std": float(np.std([1.0, 0.0, 0.5, 0.5, 3.0])),
        "reward/best": (1.0 + 0.5 + 3.0) / 3, "reward/worst": (0.0 + 0.5 + 3.0) / 3, "reward/equal": 2 / 3,
    })  # fmt: skip
    # a rank without a scored response beside one with: the sums of both
    there = []
    reward_stats(rewards, ids, lambda x: there.append(x) or x)
    none = reward_stats(torch.tensor([math.nan]), torch.tensor([0]), lambda x: x + there[0])
    assert none == reward_stats(rewards, ids, lambda x: x)
    assert reward_stats(torch.zeros(0), torch.zeros(0, dtype=torch.long), lambda x: x) == {}
    two = reward_stats(rewards, ids, lambda x: x * 2)
    assert two == pytest.approx(reward_stats(rewards, ids, lambda x: x))


def test_each_part_judges_once():
    seen = []
    reward = combine({name: (1.0, lambda text, row, n=name: seen.append((n, text)) or 1.0) for name in "ab"})
    score_parts(reward, samples("x", "y"))
    assert sorted(seen) == [("a", "x"), ("a", "y"), ("b", "x"), ("b", "y")]


@pytest.mark.parametrize("parts", [{}, {"a": (math.nan, multiple_choice)}, {"a": (math.inf, multiple_choice)}])
def test_combine_of_nothing(parts):
    with pytest.raises(ValueError, match="parts: expected at least one, with finite weights, got {"):
        combine(parts)


def test_without_thinking_a_reward_is_given_the_response_alone():
    row = {"answer": "4"}
    reward = without_thinking(exact_match)
    responses = {"4": 1, "<think>5</think>4": 1, "<think>4</think>5": 0, "<think>4": 0}
    assert {text: reward(text, row) for text in responses} == responses and exact_match("<think>5</think>4", row) == 0
    assert reward("4", {**row, "thinking_opened": True}) == 0
    other = {**row, "thinking_tags": ["[THINK]", "[/THINK]"]}
    assert [reward(text, other) for text in ("[THINK]5[/THINK]4", "[THINK]4", "<think>5</think>4")] == [1, 0, 0]
    both = without_thinking(combine({"right": (1.0, exact_match), "long": (0.5, lambda text, row: float(len(text)))}))
    assert both("<think>many words</think> 4", row) == 1.5 and set(both.parts) == {"right", "long"}


def reasoning_gym_reward(text, row):
    return load_task("reasoning_gym:chain_sum,rows=1,heldout=1").reward(text, row)


@pytest.mark.parametrize(
    ("reward", "thought", "answer", "gold", "expected"),
    [
        (multiple_choice, "Maybe the answer is B.", "C", "C", 1),
        (maths_reward, r"\boxed{4}", "5", "5", 1),
        (boxed_match, r"\boxed{4}", "4", "4", 0),  # the answer is in no box
        (boxes_iou, "[1, 2, 3, 4]", "[5, 6, 7, 8]", [5, 6, 7, 8], 1),
        (reasoning_gym_reward, "<answer>4</answer>", "5", "5", 1),
    ],
)
def test_graders_leave_out_thinking_by_the_tags_of_the_row(reward, thought, answer, gold, expected):
    row = {"answer": gold, "entry": {"answer": gold}}
    other = {**row, "thinking_tags": ["[THINK]", "[/THINK]"]}
    assert reward(f"<think>{thought}</think>{answer}", row) == expected
    assert reward(f"[THINK]{thought}[/THINK]{answer}", other) == expected
