"""`rlkit.advantages.whitened` sample by sample and token by token."""

import math

import torch
from torch import Tensor

from rlkit._numerics import GlobalSum, one_rank
from rlkit.advantages.naive._loops import steps, zeros
from rlkit.advantages.naive.group import dr_grpo_advantages, grpo_advantages
from rlkit.advantages.naive.returns import discounted_returns


@torch.no_grad()
def masked_whiten(x: Tensor, mask: Tensor, eps: float = 1e-8, global_sum: GlobalSum = one_rank) -> Tensor:
    out = zeros(*mask.shape)
    at = [(b, t) for b in range(len(mask)) for t in steps(mask, b)]
    for i, white in zip(at, _whiten([x[i].double() for i in at], eps, global_sum), strict=True):
        out[i] = white
    return out


@torch.no_grad()
def reinforce_plus_plus_advantages(
    rewards: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    eps: float = 1e-8,
    global_sum: GlobalSum = one_rank,
) -> Tensor:
    returns = discounted_returns(rewards, mask, gamma)
    scored = mask.clone()
    for b in range(len(mask)):
        if any(not math.isfinite(returns[b, t].item()) for t in steps(mask, b)):
            scored[b] = False
    return masked_whiten(returns, scored, eps, global_sum)


def reinforce_plus_plus_baseline_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    lengths: Tensor | None = None,
    eps: float = 1e-8,
    global_sum: GlobalSum = one_rank,
) -> Tensor:
    return _whiten_samples(dr_grpo_advantages(rewards, group_ids), rewards.isfinite(), lengths, eps, global_sum)


def gdpo_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    weights: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    eps: float = 1e-6,
    global_sum: GlobalSum = one_rank,
) -> Tensor:
    total = zeros(len(rewards))
    for k in range(rewards.shape[1]):
        weight = 1.0 if weights is None else weights[k]
        total = total + weight * grpo_advantages(rewards[:, k], group_ids, eps)
    scored = torch.tensor([row.isfinite().any() for row in rewards])
    return _whiten_samples(total, scored, lengths, 1e-8, global_sum)


def lite_ppo_advantages(
    rewards: Tensor, group_ids: Tensor, eps: float = 1e-6, global_sum: GlobalSum = one_rank
) -> Tensor:
    r = [rewards[i].double() for i in range(len(rewards)) if math.isfinite(rewards[i].item())]
    _, var = _moments(r, global_sum)
    centred = dr_grpo_advantages(rewards, group_ids)
    return centred / (var**0.5 + eps) if var > 0 else 0 * centred


def _whiten_samples(x: Tensor, scored: Tensor, lengths: Tensor | None, eps: float, global_sum: GlobalSum) -> Tensor:
    """Each sample counts once, or as often as it has tokens."""
    out, counted = zeros(len(x)), []
    for i in range(len(x)):
        if scored[i]:
            counted += [i] * (1 if lengths is None else int(lengths[i]))
    for i, white in zip(counted, _whiten([x[i] for i in counted], eps, global_sum), strict=True):
        out[i] = white
    return out


def _whiten(values: list[Tensor], eps: float, global_sum: GlobalSum) -> list[Tensor]:
    center, var = _moments(values, global_sum)
    scale = (var + eps) ** 0.5 if var + eps > 0 else 1.0
    return [(x - center) / scale for x in values]


def _moments(values: list[Tensor], global_sum: GlobalSum) -> tuple[Tensor, Tensor]:
    """(mean, variance with divisor n - 1) over all ranks."""
    nothing = torch.zeros((), dtype=torch.float64)
    count, total = global_sum(torch.stack([nothing + len(values), sum(values, nothing)]))
    center = total / max(count.item(), 1)
    squares = global_sum(sum(((x - center) ** 2 for x in values), nothing))
    return center, squares / max(count.item() - 1, 1)
