"""Rewards of tokens from what a caller has: one a token, or one a sample."""

from torch import Tensor

from rlkit._check import check_mask, check_shape, check_tensor
from rlkit._numerics import at_least_float32, masked


def rewards_per_token(rewards: Tensor, mask: Tensor) -> Tensor:
    """[B, T]: rewards [B, T] as they are, rewards [B] on the last token of the mask; float32 at least."""
    check_mask(mask)
    check_tensor("rewards", rewards)
    rewards = at_least_float32(rewards)
    if rewards.ndim == 1:
        check_shape("rewards", rewards, (len(mask),), "or [B, T] as mask")
        seen = mask.cumsum(1)
        last = mask & (seen == seen[:, -1:])
        return masked(rewards[:, None], last)
    check_shape("rewards", rewards, tuple(mask.shape), "as mask, or [B]")
    return rewards
