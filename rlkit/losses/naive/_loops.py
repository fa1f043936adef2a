"""What the loops have in common: which tokens are visited, and inputs in float64."""

from collections.abc import Iterable

import torch
from torch import Tensor


def trained(mask: Tensor) -> list[tuple[int, int]]:
    """(row, token) of every token of the mask."""
    rows, tokens = mask.shape
    return [(b, t) for b in range(rows) for t in range(tokens) if mask[b, t]]


def sequences(mask: Tensor) -> list[tuple[int, list[int]]]:
    """(row, its tokens of the mask) of every row that has one."""
    found = [(b, [t for t in range(mask.shape[1]) if mask[b, t]]) for b in range(len(mask))]
    return [(b, tokens) for b, tokens in found if tokens]


def everywhere(mask: Tensor | None, like: Tensor) -> Tensor:
    """The mask, or True at every element of `like`."""
    return torch.ones_like(like, dtype=torch.bool) if mask is None else mask


def zeros(mask: Tensor) -> Tensor:
    """[B, T] in float64."""
    return torch.zeros(mask.shape, dtype=torch.float64)


def constant(x: Tensor) -> Tensor:
    """x in float64, without gradient."""
    return x.detach().double()


def per_token(advantages: Tensor, mask: Tensor) -> Tensor:
    """Advantages [B] or [B, T] as [B, T] in float64, without gradient."""
    advantages = constant(advantages)
    return advantages[:, None].expand(mask.shape) if advantages.ndim == 1 else advantages


def add(values: Iterable[Tensor]) -> Tensor:
    """The sum of 0-d tensors, in float64."""
    result = torch.zeros((), dtype=torch.float64)
    for value in values:
        result = result + value
    return result
