"""`rlkit.advantages.group` sample by sample."""

from torch import Tensor

from rlkit.advantages.naive._loops import judged_groups, mean, variance, zeros


def grpo_advantages(rewards: Tensor, group_ids: Tensor, eps: float = 1e-6) -> Tensor:
    advantages = zeros(len(rewards))
    for group in judged_groups(rewards, group_ids):
        known = [rewards[j].double() for j in group]
        for i in group:
            if variance(known) > 0:
                advantages[i] = (rewards[i] - mean(known)) / (variance(known) ** 0.5 + eps)
    return advantages


def leave_one_out_grpo_advantages(rewards: Tensor, group_ids: Tensor, eps: float = 1e-6) -> Tensor:
    advantages = zeros(len(rewards))
    for group in judged_groups(rewards, group_ids):
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
    for group in judged_groups(rewards, group_ids):
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
