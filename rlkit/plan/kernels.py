"""Stand-ins for GPU kernels: they allocate the same tensors and compute nothing. rlkit's CPU kernels allocate others.

For its backward pass, attention saves queries, keys, values, the output and one log-sum-exp per query and head. With
`use_fused_kernels`, the output layer saves a few sums per token, and allocates the logit gradient of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import AttentionInterface

from rlkit.engines.packing import attention, vision_attention
from rlkit.engines.packing.ulysses import gather_heads_scatter_tokens, gather_tokens_scatter_heads


class _Flash(torch.autograd.Function):
    """[N, Hq, D], [K, H, D], [K, H, Dv] -> [N, Hq, Dv]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        log_sums = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, log_sums)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def use_planned_attention() -> None:
    """Register the stand-ins with transformers in place of rlkit's attention functions, for this process."""
    AttentionInterface.register(attention.NAME, _text_attention)
    AttentionInterface.register(vision_attention.NAME, _vision_attention)


def use_own_attention() -> None:
    """Undo `use_planned_attention`."""
    AttentionInterface.register(attention.NAME, attention.packed_attention)
    AttentionInterface.register(vision_attention.NAME, vision_attention.packed_vision_attention)


@contextmanager
def planned_head() -> Iterator[Any]:
    """The module of Triton kernels, patched so that they only allocate; None if triton is not installed."""
    try:
        from rlkit.losses import _triton
    except ImportError:
        yield None
        return

    def sums(hidden: Tensor, *_: Any) -> Tensor:
        return hidden.new_empty(4, 1, len(hidden), dtype=torch.float32)

    def gradients(hidden: Tensor, weight: Tensor, *_: Any) -> Tensor:
        return hidden.new_empty(len(hidden), len(weight))

    with mock.patch.object(_triton, "vocabulary_sums", sums), mock.patch.object(_triton, "logit_gradients", gradients):
        yield _triton


def _text_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    packed_layout: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As `rlkit.engines.packing.attention.packed_attention`: [1, H, N, D] -> [1, N, H, D]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    packed_layout.attention_calls += 1
    if (ulysses := packed_layout.ulysses) is not None:
        repeats = max(1, ulysses.size // k.shape[1])
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
        q, k, v = (gather_tokens_scatter_heads(x, ulysses) for x in (q, k, v))
    if (keys := packed_layout.key_indices) is not None:
        k, v = k.index_select(0, keys), v.index_select(0, keys)
    out = _Flash.apply(q, k, v)
    out = out if ulysses is None else gather_heads_scatter_tokens(out, ulysses)
    return out[None], None


def _vision_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    return _Flash.apply(*(x.squeeze(0).transpose(0, 1) for x in (query, key, value))).unsqueeze(0), None
