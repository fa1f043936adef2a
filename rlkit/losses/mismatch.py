r"""Corrections for a sampler and a trainer that disagree on the same weights: importance weights and rejection masks.

The ratio $\rho = \exp(\text{logprobs} - \text{rollout\_logprobs})$ is the trainer's probability over the sampler's.
Pass `old_logprobs` as `logprobs` if the loss has its own ratio to them, and `out.logprobs` on-policy. Multiply the
per-token loss by the weights, or pass the mask of the kept tokens to the loss and its reduction:

    loss = clipped_policy_loss(out.logprobs, mb.old_logprobs, mb.advantages, mb.mask)
    loss = loss * importance_weights(mb.old_logprobs, mb.rollout_logprobs, mb.mask, high=2.0)

    keep = geometric_rejection_mask(mb.old_logprobs, mb.rollout_logprobs, mb.mask, low=0.99, high=1.01)
    loss = token_mean(loss, keep, total=mb.total_tokens)  # the count before rejection: dropped tokens count as 0

Functions with one ratio per sequence need whole sequences; a sequence is its tokens inside the mask. In weights, a
sequence's sum of log-ratios beyond +-20 counts as +-20 too. Masks compare unbounded log-ratios, so an infinite one is
outside every finite bound. Tokens and sequences with a nan are dropped by the masks and get weight 0. Results have no
gradient.

Masks by divergence take any estimate of it, one value per token. Combine masks of the same tokens with `&`:

    apart = kl_k3(mb.rollout_logprobs, mb.old_logprobs, mb.mask)  # of KL(sampler || trainer), as in `mismatch_stats`
    keep = sequence_mean_divergence_mask(apart, mb.mask, 0.01) & sequence_max_divergence_mask(apart, mb.mask, 1.0)

TIS: Yao et al. 2025, https://fengyao.notion.site/off-policy-rl. Sequences, MIS and the geometric mean: Liu, Li et al.
2025, https://richardli.xyz/rl-collapse. IcePop: https://arxiv.org/abs/2510.18855. All in one frame: verl,
https://verl.readthedocs.io/en/latest/algo/rollout_corr_math.html.

Args:
    logprobs: [B, T], the trainer's: `old_logprobs`, or `out.logprobs` on-policy.
"""

import math

import torch
from torch import Tensor

from rlkit import _check as check
from rlkit._numerics import (
    LOG_RATIO_LIMIT,
    masked,
    masked_log_ratio,
    masked_ratio,
    mean_over_tokens,
    unbounded_log_ratio,
)


@torch.no_grad()
def importance_weights(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, low: float = 0.0, high: float = 2.0
) -> Tensor:
    r"""Truncated importance weight of each token, $w_t = \mathrm{clip}(\rho_t, \text{low}, \text{high})$.

    TIS, https://fengyao.notion.site/off-policy-rl; verl's rollout_is "token", TRL's "token_truncate". Low variance, and
    a bias that grows with the length of the sequence.

    Choices: verl and slime have the same upper bound, TRL 3. verl can divide by the batch's mean weight, which we leave
    to the caller, as it varies with the split into micro-batches.

    Args:
        low, high: the smallest and the largest weight; 0 <= low <= high, high > 0; 0 and math.inf for the raw ratio.

    Returns:
        [B, T]; exactly 1 where both agree, 0 outside the mask.
    """
    check.per_token(mask, logprobs=logprobs, rollout_logprobs=rollout_logprobs)
    check.positive(high=high)
    _check_bounds(low, high)
    ratio = masked_ratio(logprobs, rollout_logprobs, mask)
    return torch.where(mask & ~ratio.isnan(), ratio.clamp(low, high), 0)


@torch.no_grad()
def sequence_importance_weights(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, low: float = 0.0, high: float = 2.0
) -> Tensor:
    r"""Truncated importance weight of a sequence, on each of its tokens.

    $$w = \mathrm{clip}(\prod_t \rho_t, \text{low}, \text{high})$$

    Seq-TIS, https://richardli.xyz/rl-collapse; verl's rollout_is "sequence", TRL's "sequence_truncate". The untruncated
    weight is unbiased; its variance grows exponentially with the length.

    Args, Returns: as `importance_weights`.
    """
    check.per_token(mask, logprobs=logprobs, rollout_logprobs=rollout_logprobs)
    check.positive(high=high)
    _check_bounds(low, high)
    ratio = _product(masked_log_ratio(logprobs, rollout_logprobs, mask))
    return torch.where(mask & ~ratio.isnan(), ratio.clamp(low, high), 0)


