"""Log-probabilities and entropies of tokens, from logits or straight from hidden states."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlkit.losses._check import check_float, check_integer, check_positive, check_rank, check_shape, fail
from rlkit.losses._numerics import at_least_float32

CHUNK_BYTES = 64 * 2**20  # what one chunk of logits may hold
CPU_CHUNK_BYTES = 16 * 2**20  # the same on a CPU, where nothing is gained by more
CPU_CACHE_BYTES = 2**20  # and where the logits are given: what a CPU then reads a second time is in its cache
_LOG2_E = math.log2(math.e)
_NO_PROBABILITY = -1e4  # stands for a log-probability of -inf where it is multiplied: exp of it is 0 even in float64


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    r"""Log-probability of each token given the tokens before it, aligned with the token it speaks of.

    $$\text{out}_{b,t} = \log \mathrm{softmax}(\text{logits}_{b,t-1} / \tau)_{\text{tokens}_{b,t}}, \quad
    \text{out}_{b,0} = 0$$

    TRL and verl return T-1 or only the response's columns; we keep T so that every per-token tensor has one shape and
    no caller shifts anything.

    Backward computes the softmax again, piece by piece, so that nothing but the logits is kept; there is no second
    derivative, and the temperature gets no gradient.

    Args:
        logits: [B, T, V], where `logits[b, t]` was computed from `tokens[b, :t + 1]`; any floating dtype.
        tokens: [B, T], integers in [0, V), at every position: padding carries a real id too.
        temperature: of the sampler, > 0; a float or a tensor that broadcasts to [B, T], aligned with `tokens`.

    Returns:
        [B, T], float32 (float64 for float64 logits), never above 0.

    Raises:
        ValueError: for a wrong rank, shape or dtype, or a temperature that is not positive.
    """
    check_rank("logits", logits, 3, "[B, T, V]")
    check_shape("tokens", tokens, tuple(logits.shape[:-1]), "as logits without V")
    check_integer("tokens", tokens)
    _check_temperature(temperature, tokens)
    if isinstance(temperature, Tensor):
        temperature = temperature.expand(tokens.shape).roll(-1, 1)
    # targets move, as logits[:, :-1] would have to be copied; what the last logits say of the first token is dropped
    logprobs = target_logprobs(logits, tokens.roll(-1, 1), temperature)
    return F.pad(logprobs[:, :-1], (1, 0))[:, : tokens.shape[1]]


def target_logprobs(logits: Tensor, targets: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    r"""Log-probability of `targets` under `logits` at the same position, with no shift: the form for packed rows.

    $$\text{out} = \log \mathrm{softmax}(\text{logits} / \tau)_{\text{targets}}$$

    Memory and derivatives as in `token_logprobs`.

    Args:
        logits: [..., V], any floating dtype.
        targets: [...], integers in [0, V).
        temperature: of the sampler, > 0; a float or a tensor that broadcasts to [...], one for each token.

    Returns:
        [...], float32 (float64 for float64 logits), never above 0; -inf for a suppressed target.

    Raises:
        ValueError: for a wrong shape or dtype, or a temperature that is not positive.
    """
    check_float("logits", logits)
    check_integer("targets", targets)
    check_shape("targets", targets, tuple(logits.shape[:-1]), "as logits without V")
    rows, temperature = _as_rows(logits, temperature)
    logprobs = _Logprobs.apply(rows, targets.long().flatten(), temperature)
    return logprobs.reshape(targets.shape).clamp(max=0.0)


def token_entropy(logits: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    r"""Entropy in nats of the next-token distribution at each position, with no shift.

    $$H = -\sum_v p_v \log p_v, \quad p = \mathrm{softmax}(\text{logits} / \tau)$$

    A logit of -inf (a suppressed token) adds 0 to the value and gets gradient 0. Memory and derivatives as in
    `token_logprobs`.

    Args:
        logits: [..., V], any floating dtype. `logits[b, t]` speaks of token t + 1: the caller aligns.
        temperature: of the sampler, > 0; a float or a tensor that broadcasts to [...].

    Returns:
        [...], float32 (float64 for float64 logits), never below 0.

    Raises:
        ValueError: for a wrong dtype or a temperature that is not positive.
    """
    check_float("logits", logits)
    rows, temperature = _as_rows(logits, temperature)
    return _Entropy.apply(rows, temperature)[0].reshape(logits.shape[:-1])


@torch.no_grad()
def sum_pi_squared(logits: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    r"""Chance that two draws from the next-token distribution are equal, at each position, with no shift.

    $$\sum_v p_v^2, \quad p = \mathrm{softmax}(\text{logits} / \tau)$$

    What `rlkit.advantages.optimal_token_baseline_advantages` wants beside the log-probabilities; gets no gradient.

    Args:
        logits: [..., V], any floating dtype. `logits[b, t]` speaks of token t + 1: the caller aligns.
        temperature: of the sampler, > 0; a float or a tensor that broadcasts to [...].

    Returns:
        [...], float32 (float64 for float64 logits), in (0, 1].

    Raises:
        ValueError: for a wrong dtype or a temperature that is not positive.
    """
    check_float("logits", logits)
    rows, temperature = _as_rows(logits, temperature)
    sums = [_exp(_log_softmax(rows[piece], _rows(temperature, piece)).mul_(2)).sum(1) for piece in _pieces(rows)]
    return torch.cat([at_least_float32(rows[:0, 0]), *sums]).reshape(logits.shape[:-1])


def suppress_tokens(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Logits with those of `token_ids` at -inf, so that their probability is exactly 0.

    Sampler and trainer both call this one function. A policy that can sample an image placeholder breaks its own next
    forward; suppressing it in the sampler alone makes the two score different distributions.

    Args:
        logits: [..., V]; not changed.
        token_ids: [K], integers in [0, V); may be empty.

    Returns:
        [..., V], a new tensor of the dtype of `logits`; the gradient at the suppressed entries is 0.

    Raises:
        ValueError: where `logits` is not floating point or `token_ids` is not a 1-D integer tensor.
    """
    check_float("logits", logits)
    check_integer("token_ids", token_ids)
    check_rank("token_ids", token_ids, 1, "[K]")
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
) -> tuple[Tensor, Tensor]:
    r"""Log-probabilities of targets, and entropies, from the last hidden states without ever holding the [N, V] logits.

    $$z = (h W^\top + b) / \tau, \quad \text{logprob} = z_y - \log\textstyle\sum_v e^{z_v}, \quad
    H = -\textstyle\sum_v p_v \log p_v$$

    Tokens are cut into chunks (the vocabulary never is: a softmax is whole or wrong) and backward computes each chunk
    again: $\partial z = g_{lp} (1_y - p) - g_H\, p (\log p + H)$. The gradient is exact through both outputs; there is
    no second derivative. Equals `target_logprobs` and `token_entropy` of `suppress_tokens(hidden @ weight.T + bias)`.

    The product is taken in the dtype of `hidden`, as the model's own head does (autocast is ignored), the softmax in
    float32. Liger adds up the weight's gradient in the weight's dtype; we add chunks up in float32 at least, because
    hundreds of bfloat16 additions lose the small ones. That costs one float32 [V, H] during backward.

    Args:
        hidden: [N, H], the model's output before its head, N >= 0.
        weight: [V, H], of the dtype of `hidden`.
        targets: [N], integers in [0, V).
        temperature: of the sampler, > 0; a float or [N]; gets no gradient.
        bias: [V] or None.
        suppress: [K], token ids of probability 0, or None; see `suppress_tokens`.
        chunk: tokens to a chunk; None takes as many as hold 64 MiB of logits, 16 MiB on a CPU.

    Returns:
        (logprobs [N], entropy [N]), float32 (float64 for float64 inputs); no logprob is above 0.

    Raises:
        ValueError: for a wrong rank, shape or dtype, a chunk below 1, or a temperature that is not positive.
    """
    _check_linear(hidden, weight, targets, bias)
    _check_temperature(temperature, targets)
    if isinstance(temperature, Tensor):
        temperature = temperature.detach().expand(targets.shape)
    if suppress is not None:
        check_integer("suppress", suppress)
        check_rank("suppress", suppress, 1, "[K]")
        suppress = suppress.to(hidden.device, torch.long)
    if chunk is None:
        itemsize = torch.promote_types(hidden.dtype, torch.float32).itemsize
        size = CPU_CHUNK_BYTES if hidden.device.type == "cpu" else CHUNK_BYTES
        chunk = max(1, size // (itemsize * max(1, weight.shape[0])))
    check_positive(chunk=chunk)
    logprobs, entropy = _LinearLogprobs.apply(hidden, weight, bias, targets.long(), temperature, suppress, chunk)
    return logprobs, entropy


class _Logprobs(torch.autograd.Function):
    """Log-probabilities of targets [N] under logits [N, V]; saves its inputs alone and computes in pieces of rows."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, targets: Tensor, temperature: float | Tensor) -> Tensor:
        logprobs = logits.new_empty(logits.shape[0], dtype=torch.promote_types(logits.dtype, torch.float32))
        for rows in _pieces(logits):
            logp = _log_softmax(logits[rows], _rows(temperature, rows))
            logprobs[rows] = logp.gather(1, targets[rows, None])[:, 0]
        return logprobs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        logits, targets, temperature = inputs
        _save(ctx, temperature, logits, targets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        temperature, logits, targets = _saved(ctx)
        result = torch.empty_like(logits)
        for rows in _pieces(logits):
            scale = _rows(temperature, rows)
            share = grad[rows, None] / scale
            p = _exp(_log_softmax(logits[rows], scale))
            result[rows] = p.mul_(-share).scatter_add_(1, targets[rows, None], share)
        return result, None, None


class _Entropy(torch.autograd.Function):
    """Entropies [N] of logits [N, V]; saves logits and three numbers a row, computes the rest again, in pieces.

    With d = z - max(z) and s = sum(exp(d)) the log-softmax is d - log(s), so each way takes one exp of every logit.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, temperature: float | Tensor) -> tuple[Tensor, ...]:
        entropy = logits.new_empty(logits.shape[0], dtype=torch.promote_types(logits.dtype, torch.float32))
        largest, total = torch.empty_like(entropy), torch.empty_like(entropy)
        for rows in _pieces(logits):
            scaled = _scaled(logits[rows], _rows(temperature, rows))
            largest[rows] = scaled.amax(1)
            below = (scaled - largest[rows, None]).clamp_(min=_NO_PROBABILITY)
            share = _exp(below)
            total[rows] = share.sum(1)
            entropy[rows] = total[rows].log() - share.mul_(below).sum(1) / total[rows]
        return entropy, largest, total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, temperature = inputs
        ctx.mark_non_differentiable(*output[1:])
        _save(ctx, temperature, logits, *output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        temperature, logits, entropy, largest, total = _saved(ctx)
        result = torch.empty_like(logits)
        for rows in _pieces(logits):
            scale = _rows(temperature, rows)
            below = (_scaled(logits[rows], scale) - largest[rows, None]).clamp_(min=_NO_PROBABILITY)
            share = _exp(below)
            surprise = below.add_((entropy[rows] - total[rows].log())[:, None])  # log p + H
            result[rows] = surprise.mul_(share).mul_(-grad[rows, None] / (total[rows, None] * scale))
        return result, None


class _LinearLogprobs(torch.autograd.Function):
    """linear_logprobs on checked arguments. Saves its inputs and the entropy; no chunk outlives its turn."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float | Tensor,
        suppress: Tensor | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_empty(hidden.shape[0], dtype=torch.promote_types(hidden.dtype, torch.float32))
        entropy = torch.empty_like(logprobs)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            logp = _chunk_logprobs(hidden[rows], weight, bias, _rows(temperature, rows), suppress)
            logprobs[rows] = logp.gather(1, targets[rows, None])[:, 0].clamp_(max=0.0)
            entropy[rows] = -_exp(logp).mul_(logp.clamp_(min=_NO_PROBABILITY)).sum(1)
        return logprobs, entropy

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        hidden, weight, bias, targets, temperature, suppress, ctx.chunk = inputs
        _save(ctx, temperature, hidden, weight, bias, targets, suppress, output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        temperature, hidden, weight, bias, targets, suppress, entropy = _saved(ctx)
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=entropy.dtype) if want_weight else None
        grad_bias = torch.zeros_like(bias, dtype=entropy.dtype) if want_bias else None
        for start in range(0, hidden.shape[0], ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            scale = _rows(temperature, rows)
            logp = _chunk_logprobs(hidden[rows], weight, bias, scale, suppress).clamp_(min=_NO_PROBABILITY)
            p = _exp(logp)
            grad = logp.add_(entropy[rows, None]).mul_(-grad_entropy[rows, None]).sub_(grad_logprobs[rows, None])
            grad = grad.mul_(p).scatter_add_(1, targets[rows, None], grad_logprobs[rows, None])
            if suppress is not None:
                grad.index_fill_(1, suppress, 0.0)
            grad = grad.div_(scale).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.t() @ hidden[rows]
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=grad_bias.dtype)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _chunk_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float | Tensor, suppress: Tensor | None
) -> Tensor:
    """Log-softmax [n, V] of one chunk of tokens: forward and backward both come here, so they see the same numbers."""
    with torch.autocast(hidden.device.type, enabled=False):
        logits = F.linear(hidden, weight, bias)
    if suppress is not None:
        logits.index_fill_(1, suppress, -torch.inf)
    return _log_softmax(logits, temperature)


def _save(ctx: Any, temperature: float | Tensor, *tensors: Tensor | None) -> None:
    """For `_saved` in backward; autograd keeps tensors and nothing else."""
    is_tensor = isinstance(temperature, Tensor)
    ctx.save_for_backward(temperature if is_tensor else None, *tensors)
    ctx.temperature = None if is_tensor else temperature


def _saved(ctx: Any) -> tuple[Any, ...]:
    """The temperature and the tensors that `_save` was given."""
    temperature, *tensors = ctx.saved_tensors
    return ctx.temperature if temperature is None else temperature, *tensors


def _rows(temperature: float | Tensor, rows: slice) -> float | Tensor:
    """The temperature of some tokens as a column [n, 1], or the float that all share."""
    return temperature[rows, None] if isinstance(temperature, Tensor) else temperature


def _as_rows(logits: Tensor, temperature: float | Tensor) -> tuple[Tensor, float | Tensor]:
    """Logits [..., V] as [N, V], and the temperature as a float or [N]."""
    like = logits[..., 0]
    _check_temperature(temperature, like)
    if isinstance(temperature, Tensor):
        temperature = temperature.detach().expand(like.shape).flatten()
    return logits.reshape(like.numel(), logits.shape[-1]), temperature


def _pieces(logits: Tensor) -> list[slice]:
    """The rows of [N, V] logits in as many pieces as keep each within its bytes."""
    row = torch.promote_types(logits.dtype, torch.float32).itemsize * max(1, logits.shape[1])
    size = max(1, (CPU_CACHE_BYTES if logits.device.type == "cpu" else CHUNK_BYTES) // row)
    return [slice(start, start + size) for start in range(0, logits.shape[0], size)]


def _log_softmax(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Of [n, V] logits in float32 at least; the temperature is a float or [n, 1]. A tensor of its own."""
    return _scaled(logits, temperature).log_softmax(1)


def _exp(x: Tensor) -> Tensor:
    """exp(x), a new tensor. On a CPU as a power of 2: exp takes it three times as long and is no closer."""
    return (x * _LOG2_E).exp2_() if x.is_cpu else x.exp()


def _scaled(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Logits over the temperature in float32 at least; the same tensor where that changes nothing."""
    logits = at_least_float32(logits)
    return logits if isinstance(temperature, float) and temperature == 1.0 else logits / temperature


def _check_temperature(temperature: float | Tensor, like: Tensor) -> None:
    """A positive number, or a tensor that broadcasts to the shape of `like` (its values are not looked at)."""
    if not isinstance(temperature, Tensor):
        check_positive(temperature=temperature)
    elif temperature.ndim > like.ndim or any(
        n not in (1, m) for n, m in zip(reversed(temperature.shape), reversed(like.shape), strict=False)
    ):
        fail("temperature", temperature, f"a float or a tensor that broadcasts to {list(like.shape)}")


def _check_linear(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    """hidden [N, H] and weight [V, H] of one floating dtype, targets integer [N], bias [V]."""
    check_float("hidden", hidden)
    check_rank("hidden", hidden, 2, "[N, H]")
    check_rank("weight", weight, 2, "[V, H]")
    check_shape("weight", weight, (weight.shape[0], hidden.shape[1]), "[V, H] with the H of hidden")
    check_integer("targets", targets)
    check_shape("targets", targets, (hidden.shape[0],), "[N] as hidden")
    if bias is not None:
        check_shape("bias", bias, (weight.shape[0],), "[V] as weight")
    for name, x in (("weight", weight), ("bias", bias)):
        if x is not None and x.dtype != hidden.dtype:
            fail(name, x, f"the dtype of hidden, {hidden.dtype}")
