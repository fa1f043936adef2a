r"""More losses on preference pairs, and two ways to weight tokens and responses; `preference` has the common losses.

They take the arguments of `dpo_loss`, with the same meaning: [P] log-probabilities of whole responses, $h_w$ and $h_l$
for their log-ratios to the reference, $h = h_w - h_l$. The reference never gets a gradient. The log-sigmoid of a large
argument is linear and exact. The exponential of a large argument overflows, so exponents are clamped at 20, with
gradient 0 above, as everywhere in rlkit.

Args:
    chosen, rejected: [P], log-probabilities of the responses under the policy.
    ref_chosen, ref_rejected: [P], under the reference.
    chosen_lengths, rejected_lengths: integer [P], in tokens: `mask.sum(1)`; 0 counts as 1.
    beta: > 0; a larger beta keeps the policy closer to the reference.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkit import _check as check
from rlkit._numerics import LOG_RATIO_LIMIT, at_least_float32
from rlkit.losses.preference import (
    _check_same,
    _log_ratios,
    _margin,
    _means,
    dpo_loss,
    sequence_logprobs,
    sequence_mean_logprobs,
)

# --- one pair at a time


def apo_down_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float = 0.1
) -> Tensor:
    r"""Anchored preference optimisation, down from the reference: $L = \sigma(\beta h_w) + \sigma(-\beta h)$.

    https://arxiv.org/abs/2408.06266 eq. 8, for chosen responses that are worse than the policy's own: the probabilities
    of both fall, that of the rejected response further. `apo_zero_loss` is for chosen responses that are better.

    Returns:
        [P], in (0, 2), to be minimised.
    """
    h_w, h_l = _log_ratios(chosen, rejected, ref_chosen, ref_rejected, beta)
    return (beta * h_w).sigmoid() + (-beta * (h_w - h_l)).sigmoid()


def exo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 1e-3,
) -> Tensor:
    r"""Efficient exact optimisation: the reverse KL between policy and preference, where DPO is the forward KL.

    $$L = q \log\frac{q}{1 - \epsilon} + (1 - q) \log\frac{1 - q}{\epsilon}, \quad q = \sigma(\beta h)$$

    https://arxiv.org/abs/2402.00856 eq. 16, for a pair. The minimum, 0, lies at $\beta h = \log((1 - \epsilon) /
    \epsilon)$, and a pair with a very negative margin has almost no gradient. The authors' code replaces the two
    logarithms by 0 and -10, which are no distribution's; this follows the paper and TRL.

    Args:
        label_smoothing: epsilon, the probability that the rejected response is preferred, in (0, 0.5).

    Returns:
        [P], in [0, -log epsilon], to be minimised.
    """
    if not 0 < label_smoothing < 0.5:
        check.fail("label_smoothing", label_smoothing, "a number in (0, 0.5)")
    h = _margin(chosen, rejected, ref_chosen, ref_rejected, beta)
    log_q, log_rest = F.logsigmoid(beta * h), F.logsigmoid(-beta * h)
    win = log_q.exp() * (log_q - math.log1p(-label_smoothing))
    lose = log_rest.exp() * (log_rest - math.log(label_smoothing))
    return win + lose


def nca_loss(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float = 0.1) -> Tensor:
    r"""Noise contrastive alignment of a pair, which also keeps the chosen response likely.

    $$L = -\log\sigma(\beta h_w) - \frac12 \log\sigma(-\beta h_w) - \frac12 \log\sigma(-\beta h_l)$$

    https://arxiv.org/abs/2402.05369, the loss for preferences with two responses. The optimum has $\beta h_w = \log 2$,
    where DPO determines only the difference h. The paper's beta is 0.01.
    """
    h_w, h_l = _log_ratios(chosen, rejected, ref_chosen, ref_rejected, beta)
    return -F.logsigmoid(beta * h_w) - 0.5 * F.logsigmoid(-beta * h_w) - 0.5 * F.logsigmoid(-beta * h_l)


def sppo_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float = 0.001
) -> Tensor:
    r"""Self-play preference optimisation with hard labels, which pulls each log-ratio towards its own target.

    $$L = \Big(h_w - \frac{1}{2\beta}\Big)^2 + \Big(h_l + \frac{1}{2\beta}\Big)^2$$

    https://arxiv.org/abs/2405.00675 eq. 4.7 with win rates 1 and 0 (the paper estimates them) and beta = 1 / eta. The
    authors' code halves the sum; TRL and this function do not.

    Args:
        beta: > 0; the target log-ratios are +-1 / (2 beta).
    """
    h_w, h_l = _log_ratios(chosen, rejected, ref_chosen, ref_rejected, beta)
    return (h_w - 1 / (2 * beta)).square() + (h_l + 1 / (2 * beta)).square()


def bco_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    delta: float | Tensor,
    beta: float = 0.1,
) -> Tensor:
    r"""Binary classifier optimisation: the implicit reward is the logit of a classifier of good and bad responses.

    $$L = -\log\sigma(\beta h_w - \delta) - \log\sigma(\delta - \beta h_l)$$

    https://arxiv.org/abs/2404.04656. The two terms are independent, so the chosen and the rejected response may belong
    to different prompts. The loss is an upper bound of DPO's, which the shift delta makes tighter. The paper's delta is
    a running mean of `0.5 * beta * ((chosen - ref_chosen).mean() + (rejected - ref_rejected).mean())`, which the recipe
    keeps: as delta is an argument, a pair's loss does not depend on its batch. TRL's bco_pair has no shift (0).

    Args:
        delta: the reward shift, in units of beta times nats, a number or a 0-d tensor; gets no gradient.
    """
    if isinstance(delta, Tensor):
        check.rank("delta", delta, 0, "(a number or a 0-d tensor)")
        delta = delta.detach()
    elif not math.isfinite(delta):
        check.fail("delta", delta, "a finite number or a 0-d tensor")
    h_w, h_l = _log_ratios(chosen, rejected, ref_chosen, ref_rejected, beta)
    return -F.logsigmoid(beta * h_w - delta) - F.logsigmoid(delta - beta * h_l)


def discopop_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.05,
    tau: float = 0.05,
) -> Tensor:
    r"""DiscoPOP, the log-ratio modulated loss: logistic for pairs in the wrong order, exponential for the others.

    $$L = -\sigma(-x / \tau) \log\sigma(x) + \sigma(x / \tau)\, e^{-x}, \quad x = \beta h$$

    https://arxiv.org/abs/2406.08414 eq. 5. It is neither convex nor monotone around 0. The sigmoid and the exponential
    are computed with one exponent, because their product is finite where the exponential alone overflows (TRL returns
    nan there). With tau <= 1 that exponent is negative; with a larger tau it grows as x falls, and is clamped as
    described in the module.

    Args:
        tau: > 0, the width of the transition between the two losses, in units of x.
    """
    check.positive(tau=tau)
    x = beta * _margin(chosen, rejected, ref_chosen, ref_rejected, beta)
    logistic = -(-x / tau).sigmoid() * F.logsigmoid(x)
    exponential = (F.logsigmoid(x / tau) - x).clamp(max=LOG_RATIO_LIMIT).exp()  # sigmoid(x / tau) * exp(-x)
    return logistic + exponential


def alphapo_loss(
    chosen: Tensor,
    rejected: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    alpha: float = 0.25,
    beta: float = 2.5,
    gamma: float = 0.1,
) -> Tensor:
    r"""AlphaPO: SimPO with a power of the likelihood as reward, in place of its logarithm.

    $$L = -\log\sigma(\beta r_w - \beta r_l - \gamma), \quad r = \frac{1 - p^{-\alpha}}{\alpha}, \quad
    p = \exp\Big(\frac{1}{|y|} \log\pi(y)\Big)$$

    https://arxiv.org/abs/2501.03884. Alpha 0 is `simpo_loss`; a positive alpha gives unlikely responses more gradient,
    a negative one less. TRL computes the power of p, which underflows to 0, so that two such responses give nan; here
    the exponent $-\alpha \log p$ is bounded as the module says.

    Args:
        alpha: a finite number; 0 takes the limit, log p.
        gamma: the target margin, >= 0, outside beta as in `simpo_loss`.
    """
    check.positive(beta=beta)
    check.not_negative(gamma=gamma)
    if not math.isfinite(alpha):
        check.fail("alpha", alpha, "a finite number")
    mean_w, mean_l = _means(chosen, rejected, chosen_lengths, rejected_lengths)
    r_w, r_l = _power(mean_w, alpha), _power(mean_l, alpha)
    return -F.logsigmoid(beta * r_w - beta * r_l - gamma)


def tpo_loss(
    chosen: Tensor, rejected: Tensor, gold: Tensor, beta: float = 0.01, alpha: float = 1.0, gamma: float = 0.0
) -> Tensor:
    r"""Triple preference optimisation: a pair without a reference, plus the likelihood of a third, better response.

    $$L = -\log\sigma\big(\beta \log\pi(y_w) - \beta \log\pi(y_l) - \gamma\big) - \alpha \log\pi(y_{gold})$$

    TPO, https://arxiv.org/abs/2405.16681. With mean log-probabilities (`sequence_mean_logprobs`), a margin gamma and a
    larger beta it is the paper's TPO-L. TRL averages over the tokens of the gold response in both variants.

    Args:
        gold: [P], log-probabilities of the best responses under the policy.
        alpha: weight of the gold response's likelihood, >= 0.
        gamma: the target margin, >= 0.
    """
    _check_same(chosen=chosen, rejected=rejected, gold=gold)
    check.positive(beta=beta)
    check.not_negative(alpha=alpha, gamma=gamma)
    margin = at_least_float32(chosen) - at_least_float32(rejected)
    return -F.logsigmoid(beta * margin - gamma) - alpha * at_least_float32(gold)


def a_star_po_loss(
    logprobs: Tensor, ref_logprobs: Tensor, rewards: Tensor, values: Tensor, beta: float = 1e-3
) -> Tensor:
    r"""A*-PO: regression of the policy's log-ratio on the optimal policy's, with one response per prompt.

    $$L = \big(\beta (\log\pi(y) - \log\pi_{ref}(y)) - (r - V^*)\big)^2$$

    https://arxiv.org/abs/2505.20686. The optimal policy under a KL penalty has $\beta \log(\pi^* / \pi_{ref}) = r -
    V^*$. V* is estimated from responses of the reference, with a separate, larger beta:
    `rlkit.advantages.optimal_values`.

    Args:
        logprobs, ref_logprobs: [B], sums over the tokens of each response.
        rewards: [B], of the responses.
        values: [B], V* of their prompts.
        beta: > 0; the default is the authors'.

    Returns:
        [B], to be minimised.
    """
    _check_same(logprobs=logprobs, ref_logprobs=ref_logprobs, rewards=rewards, values=values)
    check.positive(beta=beta)
    h = at_least_float32(logprobs) - at_least_float32(ref_logprobs.detach())
    advantages = at_least_float32(rewards.detach()) - at_least_float32(values.detach())
    return (beta * h - advantages).square()


# --- DPO with another divergence from the reference


def alpha_divergence_dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.1,
    alpha: float = 0.5,
) -> Tensor:
    r"""DPO with an alpha divergence (f-DPO), between reverse KL (alpha 0, which is DPO) and forward KL (alpha 1).

    $$L = -\log\sigma\big(\beta f'(e^{h_w}) - \beta f'(e^{h_l})\big), \quad f'(u) = \frac{1 - u^{-\alpha}}{\alpha}$$

    https://arxiv.org/abs/2309.16240, where alpha is in (0, 1) and the reward is beta f' of the ratio; a constant in f'
    cancels. TRL's f_alpha_divergence_coef is 1 - alpha and may exceed 1, where f'(0) is finite and the paper's
    derivation of the policy from the reward does not hold. The exponent $-\alpha h$ is clamped as described in the
    module. As h is a sum over tokens, a response that has become very unlikely (h < -20 / alpha) gets no gradient; TRL
    clamps at 80, which lets gradients reach e^80.

    Args:
        alpha: >= 0; 0 takes the limit, `dpo_loss`.
    """
    check.not_negative(alpha=alpha)
    h_w, h_l = _log_ratios(chosen, rejected, ref_chosen, ref_rejected, beta)
    return -F.logsigmoid(beta * _power(h_w, alpha) - beta * _power(h_l, alpha))


def forward_kl_dpo_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float = 0.1
) -> Tensor:
    r"""DPO with the forward KL (f-DPO), reference to policy: $L = -\log\sigma(\beta e^{-h_l} - \beta e^{-h_w})$.

    https://arxiv.org/abs/2309.16240 with $f'(u) = -1 / u$, or 1 - 1 / u as in TRL: `alpha_divergence_dpo_loss` with
    alpha 1, and the same clamp. TRL does not clamp here.
    """
    return alpha_divergence_dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta, alpha=1.0)


def js_dpo_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float = 0.1
) -> Tensor:
    r"""DPO with the Jensen-Shannon divergence (f-DPO), whose implicit reward of a response is bounded from above.

    $$L = -\log\sigma\big(\beta \log\sigma(h_w) - \beta \log\sigma(h_l)\big)$$

    https://arxiv.org/abs/2309.16240 with $f'(u) = \log(2 u / (1 + u))$, whose log 2 cancels.
    """
    h_w, h_l = _log_ratios(chosen, rejected, ref_chosen, ref_rejected, beta)
    return -F.logsigmoid(beta * F.logsigmoid(h_w) - beta * F.logsigmoid(h_l))


# --- a batch against a batch


def aot_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""Alignment by optimal transport, for pairs: raises each quantile of the policy's margins above the reference's.

    $$L_i = -\log\sigma(\beta (m_{(i)} - m^{ref}_{(i)})), \quad m = \log\pi(y_w) - \log\pi(y_l)$$

    https://arxiv.org/abs/2406.05882. The margins of the policy and those of the reference are sorted separately, so the
    margin of a pair is compared with the reference's margin of another pair, and the loss depends on the batch and on
    its split into micro-batches. For a single pair it is `dpo_loss`, including the label smoothing, as in TRL.

    Args:
        label_smoothing: as in `dpo_loss`.

    Returns:
        [P], one per quantile, from the lowest up (entry i is not pair i), to be minimised.
    """
    _check_same(chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    margins = (at_least_float32(chosen) - at_least_float32(rejected)).sort().values
    ref_margins = (at_least_float32(ref_chosen) - at_least_float32(ref_rejected)).sort().values
    zeros = torch.zeros_like(margins)
    return dpo_loss(margins, zeros, ref_margins, zeros, beta, label_smoothing)


def aot_unpaired_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""Alignment by optimal transport, unpaired: raises each quantile of good log-ratios above that of bad ones.

    $$L_i = -\log\sigma(\beta (h_{w,(i)} - h_{l,(i)}))$$

    https://arxiv.org/abs/2406.05882. The log-ratios of good and of bad responses are sorted separately, so there must
    be equally many of both, but they need not share a prompt. The loss depends on the batch and on its split into
    micro-batches. For a single pair it is `dpo_loss`.

    Args:
        label_smoothing: as in `dpo_loss`.

    Returns:
        [P], one per quantile, from the lowest up (entry i is not response i), to be minimised.
    """
    h_w, h_l = _log_ratios(chosen, rejected, ref_chosen, ref_rejected, beta)
    zeros = torch.zeros_like(h_w)
    return dpo_loss(h_w.sort().values, h_l.sort().values, zeros, zeros, beta, label_smoothing)


# --- weights of tokens and responses


def ld_sequence_logprobs(logprobs: Tensor, mask: Tensor, shared_lengths: Tensor, alpha: float = 0.5) -> Tensor:
    r"""Log-probability of each response, with less weight on tokens beyond the length of the other response of the
    pair.

    $$\sum_{t \le n} \log\pi(y_t | y_{<t}) + \alpha \sum_{t > n} \log\pi(y_t | y_{<t}), \quad n = \min(|y_w|, |y_l|)$$

    LD-DPO, https://arxiv.org/abs/2409.06411: `dpo_loss` with these in place of `sequence_logprobs`, of the policy and
    of the reference. Alpha 1 is `sequence_logprobs`; alpha 0 truncates both responses to the shorter length.

    Args:
        shared_lengths: integer [B], n: `torch.minimum(chosen_mask.sum(1), rejected_mask.sum(1))` for both.
        alpha: in [0, 1].

    Returns:
        [B], float32 (float64 for float64 input); 0 for a row with no token in the mask.
    """
    check.per_token(mask, logprobs=logprobs)
    check.integer("shared_lengths", shared_lengths)
    check.shape("shared_lengths", shared_lengths, (len(mask),), "[B]")
    check.share(alpha=alpha)
    shared = mask & (mask.cumsum(1) <= shared_lengths[:, None])
    return alpha * sequence_logprobs(logprobs, mask) + (1 - alpha) * sequence_logprobs(logprobs, shared)


@torch.no_grad()
def wpo_weights(logprobs: Tensor, sum_pi_squared: Tensor, mask: Tensor) -> Tensor:
    r"""Weight of each response: how close its probability is to that of a response sampled from the policy.

    $$w = \exp\Big(\frac{1}{|y|} \sum_t \log \frac{\pi(y_t)}{\sum_v \pi(v)^2}\Big)$$

    Weighted preference optimisation with sampled alignment, https://arxiv.org/abs/2406.11827; multiply a pair's loss by
    the weights of both responses: `(w_chosen * w_rejected).clamp(max=1) * dpo_loss(...)`. The authors' code clamps the
    product at 1; TRL does not. Do not use it with `aot_loss`, whose entries are not pairs.

    Args:
        sum_pi_squared: [B, T], in (0, 1]: that function of the logits, aligned by `align_with_tokens`.

    Returns:
        [B], detached, >= 0; 1 for a row with no token in the mask.
    """
    check.per_token(mask, logprobs=logprobs, sum_pi_squared=sum_pi_squared)
    return sequence_mean_logprobs(at_least_float32(logprobs) - at_least_float32(sum_pi_squared).log(), mask).exp()


def _power(x: Tensor, alpha: float) -> Tensor:
    """(1 - exp(-alpha x)) / alpha and its limit x, with the exponent bounded."""
    return -(-alpha * x).clamp(max=LOG_RATIO_LIMIT).expm1() / alpha if alpha else x
