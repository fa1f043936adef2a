"""Log-probabilities and entropies of tokens, from logits or straight from hidden states.

`token_logprobs` shifts: its value at a token comes from the logits of the position before. The other functions of
logits do not shift: their value at a position comes from the logits at that position, which predict the next token.

Sums over the vocabulary are taken in pieces of rows, forward and backward, so that nothing of the logits' size is kept
beside the logits and their gradient. There is no second derivative, and temperatures get no gradient.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkit import _check as check
from rlkit.losses import _kernels
from rlkit.losses._kernels import kernels_for, tokens_per_chunk


class LogprobsAndEntropy(NamedTuple):
    """What `linear_logprobs` returns."""

    logprobs: Tensor
    entropy: Tensor


class TopkLogprobs(NamedTuple):
    """The likeliest tokens after each prefix, the likeliest first.

    Attributes:
        logprobs: float32 [N, K].
        ids: int32 [N, K], their token ids.
    """

    logprobs: Tensor
    ids: Tensor


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    r"""Log-probability of each token given the tokens before it, at that token's position.

    $$\text{out}_{b,t} = \log \mathrm{softmax}(\text{logits}_{b,t-1} / \tau)_{\text{tokens}_{b,t}}, \quad
    \text{out}_{b,0} = 0$$

    TRL and verl return T-1 or only the response's columns; we keep T so that every per-token tensor has one shape and
    no caller shifts anything.

    Args:
        logits: [B, T, V], where `logits[b, t]` was computed from `tokens[b, :t + 1]`; any floating dtype.
        tokens: [B, T], integers in [0, V), at every position: padding carries a real id too.
        temperature: of the sampler, > 0; a float or a tensor that broadcasts to [B, T], aligned with `tokens`.

    Returns:
        [B, T], float32 (float64 for float64 logits), never above 0.
    """
    check.rank("logits", logits, 3, "[B, T, V]")
    check.shape("tokens", tokens, tuple(logits.shape[:-1]), "as logits without V")
    check.integer("tokens", tokens)
    _check_temperature(temperature, tokens)
    if isinstance(temperature, Tensor):
        temperature = temperature.expand(tokens.shape).roll(-1, 1)
    # shift the targets, because a slice logits[:, :-1] would have to be copied; the last column then has the first
    # token as its target, and `align_with_tokens` drops it
    return align_with_tokens(target_logprobs(logits, tokens.roll(-1, 1), temperature))


def align_with_tokens(x: Tensor) -> Tensor:
    """Values of positions, moved to the tokens that the positions predict: `out[:, t] = x[:, t - 1]`, column 0 is 0.

    For entropies, divergences and other values that are computed from logits without a shift.

    Args:
        x: [B, T].

    Returns:
        [B, T], of the dtype of `x`.
    """
    check.rank("x", x, 2, "[B, T]")
    return F.pad(x, (1, 0))[:, :-1]


def target_logprobs(
    logits: Tensor, targets: Tensor, temperature: float | Tensor = 1.0, keep: Tensor | None = None
) -> Tensor:
    r"""Log-probability of `targets` under `logits` at the same position, with no shift: the form for packed rows.

    $$\text{out} = \log \mathrm{softmax}(\text{logits} / \tau)_{\text{targets}}$$

    A sampler with top-p or top-k draws from a part of the vocabulary. With that part as `keep` the trainer's
    probabilities are of the same part: DeepSeek-V3.2's "keep sampling mask", https://arxiv.org/abs/2512.02556.

    Args:
        logits: [..., V], any floating dtype.
        targets: [...], integers in [0, V), or [..., K] for several at a position, in one pass.
        temperature: of the sampler, > 0; a float or a tensor that broadcasts to [...], one for each token.
        keep: bool [..., V], True on the tokens that could be drawn; None for all.

    Returns:
        as `targets`, float32 (float64 for float64 logits), never above 0; -inf for a target that could not be drawn.
    """
    check.floating("logits", logits)
    check.integer("targets", targets)
    each = targets.shape[-1:] if targets.ndim == logits.ndim else ()  # several at a position
    check.shape("targets", targets, (*logits.shape[:-1], *each), "as logits without V, or with K in its place")
    if keep is not None:
        check.shape("keep", keep, tuple(logits.shape), "as logits")
        keep = keep.bool().reshape(-1, logits.shape[-1])
    rows, temperature = _as_rows(logits, temperature)
    targets_of_rows = targets.long().reshape(len(rows), *(each or (1,)))
    return _kernels.Logprobs.apply(rows, targets_of_rows, temperature, keep).reshape(targets.shape).clamp(max=0)


def token_entropy(logits: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    r"""Entropy in nats of the next-token distribution at each position, with no shift.

    $$H = -\sum_v p_v \log p_v, \quad p = \mathrm{softmax}(\text{logits} / \tau)$$

    A logit of -inf (a suppressed token) adds 0 to the value and gets gradient 0.

    Args:
        logits: [..., V], any floating dtype. `logits[b, t]` predicts token t + 1: see `align_with_tokens`.
        temperature: of the sampler, > 0; a float or a tensor that broadcasts to [...].

    Returns:
        [...], float32 (float64 for float64 logits), never below 0.
    """
    check.floating("logits", logits)
    rows, temperature = _as_rows(logits, temperature)
    return _kernels.Entropy.apply(rows, temperature).reshape(logits.shape[:-1])


@torch.no_grad()
def sum_pi_squared(logits: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    r"""Chance that two draws from the next-token distribution are equal, at each position, with no shift.

    $$\sum_v p_v^2, \quad p = \mathrm{softmax}(\text{logits} / \tau)$$

    An input of `rlkit.advantages.optimal_token_baseline_advantages`, without gradient.

    Args:
        logits: [..., V], any floating dtype. `logits[b, t]` predicts token t + 1: see `align_with_tokens`.
        temperature: of the sampler, > 0; a float or a tensor that broadcasts to [...].

    Returns:
        [...], float32 (float64 for float64 logits), in (0, 1].
    """
    check.floating("logits", logits)
    return _kernels.squared_sums(*_as_rows(logits, temperature)).reshape(logits.shape[:-1])


def suppress_tokens(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Logits with those of `token_ids` at -inf, so that their probability is exactly 0.

    Sampler and trainer both call this one function. A policy that can sample an image placeholder breaks its own next
    forward; suppressing it in the sampler alone makes the two score different distributions.

    Args:
        logits: [..., V]; not changed.
        token_ids: [K], integers in [0, V); may be empty.

    Returns:
        [..., V], a new tensor of the dtype of `logits`; the gradient at the suppressed entries is 0.
    """
    check.floating("logits", logits)
    check.integer("token_ids", token_ids)
    check.rank("token_ids", token_ids, 1, "[K]")
    return logits.index_fill(-1, token_ids.to(logits.device, torch.long), -torch.inf)


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    bias: Tensor | None = None,
    suppress: Tensor | None = None,
    chunk: int | None = None,
) -> LogprobsAndEntropy:
    r"""Log-probabilities of targets, and entropies, from the last hidden states without ever holding the [N, V] logits.

    $$z = (h W^\top + b) / \tau, \quad \text{logprob} = z_y - \log\textstyle\sum_v e^{z_v}, \quad
    H = -\textstyle\sum_v p_v \log p_v$$

    Tokens are cut into chunks (the vocabulary is not, as a softmax needs all of it), and backward computes each chunk
    again: $\partial z = g_{lp} (1_y - p) - g_H\, p (\log p + H)$. The gradient is exact through both outputs. Equals
    `target_logprobs` and `token_entropy` of `suppress_tokens(hidden @ weight.T + bias)`.

    The product is taken in the dtype of `hidden`, as the model's own head does (autocast is ignored), the softmax in
    float32. Liger adds up the weight's gradient in the weight's dtype; we add chunks up in float32 at least, because
    hundreds of bfloat16 additions lose the small ones. That costs one float32 [V, H] during backward.

    On a GPU, Triton kernels compute the logits and their gradients; logits are then float32 also for bfloat16 matrices,
    and forward writes none of them to memory. Where they cannot run, one line is logged, and torch does the work.

    Args:
        hidden: [N, H], the model's output before its head, N >= 0.
        weight: [V, H], of the dtype of `hidden`.
        targets: [N], integers in [0, V).
        temperature: of the sampler, > 0; a float or [N].
        bias: [V] or None.
        suppress: [K], token ids of probability 0, or None; see `suppress_tokens`.
        chunk: tokens per chunk; None takes as many as have 512 MiB of logits, 16 MiB on a CPU.

    Returns:
        LogprobsAndEntropy: logprobs [N], never above 0, and entropy [N].
    """
    _check_linear(hidden, weight, targets, bias)
    if suppress is not None:
        check.integer("suppress", suppress)
        check.rank("suppress", suppress, 1, "[K]")
        suppress = suppress.to(hidden.device, torch.long)
    _check_temperature(temperature, targets)
    temperature = _kernels.temperature_column(temperature, hidden.new_empty(len(hidden)))
    if chunk is None:
        chunk = tokens_per_chunk(hidden, len(weight))
    check.positive(chunk=chunk)
    kernels = kernels_for(hidden)
    function = _kernels.LinearLogprobs if kernels is None else kernels.FusedLinearLogprobs
    return LogprobsAndEntropy(*function.apply(hidden, weight, bias, targets.long(), temperature, suppress, chunk)[:2])


