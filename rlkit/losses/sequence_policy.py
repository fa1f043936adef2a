r"""Policy-gradient losses with one ratio per sequence, and the mask of sequences that the policy has moved away from.

A sequence is its tokens inside the mask. Each loss repeats a sequence's value on all of its tokens. Only `logprobs`
gets a gradient. At ratio 1 the gradient of the summed loss is $-A$ on every trained token (times the sequence's length
in `luspo_loss`).
"""

import torch
from torch import Tensor

from rlkit import _check as check
from rlkit._numerics import (
    dual_clipped,
    masked,
    masked_advantages,
    masked_log_ratio,
    mean_over_tokens,
    sequence_advantages,
    unbounded_log_ratio,
)
from rlkit.losses.kl import kl_binary
from rlkit.losses.mismatch import sequence_mean_divergence_mask


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
) -> Tensor:
    r"""GSPO: PPO's clipped loss with the geometric mean of the token ratios as the one ratio of a sequence.

    $$L = \max(-A s,\ -A\, \mathrm{clip}(s, 1 - \epsilon_{low}, 1 + \epsilon_{high})), \quad
    s = \exp\Big(\frac{1}{|y|} \sum_t m_t (\text{logprobs}_t - \text{old\_logprobs}_t)\Big)$$

    GSPO, https://arxiv.org/abs/2507.18071 eq. 5 and 7; `sequence_mean` gives the paper's loss. The clips are the
    paper's, of section 5.1: s stays far closer to 1 than a token's ratio.

    Choices: verl's gspo is `gspo_token_loss`, with the same gradient.

    Args:
        advantages: [B]; [B, T] with one value per sequence is the same, for others see `gspo_token_loss`.
        clip_low, clip_high: s is held within [1 - clip_low, 1 + clip_high]; >= 0.
        dual_clip: c > 1, which holds the loss at -c A where A < 0, or None for no dual clip; TRL's delta.

    Returns:
        [B, T], to be minimised: a sequence's value on each of its tokens.
    """
    check.per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    check.not_negative(clip_low=clip_low, clip_high=clip_high)
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    ratio = mean_over_tokens(log_ratio, mask).exp()  # [B, 1]
    advantages = sequence_advantages(advantages, mask)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return masked(dual_clipped(torch.maximum(unclipped, clipped), advantages, dual_clip), mask)


def gspo_token_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
) -> Tensor:
    r"""GSPO-token: the value of GSPO's ratio with each token's own gradient, so that advantages may be per token.

    $$L = \max(-A_t s_t,\ -A_t\, \mathrm{clip}(s_t, 1 - \epsilon_{low}, 1 + \epsilon_{high})), \quad
    s_t = \mathrm{sg}(s)\, \frac{\pi_t}{\mathrm{sg}(\pi_t)}$$

    with s of `gspo_loss`. GSPO, https://arxiv.org/abs/2507.18071 eq. 13 and 14; reduced by `sequence_mean`. With one
    advantage per sequence its values are `gspo_loss`'s, and so is its gradient under any reduction that weighs the
    tokens of a sequence alike.

    Args:
        clip_low, clip_high: s is held within [1 - clip_low, 1 + clip_high]; >= 0.
        dual_clip: as in `gspo_loss`.
    """
    check.per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    check.not_negative(clip_low=clip_low, clip_high=clip_high)
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    sequence_ratio = mean_over_tokens(log_ratio.detach(), mask).exp()  # [B, 1]
    ratio = sequence_ratio * (log_ratio - log_ratio.detach()).exp()
    advantages = masked_advantages(advantages, mask)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return dual_clipped(torch.maximum(unclipped, clipped), advantages, dual_clip)


def luspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 2e-3,
    clip_high: float = 2.5e-3,
) -> Tensor:
    r"""LUSPO: GSPO's loss times the sequence's length, so that a token's gradient does not shrink in a long response.

    $$L = |y| \cdot L_{GSPO}, \quad |y| = \sum_t m_t$$

    LUSPO, https://arxiv.org/abs/2602.05261; `sequence_mean` gives the paper's loss, and the same number is
    `sequence_sum_mean` of `gspo_loss`. The clips are the paper's, of section 5.1.

    Args:
        advantages: [B]; [B, T] with one value per sequence is the same.
        clip_low, clip_high: s is held within [1 - clip_low, 1 + clip_high]; >= 0.

    Returns:
        [B, T], to be minimised: a sequence's value on each of its tokens.
    """
    loss = gspo_loss(logprobs, old_logprobs, advantages, mask, clip_low, clip_high)
    return mask.sum(1, keepdim=True) * loss


def gmpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    log_clip_low: float = 0.4,
    log_clip_high: float = 0.4,
) -> Tensor:
    r"""GMPO: the geometric mean of token ratios that are clipped one by one, in log space.

    $$L = -A \exp\Big(\frac{1}{|y|} \sum_t m_t \ell_t\Big), \quad
    \ell_t = s \min(s \log r_t,\ s\, \mathrm{clip}(\log r_t, -\epsilon_{low}, \epsilon_{high})), \quad
    s = \mathrm{sign}(A)$$

    GMPO, https://arxiv.org/abs/2507.20673; `sequence_mean` gives the paper's loss. The paper's ratios are in
    $(e^{-0.4}, e^{0.4})$. A token is clipped on the side its advantage pushes to, as in PPO; the others of its sequence
    keep their gradient. A token of advantage 0 counts as ratio 1. With advantages per token the side is each token's,
    and `sequence_mean` gives minus the mean advantage times the mean ratio, as in verl.

    Args:
        advantages: [B] or [B, T]; the paper's are [B].
        log_clip_low, log_clip_high: the log-ratio is held within [-log_clip_low, log_clip_high], in nats; >= 0.

    Returns:
        [B, T], to be minimised: a sequence's value on each of its tokens.
    """
    check.per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    check.not_negative(log_clip_low=log_clip_low, log_clip_high=log_clip_high)
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    advantages = masked_advantages(advantages, mask)
    sign = advantages.sign()
    clipped = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-log_clip_low, log_clip_high))
    return -advantages * mean_over_tokens(clipped, mask).exp()


def topr_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    r"""TOPR: REINFORCE in which bad sequences lose weight as they become less likely; good ones keep theirs.

    $$L = -\mathrm{sg}(w)\, A\, \text{logprobs}, \quad w = 1 \text{ where } A \ge 0,\ \min\Big(\prod_t r_t, 1\Big)
    \text{ where } A < 0$$

    Tapered off-policy REINFORCE, https://arxiv.org/abs/2503.14286; `sequence_sum_mean` gives the paper's loss. The
    weight is the whole sequence's probability ratio, a product over tokens and no geometric mean: a drift of 0.01 nats
    per token over 1000 tokens leaves a weight of 5e-5. With advantages per token the case is each token's.

    Args:
        logprobs: [B, T]; finite within the mask.
        old_logprobs: [B, T], under the weights the batch was sampled with, however old.
        advantages: [B] or [B, T]; the paper's are the reward minus a constant baseline.

    Returns:
        [B, T], to be minimised. Only its gradient has a meaning.
    """
    check.per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    log_ratio = masked_log_ratio(logprobs.detach(), old_logprobs, mask)
    ratio = log_ratio.sum(1, keepdim=True).clamp(max=0).exp()  # [B, 1], of the whole sequence, 1 at the most
    advantages = masked_advantages(advantages, mask)
    weight = torch.where(advantages < 0, ratio, 1)
    return -advantages * weight * masked(logprobs, mask)


