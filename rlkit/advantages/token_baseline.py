"""A baseline for each token, weighted by the squared score norms of the group's responses up to that token."""

import torch
from torch import Tensor

from rlkit import _check as check
from rlkit._numerics import masked
from rlkit.advantages._groups import group_index, group_sum
from rlkit.advantages._tokens import rewards_per_token, scored_tokens, side_by_side


@torch.no_grad()
def optimal_token_baseline_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    old_logprobs: Tensor,
    sum_pi_squared: Tensor,
    mask: Tensor,
    rollout_weights: Tensor | None = None,
    baseline_alone: bool = False,
    eps: float = 1e-8,
) -> Tensor:
    r"""Return of each token minus the group's mean return at that token, weighted by the accumulated score norms.

    $$A_{it} = G_{it} - \frac{\sum_j W_{jt} G_{jt}}{\sum_j W_{jt} + \epsilon}, \quad
    W_{jt} = \sum_{s \le t} \rho_{js}^2 \Big(1 - 2 \pi_{js} + \sum_v \pi_{js}(v)^2\Big)$$

    G is the sum of rewards from the token on, pi the old policy's probability of the token sampled (the bracket is the
    squared norm of the score at the logits), rho the rollout weight. The sums run over the samples of the group that
    still have a token at t, where t counts the tokens of the mask: with tool output between turns the t-th trained
    tokens are compared, without it plain positions are.

    Optimal token baseline, https://arxiv.org/abs/2602.07078; this is verl's single-turn and multi-turn estimator.

    Choices: beyond the end of all other samples of the group, the baseline is 0 and the advantage is the return, as by
    default in verl. With `baseline_alone` the formula is kept there, whose baseline is the sample's own return. A group
    of one gives 0; verl gives the return.

    Args:
        rewards: [B, T], of each token, or [B], given to the last token of the mask.
        sum_pi_squared: [B, T], the sum over the vocabulary of squared probabilities where the token was sampled:
            `rlkit.losses.sum_pi_squared`, aligned by `rlkit.losses.align_with_tokens`.
        rollout_weights: [B, T], importance weights of the trainer against the sampler; by default 1.
        baseline_alone: use the formula also where one sample is left; see above.
        eps: >= 0.

    Returns:
        [B, T], without gradient; 0 outside the mask.
    """
    rewards = masked(rewards_per_token(rewards, mask), mask)
    check.not_negative(eps=eps)
    check.groups(group_ids, rewards=rewards[:, :1].sum(1))
    check.per_token(mask, old_logprobs=old_logprobs, sum_pi_squared=sum_pi_squared)
    if rollout_weights is not None:
        check.per_token(mask, rollout_weights=rollout_weights)
    dtype = rewards.dtype
    mask = scored_tokens(rewards, mask)
    lengths = mask.sum(1, keepdim=True)
    returns = rewards.flip(1).cumsum(1).flip(1)

    norms = (sum_pi_squared.to(dtype) - 1) - 2 * old_logprobs.to(dtype).expm1()  # exact also where pi is close to 1
    norms = norms.clamp(min=0)  # rounding can take it below 0
    if rollout_weights is not None:
        norms = norms * rollout_weights.to(dtype).square()

    # the tokens of each row side by side, from column 1 on: the t-th of one row is compared with the t-th of others;
    # column 0 is 0, the advantage of everything outside the mask
    places = mask.cumsum(1) * mask
    present = torch.arange(mask.shape[1] + 1, device=mask.device) <= lengths
    returns = side_by_side(returns, places)
    weights = torch.where(present, side_by_side(norms, places).cumsum(1), 0)

    group = group_index(group_ids)
    denominator = (group_sum(weights, group) + eps).clamp(min=torch.finfo(dtype).tiny)
    baseline = group_sum(weights * returns, group) / denominator
    if not baseline_alone:
        baseline = torch.where(group_sum(present.to(dtype), group) > 1, baseline, 0)
    several = group_sum((lengths > 0).to(dtype), group) > 1
    advantages = torch.where(several, returns - baseline, 0)
    return advantages.gather(1, places)
