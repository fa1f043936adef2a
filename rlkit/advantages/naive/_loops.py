"""What the loops have in common: which samples and tokens are visited."""

import math

import torch
from torch import Tensor


def steps(mask: Tensor, row: int) -> list[int]:
    """The tokens of a row's mask."""
    return [t for t in range(mask.shape[1]) if mask[row, t]]


def rewards_of_tokens(rewards: Tensor, mask: Tensor, row: int) -> dict[int, float]:
    """{token: its reward}: of a row of [B, T], or of [B] all on the last token."""
    tokens = steps(mask, row)
    if rewards.ndim == 2:
        return {t: rewards[row, t].item() for t in tokens}
    return {t: rewards[row].item() if t == tokens[-1] else 0.0 for t in tokens}


def scored_groups(rewards: Tensor, group_ids: Tensor) -> list[list[int]]:
    """The samples of each group that were scored."""
    groups: dict[int, list[int]] = {}
    for i, group in enumerate(group_ids.tolist()):
        if math.isfinite(rewards[i].item()):
            groups.setdefault(group, []).append(i)
    return list(groups.values())


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).sum() / len(values)


def variance(values: list[Tensor]) -> Tensor:
    """With divisor n - 1; 0 of one value."""
    if len(values) < 2:
        return torch.zeros((), dtype=torch.float64)
    center = mean(values)
    return torch.stack([(x - center) ** 2 for x in values]).sum() / (len(values) - 1)
