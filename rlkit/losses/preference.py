r"""Losses on preferences, one value per pair or per response, and their inputs: log-probabilities of whole responses.

P pairs come as [P] tensors of sequence log-probabilities: `chosen` and `rejected` under the policy, `ref_chosen` and
`ref_rejected` under the reference. Throughout, with $\log \pi$ for the given log-probabilities,

$$h_w = \log\pi(y_w) - \log\pi_{ref}(y_w), \quad h_l = \log\pi(y_l) - \log\pi_{ref}(y_l), \quad h = h_w - h_l$$

for the chosen response w and the rejected response l. Unless a function says otherwise these are sums over tokens
(`sequence_logprobs`); given means (`sequence_mean_logprobs`) the same functions are the length-normalised variants. The
reference never gets a gradient. No loss here takes the exponential of h, so h is not bounded: the log-sigmoid of a
large |h| is linear and exact. Reduce with `preference_mean`.

Args:
    chosen, rejected: [P], log-probabilities of the responses under the policy.
    ref_chosen, ref_rejected: [P], under the reference.
    chosen_lengths, rejected_lengths: integer [P], in tokens: `mask.sum(1)`; 0 counts as 1.
    chosen_rewards, rejected_rewards: [P], of a reward model, or DPO's implicit ones, `beta * (chosen - ref_chosen)`.
    beta: > 0; a larger beta keeps the policy closer to the reference.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkit import _check as check
from rlkit._numerics import LOG_RATIO_LIMIT, GlobalSum, at_least_float32, masked, one_rank
from rlkit.losses.reductions import preference_mean


def sequence_logprobs(logprobs: Tensor, mask: Tensor) -> Tensor:
    r"""Log-probability of each whole response: $\log \pi(y) = \sum_t m_t \log \pi(y_t | y_{<t})$.

    Returns:
        [B], float32 (float64 for float64 input); 0 for a row with no token in the mask.
    """
    check.per_token(mask, logprobs=logprobs)
    return masked(logprobs, mask).sum(1)


def sequence_mean_logprobs(logprobs: Tensor, mask: Tensor) -> Tensor:
    r"""Mean log-probability of each response's tokens: `sequence_logprobs` over the count of its tokens.

    Args: as `sequence_logprobs`.

    Returns:
        [B], float32 (float64 for float64 input); 0 for a row with no token in the mask.
    """
    return sequence_logprobs(logprobs, mask) / mask.sum(1).clamp(min=1)


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""Direct preference optimisation: the policy is its own reward model; log 2 where it equals the reference.

    $$L = -(1 - \epsilon) \log\sigma(\beta h) - \epsilon \log\sigma(-\beta h)$$

    DPO, https://arxiv.org/abs/2305.18290 eq. 7. `label_smoothing` is conservative DPO's chance that a label is flipped,
    https://ericmitchell.ai/cdpo.pdf; the minimum then lies at a finite h. `robust_dpo_loss` handles the same noise in
    another way. Given mean log-probabilities it is length-normalised DPO (TRL's sigmoid_norm), which needs a larger
    beta. Given `chosen + alpha / beta * chosen_lengths`, and the same for rejected, it is R-DPO
    (https://arxiv.org/abs/2403.19159), which subtracts alpha per token from the reward.

    Args:
        label_smoothing: in [0, 0.5).
    """
    _check_smoothing(label_smoothing)
    h = _margin(chosen, rejected, ref_chosen, ref_rejected, beta)
    return -(1 - label_smoothing) * F.logsigmoid(beta * h) - label_smoothing * F.logsigmoid(-beta * h)


def robust_dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.1,
) -> Tensor:
    r"""DPO whose expectation over randomly flipped labels is the DPO loss of the true labels.

    $$L = \frac{-(1 - \epsilon) \log\sigma(\beta h) + \epsilon \log\sigma(-\beta h)}{1 - 2 \epsilon}$$

    https://arxiv.org/abs/2403.00409. Unlike `dpo_loss` with label smoothing it may be negative, and it
    keeps falling as h grows.

    Args:
        label_smoothing: epsilon, the known or assumed share of flipped labels, in [0, 0.5).
    """
    _check_smoothing(label_smoothing)
    h = _margin(chosen, rejected, ref_chosen, ref_rejected, beta)
    loss = -(1 - label_smoothing) * F.logsigmoid(beta * h) + label_smoothing * F.logsigmoid(-beta * h)
    return loss / (1 - 2 * label_smoothing)


