"""Advantages that are normalised over the whole batch: whitening, REINFORCE++, GDPO and Lite PPO."""

import torch
from torch import Tensor

from rlkit import _check as check
from rlkit._numerics import GlobalSum, masked, one_rank
from rlkit.advantages._groups import group_index, in_dtype_of, root
from rlkit.advantages._tokens import rewards_per_token, scored_tokens
from rlkit.advantages.group import dr_grpo_advantages, grpo_advantages
from rlkit.advantages.returns import discounted_returns

_ROUNDING = 1e-14  # of equal numbers in float64: how far they may seem to be from their mean, over that mean


@torch.no_grad()
def masked_whiten(x: Tensor, mask: Tensor, eps: float = 1e-8, global_sum: GlobalSum = one_rank) -> Tensor:
    r"""The tokens of the mask shifted to mean 0 and scaled to variance 1.

    $$\frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}}$$

    Choices: the sample variance (divisor count - 1), as in verl. A single token gives 0. Whiten before the batch is
    split into micro-batches.

    Args:
        x: [B, T]; may hold anything outside the mask.
        eps: >= 0, added to the variance.

    Returns:
        [B, T], without gradient; 0 outside the mask.
    """
    check.per_token(mask, x=x)
    check.not_negative(eps=eps)
    return _whiten(masked(x, mask), mask, eps, global_sum)


def reinforce_plus_plus_advantages(
    rewards: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    eps: float = 1e-8,
    global_sum: GlobalSum = one_rank,
) -> Tensor:
    r"""Discounted return of each token, whitened over all tokens of the batch.

    $$G_t = \sum_{s \ge t} \gamma^{s - t} r_s, \quad
    A_t = \frac{G_t - \mathrm{mean}(G)}{\sqrt{\mathrm{var}(G) + \epsilon}}$$

    s and t count the tokens of the mask, so that tool output between them neither discounts nor ends a return.

    REINFORCE++, https://arxiv.org/abs/2501.03262; its KL penalty is part of the token rewards.

    Choices: the variance of all masked tokens with divisor n - 1 and eps inside the root, and a return that is
    carried over the tokens outside the mask; both as in verl.

    Args:
        rewards: [B, T], of each token, or [B], given to the last token of the mask.
        gamma: discount of one token of the mask, in [0, 1].
        eps: >= 0; the variance below which a batch counts as equal.

    Returns:
        [B, T], 0 outside the mask.
    """
    check.token_mask(mask)
    check.not_negative(eps=eps)
    rewards = masked(rewards_per_token(rewards, mask), mask)
    mask = scored_tokens(rewards, mask)
    return _whiten(discounted_returns(rewards, mask, gamma), mask, eps, global_sum)


def reinforce_plus_plus_baseline_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    lengths: Tensor | None = None,
    eps: float = 1e-8,
    global_sum: GlobalSum = one_rank,
) -> Tensor:
    r"""Reward minus the mean of its group, whitened over the batch.

    $$c_i = r_i - \mathrm{mean}_{\mathrm{group}}(r), \quad
    A_i = \frac{c_i - \mathrm{mean}(c)}{\sqrt{\mathrm{var}(c) + \epsilon}}$$

    REINFORCE++ with baseline, https://arxiv.org/abs/2501.03262.

    Choices: each sample has the same weight in the mean and variance of the batch. With `lengths` each token has the
    same weight, as in verl; samples of a group with equal rewards then get minus the mean. Divisor n - 1, eps inside
    the root. A group of one has c = 0; verl keeps its reward.

    Args:
        lengths: [B], trained tokens per sample (`mask.sum(1)`), to weigh by tokens; a sample of length 0 gets 0.
        eps: >= 0; the variance below which a batch counts as equal.

    Returns:
        [B].
    """
    check.groups(group_ids, rewards=rewards)
    check.not_negative(eps=eps)
    weights = _row_weights(rewards.isfinite(), lengths)
    centred = dr_grpo_advantages(rewards.double(), group_ids)
    return in_dtype_of(rewards, _whiten(centred, weights, eps, global_sum))


