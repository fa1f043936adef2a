"""Log-probabilities and entropies from hidden states, with a vocabulary sharded over the ranks of a process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from rlkit.losses.logprobs import tokens_per_chunk

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
    maximum. Two all-reduces of [K] numbers combine the slices. Backward computes each chunk again, and needs no
    communication. All ranks must compute the same loss: the gradients of the outputs are not summed over ranks.

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
    first = dist.get_rank(group) * weight.shape[0]
    if suppress is not None:
        suppress = _local_ids(suppress, first, weight.shape[0])
    if chunk is None:
        chunk = tokens_per_chunk(hidden, len(weight))
    logprobs, entropy = _LinearLogprobs.apply(hidden, weight, targets - first, temperature, suppress, group, chunk)
    return logprobs, entropy


def _local_ids(token_ids: Tensor, first: int, count: int) -> Tensor:
    """The token ids in a slice of the vocabulary, relative to its first."""
    return token_ids[(token_ids >= first) & (token_ids < first + count)] - first


class _LinearLogprobs(torch.autograd.Function):
    """`targets` and `suppress` are relative to the slice; a target may lie outside of it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        suppress: Tensor | None,
        group: dist.ProcessGroup | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        is_local = (targets >= 0) & (targets < weight.shape[0])
        targets = targets.clamp(0, weight.shape[0] - 1)
        local_max = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        sums = local_max.new_empty(3, len(hidden))
        sum_exp, sum_y_exp, target_logits = sums  # views
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = _scaled_logits(hidden[rows], weight, temperature, suppress)
            local_max[rows] = logits.amax(1).clamp_(min=_LOG_ZERO)
            target_logits[rows] = logits.gather(1, targets[rows, None])[:, 0]
            exp = logits.sub_(local_max[rows, None]).exp()
            sum_exp[rows] = exp.sum(1)
            sum_y_exp[rows] = exp.mul_(logits.clamp_(min=_LOG_ZERO)).sum(1)
        global_max = local_max.clone()
        dist.all_reduce(global_max, dist.ReduceOp.MAX, group=group)
        shift = local_max - global_max
        sums[1] = shift.exp() * (sum_y_exp + shift * sum_exp)
        sums[0] *= shift.exp()
        sums[2] = torch.where(is_local, target_logits, 0.0)
        dist.all_reduce(sums, group=group)
        log_total = sum_exp.log()
        logprobs, entropy = target_logits - global_max - log_total, log_total - sum_y_exp / sum_exp
        ctx.save_for_backward(hidden, weight, targets, is_local, suppress, global_max + log_total, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, is_local, suppress, log_total, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_targets = torch.where(is_local, grad_logprobs, 0.0)
        for start in range(0, len(hidden), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            logits = _scaled_logits(hidden[rows], weight, ctx.temperature, suppress)
            logp = logits.sub_(log_total[rows, None]).clamp_(min=_LOG_ZERO)
            grad = _grad_logits(
                logp, entropy[rows], grad_logprobs[rows], grad_entropy[rows], targets[rows], grad_targets[rows]
            )
            if suppress is not None:
                grad.index_fill_(1, suppress, 0.0)
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            with torch.autocast(hidden.device.type, enabled=False):
                grad_hidden[rows] = grad @ weight
                if grad_weight is not None:
                    grad_weight += grad.t() @ hidden[rows]
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def _scaled_logits(hidden: Tensor, weight: Tensor, temperature: float, suppress: Tensor | None) -> Tensor:
    """Float32 logits of the slice, divided by the temperature; a new tensor."""
    with torch.autocast(hidden.device.type, enabled=False):
        logits = linear(hidden, weight).float() / temperature
    return logits if suppress is None else logits.index_fill_(1, suppress, -torch.inf)


def _grad_logits(
    logp: Tensor, entropy: Tensor, grad_logprobs: Tensor, grad_entropy: Tensor, targets: Tensor, grad_targets: Tensor
) -> Tensor:
    """The gradient of a slice of scaled logits: -p (g_H (log p + H) + g_lp), and g_lp more at a target in the slice.

    Args:
        logp: [K, V / ranks].
        entropy, grad_logprobs, grad_entropy: [K].
        targets: [K], in the slice.
        grad_targets: [K], `grad_logprobs`, or 0 for a target that is in the slice of another rank.
    """
    grad = (logp + entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_logprobs[:, None]).mul_(logp.exp())
    return grad.scatter_add_(1, targets[:, None], grad_targets[:, None])