@torch.no_grad()
def geometric_importance_weights(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, low: float = 0.0, high: float = 2.0
) -> Tensor:
    r"""Truncated geometric mean of a sequence's ratios, on each of its n tokens.

    $$w = \mathrm{clip}((\prod_t \rho_t)^{1/n}, \text{low}, \text{high})$$

    https://richardli.xyz/rl-collapse; slime's tis_level "geometric". It does not shrink or grow with the length, and it
    is no importance weight: verl's docs keep the geometric mean for rejection, see `geometric_rejection_mask`.

    Args, Returns: as `importance_weights`.
    """
    check.per_token(mask, logprobs=logprobs, rollout_logprobs=rollout_logprobs)
    check.positive(high=high)
    _check_bounds(low, high)
    ratio = mean_over_tokens(masked_log_ratio(logprobs, rollout_logprobs, mask), mask).exp()
    return torch.where(mask & ~ratio.isnan(), ratio.clamp(low, high), 0)


@torch.no_grad()
def masked_importance_weights(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, low: float, high: float
) -> Tensor:
    r"""IcePop: the ratio of a token inside the band, and 0 outside it.

    $$w_t = \rho_t\, [\text{low} \le \rho_t \le \text{high}]$$

    The Ling team, https://arxiv.org/abs/2510.18855, its function M with alpha = low and beta = high; verl's
    "lower_upper" threshold and slime's icepop_function are the same. With `low=0` it is token-level MIS, TRL's
    "token_mask".

    Args:
        low, high: the smallest and the largest ratio that keep their weight; 0 <= low <= high; 0 and math.inf for no
            bound.

    Returns:
        [B, T]; 0 outside the mask.
    """
    keep = token_rejection_mask(logprobs, rollout_logprobs, mask, low, high)
    ratio = masked_ratio(logprobs, rollout_logprobs, mask)
    return torch.where(keep, ratio, 0)


@torch.no_grad()
def sequence_masked_importance_weights(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, low: float, high: float
) -> Tensor:
    r"""MIS: the ratio of a sequence on each of its tokens where it is inside the bounds, and 0 where it is not.

    $$w = \rho\, [\text{low} \le \rho \le \text{high}], \quad \rho = \prod_t \rho_t$$

    Seq-MIS, https://richardli.xyz/rl-collapse, with `low=0`; TRL's "sequence_mask".

    Args, Returns: as `masked_importance_weights`.
    """
    keep = sequence_rejection_mask(logprobs, rollout_logprobs, mask, low, high)
    ratio = _product(masked_log_ratio(logprobs, rollout_logprobs, mask))
    return torch.where(keep, ratio, 0)


@torch.no_grad()
def token_rejection_mask(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, low: float, high: float, veto: float = 0.0
) -> Tensor:
    r"""The tokens of the mask whose ratio is inside the bounds, $\text{low} \le \rho_t \le \text{high}$.

    verl's rollout_rs "token_k1", https://verl.readthedocs.io/en/latest/algo/rollout_corr_math.html.

    Choices: the bounds are on trainer over sampler, as in that text and in IcePop. verl's code bounds the negative
    log-ratio, so that its "lower_upper" is 1 / high and 1 / low here. The veto drops a whole sequence when one of its
    tokens is next to impossible for the trainer (slime's rs_veto_threshold, 1e-4, say).

    Args:
        low, high: the smallest and the largest ratio to keep; 0 <= low <= high; 0 and math.inf for no bound.
        veto: a sequence is dropped if one of its tokens has a ratio below it; >= 0; 0 for no veto.

    Returns:
        bool [B, T], the tokens of `mask` that are kept: use it in place of the mask.
    """
    check.per_token(mask, logprobs=logprobs, rollout_logprobs=rollout_logprobs)
    log_ratio = unbounded_log_ratio(logprobs, rollout_logprobs, mask)
    return mask & _inside(log_ratio, low, high) & ~_vetoed(log_ratio, veto)


rejection_mask = token_rejection_mask
"""Alias of `token_rejection_mask`."""


@torch.no_grad()
def sequence_rejection_mask(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, low: float, high: float, veto: float = 0.0
) -> Tensor:
    r"""The tokens of the sequences whose ratio is inside the bounds, $\text{low} \le \prod_t \rho_t \le \text{high}$.

    https://richardli.xyz/rl-collapse; verl's rollout_rs "seq_sum_k1". Long sequences leave any bounds more easily than
    short ones; `geometric_rejection_mask` does not have that bias.

    Args, Returns: as `token_rejection_mask`.
    """
    check.per_token(mask, logprobs=logprobs, rollout_logprobs=rollout_logprobs)
    log_ratio = unbounded_log_ratio(logprobs, rollout_logprobs, mask)
    return mask & _inside(log_ratio.sum(1, keepdim=True), low, high) & ~_vetoed(log_ratio, veto)


@torch.no_grad()
def geometric_rejection_mask(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, low: float, high: float, veto: float = 0.0
) -> Tensor:
    r"""The tokens of the sequences whose mean ratio is inside the bounds, $\text{low} \le (\prod_t \rho_t)^{1/n} \le
    \text{high}$, n the sequence's tokens.

    Geo-RS, https://richardli.xyz/rl-collapse; verl's rollout_rs "seq_mean_k1". The mean hardly moves, so the bounds are
    tight: verl's docs have 0.999 and 1.001. It can be multiplied with token weights (verl's Geo-RS-Token-TIS).

    Args, Returns: as `token_rejection_mask`.
    """
    check.per_token(mask, logprobs=logprobs, rollout_logprobs=rollout_logprobs)
    log_ratio = unbounded_log_ratio(logprobs, rollout_logprobs, mask)
    return mask & _inside(mean_over_tokens(log_ratio, mask), low, high) & ~_vetoed(log_ratio, veto)


