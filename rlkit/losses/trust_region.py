"""Policy-gradient losses with another trust region than PPO's ratio clip, one value per token.

Only `logprobs` gets a gradient.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkit import _check as check
from rlkit._numerics import LOG_RATIO_LIMIT, masked, masked_advantages, masked_log_ratio, sequence_advantages
from rlkit.losses.kl import kl_binary


def clip_cov_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    uniform: Tensor,
    clip_low: float = 1.0,
    clip_high: float = 1.0,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    share: float = 0.0002,
) -> Tensor:
    r"""Clip-Cov: PPO's loss without a few random tokens of those whose covariance would cost the most entropy.

    $$L_t = 0 \ (t \in I), \quad L_t = \max(-r_t A_t,\ -\mathrm{clip}(r_t, 1 - \epsilon_{low}, 1 + \epsilon_{high}) A_t)
    \ (t \notin I)$$
    where I is a draw of max(floor(share N), 1) out of the N tokens' candidates, those with $\omega_{low} < c_t <
    \omega_{high}$, $c_t = (\text{logprobs}_t - \overline{\text{logprobs}}) (A_t - \bar A)$; all of them where there are
    fewer. Means are over the N tokens of the mask.

    The entropy mechanism of RL, https://arxiv.org/abs/2505.22617 section 4, as in the authors' code and in verl.

    **It varies with the split**: means, N and the draw are those of the tokens it is given, so the loss of a batch is
    not the sum of its micro-batches' losses (nor is it in peers). Each micro-batch drops one token at least.

    Choices: as in the code, a token that PPO's clip binds already is no candidate. The clip is the authors' runs' (a
    ratio in [0, 2]); verl's default is 0.2. The draw is a tensor, so that the function is pure: peers draw inside.

    Args:
        uniform: [B, T], `torch.rand(logprobs.shape, generator=...)`: candidates with the smallest values are drawn.
        clip_low, clip_high: the ratio is held within [1 - clip_low, 1 + clip_high]; >= 0.
        cov_low, cov_high: candidates have a covariance between them; cov_high > cov_low.
        share: of the tokens, to be dropped; in [0, 1]; 0 drops none.

    Returns:
        [B, T], to be minimised; 0, with gradient 0, on the tokens drawn.
    """
    check.per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs, uniform=uniform)
    check.not_negative(clip_low=clip_low, clip_high=clip_high)
    if not cov_low < cov_high:
        check.fail("cov_high", cov_high, f"a number > cov_low, which is {cov_low}")
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    advantages = masked_advantages(advantages, mask)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    covariance = _covariance(_bounded_logprobs(log_ratio.detach(), old_logprobs, mask), advantages, mask)
    candidates = mask & (clipped <= unclipped) & (covariance > cov_low) & (covariance < cov_high)
    drawn = candidates & _smallest(torch.where(candidates, uniform, math.inf), share, mask)
    return torch.where(drawn, 0, torch.maximum(unclipped, clipped))


def kl_cov_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    share: float = 0.0002,
    kl_coef: float = 1.0,
) -> Tensor:
    r"""KL-Cov: the plain surrogate, with a KL penalty on the few tokens whose covariance costs the most entropy.

    $$L_t = -r_t A_t + \beta\, [t \in I]\, |\log r_t|$$
    where I is the max(floor(share N), 1) of the N tokens with the largest $c_t = (\text{logprobs}_t -
    \overline{\text{logprobs}}) (A_t - \bar A)$. Means are over the N tokens of the mask.

    The entropy mechanism of RL, https://arxiv.org/abs/2505.22617 section 4, as in the authors' code and in verl.

    **It varies with the split**: means, N and the choice are those of the tokens it is given, so the loss of a batch is
    not the sum of its micro-batches' losses (nor is it in peers). Each micro-batch penalises one token at least.

    Choices: the penalty is the absolute log-ratio, as in the code; the paper writes KL(old || new). It has gradient 0
    at ratio 1, so it acts from the second step on a batch. There is no ratio clip. The share is verl's default and the
    authors' for 32B; for 7B they have 0.002. The coefficient is the authors'; verl's configuration has 0.1. Which of
    several tokens with equal covariances is taken is not defined.

    Args:
        share: of the tokens, to be penalised; in [0, 1]; 0 penalises none.
        kl_coef: beta; >= 0.
    """
    check.per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    check.not_negative(kl_coef=kl_coef)
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    advantages = masked_advantages(advantages, mask)
    covariance = _covariance(_bounded_logprobs(log_ratio.detach(), old_logprobs, mask), advantages, mask)
    chosen = mask & _smallest(torch.where(mask, -covariance, math.inf), share, mask)
    penalty = torch.where(chosen, log_ratio.abs(), 0)
    return -advantages * log_ratio.exp() + kl_coef * penalty


def dppo_tv_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    delta_low: float = 0.15,
    delta_high: float = 0.15,
    ratio_high: float = math.inf,
) -> Tensor:
    r"""DPPO with the binary total variation: no gradient for a token that would move further out of the trust region.

    $$L = -M \min(r, \bar r)\, A, \quad M = 0 \text{ where } A > 0,\ \pi - \mu > \delta_{high} \text{ or } A < 0,\
    \mu - \pi > \delta_{low}, \text{ else } 1$$
    with $\pi = e^{\text{logprobs}}$, $\mu = e^{\text{old\_logprobs}}$ and $r = \pi / \mu$. $|\pi - \mu|$ is the total
    variation of "this token or another one". A ratio clip holds back rare tokens, whose ratios are large, and lets go
    of frequent ones; this bounds the probability that moves.

    Rethinking the trust region, https://arxiv.org/abs/2602.04879 eq. 12 and 13, its appendix C for the deltas.

    Choices: the paper's region is around the sampler, so give `rollout_logprobs` as `old_logprobs` for it (the authors'
    code has both and calls the other "recompute"). The bound on the ratio, off by default, holds the weight but not the
    gradient's flow; verl's code falls back to 20, its configuration to 3 and its example to 10,000, and the paper
    (section 5.4) finds that a small one hurts. The value is the surrogate's; verl's is times the log-probability, with
    the same gradient.

    Args:
        old_logprobs: [B, T], under the weights the batch was sampled with, or the sampler's.
        delta_low, delta_high: the most probability that a token may lose, and gain; >= 0.
        ratio_high: the bound on the ratio; > 0; math.inf for none.

    Returns:
        [B, T], to be minimised; 0, with gradient 0, outside the region.
    """
    check.per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    check.not_negative(delta_low=delta_low, delta_high=delta_high)
    ratio = masked_log_ratio(logprobs, old_logprobs, mask).exp()
    advantages = masked_advantages(advantages, mask)
    gain = masked(logprobs.detach(), mask).exp() - masked(old_logprobs.detach(), mask).exp()
    too_high = (advantages > 0) & (gain > delta_high)
    too_low = (advantages < 0) & (gain < -delta_low)
    return torch.where(too_high | too_low, 0, -advantages * _bounded(ratio, ratio_high))


def dppo_kl_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    delta_low: float = 0.05,
    delta_high: float = 0.05,
    ratio_high: float = math.inf,
) -> Tensor:
    r"""DPPO with the binary KL: no gradient for a token that would move further out of the trust region.

    $$L = -M \min(r, \bar r)\, A, \quad M = 0 \text{ where } A > 0,\ r > 1,\ D > \delta_{high} \text{ or } A < 0,\
    r < 1,\ D > \delta_{low}, \text{ else } 1$$
    $$D = \mu \log \frac{\mu}{\pi} + (1 - \mu) \log \frac{1 - \mu}{1 - \pi}$$
    with $\pi = e^{\text{logprobs}}$, $\mu = e^{\text{old\_logprobs}}$ and $r = \pi / \mu$: the KL of "this token or
    another one", sampler first.

    Rethinking the trust region, https://arxiv.org/abs/2602.04879 eq. 12 and 14, its appendix C for the deltas.

    Choices: as in `dppo_tv_loss`; D is `kl_binary`.

    Args:
        old_logprobs: [B, T], under the weights the batch was sampled with, or the sampler's.
        delta_low, delta_high: the largest KL, in nats, at which a token may become less likely still, and likelier
            still; >= 0.
        ratio_high: the bound on the ratio; > 0; math.inf for none.

    Returns:
        [B, T], to be minimised; 0, with gradient 0, outside the region.
    """
    check.per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    check.not_negative(delta_low=delta_low, delta_high=delta_high)
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    advantages = masked_advantages(advantages, mask)
    kl = kl_binary(old_logprobs.detach(), logprobs.detach(), mask)
    too_high = (advantages > 0) & (log_ratio > 0) & (kl > delta_high)
    too_low = (advantages < 0) & (log_ratio < 0) & (kl > delta_low)
    return torch.where(too_high | too_low, 0, -advantages * _bounded(log_ratio.exp(), ratio_high))


def dro_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, kl_coef: float = 0.05) -> Tensor:
    r"""DRO, token by token: the policy gradient with a quadratic penalty on the log-ratio in place of a clip.

    $$L = -A\, \text{logprobs} + \frac{\beta}{2} (\text{logprobs} - \text{old\_logprobs})^2$$

    Direct Reward Optimisation, https://arxiv.org/abs/2405.19107, in the form of Tinker and verl. No importance weight:
    the data may be off-policy, and a token's log-ratio is drawn to A / beta.

    Choices: this is **the paper's DRO-V for a sequence of one token only**. There the squared error
    $\frac{1}{2} (r - V - \tau \log(\pi / \pi_{ref}))^2$ has the log-ratio of the whole answer, and V is learned beside
    it; with A = r - V and beta = tau its policy gradient is tau times this one. Both peers square each token's
    log-ratio. Advantages are the soft ones of that equation. The coefficient is Tinker's example's; verl has no
    default.

    Args:
        old_logprobs: [B, T], of the policy to stay near: the reference, or the one that sampled.
        kl_coef: beta, the strength of the penalty; > 0.
    """
    check.per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    check.positive(kl_coef=kl_coef)
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    advantages = masked_advantages(advantages, mask)
    return -advantages * _bounded_logprobs(log_ratio, old_logprobs, mask) + kl_coef / 2 * log_ratio.square()


def vespo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Tensor:
    r"""VESPO: REINFORCE under a smooth weight of the whole sequence's ratio, which dies out on both sides of it.

    $$L_t = -\mathrm{sg}(\phi(W))\, A\, \text{logprobs}_t, \quad \phi(W) = W^k e^{\lambda (1 - W)}, \quad
    W = \prod_t \exp(\text{logprobs}_t - \text{old\_logprobs}_t)$$
    with k and lambda by the sign of A. $\phi(1) = 1$, and $\phi$ is largest at W = k / lambda.

    VESPO, https://arxiv.org/abs/2602.10693 eq. 20 (section 3.5; c1 is k, c2 is lambda), as in the authors' code and in
    TRL. W has no length normalisation.

    Choices: pass `rollout_logprobs` as `old_logprobs` for the sampler's mismatch to be in W; peers multiply TIS weights
    into it. The sign is each advantage's own, as in TRL (the authors read the first column's; with one advantage a
    sequence it is the same). A = 0 counts as positive. log W and log phi are held within 20 of 0 from above, log W
    from below too: W near 0 has a weight of next to nothing there.

    Args:
        old_logprobs: [B, T], under the weights the batch was sampled with, or the sampler's.
        k_pos, lambda_pos: power and decay where A >= 0; both >= 0.
        k_neg, lambda_neg: power and decay where A < 0; both >= 0.

    Returns:
        [B, T], to be minimised. Only its gradient has a meaning.
    """
    check.per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    check.not_negative(k_pos=k_pos, lambda_pos=lambda_pos, k_neg=k_neg, lambda_neg=lambda_neg)
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    advantages = sequence_advantages(advantages, mask)
    log_w = log_ratio.detach().sum(1, keepdim=True).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)  # [B, 1], as phi
    phi_pos = (k_pos * log_w + lambda_pos * (1 - log_w.exp())).clamp(max=LOG_RATIO_LIMIT).exp()
    phi_neg = (k_neg * log_w + lambda_neg * (1 - log_w.exp())).clamp(max=LOG_RATIO_LIMIT).exp()
    phi = torch.where(advantages < 0, phi_neg, phi_pos)
    return -phi * advantages * _bounded_logprobs(log_ratio, old_logprobs, mask)


def m2po_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, high: float = 0.04) -> Tensor:
    r"""M2PO: the plain surrogate without the few tokens that bring the second moment of the log-ratios above a bound.

    $$L_t = -M_t\, r_t A_t, \quad \frac{1}{|K|} \sum_{t \in K} (\log r_t)^2 \le \tau$$
    over the tokens K that still count ($M_t = 1$) of those that move away: A > 0 and r > 1, or A < 0 and r < 1. M is 0
    on as many of the largest $(\log r_t)^2$ of those as it takes, with all that tie with them, and 1 on other tokens.

    Second-moment trust policy optimisation, https://arxiv.org/abs/2510.01161, its algorithm 1, for data that is many
    updates old; `token_mean` over all tokens gives the paper's loss.

    **It varies with the split**: the moment is that of the tokens it is given, so the loss of a batch is not the sum of
    its micro-batches' losses.

    Choices: the mask of the paper. The authors' code turns the last kept $|\log r|$ into the bounds of PPO's clip, and
    never clips tighter than 0.3 below and 0.5 above.

    Args:
        old_logprobs: [B, T], of the policy that sampled.
        high: tau, the largest second moment; >= 0; math.inf for the plain surrogate.

    Returns:
        [B, T], to be minimised; 0, with gradient 0, on the tokens dropped.
    """
    check.per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    check.not_negative(high=high)
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    advantages = masked_advantages(advantages, mask)
    away = advantages * log_ratio.detach() > 0
    squares = torch.where(away, log_ratio.detach().square(), math.inf)
    ascending = squares.flatten().sort().values
    moments = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=squares.device)
    kept = (moments <= high).sum()
    smallest_dropped = F.pad(ascending, (0, 1), value=math.inf).gather(0, kept[None])
    return torch.where(away & (squares >= smallest_dropped), 0, -advantages * log_ratio.exp())


def _bounded_logprobs(log_ratio: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """[B, T]: logprobs, no further from old_logprobs than the limit of a log-ratio; 0 outside the mask."""
    return masked(old_logprobs.detach(), mask) + log_ratio


def _bounded(ratio: Tensor, ratio_high: float) -> Tensor:
    """min(ratio, ratio_high); above the bound with the gradient of ratio_high * log(ratio)."""
    check.positive(ratio_high=ratio_high)
    return ratio * (ratio_high / ratio.detach()).clamp(max=1)


def _covariance(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """[B, T]: each token's (logprob - mean) times (advantage - mean), means over the mask; both are 0 outside it."""
    count = mask.sum().clamp(min=1)
    return (logprobs - logprobs.sum() / count) * (advantages - advantages.sum() / count)


def _smallest(keys: Tensor, share: float, mask: Tensor) -> Tensor:
    """bool [B, T]: the smallest of the keys, as many as a share of the mask's tokens, one at least if the share is > 0.

    How many that is, is not known on the host: the top k of a share of all elements are in order, a few of them count.
    """
    check.share(share=share)
    most = min(int(share * keys.numel()) + 1, keys.numel())
    count = (mask.sum().double() * share).floor().clamp(min=1 if share > 0 else 0)
    places = keys.flatten().topk(most, largest=False).indices
    chosen = torch.arange(most, device=keys.device) < count
    return torch.zeros_like(mask).flatten().scatter(0, places, chosen).view(mask.shape)
