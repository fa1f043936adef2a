"""Policy-gradient losses with a trust region other than PPO's ratio clip, one value per token.

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
    r"""Clip-Cov: PPO's loss without a few random tokens of large covariance, which are those that lower entropy most.

    $$L_t = 0 \ (t \in I), \quad L_t = \max(-r_t A_t,\ -\mathrm{clip}(r_t, 1 - \epsilon_{low}, 1 + \epsilon_{high}) A_t)
    \ (t \notin I)$$
    where I is a random draw of max(floor(share N), 1) of the candidates, or all of them if there are fewer. Candidates
    are the tokens with $\omega_{low} < c_t < \omega_{high}$, $c_t = (\text{logprobs}_t - \overline{\text{logprobs}})
    (A_t - \bar A)$. Means are over the N tokens of the mask.

    The entropy mechanism of RL, https://arxiv.org/abs/2505.22617 section 4, as in the authors' code and in verl.

    **It varies with the split**: means, N and the draw are taken over the tokens of this call, so the loss of a batch
    is not the sum of the losses of its micro-batches (nor is it in other libraries). Each micro-batch drops at least
    one token.

    Choices: as in the authors' code, a token that PPO clips is no candidate. The default clip is that of the authors'
    runs (a ratio in [0, 2]); verl's default is 0.2. The random numbers are an argument, so that the function is pure;
    other libraries draw them inside.

    Args:
        uniform: [B, T], `torch.rand(logprobs.shape, generator=...)`: candidates with the smallest values are drawn.
        clip_low, clip_high: the ratio is held within [1 - clip_low, 1 + clip_high]; >= 0.
        cov_low, cov_high: the covariance of a candidate lies between these; cov_high > cov_low.
        share: the share of tokens to drop, in [0, 1]; 0 drops none.

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
    r"""KL-Cov: the unclipped surrogate, with a KL penalty on tokens of largest covariance, which lower entropy most.

    $$L_t = -r_t A_t + \beta\, [t \in I]\, |\log r_t|$$
    where I is the max(floor(share N), 1) of the N tokens with the largest $c_t = (\text{logprobs}_t -
    \overline{\text{logprobs}}) (A_t - \bar A)$. Means are over the N tokens of the mask.

    The entropy mechanism of RL, https://arxiv.org/abs/2505.22617 section 4, as in the authors' code and in verl.

    **It varies with the split**: means, N and the choice of tokens are those of this call, so the loss of a batch is
    not the sum of the losses of its micro-batches (nor is it in other libraries). Each micro-batch penalises at least
    one token.

    Choices: the penalty is the absolute log-ratio, as in the authors' code; the paper writes KL(old || new). Its
    gradient is 0 at ratio 1, so it has an effect from the second step on a batch. There is no ratio clip. The default
    share is verl's, and the authors' for 32B models; for 7B they use 0.002. The default coefficient is the authors';
    verl's configuration has 0.1. Among tokens with equal covariances the choice is undefined.

    Args:
        share: the share of tokens to penalise, in [0, 1]; 0 penalises none.
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
    variation of "this token or another one". A ratio clip restricts rare tokens, whose ratios become large, more than
    frequent ones; this loss bounds the change of probability instead.

    Rethinking the trust region, https://arxiv.org/abs/2602.04879 eq. 12 and 13, its appendix C for the deltas.

    Choices: the paper's trust region is around the sampler's policy; pass `rollout_logprobs` as `old_logprobs` for it
    (the authors' code also has the other one, "recompute"). The bound on the ratio, off by default, limits the weight
    of a token and leaves its gradient direction; verl has 20 in its code, 3 in its configuration and 10,000 in its
    example, and the paper (section 5.4) finds that a small bound hurts. The value is the surrogate; verl's value is
    multiplied by the log-probability and has the same gradient.

    Args:
        old_logprobs: [B, T], under the weights the batch was sampled with, or the sampler's.
        delta_low, delta_high: how much probability a token may lose, and gain; >= 0.
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

    Direct Reward Optimisation, https://arxiv.org/abs/2405.19107, in the form of Tinker and verl. There is no importance
    weight: the data may be off-policy, and a token's log-ratio is pulled towards A / beta.

    Choices: this is **the paper's DRO-V for a sequence of one token only**. There the squared error $\frac{1}{2} (r - V
    - \tau \log(\pi / \pi_{ref}))^2$ has the log-ratio of the whole response, and V is learned as well; with A = r - V
    and beta = tau its policy gradient is tau times this one. Tinker and verl square the log-ratio of each token, as
    here. Advantages are the soft advantages of that equation. The default coefficient is that of Tinker's example; verl
    has no default.

    Args:
        old_logprobs: [B, T], of the policy to stay close to: the reference, or the policy that sampled.
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
    r"""VESPO: REINFORCE with a smooth weight of the sequence's ratio, which falls to 0 for small and for large ratios.

    $$L_t = -\mathrm{sg}(\phi(W))\, A\, \text{logprobs}_t, \quad \phi(W) = W^k e^{\lambda (1 - W)}, \quad
    W = \prod_t \exp(\text{logprobs}_t - \text{old\_logprobs}_t)$$
    with k and lambda by the sign of A. $\phi(1) = 1$, and $\phi$ is largest at W = k / lambda.

    VESPO, https://arxiv.org/abs/2602.10693 eq. 20 (section 3.5; c1 is k, c2 is lambda), as in the authors' code and in
    TRL. W has no length normalisation.

    Choices: to include the sampler's mismatch in W, pass `rollout_logprobs` as `old_logprobs`; other libraries multiply
    W by TIS weights. The sign of A is taken per token, as in TRL (the authors read the first column; with one advantage
    per sequence this is the same). A = 0 counts as positive. log W is clamped to [-20, 20] and log phi to at most 20.

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
    k = torch.where(advantages < 0, k_neg, k_pos)
    lam = torch.where(advantages < 0, lambda_neg, lambda_pos)
    phi = (k * log_w + lam * (1 - log_w.exp())).clamp(max=LOG_RATIO_LIMIT).exp()
    return -phi * advantages * _bounded_logprobs(log_ratio, old_logprobs, mask)


