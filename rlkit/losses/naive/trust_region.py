"""`rlkit.losses.trust_region` token by token."""

import math

from torch import Tensor

from rlkit.losses.naive._loops import constant, per_token, sequences, trained, zeros


def clip_cov_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    uniform: Tensor,
    clip_low: float = 1.0,
    clip_high: float = 1.0,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    share: float = 0.0002,
) -> Tensor:
    covariance = _covariances(logprobs, advantages, mask)
    logprobs, old, adv, loss = logprobs.double(), constant(old_logprobs), per_token(advantages, mask), zeros(mask)
    candidates = []
    for b, t in trained(mask):
        ratio = (logprobs[b, t] - old[b, t]).exp()
        unclipped = -ratio * adv[b, t]
        clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * adv[b, t]
        loss[b, t] = max(unclipped, clipped)
        if clipped <= unclipped and cov_low < covariance[b, t] < cov_high:
            candidates.append((b, t))
    candidates.sort(key=lambda at: uniform[at].item())
    for b, t in candidates[: _how_many(share, covariance)]:
        loss[b, t] = 0.0
    return loss


def kl_cov_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    share: float = 0.0002,
    kl_coef: float = 1.0,
) -> Tensor:
    covariance = _covariances(logprobs, advantages, mask)
    logprobs, old, adv, loss = logprobs.double(), constant(old_logprobs), per_token(advantages, mask), zeros(mask)
    largest = sorted(covariance, key=lambda at: covariance[at], reverse=True)[: _how_many(share, covariance)]
    for b, t in trained(mask):
        log_ratio = logprobs[b, t] - old[b, t]
        loss[b, t] = -log_ratio.exp() * adv[b, t]
        if (b, t) in largest:
            loss[b, t] = loss[b, t] + kl_coef * log_ratio.abs()
    return loss


def dppo_tv_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    delta_low: float = 0.15,
    delta_high: float = 0.15,
    ratio_high: float = math.inf,
) -> Tensor:
    logprobs, old, adv, loss = logprobs.double(), constant(old_logprobs), per_token(advantages, mask), zeros(mask)
    for b, t in trained(mask):
        p, q = logprobs[b, t].exp(), old[b, t].exp()
        if adv[b, t] > 0 and p - q > delta_high:
            continue
        if adv[b, t] < 0 and q - p > delta_low:
            continue
        loss[b, t] = -_bounded(p / q, ratio_high) * adv[b, t]
    return loss


def dppo_kl_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    delta_low: float = 0.05,
    delta_high: float = 0.05,
    ratio_high: float = math.inf,
) -> Tensor:
    logprobs, old, adv, loss = logprobs.double(), constant(old_logprobs), per_token(advantages, mask), zeros(mask)
    for b, t in trained(mask):
        p, q = logprobs[b, t].exp(), old[b, t].exp()
        kl = q * (q / p).log() + (1 - q + 1e-8) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
        if adv[b, t] > 0 and p > q and kl > delta_high:
            continue
        if adv[b, t] < 0 and p < q and kl > delta_low:
            continue
        loss[b, t] = -_bounded(p / q, ratio_high) * adv[b, t]
    return loss


def dro_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, kl_coef: float = 0.05) -> Tensor:
    logprobs, old, adv, loss = logprobs.double(), constant(old_logprobs), per_token(advantages, mask), zeros(mask)
    for b, t in trained(mask):
        loss[b, t] = -adv[b, t] * logprobs[b, t] + kl_coef / 2 * (logprobs[b, t] - old[b, t]) ** 2
    return loss


def vespo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Tensor:
    logprobs, old, adv, loss = logprobs.double(), constant(old_logprobs), per_token(advantages, mask), zeros(mask)
    for b, tokens in sequences(mask):
        w = math.exp(sum(logprobs[b, t].item() - old[b, t].item() for t in tokens))
        for t in tokens:
            k, lam = (k_neg, lambda_neg) if adv[b, t] < 0 else (k_pos, lambda_pos)
            phi = w**k * math.exp(lam * (1 - w))
            loss[b, t] = -phi * adv[b, t] * logprobs[b, t]
    return loss


def m2po_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, high: float = 0.04) -> Tensor:
    logprobs, old, adv, loss = logprobs.double(), constant(old_logprobs), per_token(advantages, mask), zeros(mask)
    squares = {}  # of the log-ratios of tokens that move away
    for b, t in trained(mask):
        log_ratio = logprobs[b, t] - old[b, t]
        loss[b, t] = -log_ratio.exp() * adv[b, t]
        if adv[b, t] * log_ratio > 0:
            squares[b, t] = log_ratio.item() ** 2
    while squares and sum(squares.values()) / len(squares) > high:
        largest = max(squares.values())
        for worst in [at for at in squares if squares[at] == largest]:
            loss[worst] = 0.0
            del squares[worst]
    return loss


def _bounded(ratio: Tensor, high: float) -> Tensor:
    """min(ratio, high), whose gradient flows on above the bound, as that of high * log(ratio)."""
    return ratio * (high / ratio.item()) if ratio > high else ratio


def _covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> dict[tuple[int, int], float]:
    """Of each token of the mask: (logprob - mean) * (advantage - mean)."""
    lp, adv, at = constant(logprobs), per_token(advantages, mask), trained(mask)
    mean_lp = sum(lp[i].item() for i in at) / max(1, len(at))
    mean_adv = sum(adv[i].item() for i in at) / max(1, len(at))
    return {i: (lp[i].item() - mean_lp) * (adv[i].item() - mean_adv) for i in at}


def _how_many(share: float, tokens: dict[tuple[int, int], float]) -> int:
    """A share of the tokens, one at least if the share is above 0."""
    return max(int(share * len(tokens)), 1 if share > 0 else 0)
