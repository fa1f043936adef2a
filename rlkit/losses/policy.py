r"""Policy-gradient losses with one ratio per token, $r_t = \exp(\text{logprobs}_t - \text{old\_logprobs}_t)$.

Only `logprobs` gets a gradient, so `old_logprobs` may be the same tensor. At ratio 1 the gradient of the summed loss is
$-A$ on every trained token, the plain policy gradient.
"""

import torch
from torch import Tensor

from rlkit import _check as check
from rlkit._numerics import dual_clipped, masked, masked_advantages, masked_log_ratio, masked_ratio


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    r"""PPO's clipped surrogate as a loss, with separate bounds and an optional dual clip.

    $$L = \max(-A r,\ -A\, \mathrm{clip}(r, 1 - \epsilon_{low}, 1 + \epsilon_{high}))$$
    and, with `dual_clip` c, $L \leftarrow \min(L, -c A)$ where A < 0.

    PPO, https://arxiv.org/abs/1707.06347 eq. 7; the higher upper bound, DAPO, https://arxiv.org/abs/2503.14476
    section 3.1; the dual clip, https://arxiv.org/abs/1912.09729 eq. 5.

    Choices: the dual clip is off by default (verl: 3).

    Args:
        clip_low, clip_high: the ratio is held within [1 - clip_low, 1 + clip_high]; >= 0.
        dual_clip: c > 1, or None for no dual clip.
    """
    check.per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    check.not_negative(clip_low=clip_low, clip_high=clip_high)
    ratio = masked_ratio(logprobs, old_logprobs, mask)
    advantages = masked_advantages(advantages, mask)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return dual_clipped(torch.maximum(unclipped, clipped), advantages, dual_clip)


def reinforce_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    r"""REINFORCE: minus the advantage times the log-probability, $L = -A\, \text{logprobs}$, without a ratio.

    Williams 1992, https://doi.org/10.1007/BF00992696. Right for one step on a fresh batch; `old_logprobs` is checked
    and not read, so that the losses can be swapped.

    RLOO, ReMax, REINFORCE++ and GPG have this loss and differ in how the advantages are computed.

    Args:
        logprobs: [B, T]; finite within the mask.

    Returns:
        [B, T], to be minimised. Only its gradient has a meaning.
    """
    check.per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    return -masked_advantages(advantages, mask) * masked(logprobs, mask)


gpg_loss = reinforce_loss
"""Alias of `reinforce_loss`: Group Policy Gradient, https://arxiv.org/abs/2504.02546, with `gpg_advantages`."""


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Tensor:
    r"""CISPO: REINFORCE with a clipped importance weight, so that no token loses its gradient to the clip.

    $$L = -\mathrm{sg}(\mathrm{clip}(r, 1 - \epsilon_{low}, 1 + \epsilon_{high}))\, A\, \text{logprobs}$$

    MiniMax-M1, https://arxiv.org/abs/2506.13585 eq. 4 and 5; reduced by `token_mean`.

    Choices: both bounds, as in the equation and in verl. The paper's runs have an upper bound only: `clip_low=1`. TRL
    and ms-swift give that bound as the largest weight, so their epsilon_high of 5 is `clip_high=4` here.

    Args:
        logprobs: [B, T]; finite within the mask.
        clip_low, clip_high: the weight is held within [1 - clip_low, 1 + clip_high]; >= 0.

    Returns:
        [B, T], to be minimised. Only its gradient has a meaning.
    """
    check.per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    check.not_negative(clip_low=clip_low, clip_high=clip_high)
    ratio = masked_ratio(logprobs.detach(), old_logprobs, mask)
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -masked_advantages(advantages, mask) * weight * masked(logprobs, mask)


def gppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    r"""GPPO: the value of PPO's clipped loss, but tokens that are clipped keep a bounded gradient.

    $$L = -\mathrm{sg}(w)\, \frac{r}{\mathrm{sg}(r)}\, A, \quad w = \min(r, 1 + \epsilon_{high}) \text{ where } A > 0,
    \ \max(r, 1 - \epsilon_{low}) \text{ elsewhere}$$

    Klear-Reasoner, https://arxiv.org/abs/2508.07629. The value is `clipped_policy_loss`'s; the gradient is
    $-w A \nabla \text{logprobs}$ on every token.

    Args:
        clip_low, clip_high: the ratio is held within [1 - clip_low, 1 + clip_high]; >= 0.
    """
    check.per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    check.not_negative(clip_low=clip_low, clip_high=clip_high)
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    advantages = masked_advantages(advantages, mask)
    ratio = log_ratio.detach().exp()
    weight = torch.where(advantages > 0, ratio.clamp(max=1 + clip_high), ratio.clamp(min=1 - clip_low))
    return -advantages * weight * (log_ratio - log_ratio.detach()).exp()


def sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Tensor:
    r"""SAPO: a soft gate in place of the clip; the further the ratio is from 1, on either side, the less gradient.

    $$L = -\frac{4}{\tau}\, \sigma(\tau (r - 1))\, A, \quad \tau = \tau_{pos} \text{ where } A > 0,\ \tau_{neg}
    \text{ elsewhere}$$

    The gradient is $-4 p (1 - p)\, r A \nabla \text{logprobs}$ with $p = \sigma(\tau (r - 1))$: at r = 1 the policy
    gradient for every temperature, while the value there is $-2 A / \tau$.

    SAPO, https://arxiv.org/abs/2511.20347 eq. 5 and 6; reduced by `sequence_mean`. A larger temperature closes the gate
    faster; the paper's is larger for negative advantages.

    Args:
        tau_pos: temperature where the advantage is positive; > 0.
        tau_neg: temperature elsewhere; > 0.
    """
    check.per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    check.positive(tau_pos=tau_pos, tau_neg=tau_neg)
    ratio = masked_ratio(logprobs, old_logprobs, mask)
    advantages = masked_advantages(advantages, mask)
    tau = torch.where(advantages > 0, ratio.new_full((), tau_pos), tau_neg)
    return -advantages * (4 / tau) * (tau * (ratio - 1)).sigmoid()
