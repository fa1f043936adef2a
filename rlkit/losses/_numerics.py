"""The numeric rules every loss keeps: float32 at least, and what is masked is masked before it is used."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkit.losses._check import advantages_per_token

LOG_RATIO_LIMIT = 20.0  # nats; exp(20) is 4.9e8


def at_least_float32(x: Tensor) -> Tensor:
    """`x` as float32; float64 stays float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def masked_log_ratio(logprobs: Tensor, base_logprobs: Tensor, mask: Tensor | None) -> Tensor:
    r"""`logprobs - base_logprobs`, 0 outside the mask, held within +-LOG_RATIO_LIMIT; safe to put through `exp`.

    Masking comes first: with it after `exp`, backward multiplies a zero by an inf and the gradient is nan while the
    loss looks finite. The limit is for unmasked tokens: beyond it the value is that at the limit and the gradient is 0.
    """
    log_ratio = at_least_float32(logprobs) - at_least_float32(base_logprobs)
    if mask is not None:
        log_ratio = torch.where(mask, log_ratio, 0.0)
    return F.hardtanh(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)  # a clamp whose backward is one pass, not four


def masked_cost(advantages: Tensor, mask: Tensor) -> Tensor:
    """-A as [B, T], detached and float32 at least; 0 outside the mask, whatever the advantages hold there."""
    return torch.where(mask, at_least_float32(advantages_per_token(advantages.detach(), mask)), 0.0).neg_()


def sequence_cost(advantages: Tensor, mask: Tensor) -> Tensor:
    """`masked_cost`; but [B] advantages give [B, 1], for what is one value a sequence: 0 for a row without tokens."""
    if advantages.ndim == 2:
        return masked_cost(advantages, mask)
    return masked_cost(advantages, mask.sum(1, keepdim=True, dtype=torch.int32) > 0)