def gdpo_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    weights: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    eps: float = 1e-6,
    global_sum: GlobalSum = one_rank,
) -> Tensor:
    r"""Several rewards, each normalised within its group, then added and whitened over the batch.

    $$a_i = \sum_k w_k
    \frac{r_{ik} - \mathrm{mean}_{\mathrm{group}}(r_k)}{\mathrm{std}_{\mathrm{group}}(r_k) + \epsilon}, \quad
    A_i = \frac{a_i - \mathrm{mean}(a)}{\sqrt{\mathrm{var}(a) + 10^{-8}}}$$

    GDPO, https://arxiv.org/abs/2601.05242: if the sum of rewards is normalised instead, responses with different
    rewards can get the same advantage.

    Choices: each reward as in `grpo_advantages`. In the batch statistics each sample has the same weight, as in the
    authors' TRL code; with `lengths` each token has, as in verl and the authors' verl code. A reward that was not
    scored is left out and the sample's other rewards count; the authors' code replaces it by 0, which shifts the whole
    group.

    Args:
        weights: [R]; by default all 1.
        lengths: [B], trained tokens per sample (`mask.sum(1)`), to weigh by tokens; a sample of length 0 gets 0.
        eps: of the groups' standard deviations, >= 0.

    Returns:
        [B].
    """
    check.rank("rewards", rewards, 2, "[B, R]")
    check.groups(group_ids, rewards=rewards[:, :1].sum(1))
    b, r = rewards.shape
    if weights is None:
        weights = rewards.new_ones(r)
    check.shape("weights", weights, (r,), "[R] of rewards [B, R]")
    ids = (
        group_index(group_ids) + b * torch.arange(r, device=group_ids.device)[:, None]
    )  # one group per (reward, prompt group)
    normed = grpo_advantages(rewards.T.double().reshape(-1), ids.reshape(-1), eps).view(r, b)
    total = weights.double() @ normed
    row_weights = _row_weights(rewards.isfinite().any(1), lengths)
    return in_dtype_of(rewards, _whiten(total, row_weights, 1e-8, global_sum))


def lite_ppo_advantages(
    rewards: Tensor, group_ids: Tensor, eps: float = 1e-6, global_sum: GlobalSum = one_rank
) -> Tensor:
    r"""Reward minus the mean reward of the group, divided by the standard deviation of the batch's rewards.

    $$A_i = \frac{r_i - \mathrm{mean}_{\mathrm{group}}(r)}{\mathrm{std}_{\mathrm{batch}}(r) + \epsilon}$$

    Lite PPO, https://arxiv.org/abs/2508.08221 ("Tricks or Traps?"), together with `token_mean`. The standard deviation
    of a group in which nearly all responses are right, or wrong, is small and would scale up its advantages. TRL's
    scale_rewards "batch".

    Choices: the deviation is that of the rewards themselves, around the batch's mean, with divisor n - 1, as in the
    authors' ROLL and in TRL; so it includes the spread between easy and hard prompts. eps is ROLL's 1e-6 (TRL: 1e-4).

    Args:
        eps: >= 0.

    Returns:
        [B]; 0 for a group of one.
    """
    check.groups(group_ids, rewards=rewards)
    check.not_negative(eps=eps)
    centred = dr_grpo_advantages(rewards.double(), group_ids)
    scored = rewards.isfinite()
    _, variance = _moments(torch.where(scored, rewards.double(), 0), scored, global_sum)
    return in_dtype_of(rewards, centred / (root(variance) + eps))


def _row_weights(scored: Tensor, lengths: Tensor | None) -> Tensor:
    """[B]: the weight of each row in statistics of the batch."""
    if lengths is None:
        return scored
    check.shape("lengths", lengths, tuple(scored.shape), "[B] as rewards")
    return lengths * scored


def _whiten(x: Tensor, weights: Tensor, eps: float, global_sum: GlobalSum) -> Tensor:
    """x minus its weighted mean over its weighted standard deviation; 0, as x must be, where the weight is 0."""
    centred, variance = _moments(x, weights, global_sum)
    scale = (variance + eps).sqrt()
    return centred / torch.where(scale > 0, scale, 1).to(x.dtype)


def _moments(x: Tensor, weights: Tensor, global_sum: GlobalSum) -> tuple[Tensor, Tensor]:
    """(x minus its weighted mean; its weighted variance with divisor n - 1, 0-d, float64). Weights are counts, or bool.

    x must be 0 where the weight is, and so is the first result.
    """

    def weighted_sum(y: Tensor) -> Tensor:
        return (y if weights.dtype == torch.bool else weights * y).sum(dtype=torch.float64)

    count, total = global_sum(torch.stack([weights.sum().double(), weighted_sum(x)])).to(x.device)
    mean = total / count.clamp(min=1)
    centred = torch.where(weights.bool(), x - mean.to(x.dtype), 0)
    squares = global_sum(weighted_sum(centred.square())).to(x.device)
    variance = squares / (count - 1).clamp(min=1)
    rounding = (_ROUNDING * mean).square()
    return centred, torch.where(variance > rounding, variance, 0)
