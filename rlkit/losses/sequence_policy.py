"""Policy-gradient losses with one ratio a sequence, and the mask of sequences that the policy has left behind.

In all of them: the sequence is its tokens inside the mask, its value stands on each of them, only `logprobs` gets a
gradient, and at ratio 1 the gradient of the summed loss is -A on every trained token (times the sequence's length in
`luspo_loss`). A log-ratio of a token beyond +-20 counts as +-20 and gets gradient 0.
"""

import torch
from torch import Tensor

from rlkit.losses._check import advantages_per_token, check_not_negative, check_per_token
from rlkit.losses._numerics import (
    at_least_float32,
    masked,
    masked_cost,
    masked_log_ratio,
    masked_rows,
    masked_sums,
    sequence_cost,
)


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    r"""GSPO: PPO's clipped loss with the geometric mean of the token ratios as the one ratio of a sequence.

    $$L = -\min(s A,\ \mathrm{clip}(s, 1 - \epsilon_{low}, 1 + \epsilon_{high}) A), \quad
    s = \exp\Big(\frac{1}{|y|} \sum_t m_t (\text{logprobs}_t - \text{old\_logprobs}_t)\Big)$$

    GSPO, https://arxiv.org/abs/2507.18071 eq. 5 and 7; `sequence_mean` gives the paper's loss. The clips are the
    paper's, of section 5.1: s stays far closer to 1 than a token's ratio.

    verl's gspo is `gspo_token_loss`, with the same gradient. Under `token_mean` a sequence weighs by its length, which
    is no longer the paper's loss (TRL warns of it).

    Args:
        logprobs: [B, T], of the policy being trained; whole sequences.
        old_logprobs: [B, T], under the weights the batch was sampled with.
        advantages: [B]; [B, T] with one value a sequence is the same, for others see `gspo_token_loss`.
        mask: bool [B, T], True on trained tokens.
        clip_low: the ratio's lower bound is 1 - clip_low; >= 0.
        clip_high: the ratio's upper bound is 1 + clip_high; >= 0.

    Returns:
        [B, T], to be minimised: a sequence's value on each of its tokens; 0, with gradient 0, outside the mask.

    Raises:
        ValueError: for a wrong rank, shape or dtype, or a negative clip.
    """
    loss, _ = _of_sequences(logprobs, old_logprobs, advantages, mask, clip_low, clip_high)
    return masked(loss, mask)


