r"""Losses on responses that somebody else wrote, and their share beside a policy loss.

Plain supervised finetuning is `token_mean(-logprobs, mask)`. CHORD mixes it with a policy loss, each reduced by its own
tokens, with a share that falls over the run:

    mu = chord_mu(step, warmup=200, decay=400)
    loss = (1 - mu) * token_mean(policy_loss, mask) + mu * token_mean(chord_phi_loss(expert_logprobs, expert), expert)
"""

import math

from torch import Tensor

from rlkit import _check as check
from rlkit._numerics import masked


def dft_loss(logprobs: Tensor, mask: Tensor) -> Tensor:
    r"""Dynamic finetuning: the negative log-likelihood of each token times its own probability.

    $$L = -\mathrm{sg}(p)\, \log p, \quad p = e^{\text{logprobs}}$$

    DFT, https://arxiv.org/abs/2508.05629: the gradient of supervised finetuning is a policy gradient whose weight 1 / p
    runs away on unlikely tokens; p takes it out. Reduced by `token_mean`.

    Args:
        logprobs: [B, T], of the response to learn.
        mask: bool [B, T], True on its tokens.
    """
    check.per_token(mask, logprobs=logprobs)
    logprobs = masked(logprobs, mask)
    return -logprobs.detach().exp() * logprobs


def chord_phi_loss(logprobs: Tensor, mask: Tensor) -> Tensor:
    r"""CHORD's supervised loss, which learns from tokens that the policy is unsure of.

    $$L = -\mathrm{sg}(p (1 - p))\, \log p, \quad p = e^{\text{logprobs}}$$

    CHORD-phi, https://arxiv.org/abs/2508.11408: tokens that the policy would write anyway teach nothing, and tokens
    that it would never write disrupt it. Reduced by `token_mean`, and mixed with a policy loss: see the module.

    Args:
        logprobs: [B, T], of the expert's response.
        mask: bool [B, T], True on its tokens.
    """
    check.per_token(mask, logprobs=logprobs)
    logprobs = masked(logprobs, mask)
    p = logprobs.detach().exp()
    return -p * (1 - p) * logprobs


def chord_mu(step: float, warmup: float, decay: float, peak: float = 0.9, valley: float = 0.05) -> float:
    r"""CHORD's share of the supervised loss: linearly up to the peak, then down to the valley along half a cosine.

    $$\mu = \mu_{peak} \frac{s}{w} \ (s < w), \quad
    \mu_{valley} + \frac{\mu_{peak} - \mu_{valley}}{2} \Big(1 + \cos \pi \min\Big(\frac{s - w}{d}, 1\Big)\Big)
    \ (s \ge w)$$

    CHORD-mu, https://arxiv.org/abs/2508.11408, as in ms-swift.

    Args:
        step: s, of the run; >= 0.
        warmup: w, steps up to the peak; >= 0.
        decay: d, steps from the peak down to the valley; >= 0.
        peak, valley: in [0, 1].

    Returns:
        mu, in [0, 1].
    """
    check.not_negative(step=step, warmup=warmup, decay=decay)
    check.share(peak=peak, valley=valley)
    if step < warmup:
        return peak * step / warmup
    done = min((step - warmup) / decay, 1) if decay > 0 else 1
    return valley + (peak - valley) * (1 + math.cos(math.pi * done)) / 2
