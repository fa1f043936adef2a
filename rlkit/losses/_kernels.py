"""Functions that save memory: sums over the vocabulary, forward and backward, in pieces of rows.

Each class implements a formula of `rlkit.losses.logprobs` or `rlkit.losses.distillation` with its gradient derived by
hand, so that one piece at a time is in memory. All take [N, V] logits of checked shapes and temperatures as a column
[N, 1].
"""

import logging
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlkit._numerics import at_least_float32, masked

CHUNK_BYTES = 512 * 2**20  # float32 logits of one chunk of tokens; each chunk reads the whole output layer again
CPU_CHUNK_BYTES = 16 * 2**20  # the same on a CPU, where larger chunks are no faster
PIECE_BYTES = 64 * 2**20  # float32 logits of one piece of given logits, which are read once for any size of a piece
CPU_CACHE_BYTES = 2**20  # the same on a CPU, so that a second pass over a piece reads the cache
NO_PROBABILITY = -1e4  # replaces a log-probability of -inf in products; its exp is 0 even in float64

Rule = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Add = Callable[[Tensor, Tensor, Tensor], object]


class Logprobs(torch.autograd.Function):
    """Log-probabilities [N, K] of targets [N, K]. Saves only its inputs; backward computes the softmax again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, targets: Tensor, temperature: Tensor, keep: Tensor | None) -> Tensor:
        logps = (_kept_log_softmax(logits, temperature, keep, rows).gather(1, targets[rows]) for rows in pieces(logits))
        return torch.cat(list(logps))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, temperature, keep = ctx.saved_tensors
        result = torch.empty_like(logits)
        for rows in pieces(logits):
            p = _kept_log_softmax(logits, temperature, keep, rows).exp_()
            share = grad[rows] / temperature[rows]
            result[rows] = p.mul_(-share.sum(1, keepdim=True)).scatter_add_(1, targets[rows], share)
        return result, None, None, None


class Entropy(torch.autograd.Function):
    """Entropies [N]. Saves its inputs and its output; backward computes the softmax again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, temperature: Tensor) -> Tensor:
        return torch.cat([entropy_of(log_softmax(logits[rows], temperature[rows])) for rows in pieces(logits)])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, temperature, entropy = ctx.saved_tensors
        result = torch.empty_like(logits)
        for rows in pieces(logits):
            logp = log_softmax(logits[rows], temperature[rows]).clamp_(min=NO_PROBABILITY)
            p = logp.exp()
            surprise = logp.add_(entropy[rows, None])
            result[rows] = p.mul_(surprise).mul_(-grad[rows, None] / temperature[rows])
        return result, None


class LinearLogprobs(torch.autograd.Function):
    """(logprobs [N], entropies [N]) of hidden @ weight.T. Saves its inputs and the entropy; chunks of given length."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
        suppress: Tensor | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies = [], []
        for rows in chunks(len(hidden), chunk):
            logp = _chunk_logprobs(hidden[rows], weight, bias, temperature[rows], suppress)
            logprobs.append(logp.gather(1, targets[rows, None])[:, 0].clamp(max=0))
            entropies.append(entropy_of(logp))
        return torch.cat(logprobs), torch.cat(entropies)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.chunk = inputs
        ctx.save_for_backward(*tensors, output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, suppress, entropy = ctx.saved_tensors

        def logit_gradient(rows: slice) -> Tensor:
            logp = _chunk_logprobs(hidden[rows], weight, bias, temperature[rows], suppress)
            p = logp.clamp_(min=NO_PROBABILITY).exp()
            surprise = logp.add_(entropy[rows, None])
            grad = surprise.mul_(-grad_entropy[rows, None]).sub_(grad_logprobs[rows, None]).mul_(p)
            grad.scatter_add_(1, targets[rows, None], grad_logprobs[rows, None])
            if suppress is not None:
                grad.index_fill_(1, suppress, 0)
            return grad.div_(temperature[rows]).to(hidden.dtype)

        return linear_gradients(ctx, logit_gradient, lambda total, a, b: total.add_(a @ b))


class Divergence(torch.autograd.Function):
    """(values [N], gradients [N, V]) of a rule such as `forward_kl`, 0 outside the mask [N]. Saves only gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        rule: Rule, student: Tensor, teacher: Tensor, mask: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        values, gradients = torch.empty_like(temperature[:, 0]), torch.empty_like(student, dtype=temperature.dtype)
        for rows in pieces(student):
            value, gradient = rule(*(log_softmax(x[rows], temperature[rows]) for x in (student, teacher)))
            values[rows], gradients[rows] = value[:, 0].clamp(min=0), masked(gradient, mask[rows, None])
        return masked(values, mask), gradients

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, student, _, _, temperature = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # no zeros for the second output
        ctx.save_for_backward(output[1], temperature)
        ctx.dtype = student.dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 5
        gradients, temperature = ctx.saved_tensors
        return None, (gradients * (grad[:, None] / temperature)).to(ctx.dtype), None, None, None


