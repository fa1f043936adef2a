"""Returns and advantages of single tokens: what a token's reward and value say about the tokens before it.

All take [B, T] tensors and jump over whatever lies outside the mask: prompt, tool output, observations and padding are
not steps, so "the next token" is the next one of the mask, and past the last one every value is 0. The results are
targets: no gradient flows through any of them.

Nothing here loops over tokens. A token outside the mask hands on what it was handed, a token of the mask adds to it and
shrinks it; such steps can be merged two by two, so a row of T tokens takes log2(T) rounds on whole tensors.
"""

import torch
from torch import Tensor

from rlkit.losses._check import (
    check_float,
    check_mask,
    check_not_negative,
    check_per_token,
    check_positive,
    check_rank,
    check_shape,
    fail,
)
from rlkit.losses._numerics import by_branch, mask_bits, masked

_LARGEST_LOG_RATIO = 20.0  # nats, as in the losses


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float | Tensor = 0.95
) -> tuple[Tensor, Tensor]:
    r"""Generalised advantage estimates and the value targets that go with them, not whitened.

    $$A_t = \sum_{l \ge 0} (\gamma \lambda)^l \delta_{t+l}, \quad \delta_t = r_t + \gamma V_{t+1} - V_t, \quad
    R_t = A_t + V_t$$
    where t counts the tokens of the mask alone and V past the last of them is 0.

    https://arxiv.org/abs/1506.02438 eq. 16. We compute $R_t = r_t + \gamma ((1 - \lambda) V_{t+1} + \lambda R_{t+1})$,
    the same in other words, which needs no search for the next token of the mask.

    Choices: a reward outside the mask is ignored, as it belongs to no action; `rewards_to_tokens` puts an outcome
    reward where it counts. verl whitens here; we leave it to `masked_whiten`, as whitening twice, or per
    micro-batch, is a bug that shows nowhere.

    VAPO's decoupled estimate (https://arxiv.org/abs/2504.05118) is two calls, one for the policy, one for the critic:

        advantages, _ = gae(rewards, values, mask, lam=length_adaptive_lambda(mask))
        _, returns = gae(rewards, values, mask, lam=1.0)

    Args:
        rewards: [B, T], of each token; what lies outside the mask is ignored.
        values: [B, T]: `values[b, t]` is that of the prefix before token t; what lies outside the mask is ignored.
        mask: bool [B, T], True on the tokens that the policy wrote.
        gamma: discount of one token of the mask, in [0, 1].
        lam: in [0, 1], a number, or [B] with one for each row.

    Returns:
        (advantages [B, T], returns [B, T]), float32 (float64 for float64 inputs); 0 outside the mask. A nan in a row
        stays in that row.

    Raises:
        ValueError: for a wrong rank, shape or dtype, or a number outside [0, 1].
    """
    check_per_token(mask, rewards=rewards, values=values)
    rewards, values = _float32_at_least(rewards, values)
    lam = _check_lambda(lam, gamma, values)
    bits = mask_bits(mask, values)

    def keep(x: Tensor) -> Tensor:  # `masked`, in place
        x.view(bits.dtype).bitwise_and_(bits)
        return x

    later = _handed_back(keep(torch.lerp(values, rewards, lam)), gamma * lam, mask)
    returns = keep(later.mul_(gamma).add_(rewards))
    return keep(returns - values), returns


@torch.no_grad()
def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    r"""Reward to go of each token: $G_t = r_t + \gamma G_{t+1}$, where t counts the tokens of the mask alone.

    Args:
        rewards: [B, T], of each token; what lies outside the mask is ignored.
        mask: bool [B, T], True on the tokens that the policy wrote.
        gamma: discount of one token of the mask, in [0, 1].

    Returns:
        [B, T], float32 (float64 for float64 rewards); 0 outside the mask.

    Raises:
        ValueError: for a wrong rank, shape or dtype, or gamma outside [0, 1].
    """
    check_per_token(mask, rewards=rewards)
    _check_share(gamma=gamma)
    (rewards,) = _float32_at_least(rewards)
    rewards = masked(rewards, mask)
    if gamma == 1:
        return masked(rewards.flip(1).cumsum(1).flip(1), mask)
    later = _handed_back(rewards, rewards.new_full((1, 1), gamma), mask)
    return masked(later.mul_(gamma).add_(rewards), mask)


