"""The numeric rules of losses and advantages: float32 at least, and masked values are masked before they are used."""

from collections.abc import Callable

import torch
from torch import Tensor

from rlkit import _check as check

LOG_RATIO_LIMIT = 20.0  # nats; exp(20) is 4.9e8
GlobalSum = Callable[[Tensor], Tensor]


def at_least_float32(x: Tensor) -> Tensor:
    """`x` as float32; float64 stays float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """`x` in float32 at least, 0 outside the mask: a masked inf or nan changes neither value nor gradient."""
    x = at_least_float32(x)
    return x if mask is None else torch.where(mask, x, 0)


def masked_log_ratio(logprobs: Tensor, base_logprobs: Tensor, mask: Tensor | None) -> Tensor:
    """`logprobs - base_logprobs`, 0 outside the mask, held within +-LOG_RATIO_LIMIT; safe to put through `exp`.

    Masking comes before `exp`: after it, backward would multiply 0 by inf, and the gradient would be nan while the loss
    looks finite. An unmasked log-ratio beyond the limit has the value at the limit and gradient 0. `base_logprobs` gets
    no gradient.
    """
    log_ratio = at_least_float32(logprobs) - at_least_float32(base_logprobs.detach())
    return masked(log_ratio, mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def unbounded_log_ratio(logprobs: Tensor, base_logprobs: Tensor, mask: Tensor) -> Tensor:
    """[B, T]: the log-ratio, 0 outside the mask; an infinite one stays outside every finite bound."""
    return masked(at_least_float32(logprobs) - at_least_float32(base_logprobs), mask)


def masked_ratio(logprobs: Tensor, base_logprobs: Tensor, mask: Tensor | None) -> Tensor:
    """`exp(logprobs - base_logprobs)`, 1 outside the mask."""
    return masked_log_ratio(logprobs, base_logprobs, mask).exp()


def masked_advantages(advantages: Tensor, mask: Tensor) -> Tensor:
    """Advantages [B] or [B, T] as [B, T], 0 outside the mask; without gradient."""
    return masked(check.advantages_per_token(advantages, mask).detach(), mask)


def sequence_advantages(advantages: Tensor, mask: Tensor) -> Tensor:
    """`masked_advantages`, but [B, 1] of [B] advantages: for losses with one value per sequence."""
    per_token = check.advantages_per_token(advantages, mask).detach()
    return masked(per_token, mask) if advantages.ndim == 2 else at_least_float32(per_token)


def dual_clipped(loss: Tensor, advantages: Tensor, dual_clip: float | None) -> Tensor:
    """The loss, at most `-dual_clip * advantages` where the advantages are below 0."""
    check.dual_clip(dual_clip)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def mean_over_tokens(x: Tensor, mask: Tensor) -> Tensor:
    """[B, 1]: the mean of each row of x [B, T], which is 0 outside the mask, over its tokens; 0 for a row of none."""
    return x.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def one_rank(x: Tensor) -> Tensor:
    """The `global_sum` of a batch that lies on one rank: `x` itself."""
    return x


def divide(x: Tensor, total: float | Tensor) -> Tensor:
    """x / total, and 0 with gradient 0 where total is 0."""
    if not isinstance(total, Tensor):
        check.not_negative(total=total)
        return x / total if total > 0 else 0 * x.nan_to_num()
    check.rank("total", total, 0, "(a number or a 0-d tensor)")
    total = total.to(x)
    return torch.where(total > 0, x, 0) / torch.where(total > 0, total, 1)
