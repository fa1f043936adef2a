"""`rlkit.losses.sequence_policy` sequence by sequence."""

import math

import torch
from torch import Tensor

from rlkit.losses.naive._loops import add, constant, per_token, sequences, zeros


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
) -> Tensor:
    logprobs, old, adv, loss = logprobs.double(), constant(old_logprobs), per_token(advantages, mask), zeros(mask)
    for b, tokens in sequences(mask):
        ratio = (add(logprobs[b, t] - old[b, t] for t in tokens) / len(tokens)).exp()
        for t in tokens:
            held = ratio.clamp(1 - clip_low, 1 + clip_high)
            surrogate = min(ratio * adv[b, t], held * adv[b, t])
            if dual_clip is not None and adv[b, t] < 0:
                surrogate = max(surrogate, dual_clip * adv[b, t])
            loss[b, t] = -surrogate
    return loss


def gspo_token_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
) -> Tensor:
    logprobs, old, adv, loss = logprobs.double(), constant(old_logprobs), per_token(advantages, mask), zeros(mask)
    for b, tokens in sequences(mask):
        of_sequence = (add(logprobs[b, t] - old[b, t] for t in tokens) / len(tokens)).exp().item()
        for t in tokens:
            probability = logprobs[b, t].exp()
            ratio = of_sequence * probability / probability.item()
            held = ratio.clamp(1 - clip_low, 1 + clip_high)
            surrogate = min(ratio * adv[b, t], held * adv[b, t])
            if dual_clip is not None and adv[b, t] < 0:
                surrogate = max(surrogate, dual_clip * adv[b, t])
            loss[b, t] = -surrogate
    return loss


def luspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 2e-3,
    clip_high: float = 2.5e-3,
) -> Tensor:
    loss = gspo_loss(logprobs, old_logprobs, advantages, mask, clip_low, clip_high)
    for b, tokens in sequences(mask):
        loss[b] = len(tokens) * loss[b]
    return loss


def gmpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    log_clip_low: float = 0.4,
    log_clip_high: float = 0.4,
) -> Tensor:
    logprobs, old, adv, loss = logprobs.double(), constant(old_logprobs), per_token(advantages, mask), zeros(mask)
    for b, tokens in sequences(mask):
        clipped = []
        for t in tokens:
            log_ratio = logprobs[b, t] - old[b, t]
            if adv[b, t] > 0:
                clipped.append(log_ratio.clamp(max=log_clip_high))
            elif adv[b, t] < 0:
                clipped.append(log_ratio.clamp(min=-log_clip_low))
        for t in tokens:
            loss[b, t] = -adv[b, t] * (add(clipped) / len(tokens)).exp()
    return loss


def topr_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    logprobs, old, adv, loss = logprobs.double(), constant(old_logprobs), per_token(advantages, mask), zeros(mask)
    for b, tokens in sequences(mask):
        ratio = add(logprobs[b, t] - old[b, t] for t in tokens).exp().item()
        for t in tokens:
            weight = min(ratio, 1.0) if adv[b, t] < 0 else 1.0
            loss[b, t] = -weight * adv[b, t] * logprobs[b, t]
    return loss


def sequence_sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Tensor:
    logprobs, old, adv, loss = logprobs.double(), constant(old_logprobs), per_token(advantages, mask), zeros(mask)
    for b, tokens in sequences(mask):
        ratio = (add(logprobs[b, t] - old[b, t] for t in tokens) / len(tokens)).exp()
        for t in tokens:
            tau = tau_pos if adv[b, t] > 0 else tau_neg
            gate = 4 / tau / (1 + (-tau * (ratio - 1)).exp())
            loss[b, t] = -gate * adv[b, t]
    return loss


def flash_reinforce_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, high: float = 3e-3
) -> Tensor:
    logprobs, old, adv, loss = logprobs.double(), constant(old_logprobs), per_token(advantages, mask), zeros(mask)
    for b, tokens in sequences(mask):
        divergence = 0.0
        for t in tokens:
            p, q = logprobs[b, t].exp().item(), old[b, t].exp().item()
            divergence += q * math.log(q / p) + (1 - q + 1e-8) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        if divergence / len(tokens) > high:
            continue
        for t in tokens:
            ratio = math.exp(logprobs[b, t].item() - old[b, t].item())
            loss[b, t] = -ratio * adv[b, t] * logprobs[b, t]
    return loss


@torch.no_grad()
def off_policy_sequence_mask(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, high: float
) -> Tensor:
    logprobs, old, adv, keep = constant(logprobs), constant(old_logprobs), per_token(advantages, mask), mask.clone()
    for b, tokens in sequences(mask):
        drift = add(old[b, t] - logprobs[b, t] for t in tokens) / len(tokens)
        for t in tokens:
            keep[b, t] = not (adv[b, t] < 0 and drift > high)
    return keep