@torch.no_grad()
def token_divergence_mask(divergence: Tensor, mask: Tensor, high: float) -> Tensor:
    r"""The tokens of the mask at which sampler and trainer are close enough, $d_t \le \text{high}$.

    verl's rollout_rs "token_k2" and "token_k3", https://verl.readthedocs.io/en/latest/algo/rollout_corr_math.html
    sections 3.3.4 and 3.3.5: `kl_k2` and `kl_k3` of (rollout_logprobs, logprobs, mask). Its bounds on a token's k2 are
    1.5 to 3.

    Choices: the estimate is an argument, so any other will do, a `full_vocabulary_kl` too. `kl_k2` and `kl_k3` count a
    log-ratio beyond +-20 as +-20, as in verl: k2 ends at 200, and k3 at 19 where the trainer finds a token impossible,
    so a higher bound keeps it.

    Args:
        divergence: [B, T], of each token; may hold anything outside the mask.
        high: the largest divergence to keep; >= 0; math.inf keeps all but nan.

    Returns:
        bool [B, T], the tokens of `mask` that are kept: use it in place of the mask.
    """
    divergence = _masked_divergence(divergence, mask, high)
    return mask & (divergence <= high)


@torch.no_grad()
def sequence_sum_divergence_mask(divergence: Tensor, mask: Tensor, high: float) -> Tensor:
    r"""The tokens of the sequences whose divergence is small in sum, $\sum_t d_t \le \text{high}$.

    verl's rollout_rs "seq_sum_k2" and "seq_sum_k3". Long sequences leave any bound more easily than short ones; verl's
    bounds on k2 are 2.5 to 4.

    Args, Returns: as `token_divergence_mask`.
    """
    divergence = _masked_divergence(divergence, mask, high)
    return mask & (divergence.sum(1, keepdim=True) <= high)


@torch.no_grad()
def sequence_mean_divergence_mask(divergence: Tensor, mask: Tensor, high: float) -> Tensor:
    r"""The tokens of the sequences whose divergence is small in the mean, $\frac{1}{n} \sum_t d_t \le \text{high}$,
    n the sequence's tokens.

    verl's rollout_rs "seq_mean_k2" and "seq_mean_k3" (K3-RS). In the mean log-ratio of `geometric_rejection_mask`
    tokens on both sides of 1 cancel; here they add up. verl's bounds on k3 are 0.001 to 0.01.

    Args, Returns: as `token_divergence_mask`.
    """
    divergence = _masked_divergence(divergence, mask, high)
    return mask & (mean_over_tokens(divergence, mask) <= high)


@torch.no_grad()
def sequence_max_divergence_mask(divergence: Tensor, mask: Tensor, high: float) -> Tensor:
    r"""The tokens of the sequences without a token at which the two are far apart, $\max_t d_t \le \text{high}$.

    Trust region masking, https://arxiv.org/abs/2512.23075: the error of the surrogate is bounded by the largest
    divergence of a sequence's tokens, so one bad token drops them all. verl's rollout_rs "seq_max_k2" and "seq_max_k3".
    The paper's bounds are on the KL of the whole vocabulary.

    Args, Returns: as `token_divergence_mask`.
    """
    divergence = _masked_divergence(divergence, mask, high)
    return mask & (divergence <= high).all(1, keepdim=True)


def _product(log_ratio: Tensor) -> Tensor:
    """[B, 1]: the ratio of a whole sequence; its logarithm too is held within +-LOG_RATIO_LIMIT."""
    return log_ratio.sum(1, keepdim=True).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _inside(log_ratio: Tensor, low: float, high: float) -> Tensor:
    """Where low <= exp(log_ratio) <= high."""
    _check_bounds(low, high)
    return (log_ratio >= _log(low)) & (log_ratio <= _log(high))


def _vetoed(log_ratio: Tensor, veto: float) -> Tensor:
    """bool [B, 1]: sequences with a token whose ratio is below the veto."""
    check.not_negative(veto=veto)
    return (log_ratio < _log(veto)).any(1, keepdim=True)


def _masked_divergence(divergence: Tensor, mask: Tensor, high: float) -> Tensor:
    """[B, T]: the divergence, 0 outside the mask. Checks all three arguments."""
    check.per_token(mask, divergence=divergence)
    check.not_negative(high=high)
    return masked(divergence, mask)


def _check_bounds(low: float, high: float) -> None:
    """0 <= low <= high."""
    check.not_negative(low=low)
    if not high >= low:
        check.fail("high", high, f"a number >= low, which is {low}")


def _log(x: float) -> float:
    """The logarithm, -inf at 0."""
    return math.log(x) if x > 0 else -math.inf
