"""`rlkit.advantages.group` sample by sample."""

from torch import Tensor

from rlkit.advantages.naive._loops import mean, scored_groups, variance, zeros


def grpo_advantages(rewards: Tensor, group_ids: Tensor, eps: float = 1e-6) -> Tensor:
    advantages = zeros(len(rewards))
    for group in scored_groups(rewards, group_ids):
        r = [rewards[j].double() for j in group]
        for i in group:
            if variance(r) > 0:
                advantages[i] = (rewards[i] - mean(r)) / (variance(r) ** 0.5 + eps)
    return advantages


def leave_one_out_grpo_advantages(rewards: Tensor, group_ids: Tensor, eps: float = 1e-6) -> Tensor:
    advantages = zeros(len(rewards))
    for group in scored_groups(rewards, group_ids):
        for i in group:
            others = [rewards[j].double() for j in group if j != i]
            if not others:
                continue
            difference = rewards[i].double() - mean(others)
            differ = min(others) < max(others)
            advantages[i] = difference / (variance(others) ** 0.5 + eps) if differ else difference
    return advantages


def dr_grpo_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    advantages = zeros(len(rewards))
    for group in scored_groups(rewards, group_ids):
        for i in group:
            advantages[i] = rewards[i].double() - mean([rewards[j].double() for j in group])
    return advantages


def expand_to_tokens(advantages: Tensor, mask: Tensor) -> Tensor:
    out = advantages.new_zeros(mask.shape)
    for b in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            if mask[b, t]:
                out[b, t] = advantages[b]
    return out
