"""`rlkit.advantages.steps` step by step."""

import torch
from torch import Tensor

from rlkit.advantages.naive._loops import mean, steps, variance, zeros
from rlkit.advantages.naive.returns import discounted_returns


@torch.no_grad()
def gigpo_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    state_ids: Tensor,
    mask: Tensor,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    eps: float = 1e-6,
) -> Tensor:
    advantages, returns = zeros(*mask.shape), discounted_returns(rewards, mask, gamma)
    totals = [rewards[b, steps(mask, b)].double().sum() for b in range(len(mask))]
    for b in range(len(mask)):
        group = [i for i in range(len(mask)) if group_ids[i] == group_ids[b]]
        for s in steps(mask, b):
            same = [returns[i, j] for i in group for j in steps(mask, i) if state_ids[i, j] == state_ids[b, s]]
            episode = _normed(totals[b], [totals[i] for i in group], eps)
            advantages[b, s] = episode + step_weight * _normed(returns[b, s], same, eps)
    return advantages


@torch.no_grad()
def hgpo_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    state_ids: Tensor,
    mask: Tensor,
    gamma: float = 0.95,
    history: int = 2,
    alpha: float = 1.0,
    eps: float = 1e-6,
) -> Tensor:
    advantages, returns = zeros(*mask.shape), discounted_returns(rewards, mask, gamma)
    for b in range(len(mask)):
        group = [i for i in range(len(mask)) if group_ids[i] == group_ids[b]]
        for s in steps(mask, b):
            total, weights = zeros(), 0.0
            for k in range(history + 1):
                own = _with_history(state_ids, mask, b, s, k)
                if own is None:
                    continue
                others = [(i, j) for i in group for j in steps(mask, i)]
                same = [returns[i, j] for i, j in others if _with_history(state_ids, mask, i, j, k) == own]
                advantage = _normed(returns[b, s], same, eps)
                if advantage != 0:
                    total = total + (k + 1) ** alpha * advantage
                    weights += (k + 1) ** alpha
            advantages[b, s] = total / weights if weights else total
    return advantages


def _with_history(state_ids: Tensor, mask: Tensor, row: int, step: int, k: int) -> list[int] | None:
    """The states of the step and of the k steps before it; None where there are not as many."""
    if step < k or not mask[row, step - k : step + 1].all():
        return None
    return [int(state) for state in state_ids[row, step - k : step + 1]]


def _normed(x: Tensor, group: list[Tensor], eps: float) -> Tensor:
    return (x - mean(group)) / (variance(group) ** 0.5 + eps) if variance(group) > 0 else 0 * x
