"""Log-probabilities and entropies from hidden states, with a vocabulary sharded over the ranks of a process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from rlkit.losses.logprobs import kernels_for, tokens_per_chunk

_LOG_ZERO = -1e30  # instead of -inf, which times a probability of 0 would be nan


def vocab_parallel_linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    suppress: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    r"""`rlkit.losses.linear_logprobs` of a vocabulary of which each rank has a slice.

    A rank computes the maximum of its slice and the sums $\sum e^y$ and $\sum y e^y$, with $y$ relative to that
    maximum. Two all-reduces of [K] numbers combine the slices. Backward computes the logits again, and needs no
    communication. On a GPU both use the Triton kernels of `linear_logprobs`. All ranks must compute the same loss: the
    gradients of the outputs are not summed over ranks.

    Args:
        hidden: [K, H], the same on every rank. Its gradient is that of this slice only; the caller sums it over ranks,
            as Megatron's regions do.
        weight: [V / ranks, H], this rank's rows of the output layer, of the dtype of `hidden`.
        targets: [K], in [0, V).
        temperature: sampling temperature, > 0.
        suppress: [S] token ids, of the whole vocabulary, whose probability is 0.
        group: the ranks; by default all.
        chunk: tokens per chunk; by default as many as have 512 MiB of logits, 16 MiB on a CPU.

    Returns:
        (logprobs [K], entropy [K]), float32, the same on every rank.
    """
    first = dist.get_rank(group) * len(weight)
    suppressed = None if suppress is None else _is_suppressed(suppress - first, len(weight))
    if chunk is None:
        chunk = tokens_per_chunk(hidden, len(weight))
    column = torch.full((len(hidden), 1), temperature, dtype=torch.float32, device=hidden.device)
    logprobs, entropy = _LinearLogprobs.apply(hidden, weight, targets - first, column, suppressed, group, chunk)
    return logprobs, entropy


def _is_suppressed(token_ids: Tensor, size: int) -> Tensor:
    """[size] uint8: 1 at the token ids that lie in the slice; the ids are relative to its first."""
    is_local = (token_ids >= 0) & (token_ids < size)
    found = torch.zeros(size + 1, dtype=torch.uint8, device=token_ids.device)
    return found.index_fill_(0, torch.where(is_local, token_ids, size), 1)[:size]


class _LinearLogprobs(torch.autograd.Function):
    """`targets` are relative to the slice and may lie outside of it; `temperature` is [K, 1]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor,
        suppressed: Tensor | None,
        group: dist.ProcessGroup | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        kernels = kernels_for(hidden)
        if kernels is not None:
            slices = kernels.vocabulary_sums(hidden, weight, None, targets, temperature, suppressed)
        else:
            slices = _vocabulary_sums(hidden, weight, targets, temperature, suppressed, chunk)
        largest, total, weighted, chosen = slices
        most = largest.amax(0)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        shift = largest - most
        sums = torch.stack([shift.exp() * total, shift.exp() * (weighted + shift * total), chosen]).sum(1)
        dist.all_reduce(sums, group=group)
        sum_exp, sum_y_exp, target_logits = sums
        log_total = sum_exp.log()
        logprobs = (target_logits - most - log_total).clamp(max=0)
        entropy = log_total - sum_y_exp / sum_exp
        ctx.save_for_backward(hidden, weight, targets, temperature, suppressed, most + log_total, entropy)
        ctx.chunk = chunk
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperature, suppressed, log_total, entropy = ctx.saved_tensors
        kernels = kernels_for(hidden)
        logit_gradients = _logit_gradients if kernels is None else kernels.logit_gradients
        add_product = _add_product if kernels is None else kernels.add_product
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        per_token = (targets, temperature, log_total, entropy, grad_logprobs, grad_entropy)
        for start in range(0, len(hidden), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            grad = logit_gradients(hidden[rows], weight, None, suppressed, *(x[rows] for x in per_token))
            with torch.autocast(hidden.device.type, enabled=False):
                grad_hidden[rows] = grad @ weight
                if grad_weight is not None:
                    add_product(grad_weight, grad.t(), hidden[rows])
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


# --- without Triton


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    total += a @ b


def _vocabulary_sums(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, suppressed: Tensor | None, chunk: int
) -> Tensor:
    """As `vocabulary_sums` of the Triton kernels, in one part.

    Returns:
        [4, 1, K] float32: maximum logit m; sum exp(z - m); sum (z - m) exp(z - m); the target's logit, or 0 if the
        target is in another slice.
    """
    out = torch.empty(4, 1, len(hidden), dtype=torch.float32, device=hidden.device)
    for start in range(0, len(hidden), chunk):
        rows = slice(start, start + chunk)
        logits = _logits(hidden[rows], weight, temperature[rows], suppressed)
        is_local = (targets[rows] >= 0) & (targets[rows] < len(weight))
        target = targets[rows].clamp(0, len(weight) - 1)
        out[3, 0, rows] = torch.where(is_local, logits.gather(1, target[:, None])[:, 0], 0.0)
        out[0, 0, rows] = logits.amax(1).clamp_(min=_LOG_ZERO)
        exp = logits.sub_(out[0, 0, rows, None]).exp()
        out[1, 0, rows] = exp.sum(1)
        out[2, 0, rows] = exp.mul_(logits.clamp_(min=_LOG_ZERO)).sum(1)
    return out


def _logit_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: None,
    suppressed: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    log_total: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
) -> Tensor:
    """As `logit_gradients` of the Triton kernels: (g_lp (1_y - p) - g_H p (log p + H)) / temperature."""
    logp = _logits(hidden, weight, temperature, suppressed).sub_(log_total[:, None]).clamp_(min=_LOG_ZERO)
    grad = (logp + entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_logprobs[:, None]).mul_(logp.exp())
    is_local = (targets >= 0) & (targets < len(weight))
    grad_target = torch.where(is_local, grad_logprobs, 0.0)
    grad.scatter_add_(1, targets.clamp(0, len(weight) - 1)[:, None], grad_target[:, None])
    if suppressed is not None:
        grad.masked_fill_(suppressed.bool(), 0.0)
    return grad.div_(temperature).to(hidden.dtype)


def _logits(hidden: Tensor, weight: Tensor, temperature: Tensor, suppressed: Tensor | None) -> Tensor:
    """Float32 logits of the slice, divided by the temperature; a new tensor."""
    with torch.autocast(hidden.device.type, enabled=False):
        logits = linear(hidden, weight).float() / temperature
    return logits if suppressed is None else logits.masked_fill_(suppressed.bool(), -torch.inf)
