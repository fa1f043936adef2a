"""Advantages of samples against a baseline: the others of the group, a greedy response, the pass rate."""

from typing import NamedTuple

import torch
from torch import Tensor

from rlkit import _check as check
from rlkit._numerics import GlobalSum, one_rank
from rlkit.advantages._groups import (
    group_index,
    group_max,
    group_mean,
    group_min,
    group_size,
    group_sum,
    in_dtype_of,
    rewards_and_groups,
    zero_unscored,
)


def rloo_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    r"""Reward minus the mean reward of the other samples of the group.

    $$A_i = r_i - \frac{1}{G - 1} \sum_{j \ne i} r_j = \frac{G}{G - 1} (r_i - \mathrm{mean}(r))$$

    RLOO, https://arxiv.org/abs/2402.14740.

    Choices: a group of one gives 0; in verl the looped version gives the raw reward and the vectorised version 0.

    Returns:
        [B].
    """
    check.groups(group_ids, rewards=rewards)
    r, group = rewards_and_groups(rewards, group_ids)
    size = group_size(group)
    advantages = size / (size - 1).clamp(min=1) * (r - group_mean(r, group))
    return zero_unscored(advantages, rewards)


def remax_advantages(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    r"""Reward minus the reward of the greedy response to the same prompt: $A_i = r_i - r_i^{\mathrm{greedy}}$.

    ReMax, https://arxiv.org/abs/2310.10505.

    Args:
        greedy_rewards: [B], the reward of the greedy response to the sample's prompt; nan gives advantage 0.

    Returns:
        [B], float32 (float64 if either argument is).
    """
    check.rank("rewards", rewards, 1, "[B]")
    check.shape("greedy_rewards", greedy_rewards, tuple(rewards.shape), "as rewards")
    advantages = rewards.double() - greedy_rewards.double()
    scored = rewards.isfinite() & greedy_rewards.isfinite()
    return in_dtype_of(rewards + greedy_rewards, torch.where(scored, advantages, 0))


class AdvantagesAndBaselines(NamedTuple):
    """What `rae_advantages` returns."""

    advantages: Tensor
    baselines: Tensor


def rae_advantages(rewards: Tensor, roles: Tensor, baselines: Tensor, decay: float = 0.95) -> AdvantagesAndBaselines:
    r"""Reward minus the running mean of the earlier rewards of the same role.

    $$A_i = r_i - b_{role(i)}, \quad b_{role(i)} \leftarrow \alpha\, b_{role(i)} + (1 - \alpha)\, r_i$$

    Role-conditioned advantage estimation, SPIRAL, https://arxiv.org/abs/2506.24119, for a policy that plays a game
    against itself: the expected rewards of the roles differ, and there is no group of responses to one prompt.

    Args:
        roles: integer [B], in [0, R): the role of each sample; with several games, one id per game and role.
        baselines: [R], from the previous call; zeros at the start.
        decay: alpha, in [0, 1].

    Returns:
        AdvantagesAndBaselines: advantages [B], and the baselines [R] for the next call. Rows are processed in order;
        rows that were not scored are skipped.
    """
    check.rank("rewards", rewards, 1, "[B]")
    check.integer("roles", roles)
    check.shape("roles", roles, tuple(rewards.shape), "as rewards")
    check.rank("baselines", baselines, 1, "[R]")
    check.share(decay=decay)
    scored = rewards.isfinite()
    r = torch.where(scored, rewards.double(), 0)
    running, before = baselines.double(), [r[:0]]
    for i in range(len(r)):
        same_role = torch.arange(len(running), device=roles.device) == roles[i]  # [R]
        before.append((running * same_role).sum(0, keepdim=True))
        running = torch.where(same_role & scored[i], decay * running + (1 - decay) * r[i], running)
    return AdvantagesAndBaselines(zero_unscored(r - torch.cat(before), rewards), in_dtype_of(rewards, running))


def optimal_values(rewards: Tensor, group_ids: Tensor, beta: float = 0.5) -> Tensor:
    r"""The value of a prompt for the optimal policy under a KL penalty, estimated from responses of the reference.

    $$V^* = \beta \log \frac{1}{G} \sum_j e^{r_j / \beta}$$

    A*-PO, https://arxiv.org/abs/2505.20686, for `rlkit.losses.a_star_po_loss`. It lies between the mean of the group's
    rewards (large beta) and their maximum (small beta).

    Args:
        rewards: [B], of responses that the reference wrote.
        beta: > 0; the default is the authors'.

    Returns:
        [B], equal within a group; 0 for a group without a scored sample.
    """
    check.groups(group_ids, rewards=rewards)
    check.positive(beta=beta)
    group, scored = group_index(group_ids), rewards.isfinite()
    r = torch.where(scored, rewards.double(), -torch.inf)  # a sample that was not scored adds exp(-inf) = 0
    largest = group_max(r.detach(), group)
    mean = group_sum(((r - largest) / beta).exp(), group) / group_sum(scored.double(), group)
    values = largest + beta * mean.log()
    return in_dtype_of(rewards, torch.where(largest > -torch.inf, values, 0))


def opo_advantages(rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    r"""Reward minus the mean reward of the group, weighted by length.

    $$A_i = r_i - \frac{\sum_j l_j r_j}{\sum_j l_j}$$

    OPO, https://arxiv.org/abs/2505.23585: the baseline with the least gradient variance if a sample's squared gradient
    norm is proportional to its length.

    Choices: a group of one gives 0, as in the formula; verl gives the raw reward. A group whose lengths are all 0 gives
    0; none of its tokens is trained on.

    Args:
        lengths: [B], trained tokens per sample (`mask.sum(1)`), >= 0.

    Returns:
        [B].
    """
    check.groups(group_ids, rewards=rewards, lengths=lengths)
    r, group = rewards_and_groups(rewards, group_ids)
    lengths = lengths.double()
    advantages = r - group_mean(r, group, weights=lengths)
    return zero_unscored(torch.where(group_sum(lengths, group) > 0, advantages, 0), rewards)


def gpg_advantages(rewards: Tensor, group_ids: Tensor, global_sum: GlobalSum = one_rank) -> Tensor:
    r"""Reward minus the mean reward of the group, scaled up to compensate for groups without a gradient.

    $$A_i = \alpha (r_i - \mathrm{mean}(r)), \quad \alpha = \frac{B}{B - M}$$

    with B the scored samples of the batch and M those in groups whose rewards are all equal.

    GPG, https://arxiv.org/abs/2504.02546, with its F_norm = 1.

    Choices: the paper's M, as in the authors' code, but counted in samples, as groups may differ in size. verl instead
    divides B by the number of samples with a reward other than 0, which changes when a constant is added to all
    rewards. The paper's threshold beta_th (sample more prompts until enough groups are informative) concerns sampling:
    see `informative_groups`.

    Returns:
        [B]; all 0 if no group is informative.
    """
    check.groups(group_ids, rewards=rewards)
    r, group = rewards_and_groups(rewards, group_ids)
    informative = group_min(r, group) < group_max(r, group)
    counts = torch.stack([rewards.isfinite().sum(), informative.sum()]).double()
    samples, useful = global_sum(counts).to(r.device)
    advantages = samples / useful.clamp(min=1) * (r - group_mean(r, group))
    return zero_unscored(advantages, rewards)


def maxrl_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    r"""Reward minus the mean reward of the group, divided by that mean.

    $$A_i = \frac{r_i - \mathrm{mean}(r)}{\mathrm{mean}(r)}$$

    MaxRL, https://arxiv.org/abs/2602.02710: with rewards 0 and 1 the mean is the pass rate, and the
    gradient is that of its logarithm, its series cut at order G - 1. (The form that gives -1 to each sample of a group
    without a success has order G.)

    Choices: no eps (authors' code: 1e-6), as rewards >= 0 bound the result by G - 1; a group without a success gives 0.
    A group of one gives 0; the authors' code gives it reward / 1e-6.

    Args:
        rewards: [B], >= 0 and made for 0 and 1.

    Returns:
        [B]; 0 where the mean of the group is not above 0.
    """
    check.groups(group_ids, rewards=rewards)
    r, group = rewards_and_groups(rewards, group_ids)
    mean = group_mean(r, group)
    advantages = (r - mean) / torch.where(mean > 0, mean, 1)
    return zero_unscored(torch.where(mean > 0, advantages, 0), rewards)


def passk_advantages(rewards: Tensor, group_ids: Tensor, k: int, threshold: float = 0.5, eps: float = 1e-6) -> Tensor:
    r"""Advantage of a sample for the reward "one of k responses passes", averaged over all k-subsets of its group.

    With c of the N samples of a group passing, and $f = \binom{N - c}{k} / \binom{N}{k}$ the chance that k of them all
    fail,

    $$A_{\mathrm{pass}} = \frac{f}{\sigma}, \quad
    A_{\mathrm{fail}} = \frac{f - \binom{N - c - 1}{k - 1} / \binom{N - 1}{k - 1}}{\sigma}, \quad
    \sigma = \sqrt{f (1 - f)} + \epsilon$$

    Pass@k training, https://arxiv.org/abs/2508.10751 (its analytical derivation).

    Choices: k = 1 is GRPO with the population standard deviation. A group with fewer than k scored samples gives 0, as
    no k of them can be drawn. verl's "pass@k" is another method: see `passk_leave_one_out_advantages`.

    Args:
        k: > 0.
        threshold: a sample passes where its reward is above this.
        eps: >= 0.

    Returns:
        [B]; 0 where every k-subset of the group contains a pass, or no sample passes.
    """
    check.groups(group_ids, rewards=rewards)
    check.positive(k=k)
    check.not_negative(eps=eps)
    r, group = rewards_and_groups(rewards, group_ids)
    passed, size = r > threshold, group_size(group)
    failed = size - group_sum(passed.double(), group)
    all_fail = _subset_ratio(failed, size, k)
    others_fail = _subset_ratio(failed - 1, size - 1, k - 1)
    scale = (all_fail * (1 - all_fail)).sqrt() + eps
    advantages = torch.where(passed, all_fail, all_fail - others_fail) / torch.where(scale > 0, scale, 1)
    return zero_unscored(advantages, rewards)


def passk_leave_one_out_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    r"""The contribution of a sample to the best reward of its group: $A_i = \max_j r_j - \max_{j \ne i} r_j$.

    Only the best sample has an advantage other than 0, its reward minus the second best, and only without a tie.

    https://arxiv.org/abs/2503.19595 (leave-one-out baseline of the pass@k objective, with k = G).

    Choices: not divided by the group's standard deviation, as in the paper (verl's grpo_passk does so by default). A
    group of one gives 0 (verl raises).

    Returns:
        [B], >= 0.
    """
    check.groups(group_ids, rewards=rewards)
    r, group = rewards_and_groups(rewards, group_ids)
    is_best = r == group_max(r, group)
    best_of_others = group_max(torch.where(is_best, -torch.inf, r), group)
    alone = is_best & (group_sum(is_best.double(), group) == 1) & (group_size(group) > 1)
    return zero_unscored(torch.where(alone, r - best_of_others, 0), rewards)


def _subset_ratio(part: Tensor, whole: Tensor, k: int) -> Tensor:
    """[B]: C(part, k) / C(whole, k), the chance that k drawn of `whole` all lie in `part`; exactly 0 for part < k."""
    drawn = torch.arange(k, device=part.device, dtype=part.dtype)
    left = (part[:, None] - drawn).clamp(min=0)
    return (left / (whole[:, None] - drawn).clamp(min=1)).prod(1)
