"""`rlkit.losses.entropy` token by token."""

import math

import torch
from torch import Tensor

from rlkit.losses.naive._loops import trained


@torch.no_grad()
def top_entropy_mask(entropy: Tensor, mask: Tensor, share: float = 0.2) -> Tensor:
    at = [i for i in trained(mask) if not entropy[i].isnan()]
    largest = sorted((entropy[i].item() for i in at), reverse=True)
    kept = 1 + math.floor((len(at) - 1) * share + 1e-6)
    top = torch.zeros_like(mask)
    for i in at:
        top[i] = entropy[i].item() >= largest[kept - 1]
    return top


def adaptive_entropy_coef(
    entropy_coef: float, entropy: float, target: float, step: float = 0.005, low: float = 0.0, high: float = 1.0
) -> float:
    if entropy <= target:
        return min(entropy_coef + step, high)
    return max(entropy_coef - step, low)
