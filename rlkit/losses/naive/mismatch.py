"""`rlkit.losses.mismatch` token by token and sequence by sequence."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlkit.losses.naive._loops import sequences, zeros


@torch.no_grad()
def importance_weights(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, low: float = 0.0, high: float = 2.0
) -> Tensor:
    weights = zeros(mask)
    for b, ratios in _ratios(logprobs, rollout_logprobs, mask):
        for t in ratios:
            weights[b, t] = _truncated(ratios[t], low, high)
    return weights


@torch.no_grad()
def sequence_importance_weights(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, low: float = 0.0, high: float = 2.0
) -> Tensor:
    weights = zeros(mask)
    for b, ratios in _ratios(logprobs, rollout_logprobs, mask):
        for t in ratios:
            weights[b, t] = _truncated(math.prod(ratios.values()), low, high)
    return weights


@torch.no_grad()
def geometric_importance_weights(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, low: float = 0.0, high: float = 2.0
) -> Tensor:
    weights = zeros(mask)
    for b, ratios in _ratios(logprobs, rollout_logprobs, mask):
        for t in ratios:
            weights[b, t] = _truncated(math.prod(ratios.values()) ** (1 / len(ratios)), low, high)
    return weights


@torch.no_grad()
def masked_importance_weights(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, low: float, high: float
) -> Tensor:
    weights = zeros(mask)
    for b, ratios in _ratios(logprobs, rollout_logprobs, mask):
        for t in ratios:
            weights[b, t] = ratios[t] if low <= ratios[t] <= high else 0.0
    return weights


@torch.no_grad()
def sequence_masked_importance_weights(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, low: float, high: float
) -> Tensor:
    weights = zeros(mask)
    for b, ratios in _ratios(logprobs, rollout_logprobs, mask):
        product = math.prod(ratios.values())
        for t in ratios:
            weights[b, t] = product if low <= product <= high else 0.0
    return weights


@torch.no_grad()
def token_rejection_mask(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, low: float, high: float, veto: float = 0.0
) -> Tensor:
    keep = torch.zeros_like(mask)
    for b, ratios in _ratios(logprobs, rollout_logprobs, mask):
        for t in ratios:
            keep[b, t] = low <= ratios[t] <= high and min(ratios.values()) >= veto
    return keep


rejection_mask = token_rejection_mask


@torch.no_grad()
def sequence_rejection_mask(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, low: float, high: float, veto: float = 0.0
) -> Tensor:
    keep = torch.zeros_like(mask)
    for b, ratios in _ratios(logprobs, rollout_logprobs, mask):
        for t in ratios:
            keep[b, t] = low <= math.prod(ratios.values()) <= high and min(ratios.values()) >= veto
    return keep


@torch.no_grad()
def geometric_rejection_mask(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, low: float, high: float, veto: float = 0.0
) -> Tensor:
    keep = torch.zeros_like(mask)
    for b, ratios in _ratios(logprobs, rollout_logprobs, mask):
        mean = math.prod(ratios.values()) ** (1 / len(ratios))
        for t in ratios:
            keep[b, t] = low <= mean <= high and min(ratios.values()) >= veto
    return keep


@torch.no_grad()
def token_divergence_mask(divergence: Tensor, mask: Tensor, high: float) -> Tensor:
    keep = torch.zeros_like(mask)
    for b, tokens in sequences(mask):
        for t in tokens:
            keep[b, t] = divergence[b, t].item() <= high
    return keep


@torch.no_grad()
def sequence_sum_divergence_mask(divergence: Tensor, mask: Tensor, high: float) -> Tensor:
    return _keep_sequences(divergence, mask, lambda values: sum(values) <= high)


@torch.no_grad()
def sequence_mean_divergence_mask(divergence: Tensor, mask: Tensor, high: float) -> Tensor:
    return _keep_sequences(divergence, mask, lambda values: sum(values) / len(values) <= high)


@torch.no_grad()
def sequence_max_divergence_mask(divergence: Tensor, mask: Tensor, high: float) -> Tensor:
    return _keep_sequences(divergence, mask, lambda values: max(values) <= high)


def _truncated(ratio: float, low: float, high: float) -> float:
    return 0.0 if math.isnan(ratio) else min(max(ratio, low), high)


def _ratios(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> list[tuple[int, dict[int, float]]]:
    """(row, {token: trainer's probability over the sampler's}) of every row that has a token."""
    return [
        (b, {t: math.exp(logprobs[b, t].item() - rollout_logprobs[b, t].item()) for t in tokens})
        for b, tokens in sequences(mask)
    ]


def _keep_sequences(divergence: Tensor, mask: Tensor, passes: Callable[[list[float]], bool]) -> Tensor:
    keep = torch.zeros_like(mask)
    for b, tokens in sequences(mask):
        for t in tokens:
            keep[b, t] = passes([divergence[b, s].item() for s in tokens])
    return keep
