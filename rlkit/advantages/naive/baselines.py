"""`rlkit.advantages.baselines` sample by sample."""

import math
from itertools import combinations

import torch
from torch import Tensor

from rlkit._numerics import GlobalSum, one_rank
from rlkit.advantages.baselines import AdvantagesAndBaselines
from rlkit.advantages.naive._loops import mean, scored_groups, zeros


def rloo_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    advantages = zeros(len(rewards))
    for group in scored_groups(rewards, group_ids):
        for i in group:
            others = [rewards[j].double() for j in group if j != i]
            if others:
                advantages[i] = rewards[i].double() - mean(others)
    return advantages


def remax_advantages(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    advantages = zeros(len(rewards))
    for i in range(len(rewards)):
        if math.isfinite(rewards[i].item()) and math.isfinite(greedy_rewards[i].item()):
            advantages[i] = rewards[i].double() - greedy_rewards[i].double()
    return advantages


def rae_advantages(rewards: Tensor, roles: Tensor, baselines: Tensor, decay: float = 0.95) -> AdvantagesAndBaselines:
    advantages, running = zeros(len(rewards)), list(baselines.double())
    for i, role in enumerate(roles.tolist()):
        if math.isfinite(rewards[i].item()):
            advantages[i] = rewards[i].double() - running[role]
            running[role] = decay * running[role] + (1 - decay) * rewards[i].double()
    return AdvantagesAndBaselines(advantages, torch.stack(running))


def optimal_values(rewards: Tensor, group_ids: Tensor, beta: float = 0.5) -> Tensor:
    values = zeros(len(rewards))
    for group in scored_groups(rewards, group_ids):
        value = beta * mean([(rewards[j].double() / beta).exp() for j in group]).log()
        for i in range(len(rewards)):
            if group_ids[i] == group_ids[group[0]]:
                values[i] = value
    return values


def opo_advantages(rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    advantages = zeros(len(rewards))
    for group in scored_groups(rewards, group_ids):
        tokens = sum(lengths[j].item() for j in group)
        if tokens:
            baseline = torch.stack([lengths[j] * rewards[j].double() for j in group]).sum() / tokens
            for i in group:
                advantages[i] = rewards[i].double() - baseline
    return advantages


def gpg_advantages(rewards: Tensor, group_ids: Tensor, global_sum: GlobalSum = one_rank) -> Tensor:
    advantages, samples, useful = zeros(len(rewards)), 0, 0
    for group in scored_groups(rewards, group_ids):
        r = [rewards[j].double() for j in group]
        samples += len(group)
        useful += len(group) if min(r) < max(r) else 0
        for i in group:
            advantages[i] = rewards[i].double() - mean(r)
    counts = global_sum(torch.tensor([samples, useful], dtype=torch.float64))
    return counts[0] / max(counts[1].item(), 1) * advantages


def maxrl_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    advantages = zeros(len(rewards))
    for group in scored_groups(rewards, group_ids):
        center = mean([rewards[j].double() for j in group])
        for i in group:
            if center > 0:
                advantages[i] = (rewards[i] - center) / center
    return advantages


def passk_advantages(rewards: Tensor, group_ids: Tensor, k: int, threshold: float = 0.5, eps: float = 1e-6) -> Tensor:
    """By all subsets of k samples: each has reward 1 if one of them passes, and so has each of its samples."""
    advantages = zeros(len(rewards))
    for group in scored_groups(rewards, group_ids):
        subsets = list(combinations(group, k))
        if not subsets:
            continue
        passes = [float(any(rewards[j] > threshold for j in subset)) for subset in subsets]
        center = sum(passes) / len(passes)
        std = math.sqrt(center * (1 - center))
        for i in group:
            own = [x for x, subset in zip(passes, subsets, strict=True) if i in subset]
            if std:
                advantages[i] = (sum(own) / len(own) - center) / (std + eps)
    return advantages


def passk_leave_one_out_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    advantages = zeros(len(rewards))
    for group in scored_groups(rewards, group_ids):
        for i in group:
            others = [rewards[j].double() for j in group if j != i]
            if others:
                advantages[i] = max(rewards[i].double(), *others) - max(others)
    return advantages
