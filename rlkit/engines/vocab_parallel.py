"""Log-probabilities and entropies of logits whose vocabulary is spread over the ranks of a process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

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
        grad = (logp + entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_logprobs[:, None]).mul_(logp.exp())
        own = torch.where(inside, grad_logprobs, 0.0)[:, None]
        grad.scatter_add_(1, targets.clamp(0, logp.shape[1] - 1)[:, None], own)
        return grad.div_(ctx.temperature).to(ctx.dtype), None, None, None