@torch.no_grad()
def vtrace(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    lam: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    r"""V-trace value targets and policy-gradient advantages: `gae` for tokens that an older policy sampled.

    $$v_t = V_t + \delta_t + \gamma \lambda c_t (v_{t+1} - V_{t+1}), \quad
    \delta_t = \rho_t (r_t + \gamma V_{t+1} - V_t)$$
    $$A_t = \rho_t (r_t + \gamma (\lambda v_{t+1} + (1 - \lambda) V_{t+1}) - V_t)$$
    with $\rho_t = \min(\bar\rho, w_t)$, $c_t = \min(\bar c, w_t)$, $w_t = \exp(\text{logprobs} -
    \text{rollout\_logprobs})$; t counts the tokens of the mask alone and everything past the last of them is 0.

    IMPALA, https://arxiv.org/abs/1802.01561 eq. 1; lambda, its remark 2; the advantage, its section 4.2.

    Choices: the advantage mixes in lambda as rlax does (the paper has $v_{t+1}$, which is lambda = 1), so that
    on-policy both outputs are exactly `gae`'s. It carries $\rho_t$ already: multiply it by $\nabla \log \pi$, and
    not by a ratio once more. A c_bar above 1 / (gamma lambda) lets products of ratios grow without a bound.

    Args:
        logprobs: [B, T], of the policy being trained.
        rollout_logprobs: [B, T], of the policy that sampled.
        rewards: [B, T], of each token; what lies outside the mask is ignored, here and in every other input.
        values: [B, T]: `values[b, t]` is that of the prefix before token t.
        mask: bool [B, T], True on the tokens that the policy wrote.
        gamma: discount of one token of the mask, in [0, 1].
        rho_bar: > 0, bounds the weight of a token's own error: it decides which policy's values these are.
        c_bar: > 0, bounds the weight of later errors: it decides how fast they travel.
        lam: in [0, 1], a number, or [B] with one for each row.

    Returns:
        (targets [B, T], advantages [B, T]), float32 (float64 for float64 inputs); 0 outside the mask.

    Raises:
        ValueError: for a wrong rank, shape or dtype, or a number out of range.
    """
    check_per_token(mask, logprobs=logprobs, rollout_logprobs=rollout_logprobs, rewards=rewards, values=values)
    check_positive(rho_bar=rho_bar, c_bar=c_bar)
    logprobs, rollout_logprobs, rewards, values = _float32_at_least(logprobs, rollout_logprobs, rewards, values)
    lam = _check_lambda(lam, gamma, values)
    weight = masked(logprobs - rollout_logprobs, mask).clamp(max=_LARGEST_LOG_RATIO).exp()
    rho, decay = weight.clamp(max=rho_bar), gamma * lam * weight.clamp(max=c_bar)
    next_value = _handed_back(masked(values, mask), values.new_zeros(()), mask)
    error = masked(rho * (rewards + gamma * next_value - values), mask)
    later = _handed_back(error, decay, mask)  # target minus value of the next token
    targets = masked(values + error + decay * later, mask)
    return targets, error + masked(rho * (gamma * lam) * later, mask)


def rewards_to_tokens(rewards: Tensor, mask: Tensor) -> Tensor:
    """Each sequence's reward on the last token of its mask, 0 on every other token.

    The last column is padding in most rows, and a reward on padding is a reward that nothing learns from. A row with no
    token in the mask keeps none of it. A nan ("not judged") stays nan on its token: take such rows out of the mask that
    values and policy are trained with, `mask & ~rewards.isnan()[:, None]`.

    Args:
        rewards: [B], one a sample.
        mask: bool [B, T], True on the tokens that the policy wrote.

    Returns:
        [B, T], float32 (float64 for float64 rewards).

    Raises:
        ValueError: for a wrong rank, shape or dtype.
    """
    check_mask(mask)
    check_float("rewards", rewards)
    check_rank("rewards", rewards, 1, "[B]")
    check_shape("rewards", rewards, (mask.shape[0],), "[B] as mask")
    (rewards,) = _float32_at_least(rewards)
    seen = mask.cumsum(1, dtype=torch.int32)
    return masked(rewards[:, None], mask & (seen == seen[:, -1:]))


def length_adaptive_lambda(mask: Tensor, alpha: float = 0.05) -> Tensor:
    r"""A lambda for each row, closer to 1 the longer the row: $\lambda = 1 - 1 / (\alpha l)$, and 0 below $1 / \alpha$.

    VAPO, https://arxiv.org/abs/2504.05118 section 4.2: the weights of `gae`, $1 / (1 - \lambda)$ in sum, then reach
    over a fixed share of the answer. The formula is negative for answers below $1 / \alpha$ tokens, of which the paper
    does not speak; we stop at 0.

    Args:
        mask: bool [B, T]; its count is the length l.
        alpha: > 0; the paper's 0.05 reaches over a twentieth of the answer.

    Returns:
        [B], float32, in [0, 1); 0 for a row with no token.

    Raises:
        ValueError: where the mask is not bool [B, T] or alpha is not positive.
    """
    check_mask(mask)
    check_positive(alpha=alpha)
    length = mask.sum(1).float()
    return torch.where(length > 0, 1 - 1 / (alpha * length), 0.0).clamp(min=0.0)


@torch.no_grad()
def masked_whiten(
    x: Tensor, mask: Tensor, *, mean: Tensor | None = None, var: Tensor | None = None, eps: float = 1e-8
) -> Tensor:
    r"""The tokens of the mask shifted to mean 0 and scaled to variance 1.

    $$\frac{x - \text{mean}}{\sqrt{\text{var} + \epsilon}}$$

    With no statistics given they are those of this tensor: the sample variance (divisor count - 1, ddof 1), as in verl;
    the mean's sum is in float64. A single token becomes 0.

    That is right for a batch in one piece only. Where ranks or micro-batches hold parts of it, give the statistics of
    the whole, as with an engine's `global_sum`:

        count = engine.global_sum(mask.sum())
        mean = engine.global_sum(token_sum(x, mask)) / count
        var = engine.global_sum(token_sum((x - mean) ** 2, mask)) / (count - 1)

    Args:
        x: [B, T]; may hold anything outside the mask.
        mask: bool [B, T].
        mean, var: 0-d tensors, over all parts of the batch; both or neither.
        eps: >= 0, added to the variance.

    Returns:
        [B, T], float32 (float64 for float64 x); 0 outside the mask.

    Raises:
        ValueError: for a wrong rank, shape or dtype, a negative eps, or one statistic without the other.
    """
    check_per_token(mask, x=x)
    check_not_negative(eps=eps)
    if (mean is None) != (var is None):
        name, came = ("var", var) if var is None else ("mean", mean)
        fail(name, came, "a 0-d tensor beside the other statistic, or neither")
    dtype = torch.promote_types(x.dtype, torch.float32)
    x = masked(x.to(dtype), mask)
    count = mask.sum()
    if mean is None:
        mean = x.sum(dtype=torch.float64) / count.clamp(min=1)
    check_rank("mean", mean, 0, "(a 0-d tensor)")
    centred = masked(x.sub_(mean.to(dtype)), mask)
    if var is None:
        var = centred.square().sum(1).sum(dtype=torch.float64) / (count - 1).clamp(min=1)
    check_rank("var", var, 0, "(a 0-d tensor)")
    scale = (var.double() + eps).sqrt()
    return centred.div_(torch.where(scale > 0, scale, 1.0).to(dtype))


def _handed_back(x: Tensor, decay: Tensor, mask: Tensor) -> Tensor:
    """At t, y of the next token of the mask, where y = x + decay * (what is handed back to it); 0 past the last token.

    All [B, T]; `decay` may broadcast to it. x is 0 outside the mask, and decay counts as 1 there: such a token hands on
    what it gets.
    """
    rows, tokens = mask.shape
    # [T + 1, B]: merging neighbours in time then works on whole rows of memory, some three times as fast on a CPU
    handed = x.new_empty(tokens + 1, rows)
    handed[:-1], handed[-1] = x.t(), 0.0
    bits = mask_bits(mask.t().contiguous(), x)
    one = x.new_ones(()).view(bits.dtype)
    # torch.where(mask, decay, 1) by bits, as in `masked`
    changed = decay.t().contiguous().view(bits.dtype) ^ one
    decay_bits = (bits & changed if by_branch(x) else bits.bitwise_and_(changed)).bitwise_xor_(one)
    _suffix_scan_(handed[:-1], decay_bits.view(x.dtype))
    return handed[1:].t().contiguous()


def _suffix_scan_(x: Tensor, decay: Tensor) -> None:
    """x[t] + decay[t] * x[t + 1] + decay[t] * decay[t + 1] * x[t + 2] + ... along dimension 0, in place; spoils decay.

    Steps t and t + 1 are one step: x[t] + decay[t] * x[t + 1] with decay[t] * decay[t + 1]. Merge the pairs into their
    even steps, solve that problem of half the length, fill in the odd steps: about three products a token in all, and
    no division by a power of decay, which would overflow.
    """
    length = x.shape[0]
    if length < 2:
        return
    even, odd, even_decay, odd_decay = x[::2], x[1::2], decay[::2], decay[1::2]
    pairs, filled = length // 2, (length - 1) // 2
    even[:pairs].addcmul_(even_decay[:pairs], odd)
    even_decay[:pairs].mul_(odd_decay)
    _suffix_scan_(even, even_decay)
    odd[:filled].addcmul_(odd_decay[:filled], even[1:])


def _float32_at_least(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in one dtype, float32 or wider."""
    dtype = torch.float32
    for x in tensors:
        dtype = torch.promote_types(dtype, x.dtype)
    return tuple(x.to(dtype) for x in tensors)


def _check_share(**numbers: float) -> None:
    """Each named number is in [0, 1]."""
    for name, number in numbers.items():
        if not 0 <= number <= 1:
            fail(name, number, "a number in [0, 1]")


def _check_lambda(lam: float | Tensor, gamma: float, like: Tensor) -> Tensor:
    """Check gamma and lam; lam comes back as [1, 1], or [B, 1] where each row has its own, of the dtype of `like`."""
    _check_share(gamma=gamma)
    if not isinstance(lam, Tensor):
        _check_share(lam=lam)
        return like.new_full((1, 1), lam)
    check_float("lam", lam)
    check_shape("lam", lam, (like.shape[0],), "[B], or a number")
    return lam.to(like.dtype)[:, None]
