"""Rewards of a batch of samples, and rewards made of several parts.

    reward = combine({"right": (1.0, multiple_choice), "format": (0.1, think_answer_format)})
    rewards, parts = score_parts(reward, samples)              # [B], and {"right": [B], "format": [B]} for curves
    run.log(step, {**reward_stats(rewards, ids, engine.global_sum), **part_means(parts, engine.global_sum), ...})

A reward is a function `reward(text, row) -> float | None`; None means that the response could not be scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from rlkit.data.samples import Reward, Row, Sample
from rlkit.data.thinking_tags import thinking_tags_of
from rlkit.data.user_code import Failures
from rlkit.rewards.rules import split_thinking

LARGEST = torch.finfo(torch.float32).max


def score(reward: Reward, samples: Sequence[Sample], *, threads: int = 1, failures: Failures | None = None) -> Tensor:
    """[B] float32 rewards; nan where the reward function raised, or returned None, nan or what float32 cannot hold: not
    scored.

    A failure is never turned into a 0. Each distinct error is logged with its traceback once, then counted. A sample
    that was aborted is not scored.

    Args:
        reward: as of a task.
        samples: prompts with their responses.
        threads: rewards computed at the same time, for rewards that wait for a process or a server (maths, programs, a
            judge).
        failures: counts the reasons why samples are not scored; by default those of this call.
    """
    counted = Failures("reward") if failures is None else failures
    score_one = partial(_score_one, reward, counted)
    if threads == 1:  # in this thread: a reward may use signals
        values = [score_one(sample) for sample in samples]
    else:
        with ThreadPoolExecutor(threads) as pool:
            values = list(pool.map(score_one, samples))
    if failures is None:
        counted.log_repeated()
    return torch.tensor(values, dtype=torch.float32)


def _score_one(reward: Reward, failures: Failures, sample: Sample) -> float:
    if sample.finish_reason == "aborted":  # a tool failed, which says nothing about the policy
        failures.count("an episode aborted by its tool")
        return math.nan
    try:
        value = reward(sample.text, sample.row)
        if value is not None and abs(value := float(value)) <= LARGEST:
            return value
        failures.count(f"a reward of {value}")  # an infinite one would spoil its whole group
    except (Exception, SystemExit) as error:  # a failure of the reward function says nothing about the response
        if isinstance(error, SystemExit) and type(error) is not SystemExit:  # a signal ends the run
            raise
        where = sample.row.get("where", f"group {sample.group_id}")
        failures.add(error, f"{where}, response {sample.text[:80]!r}")
    return math.nan


def scored(samples: Sequence[Sample], rewards: Tensor) -> list[Sample]:
    """The samples that could be scored, each with its reward."""
    pairs = zip(samples, rewards.tolist(), strict=True)
    return [replace(sample, reward=value) for sample, value in pairs if not math.isnan(value)]


def scoring_problem(
    responses: float, scored: float, max_failed_rewards: float, reasons: str = "", skipped: Sequence[str] = ()
) -> str:
    """One sentence if too few responses of a batch were scored to go on with it; an empty text if not.

    Args:
        responses, scored: how many responses there are, and how many have a reward, over all ranks.
        max_failed_rewards: largest share of the responses that may have no reward.
        reasons: why some have none: `RewardScorer.reasons`, or `Failures.take()`.
        skipped: why rows have no prompt, from `encode_prompts`.
    """
    if scored >= max(1.0, (1 - max_failed_rewards) * responses):
        return ""
    if not responses:
        first = f": {len(skipped)} rows were skipped, the first because of {skipped[0]}" if skipped else ""
        return f"responses: expected at least one, got none{first}"
    why = f": {reasons}" if reasons else ""
    least = f"{1 - max_failed_rewards:.0%}" if max_failed_rewards < 1 else "one"
    return f"responses: expected at least {least} of {responses:.0f} scored, got {scored:.0f}{why}"


# --- several parts


@dataclass(frozen=True)
class Combined:
    """A reward that is a weighted sum; see `combine`."""

    parts: Mapping[str, tuple[float, Reward]]

    def __call__(self, text: str, row: Row) -> float | None:
        total = 0.0
        for weight, reward in self.parts.values():
            if weight:
                value = reward(text, row)
                if value is None:
                    return None
                total += weight * value
        return total


def combine(parts: Mapping[str, tuple[float, Reward]]) -> Combined:
    """sum_k weight_k * reward_k(text, row); None as soon as one part with a weight could not be scored.

    Args:
        parts: for each name a weight and a reward. A part with weight 0 is only logged: `score_parts` computes it, and
            its failures do not count.

    Raises:
        ValueError: no part, or a weight that is not finite.
    """
    if not parts or not all(math.isfinite(weight) for weight, _ in parts.values()):
        weights = {name: weight for name, (weight, _) in parts.items()}
        raise ValueError(f"parts: expected at least one, with finite weights, got {weights}")
    return Combined(dict(parts))


def without_thinking(reward: Reward) -> Reward:
    """The same reward, computed from the text that follows a response's thinking; see `rlkit.rewards.split_thinking`.

    The tags are the row's `thinking_tags`, by default `<think>` and `</think>`. A row with `thinking_opened` has a
    prompt that ends with the first one, so its responses begin with thinking; `rlkit.vlm.encode_prompt` adds that to
    the row.

    Args:
        reward: may be a combined one, which is changed part by part.
    """
    if isinstance(reward, Combined):
        parts = reward.parts.items()
        return combine({name: (weight, without_thinking(part)) for name, (weight, part) in parts})

    def score_answer(text: str, row: Row) -> float | None:
        return reward(
            split_thinking(text, opened=row.get("thinking_opened", False), tags=thinking_tags_of(row))[1], row
        )

    return score_answer


def score_parts(
    reward: Reward, samples: Sequence[Sample], *, threads: int = 1, failures: Failures | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """`score`, and each part of a combined reward by itself; every part scores every sample once.

    Args:
        reward, samples, threads, failures: as in `score`.

    Returns:
        rewards [B] float32, nan where one part with a weight could not be scored; and parts, name -> [B] before its
        weight (empty for a reward that is not combined): a run logs their means, GDPO takes them as they are.
    """
    if not isinstance(reward, Combined):
        return score(reward, samples, threads=threads, failures=failures), {}
    parts = {name: score(part, samples, threads=threads, failures=failures) for name, (_, part) in reward.parts.items()}
    total = torch.zeros(len(samples), dtype=torch.float64)
    for name, (weight, _) in reward.parts.items():
        if weight:
            total += weight * parts[name]
    return torch.where(total.abs() <= LARGEST, total, math.nan).float(), parts


def part_means(parts: Mapping[str, Tensor], global_sum: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """`reward_part/<name>` -> mean of a part over all samples of all ranks that it could score, for a run's curves.

    Args:
        parts: of `score_parts`, for this rank's samples; all ranks call this together.
        global_sum: the engine's.
    """
    if not parts:
        return {}
    sums = [torch.stack([part.nansum(), (~part.isnan()).sum()]).double() for part in parts.values()]
    means = [total / count if count else math.nan for total, count in global_sum(torch.stack(sums)).tolist()]
    return {f"reward_part/{name}": mean for name, mean in zip(parts, means, strict=True)}


def reward_stats(rewards: Tensor, group_ids: Tensor, global_sum: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """How the rewards of a batch are distributed, over all ranks, for a run's curves.

    `reward/mean`; `reward/std`, the population's; and over prompts, the mean of the best response's reward
    `reward/best` and of the worst one's `reward/worst`, and `reward/equal`, the share of prompts whose responses all
    have the same reward, which teach nothing where responses are compared with each other.

    Args:
        rewards: [B], of this rank's responses; those that are nan (not scored) are left out.
        group_ids: [B], the same integer for all responses to one prompt, which are all on one rank.
        global_sum: the engine's; all ranks call this together.

    Returns:
        Nothing where no rank has a response that was scored.
    """
    scored = ~rewards.isnan()
    rewards, ids = rewards[scored].double(), group_ids[scored].unique(return_inverse=True)[1]
    groups = torch.zeros(int(ids.max()) + 1 if len(ids) else 0, dtype=torch.float64)
    best, worst = (groups.scatter_reduce(0, ids, rewards, how, include_self=False) for how in ("amax", "amin"))
    sums = {
        "responses": len(rewards),
        "rewards": rewards.sum(),
        "squares": rewards.square().sum(),
        "prompts": len(groups),
        "best": best.sum(),
        "worst": worst.sum(),
        "equal": (best == worst).sum(),
    }
    totals = global_sum(torch.tensor([*sums.values()], dtype=torch.float64)).tolist()
    total = dict(zip(sums, totals, strict=True))
    if not total["responses"]:
        return {}
    mean = total["rewards"] / total["responses"]
    variance = max(total["squares"] / total["responses"] - mean**2, 0.0)
    return {
        "reward/mean": mean,
        "reward/std": variance**0.5,
        "reward/best": total["best"] / total["prompts"],
        "reward/worst": total["worst"] / total["prompts"],
        "reward/equal": total["equal"] / total["prompts"],
    }
