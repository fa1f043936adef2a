"""Statistics of groups of samples: every result is per sample, that of the sample's group.

Samples that were not scored (rewards that are not finite) are a group of their own, whose result is 0 in the end:

    r, group = rewards_and_groups(rewards, group_ids)
    advantages = r - group_mean(r, group)
    return zero_unscored(advantages, rewards)

All in float64: a group's rounding error must not be scaled up to an advantage.
"""

import torch
from torch import Tensor


def rewards_and_groups(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """(rewards in float64, groups numbered from 1), [B] both; samples that were not scored have reward 0, group 0."""
    scored = rewards.isfinite()
    return torch.where(scored, rewards.double(), 0), torch.where(scored, group_index(group_ids) + 1, 0)


def zero_unscored(x: Tensor, rewards: Tensor) -> Tensor:
    """[B]: x, 0 for the samples that were not scored; float32, or float64 if the rewards are."""
    return in_dtype_of(rewards, torch.where(rewards.isfinite(), x, 0))


def group_index(group_ids: Tensor) -> Tensor:
    """[B]: the group of each sample, numbered from 0."""
    return torch.unique(group_ids, return_inverse=True)[1]


def group_sum(x: Tensor, group: Tensor) -> Tensor:
    """[B, ...]: the sum of x [B, ...] over the group of each sample."""
    groups = len(x) + 1  # at most: B, and that of the samples that were not scored
    return x.new_zeros(groups, *x.shape[1:]).index_add(0, group, x)[group]


def group_size(group: Tensor) -> Tensor:
    """[B]: the number of samples in the group of each sample."""
    return group_sum(torch.ones_like(group, dtype=torch.float64), group)


def group_max(x: Tensor, group: Tensor) -> Tensor:
    """[B]: the largest x of the group of each sample."""
    return x.new_full((len(x) + 1,), -torch.inf).scatter_reduce(0, group, x, "amax")[group]


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


def difference_to_others(x: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """[B] both: x minus the mean of the others of its group, and the standard deviation of the others.

    The standard deviation is 0 where the others are all equal. A group of one has the difference 0.
    """
    x = x - group_min(x.detach(), group)  # else a large mean is rounded, and equal numbers of the others would differ
    size, centred = group_size(group), x - group_mean(x, group)
    difference = centred * size / (size - 1).clamp(min=1)
    squares = group_sum(centred.square(), group)
    squares_of_others = squares - centred * difference
    differ = squares_of_others > 1e-12 * squares  # below that it is rounding
    std = root(torch.where(differ, squares_of_others / (size - 2).clamp(min=1), 1))
    return difference, torch.where(differ, std, 0)


def root(variance: Tensor) -> Tensor:
    """The square root of a float64 variance, never quite 0: 0 may be divided by it, and its gradient at 0 is 0."""
    return variance.clamp(min=torch.finfo(torch.float64).tiny).sqrt()


def in_dtype_of(rewards: Tensor, x: Tensor) -> Tensor:
    """`x` as float32, or float64 where the rewards are."""
    return x.to(torch.promote_types(rewards.dtype, torch.float32))
