"""Packed (variable-length) causal attention, plugged into transformers through its public `AttentionInterface`.

A packed row holds several segments end to end. The engine passes their `packed_layout` to the model's forward, and
transformers hands unknown keyword arguments down to the attention function registered here. Without a layout (in
generation, or with padded rows) transformers' own SDPA function runs, so one model object serves both. Soft-capped
scores, attention sinks and images whose tokens attend to each other are supported in both; a model that needs anything
else is refused.

The registered name must not contain "flash": transformers would look for a kernel of that name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlkit.engines.packing.flash import flash_attn_varlen_func, flash_supports, flash_varlen_attention
from rlkit.engines.packing.forward_hooks import after_forward, before_forward, cannot_pack, model_facts
from rlkit.engines.packing.layout import PackedLayout
from rlkit.engines.packing.separate_sequences import use_separate_sequences
from rlkit.engines.packing.ulysses import gather_heads_scatter_tokens, gather_tokens_scatter_heads
from rlkit.vlm.families import (
    NO_ATTENTION_INTERFACE,
    attention_chunk_size,
    attention_window,
    has_attention_temperature,
    indexed_attention_layers,
)
from rlkit.vlm.long_rope import fix_rope_factors

NAME = "rlkit_packed"


class AttentionOptions(NamedTuple):
    """The options of a layer's causal attention.

    Attributes:
        scale: of the scores; 1/sqrt(D) by default.
        window: how many tokens a query attends to, its own included; all by default.
        chunk: sequences are cut into chunks of this many tokens, and a query attends to keys of its own chunk only.
        dropout: probability; for packed rows on a GPU without flash-attn it must be 0.
        softcap: the scores become softcap * tanh(scores / softcap); slower without flash-attn.
        sinks: [Hq] score of an extra key without a value, which takes its share of the attention; slower.
    """

    scale: float | None = None
    window: int | None = None
    chunk: int | None = None
    dropout: float = 0.0
    softcap: float | None = None
    sinks: Tensor | None = None


DEFAULT_OPTIONS = AttentionOptions()


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, options: AttentionOptions = DEFAULT_OPTIONS
) -> Tensor:
    """Causal attention within each segment of a packed row, and to its prefix.

    Args:
        query: [N, Hq, D].
        key, value: [N, Hkv, D], Hq a multiple of Hkv; values may have a smaller D.
        layout: of the N tokens.
        options: of the layer.

    Returns:
        [N, Hq, D], D of the values.
    """
    layout = layout if options.chunk is None else layout.chunked(options.chunk)
    flash_cannot = (
        not flash_supports(query, value)
        or options.sinks is not None
        or layout.image_ids_for(options.window) is not None
        or (options.softcap is not None and flash_attn_varlen_func() is None)
    )
    if flash_cannot:
        return _block_attention(query, key, value, layout, options)
    if layout.key_indices is not None:
        key, value = key.index_select(0, layout.key_indices), value.index_select(0, layout.key_indices)
    seqlens = (layout.cu_seqlens_q, layout.cu_seqlens_k, max(layout.lengths), max(layout.key_lengths))
    window_size = (-1 if options.window is None else options.window - 1, 0)
    return flash_varlen_attention(
        query, key, value, seqlens, window_size, options.scale, options.dropout, options.softcap
    )


def _block_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, options: AttentionOptions
) -> Tensor:
    """`varlen_attention` by one call of `_attend` for each block of similar segments."""
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    for block in layout.blocks:
        q = query.index_select(0, block.query_indices.flatten()).unflatten(0, block.query_indices.shape)
        k, v = (x.index_select(0, block.key_indices.flatten()) for x in (key, value))
        k, v = (x.unflatten(0, block.key_indices.shape).transpose(1, 2) for x in (k, v))
        mask = block.attention_mask(options.window, layout.image_ids_for(options.window), layout.images_in_windows)
        piece = _attend(q.transpose(1, 2), k, v, mask, options)
        piece = piece.transpose(1, 2).flatten(0, 1).index_select(0, block.valid_queries)
        out = out.index_copy(0, block.query_indices.flatten().index_select(0, block.valid_queries), piece)
    return out


def math_kernel_for_groups(k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether SDPA would compute all scores at once if several heads of queries share these heads of keys.

    Of its kernels for CUDA, only that one then takes float32, a mask, heads above 256, or heads of two sizes.
    """
    flash = k.dtype in (torch.bfloat16, torch.float16) and mask is None and k.shape[-1] == v.shape[-1] <= 256
    return k.is_cuda and not flash


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: AttentionOptions) -> Tensor:
    """SDPA on [S, H, Q, D], or plain matrix products for soft caps and sinks; causal if there is no mask.

    A window or chunk is part of the mask.
    """
    scale, softcap, sinks = options.scale, options.softcap, options.sinks
    if softcap is None and sinks is None:
        if q.shape[1] != k.shape[1] and math_kernel_for_groups(k, v, mask):
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        is_causal, enable_gqa = mask is None and q.shape[2] > 1, q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, mask, options.dropout, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    # the lowest number instead of -inf: a padding query may have no key, and its softmax would be nan
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores)[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)[..., : k.shape[2]]
    return F.dropout(weights, options.dropout) @ v


