"""Advantages that are normalised over the whole batch: REINFORCE++, GDPO and Lite PPO.

Where the batch is spread over ranks, each takes a `global_sum` that adds a tensor over them (an engine's method of that
name): the statistics are then those of all rows and every rank agrees on them. All ranks must call, also one without
rows. Groups must not be split between ranks.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rlkit.advantages.group import _centre, _root, expand_to_tokens, grpo_advantages
from rlkit.advantages.returns import discounted_returns
from rlkit.losses._check import (
    check_groups,
    check_mask,
    check_not_negative,
    check_rank,
    check_shape,
    check_tensor,
    fail,
)
from rlkit.losses._numerics import masked, masked_sums


def reinforce_plus_plus_advantages(
    rewards: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    eps: float = 1e-8,
    global_sum: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    r"""Discounted return of each token, whitened over all tokens of the batch.

    $$G_t = \sum_{s \ge t} \gamma^{s - t} r_s, \quad
    A_t = \frac{G_t - \mathrm{mean}(G)}{\sqrt{\mathrm{var}(G) + \epsilon}}$$

    s and t count the tokens of the mask, so that tool output between them neither discounts nor stops a return.

    REINFORCE++, https://arxiv.org/abs/2501.03262; its KL penalty is part of the token rewards.

    Choices: the variance of all masked tokens with divisor n - 1 and eps inside the root, and a return that is
    carried over the tokens outside the mask; both as in verl.

    Args:
        rewards: [B, T] token rewards, of which only those in the mask count, or [B] outcome rewards, given to the last
            token of the mask. nan means "not judged": the row stays outside the statistics, advantage 0.
        mask: bool [B, T].
        gamma: discount of one token of the mask, in [0, 1].
        eps: >= 0; the variance below which a batch counts as equal.
        global_sum: adds a tensor over ranks (see the module); by default these rows are the batch.

    Returns:
        [B, T], 0 outside the mask, float32 (float64 for float64 rewards).

    Raises:
        ValueError: where mask is not bool [B, T], rewards are not [B] or of its shape, gamma is outside [0, 1] or eps
            is negative.
    """
    check_mask(mask)
    check_not_negative(eps=eps)
    if not 0 <= gamma <= 1:
        fail("gamma", gamma, "a number in [0, 1]")
    check_tensor("rewards", rewards)
    outcome = rewards.ndim == 1
    check_shape("rewards", rewards, tuple(mask.shape[:1] if outcome else mask.shape), "or [B, T] as mask")
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    judged = ~(rewards if outcome else masked_sums(rewards, mask)[0]).isnan()
    if outcome and gamma == 1:  # every token of a row has the same return
        white = _whiten(torch.where(judged, rewards, 0).double(), mask.sum(1) * judged, eps, global_sum)
        return expand_to_tokens(white.to(rewards.dtype), mask)
    mask = mask & judged[:, None]
    if outcome:
        place = mask.view(torch.int8).cumsum(1, dtype=torch.int32)  # of bools, a CPU takes five times as long
        power = gamma ** torch.arange(mask.shape[1], dtype=torch.float64, device=mask.device)
        power = power.to(rewards.dtype).index_select(0, (place[:, -1:] - place).flatten())
        returns = masked(power.view(mask.shape) * rewards[:, None], mask)
    else:
        returns = discounted_returns(rewards, mask, gamma)
    return _whiten(returns, mask, eps, global_sum)


def reinforce_plus_plus_baseline_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    lengths: Tensor | None = None,
    eps: float = 1e-8,
    global_sum: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    r"""Reward minus the mean of its group, whitened over the batch.

    $$c_i = r_i - \mathrm{mean}_{\mathrm{group}}(r), \quad
    A_i = \frac{c_i - \mathrm{mean}(c)}{\sqrt{\mathrm{var}(c) + \epsilon}}$$

    REINFORCE++ with baseline, https://arxiv.org/abs/2501.03262.

    Choices: every sample weighs the same in the batch's mean and variance; with `lengths` every token does, as in verl
    (a group of equal rewards then gets minus the mean). Divisor n - 1, eps inside the root. A group of one has c = 0;
    verl leaves its reward as it is.

    Args:
        rewards: [B], one a sample; nan means "not judged": outside all statistics, advantage 0.
        group_ids: [B], any integers, in any order: equal ids are one group, of any size.
        lengths: [B], trained tokens a sample (`mask.sum(1)`), to weigh by tokens; a sample of length 0 gets 0.
        eps: >= 0; the variance below which a batch counts as equal.
        global_sum: adds a tensor over ranks (see the module); by default these rows are the batch.

    Returns:
        [B], float32 (float64 for float64 rewards).

    Raises:
        ValueError: where rewards or lengths are not [B], group_ids are not integers of that length, or eps is negative.
    """
    check_groups(group_ids, rewards=rewards)
    check_not_negative(eps=eps)
    weights = _row_weights(~rewards.isnan(), lengths)
    centred, _, _ = _centre(rewards, group_ids)
    return _whiten(centred, weights, eps, global_sum).to(torch.promote_types(rewards.dtype, torch.float32))


def gdpo_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    weights: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    eps: float = 1e-6,
    global_sum: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    r"""Several rewards, each normalised within its group, then added and whitened over the batch.

    $$a_i = \sum_k w_k
    \frac{r_{ik} - \mathrm{mean}_{\mathrm{group}}(r_k)}{\mathrm{std}_{\mathrm{group}}(r_k) + \epsilon}, \quad
    A_i = \frac{a_i - \mathrm{mean}(a)}{\sqrt{\mathrm{var}(a) + 10^{-8}}}$$

    GDPO, https://arxiv.org/abs/2601.05242: with the sum of rewards normalised instead, answers that earned different
    rewards collapse to one advantage.

    Choices: each reward as in `grpo_advantages`. The batch statistics weigh every sample the same, as in the authors'
    TRL code; with `lengths` every token, as in verl and the authors' verl code. A reward that is nan is left out alone:
    the authors' code takes it as 0, which shifts its whole group.

    Args:
        rewards: [B, R], R rewards a sample; nan means "not judged": outside its group's statistics of that reward,
            contributing 0. A sample with no judged reward stays outside the batch statistics, advantage 0.
        group_ids: [B], any integers, in any order: equal ids are one group, of any size.
        weights: [R]; by default all 1.
        lengths: [B], trained tokens a sample (`mask.sum(1)`), to weigh by tokens; a sample of length 0 gets 0.
        eps: of the groups' standard deviations, >= 0.
        global_sum: adds a tensor over ranks (see the module); by default these rows are the batch.

    Returns:
        [B], float32 (float64 for float64 rewards).

    Raises:
        ValueError: where rewards are not [B, R], weights not [R], lengths not [B], group_ids are not integers of that
            length, or eps is negative.
    """
    check_rank("rewards", rewards, 2, "[B, R]")
    b, r = rewards.shape
    check_groups(group_ids, rewards=rewards[:, :1].sum(1))
    if weights is not None:
        check_shape("weights", weights, (r,), "[R] of rewards [B, R]")
    row_weights = _row_weights(~rewards.isnan().all(1), lengths)
    _, index = torch.unique(group_ids, return_inverse=True)
    ids = index + b * torch.arange(r, device=index.device)[:, None]  # one group for each reward of each group
    normed = grpo_advantages(rewards.T.double().reshape(-1), ids.reshape(-1), eps).view(r, b)
    total = normed.sum(0) if weights is None else (weights.double()[:, None] * normed).sum(0)
    return _whiten(total, row_weights, 1e-8, global_sum).to(torch.promote_types(rewards.dtype, torch.float32))


def lite_ppo_advantages(
    rewards: Tensor, group_ids: Tensor, eps: float = 1e-6, global_sum: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    r"""Reward minus the mean of its group, over the standard deviation of the batch's rewards.

    $$A_i = \frac{r_i - \mathrm{mean}_{\mathrm{group}}(r)}{\mathrm{std}_{\mathrm{batch}}(r) + \epsilon}$$

    Lite PPO, https://arxiv.org/abs/2508.08221 ("Tricks or Traps?"), beside `token_mean`: a group that is nearly all
    right or wrong has a small deviation of its own, which would scale its advantages up. TRL's scale_rewards "batch".

    Choices: the deviation is that of the rewards as they came, around the batch's mean, with divisor n - 1, as in the
    authors' ROLL and in TRL; so the spread between easy and hard prompts counts. eps is ROLL's 1e-6 (TRL: 1e-4).

    Args:
        rewards: [B], one a sample; nan means "not judged": outside all statistics, advantage 0.
        group_ids: [B], any integers, in any order: equal ids are one group, of any size.
        eps: >= 0.
        global_sum: adds a tensor over ranks (see the module); by default these rows are the batch.

    Returns:
        [B], float32 (float64 for float64 rewards); 0 for a group of one.

    Raises:
        ValueError: where rewards are not [B], group_ids are not integers of that length, or eps is negative.
    """
    check_groups(group_ids, rewards=rewards)
    check_not_negative(eps=eps)
    centred, _, _ = _centre(rewards, group_ids)
    judged = ~rewards.isnan()
    _, variance = _moments(torch.where(judged, rewards, 0).double(), judged, global_sum)
    return (centred / (_root(variance) + eps)).to(torch.promote_types(rewards.dtype, torch.float32))


def _row_weights(judged: Tensor, lengths: Tensor | None) -> Tensor:
    """[B]: what each row weighs in statistics of the batch."""
    if lengths is None:
        return judged
    check_shape("lengths", lengths, tuple(judged.shape), "[B] as rewards")
    return lengths * judged


def _whiten(x: Tensor, weights: Tensor, eps: float, global_sum: Callable[[Tensor], Tensor] | None) -> Tensor:
    """x minus its weighted mean over its weighted standard deviation; 0 where the weight is 0."""
    centred, variance = _moments(x, weights, global_sum)
    scale = (variance + eps).sqrt()
    return centred / torch.where(scale > 0, scale, 1.0).to(x.dtype)


def _moments(x: Tensor, weights: Tensor, global_sum: Callable[[Tensor], Tensor] | None) -> tuple[Tensor, Tensor]:
    """(x minus its weighted mean, 0 where the weight is 0; its weighted variance, float64 0-d, with divisor n - 1)."""
    inside, wide = weights.bool(), torch.float64

    def weighted_sum(y: Tensor) -> Tensor:  # of y that is 0 where the weight is
        return (y if weights.dtype == torch.bool else weights * y).sum(-1).sum(dtype=wide)

    x = masked(x, inside)
    sums = torch.stack([weights.sum().to(wide), weighted_sum(x)])
    count, total = sums if global_sum is None else global_sum(sums).to(x.device)
    centred = masked(x - (total / count.clamp(min=1)).to(x.dtype), inside)
    squares = weighted_sum(centred.square())
    squares = squares if global_sum is None else global_sum(squares).to(x.device)
    return centred, squares / (count - 1).clamp(min=1)
