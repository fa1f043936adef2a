"""Rewards: rules, mathematics, programs in a sandbox, models as judges; scores of a batch, computed while others are
sampled."""

from rlkit.rewards.async_scoring import RewardScorer, score_as_written
from rlkit.rewards.isolated import isolated, sandboxed
from rlkit.rewards.judge import chat_judge, model_scores
from rlkit.rewards.maths import boxed_match, maths_reward
from rlkit.rewards.named import reward_named
from rlkit.rewards.programs import all_tests_passed, share_of_tests_passed
from rlkit.rewards.rules import (
    boxes_iou,
    exact_match,
    matches,
    multiple_choice,
    numeric_match,
    repetition,
    split_thinking,
    squad_exact,
    squad_f1,
    think_answer_format,
    within_length,
)
from rlkit.rewards.scoring import (
    combine,
    part_means,
    reward_stats,
    score,
    score_parts,
    scored,
    scoring_problem,
    without_thinking,
)

__all__ = [
    "RewardScorer",
    "all_tests_passed",
    "boxed_match",
    "boxes_iou",
    "chat_judge",
    "combine",
    "exact_match",
    "isolated",
    "scored",
    "scoring_problem",
    "matches",
    "maths_reward",
    "model_scores",
    "multiple_choice",
    "numeric_match",
    "part_means",
    "repetition",
    "reward_named",
    "reward_stats",
    "sandboxed",
    "score",
    "score_as_written",
    "score_parts",
    "share_of_tests_passed",
    "split_thinking",
    "squad_exact",
    "squad_f1",
    "think_answer_format",
    "within_length",
    "without_thinking",
]
