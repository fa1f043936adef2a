"""Rewards per token, and the tokens of the mask side by side."""

from torch import Tensor

from rlkit import _check as check
from rlkit._numerics import at_least_float32, masked


def rewards_per_token(rewards: Tensor, mask: Tensor) -> Tensor:
    """[B, T]: rewards [B, T] as they are, rewards [B] on the last token of the mask; float32 at least."""
    check.token_mask(mask)
    check.tensor("rewards", rewards)
    rewards = at_least_float32(rewards)
    if rewards.ndim == 1:
        check.shape("rewards", rewards, (len(mask),), "or [B, T] as mask")
        last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
        return masked(rewards[:, None].expand_as(mask), last)
    check.shape("rewards", rewards, tuple(mask.shape), "as mask, or [B]")
    return rewards


def scored_tokens(rewards: Tensor, mask: Tensor) -> Tensor:
    """The mask without the rows that were not scored: those with a reward that is not finite. Rewards are masked."""
    scored = rewards.sum(1, keepdim=True).isfinite()
    return mask & scored.repeat(1, mask.shape[1])  # repeated: torch does not vectorise `&` with a broadcast tensor


def side_by_side(x: Tensor, places: Tensor) -> Tensor:
    """[B, T + 1]: x [B, T] with column t moved to `places[b, t]`; 0 in column 0 and wherever nothing was moved to."""
    moved = x.new_zeros(len(x), x.shape[1] + 1).scatter(1, places, x)
    moved[:, 0] = 0
    return moved
