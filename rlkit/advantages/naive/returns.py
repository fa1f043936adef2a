"""`rlkit.advantages.returns` token by token, from the last of a row to its first."""

import math

import torch
from torch import Tensor

from rlkit.advantages.naive._loops import rewards_of_tokens, steps, zeros
from rlkit.advantages.returns import AdvantagesAndReturns


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float | Tensor = 0.95
) -> AdvantagesAndReturns:
    advantages, returns = zeros(*mask.shape), zeros(*mask.shape)
    lams = torch.as_tensor(lam, dtype=torch.float64).expand(len(mask)).tolist()
    for b in range(len(mask)):
        reward = rewards_of_tokens(rewards, mask, b)
        next_value, next_advantage = 0.0, 0.0
        for t in reversed(steps(mask, b)):
            value = values[b, t].item()
            delta = reward[t] + gamma * next_value - value
            advantage = delta + gamma * lams[b] * next_advantage
            advantages[b, t], returns[b, t] = advantage, advantage + value
            next_value, next_advantage = value, advantage
    return AdvantagesAndReturns(advantages, returns)


@torch.no_grad()
def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    returns = zeros(*mask.shape)
    for b in range(len(mask)):
        reward, to_go = rewards_of_tokens(rewards, mask, b), 0.0
        for t in reversed(steps(mask, b)):
            to_go = reward[t] + gamma * to_go
            returns[b, t] = to_go
    return returns


@torch.no_grad()
def vtrace(
    rewards: Tensor,
    values: Tensor,
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> AdvantagesAndReturns:
    advantages, targets = zeros(*mask.shape), zeros(*mask.shape)
    lams = torch.as_tensor(lam, dtype=torch.float64).expand(len(mask)).tolist()
    for b in range(len(mask)):
        reward = rewards_of_tokens(rewards, mask, b)
        next_value, next_target = 0.0, 0.0
        for t in reversed(steps(mask, b)):
            value, weight = values[b, t].item(), math.exp(logprobs[b, t].item() - rollout_logprobs[b, t].item())
            rho, c = min(rho_bar, weight), min(c_bar, weight)
            delta = rho * (reward[t] + gamma * next_value - value)
            target = value + delta + gamma * lams[b] * c * (next_target - next_value)
            mixed = lams[b] * next_target + (1 - lams[b]) * next_value
            advantages[b, t], targets[b, t] = rho * (reward[t] + gamma * mixed - value), target
            next_value, next_target = value, target
    return AdvantagesAndReturns(advantages, targets)


def rewards_to_tokens(rewards: Tensor, mask: Tensor) -> Tensor:
    out = zeros(*mask.shape)
    for b in range(len(mask)):
        if steps(mask, b):
            out[b, steps(mask, b)[-1]] = rewards[b]
    return out


def length_adaptive_lambda(mask: Tensor, alpha: float = 0.05) -> Tensor:
    lengths = [len(steps(mask, b)) for b in range(len(mask))]
    return torch.tensor([max(0.0, 1 - 1 / (alpha * n)) if n else 0.0 for n in lengths], dtype=torch.float64)