def gspo_token_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    r"""GSPO-token: the value of GSPO's ratio with each token's own gradient, so that advantages may be per token.

    $$L = -\min(s_t A_t,\ \mathrm{clip}(s_t, 1 - \epsilon_{low}, 1 + \epsilon_{high}) A_t), \quad
    s_t = \mathrm{sg}(s)\, \frac{\pi_t}{\mathrm{sg}(\pi_t)}$$

    with s of `gspo_loss`. GSPO, https://arxiv.org/abs/2507.18071 eq. 13 and 14; reduced by `sequence_mean`. With one
    advantage a sequence its values are `gspo_loss`'s, and so is its gradient under any reduction that weighs the tokens
    of a sequence alike.

    Args:
        logprobs: [B, T], of the policy being trained; whole sequences.
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
    log_ratio = masked_log_ratio(logprobs, old_logprobs.detach(), mask)
    own = (log_ratio - log_ratio.detach()).exp()  # 1, with the token's gradient
    ratio = _mean(log_ratio.detach(), _lengths(mask)).exp() * own
    return _clipped(masked_cost(advantages, mask), ratio, clip_low, clip_high)


def luspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 2e-3,
    clip_high: float = 2.5e-3,
) -> Tensor:
    r"""LUSPO: GSPO's loss times the sequence's length, so that a token's gradient does not shrink in a long answer.

    $$L = |y| \cdot L_{GSPO}, \quad |y| = \sum_t m_t$$

    LUSPO, https://arxiv.org/abs/2602.05261; `sequence_mean` gives the paper's loss, and the same number is
    `sequence_sum_mean` of `gspo_loss`. The clips are the paper's, of section 5.1.

    Args:
        logprobs: [B, T], of the policy being trained; whole sequences.
        old_logprobs: [B, T], under the weights the batch was sampled with.
        advantages: [B]; [B, T] with one value a sequence is the same.
        mask: bool [B, T], True on trained tokens.
        clip_low: the ratio's lower bound is 1 - clip_low; >= 0.
        clip_high: the ratio's upper bound is 1 + clip_high; >= 0.

    Returns:
        [B, T], to be minimised: a sequence's value on each of its tokens; 0, with gradient 0, outside the mask.

    Raises:
        ValueError: for a wrong rank, shape or dtype, or a negative clip.
    """
    loss, lengths = _of_sequences(logprobs, old_logprobs, advantages, mask, clip_low, clip_high)
    return masked(loss * lengths, mask)


def gmpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> Tensor:
    r"""GMPO: the geometric mean of token ratios that are clipped one by one, in log space.

    $$L = -A \exp\Big(\frac{1}{|y|} \sum_t m_t \ell_t\Big), \quad \ell_t = \min(\log r_t, \epsilon_{high})
    \text{ where } A > 0,\ \max(\log r_t, -\epsilon_{low}) \text{ elsewhere}$$

    GMPO, https://arxiv.org/abs/2507.20673; `sequence_mean` gives the paper's loss. The clips are in nats, the paper's
    ratios in $(e^{-0.4}, e^{0.4})$. A token is clipped on the side its advantage pushes to, as in PPO; the others of
    its sequence keep their gradient. With advantages per token the side is each token's, and `sequence_mean` gives
    minus the mean advantage times the mean ratio, as in verl.

    Args:
        logprobs: [B, T], of the policy being trained; whole sequences.
        old_logprobs: [B, T], under the weights the batch was sampled with.
        advantages: [B] or [B, T]; the paper's are [B].
        mask: bool [B, T], True on trained tokens.
        clip_low: the log-ratio's lower bound is -clip_low, in nats; >= 0.
        clip_high: the log-ratio's upper bound is clip_high, in nats; >= 0.

    Returns:
        [B, T], to be minimised: a sequence's value on each of its tokens; 0, with gradient 0, outside the mask.

    Raises:
        ValueError: for a wrong rank, shape or dtype, or a negative clip.
    """
    check_per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    check_not_negative(clip_low=clip_low, clip_high=clip_high)
    cost = masked_cost(advantages, mask)
    log_ratio = masked_log_ratio(logprobs, old_logprobs.detach(), mask)
    clipped = torch.where(cost < 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    return cost * _mean(clipped, _lengths(mask)).exp()


def topr_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    r"""TOPR: REINFORCE in which a bad sequence fades as the policy leaves it and a good one keeps its full weight.

    $$L = -\mathrm{sg}(w)\, A\, \text{logprobs}, \quad w = 1 \text{ where } A \ge 0,\ \min\Big(\prod_t r_t, 1\Big)
    \text{ where } A < 0$$

    Tapered off-policy REINFORCE, https://arxiv.org/abs/2503.14286; `sequence_sum_mean` gives the paper's loss. The
    weight is the whole sequence's probability ratio, a product over tokens and no geometric mean: a drift of 0.01 nats
    a token over 1000 tokens leaves a weight of 5e-5. With advantages per token the case is each token's.

    Args:
        logprobs: [B, T], of the policy being trained; whole sequences, finite within the mask.
        old_logprobs: [B, T], under the weights the batch was sampled with, however old.
        advantages: [B] or [B, T]; the paper's are the reward less a constant baseline.
        mask: bool [B, T], True on trained tokens.

    Returns:
        [B, T], to be minimised; 0, with gradient 0, outside the mask. Only its gradient means something.

    Raises:
        ValueError: for a wrong rank, shape or dtype.
    """
    check_per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    cost = masked_cost(advantages, mask)
    log_ratio = masked_log_ratio(logprobs.detach(), old_logprobs.detach(), mask).sum(1, keepdim=True)
    weight = torch.where(cost > 0, log_ratio.clamp(max=0).exp(), 1.0)
    return cost * weight * masked(at_least_float32(logprobs), mask)


@torch.no_grad()
def off_policy_sequence_mask(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, threshold: float
) -> Tensor:
    r"""The mask without the sequences that are bad and that the policy has already left: they only destabilise.

    $$m'_{b,t} = m_{b,t} \wedge \neg\Big(A_{b,t} < 0 \wedge \frac{1}{|y|} \sum_t m_t (\text{old\_logprobs}_t -
    \text{logprobs}_t) > \delta\Big)$$

    DeepSeek-V3.2, https://arxiv.org/abs/2512.02556 eq. 9. The mean is an estimate of KL(old || policy) with its sign:
    a sequence that became likelier is never dropped. The report gives no threshold; TRL suggests 0.5, slime has 1e-4.

    The paper zeroes the loss of what is dropped and still divides by all tokens: reduce `torch.where(keep, loss, 0.0)`
    with the full mask. Give the sampler's log-probabilities as `old_logprobs` to count its mismatch too, as the report
    and TRL do.

    Args:
        logprobs: [B, T], of the policy being trained; whole sequences.
        old_logprobs: [B, T], under the weights, or of the engine, that sampled the batch.
        advantages: [B] or [B, T]; of the latter only a sequence's negative tokens are dropped.
        mask: bool [B, T], True on trained tokens.
        threshold: the largest mean drift to keep, in nats a token; >= 0.

    Returns:
        bool [B, T], within the mask.

    Raises:
        ValueError: for a wrong rank, shape or dtype, or a negative threshold.
    """
    check_per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    check_not_negative(threshold=threshold)
    drift, lengths = masked_sums(at_least_float32(old_logprobs) - at_least_float32(logprobs), mask)
    drifted = (drift / lengths.clamp(min=1) > threshold)[:, None]
    return masked_rows(mask, ~((advantages_per_token(advantages, mask) < 0) & drifted))


def _of_sequences(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """(GSPO's loss of each sequence, [B, 1], or [B, T] for advantages [B, T]; the sequences' lengths, [B, 1])."""
    check_per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    check_not_negative(clip_low=clip_low, clip_high=clip_high)
    log_ratio, lengths = masked_log_ratio(logprobs, old_logprobs.detach(), mask), _lengths(mask)
    cost = sequence_cost(advantages, mask, lengths)
    return _clipped(cost, _mean(log_ratio, lengths).exp(), clip_low, clip_high), lengths


def _lengths(mask: Tensor) -> Tensor:
    """[B, 1]: the tokens of each row's mask."""
    return mask.sum(1, keepdim=True, dtype=torch.int32)


def _mean(x: Tensor, lengths: Tensor) -> Tensor:
    """[B, 1]: the mean over each row's tokens of x [B, T], which is 0 outside the mask; 0 for a row without tokens."""
    return x.sum(1, keepdim=True) / lengths.clamp(min=1)


def _clipped(cost: Tensor, ratio: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """PPO's pessimistic choice between the ratio and its clip, as a loss: see `clipped_policy_loss`."""
    return cost * torch.where(cost < 0, ratio.clamp(max=1 + clip_high), ratio.clamp(min=1 - clip_low))
