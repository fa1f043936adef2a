"""Stand-ins for GPU kernels: they allocate the same tensors and compute nothing. rlkit's CPU kernels allocate others.

For its backward pass, attention saves queries, keys, values, the output and one log-sum-exp per query and head. With
`use_fused_kernels`, the output layer saves a few sums per token, and allocates the logit gradient of one chunk.
Recurrent layers are taken to use flash-linear-attention, mamba-ssm (`rlkit.plan.mamba_kernels`) and causal-conv1d.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import AttentionInterface

from rlkit.engines.packing import attention, vision_attention
from rlkit.engines.packing.ulysses import gather_heads_scatter_tokens, gather_tokens_scatter_heads
from rlkit.plan.mamba_kernels import chunk_scan, selective_scan, split_scan
from rlkit.vlm.families import recurrent_layers

CHUNK = 64  # tokens that flash-linear-attention computes at a time


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


class _DeltaRule(torch.autograd.Function):
    """Queries, keys [B, T, H, K], values [B, T, H, V], g, beta [B, T, H] -> [B, T, H, V], last state [B, H, K, V].

    It saves what `chunk_gated_delta_rule` of flash-linear-attention saves, or `chunk_kda` if g is [B, T, H, K]:
    normalized queries and keys with their norms, values, beta, cumulative decays, and one or two matrices per chunk. In
    its backward pass it recomputes the state at the start of each chunk, and also allocates the gradients of these.
    (fla/ops/gated_delta_rule/chunk.py and fla/ops/kda/chunk.py of https://github.com/fla-org/flash-linear-attention)
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        tokens, matrices = key.shape[:3], 1 if g.ndim == 3 else 2
        saved = [torch.empty_like(query), torch.empty_like(key), value, beta, state]
        saved += [key.new_empty(2, *tokens, dtype=torch.float32), g.new_empty(g.shape, dtype=torch.float32)]
        saved += [key.new_empty(matrices, *tokens, CHUNK)]
        ctx.save_for_backward(*saved)
        out = torch.empty_like(value)
        _allocate_states(key, value)
        return out, key.new_empty(len(key), *key.shape[2:], value.shape[3], dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, beta, state, _, decays, _ = ctx.saved_tensors
        found = [None if x is None else torch.empty_like(x) for x in (query, key, value, decays, beta, state)]
        _allocate_states(key, value, 2)
        return tuple(found)


def _allocate_states(key: Tensor, value: Tensor, count: int = 1) -> None:
    """Allocate, and give back, the states at the start of each chunk."""
    batch, tokens, heads, size = key.shape
    key.new_empty(count, batch, -(-tokens // CHUNK), heads, size, value.shape[3])


class _Convolution(torch.autograd.Function):
    """[B, C, T] -> [B, C, T]. It saves its inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(None if x is None else torch.empty_like(x) for x in ctx.saved_tensors)


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


@contextmanager
def planned_recurrence(models: Iterable[Any]) -> Iterator[None]:
    """A context in which recurrent layers of these models call the stand-ins, as far as there are any."""
    modules = {sys.modules[type(layer).__module__] for model in models for layer in recurrent_layers(model)}
    stand_ins = {
        "torch_chunk_gated_delta_rule": _delta_rule,
        "chunk_kimi_delta_attention": _delta_rule,
        "mamba2_split_conv1d_scan_combined": split_scan,  # in training
        "mamba2_chunk_scan": chunk_scan,
        "mamba_selective_scan": selective_scan,
        "causal_conv1d_fn": _convolution,
    }
    with ExitStack() as stack:
        for module in modules:
            for name in stand_ins.keys() & vars(module).keys():
                stack.enter_context(mock.patch.object(module, name, stand_ins[name]))
        yield


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    out, state = _DeltaRule.apply(query, key, value, g, beta, initial_state)
    return out, state if output_final_state else None


def _convolution(hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, **kwargs: Any) -> Tensor:
    return _Convolution.apply(hidden_states, weight, bias)


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