@torch.compiler.disable(reason="the layout differs in every micro-batch")
def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packed_layout: PackedLayout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: query [B, H, N, D] -> [B, N, H, D]; B = 1 for a packed row."""
    window = attention_window(module) if sliding_window is None else sliding_window
    options = AttentionOptions(scaling, window, attention_chunk_size(module), dropout, softcap, sinks=s_aux)
    if packed_layout is None:
        return _padded_attention(module, query, key, value, attention_mask, options, **kwargs), None
    _check_packable(module, query, key, attention_mask, kwargs)
    packed_layout.attention_calls += 1
    query = temperature_by_position(module, query, packed_layout)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    attend = varlen_attention if packed_layout.ulysses is None else _ulysses_attention
    return attend(q, k, v, packed_layout, options)[None], None


def _padded_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: AttentionOptions,
    **kwargs: Any,
) -> Tensor:
    """`packed_attention` of rows without a layout: by transformers' function, where there is no soft cap or sink."""
    if mask is None and query.shape[2] == key.shape[2]:
        mask = _window_or_chunk_mask(query.shape[2], options, query.device)
    if options.softcap is None and options.sinks is None:
        return sdpa_attention_forward(module, query, key, value, mask, options.dropout, options.scale, **kwargs)[0]
    mask = None if mask is None else mask[..., : key.shape[2]]
    return _attend(query, key, value, mask, options).transpose(1, 2).contiguous()