class Buckets(torch.autograd.Function):
    """The tempered logits at `index` [N, K], and logsumexp [N] of the other logits; finite outside the mask [N].

    An entry of `index` that is not `named` removes no token from the others. Saves exp(logit - largest) of the others
    and its sums.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        logits: Tensor, index: Tensor, named: Tensor, mask: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        others = masked(logits, mask[:, None])
        top = others.gather(1, index) / temperature
        others.scatter_add_(1, index, torch.where(named, -torch.inf, torch.zeros_like(top)))
        largest, total = torch.empty_like(temperature), torch.empty_like(temperature)
        lowest = torch.finfo(others.dtype).min  # if there are no other tokens
        for rows in pieces(others):
            largest[rows] = others[rows].amax(1, keepdim=True).clamp(min=lowest)
            shares = others[rows].sub_(largest[rows]).div_(temperature[rows]).exp_()
            total[rows] = shares.sum(1, keepdim=True)
        return top, (total.log() + largest / temperature)[:, 0], others, total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, index, _, _, temperature = inputs
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)  # no zeros for the last outputs
        ctx.save_for_backward(index, temperature, *output[2:])
        ctx.dtype = logits.dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_top: Tensor | None, grad_rest: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad_top is None or grad_rest is None:  # the caller concatenates both, so both have a gradient or neither
            return (None,) * 5
        index, temperature, shares, total = ctx.saved_tensors
        scale = torch.where(total > 0, grad_rest[:, None] / (total * temperature), 0)
        result = (shares * scale).scatter_add_(1, index, grad_top / temperature)
        return result.to(ctx.dtype), None, None, None, None


def linear_gradients(ctx: Any, logit_gradient: Callable[[slice], Tensor], add: Add) -> tuple[Tensor | None, ...]:
    """What the backward pass of `LinearLogprobs` returns: the gradients of hidden, weight and bias, then None.

    `ctx` holds these three as its first saved tensors. `logit_gradient` gives the gradient [n, V] of the logits before
    temperature for one chunk of tokens, in the dtype of `hidden`. Chunks are summed in float32 at least; for the
    gradient of weight, `add(total, a, b)` does total += a @ b.
    """
    hidden, weight, bias = ctx.saved_tensors[:3]
    want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    grad_hidden = torch.empty_like(hidden) if want_hidden else None
    grad_weight = torch.zeros_like(weight, dtype=dtype) if want_weight else None
    grad_bias = torch.zeros_like(bias, dtype=dtype) if want_bias else None
    for start in range(0, len(hidden), ctx.chunk):
        rows = slice(start, start + ctx.chunk)
        grad = logit_gradient(rows)
        with torch.autocast(hidden.device.type, enabled=False):
            if grad_hidden is not None:
                grad_hidden[rows] = grad @ weight
            if grad_weight is not None:
                add(grad_weight, grad.t(), hidden[rows])
        if grad_bias is not None:
            grad_bias += grad.sum(0, dtype=dtype)
    sums = (None if x is None else x.to(hidden.dtype) for x in (grad_weight, grad_bias))
    return grad_hidden, *sums, None, None, None, None


def divergence(rule: Rule, student_logits: Tensor, teacher_logits: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """[...]: the divergences of logits [..., V] by a rule such as `forward_kl`, 0 outside the mask [...]."""
    rows = mask.numel(), student_logits.shape[-1]
    student, teacher = student_logits.reshape(rows), teacher_logits.detach().reshape(rows)
    column = temperature_column(temperature, student[:, 0])
    return Divergence.apply(rule, student, teacher, mask.reshape(-1), column)[0].view(mask.shape)


def forward_kl(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """KL(teacher || student) [n, 1] of log-distributions [n, V], and its gradient [n, V] by the student's logits."""
    p, excess = _excess(teacher, student)
    return (p * excess).sum(1, keepdim=True), student.exp() - p


