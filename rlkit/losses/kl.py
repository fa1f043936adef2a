r"""Estimates of the KL divergence from a reference policy, one value per token.

What each is worth on tokens that the policy itself sampled, with $d = \log \pi - \log \pi_{ref}$ (the tests
enumerate it):

| function | expected value | expected gradient |
|---|---|---|
| `kl_k1` | KL(policy, ref) | 0: nothing is learnt from it in a loss; put it in the reward |
| `kl_k2` | $E[d^2] / 2$ | that of KL(policy, ref) |
| `kl_k3` | KL(policy, ref) | that of KL(ref, policy) |
| `kl_abs` | $E \lvert d \rvert$ | that of the L1 distance between the two distributions |
| `kl_straight_through` | that of the value it is given | that of KL(policy, ref) |
| `kl_k3_weighted` | KL(policy, ref), also off-policy | that of KL(policy, ref), also off-policy |
| `full_vocabulary_kl` | KL(policy, ref), no sampling | that of KL(policy, ref), no sampling |

"Expected gradient" is that of one token given the tokens before it: no per-token loss sees that a token changes which
prefixes come after it. A KL taken off the reward (`rlkit.advantages.kl_in_reward`) does.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlkit.losses._check import (
    check_every_token,
    check_float,
    check_mask,
    check_per_token,
    check_positive,
    check_rank,
    check_shape,
)
from rlkit.losses._numerics import at_least_float32, masked, masked_log_ratio

_NO_PROBABILITY = -1e4  # stands for a log-probability of -inf where it is multiplied: exp of it is 0 even in float64


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""The log-ratio itself as an estimate of KL(policy || reference): unbiased, and often negative.

    $$k_1 = \text{logprobs} - \text{ref\_logprobs}$$

    http://joschu.net/blog/kl-approx.html.

    On-policy the expected gradient is $E_\pi[\nabla \log \pi] = 0$: in a loss it only adds noise. Its place is the
    reward (`kl_in_reward`), or the value of `kl_straight_through`. A difference beyond +-20 counts as +-20 and gets
    gradient 0, as in `clipped_policy_loss`. `ref_logprobs` gets no gradient.

    Args:
        logprobs: [B, T], of the policy.
        ref_logprobs: [B, T], of the reference, for the same tokens.
        mask: bool [B, T], or None for every token.

    Returns:
        [B, T]; exactly 0, with gradient 0, outside the mask whatever the inputs hold there.

    Raises:
        ValueError: for a wrong rank, shape or dtype.
    """
    _check(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    return masked_log_ratio(logprobs, ref_logprobs.detach(), mask)


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Half the squared log-ratio: a biased value with the right gradient of KL(policy || reference).

    $$k_2 = \tfrac{1}{2} (\text{logprobs} - \text{ref\_logprobs})^2$$

    http://joschu.net/blog/kl-approx.html.

    On-policy the expected gradient is $E_\pi[\log(\pi / ref) \nabla \log \pi] = \nabla KL(\pi || ref)$, exactly; the
    value is $E_\pi[\log^2(\pi / ref)] / 2$, equal to the KL near the reference only. A difference beyond +-20 counts as
    +-20 and gets gradient 0. `ref_logprobs` gets no gradient.

    Args:
        logprobs: [B, T], of the policy.
        ref_logprobs: [B, T], of the reference, for the same tokens.
        mask: bool [B, T], or None for every token.

    Returns:
        [B, T], never below 0; exactly 0, with gradient 0, outside the mask whatever the inputs hold there.

    Raises:
        ValueError: for a wrong rank, shape or dtype.
    """
    return 0.5 * kl_k1(logprobs, ref_logprobs, mask).square()


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Schulman's k3 estimate of KL(policy || reference) from tokens that the policy sampled; never below 0.

    $$k_3 = e^{d} - 1 - d, \quad d = \text{ref\_logprobs} - \text{logprobs}$$

    http://joschu.net/blog/kl-approx.html; in GRPO's loss, https://arxiv.org/abs/2402.03300 eq. 4.

    The value is unbiased; its gradient is not. Used in a loss on tokens of the policy itself, the expected gradient is
    $E_\pi[(1 - \rho) \nabla \log \pi] = -E_{ref}[\nabla \log \pi]$ with $\rho = ref / \pi$, which is the gradient of
    the other direction, KL(reference || policy). For that of KL(policy || reference), multiply by the ratio
    `exp(logprobs - logprobs.detach())`. The two agree to first order near the reference.

    A difference beyond +-20 counts as +-20 and gets gradient 0, as in `clipped_policy_loss`. verl also bounds the
    result to +-10, TRL bounds nothing. `ref_logprobs` gets no gradient.

    Args:
        logprobs: [B, T], of the policy.
        ref_logprobs: [B, T], of the reference, for the same tokens.
        mask: bool [B, T], or None for every token.

    Returns:
        [B, T]; exactly 0, with gradient 0, outside the mask whatever the inputs hold there.

    Raises:
        ValueError: for a wrong rank, shape or dtype.
    """
    _check(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    log_ratio = masked_log_ratio(ref_logprobs.detach(), logprobs, mask)
    return log_ratio.expm1() - log_ratio


def kl_abs(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""The absolute log-ratio: $\lvert \text{logprobs} - \text{ref\_logprobs} \rvert$, for logging and for the reward.

    The expected value on-policy, $E_\pi \lvert \log(\pi / ref) \rvert$, is at least the KL. The expected gradient is
    $E_\pi[\mathrm{sign}(\log(\pi / ref)) \nabla \log \pi] = \nabla \sum_v \lvert \pi_v - ref_v \rvert$: that of the L1
    distance (twice the total variation), not of a KL. It is 0 at a difference of exactly 0. A difference beyond +-20
    counts as +-20 and gets gradient 0. `ref_logprobs` gets no gradient. verl offers it as "abs".

    Args:
        logprobs: [B, T], of the policy.
        ref_logprobs: [B, T], of the reference, for the same tokens.
        mask: bool [B, T], or None for every token.

    Returns:
        [B, T], never below 0; exactly 0, with gradient 0, outside the mask whatever the inputs hold there.

    Raises:
        ValueError: for a wrong rank, shape or dtype.
    """
    return kl_k1(logprobs, ref_logprobs, mask).abs()


def kl_straight_through(value: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Any estimate's value with the gradient of `kl_k2`, which is right for KL(policy || reference) on-policy.

    $$\mathrm{sg}(\text{value}) + k_2 - \mathrm{sg}(k_2)$$

    With `kl_k3(logprobs, ref_logprobs, mask)` as the value this is verl's "k3+", with `kl_k1` its "k1+": what is logged
    is an unbiased KL, and what is learnt is $\nabla KL(\pi || ref)$ in expectation.

    Args:
        value: [B, T], the estimate to show; gets no gradient.
        logprobs: [B, T], of the policy.
        ref_logprobs: [B, T], of the reference, for the same tokens.
        mask: bool [B, T], or None for every token.

    Returns:
        [B, T], equal to `value` to the last bit; exactly 0, with gradient 0, outside the mask.

    Raises:
        ValueError: for a wrong rank, shape or dtype.
    """
    _check(mask, value=value, logprobs=logprobs, ref_logprobs=ref_logprobs)
    log_ratio = kl_k1(logprobs, ref_logprobs, mask)  # which is the derivative of k2 by it
    value = at_least_float32(value.detach())
    if mask is not None:
        value = masked(value, mask)
    return torch.addcmul(value, log_ratio - log_ratio.detach(), log_ratio.detach())


def kl_k3_weighted(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""`kl_k3` times the importance ratio: value and gradient of KL(policy || reference), unbiased also off-policy.

    $$r\,(e^{d} - 1 - d), \quad d = \text{ref\_logprobs} - \text{logprobs}, \quad
    r = \exp(\text{logprobs} - \text{old\_logprobs})$$

    DeepSeek-V3.2, https://arxiv.org/abs/2512.02556 section 3.1, "Unbiased KL Estimate".

    For tokens drawn from the old policy, $E_{old}[r\, k_3] = KL(\pi || ref)$ whatever $\pi$ is, so the gradient, which
    also flows through r, is right too; on-policy pass `logprobs.detach()` as `old_logprobs`. The ratio is the token's
    own: that the prefix came from the old policy is not corrected. It is not clipped (a bound would bring the bias
    back), but either log-ratio beyond +-20 counts as +-20 and gets gradient 0.

    Args:
        logprobs: [B, T], of the policy.
        ref_logprobs: [B, T], of the reference, for the same tokens; gets no gradient.
        old_logprobs: [B, T], under the weights the batch was sampled with; gets no gradient.
        mask: bool [B, T], or None for every token.

    Returns:
        [B, T], never below 0; exactly 0, with gradient 0, outside the mask whatever the inputs hold there.

    Raises:
        ValueError: for a wrong rank, shape or dtype.
    """
    _check(mask, logprobs=logprobs, ref_logprobs=ref_logprobs, old_logprobs=old_logprobs)
    ratio = masked_log_ratio(logprobs, old_logprobs.detach(), mask).exp()
    return ratio * kl_k3(logprobs, ref_logprobs, mask)


def full_vocabulary_kl(
    logits: Tensor, ref_logits: Tensor, mask: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    r"""KL(policy || reference) of the whole next-token distribution, aligned with the token it is the distribution of.

    $$\text{out}_{b,t} = \sum_v \pi_v (\log \pi_v - \log ref_v), \quad
    \pi = \mathrm{softmax}(\text{logits}_{b,t-1} / \tau), \quad \text{out}_{b,0} = 0$$

    Value and gradient are exact for each prefix, $\partial z_v = \pi_v (\log(\pi_v / ref_v) - KL) / \tau$: nothing is
    sampled, so it is the same on-policy and off. The logits are shifted as `token_logprobs` shifts them, so that the
    result goes with `mask` and every other per-token tensor.

    A token suppressed (-inf) by the policy, or by both, adds 0. One that the reference alone suppresses would make the
    KL infinite: its reference log-probability counts as -1e4 nats. Backward keeps one float32 [B, T, V] tensor; there
    is no second derivative.

    Args:
        logits: [B, T, V] of the policy, where `logits[b, t]` was computed from `tokens[b, :t + 1]`; any floating dtype.
        ref_logits: [B, T, V] of the reference; gets no gradient.
        mask: bool [B, T], aligned with the tokens, or None for every token.
        temperature: of the sampler, > 0; divides both.

    Returns:
        [B, T], float32 (float64 for float64 logits), never below 0; exactly 0, with gradient 0, outside the mask and in
        column 0, whatever the logits hold there.

    Raises:
        ValueError: for a wrong rank, shape or dtype, or a temperature that is not positive.
    """
    check_float("logits", logits)
    check_float("ref_logits", ref_logits)
    check_rank("logits", logits, 3, "[B, T, V]")
    check_shape("ref_logits", ref_logits, tuple(logits.shape), "as logits")
    check_positive(temperature=temperature)
    if mask is not None:
        check_mask(mask)
        check_shape("mask", mask, tuple(logits.shape[:2]), "as logits without V")
        mask = mask[:, 1:]
    kl, _ = _FullVocabularyKL.apply(logits[:, :-1], ref_logits[:, :-1].detach(), mask, temperature)
    return F.pad(kl, (1, 0))[:, : logits.shape[1]]


def _check(mask: Tensor | None, **tensors: Tensor) -> None:
    """The named tensors are floating point [B, T] of one shape, and so is the bool mask where there is one."""
    if mask is None:
        check_every_token(**tensors)
    else:
        check_per_token(mask, **tensors)


class _FullVocabularyKL(torch.autograd.Function):
    """(full_vocabulary_kl, gradient of the logits) of checked arguments, with no shift. Saves the second alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, ref_logits: Tensor, mask: Tensor | None, temperature: float) -> tuple[Tensor, Tensor]:
        logp = _masked_log_softmax(logits, mask, temperature)
        excess = logp - _masked_log_softmax(ref_logits, mask, temperature)
        p = logp.exp_()
        kl = (p * excess).sum(-1)
        return kl.clamp(min=0.0), p.mul_(excess.sub_(kl[..., None])).div_(temperature)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])
        ctx.dtype = inputs[0].dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grad_kl[..., None]).to(ctx.dtype), None, None, None


def _masked_log_softmax(logits: Tensor, mask: Tensor | None, temperature: float) -> Tensor:
    """A new tensor [B, T, V]: log-softmax of the tempered logits, finite, uniform outside the mask."""
    logits = at_least_float32(logits) / temperature
    if mask is not None:
        logits.masked_fill_(~mask[..., None], 0.0)
    return logits.log_softmax(-1).clamp_(min=_NO_PROBABILITY)