def m2po_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, high: float = 0.04) -> Tensor:
    r"""M2PO: the unclipped surrogate without the tokens that bring the second moment of the log-ratios above a bound.

    $$L_t = -M_t\, r_t A_t, \quad \frac{1}{|K|} \sum_{t \in K} (\log r_t)^2 \le \tau$$
    over the kept tokens K ($M_t = 1$) among those that move away from the old policy: A > 0 and r > 1, or A < 0 and
    r < 1. Of these, the tokens with the largest $(\log r_t)^2$ are dropped (M = 0) until the bound holds; tokens that
    tie are dropped together. All other tokens have M = 1.

    Second-moment trust policy optimisation, https://arxiv.org/abs/2510.01161, its algorithm 1, for data that is many
    updates old; `token_mean` over all tokens gives the paper's loss.

    **It varies with the split**: the moment is that of the tokens of this call, so the loss of a batch is not the sum
    of the losses of its micro-batches.

    Choices: the mask is the paper's. The authors' code uses the last kept $|\log r|$ as the bounds of PPO's clip, which
    are at least 0.3 below and 0.5 above.

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

    The count depends on the mask, so take the top k with an upper bound for k and keep the first `count` of them, which
    avoids a device sync.
    """
    check.share(share=share)
    most = min(int(share * keys.numel()) + 1, keys.numel())
    count = (mask.sum().double() * share).floor().clamp(min=1 if share > 0 else 0)
    places = keys.flatten().topk(most, largest=False).indices
    chosen = torch.arange(most, device=keys.device) < count
    return torch.zeros_like(mask).flatten().scatter(0, places, chosen).view(mask.shape)
