"""What a run logs about its ratios. Every mean is divided by a global count, so parts of a batch add up.

An engine sums metrics over micro-batches and ranks and takes the maximum of keys that end in "/max". All results are
dicts of 0-d tensors without gradient, zeros where the mask is empty.
"""

import math

import torch
from torch import Tensor

from rlkit import _check as check
from rlkit._numerics import (
    LOG_RATIO_LIMIT,
    GlobalSum,
    divide,
    masked,
    masked_log_ratio,
    masked_ratio,
    mean_over_tokens,
    one_rank,
    unbounded_log_ratio,
)
from rlkit.losses.kl import kl_k3
from rlkit.losses.reductions import sequence_mean, token_mean


@torch.no_grad()
def ratio_stats(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor | None,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    total: float | Tensor | None = None,
) -> dict[str, Tensor]:
    r"""How far the policy has moved from the one that sampled.

    With $r = \exp(\text{logprobs} - \text{old\_logprobs})$:

    - "ratio/clip_fraction": share of tokens where the clip binds, r > 1 + clip_high where A > 0 or r < 1 - clip_low
      where A < 0; without advantages, the share of r outside the interval.
    - "ratio/approx_kl": mean of $(r - 1) - \log r$, the k3 estimate of KL(old || new),
      http://joschu.net/blog/kl-approx.html.
    - "ratio/max": the largest r.

    Choices: TRL and verl count where the clip binds, as here; CleanRL counts every r outside the interval.

    Args:
        advantages: [B] or [B, T], or None for the share of all ratios outside the interval.
        clip_low, clip_high: as given to the loss; >= 0.

    Returns:
        A dict of 0-d tensors.
    """
    check.per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    check.not_negative(clip_low=clip_low, clip_high=clip_high)
    ratio = masked_ratio(logprobs, old_logprobs, mask)
    above, below = ratio > 1 + clip_high, ratio < 1 - clip_low
    if advantages is not None:
        advantages = check.advantages_per_token(advantages, mask)
        above, below = above & (advantages > 0), below & (advantages < 0)
    return {
        "ratio/clip_fraction": token_mean((above | below).to(ratio.dtype), mask, total),
        "ratio/approx_kl": token_mean(kl_k3(old_logprobs, logprobs, mask), mask, total),
        "ratio/max": _largest(masked(ratio, mask)),
    }


@torch.no_grad()
def sequence_ratio_stats(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor | None,
    mask: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    total: float | Tensor | None = None,
) -> dict[str, Tensor]:
    r"""`ratio_stats` for losses with one ratio per sequence, such as `gspo_loss`.

    $$s = \exp\Big(\frac{1}{|y|} \sum_t m_t (\text{logprobs}_t - \text{old\_logprobs}_t)\Big)$$

    - "ratio/clip_fraction": share of sequences where the clip binds, s > 1 + clip_high where A > 0 or s < 1 - clip_low
      where A < 0; without advantages, the share of s outside the interval.
    - "ratio/approx_kl": mean over sequences of each sequence's mean of the k3 estimate of KL(old || new).
    - "ratio/max": the largest s.

    GSPO, https://arxiv.org/abs/2507.18071 eq. 7.

    Args:
        advantages: [B], or None for the share of all ratios outside the interval. Of [B, T], the share of a sequence's
            tokens where the clip binds counts.
        clip_low, clip_high: as given to the loss; >= 0.
        total: sequences that have a token, over all micro-batches and ranks; None counts this mask.

    Returns:
        A dict of 0-d tensors.
    """
    check.per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    check.not_negative(clip_low=clip_low, clip_high=clip_high)
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    ratio = mean_over_tokens(log_ratio, mask).exp().expand(mask.shape)
    above, below = ratio > 1 + clip_high, ratio < 1 - clip_low
    if advantages is not None:
        advantages = check.advantages_per_token(advantages, mask)
        above, below = above & (advantages > 0), below & (advantages < 0)
    return {
        "ratio/clip_fraction": sequence_mean((above | below).to(ratio.dtype), mask, total),
        "ratio/approx_kl": sequence_mean(kl_k3(old_logprobs, logprobs, mask), mask, total),
        "ratio/max": _largest(masked(ratio, mask)),
    }


