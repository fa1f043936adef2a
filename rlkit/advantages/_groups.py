"""Sums over groups of samples. All in float64: a group's rounding error must not be scaled up to an advantage."""

import torch
from torch import Tensor


def group_index(group_ids: Tensor) -> Tensor:
    """[B]: the group of each sample, numbered from 0."""
    return torch.unique(group_ids, return_inverse=True)[1]


def group_sums(x: Tensor, index: Tensor, groups: int | None = None) -> Tensor:
    """`out[k]` = sum of x [B, ...] over group k: [groups, ...], by default zero-padded to length B."""
    slots = len(x) if groups is None else groups
    return x.new_zeros(slots, *x.shape[1:]).index_add_(0, index, x)


def group_max(x: Tensor, index: Tensor) -> Tensor:
    """[B]: the largest x of the group of each sample."""
    return torch.full_like(x, -torch.inf).scatter_reduce(0, index, x, "amax")[index]


def group_min(x: Tensor, index: Tensor) -> Tensor:
    """[B]: the smallest x of the group of each sample."""
    return -group_max(-x, index)


def judged_rewards(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """(rewards in float64, 0 where they are not finite; bool: where they are)."""
    judged = rewards.isfinite()
    return torch.where(judged, rewards.double(), 0), judged


def centre(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(rewards minus group mean, 0 where not judged; each sample's group; judged samples of group k at k), all [B].

    Shift by the group minimum first, so that equal rewards give exactly 0.
    """
    index = group_index(group_ids)
    known, judged = judged_rewards(rewards)
    count = group_sums(judged.double(), index)
    smallest = group_min(torch.where(judged, known.detach(), torch.inf), index)
    known = torch.where(judged, known - smallest, 0)
    mean = group_sums(known, index) / count.clamp(min=1)
    return torch.where(judged, known - mean[index], 0), index, count


def root(variance: Tensor) -> Tensor:
    """The square root of a float64 variance, never quite 0: 0 may be divided by it, and its gradient at 0 is 0."""
    return variance.clamp(min=torch.finfo(torch.float64).tiny).sqrt()


def in_dtype_of(rewards: Tensor, x: Tensor) -> Tensor:
    """`x` as float32, or float64 where the rewards are."""
    return x.to(torch.promote_types(rewards.dtype, torch.float32))
