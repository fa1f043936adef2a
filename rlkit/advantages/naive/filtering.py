"""`rlkit.advantages.filtering` sample by sample."""

import torch
from torch import Tensor

from rlkit.advantages.naive._loops import scored_groups, zeros


def informative_groups(rewards: Tensor, group_ids: Tensor) -> Tensor:
    telling = []
    for group in scored_groups(rewards, group_ids):
        r = [rewards[j].item() for j in group]
        if min(r) < max(r):
            telling.append(group_ids[group[0]].item())
    return torch.tensor([group in telling for group in group_ids.tolist()], dtype=torch.bool)


def pf_ppo_weights(rewards: Tensor, group_ids: Tensor, best: float = 0.5, worst: float = 0.0) -> Tensor:
    weights = zeros(len(rewards))
    for group in scored_groups(rewards, group_ids):
        r = [rewards[j].item() for j in group]
        for i in group:
            p = (rewards[i].item() == max(r)) / r.count(max(r))
            q = (rewards[i].item() == min(r)) / r.count(min(r))
            others = (1 - p) / (len(group) - 1) if len(group) > 1 else 1.0
            weights[i] = best * p + worst * q + (1 - best - worst) * others if len(group) > 1 else 1.0
    return weights


def pf_ppo_power_weights(rewards: Tensor, group_ids: Tensor, power: float = 2.0) -> Tensor:
    weights = zeros(len(rewards))
    for group in scored_groups(rewards, group_ids):
        powers = [rewards[j].double().abs() ** power for j in group]
        for i, size in zip(group, powers, strict=True):
            total = torch.stack(powers).sum()
            weights[i] = size / total if total > 0 else 1 / len(group)
    return weights