def reverse_kl(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """KL(student || teacher), as `forward_kl`."""
    q, excess = _excess(student, teacher)
    kl = (q * excess).sum(1, keepdim=True)
    return kl, q * (excess - kl)


def jsd(student: Tensor, teacher: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """As `forward_kl`. The gradient through the mixture is 0, because the mixture sums to 1."""
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    p, excess = _excess(teacher, mixture)
    kl, gradient = reverse_kl(student, mixture)
    return beta * (p * excess).sum(1, keepdim=True) + (1 - beta) * kl, (1 - beta) * gradient


def _excess(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The probabilities p of the first of two log-distributions, and first - second, 0 where p is 0."""
    p = first.exp()
    return p, torch.where(p > 0, first - second, 0)


def squared_sums(logits: Tensor, temperature: Tensor) -> Tensor:
    """[N]: the sum of squared probabilities of each row."""
    logps = (log_softmax(logits[rows], temperature[rows]) for rows in pieces(logits))
    return torch.cat([logp.mul_(2).exp_().sum(1) for logp in logps])


def temperature_column(temperature: float | Tensor, like: Tensor) -> Tensor:
    """[N, 1], float32 at least: the temperature of each of the N elements of `like`."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    if isinstance(temperature, Tensor):
        return temperature.detach().to(dtype).expand(like.shape).reshape(-1, 1)
    return like.new_full((like.numel(), 1), temperature, dtype=dtype)


def pieces(logits: Tensor) -> list[slice]:
    """The rows of [N, V] logits, cut into pieces of at most `PIECE_BYTES`."""
    row = torch.promote_types(logits.dtype, torch.float32).itemsize * max(1, logits.shape[1])
    return chunks(len(logits), max(1, (CPU_CACHE_BYTES if logits.device.type == "cpu" else PIECE_BYTES) // row))


def tokens_per_chunk(hidden: Tensor, vocabulary: int) -> int:
    """The number of tokens whose float32 logits take `CHUNK_BYTES`: the default chunk of `linear_logprobs`."""
    row = torch.promote_types(hidden.dtype, torch.float32).itemsize * max(1, vocabulary)
    return max(1, (CPU_CHUNK_BYTES if hidden.device.type == "cpu" else CHUNK_BYTES) // row)


def chunks(rows: int, size: int) -> list[slice]:
    """Slices of at most `size` rows; one empty slice if there are no rows."""
    return [slice(start, start + size) for start in range(0, max(1, rows), size)]


def log_softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    """Log-softmax of tempered logits, in float32 at least, as a new tensor."""
    return (at_least_float32(logits) / temperature).log_softmax(1)


def _kept_log_softmax(logits: Tensor, temperature: Tensor, keep: Tensor | None, rows: slice) -> Tensor:
    """`log_softmax` of some rows over the tokens of `keep`, -inf at the others."""
    kept = logits[rows] if keep is None else torch.where(keep[rows], logits[rows], -torch.inf)
    return log_softmax(kept, temperature[rows])


def entropy_of(logp: Tensor) -> Tensor:
    """[n]: the entropies of log-distributions [n, V], which it overwrites; a log-probability of -inf adds 0."""
    p = logp.exp()
    return -p.mul_(logp.clamp_(min=NO_PROBABILITY)).sum(1)


def _chunk_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor, suppress: Tensor | None
) -> Tensor:
    """Log-softmax [n, V] of one chunk of tokens, for forward and backward, so that both see the same numbers."""
    with torch.autocast(hidden.device.type, enabled=False):
        logits = F.linear(hidden, weight, bias)
    if suppress is not None:
        logits.index_fill_(1, suppress, -torch.inf)
    return log_softmax(logits, temperature)


def kernels_for(hidden: Tensor) -> Any:
    """The module with the Triton kernels, if they can compute with this tensor; otherwise None."""
    if type(hidden) is not Tensor or torch.compiler.is_compiling():
        return None
    return _triton(hidden.device, hidden.dtype)


@cache
def _triton(device: torch.device, dtype: torch.dtype) -> Any:
    """The module with the Triton kernels, if they run on this device; otherwise None."""
    if device.type != "cuda":
        return None
    try:
        from rlkit.losses import _triton
    except ImportError as error:
        logging.getLogger(__name__).warning("linear_logprobs: computed without Triton kernels on %s: %s", device, error)
        return None
    return _triton if _triton.kernels_work(device, dtype) else None
