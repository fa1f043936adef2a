"""Statistics of groups of samples: every result is per sample, that of the sample's group.

A sample that was not scored (a reward that is not finite) is left out before the formula and put back after it:

    r, group = scored_samples(rewards, group_ids)  # [S], S <= B
    advantages = r - group_mean(r, group)
    return with_unscored(advantages, rewards)  # [B]

All in float64: a group's rounding error must not be scaled up to an advantage.
"""

import torch
from torch import Tensor


def scored_samples(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """(rewards in float64, groups numbered from 0) of the samples that were scored: [S] both."""
    scored = rewards.isfinite()
    return rewards[scored].double(), group_index(group_ids[scored])


def with_unscored(x: Tensor, rewards: Tensor) -> Tensor:
    """[B]: x [S] of the scored samples, and 0 for the others; float32, or float64 if the rewards are."""
    of_all = x.new_zeros(len(rewards)).masked_scatter(rewards.isfinite(), x)
    return in_dtype_of(rewards, of_all)


def group_index(group_ids: Tensor) -> Tensor:
    """[B]: the group of each sample, numbered from 0."""
    return torch.unique(group_ids, return_inverse=True)[1]


def group_sum(x: Tensor, group: Tensor) -> Tensor:
    """[B, ...]: the sum of x [B, ...] over the group of each sample."""
    return torch.zeros_like(x).index_add(0, group, x)[group]  # there are at most B groups


def group_size(group: Tensor) -> Tensor:
    """[B]: the number of samples in the group of each sample."""
    return group_sum(torch.ones_like(group, dtype=torch.float64), group)


def group_max(x: Tensor, group: Tensor) -> Tensor:
    """[B]: the largest x of the group of each sample."""
    return torch.full_like(x, -torch.inf).scatter_reduce(0, group, x, "amax")[group]


def group_min(x: Tensor, group: Tensor) -> Tensor:
    """[B]: the smallest x of the group of each sample."""
    return -group_max(-x, group)


def group_mean(x: Tensor, group: Tensor, weights: Tensor | None = None) -> Tensor:
    """[B]: the mean of x over the group of each sample, weighted if there are weights.

    The group's minimum is subtracted before the sum and added after it, so that equal numbers have exactly their own
    value as the mean. A group of weight 0 gets its minimum.
    """
    weights = torch.ones_like(x) if weights is None else weights
    total = group_sum(weights, group)
    smallest = group_min(x.detach(), group)
    return smallest + group_sum(weights * (x - smallest), group) / torch.where(total > 0, total, 1)


def group_std(x: Tensor, group: Tensor) -> Tensor:
    """[B]: the sample standard deviation (divisor n - 1) of x over the group of each sample; see `root`."""
    squares = group_sum((x - group_mean(x, group)).square(), group)
    return root(squares / (group_size(group) - 1).clamp(min=1))


def root(variance: Tensor) -> Tensor:
    """The square root of a float64 variance, never quite 0: 0 may be divided by it, and its gradient at 0 is 0."""
    return variance.clamp(min=torch.finfo(torch.float64).tiny).sqrt()


def in_dtype_of(rewards: Tensor, x: Tensor) -> Tensor:
    """`x` as float32, or float64 where the rewards are."""
    return x.to(torch.promote_types(rewards.dtype, torch.float32))
