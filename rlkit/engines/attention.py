"""Packed (variable-length) causal attention, plugged into transformers through its public `AttentionInterface`.

A packed row holds several segments end to end. The engine passes their `packed_layout` to the model's forward;
transformers hands unknown keyword arguments down to the attention function, which is this module's. Without it
(generation, padded batches) transformers' own SDPA function runs, so one model object serves both.

The name under which it is registered must not contain "flash": transformers would look for a kernel of that name.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache, cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlkit.data.packing import runs

NAME = "rlkit_packed"


class Layout:
    """Segments of a packed row, each a run of queries with its keys.

    What attention wants of it is made once and kept: every layer asks. (Not a dataclass: FSDP would take it apart, and
    copy it, at every layer.)

    Args:
        starts, lengths: of each segment's queries in the row, in order and without gaps.
        prefixes: for each segment the (start, length) of the tokens it attends to before its own: (0, 0) for a whole
            sequence, a prompt for one of its several answers.
        device: where attention runs.
    """

    def __init__(
        self,
        starts: Sequence[int],
        lengths: Sequence[int],
        prefixes: Sequence[tuple[int, int]],
        device: torch.device,
    ) -> None:
        self.starts, self.lengths, self.prefixes, self.device = starts, lengths, prefixes, device
        self.key_lengths = [before + own for (_, before), own in zip(prefixes, lengths, strict=True)]

    @cached_property
    def cu_queries(self) -> Tensor:
        """[S+1] int32, the form flash-attn and torch's varlen_attn take."""
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=self.device)

    @cached_property
    def cu_keys(self) -> Tensor:
        return torch.tensor([0, *accumulate(self.key_lengths)], dtype=torch.int32, device=self.device)

    @cached_property
    def keys(self) -> Tensor | None:
        """[K] place of each key in the row, segment after segment; None if they are the row itself."""
        if not any(length for _, length in self.prefixes):
            return None
        own = zip(self.starts, self.lengths, strict=True)
        starts, lengths = zip(*(run for pair in zip(self.prefixes, own, strict=True) for run in pair), strict=True)
        return runs(starts, lengths).to(self.device)

    @cached_property
    def blocks(self) -> list[Block]:
        """Segments of like shape, padded to one rectangle each: what SDPA wants, without much of it wasted."""
        shapes = list(zip(self.key_lengths, self.lengths, strict=True))
        order = sorted((k == q, k, q, i) for i, (k, q) in enumerate(shapes) if q)
        groups: list[list[int]] = []
        kind, wide, high, used = None, 0, 0, 0
        for square, k, q, i in order:
            wide, high, used = max(wide, k), max(high, q), used + k * q
            if square != kind or (len(groups[-1]) + 1) * wide * high > 2 * used:
                groups.append([])
                kind, wide, high, used = square, k, q, k * q
            groups[-1].append(i)
        return [self._block(group) for group in groups]

    def _block(self, segments: list[int]) -> Block:
        own = torch.tensor([self.lengths[i] for i in segments])[:, None]
        before = torch.tensor([self.prefixes[i][1] for i in segments])[:, None]
        start = torch.tensor([self.starts[i] for i in segments])[:, None]
        prefix = torch.tensor([self.prefixes[i][0] for i in segments])[:, None]
        t, s = torch.arange(int(own.max())), torch.arange(int((before + own).max()))
        real = t < own
        keys = torch.where(s < before, prefix + s, start + s - before)
        return Block(
            queries=torch.where(real, start + t, 0),
            keys=torch.where(s < before + own, keys, 0),
            distance=before[:, :, None] + t[:, None] - s if before.any() else t[:, None] - s,
            real=real.flatten().nonzero()[:, 0],
        )


class Block(NamedTuple):
    """Some segments as a rectangle: places of their queries [S, Q] and keys [S, K] in the row, padded to the right with
    place 0; how far each key lies behind each query ([S, Q, K] or [Q, K]); and which of the S * Q queries are real."""

    queries: Tensor
    keys: Tensor
    distance: Tensor
    real: Tensor


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    *,
    scale: float | None = None,
    window: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention within each segment of a packed row, and to its prefix.

    Args:
        query: [N, Hq, D].
        key, value: [N, Hkv, D], Hq a multiple of Hkv.
        layout: of the N tokens.
        scale: of the scores; 1/sqrt(D) by default.
        window: attend to this many tokens back, oneself included; all by default.
        dropout: probability; on a GPU without flash-attn it must be 0.

    Returns:
        [N, Hq, D].
    """
    if not query.is_cuda:
        return _varlen_sdpa(query, key, value, layout, scale, window, dropout)
    if layout.keys is not None:
        key, value = key.index_select(0, layout.keys), value.index_select(0, layout.keys)
    lengths = (layout.cu_queries, layout.cu_keys, max(layout.lengths), max(layout.key_lengths))
    window_size = (-1 if window is None else window - 1, 0)  # causal, aligned at the last query and key
    if (flash := _flash_attn()) is not None:
        return flash(
            query, key, value, *lengths, dropout_p=dropout, softmax_scale=scale, causal=True, window_size=window_size
        )
    if dropout:
        raise ValueError(f"attention dropout {dropout} on packed rows needs flash-attn on a GPU; set it to 0")
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scale, "window_size": window_size}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    else:  # torch 2.11
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out: Any = varlen_attn(query, key, value, *lengths, **options)
    return out


def _varlen_sdpa(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float | None, window: int | None, dropout: float
) -> Tensor:
    """One SDPA call for each block of like segments; without prefixes and window a block needs no mask, as padding lies
    to the right of what is causal."""
    out = torch.zeros_like(query)
    for block in layout.blocks:
        q = query.index_select(0, block.queries.flatten()).unflatten(0, block.queries.shape)
        k, v = (x.index_select(0, block.keys.flatten()).unflatten(0, block.keys.shape) for x in (key, value))
        seen = None
        if block.distance.ndim == 3 or window is not None:
            seen = block.distance >= 0 if window is None else (block.distance >= 0) & (block.distance < window)
            seen = seen[:, None] if seen.ndim == 3 else seen
        piece = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=seen,
            is_causal=seen is None,
            scale=scale,
            dropout_p=dropout,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        piece = piece.transpose(1, 2).flatten(0, 1).index_select(0, block.real)
        out = out.index_copy(0, block.queries.flatten()[block.real], piece)
    return out


@cache
def _flash_attn() -> Any:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


def _attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, packed_layout: Layout | None = None,
    sliding_window: int | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls: query [1, H, N, D] -> [1, N, H, D]."""
    if packed_layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return varlen_attention(q, k, v, packed_layout, scale=scaling, window=sliding_window, dropout=dropout)[None], None


def _mask(*, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """No mask for packed rows, which come without an `attention_mask`: it would be of [N, N]."""
    return None if attention_mask is None else sdpa_mask(attention_mask=attention_mask, **kwargs)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Route the text model's attention through `varlen_attention`; a vision tower keeps its own."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    nested = "text_config" in getattr(model.config, "sub_configs", {})
    model.set_attn_implementation({"text_config": NAME} if nested else NAME)
