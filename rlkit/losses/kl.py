"""Estimates of the KL divergence from a reference policy, one value per token."""

from torch import Tensor

from rlkit.losses._check import check_per_token
from rlkit.losses._numerics import masked_log_ratio


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
    check_per_token(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    log_ratio = masked_log_ratio(ref_logprobs.detach(), logprobs, mask)
    return log_ratio.expm1() - log_ratio