def ipo_loss(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float = 0.1) -> Tensor:
    r"""Identity preference optimisation, which pulls the margin h towards a finite target: $L = (h - 1 / (2 \beta))^2$.

    https://arxiv.org/abs/2310.12036 eq. 17, where beta is called tau. The paper uses log-probabilities of whole
    responses (`sequence_logprobs`). TRL, after asking the authors (TRL#1265), divides by the responses' lengths, so
    that beta does not depend on them; pass `sequence_mean_logprobs` for that.

    Args:
        beta: > 0; the target margin is 1 / (2 beta).
    """
    h = _margin(chosen, rejected, ref_chosen, ref_rejected, beta)
    return (h - 1 / (2 * beta)).square()


def hinge_dpo_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float = 0.1
) -> Tensor:
    r"""DPO with a hinge in place of the log-sigmoid: $L = \max(0, 1 - \beta h)$; no gradient beyond the margin 1/beta.

    RSO, https://arxiv.org/abs/2309.06657 ("hinge-norm"). SLiC-HF's own loss has no reference: `slic_loss`.
    """
    h = _margin(chosen, rejected, ref_chosen, ref_rejected, beta)
    return (1 - beta * h).relu()


def slic_loss(chosen: Tensor, rejected: Tensor, margin: float = 1.0) -> Tensor:
    r"""SLiC-HF's calibration term, without a reference: $L = \max(0, \delta - \log\pi(y_w) + \log\pi(y_l))$.

    https://arxiv.org/abs/2305.10425. The paper adds lambda times the negative log-likelihood of a target response: add
    that term in the recipe, with a reduction of your choice.

    Args:
        margin: delta, in nats; >= 0.
    """
    _check_same(chosen=chosen, rejected=rejected)
    check.not_negative(margin=margin)
    return (margin - (at_least_float32(chosen) - at_least_float32(rejected))).relu()


def apo_zero_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float = 0.1
) -> Tensor:
    r"""Anchored preference optimisation, up and down from the reference: $L = \sigma(-\beta h_w) + \sigma(\beta h_l)$.

    https://arxiv.org/abs/2408.06266 eq. 7, for chosen responses that are better than the policy's own: their
    probability rises, and not only relative to the rejected responses.

    Returns:
        [P], in (0, 2), to be minimised.
    """
    h_w, h_l = _log_ratios(chosen, rejected, ref_chosen, ref_rejected, beta)
    return (-beta * h_w).sigmoid() + (beta * h_l).sigmoid()


def simpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float = 2.0,
    gamma: float = 1.0,
) -> Tensor:
    r"""SimPO, a length-normalised preference loss with a target margin and no reference.

    $$L = -\log\sigma\Big(\frac{\beta}{|y_w|} \log\pi(y_w) - \frac{\beta}{|y_l|} \log\pi(y_l) - \gamma\Big)$$

    https://arxiv.org/abs/2405.14734 eq. 6. `gamma` is outside beta, as in the paper and TRL; the authors' own code
    takes the quotient gamma / beta.

    Args:
        gamma: the target margin, >= 0.
    """
    check.positive(beta=beta)
    check.not_negative(gamma=gamma)
    mean_w, mean_l = _means(chosen, rejected, chosen_lengths, rejected_lengths)
    return -F.logsigmoid(beta * mean_w - beta * mean_l - gamma)


