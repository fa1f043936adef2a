"""Advantages of samples against the other samples of their group."""

import torch
from torch import Tensor

from rlkit.losses._check import check_groups, check_mask, check_not_negative, check_rank, check_shape
from rlkit.losses._numerics import masked


def grpo_advantages(rewards: Tensor, group_ids: Tensor, eps: float = 1e-6) -> Tensor:
    r"""Reward minus the mean of its group, over the standard deviation of its group.

    $$A_i = \frac{r_i - \mathrm{mean}(r)}{\mathrm{std}(r) + \epsilon}, \quad
    \mathrm{std}(r)^2 = \frac{1}{G - 1} \sum_j (r_j - \mathrm{mean}(r))^2$$

    DeepSeekMath, https://arxiv.org/abs/2402.03300 section 4.1.2.

    Choices: the sample standard deviation (divisor G - 1), as in verl and TRL; the paper leaves it open. A group of one
    gives 0; verl gives it the raw reward. eps is verl's 1e-6 (TRL: 1e-4). The sums are taken in float64, as a group of
    equal rewards must not have its rounding error scaled up to an advantage.

    Args:
        rewards: [B], one a sample; nan means "not judged": outside its group's statistics, advantage 0.
        group_ids: [B], any integers, in any order: equal ids are one group, of any size.
        eps: >= 0.

    Returns:
        [B], float32 (float64 for float64 rewards).

    Raises:
        ValueError: where rewards are not [B], group_ids are not integers of that length, or eps is negative.
    """
    check_groups(group_ids, rewards=rewards)
    check_not_negative(eps=eps)
    centred, index, count = _centre(rewards, group_ids)
    variance = _group_sums(centred.square(), index) / (count - 1).clamp(min=1)
    advantages = centred / (_root(variance) + eps)[index]
    return advantages.to(torch.promote_types(rewards.dtype, torch.float32))


def dr_grpo_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    r"""Reward minus the mean of its group, not scaled: $A_i = r_i - \mathrm{mean}(r)$.

    Dr. GRPO, https://arxiv.org/abs/2503.20783 sections 3.1 and 3.2: the division by the standard deviation weighs up
    groups that are nearly all right or all wrong.

    Args:
        rewards: [B], one a sample; nan means "not judged": outside its group's mean, advantage 0.
        group_ids: [B], any integers, in any order: equal ids are one group, of any size.

    Returns:
        [B], float32 (float64 for float64 rewards); 0 for a group of one.

    Raises:
        ValueError: where rewards are not [B] or group_ids are not integers of that length.
    """
    check_groups(group_ids, rewards=rewards)
    centred, _, _ = _centre(rewards, group_ids)
    return centred.to(torch.promote_types(rewards.dtype, torch.float32))


def expand_to_tokens(advantages: Tensor, mask: Tensor) -> Tensor:
    """Each sequence's advantage on every token of its mask, 0 elsewhere: `out[b, t] = mask[b, t] * advantages[b]`.

    Args:
        advantages: [B].
        mask: bool [B, T].

    Returns:
        [B, T], of the dtype of `advantages`.

    Raises:
        ValueError: for a wrong rank, shape or dtype.
    """
    check_mask(mask)
    check_rank("advantages", advantages, 1, "[B]")
    check_shape("advantages", advantages, (mask.shape[0],), "[B] as mask")
    return masked(advantages[:, None], mask)


def _root(variance: Tensor) -> Tensor:
    """The square root of a float64 variance, never quite 0: 0 may be divided by it, and its gradient at 0 is 0."""
    return variance.clamp(min=torch.finfo(torch.float64).tiny).sqrt()


def _group_sums(x: Tensor, index: Tensor, groups: int | None = None) -> Tensor:
    """[groups, ...]: the sum of x [B, ...] over group k at k; by default as long as x, slots past the last group 0."""
    slots = x.shape[0] if groups is None else groups
    return x.new_zeros(slots, *x.shape[1:]).index_add_(0, index, x)


def _centre(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(rewards minus group mean with 0 where not judged [B], group index of each sample [B], judged by group [B])."""
    _, index = torch.unique(group_ids, return_inverse=True)
    judged = ~rewards.isnan()
    known = torch.where(judged, rewards, 0.0).double()
    count = _group_sums(judged.double(), index)
    mean = _group_sums(known, index) / count.clamp(min=1)
    return torch.where(judged, known - mean[index], 0.0), index, count