def sequence_sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Tensor:
    r"""SAPO's soft gate on the one ratio of a sequence, that of `gspo_loss`.

    $$L = -\frac{4}{\tau}\, \sigma(\tau (s - 1))\, A, \quad \tau = \tau_{pos} \text{ where } A > 0,\ \tau_{neg}
    \text{ elsewhere}, \quad s = \exp\Big(\frac{1}{|y|} \sum_t m_t (\text{logprobs}_t - \text{old\_logprobs}_t)\Big)$$

    The gate of SAPO, https://arxiv.org/abs/2511.20347 eq. 5 and 6, with the ratio of GSPO,
    https://arxiv.org/abs/2507.18071 eq. 7; TRL's importance_sampling_level "sequence" with loss type "sapo". For a
    ratio per token see `sapo_loss`.

    Args:
        advantages: [B]; [B, T] with one value per sequence is the same.
        tau_pos: temperature where the advantage is positive; > 0.
        tau_neg: temperature elsewhere; > 0.

    Returns:
        [B, T], to be minimised: a sequence's value on each of its tokens.
    """
    check.per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    check.positive(tau_pos=tau_pos, tau_neg=tau_neg)
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    ratio = mean_over_tokens(log_ratio, mask).exp()  # [B, 1]
    advantages = sequence_advantages(advantages, mask)
    tau = torch.where(advantages > 0, ratio.new_full((), tau_pos), tau_neg)
    return masked(-advantages * (4 / tau) * (tau * (ratio - 1)).sigmoid(), mask)


def flash_reinforce_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, high: float = 3e-3
) -> Tensor:
    r"""FlashREINFORCE: REINFORCE with each token's raw importance weight, on the sequences that are still close.

    $$L = -[\bar D \le \delta]\, \mathrm{sg}(r_t)\, A\, \text{logprobs}_t, \quad
    \bar D = \frac{1}{|y|} \sum_t m_t \Big(\mu_t \log \frac{\mu_t}{\pi_t} + (1 - \mu_t) \log \frac{1 - \mu_t}{1 -
    \pi_t}\Big)$$
    with $\mu = e^{\text{old\_logprobs}}$, $\pi = e^{\text{logprobs}}$ and $r = \pi / \mu$. $\bar D$ is the mean of
    `kl_binary` over the sequence. Nothing is clipped.

    Hu et al. 2026, https://yifanzhang-pro.github.io/FlashREINFORCE/FlashREINFORCE.pdf; `sequence_mean` over all
    sequences, dropped ones too, gives the paper's loss. Its advantages are rewards minus the batch's mean, with one
    response per prompt: `dr_grpo_advantages` with one group id for all.

    Args:
        logprobs: [B, T]; finite within the mask.
        old_logprobs: [B, T], the sampler's.
        high: delta, the largest mean divergence to learn from, in nats per token; >= 0; math.inf for all.

    Returns:
        [B, T], to be minimised. Only its gradient has a meaning.
    """
    check.per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    divergence = kl_binary(old_logprobs.detach(), logprobs.detach(), mask)
    near = sequence_mean_divergence_mask(divergence, mask, high)
    ratio = masked_log_ratio(logprobs.detach(), old_logprobs, near).exp()
    return -masked_advantages(advantages, near) * ratio * masked(logprobs, near)


@torch.no_grad()
def off_policy_sequence_mask(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, high: float
) -> Tensor:
    r"""The mask without the bad sequences that the policy has already moved away from, which only destabilise training.

    $$m'_{b,t} = m_{b,t} \wedge \neg\Big(A_{b,t} < 0 \wedge \frac{1}{|y|} \sum_t m_t (\text{old\_logprobs}_t -
    \text{logprobs}_t) > \delta\Big)$$

    DeepSeek-V3.2, https://arxiv.org/abs/2512.02556 eq. 9. The mean is an estimate of KL(old || policy) with its sign:
    a sequence that became likelier is never dropped. The report gives no delta; TRL suggests 0.5, slime has 1e-4.

    The paper zeroes the loss of dropped sequences and still divides by all tokens: reduce `torch.where(keep, loss, 0)`
    with the full mask. Give the sampler's log-probabilities as `old_logprobs` to count its mismatch too, as the report
    and TRL do.

    Args:
        advantages: [B] or [B, T]; of the latter only a sequence's negative tokens are dropped.
        high: the largest mean drift to keep, in nats per token; >= 0.

    Returns:
        bool [B, T], within the mask.
    """
    check.per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    check.not_negative(high=high)
    drift = mean_over_tokens(unbounded_log_ratio(old_logprobs, logprobs, mask), mask)
    negative = check.advantages_per_token(advantages, mask) < 0
    return mask & ~(negative & (drift > high))
