"""Which samples to train on, by their rewards: informative groups, and policy filtration."""

import torch
from torch import Tensor

from rlkit import _check as check
from rlkit.advantages._groups import group_index, group_max, group_min, group_sums, in_dtype_of, judged_rewards


def informative_groups(rewards: Tensor, group_ids: Tensor) -> Tensor:
    r"""True for the samples of groups whose rewards are not all equal: $\min_j r_j < \max_j r_j$.

    Samples of other groups have advantage 0. Dynamic sampling replaces their prompts by new ones.

    DAPO, https://arxiv.org/abs/2503.14476 equation 11.

    Choices: DAPO requires that some but not all answers are correct, which is the same for rewards 0 and 1. verl keeps
    groups of one; rlkit does not, because their advantage is 0.

    Returns:
        bool [B], equal for all samples of a group, judged or not; False for a group with fewer than two
        judged samples.
    """
    check.groups(group_ids, rewards=rewards)
    known, judged = judged_rewards(rewards)
    largest, smallest = _extremes(known, judged, group_index(group_ids))
    return smallest < largest


def pf_ppo_weights(rewards: Tensor, group_ids: Tensor, best: float = 0.5, worst: float = 0.0) -> Tensor:
    r"""Probability of each sample under a filtered policy, which prefers the best and optionally the worst of a group.

    $$w_i = b\, p_i + w\, q_i + (1 - b - w) \frac{1 - p_i}{N - 1}$$

    with p one-hot at the best of the N samples of the group and q at the worst: a reward model is surest of those.

    PF-PPO, https://arxiv.org/abs/2409.06957. best = 1/2, worst = 0 is the paper's best-random (BR), 1/2 and 1/2 its
    best-worst (BW), 1 and 0 best-of-N (BoN).

    Choices: samples that tie for best or worst share p or q, so no order of the rows decides. verl ranks over the whole
    batch instead (equal `group_ids` do that), its default is `pf_ppo_power_weights`, which is not in the paper, and
    its "max_random" draws the best four times as often as another, a share that falls with N.

    Args:
        best, worst: shares of the best and the worst, >= 0; best + worst <= 1.

    Returns:
        [B], summing to 1 in each group with a judged sample: draw samples with `pf_ppo_indices`, or weigh each one's
        loss by N w.
    """
    check.groups(group_ids, rewards=rewards)
    check.not_negative(best=best, worst=worst)
    if best + worst > 1:
        check.fail("best + worst", best + worst, "at most 1")
    index = group_index(group_ids)
    known, judged = judged_rewards(rewards)
    largest, smallest = _extremes(known, judged, index)
    p = _share_of_group(judged & (known == largest), index)
    q = _share_of_group(judged & (known == smallest), index)
    others = group_sums(judged.double(), index)[index] - 1
    weights = best * p + worst * q + (1 - best - worst) * (1 - p) / others.clamp(min=1)
    weights = torch.where(others > 0, weights, 1)
    return in_dtype_of(rewards, torch.where(judged, weights, 0))


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
        [B], summing to 1 in each group with a judged sample: draw samples with `pf_ppo_indices`.
    """
    check.groups(group_ids, rewards=rewards)
    check.not_negative(power=power)
    index = group_index(group_ids)
    known, judged = judged_rewards(rewards)
    powers = known.abs().pow(power) * judged
    powers = torch.where(group_sums(powers, index)[index] > 0, powers, judged.double())
    total = group_sums(powers, index)[index]
    return in_dtype_of(rewards, powers / torch.where(total > 0, total, 1))


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


def _extremes(known: Tensor, judged: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """[B] each: the largest and the smallest judged reward of the group of each sample."""
    largest = group_max(torch.where(judged, known, -torch.inf), index)
    smallest = group_min(torch.where(judged, known, torch.inf), index)
    return largest, smallest


def _share_of_group(chosen: Tensor, index: Tensor) -> Tensor:
    """[B]: 1 / n on the n chosen samples of a group, 0 on the others."""
    return chosen / group_sums(chosen.double(), index).clamp(min=1)[index]
