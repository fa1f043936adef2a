r"""Returns and advantages per token, from rewards and values.

Only the tokens of the mask are steps: prompt, tool output, observations and padding between and after them are skipped.
"The next token" is the next one of the mask, and past the last one every value is 0. The results are targets, without
gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rlkit import _check as check
from rlkit._numerics import LOG_RATIO_LIMIT, at_least_float32, masked, masked_advantages, masked_log_ratio, masked_ratio
from rlkit.advantages._kernels import next_token, recurrence
from rlkit.advantages._tokens import rewards_per_token, side_by_side


class AdvantagesAndReturns(NamedTuple):
    """What `gae` and `vtrace` return."""

    advantages: Tensor
    returns: Tensor


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float | Tensor = 0.95
) -> AdvantagesAndReturns:
    r"""Generalised advantage estimates and their value targets, not whitened.

    $$A_t = \delta_t + \gamma \lambda A_{t+1}, \quad \delta_t = r_t + \gamma V_{t+1} - V_t, \quad R_t = A_t + V_t$$
    where t counts the tokens of the mask alone and V past the last of them is 0.

    https://arxiv.org/abs/1506.02438 eq. 16.

    Choices: a reward outside the mask is ignored, as it belongs to no action. verl whitens here; in rlkit only
    `masked_whiten` does, because whitening twice, or per micro-batch, is a bug without symptoms.

    VAPO's decoupled estimate (https://arxiv.org/abs/2504.05118) is two calls, one for the policy, one for the critic:

        advantages = gae(rewards, values, mask, lam=length_adaptive_lambda(mask)).advantages
        returns = gae(rewards, values, mask, lam=1.0).returns

    Args:
        rewards: [B, T], of each token, or [B], given to the last token of the mask.
        values: [B, T]: `values[b, t]` is that of the prefix before token t.
        gamma: discount of one token of the mask, in [0, 1].
        lam: in [0, 1], a number, a 0-d tensor, or [B] with one for each row.

    Returns:
        AdvantagesAndReturns: both [B, T], 0 outside the mask. A nan in a row stays in that row.
    """
    check.per_token(mask, values=values)
    rewards, values = rewards_per_token(rewards, mask), at_least_float32(values)
    lam = _lambda_column(lam, gamma, values)
    delta = rewards + gamma * next_token(values, mask) - values
    advantages = recurrence(delta, gamma * lam, mask)
    return AdvantagesAndReturns(masked(advantages, mask), masked(advantages + values, mask))


@torch.no_grad()
def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    r"""Discounted return of each token: $G_t = r_t + \gamma G_{t+1}$, where t counts the tokens of the mask alone.

    Args:
        rewards: [B, T], of each token, or [B], given to the last token of the mask.
        gamma: discount of one token of the mask, in [0, 1].

    Returns:
        [B, T]; 0 outside the mask.
    """
    check.share(gamma=gamma)
    rewards = rewards_per_token(rewards, mask)
    return masked(recurrence(rewards, rewards.new_full((), gamma), mask), mask)


@torch.no_grad()
def n_step_returns(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    n: int,
    gamma: float | Tensor = 1.0,
    bootstrap: Tensor | None = None,
) -> Tensor:
    r"""Value targets from the next n rewards and the value after them.

    $$G_t = r_t + \gamma_t r_{t+1} + \dots + \gamma_t \cdots \gamma_{t+n-2}\, r_{t+n-1} +
    \gamma_t \cdots \gamma_{t+n-1}\, V_{t+n}$$
    where t counts the tokens of the mask alone; past the last of them rewards are 0 and V is the bootstrap value.

    Sutton and Barto, Reinforcement Learning, 2nd edition, eq. 7.1. n = 1 gives the TD target; n of the row's length,
    without a bootstrap value, gives `discounted_returns`.

    Args:
        rewards: [B, T], of each token, or [B], given to the last token of the mask.
        values: [B, T]: `values[b, t]` is that of the prefix before token t.
        n: > 0.
        gamma: discount of one token of the mask, in [0, 1]; a number, or [B, T] with one for each token.
        bootstrap: [B], the value past the last token, for responses that were cut off; None for 0.

    Returns:
        [B, T]; 0 outside the mask.
    """
    check.per_token(mask, values=values)
    check.positive(n=n)
    rewards, values = masked(rewards_per_token(rewards, mask), mask), masked(values, mask)
    if isinstance(gamma, Tensor):
        check.per_token(mask, gamma=gamma)
    else:
        check.share(gamma=gamma)
        gamma = rewards.new_full((), gamma)
    end = values.new_zeros(len(mask)) if bootstrap is None else at_least_float32(bootstrap)
    check.shape("bootstrap", end, (len(mask),), "[B]")
    places = torch.where(mask, mask.flip(1).cumsum(1).flip(1), 0)  # 1 for the last token, then backwards
    rewards, values, gamma = (side_by_side(x.expand(mask.shape), places)[:, 1:] for x in (rewards, values, gamma))
    target = torch.cat([end[:, None], values], 1)
    for _ in range(min(n, mask.shape[1])):
        target = torch.cat([end[:, None], rewards + gamma * target[:, :-1]], 1)
    return masked(target.gather(1, places), mask)


@torch.no_grad()
def vtrace(
    rewards: Tensor,
    values: Tensor,
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> AdvantagesAndReturns:
    r"""V-trace advantages and value targets: `gae` for tokens that an older policy sampled.

    $$v_t = V_t + \delta_t + \gamma \lambda c_t (v_{t+1} - V_{t+1}), \quad
    \delta_t = \rho_t (r_t + \gamma V_{t+1} - V_t)$$
    $$A_t = \rho_t (r_t + \gamma (\lambda v_{t+1} + (1 - \lambda) V_{t+1}) - V_t)$$
    with $\rho_t = \min(\bar\rho, w_t)$, $c_t = \min(\bar c, w_t)$, $w_t = \exp(\text{logprobs} -
    \text{rollout\_logprobs})$; t counts the tokens of the mask alone and everything past the last of them is 0.

    IMPALA, https://arxiv.org/abs/1802.01561 eq. 1; lambda is from its remark 2, the advantage from its section 4.2.

    Choices: the advantage contains lambda as in rlax (the paper has $v_{t+1}$, which is lambda = 1), so that on-policy
    both outputs are exactly those of `gae`. It already contains $\rho_t$: multiply it by $\nabla \log \pi$ without
    another ratio. With a c_bar above 1 / (gamma lambda) products of ratios can grow without bound.

    Args:
        rewards: [B, T], of each token, or [B], given to the last token of the mask.
        values: [B, T]: `values[b, t]` is that of the prefix before token t.
        gamma: discount of one token of the mask, in [0, 1].
        lam: in [0, 1], a number, a 0-d tensor, or [B] with one for each row.
        rho_bar: > 0, bound of the weight of a token's own error; it determines which policy's values are estimated.
        c_bar: > 0, bound of the weights of later errors; it determines how fast these propagate.

    Returns:
        AdvantagesAndReturns: the advantages A and the targets v, both [B, T], 0 outside the mask.
    """
    check.per_token(mask, values=values, logprobs=logprobs, rollout_logprobs=rollout_logprobs)
    check.positive(rho_bar=rho_bar, c_bar=c_bar)
    rewards, values = rewards_per_token(rewards, mask), at_least_float32(values)
    lam = _lambda_column(lam, gamma, values)
    weight = masked_ratio(logprobs, rollout_logprobs, mask)
    rho, c = weight.clamp(max=rho_bar), weight.clamp(max=c_bar)
    next_value = next_token(values, mask)
    delta = rho * (rewards + gamma * next_value - values)
    excess = recurrence(delta, gamma * lam * c, mask)  # v - V
    targets = masked(values + excess, mask)
    advantages = rho * (rewards + gamma * (next_value + lam * next_token(excess, mask)) - values)
    return AdvantagesAndReturns(masked(advantages, mask), targets)


@torch.no_grad()
def fipo_advantages(
    advantages: Tensor,
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    gamma: float = 2 ** (-1 / 32),
    low: float = 0.8,
    high: float = 1.2,
    ratio_high: float = 10.0,
    safe_ratio: float = 4.0,
) -> Tensor:
    r"""Advantages times the discounted ratio of the token and all later ones, to credit a token for what follows it.

    $$A'_t = A_t\, \mathrm{clip}(e^{F_t}, \text{low}, \text{high}), \quad
    F_t = \log r_t\, [r_t \le \bar r] + \gamma F_{t+1}, \quad r = \exp(\text{logprobs} - \text{old\_logprobs})$$
    where t counts the tokens of the mask alone. Where A < 0 and $r_t$ is above `safe_ratio` the weight is at most 1.

    FIPO, https://arxiv.org/abs/2603.19835, used with PPO's clipped loss. The default gamma halves a token's influence
    after 32 tokens. On the first step on a batch, where r is 1, nothing changes.

    Choices: the bounds are 1 - 0.2 and 1 + 0.2; ms-swift's default has a lower bound of 1, and its discount counts all
    columns, including tool output.

    Args:
        advantages: [B] or [B, T].
        gamma: in [0, 1].
        low, high: bounds of the weight; 0 <= low <= 1 <= high.
        ratio_high: tokens with a larger ratio do not count in F; > 0.
        safe_ratio: > 0; see above.

    Returns:
        [B, T], 0 outside the mask.
    """
    check.per_token(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    check.share(gamma=gamma, low=low)
    check.positive(ratio_high=ratio_high, safe_ratio=safe_ratio)
    if not high >= 1:
        check.fail("high", high, "a number >= 1")
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    advantages, ratio = masked_advantages(advantages, mask), log_ratio.exp()
    influence = recurrence(torch.where(ratio <= ratio_high, log_ratio, 0), log_ratio.new_full((), gamma), mask)
    weight = influence.clamp(max=LOG_RATIO_LIMIT).exp().clamp(low, high)
    unsafe = (advantages < 0) & (ratio > safe_ratio)
    return advantages * torch.where(unsafe, weight.clamp(max=1), weight)


def rewards_to_tokens(rewards: Tensor, mask: Tensor) -> Tensor:
    """Each sequence's reward on the last token of its mask, 0 on every other token.

    In most rows the last column is padding, and a reward there would have no effect. The reward of a row without a
    token in the mask is dropped. A nan ("not scored") stays nan on its token: remove such rows from the mask used to
    train values and policy, `mask & rewards.isfinite()[:, None]`.

    Args:
        rewards: [B], one per sample.

    Returns:
        [B, T].
    """
    check.rank("rewards", rewards, 1, "[B]")
    return rewards_per_token(rewards, mask)


def length_adaptive_lambda(mask: Tensor, alpha: float = 0.05) -> Tensor:
    r"""A lambda for each row, closer to 1 for longer rows: $\lambda = 1 - 1 / (\alpha l)$, and 0 below $1 / \alpha$.

    VAPO, https://arxiv.org/abs/2504.05118 section 4.2: the weights of `gae`, $1 / (1 - \lambda)$ in sum, then reach
    over a fixed share of the response. For responses shorter than $1 / \alpha$ tokens the formula is negative, which
    the paper does not discuss; here it is 0.

    Args:
        mask: bool [B, T]; its count is the length l.
        alpha: > 0; the paper's 0.05 covers a twentieth of the response.

    Returns:
        [B], float32, in [0, 1); 0 for a row with no token.
    """
    check.token_mask(mask)
    check.positive(alpha=alpha)
    length = mask.sum(1).float()
    return (1 - 1 / (alpha * length)).clamp(min=0)


def _lambda_column(lam: float | Tensor, gamma: float, like: Tensor) -> Tensor:
    """Check gamma and lam; lam comes back as a 0-d tensor, or [B, 1] where each row has its own, of `like`'s dtype."""
    check.share(gamma=gamma)
    if not isinstance(lam, Tensor):
        check.share(lam=lam)
        return like.new_full((), lam)
    check.floating("lam", lam)
    if lam.ndim == 0:
        return lam.to(like.dtype)
    check.shape("lam", lam, (like.shape[0],), "[B], or a number")
    return lam.to(like.dtype)[:, None]