@torch.no_grad()
def value_stats(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip: float = 0.5,
    total: float | Tensor | None = None,
) -> dict[str, Tensor]:
    r"""How well the critic does, and how often the clip of `clipped_value_loss` binds.

    - "value/clip_fraction": share of tokens where the clipped value's squared error is the larger one, as in verl.
    - "value/squared_error": mean of $(v - R)^2$.
    - "value/mean", "value/return": means of values and returns.

    Args:
        values, old_values, returns, clip: as in `clipped_value_loss`.

    Returns:
        A dict of 0-d tensors.
    """
    check.per_token(mask, values=values, old_values=old_values, returns=returns)
    check.not_negative(clip=clip)
    values, old_values, returns = (masked(x, mask) for x in (values, old_values, returns))
    squared_error = (values - returns).square()
    clipped = values.clamp(old_values - clip, old_values + clip)
    binds = (clipped - returns).square() > squared_error
    return {
        "value/clip_fraction": token_mean(binds.to(values.dtype), mask, total),
        "value/squared_error": token_mean(squared_error, mask, total),
        "value/mean": token_mean(values, mask, total),
        "value/return": token_mean(returns, mask, total),
    }


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, global_sum: GlobalSum = one_rank) -> Tensor:
    r"""Share of the variance of the returns that the values predict.

    $$1 - \frac{\mathrm{var}(R - v)}{\mathrm{var}(R)}$$

    1: the values are the returns, but for a constant. 0: no better than a constant. Below 0: worse than one. Unlike the
    critic's loss, it does not grow when returns begin to differ.

    Args:
        values, returns: [B, T], as in `clipped_value_loss`.
        global_sum: sums a tensor over all ranks.

    Returns:
        0-d, float64. nan if all returns are equal.
    """
    check.per_token(mask, values=values, returns=returns)
    count = global_sum(mask.sum())

    def variance(x: Tensor) -> Tensor:
        x = masked(x, mask)
        mean = global_sum(x.sum()) / count
        return global_sum(masked(x - mean, mask).square().sum()) / count

    values, returns = values.double(), returns.double()
    spread = variance(returns)
    return torch.where(spread > 0, 1 - variance(returns - values) / spread, math.nan)


@torch.no_grad()
def mismatch_stats(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, total: float | Tensor | None = None
) -> dict[str, Tensor]:
    r"""How far the sampler and the trainer are apart on the same tokens and weights.

    With $\delta = \text{logprobs} - \text{rollout\_logprobs}$ and $w = e^\delta$:

    - "mismatch/abs_dlogp" and "mismatch/abs_dlogp/max": mean and maximum of $|\delta|$.
    - "mismatch/kl": mean of $w - 1 - \delta$, the k3 estimate of KL(sampler || trainer).
    - "mismatch/w_mean", "mismatch/w2_mean": means of $w$ and $w^2$. The effective sample size is a quotient and
      does not add up over micro-batches; these do, and `effective_sample_size` of their sums is that of the batch.
      The second less 1 is the chi-square divergence of a token.
    - "mismatch/outside": share of tokens with w outside [0.5, 2].

    In w and the KL, $\delta$ beyond +-20 counts as +-20.

    Returns:
        A dict of 0-d tensors.
    """
    check.per_token(mask, logprobs=logprobs, rollout_logprobs=rollout_logprobs)
    distance = unbounded_log_ratio(logprobs, rollout_logprobs, mask).abs()
    weight = masked(masked_ratio(logprobs, rollout_logprobs, mask), mask)
    total = mask.sum() if total is None else total
    sums = {  # the terms are 0 outside the mask
        "mismatch/abs_dlogp": distance.sum(),
        "mismatch/kl": kl_k3(rollout_logprobs, logprobs, mask).sum(),
        "mismatch/w_mean": weight.sum(),
        "mismatch/w2_mean": weight.square().sum(),
        "mismatch/outside": (distance > math.log(2)).to(weight.dtype).sum(),
    }
    means = {name: divide(x, total) for name, x in sums.items()}
    return means | {"mismatch/abs_dlogp/max": _largest(distance)}