def orpo_loss(chosen: Tensor, rejected: Tensor, chosen_lengths: Tensor, rejected_lengths: Tensor) -> Tensor:
    r"""ORPO's odds-ratio term: the log-odds ratio of the chosen and the rejected response, without a reference.

    $$L = -\log\sigma\Big(\log\frac{p_w}{1 - p_w} - \log\frac{p_l}{1 - p_l}\Big), \quad
    p = \exp\Big(\frac{1}{|y|} \log\pi(y)\Big)$$

    https://arxiv.org/abs/2403.07691 eq. 7. ORPO's whole loss, eq. 6, is $L_{SFT} + \lambda L$, with lambda around
    0.1: `-chosen / chosen_lengths + 0.1 * orpo_loss(...)`. TRL's SFT term scores the prompt's tokens too.

    Log-odds are infinite at p = 1, so they are clamped at 20 (p within 2e-9 of 1), with gradient 0 above. TRL does not
    clamp them and returns nan at p = 1.
    """
    mean_w, mean_l = _means(chosen, rejected, chosen_lengths, rejected_lengths)
    return -F.logsigmoid(_log_odds(mean_w) - _log_odds(mean_l))


def kto_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    desirable: Tensor,
    kl: float | Tensor,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    r"""Kahneman-Tversky optimisation, which learns from single responses marked good or bad.

    $$L = \lambda_D\, \sigma(\beta (z_0 - h)) \text{ if desirable}, \quad \lambda_U\, \sigma(\beta (h - z_0))
    \text{ if not}, \quad h = \log\pi(y) - \log\pi_{ref}(y)$$

    https://arxiv.org/abs/2402.01306 eq. 8. The baseline z_0, a KL divergence in nats that beta multiplies, is an
    argument, so that the loss of a response does not depend on its batch. An estimate from a batch (`kto_kl_estimate`)
    depends on the split into micro-batches, so compute it once, on the whole batch, before the first one. The weights
    compensate for unequal counts of desirable and undesirable responses.

    Args:
        desirable: bool [B].
        kl: z_0 >= 0, a number or a 0-d tensor; gets no gradient.
        desirable_weight, undesirable_weight: lambda_D and lambda_U, >= 0.

    Returns:
        [B], in (0, weight), to be minimised.
    """
    _check_same(logprobs=logprobs, ref_logprobs=ref_logprobs)
    check.shape("desirable", desirable, tuple(logprobs.shape), "as logprobs")
    if desirable.dtype != torch.bool:
        check.fail("desirable", desirable, "a bool tensor [B]")
    check.positive(beta=beta)
    check.not_negative(desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    if isinstance(kl, Tensor):
        check.rank("kl", kl, 0, "(a number or a 0-d tensor)")
        kl = kl.detach()
    else:
        check.not_negative(kl=kl)
    h = at_least_float32(logprobs) - at_least_float32(ref_logprobs.detach())
    good = desirable_weight * (beta * (kl - h)).sigmoid()
    bad = undesirable_weight * (beta * (h - kl)).sigmoid()
    return torch.where(desirable, good, bad)


@torch.no_grad()
def kto_kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, global_sum: GlobalSum = one_rank) -> Tensor:
    r"""KTO's baseline from mismatched pairs: $\max(0, \frac1B \sum_i \log\pi(y_j|x_i) - \log\pi_{ref}(y_j|x_i))$.

    https://arxiv.org/abs/2402.01306 section 4.1. Each response $y_j$ was written for another prompt. This is therefore
    a cheap, biased estimate of KL(policy || reference), which depends on the batch and on its split.

    Args:
        logprobs, ref_logprobs: [B], sums over tokens of each mismatched response.
        global_sum: adds a tensor over ranks, such as an engine's method of that name; by default these responses are
            the batch.

    Returns:
        0-d, detached, >= 0; 0 for B = 0.
    """
    _check_same(logprobs=logprobs, ref_logprobs=ref_logprobs)
    h = at_least_float32(logprobs) - at_least_float32(ref_logprobs)
    total, count = global_sum(torch.stack([h.sum(), h.new_tensor(len(h))])).to(h.device)
    return (total / count.clamp(min=1)).clamp(min=0)


def bradley_terry_loss(chosen_rewards: Tensor, rejected_rewards: Tensor, margin: Tensor | None = None) -> Tensor:
    r"""A reward model's loss on pairs: $L = -\log\sigma(r_w - r_l - m)$.

    https://arxiv.org/abs/2203.02155 eq. 1, which averages over all pairs of a prompt's responses. The margin is that of
    Llama 2, https://arxiv.org/abs/2307.09288 eq. 2.

    Args:
        margin: [P], larger for pairs that are further apart, or None for 0; gets no gradient.
    """
    _check_same(chosen_rewards=chosen_rewards, rejected_rewards=rejected_rewards)
    gap = at_least_float32(chosen_rewards) - at_least_float32(rejected_rewards)
    if margin is not None:
        _check_same(chosen_rewards=chosen_rewards, margin=margin)
        gap = gap - margin.detach()
    return -F.logsigmoid(gap)


