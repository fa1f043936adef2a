"""`rlkit.advantages.token_baseline` token by token."""

import math

import torch
from torch import Tensor

from rlkit.advantages.naive._loops import steps, zeros
from rlkit.advantages.naive.returns import discounted_returns


@torch.no_grad()
def optimal_token_baseline_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    old_logprobs: Tensor,
    sum_pi_squared: Tensor,
    mask: Tensor,
    rollout_weights: Tensor | None = None,
    baseline_alone: bool = False,
    eps: float = 1e-8,
) -> Tensor:
    advantages, returns = zeros(*mask.shape), discounted_returns(rewards, mask)
    tokens = [steps(mask, b) for b in range(len(mask))]
    scored = [b for b in range(len(mask)) if tokens[b] and all(math.isfinite(returns[b, t]) for t in tokens[b])]
    norms: dict[int, list[float]] = {}  # of each row, the score norm gathered up to each of its tokens
    for b in scored:
        gathered = 0.0
        norms[b] = []
        for t in tokens[b]:
            rho = 1.0 if rollout_weights is None else rollout_weights[b, t].item()
            gathered += rho**2 * (1 - 2 * math.exp(old_logprobs[b, t].item()) + sum_pi_squared[b, t].item())
            norms[b].append(gathered)
    for b in scored:
        group = [j for j in scored if group_ids[j] == group_ids[b]]
        for n, t in enumerate(tokens[b]):
            left = [j for j in group if len(tokens[j]) > n]  # those that still have a token
            baseline = sum(norms[j][n] * returns[j, tokens[j][n]].item() for j in left)
            baseline /= sum(norms[j][n] for j in left) + eps
            if len(left) == 1 and not baseline_alone:
                baseline = 0.0
            if len(group) > 1:
                advantages[b, t] = returns[b, t].item() - baseline
    return advantages
