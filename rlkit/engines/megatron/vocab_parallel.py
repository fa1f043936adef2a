"""Log-probabilities and entropies of logits whose vocabulary is spread over the ranks of a process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from rlkit.losses.logprobs import CHUNK_BYTES, CPU_CHUNK_BYTES

_NO_PROBABILITY = -1e30  # instead of -inf, which times a probability of 0 is nan


def vocab_parallel_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    suppress: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    r"""What `rlkit.losses.logprobs.target_logprobs` and `token_entropy` give for the whole vocabulary, of a slice each.

    The softmax needs a maximum and sums over the ranks, three all-reduces of [K] numbers; backward needs none, as the
    gradient of a slice, $g_{lp} (1_y - p) - g_H\, p (\log p + H)$, knows them. Every rank must hold the same outer
    gradient (compute the same loss): it is not summed.

    Args:
        logits: [K, V / ranks], rank r's slice of the vocabulary, in the order of ranks.
        targets: [K], in [0, V).
        temperature: of the sampler, > 0.
        suppress: [S] token ids of probability 0, of the whole vocabulary.
        group: the ranks; the default group.

    Returns:
        (logprobs [K], entropy [K]), float32, the same on every rank.
    """
    first = dist.get_rank(group) * logits.shape[1]
    if suppress is not None:
        mine = suppress[(suppress >= first) & (suppress < first + logits.shape[1])] - first
        logits = logits.index_fill(1, mine, -torch.inf)
    logprobs, entropy = _VocabParallel.apply(logits, targets - first, temperature, group)
    return logprobs, entropy


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
    r"""`vocab_parallel_logprobs` of `hidden @ weight.T`, which is worked out a few tokens at a time and never kept.

    A rank finds the maximum and the sums of its slice, $\sum e^y$ and $\sum y e^y$ with $y$ counted from that maximum,
    and two all-reduces of [K] numbers put the slices together. Backward computes each chunk again.

    Args:
        hidden: [K, H], the same on every rank. Its gradient is this slice's alone: the caller adds them up, as
            Megatron's regions do.
        weight: [V / ranks, H], rank r's rows of the output layer, of the dtype of `hidden`.
        targets, temperature, suppress, group: see `vocab_parallel_logprobs`.
        chunk: tokens to a chunk; None takes as many as hold 64 MiB of logits, 16 MiB on a CPU.

    Returns:
        (logprobs [K], entropy [K]), float32, the same on every rank.
    """
    first = dist.get_rank(group) * weight.shape[0]
    if suppress is not None:
        suppress = suppress[(suppress >= first) & (suppress < first + weight.shape[0])] - first
    if chunk is None:
        chunk = max(1, (CHUNK_BYTES if hidden.is_cuda else CPU_CHUNK_BYTES) // (4 * weight.shape[0]))
    logprobs, entropy = _Linear.apply(hidden, weight, targets - first, temperature, suppress, group, chunk)
    return logprobs, entropy


class _Linear(torch.autograd.Function):
    """On checked arguments; `targets` and `suppress` are counted from the slice's first token."""

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
        inside = (targets >= 0) & (targets < weight.shape[0])
        targets = targets.clamp(0, weight.shape[0] - 1)
        largest = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        sums = largest.new_empty(3, len(hidden))  # of e^y and y e^y; and the target's logit, on the rank that has it
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = _scaled_logits(hidden[rows], weight, temperature, suppress)
            largest[rows] = logits.amax(1).clamp_(min=_NO_PROBABILITY)
            sums[2, rows] = logits.gather(1, targets[rows, None])[:, 0]
            e = logits.sub_(largest[rows, None]).exp()
            sums[0, rows] = e.sum(1)
            sums[1, rows] = e.mul_(logits.clamp_(min=_NO_PROBABILITY)).sum(1)
        most = largest.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        shift = largest - most
        sums[1] = shift.exp() * (sums[1] + shift * sums[0])
        sums[0] *= shift.exp()
        sums[2] = torch.where(inside, sums[2], 0.0)
        dist.all_reduce(sums, group=group)
        log_total = sums[0].log()
        logprobs, entropy = sums[2] - most - log_total, log_total - sums[1] / sums[0]
        ctx.save_for_backward(hidden, weight, targets, inside, suppress, most + log_total, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, inside, suppress, log_total, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        own = torch.where(inside, grad_logprobs, 0.0)
        for start in range(0, len(hidden), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            logits = _scaled_logits(hidden[rows], weight, ctx.temperature, suppress)
            logp = logits.sub_(log_total[rows, None]).clamp_(min=_NO_PROBABILITY)
            grad = _grad_logits(logp, entropy[rows], grad_logprobs[rows], grad_entropy[rows], targets[rows], own[rows])
            if suppress is not None:
                grad.index_fill_(1, suppress, 0.0)
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.t() @ hidden[rows]
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def _scaled_logits(hidden: Tensor, weight: Tensor, temperature: float, suppress: Tensor | None) -> Tensor:
    """Logits of this slice over the temperature, float32; a tensor of its own."""
    logits = linear(hidden, weight).float() / temperature
    return logits if suppress is None else logits.index_fill_(1, suppress, -torch.inf)


def _grad_logits(
    logp: Tensor, entropy: Tensor, grad_logprobs: Tensor, grad_entropy: Tensor, targets: Tensor, own: Tensor
) -> Tensor:
    """The gradient of a slice of scaled logits; `targets` lie within it, with `own` 0 where they belong to another."""
    grad = (logp + entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_logprobs[:, None]).mul_(logp.exp())
    return grad.scatter_add_(1, targets[:, None], own[:, None])


class _VocabParallel(torch.autograd.Function):
    """On checked arguments; `targets` are counted from the slice's first token, and may lie outside it."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        scaled = logits.float() / temperature
        largest = scaled.amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        scaled -= largest[:, None]
        total = scaled.exp().sum(1)
        dist.all_reduce(total, group=group)
        logp = scaled.sub_(total.log()[:, None])
        inside = (targets >= 0) & (targets < logits.shape[1])
        chosen = logp.gather(1, targets.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        logp.clamp_(min=_NO_PROBABILITY)
        sums = torch.stack([torch.where(inside, chosen, 0.0), -(logp.exp() * logp).sum(1)])
        dist.all_reduce(sums, group=group)
        logprobs, entropy = sums.unbind()
        ctx.save_for_backward(logp, targets, inside, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        logp, targets, inside, entropy = ctx.saved_tensors
        targets, own = targets.clamp(0, logp.shape[1] - 1), torch.where(inside, grad_logprobs, 0.0)
        grad = _grad_logits(logp, entropy, grad_logprobs, grad_entropy, targets, own)
        return grad.div_(ctx.temperature).to(ctx.dtype), None, None, None
