r"""Estimates of the KL divergence from a reference policy, one value per token.

Expected values and gradients on tokens that the policy itself sampled, with $d = \log \pi - \log \pi_{ref}$ (the tests
enumerate them):

| function | expected value | expected gradient |
|---|---|---|
| `kl_k1` | KL(policy, ref) | 0: nothing is learnt from it in a loss; put it in the reward |
| `kl_k2` | $E[d^2] / 2$ | that of KL(policy, ref) |
| `kl_k3` | KL(policy, ref) | that of KL(ref, policy) |
| `kl_abs` | $E \lvert d \rvert$ | that of the L1 distance between the two distributions |
| `kl_straight_through` | that of the value it is given | that of KL(policy, ref) |
| `kl_k3_weighted` | KL(policy, ref), also off-policy | that of KL(policy, ref), also off-policy |
| `kl_binary` | at most KL(policy, ref) | of KL between "this token" and "another" alone |
| `full_vocabulary_kl` | KL(policy, ref), no sampling | that of KL(policy, ref), no sampling |

"Expected gradient" is that of one token given the tokens before it: no per-token loss sees that a token changes which
prefixes come after it. A KL that is subtracted from the reward (`rlkit.advantages.kl_in_reward`) does.
"""

import torch
from torch import Tensor

from rlkit import _check as check
from rlkit._numerics import masked, masked_log_ratio, masked_ratio
from rlkit.losses._kernels import NO_PROBABILITY, divergence, reverse_kl


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""The log-ratio itself as an estimate of KL(policy || reference): unbiased, and often negative.

    $$k_1 = \text{logprobs} - \text{ref\_logprobs}$$

    http://joschu.net/blog/kl-approx.html.

    On-policy the expected gradient is $E_\pi[\nabla \log \pi] = 0$: in a loss it only adds noise. Its place is the
    reward (`kl_in_reward`), or the value of `kl_straight_through`.

    Returns:
        [B, T].
    """
    check.masked_if_any(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    return masked_log_ratio(logprobs, ref_logprobs, mask)


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Half the squared log-ratio: a biased value with the right gradient of KL(policy || reference).

    $$k_2 = \tfrac{1}{2} (\text{logprobs} - \text{ref\_logprobs})^2$$

    http://joschu.net/blog/kl-approx.html.

    On-policy the expected gradient is $E_\pi[\log(\pi / ref) \nabla \log \pi] = \nabla KL(\pi || ref)$, exactly; the
    value is $E_\pi[\log^2(\pi / ref)] / 2$, equal to the KL near the reference only.

    Returns:
        [B, T], never below 0.
    """
    check.masked_if_any(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    return 0.5 * masked_log_ratio(logprobs, ref_logprobs, mask).square()


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Schulman's k3 estimate of KL(policy || reference) from tokens that the policy sampled; never below 0.

    $$k_3 = e^{d} - 1 - d, \quad d = \text{ref\_logprobs} - \text{logprobs}$$

    http://joschu.net/blog/kl-approx.html; in GRPO's loss, https://arxiv.org/abs/2402.03300 eq. 4.

    The value is unbiased; its gradient is not. Used in a loss on tokens of the policy itself, the expected gradient is
    $E_\pi[(1 - \rho) \nabla \log \pi] = -E_{ref}[\nabla \log \pi]$ with $\rho = ref / \pi$, which is the gradient of
    the other direction, KL(reference || policy). For that of KL(policy || reference), multiply by the ratio
    `exp(logprobs - logprobs.detach())`. The two agree to first order near the reference.

    Choices: a log-ratio beyond +-20 counts as +-20, as everywhere here; verl also bounds the result to +-10, TRL bounds
    nothing.

    Returns:
        [B, T].
    """
    check.masked_if_any(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    d = -masked_log_ratio(logprobs, ref_logprobs, mask)
    return d.expm1() - d


def kl_abs(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""The absolute log-ratio: $\lvert \text{logprobs} - \text{ref\_logprobs} \rvert$, for logging and for the reward.

    The expected value on-policy, $E_\pi \lvert \log(\pi / ref) \rvert$, is at least the KL. The expected gradient is
    $E_\pi[\mathrm{sign}(\log(\pi / ref)) \nabla \log \pi] = \nabla \sum_v \lvert \pi_v - ref_v \rvert$: that of the L1
    distance (twice the total variation), not of a KL. It is 0 at a difference of exactly 0. verl offers it as "abs".

    Returns:
        [B, T], never below 0.
    """
    check.masked_if_any(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    return masked_log_ratio(logprobs, ref_logprobs, mask).abs()


def kl_straight_through(logprobs: Tensor, ref_logprobs: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Any estimate's value with the gradient of `kl_k2`, which is right for KL(policy || reference) on-policy.

    $$\mathrm{sg}(\text{value}) + k_2 - \mathrm{sg}(k_2)$$

    With `kl_k3(logprobs, ref_logprobs, mask)` as the value this is verl's "k3+", with `kl_k1` its "k1+": what is logged
    is an unbiased KL, and what is learnt is $\nabla KL(\pi || ref)$ in expectation.

    Args:
        value: [B, T], the estimate to show; gets no gradient.

    Returns:
        [B, T], equal to `value` to the last bit.
    """
    check.masked_if_any(mask, logprobs=logprobs, ref_logprobs=ref_logprobs, value=value)
    value = masked(value.detach(), mask)
    k2 = kl_k2(logprobs, ref_logprobs, mask)
    return value + (k2 - k2.detach())


def kl_k3_weighted(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""`kl_k3` times the importance ratio: value and gradient of KL(policy || reference), unbiased also off-policy.

    $$r\,(e^{d} - 1 - d), \quad d = \text{ref\_logprobs} - \text{logprobs}, \quad
    r = \exp(\text{logprobs} - \text{old\_logprobs})$$

    DeepSeek-V3.2, https://arxiv.org/abs/2512.02556 section 3.1, "Unbiased KL Estimate".

    For tokens drawn from the old policy, $E_{old}[r\, k_3] = KL(\pi || ref)$ whatever $\pi$ is, so the gradient, which
    also flows through r, is right too; on-policy pass `logprobs.detach()` as `old_logprobs`. The ratio is the token's
    own: that the prefix came from the old policy is not corrected. It is not clipped, as a bound would bring the bias
    back.

    Returns:
        [B, T], never below 0.
    """
    check.masked_if_any(mask, logprobs=logprobs, ref_logprobs=ref_logprobs, old_logprobs=old_logprobs)
    return masked_ratio(logprobs, old_logprobs, mask) * kl_k3(logprobs, ref_logprobs, mask)


def kl_binary(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""KL(policy || reference) of "this token or another one", a bound from below on that of the whole vocabulary.

    $$p \log \frac{p}{q} + (1 - p) \log \frac{1 - p}{1 - q}, \quad p = e^{\text{logprobs}},\
    q = e^{\text{ref\_logprobs}}$$

    DPPO, https://arxiv.org/abs/2602.04879 eq. 14, as a trust region: `dppo_kl_loss`, `flash_reinforce_loss`. It is
    small for rare tokens, whatever their ratio, and needs no logits.

    Choices: 1e-8 is added to both terms of the second quotient, as in DPPO's code: in float32 the probability of a
    token that is all but certain is 1, and the KL to it would be infinite. FlashREINFORCE's code holds p and q within
    [1e-6, 1 - 1e-6] instead.

    Returns:
        [B, T].
    """
    check.masked_if_any(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    log_p = masked(logprobs, mask).clamp(max=0)
    log_q = masked(ref_logprobs.detach(), mask).clamp(max=0)
    rest_p, rest_q = 1e-8 - log_p.expm1(), 1e-8 - log_q.expm1()  # 1 - p and 1 - q
    return log_p.exp() * masked_log_ratio(log_p, log_q, mask) + rest_p * (rest_p / rest_q).log()


def full_vocabulary_kl(
    logits: Tensor, ref_logits: Tensor, mask: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    r"""KL(policy || reference) of the whole next-token distribution at each position, with no shift.

    $$KL = \sum_v \pi_v (\log \pi_v - \log ref_v), \quad \pi = \mathrm{softmax}(\text{logits} / \tau)$$

    Value and gradient are exact for each prefix, $\partial z_v = \pi_v (\log(\pi_v / ref_v) - KL) / \tau$: nothing is
    sampled, so it is the same on-policy and off. `align_with_tokens` moves it to the token that the logits predict.

    A token suppressed (-inf) by the policy, or by both, adds 0. One that the reference alone suppresses would make the
    KL infinite: its reference log-probability counts as -1e4 nats (`reverse_kl_loss` is infinite there). Backward keeps
    one float32 [B, T, V] tensor; there is no second derivative.

    Args:
        logits: [B, T, V] of the policy, any floating dtype.
        ref_logits: [B, T, V] of the reference; gets no gradient.
        mask: bool [B, T], aligned with the logits, or None for every position.
        temperature: of the sampler, > 0; divides both.

    Returns:
        [B, T], never below 0.
    """
    check.rank("logits", logits, 3, "[B, T, V]")
    check.positive(temperature=temperature)
    if mask is None:
        mask = logits.new_ones(logits.shape[:2], dtype=torch.bool)
    check.per_position(mask, logits=logits, ref_logits=ref_logits)
    return divergence(_reverse_kl, logits, ref_logits, mask, temperature)


def _reverse_kl(policy: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """`reverse_kl` that is finite where the reference alone has a probability of 0."""
    return reverse_kl(policy, reference.clamp(min=NO_PROBABILITY))
