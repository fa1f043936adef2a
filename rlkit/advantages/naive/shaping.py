"""`rlkit.advantages.shaping` token by token and sample by sample."""

import torch
from torch import Tensor

from rlkit.advantages.naive._loops import rewards_of_tokens, steps, zeros


@torch.no_grad()
def kl_in_reward(rewards: Tensor, kl: Tensor, mask: Tensor, kl_coef: float | Tensor) -> Tensor:
    out = zeros(*mask.shape)
    for b in range(len(mask)):
        for t, reward in rewards_of_tokens(rewards, mask, b).items():
            out[b, t] = reward - float(kl_coef) * kl[b, t].item()
    return out


def overlong_penalty(lengths: Tensor, max_length: float, buffer: float, penalty: float = 1.0) -> Tensor:
    out = zeros(len(lengths))
    for i, length in enumerate(lengths.tolist()):
        if length >= max_length and buffer or length > max_length:
            out[i] = -penalty
        elif length > max_length - buffer:
            out[i] = -penalty * (length - (max_length - buffer)) / buffer
    return out


@torch.no_grad()
def entropy_advantages(
    advantages: Tensor, entropy: Tensor, mask: Tensor, alpha: float = 0.4, kappa: float = 2.0
) -> Tensor:
    out = zeros(*mask.shape)
    for b in range(len(mask)):
        for t in steps(mask, b):
            advantage = advantages[b].item() if advantages.ndim == 1 else advantages[b, t].item()
            out[b, t] = advantage + min(alpha * entropy[b, t].item(), abs(advantage) / kappa)
    return out


@torch.no_grad()
def scaled_rewards(rewards: Tensor, mean: float, std: float, clip: float = float("inf")) -> Tensor:
    return torch.tensor([min(max((r - mean) / std, -clip), clip) for r in rewards.tolist()], dtype=torch.float64)


def adaptive_kl_coef(kl_coef: float, kl: float, target: float, horizon: float, steps: float = 1) -> float:
    error = (kl - target) / target
    if error > 0.2:
        error = 0.2
    if error < -0.2:
        error = -0.2
    return kl_coef * (1 + steps / horizon * error)