@torch.no_grad()
def sequence_mismatch_stats(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, total: float | Tensor | None = None
) -> dict[str, Tensor]:
    r"""How far the sampler and the trainer are apart on whole sequences.

    $$w = \exp \sum_t \delta_t, \quad \chi^2 = E[w^2] - 1, \quad
    \mathrm{ppl} = \exp\Big({-\frac{1}{n}} \sum_t \text{logprobs}_t\Big), \quad
    \frac{\mathrm{ppl}}{\mathrm{ppl}_{rollout}} = \exp\Big({-\frac{1}{n}} \sum_t \delta_t\Big)$$

    with $\delta = \text{logprobs} - \text{rollout\_logprobs}$ and n the sequence's tokens; means over sequences:

    - "mismatch/sequence_w_mean", "mismatch/sequence_chi2": of $w$ and of $w^2 - 1$; the effective sample size of
      sequence-level weights is `effective_sample_size(w_mean, 1 + chi2)` of their sums.
    - "mismatch/ppl", "mismatch/rollout_ppl": the perplexity of the sampled tokens to the trainer and to the sampler.
    - "mismatch/ppl_ratio": the first over the second, above 1 where the trainer finds a sequence less likely.

    verl's compute_offpolicy_metrics, https://verl.readthedocs.io/en/latest/algo/rollout_corr_math.html sections 4.2 and
    4.3, where a row without tokens counts as a sequence; here it does not. All are means over sequences, as there, and
    so add up over micro-batches, which a perplexity of all tokens would not. $\delta$, the sum of them and a mean
    log-probability beyond +-20 count as +-20.

    Args:
        total: sequences that have a token, over all micro-batches and ranks; None counts this mask.

    Returns:
        A dict of 0-d tensors.
    """
    check.per_token(mask, logprobs=logprobs, rollout_logprobs=rollout_logprobs)
    delta = masked_log_ratio(logprobs, rollout_logprobs, mask)
    log_weight = delta.sum(1).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    each = {
        "mismatch/sequence_w_mean": log_weight.exp(),
        "mismatch/sequence_chi2": (2 * log_weight).expm1(),
        "mismatch/ppl": _perplexity(logprobs, mask),
        "mismatch/rollout_ppl": _perplexity(rollout_logprobs, mask),
        "mismatch/ppl_ratio": (-mean_over_tokens(delta, mask)[:, 0]).exp(),
    }
    return {name: sequence_mean(x, mask, total) for name, x in each.items()}


def effective_sample_size(w_mean: float | Tensor, w2_mean: float | Tensor) -> Tensor:
    r"""Effective sample size of importance weights as a share of the tokens: $(\sum w)^2 / (n \sum w^2)$.

    Args:
        w_mean: mean weight, 0-d: "mismatch/w_mean" after the engine's sum.
        w2_mean: mean squared weight, 0-d: "mismatch/w2_mean" after the engine's sum.

    Returns:
        0-d, in (0, 1]; 1 where all weights are equal, 0 for no tokens.
    """
    first, second = torch.as_tensor(w_mean), torch.as_tensor(w2_mean)
    return torch.where(second > 0, first.square() / torch.where(second > 0, second, 1), 0)


def _perplexity(logprobs: Tensor, mask: Tensor) -> Tensor:
    """[B]: exp of minus the mean log-probability, which is held within +-LOG_RATIO_LIMIT."""
    mean = mean_over_tokens(masked(logprobs, mask), mask)[:, 0]
    return (-mean).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _largest(x: Tensor) -> Tensor:
    """The largest of x >= 0, which may be empty."""
    return x.max() if x.numel() else x.new_zeros(())
