"""Rewards per token, and the tokens of the mask side by side."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkit import _check as check
from rlkit._numerics import at_least_float32


def rewards_per_token(rewards: Tensor, mask: Tensor) -> Tensor:
    """[B, T]: rewards [B, T] as they are, rewards [B] on the last token of the mask; float32 at least."""
    check.token_mask(mask)
    check.tensor("rewards", rewards)
    rewards = at_least_float32(rewards)
    if rewards.ndim == 1:
        check.shape("rewards", rewards, (len(mask),), "or [B, T] as mask")
        columns = torch.arange(mask.shape[1] + 1, dtype=torch.int32, device=mask.device)
        last = (F.pad(mask, (1, 0)) * columns).amax(1, keepdim=True).long()  # counted from 1; 0 where there is none
        return rewards.new_zeros(len(mask), len(columns)).scatter(1, last, rewards[:, None])[:, 1:].contiguous()
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
