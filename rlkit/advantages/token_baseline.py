"""A baseline for each token from how far the answers of the group have wandered by then."""

import torch
from torch import Tensor

from rlkit.advantages.group import _group_sums
from rlkit.losses._check import check_groups, check_mask, check_not_negative, check_per_token, check_shape


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
        [B, T], 0 outside the mask, float32 (float64 for float64 rewards).

    Raises:
        ValueError: for a wrong rank, shape or dtype, or a negative eps.
    """
    check_mask(mask)
    check_not_negative(eps=eps)
    outcome = rewards.ndim == 1
    check_shape("rewards", rewards, tuple(mask.shape[:1] if outcome else mask.shape), "or [B, T] as mask")
    check_groups(group_ids, mask=mask.any(1))
    check_per_token(mask, old_logprobs=old_logprobs, sum_pi_squared=sum_pi_squared)
    if rollout_weights is not None:
        check_per_token(mask, rollout_weights=rollout_weights)
    t = mask.shape[1]
    _, index = torch.unique(group_ids, return_inverse=True)
    values = torch.where(mask, rewards[:, None] if outcome else rewards, 0).double()
    judged = ~values.isnan().any(1)
    values = torch.where(judged[:, None], values, 0.0)
    returns = values if outcome else values.sum(1, keepdim=True) - values.cumsum(1) + values

    live = mask & judged[:, None]
    pi = torch.where(live, old_logprobs, 0).double().exp()
    norms = torch.where(live, 1 - 2 * pi + sum_pi_squared, 0.0).clamp(min=0)  # rounding can take it below 0
    if rollout_weights is not None:
        norms = norms * torch.where(live, rollout_weights, 0).double().square()
    energy = torch.where(live, norms.cumsum(1), 0.0)

    place = (mask.cumsum(1) - 1).clamp(min=0)  # each row's trained tokens are laid side by side
    numerator = _group_sums(torch.zeros_like(values).scatter_add(1, place, energy * returns), index)
    denominator = _group_sums(torch.zeros_like(values).scatter_add(1, place, energy), index) + eps
    lengths = live.sum(1, keepdim=True)
    here = _group_sums((torch.arange(t, device=mask.device) < lengths).double(), index)
    baseline = numerator / torch.where(denominator > 0, denominator, 1.0)
    if not baseline_alone:
        baseline = torch.where(here == 1, 0.0, baseline)
    baseline = baseline[index].gather(1, place)
    several = (_group_sums((lengths > 0).double(), index) > 1)[index]
    advantages = torch.where(live & several, returns - baseline, 0.0)
    return advantages.to(torch.promote_types(rewards.dtype, torch.float32))
