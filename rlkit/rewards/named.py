"""Rewards by name, for options."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature

from rlkit.data.samples import Reward
from rlkit.data.user_code import load_function
from rlkit.rewards.maths import boxed_match, maths_reward
from rlkit.rewards.rules import exact_match, multiple_choice, squad_f1

REWARDS: Mapping[str, Reward] = {
    "exact": exact_match,
    "maths": maths_reward,
    "choice": multiple_choice,
    "boxed": boxed_match,
    "f1": squad_f1,
}


def reward_named(name: str) -> Reward:
    r"""A reward function by its name.

    - `exact`: the whole response is the row's answer, up to case and white space at the ends.
    - `maths`: its final result, in a `\boxed{}` or at its end, is mathematically equal to the row's.
    - `choice`: it chooses the row's letter.
    - `boxed`: the content of its last `\boxed{}` is the row's answer as text.
    - `f1`: words in common with the row's answer, between 0 and 1.
    - `module:function` or `path/to/file.py:function`: a function of yours, `reward(text, row) -> float | None`.

    Raises:
        ValueError: an unknown name, no such function, or one that does not take a text and a row.
    """
    if name in REWARDS:
        return REWARDS[name]
    if ":" not in name:
        raise ValueError(f"reward: expected {', '.join(REWARDS)} or module:function, got {name!r}")
    reward = load_function(name, "reward")
    try:
        signature(reward).bind("", {})
    except (TypeError, ValueError) as error:
        raise ValueError(f"reward {name!r}: expected a function of a text and a row, got {reward!r:.80}") from error
    return reward
