"""Advantages of samples relative to the other samples of their group."""

import torch
from torch import Tensor

from rlkit import _check as check
from rlkit.advantages._groups import (
    difference_to_others,
    group_mean,
    group_std,
    rewards_and_groups,
    zero_unscored,
)


def grpo_advantages(rewards: Tensor, group_ids: Tensor, eps: float = 1e-6) -> Tensor:
    r"""Reward minus the mean reward of the group, divided by the group's standard deviation.

    $$A_i = \frac{r_i - \mathrm{mean}(r)}{\mathrm{std}(r) + \epsilon}, \quad
    \mathrm{std}(r)^2 = \frac{1}{G - 1} \sum_j (r_j - \mathrm{mean}(r))^2$$

    DeepSeekMath, https://arxiv.org/abs/2402.03300 section 4.1.2.

    Choices: the sample standard deviation (divisor G - 1), as in verl and TRL; the paper leaves it open. A group of one
    gives 0; verl gives the raw reward. eps is verl's 1e-6 (TRL: 1e-4).

    Args:
        eps: >= 0.

    Returns:
        [B].
    """
    check.groups(group_ids, rewards=rewards)
    check.not_negative(eps=eps)
    r, group = rewards_and_groups(rewards, group_ids)
    advantages = (r - group_mean(r, group)) / (group_std(r, group) + eps)
    return zero_unscored(advantages, rewards)


def leave_one_out_grpo_advantages(rewards: Tensor, group_ids: Tensor, eps: float = 1e-6) -> Tensor:
    r"""Reward minus the mean reward of the other samples of the group, divided by their standard deviation.

    $$A_i = \frac{r_i - m_i}{s_i + \epsilon}, \quad m_i = \frac{1}{G - 1} \sum_{j \ne i} r_j, \quad
    s_i^2 = \frac{1}{G - 2} \sum_{j \ne i} (r_j - m_i)^2$$

    RLOO's baseline (https://arxiv.org/abs/2402.14740) with a standard deviation that also leaves out the sample, so
    that neither depends on it; NeMo-RL's default for GRPO.

    Choices: where the rewards of the others are all equal, as always in groups of two, the difference is not divided,
    as in NeMo-RL. A group of one gives 0.

    Args:
        eps: >= 0.

    Returns:
        [B].
    """
    check.groups(group_ids, rewards=rewards)
    check.not_negative(eps=eps)
    r, group = rewards_and_groups(rewards, group_ids)
    difference, std = difference_to_others(r, group)
    return zero_unscored(difference / torch.where(std > 0, std + eps, 1), rewards)


def dr_grpo_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    r"""Reward minus the mean reward of the group, without scaling: $A_i = r_i - \mathrm{mean}(r)$.

    Dr. GRPO, https://arxiv.org/abs/2503.20783 sections 3.1 and 3.2: the division by the standard deviation gives more
    weight to groups in which nearly all responses are right, or wrong.

    Returns:
        [B]; 0 for a group of one.
    """
    check.groups(group_ids, rewards=rewards)
    r, group = rewards_and_groups(rewards, group_ids)
    return zero_unscored(r - group_mean(r, group), rewards)


def expand_to_tokens(advantages: Tensor, mask: Tensor) -> Tensor:
    """Each sequence's advantage on every token of its mask, 0 elsewhere: `out[b, t] = mask[b, t] * advantages[b]`.

    Args:
        advantages: [B].

    Returns:
        [B, T], of the dtype of `advantages`.
    """
    check.token_mask(mask)
    check.rank("advantages", advantages, 1, "[B]")
    check.shape("advantages", advantages, (mask.shape[0],), "[B] as mask")
    return torch.where(mask, advantages[:, None], 0)
