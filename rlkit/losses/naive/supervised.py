"""`rlkit.losses.supervised` token by token."""

import math

from torch import Tensor

from rlkit.losses.naive._loops import trained, zeros


def dft_loss(logprobs: Tensor, mask: Tensor) -> Tensor:
    logprobs, loss = logprobs.double(), zeros(mask)
    for b, t in trained(mask):
        loss[b, t] = -logprobs[b, t].exp().item() * logprobs[b, t]
    return loss


def chord_phi_loss(logprobs: Tensor, mask: Tensor) -> Tensor:
    logprobs, loss = logprobs.double(), zeros(mask)
    for b, t in trained(mask):
        p = logprobs[b, t].exp().item()
        loss[b, t] = -p * (1 - p) * logprobs[b, t]
    return loss


def chord_mu(step: float, warmup: float, decay: float, peak: float = 0.9, valley: float = 0.05) -> float:
    if step < warmup:
        return step / warmup * peak
    if step >= warmup + decay:
        return valley
    cosine = math.cos(math.pi * (step - warmup) / decay)
    return valley + (peak - valley) * (0.5 + 0.5 * cosine)
