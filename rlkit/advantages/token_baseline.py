"""A baseline for each token from how far the answers of the group have wandered by then."""

import torch
from torch import Tensor

from rlkit.advantages.group import _group_sums
from rlkit.losses._check import check_groups, check_mask, check_not_negative, check_per_token, check_shape, check_tensor


@torch.no_grad()
def optimal_token_baseline_advantages(
    rewards: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    old_logprobs: Tensor,
    sum_pi_squared: Tensor,
    rollout_weights: Tensor | None = None,
    baseline_alone: bool = False,
    eps: float = 1e-8,
) -> Tensor:
    r"""Return of each token minus the group's mean return there, weighted by the score norm gathered so far.

    $$A_{it} = G_{it} - \frac{\sum_j W_{jt} G_{jt}}{\sum_j W_{jt} + \epsilon}, \quad
    W_{jt} = \sum_{s \le t} \rho_{js}^2 \Big(1 - 2 \pi_{js} + \sum_v \pi_{js}(v)^2\Big)$$

    G is the sum of rewards from the token on, pi the old policy's probability of the token sampled (the bracket is the
    squared norm of the score at the logits), rho the rollout weight. The sums run over the samples of the group that
    still have a token at t, where t counts the tokens of the mask: with tool output between turns the t-th trained
    tokens are compared, without it plain positions are.

    Optimal token baseline, https://arxiv.org/abs/2602.07078; this is verl's single-turn and multi-turn estimator.

    Choices: where one sample outlasts all others of its group there is nothing to compare with, and the baseline there
    is 0 and the advantage the return, as by default in verl; `baseline_alone` keeps the formula, whose baseline there
    is the sample's own return. A group of one gives 0; verl gives it its return.

    Args:
        rewards: [B, T] token rewards, of which only those in the mask count, or [B] outcome rewards, given to the last
            token of the mask. nan means "not judged": the row stays outside its group's baseline, advantage 0.
        mask: bool [B, T].
        group_ids: [B], any integers, in any order: equal ids are one group, of any size.
        old_logprobs: [B, T], nats.
        sum_pi_squared: [B, T], the sum over the vocabulary of squared probabilities where the token was sampled:
            `rlkit.losses.sum_pi_squared`, moved by one column so that it is aligned with the token.
        rollout_weights: [B, T], importance weights of the trainer against the sampler; by default 1.
        baseline_alone: True for the formula as it is also where one sample is left; see above.
        eps: >= 0.

    Returns:
        [B, T], detached, 0 outside the mask, float32 (float64 for float64 rewards).

    Raises:
        ValueError: for a wrong rank, shape or dtype, or a negative eps.
    """
    check_mask(mask)
    check_not_negative(eps=eps)
    check_tensor("rewards", rewards)
    outcome = rewards.ndim == 1
    check_shape("rewards", rewards, tuple(mask.shape[:1] if outcome else mask.shape), "or [B, T] as mask")
    check_groups(group_ids, mask=mask[:, :1].any(1))
    check_per_token(mask, old_logprobs=old_logprobs, sum_pi_squared=sum_pi_squared)
    if rollout_weights is not None:
        check_per_token(mask, rollout_weights=rollout_weights)
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    unique, index = torch.unique(group_ids, return_inverse=True)
    groups = unique.shape[0]
    # each row's trained tokens are laid side by side from column 1 on; all that does not count goes to column 0
    trained = mask.long()
    slots = trained.cumsum(1).mul_(trained)
    if outcome:
        returns = rewards.to(dtype)[:, None]
        judged = ~returns.isnan()
    else:
        values = _side_by_side(rewards.to(dtype), slots)
        sums = values.cumsum(1, dtype=torch.float64)
        judged = ~sums[:, -1:].isnan()
        returns = sums.neg().add_(sums[:, -1:]).add_(values).to(dtype)
    returns = torch.where(judged, returns, 0.0)
    slots = slots * judged.long()
    lengths = trained.sum(1, keepdim=True) * judged

    # sums over few rows, for which float32 does; (s - 1) - 2 (pi - 1) loses nothing where pi is close to 1
    norms = (sum_pi_squared.to(dtype) - 1).sub_(old_logprobs.to(dtype).expm1(), alpha=2)
    norms.clamp_(min=0)  # rounding can take it below 0
    if rollout_weights is not None:
        norms.mul_(rollout_weights).mul_(rollout_weights)
    live = (torch.arange(slots.shape[1] + 1, device=mask.device) <= lengths).to(dtype)
    energy = _side_by_side(norms, slots).cumsum_(1).mul_(live)
    denominator = _group_sums(energy, index, groups).add_(eps).clamp_(min=torch.finfo(dtype).tiny)
    baseline = _group_sums(energy.mul_(returns), index, groups).div_(denominator)
    if not baseline_alone:
        baseline.mul_(_group_sums(live, index, groups).sub_(1).clamp_(0, 1))  # 0 where one sample is left
    several = (_group_sums((lengths > 0).to(dtype), index, groups) > 1)[index]
    advantages = baseline[index].neg_().add_(returns).mul_(several.to(dtype))
    advantages[:, 0] = 0
    return advantages.gather(1, slots)


def _side_by_side(x: Tensor, slots: Tensor) -> Tensor:
    """[B, T + 1]: x [B, T] with column t moved to `slots[b, t]`; 0 in column 0 and wherever nothing was moved to."""
    moved = x.new_zeros(x.shape[0], x.shape[1] + 1).scatter_(1, slots, x)
    moved[:, 0] = 0
    return moved
