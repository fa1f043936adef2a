"""Entropy: the mask of tokens that have much of it, and the coefficient of a bonus for it.

The bonus itself is one line: `token_mean(policy_loss - entropy_coef * entropy, mask)`, with the entropy of
`token_entropy` or `linear_logprobs`, aligned with the tokens.
"""

import math

import torch
from torch import Tensor

from rlkit import _check as check
from rlkit._numerics import at_least_float32


@torch.no_grad()
def top_entropy_mask(entropy: Tensor, mask: Tensor, share: float = 0.2) -> Tensor:
    r"""Mask of the trained tokens with the highest entropy, so that only these are trained on.

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
    check.per_token(mask, entropy=entropy)
    if not 0 < share <= 1:
        check.fail("share", share, "a number in (0, 1]")
    if not mask.numel():
        return mask
    mask = mask & ~entropy.isnan()
    entropy = torch.where(mask, at_least_float32(entropy), -torch.inf)
    kept = 1 + ((mask.sum() - 1).double() * share + 1e-6).floor().long()  # 1e-6: 100 * 0.29 is 28.999...
    most = 1 + math.floor((mask.numel() - 1) * share + 1e-6)  # at least `kept`, without a device sync
    largest = entropy.flatten().topk(most).values
    return mask & (entropy >= largest.gather(0, (kept - 1).clamp(min=0)[None]))


def adaptive_entropy_coef(
    entropy_coef: float, entropy: float, target: float, step: float = 0.005, low: float = 0.0, high: float = 1.0
) -> float:
    r"""The coefficient of an entropy bonus, one step up while the entropy is at most its target, else one down.

    $$c' = \mathrm{clip}(c + \Delta, low, high) \text{ where } H \le H^*, \quad
    \mathrm{clip}(c - \Delta, low, high) \text{ elsewhere}$$

    Skywork-OR1's adaptive entropy control, https://arxiv.org/abs/2505.22312. There, and in TRL, the bonus is used only
    while the entropy is at most the target: `c if entropy <= target else 0.0`.

    Args:
        entropy_coef: the present coefficient.
        entropy: the mean over all tokens of the last batch, in nats.
        target: in nats.
        step: Delta, >= 0.
        low, high: the coefficient is held within [low, high].

    Returns:
        The coefficient from here on.
    """
    check.not_negative(step=step, low=low)
    if not low <= high:
        check.fail("high", high, f"a number >= low, which is {low}")
    moved = entropy_coef + step if entropy <= target else entropy_coef - step
    return min(max(moved, low), high)
