"""Policy-gradient losses beside PPO's clip whose ratios are per token, and the mask of high-entropy tokens.

In all of them: `cost` is -A inside the mask and 0 outside, only `logprobs` gets a gradient, and at ratio 1 the gradient
of the summed loss is -A on every trained token, the plain policy gradient.
"""

import math

import torch
from torch import Tensor

from rlkit.losses._check import check_not_negative, check_per_token, check_positive, fail
from rlkit.losses._numerics import at_least_float32, choose, masked, masked_cost, masked_log_ratio


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Tensor:
    r"""CISPO: REINFORCE with a clipped importance weight, so that no token loses its gradient to the clip.

    $$L = -\mathrm{sg}(\mathrm{clip}(r, 1 - \epsilon_{low}, 1 + \epsilon_{high}))\, A\, \text{logprobs}, \quad
    r = \exp(\text{logprobs} - \text{old\_logprobs})$$

    MiniMax-M1, https://arxiv.org/abs/2506.13585 eq. 4 and 5; reduced by `token_mean`.

    Choices: both bounds, as in the equation and in verl. The paper's runs bind from above only: `clip_low=1` (or more)
    puts the lower bound at 0, where no ratio reaches it. TRL and ms-swift have that form and take the largest weight
    itself, so their epsilon_high of 5 is `clip_high=4` here.

    Args:
        logprobs: [B, T], of the policy being trained; finite within the mask.
        old_logprobs: [B, T], under the weights the batch was sampled with.
        advantages: [B] or [B, T].
        mask: bool [B, T], True on trained tokens.
        clip_low: the weight's lower bound is 1 - clip_low; >= 0.
        clip_high: the weight's upper bound is 1 + clip_high; >= 0.

    Returns:
        [B, T], to be minimised; 0, with gradient 0, outside the mask. Only its gradient means something.

    Raises:
        ValueError: for a wrong rank, shape or dtype, or a negative clip.
    """
    check_per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    check_not_negative(clip_low=clip_low, clip_high=clip_high)
    ratio = masked_log_ratio(logprobs.detach(), old_logprobs.detach(), mask).exp()
    return masked_cost(advantages, mask) * ratio.clamp(1 - clip_low, 1 + clip_high) * _masked(logprobs, mask)


def gppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    r"""GPPO: PPO's clipped loss in value, with a bounded gradient in place of none where the clip binds.

    $$L = -\mathrm{sg}(w)\, \frac{r}{\mathrm{sg}(r)}\, A, \quad w = \min(r, 1 + \epsilon_{high}) \text{ where } A > 0,
    \ \max(r, 1 - \epsilon_{low}) \text{ elsewhere}$$

    Klear-Reasoner, https://arxiv.org/abs/2508.07629. The value is `clipped_policy_loss`'s; the gradient is
    $-w A \nabla \text{logprobs}$ on every token. A log-ratio beyond +-20 gets gradient 0.

    Args:
        logprobs: [B, T], of the policy being trained.
        old_logprobs: [B, T], under the weights the batch was sampled with.
        advantages: [B] or [B, T].
        mask: bool [B, T], True on trained tokens.
        clip_low: the ratio's lower bound is 1 - clip_low; >= 0.
        clip_high: the ratio's upper bound is 1 + clip_high; >= 0.

    Returns:
        [B, T], to be minimised; 0, with gradient 0, outside the mask.

    Raises:
        ValueError: for a wrong rank, shape or dtype, or a negative clip.
    """
    check_per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    check_not_negative(clip_low=clip_low, clip_high=clip_high)
    cost = masked_cost(advantages, mask)
    log_ratio = masked_log_ratio(logprobs, old_logprobs.detach(), mask)
    ratio = log_ratio.detach().exp()
    weight = choose(cost < 0, ratio.clamp(max=1 + clip_high), ratio.clamp(min=1 - clip_low))
    return cost * weight * (log_ratio - log_ratio.detach()).exp()


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
    faster; the paper's is larger for negative advantages. A log-ratio beyond +-20 gets gradient 0.

    Args:
        logprobs: [B, T], of the policy being trained.
        old_logprobs: [B, T], under the weights the batch was sampled with.
        advantages: [B] or [B, T].
        mask: bool [B, T], True on trained tokens.
        tau_pos: temperature where the advantage is positive; > 0.
        tau_neg: temperature elsewhere; > 0.

    Returns:
        [B, T], to be minimised; 0, with gradient 0, outside the mask.

    Raises:
        ValueError: for a wrong rank, shape or dtype, or a temperature that is not positive.
    """
    check_per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    check_positive(tau_pos=tau_pos, tau_neg=tau_neg)
    cost = masked_cost(advantages, mask)
    ratio = masked_log_ratio(logprobs, old_logprobs.detach(), mask).exp()
    tau = choose(cost < 0, cost.new_full((), tau_pos), cost.new_full((), tau_neg))
    return cost * (4 / tau) * (tau * (ratio - 1)).sigmoid()


def reinforce_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    r"""REINFORCE: minus the advantage times the log-probability, $L = -A\, \text{logprobs}$, without a ratio.

    Williams 1992, https://doi.org/10.1007/BF00992696. Right for one step on a fresh batch; `old_logprobs` is checked
    and not read, so that the losses can be swapped.

    What carries this loss's name in the literature differs in how the advantages are made, before the loss: RLOO and
    ReMax in their baselines, REINFORCE++ in whitening over the batch, GPG (`gpg_loss` is this function) in centring
    by group and scaling by the share of groups that are not all alike.

    Args:
        logprobs: [B, T], of the policy being trained; finite within the mask.
        old_logprobs: [B, T]; not read.
        advantages: [B] or [B, T].
        mask: bool [B, T], True on trained tokens.

    Returns:
        [B, T], to be minimised; 0, with gradient 0, outside the mask. Only its gradient means something.

    Raises:
        ValueError: for a wrong rank, shape or dtype.
    """
    check_per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    return masked_cost(advantages, mask) * _masked(logprobs, mask)


gpg_loss = reinforce_loss
"""Group Policy Gradient, https://arxiv.org/abs/2504.02546: `reinforce_loss` under its name, with GPG's advantages."""


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
        entropy: [B, T], in nats; may hold anything outside the mask.
        mask: bool [B, T], True on trained tokens.
        share: of the tokens, in (0, 1].

    Returns:
        bool [B, T], within the mask.

    Raises:
        ValueError: for a wrong rank, shape or dtype, or a share outside (0, 1].
    """
    check_per_token(mask, entropy=entropy)
    if not 0 < share <= 1:
        fail("share", share, "a number in (0, 1]")
    entropy = at_least_float32(entropy)
    entropy = choose(mask, entropy, entropy.new_full((), -torch.inf))  # below every threshold
    most = min(mask.numel(), 1 + math.floor((mask.numel() - 1) * share + 1e-6))  # 1e-6: 100 * 0.29 is 28.999...
    tokens = mask.sum()
    kept = 1 + ((tokens - 1).double() * share + 1e-6).floor().long()
    largest = torch.cat([entropy.new_full((1,), torch.inf), entropy.flatten().topk(most).values])  # of no token none
    return entropy >= largest.gather(0, torch.where(tokens > 0, kept, 0)[None])


def _masked(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Log-probabilities as float32 at least, 0 outside the mask."""
    return masked(at_least_float32(logprobs), mask)
