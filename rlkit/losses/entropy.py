"""The mask of high-entropy tokens."""

import math

import torch
from torch import Tensor

from rlkit._check import check_per_token, fail
from rlkit._numerics import at_least_float32

__all__ = [
    "top_entropy_mask",
]


@torch.no_grad()
def top_entropy_mask(entropy: Tensor, mask: Tensor, share: float = 0.2) -> Tensor:
    r"""The share of a batch's trained tokens that have the highest entropy, the only ones to learn from.

    $$m'_{b,t} = m_{b,t} \wedge (H_{b,t} \ge \tau), \quad \tau \text{ the } (1 - \text{share}) \text{ quantile of } H
    \text{ over the mask}$$

    "Beyond the 80/20 rule", https://arxiv.org/abs/2506.01939 eq. 6 (section 5.1). Its second version and its code
    divide by the tokens kept: give this mask to the reduction, and its count as the total. TRL zeroes the other tokens'
    loss and divides by all tokens: reduce `torch.where(top, loss, 0.0)` with the full mask.

    Of n tokens 1 + floor((n - 1) share) are kept, as with `torch.quantile` in TRL, and all that tie with the last of
    them; of none, none. The quantile is that of the tensors given (the authors' code takes a micro-batch's). For one
    over the whole batch make the mask before the batch is cut into micro-batches and carry it along.

    Args:
        entropy: [B, T], in nats; may hold anything outside the mask. A token of entropy nan counts as outside it.
        share: of the tokens, in (0, 1].

    Returns:
        bool [B, T], within the mask.
    """
    check_per_token(mask, entropy=entropy)
    if not 0 < share <= 1:
        fail("share", share, "a number in (0, 1]")
    if not mask.numel():
        return mask
    mask = mask & ~entropy.isnan()
    entropy = torch.where(mask, at_least_float32(entropy), -torch.inf)
    kept = 1 + ((mask.sum() - 1).double() * share + 1e-6).floor().long()  # 1e-6: 100 * 0.29 is 28.999...
    most = 1 + math.floor((mask.numel() - 1) * share + 1e-6)  # a bound on it that is known on the host
    largest = entropy.flatten().topk(most).values
    return mask & (entropy >= largest.gather(0, (kept - 1).clamp(min=0)[None]))
