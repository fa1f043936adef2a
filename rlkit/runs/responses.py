"""Prompts and responses of a step, what is measured of responses, and warnings of a policy that cannot learn from
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from rlkit.data import Sample, group_ids
from rlkit.engines.distributed import reduce_metrics
from rlkit.report import prompt_record
from rlkit.rewards import part_means, reward_stats, scored, scoring_problem
from rlkit.runs.evaluation import means_of_rows
from rlkit.tracking import Run

EQUAL_STEPS = 10  # steps in a row with equal rewards before a warning
GlobalSum = Callable[[Tensor], Tensor]
Compares = Literal["group", "batch", "nothing"]


@dataclass
class Prompts:
    """This rank's share of some rows, encoded."""

    samples: list[Sample]
    skipped: list[str] = field(default_factory=list)  # error messages of rows that cannot be read or are too long


@dataclass
class Responses:
    """This rank's responses to some prompts, with their rewards.

    Attributes:
        generated: all responses; responses to the same prompt are adjacent.
        rewards: [len(generated)], nan where a response could not be scored.
        parts: values [len(generated)] of each part of a combined reward.
        skipped: why rows were skipped.
        reasons: why responses could not be scored.
        scoring_seconds: time during which at least one response was being scored.
    """

    generated: list[Sample] = field(default_factory=list)
    rewards: Tensor = field(default_factory=lambda: torch.zeros(0))
    parts: dict[str, Tensor] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    reasons: str = ""
    scoring_seconds: float = 0.0

    @property
    def scored(self) -> list[Sample]:
        """The responses that could be scored, with their rewards."""
        return scored(self.generated, self.rewards)

    def __add__(self, more: Responses) -> Responses:
        return Responses(
            self.generated + more.generated,
            torch.cat([self.rewards, more.rewards]),
            {name: torch.cat([part, more.parts[name]]) for name, part in self.parts.items()},
            self.skipped + more.skipped,
            self.reasons or more.reasons,
            self.scoring_seconds + more.scoring_seconds,
        )


def response_metrics(responses: Responses, engine: Any) -> dict[str, float]:
    """Rewards and their parts, lengths and counts, over the responses of all ranks.

    `response_length/truncated` is the share of responses that were truncated at the token limit.
    """
    lengths = [len(sample.response_ids) for sample in responses.generated]
    truncated = sum(sample.finish_reason == "length" for sample in responses.generated)
    unscored = int(responses.rewards.isnan().sum())
    counts = [len(lengths), sum(lengths), truncated, unscored, len(responses.skipped)]
    sums = engine.global_sum(torch.tensor(counts, dtype=torch.float64))
    count, tokens, truncated, unscored, skipped = sums.tolist()
    longest = torch.tensor(float(max(lengths, default=0)))
    return {
        **reward_stats(responses.rewards, group_ids(responses.generated), engine.global_sum),
        **part_means(responses.parts, engine.global_sum),
        "response_length/mean": tokens / max(count, 1),
        **reduce_metrics({"response_length/max": longest}, engine.data_parallel_group),
        "response_length/truncated": truncated / max(count, 1),
        "unscored": unscored,
        "skipped_rows": skipped,
        "time/scoring": responses.scoring_seconds,
    }


def keep_responses(run: Run, responses: Responses, prompts: int) -> None:
    """Have the next `Run.log` write all responses to the first few prompts to samples.jsonl, with images."""
    groups: dict[int, list[int]] = {}  # group id -> indices of its responses
    for i, sample in enumerate(responses.generated):
        groups.setdefault(sample.group_id, []).append(i)
    for indices in list(groups.values())[:prompts]:
        samples = [replace(responses.generated[i], reward=responses.rewards[i].item()) for i in indices]
        parts = {name: values[indices].tolist() for name, values in responses.parts.items()}
        run.keep_responses([prompt_record(run.out, samples, "training", 0, parts)])


class LearningWarnings:
    """Warns, once each, of equal rewards and of truncated responses, which keep a policy from learning.

    Args:
        cfg: options of the recipe, with `max_new_tokens`.
        run: prints the warnings.
        compares: as for `PolicySampler`.
    """

    def __init__(self, cfg: Any, run: Run, compares: Compares = "group") -> None:
        self.cfg, self.run, self.compares = cfg, run, compares
        self.equal_steps = 0  # the last steps in which the rewards that are compared were equal
        self.given: set[str] = set()

    def check(self, metrics: Mapping[str, float]) -> None:
        """Look at the metrics of a step, see `response_metrics`."""
        self.equal_steps = self.equal_steps + 1 if self._rewards_are_equal(metrics) else 0
        if self.equal_steps == EQUAL_STEPS:
            self._warn_once(
                "equal rewards",
                f"{'the responses to each prompt' if self.compares == 'group' else 'all responses'} have had equal "
                f"rewards for {EQUAL_STEPS} steps, from which little or nothing is learned: look at the responses, and "
                "at how they are scored (--reward)",
            )
        if (share := metrics["response_length/truncated"]) > 0.5:
            at = f"are truncated at --max_new_tokens {self.cfg.max_new_tokens}"
            if getattr(self.cfg, "max_turns", 1) > 1:
                of_episode = f"--max_response_tokens {self.cfg.max_response_tokens} (0: the rest of the context)"
                advice = f"{at} in a turn, or do not fit into {of_episode}: raise what limits them"
            else:
                advice = f"{at}: raise it"
            self._warn_once("truncated", f"{share:.0%} of the responses {advice}")

    def _rewards_are_equal(self, metrics: Mapping[str, float]) -> bool:
        """Whether all rewards that the recipe compares with each other are the same."""
        if self.compares == "group":
            return getattr(self.cfg, "group_size", 1) > 1 and metrics.get("reward/equal") == 1
        if self.compares == "nothing" or "reward/std" not in metrics:
            return False
        return metrics["reward/std"] <= 1e-6 * max(1.0, abs(metrics["reward/mean"]))  # of equal ones, with rounding

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self.given:
            self.given.add(kind)
            self.run.print(f"warning: {text}")


def accuracy(responses: Responses, global_sum: GlobalSum) -> dict[str, float]:
    """Mean reward of the scored responses over all ranks, and the number of responses that could not be scored.

    Returns:
        `accuracy` with `accuracy_error` and `accuracy_rows`, see `means_of_rows`, and `unscored`. If no response was
        scored, as for data without expected answers, only `unscored`. If no response was generated, an empty dict.
    """
    results = means_of_rows({"accuracy": responses.rewards[~responses.rewards.isnan()].tolist()}, global_sum)
    generated, scored = count_scored(responses, global_sum)
    unscored = {"unscored": generated - scored} if generated else {}
    return {**results, **unscored} if scored else unscored


def count_scored(responses: Responses, global_sum: GlobalSum) -> tuple[float, float]:
    """The number of responses of all ranks, and the number of those that could be scored."""
    counts = torch.tensor([len(responses.generated), (~responses.rewards.isnan()).sum()])
    generated, scored = global_sum(counts.double()).tolist()
    return generated, scored


def too_few_scored(responses: Responses, global_sum: GlobalSum, max_failed_rewards: float) -> str:
    """Why the run has to stop: more than this share of its responses could not be scored. Empty if it can go on.

    With a share of 1, a run never stops.
    """
    generated, scored = count_scored(responses, global_sum)
    if max_failed_rewards >= 1:
        return ""
    return scoring_problem(generated, scored, max_failed_rewards, responses.reasons, responses.skipped)
