"""Random log-probabilities, advantages and masks, for several test files."""

import torch
from hypothesis import settings

FEW = settings(max_examples=25, deadline=None, derandomize=True)
B, T = 6, 7


def batch(seed=0, scale=0.5):
    """Rows of every kind: full, holes, one token, none."""
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(B, T, generator=g, dtype=torch.float64) * 3
    lp = (old + torch.randn(B, T, generator=g, dtype=torch.float64) * scale).requires_grad_()
    adv = torch.randn(B, T, generator=g, dtype=torch.float64)
    mask = torch.rand(B, T, generator=g) < 0.7
    mask[0], mask[1], mask[2] = True, False, torch.arange(T) == 3
    return lp, old, adv, mask
