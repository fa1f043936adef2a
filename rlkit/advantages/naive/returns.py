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
def n_step_returns(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    n: int,
    gamma: float | Tensor = 1.0,
    bootstrap: Tensor | None = None,
) -> Tensor:
    returns = zeros(*mask.shape)
    discounts = torch.as_tensor(gamma, dtype=torch.float64).expand(mask.shape)
    for b in range(len(mask)):
        tokens, reward = steps(mask, b), rewards_of_tokens(rewards, mask, b)
        end = 0.0 if bootstrap is None else bootstrap[b].item()
        for place, t in enumerate(tokens):
            total, discount = 0.0, 1.0
            for s in tokens[place : place + n]:
                total += discount * reward[s]
                discount *= discounts[b, s].item()
            after = tokens[place + n :]
            returns[b, t] = total + discount * (values[b, after[0]].item() if after else end)
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


@torch.no_grad()
def fipo_advantages(
    advantages: Tensor,
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    gamma: float = 2 ** (-1 / 32),
    low: float = 0.8,
    high: float = 1.2,
    ratio_high: float = 10.0,
    safe_ratio: float = 4.0,
) -> Tensor:
    out = zeros(*mask.shape)
    for b in range(len(mask)):
        future = 0.0
        for t in reversed(steps(mask, b)):
            advantage = advantages[b].item() if advantages.ndim == 1 else advantages[b, t].item()
            log_ratio = logprobs[b, t].item() - old_logprobs[b, t].item()
            future = gamma * future + (log_ratio if math.exp(log_ratio) <= ratio_high else 0.0)
            weight = min(max(math.exp(future), low), high)
            if advantage < 0 and math.exp(log_ratio) > safe_ratio:
                weight = min(weight, 1.0)
            out[b, t] = advantage * weight
    return out


def rewards_to_tokens(rewards: Tensor, mask: Tensor) -> Tensor:
    out = zeros(*mask.shape)
    for b in range(len(mask)):
        if steps(mask, b):
            out[b, steps(mask, b)[-1]] = rewards[b]
    return out


def length_adaptive_lambda(mask: Tensor, alpha: float = 0.05) -> Tensor:
    lengths = [len(steps(mask, b)) for b in range(len(mask))]
    return torch.tensor([max(0.0, 1 - 1 / (alpha * n)) if n else 0.0 for n in lengths], dtype=torch.float64)