def reward_centring_loss(chosen_rewards: Tensor, rejected_rewards: Tensor) -> Tensor:
    r"""A regulariser that keeps a reward model's rewards near 0: $L = (r_w + r_l)^2$, with a factor such as 0.01.

    https://arxiv.org/abs/2312.09244 eq. 2. The Bradley-Terry loss depends only on differences of rewards, so it does
    not determine their level.
    """
    _check_same(chosen_rewards=chosen_rewards, rejected_rewards=rejected_rewards)
    return (at_least_float32(chosen_rewards) + at_least_float32(rejected_rewards)).square()


@torch.no_grad()
def preference_stats(
    chosen_rewards: Tensor, rejected_rewards: Tensor, total: float | Tensor | None = None
) -> dict[str, Tensor]:
    r"""How well pairs are told apart: "preference/accuracy", the share with $r_w > r_l$ (a tie is wrong), and the means
    "preference/margin" of $r_w - r_l$, "preference/chosen" and "preference/rejected".

    Rewards are a reward model's or DPO's implicit ones, `beta * (chosen - ref_chosen)`.

    Returns:
        A dict of detached 0-d tensors, which add up over the parts of a batch; zeros for P = 0.
    """
    _check_same(chosen_rewards=chosen_rewards, rejected_rewards=rejected_rewards)
    r_w, r_l = at_least_float32(chosen_rewards), at_least_float32(rejected_rewards)
    return {
        "preference/accuracy": preference_mean((r_w > r_l).to(r_w.dtype), total),
        "preference/margin": preference_mean(r_w - r_l, total),
        "preference/chosen": preference_mean(r_w, total),
        "preference/rejected": preference_mean(r_l, total),
    }


def _log_ratios(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """h_w and h_l, [P] each, after the checks that all losses with a reference share."""
    _check_same(chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    check.positive(beta=beta)
    h_w = at_least_float32(chosen) - at_least_float32(ref_chosen.detach())
    h_l = at_least_float32(rejected) - at_least_float32(ref_rejected.detach())
    return h_w, h_l


def _margin(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float) -> Tensor:
    """h, [P]: each response is compared with its own reference first, as those two numbers are close."""
    h_w, h_l = _log_ratios(chosen, rejected, ref_chosen, ref_rejected, beta)
    return h_w - h_l


def _means(chosen: Tensor, rejected: Tensor, chosen_lengths: Tensor, rejected_lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Mean log-probabilities of the chosen and the rejected responses, [P] each."""
    _check_same(chosen=chosen, rejected=rejected)
    for name, lengths in (("chosen_lengths", chosen_lengths), ("rejected_lengths", rejected_lengths)):
        check.integer(name, lengths)
        check.shape(name, lengths, tuple(chosen.shape), "as chosen")
    mean_w = at_least_float32(chosen) / chosen_lengths.clamp(min=1)
    mean_l = at_least_float32(rejected) / rejected_lengths.clamp(min=1)
    return mean_w, mean_l


def _log_odds(log_p: Tensor) -> Tensor:
    """log(p / (1 - p)), at most LOG_RATIO_LIMIT."""
    log_p = log_p.clamp(max=-math.exp(-LOG_RATIO_LIMIT))
    return log_p - (-log_p.expm1()).log()


def _check_same(**tensors: Tensor) -> None:
    """The named tensors are floating point and [P], all as long as the first."""
    first = next(iter(tensors))
    for name, x in tensors.items():
        check.floating(name, x)
        check.rank(name, x, 1, "[P]")
        check.shape(name, x, tuple(tensors[first].shape), f"as {first}")


def _check_smoothing(label_smoothing: float) -> None:
    """A chance that a label is flipped."""
    if not 0 <= label_smoothing < 0.5:
        check.fail("label_smoothing", label_smoothing, "a number in [0, 0.5)")