def _window_or_chunk_mask(tokens: int, options: AttentionOptions, device: torch.device) -> Tensor | None:
    """[T, T] causal mask within windows or chunks; None if one window or chunk has all tokens, or there is none."""
    query = torch.arange(tokens, device=device)[:, None]
    key = query.T
    if options.window is not None and tokens > options.window:
        return (query >= key) & (query - key < options.window)
    if options.chunk is not None and tokens > options.chunk:
        return (query >= key) & (query // options.chunk == key // options.chunk)
    return None


def temperature_by_position(module: Any, query: Tensor, layout: PackedLayout) -> Tensor:
    """Queries [1, H, n, D] of a packed row with Llama 4's temperature for their positions in their sequences.

    In layers without RoPE, transformers multiplies the query at index i of a row by
    t(i) = 1 + attn_scale * log(1 + floor((i + 1) / floor_scale)). In a packed row, i is not the position p in the
    sequence, so this multiplies by t(p) / t(i).
    """
    if not has_attention_temperature(module):
        return query
    count, rank = query.shape[2], 0 if layout.ulysses is None else layout.ulysses.rank
    index = torch.arange(count, device=query.device)
    position = layout.positions[rank * count : (rank + 1) * count]
    index_scale, position_scale = (
        torch.log1p(torch.floor((at.float() + 1) / module.floor_scale)) * module.attn_scale + 1
        for at in (index, position)
    )
    return (query * (position_scale / index_scale)[:, None]).to(query.dtype)


def _check_packable(
    module: torch.nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None, kwargs: dict[str, Any]
) -> None:
    """Refuse an attention call that is more than causal self-attention: `varlen_attention` would compute it wrongly."""
    is_causal = kwargs.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    unsupported = {
        "a mask of its own": attention_mask is not None,
        "cross-attention": key.shape[2] != query.shape[2],
        "no causal mask": not is_causal,
        **{name: kwargs.get(name) is not None for name in ("position_bias", "indices", "block_indices")},
    }
    if any(unsupported.values()):
        found = ", ".join(name for name, is_there in unsupported.items() if is_there)
        raise ValueError(cannot_pack(type(module).__name__, f"its attention has {found}"))


def _ulysses_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, options: AttentionOptions
) -> Tensor:
    """`varlen_attention` of a row that a Ulysses group shares: [n, H, D] of this rank's tokens, in and out."""
    ulysses, heads, tokens = layout.ulysses, query.shape[1], sum(layout.lengths)
    assert ulysses is not None
    size = ulysses.size
    if heads % size or len(query) * size != tokens:
        raise ValueError(
            f"ulysses_sequence_parallel_size={size}: expected 1/{size} of the tokens and a number of heads that {size} "
            f"divides in attention, got {len(query)} of {tokens} tokens and {heads} heads"
        )
    key, value = (x.repeat_interleave(size // gcd(size, x.shape[1]), 1) for x in (key, value))
    query, key, value = (gather_tokens_scatter_heads(x, ulysses) for x in (query, key, value))
    if options.sinks is not None:
        options = options._replace(sinks=options.sinks.chunk(size)[ulysses.rank])
    out = varlen_attention(query, key, value, layout, options)
    return gather_heads_scatter_tokens(out, ulysses)


def _packed_attention_mask(
    *, attention_mask: Tensor | None = None, mask_function: Callable[..., Any], use_vmap: bool = False, **kwargs: Any
) -> Tensor | None:
    """The mask function that transformers calls: None for packed rows, which have no `attention_mask`.

    A mask for them would be [N, N]. A rule that transformers adds to causal attention within a window is not lost: it
    gets a mask, which `packed_attention` refuses.
    """
    if attention_mask is None and not use_vmap and "or_masks" not in getattr(mask_function, "__qualname__", ""):
        return None
    return sdpa_mask(attention_mask=attention_mask, mask_function=mask_function, use_vmap=use_vmap, **kwargs)


def use_packed_attention(model: PreTrainedModel, *, packed: bool = False, longest_sequence: int | None = None) -> None:
    """Route the text model's attention through `varlen_attention`; a vision tower keeps its own attention.

    The model's forward then raises a ValueError before it starts if it would compute packed rows wrongly.

    Args:
        model: from transformers.
        packed: raise now if the rows of this family cannot be packed.
        longest_sequence: of the run; decides which LongRoPE factors the model uses.
    """
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, _packed_attention_mask)
    fix_rope_factors(model, longest_sequence)
    facts = model_facts(model, longest_sequence)
    family = model.config.model_type
    if facts.obstacle is None and not _set_attention(model):
        facts = facts._replace(obstacle=NO_ATTENTION_INTERFACE)
    if packed and facts.obstacle:
        raise ValueError(cannot_pack(family, facts.obstacle))
    if packed and facts.not_causal:
        raise ValueError(f"model: expected causal attention, got {family}: {facts.not_causal}")
    use_separate_sequences(model)
    model.register_forward_pre_hook(partial(before_forward, facts=facts), with_kwargs=True)
    model.register_forward_hook(after_forward, with_kwargs=True)


def _set_attention(model: PreTrainedModel) -> bool:
    """Select `packed_attention` for the text model; whether transformers did so (it only warns if it cannot).

    Attention with an indexer computes one sequence per row, by SDPA.
    """
    text, name = model.config.get_text_config(), "sdpa" if indexed_attention_layers(model) else NAME
    nested = [name for name in getattr(model.config, "sub_configs", {}) if getattr(model.config, name, None) is text]
    model.set_attn_implementation({nested[0]: name} if nested else name)
    return text._attn_implementation == name