def _as_rows(logits: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """Logits [..., V] as [N, V], and the temperature as [N, 1]."""
    like = logits[..., 0]
    _check_temperature(temperature, like)
    return logits.reshape(like.numel(), logits.shape[-1]), _kernels.temperature_column(temperature, like)


def _check_temperature(temperature: float | Tensor, like: Tensor) -> None:
    """A positive number, or a tensor that broadcasts to the shape of `like` (its values are not looked at)."""
    if not isinstance(temperature, Tensor):
        check.positive(temperature=temperature)
    elif temperature.ndim > like.ndim or any(
        n not in (1, m) for n, m in zip(reversed(temperature.shape), reversed(like.shape), strict=False)
    ):
        check.fail("temperature", temperature, f"a float or a tensor that broadcasts to {list(like.shape)}")


def _check_linear(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    """hidden [N, H] and weight [V, H] of one floating dtype, targets integer [N], bias [V]."""
    check.floating("hidden", hidden)
    check.rank("hidden", hidden, 2, "[N, H]")
    check.rank("weight", weight, 2, "[V, H]")
    check.shape("weight", weight, (weight.shape[0], hidden.shape[1]), "[V, H] with the H of hidden")
    check.integer("targets", targets)
    check.shape("targets", targets, (hidden.shape[0],), "[N] as hidden")
    if bias is not None:
        check.shape("bias", bias, (weight.shape[0],), "[V] as weight")
    for name, x in (("weight", weight), ("bias", bias)):
        if x is not None and x.dtype != hidden.dtype:
            check.fail(name, x, f"the dtype of hidden, {hidden.dtype}")
