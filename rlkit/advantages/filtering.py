"""Which samples to train on, by their rewards: informative groups, and policy filtration."""

import torch
from torch import Tensor

from rlkit import _check as check
from rlkit.advantages._groups import (
    group_index,
    group_max,
    group_min,
    group_size,
    group_sum,
    rewards_and_groups,
    zero_unscored,
)


def informative_groups(rewards: Tensor, group_ids: Tensor) -> Tensor:
    r"""True for the samples of groups whose rewards are not all equal: $\min_j r_j < \max_j r_j$.

    Samples of other groups have advantage 0. Dynamic sampling replaces their prompts by new ones.

    DAPO, https://arxiv.org/abs/2503.14476 equation 11.

    Choices: DAPO requires that some but not all responses are correct, which is the same for rewards 0 and 1. verl
    keeps groups of one; rlkit does not, because their advantage is 0.

    Returns:
        bool [B], equal for all samples of a group, scored or not; False for a group with fewer than two
        scored samples.
    """
    check.groups(group_ids, rewards=rewards)
    group, scored = group_index(group_ids), rewards.isfinite()
    smallest = group_min(torch.where(scored, rewards.double(), torch.inf), group)
    largest = group_max(torch.where(scored, rewards.double(), -torch.inf), group)
    return smallest < largest


def pf_ppo_weights(rewards: Tensor, group_ids: Tensor, best: float = 0.5, worst: float = 0.0) -> Tensor:
    r"""Probability of each sample under a filtered policy, which prefers the best and optionally the worst of a group.

    $$w_i = b\, p_i + w\, q_i + (1 - b - w) \frac{1 - p_i}{N - 1}$$

    with p one-hot at the best of the N samples of the group and q at the worst; reward models are most reliable there.

    PF-PPO, https://arxiv.org/abs/2409.06957. best = 1/2, worst = 0 is the paper's best-random (BR), 1/2 and 1/2 its
    best-worst (BW), 1 and 0 best-of-N (BoN).

    Choices: samples that tie for best or worst share p or q, so no order of the rows decides. verl ranks over the whole
    batch instead (equal `group_ids` do that), its default is `pf_ppo_power_weights`, which is not in the paper, and
    its "max_random" draws the best four times as often as another, a share that falls with N.

    Args:
        best, worst: shares of the best and the worst, >= 0; best + worst <= 1.

    Returns:
        [B], summing to 1 in each group with a scored sample: draw samples with `pf_ppo_indices`, or weigh each one's
        loss by N w.
    """
    check.groups(group_ids, rewards=rewards)
    check.not_negative(best=best, worst=worst)
    if best + worst > 1:
        check.fail("best + worst", best + worst, "at most 1")
    r, group = rewards_and_groups(rewards, group_ids)
    size = group_size(group)
    p = _shared(r == group_max(r, group), group)
    q = _shared(r == group_min(r, group), group)
    weights = best * p + worst * q + (1 - best - worst) * (1 - p) / (size - 1).clamp(min=1)
    return zero_unscored(torch.where(size > 1, weights, 1), rewards)


def pf_ppo_power_weights(rewards: Tensor, group_ids: Tensor, power: float = 2.0) -> Tensor:
    r"""Probability of each sample, proportional to a power of its absolute reward: extremes are drawn most often.

    $$w_i = \frac{|r_i|^p}{\sum_j |r_j|^p}$$

    verl's default for PF-PPO, reweight_method "pow" with weight_pow 2. It is not in the paper
    (https://arxiv.org/abs/2409.06957), whose weights depend only on the rank; see `pf_ppo_weights`. It depends on the
    zero of the rewards: with rewards 0 and 1, a sample with reward 0 is never drawn.

    Choices: a sum over the group, so that every prompt has the same share; verl's is over the whole batch (equal
    `group_ids` do that). Where all rewards are 0 the samples share equally. verl adds 1e-8 to each |r|^p for that
    purpose, so a reward of 0 has a small weight; here its weight is 0.

    Args:
        power: p, >= 0; 0 gives equal weights.

    Returns:
        [B], summing to 1 in each group with a scored sample: draw samples with `pf_ppo_indices`.
    """
    check.groups(group_ids, rewards=rewards)
    check.not_negative(power=power)
    r, group = rewards_and_groups(rewards, group_ids)
    powers = r.abs().pow(power)
    powers = torch.where(group_sum(powers, group) > 0, powers, 1)
    return zero_unscored(powers / group_sum(powers, group), rewards)


def pf_ppo_indices(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Rows to train on: `count` of them drawn with replacement, each with a probability proportional to its weight.

    PF-PPO, https://arxiv.org/abs/2409.06957 algorithm 2; one draw over the whole batch, as in verl.

    Args:
        weights: floating point [B], >= 0 and not all 0, as of `pf_ppo_weights` or `pf_ppo_power_weights`.
        count: rows to draw, >= 0.
        generator: on the device of `weights`; equal seeds give equal rows.

    Returns:
        int64 [count], row numbers.
    """
    check.floating("weights", weights)
    check.rank("weights", weights, 1, "[B]")
    check.not_negative(count=count)
    if count == 0:
        return torch.zeros(0, dtype=torch.long, device=weights.device)
    return torch.multinomial(weights, count, replacement=True, generator=generator)


def _shared(chosen: Tensor, group: Tensor) -> Tensor:
    """[B]: 1 / n on the n chosen samples of a group, 0 on the others."""
    return chosen / group_sum(chosen.double(), group)
