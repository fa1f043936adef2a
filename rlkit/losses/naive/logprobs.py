"""`rlkit.losses.logprobs` position by position, from sums over the vocabulary."""

import torch
from torch import Tensor

from rlkit.losses.logprobs import LogprobsAndEntropy
from rlkit.losses.naive._loops import add


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    tau = torch.as_tensor(temperature, dtype=torch.float64).expand(tokens.shape)
    out = torch.zeros(tokens.shape, dtype=torch.float64)
    for b in range(tokens.shape[0]):
        for t in range(1, tokens.shape[1]):
            z = logits[b, t - 1].double() / tau[b, t].item()
            out[b, t] = z[tokens[b, t]] - _log_sum(z)
    return out


def align_with_tokens(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(1, x.shape[1]):
            out[b, t] = x[b, t - 1]
    return out


def target_logprobs(
    logits: Tensor, targets: Tensor, temperature: float | Tensor = 1.0, keep: Tensor | None = None
) -> Tensor:
    out = torch.zeros(targets.shape, dtype=torch.float64)
    for at, z in _tempered(logits, temperature):
        if keep is not None:
            z = torch.where(keep[at], z, -torch.inf)
        out[at] = z[targets[at]] - _log_sum(z)
    return out


def token_entropy(logits: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    out = torch.zeros(logits.shape[:-1], dtype=torch.float64)
    for at, z in _tempered(logits, temperature):
        out[at] = _entropy(z)
    return out


@torch.no_grad()
def sum_pi_squared(logits: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    out = torch.zeros(logits.shape[:-1], dtype=torch.float64)
    for at, z in _tempered(logits, temperature):
        out[at] = add((z[v] - _log_sum(z)).exp() ** 2 for v in range(len(z)))
    return out


def suppress_tokens(logits: Tensor, token_ids: Tensor) -> Tensor:
    out = logits.clone()
    for v in token_ids.tolist():
        out[..., v] = -torch.inf
    return out


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    bias: Tensor | None = None,
    suppress: Tensor | None = None,
    chunk: int | None = None,
) -> LogprobsAndEntropy:
    logprobs, entropy = (torch.zeros(len(hidden), dtype=torch.float64) for _ in range(2))
    logits = torch.zeros(len(hidden), len(weight), dtype=torch.float64)
    for n in range(len(hidden)):
        for v in range(len(weight)):
            logits[n, v] = add(weight[v, h].double() * hidden[n, h] for h in range(hidden.shape[1]))
            if bias is not None:
                logits[n, v] = logits[n, v] + bias[v]
    if suppress is not None:
        logits = suppress_tokens(logits, suppress)
    for n, (_, z) in enumerate(_tempered(logits, temperature)):
        logprobs[n], entropy[n] = z[targets[n]] - _log_sum(z), _entropy(z)
    return LogprobsAndEntropy(logprobs, entropy)


def _tempered(logits: Tensor, temperature: float | Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
    """(position, its logits over the temperature) of every position."""
    tau = torch.as_tensor(temperature, dtype=torch.float64).expand(logits.shape[:-1])
    positions = torch.ones(logits.shape[:-1]).nonzero().tolist()
    return [(tuple(at), logits[tuple(at)].double() / tau[tuple(at)].item()) for at in positions]


def _log_sum(z: Tensor) -> Tensor:
    return add(z[v].exp() for v in range(len(z))).log()


def _entropy(z: Tensor) -> Tensor:
    possible = [v for v in range(len(z)) if z[v] > -torch.inf]
    return -add((z[v] - _log_sum(z)).exp() * (z[v] - _log_sum(z)) for v in possible)
