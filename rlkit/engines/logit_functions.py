"""Functions of the logits of scored tokens, such as a divergence from a teacher, computed in chunks of tokens.

    def divergence(logits, teacher):  # [n, V], {name: [n, ...]} -> [n]
        return topk_forward_kl_loss(logits, teacher["logprobs"], teacher["ids"], temperature=...)

    engine.train_batch(batch, loss_fn, logit_functions={"divergence": divergence})  # loss_fn reads out.divergence

N is the number of scored tokens, n of those in a chunk. Forward keeps only the values, which are float32 whatever the
dtype of the logits. Backward computes each chunk again, so that what a function saves for its own backward, often
several [n, V] tensors, exists for one chunk at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from rlkit.losses.logprobs import TopkLogprobs, suppress_tokens, tokens_per_chunk

LogitFunction = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""(logits [n, V], tensors of `Batch.token_fields` for the same n tokens) -> [n], differentiable in the logits.

The logits are those that predict the tokens: not divided by the temperature, -inf at suppressed tokens.
"""


def topk_of_chunks(chunks: Iterable[Tensor], k: int, temperature: float) -> TopkLogprobs:
    """The k likeliest tokens of each token's distribution, from logits in chunks [n, V], which are not kept.

    Raises:
        ValueError: k is not in 1 to V.
    """
    top = []
    for logits in chunks:
        if not 1 <= k <= logits.shape[1]:
            raise ValueError(f"k: expected 1 to {logits.shape[1]}, the size of the vocabulary, got {k}")
        top.append((logits.float() / temperature).log_softmax(1).topk(k))
    return TopkLogprobs(torch.cat([x.values for x in top]), torch.cat([x.indices for x in top]).int())


def apply_to_logits(function: LogitFunction, logits: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
    """The function's values for all tokens, computed from the logits in chunks.

    Args:
        logits: [N, V], N >= 0.
        fields: tensors [N, ...] by name.

    Returns:
        [N], float32.
    """
    if not len(logits):
        return logits.sum(1).float()
    size = tokens_per_chunk(logits, logits.shape[1])
    parts = zip(*(x.split(size) for x in (logits, *fields.values())), strict=True)

    def apply_to_chunk(chunk: Tensor, *tensors: Tensor) -> Tensor:
        return _checked(function(chunk, dict(zip(fields, tensors, strict=True))), chunk).float()

    values = [checkpoint(apply_to_chunk, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return torch.cat(values)


def apply_to_hidden_states(
    function: LogitFunction,
    hidden: Tensor,
    weight: Tensor,
    fields: Mapping[str, Tensor],
    *,
    bias: Tensor | None = None,
    suppress: Tensor | None = None,
) -> Tensor:
    """`apply_to_logits` for the logits `hidden @ weight.T + bias`, which are computed in chunks and never kept.

    As in `linear_logprobs`, products are computed in the dtype of `hidden`, and the weight's gradient is added up in
    float32.

    Args:
        hidden: [N, H], N >= 0.
        weight: [V, H].
        fields: tensors [N, ...] by name.
        bias: [V] or None.
        suppress: [S] token ids of probability 0, or None.

    Returns:
        [N], float32.
    """
    head = (weight, bias, suppress)
    size = tokens_per_chunk(hidden, len(weight))
    return _FromHiddenStates.apply(hidden, *head, function, size, tuple(fields), *fields.values())


def head_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, suppress: Tensor | None) -> Tensor:
    """The output layer: [n, H] -> logits [n, V], -inf at suppressed tokens."""
    with torch.autocast(hidden.device.type, enabled=False):
        logits = linear(hidden, weight, bias)
    return logits if suppress is None else suppress_tokens(logits, suppress)


def _checked(values: Tensor, logits: Tensor) -> Tensor:
    if values.shape != logits.shape[:1]:
        raise ValueError(
            f"logit_functions: expected values of shape {list(logits.shape[:1])}, got {list(values.shape)}"
        )
    return values


class _FromHiddenStates(torch.autograd.Function):
    """Values [N] of a function of logits. Saves its inputs; backward computes the logits of each chunk again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        suppress: Tensor | None,
        function: LogitFunction,
        size: int,
        names: tuple[str, ...],
        *tensors: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, suppress, *tensors)
        ctx.function, ctx.size, ctx.names = function, size, names
        values = [hidden.new_empty(0, dtype=torch.float32)]
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            logits = head_logits(hidden[rows], weight, bias, suppress)
            fields = {name: x[rows] for name, x in zip(names, tensors, strict=True)}
            values.append(_checked(function(logits, fields), logits).float())
        return torch.cat(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, suppress, *tensors = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        for start in range(0, len(hidden), ctx.size):
            rows = slice(start, start + ctx.size)
            fields = {name: x[rows] for name, x in zip(ctx.names, tensors, strict=True)}
            with torch.autocast(hidden.device.type, enabled=False):
                logits = linear(hidden[rows], weight, bias).requires_grad_()
                with torch.enable_grad():
                    suppressed = logits if suppress is None else suppress_tokens(logits, suppress)
                    values = ctx.function(suppressed, fields)
                (grad_logits,) = torch.autograd.grad(values, logits, grad[rows].to(values.dtype))
                grad_hidden[rows] = grad_logits @ weight
                if grad_weight is not None:
                    grad_weight += grad_logits.t() @ hidden[rows]
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=torch.float32)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, *[None] * (4 + len(tensors))
