"""Which samples to train on, by their rewards: informative groups, and policy filtration."""

import torch
from torch import Tensor

from rlkit.advantages.group import _group_sums
from rlkit.losses._check import check_groups, check_not_negative, check_rank, fail


def informative_groups(rewards: Tensor, group_ids: Tensor) -> Tensor:
    r"""True for the samples of groups whose rewards are not all equal: $\min_j r_j < \max_j r_j$.

    The others give no advantage against their group. Dynamic sampling draws new prompts in their place.

    DAPO, https://arxiv.org/abs/2503.14476 equation 11.

    Choices: DAPO asks that some but not all answers are right; for rewards 0 and 1 that is the same. verl keeps groups
    of one; as their advantage is 0 we do not.

    Args:
        rewards: [B], one a sample; nan means "not judged": its group goes by the other rewards.
        group_ids: [B], any integers, in any order: equal ids are one group, of any size.

    Returns:
        bool [B], equal within a group, also for its samples that were not judged; False for a group with fewer than two
        judged samples.

    Raises:
        ValueError: where rewards are not [B] or group_ids are not integers of that length.
    """
    check_groups(group_ids, rewards=rewards)
    is_best, is_worst, _, index = _extremes(rewards, group_ids)
    middle = _group_sums((is_best ^ is_worst).double(), index)  # in a group of equal rewards each is both
    return (middle > 0)[index]


def pf_ppo_weights(rewards: Tensor, group_ids: Tensor, best: float = 0.5, worst: float = 0.0) -> Tensor:
    r"""Probability of each sample under a filtered policy that favours the best, and maybe the worst, of a group.

    $$w_i = b\, p_i + w\, q_i + (1 - b - w) \frac{1 - p_i}{N - 1}$$

    with p one-hot at the best of the N samples of the group and q at the worst: a reward model is surest of those.

    PF-PPO, https://arxiv.org/abs/2409.06957. best = 1/2, worst = 0 is the paper's best-random (BR), 1/2 and 1/2 its
    best-worst (BW), 1 and 0 best-of-N (BoN).

    Choices: samples that tie for best or worst share p or q, so no order of the rows decides. verl ranks over the whole
    batch instead (equal `group_ids` do that), its default is `pf_ppo_power_weights`, which is not in the paper, and
    its "max_random" draws the best four times as often as another, a share that falls with N.

    Args:
        rewards: [B], one a sample; nan means "not judged": not one of the N, weight 0.
        group_ids: [B], any integers, in any order: equal ids are one group, of any size.
        best: share of the best, >= 0.
        worst: share of the worst, >= 0; best + worst <= 1.

    Returns:
        [B], float32 (float64 for float64 rewards), summing to 1 in each group with a judged sample: draw samples with
        `pf_ppo_indices`, or weigh each one's loss by N w.

    Raises:
        ValueError: where rewards are not [B], group_ids are not integers of that length, a share is negative or the
            shares exceed 1.
    """
    check_groups(group_ids, rewards=rewards)
    check_not_negative(best=best, worst=worst)
    if best + worst > 1:
        fail("best + worst", best + worst, "at most 1")
    is_best, is_worst, judged, index = _extremes(rewards, group_ids)
    p = is_best / _group_sums(is_best.double(), index).clamp(min=1)[index]
    q = is_worst / _group_sums(is_worst.double(), index).clamp(min=1)[index]
    count = _group_sums(judged.double(), index)[index]
    weights = best * p + worst * q + (1 - best - worst) * (1 - p) / (count - 1).clamp(min=1)
    weights = torch.where(count > 1, weights, 1.0)
    return torch.where(judged, weights, 0.0).to(torch.promote_types(rewards.dtype, torch.float32))


def pf_ppo_power_weights(rewards: Tensor, group_ids: Tensor, power: float = 2.0) -> Tensor:
    r"""Probability of each sample that goes with a power of its reward's size: the extremes are drawn most.

    $$w_i = \frac{|r_i|^p}{\sum_j |r_j|^p}$$

    verl's default for PF-PPO, reweight_method "pow" with weight_pow 2. It is not in the paper
    (https://arxiv.org/abs/2409.06957), whose weights go by rank alone, see `pf_ppo_weights`. It depends on where 0
    lies: of rewards 0 and 1 no failure is ever drawn.

    Choices: a sum over the group, so that every prompt has the same share; verl's is over the whole batch (equal
    `group_ids` do that). Where all rewards are 0 the samples share equally. verl gets there by adding 1e-8 to each
    |r|^p, which lets a reward of 0 through beside others; here that has weight 0.

    Args:
        rewards: [B], one a sample; nan means "not judged": not in the sum, weight 0.
        group_ids: [B], any integers, in any order: equal ids are one group, of any size.
        power: p, >= 0; 0 gives equal weights.

    Returns:
        [B], float32 (float64 for float64 rewards), summing to 1 in each group with a judged sample: draw samples with
        `pf_ppo_indices`.

    Raises:
        ValueError: where rewards are not [B], group_ids are not integers of that length, or power is negative.
    """
    check_groups(group_ids, rewards=rewards)
    check_not_negative(power=power)
    _, index = torch.unique(group_ids, return_inverse=True)
    judged = ~rewards.isnan()
    powers = torch.where(judged, rewards, 0).double().abs().pow(power) * judged
    powers = torch.where(_group_sums(powers, index)[index] > 0, powers, judged.double())
    weights = powers / _group_sums(powers, index)[index].clamp(min=torch.finfo(powers.dtype).tiny)
    return weights.to(torch.promote_types(rewards.dtype, torch.float32))


def pf_ppo_indices(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Rows to train on: `count` of them drawn with replacement, each with a probability proportional to its weight.

    PF-PPO, https://arxiv.org/abs/2409.06957 algorithm 2; one draw over the whole batch, as in verl.

    Args:
        weights: floating point [B], >= 0 and not all 0, as of `pf_ppo_weights` or `pf_ppo_power_weights`.
        count: rows to draw, >= 0.
        generator: on the device of `weights`; equal seeds give equal rows.

    Returns:
        int64 [count], row numbers.

    Raises:
        ValueError: where weights are not floating point [B] or count is negative.
    """
    check_rank("weights", weights, 1, "[B]")
    if not weights.is_floating_point():
        fail("weights", weights, "a floating point tensor")
    check_not_negative(count=count)
    if count == 0:
        return torch.zeros(0, dtype=torch.long, device=weights.device)
    return torch.multinomial(weights, count, replacement=True, generator=generator)


def _extremes(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(is best of its group [B], is worst [B], judged [B], group index of each sample [B]); ties are all best."""
    _, index = torch.unique(group_ids, return_inverse=True)
    judged = ~rewards.isnan()
    known = torch.where(judged, rewards, 0).double()
    least = torch.full_like(known, -torch.inf)
    highest = least.scatter_reduce(0, index, torch.where(judged, known, -torch.inf), "amax")[index]
    lowest = (-least).scatter_reduce(0, index, torch.where(judged, known, torch.inf), "amin")[index]
    return judged & (known == highest), judged & (known == lowest), judged, index
