"""Packed (variable-length) causal attention, plugged into transformers through its public `AttentionInterface`.

A packed row holds several segments end to end. The engine passes their `packed_layout` to the model's forward;
transformers hands unknown keyword arguments down to the attention function, which is this module's. Without it
(generation, padded batches) transformers' own SDPA function runs, so one model object serves both. What a family has
beyond that (soft-capped scores, sinks, images that see themselves) is done here for both; what cannot be is refused.

The name under which it is registered must not contain "flash": transformers would look for a kernel of that name.
A vision tower, whose images lie end to end as well, is given one kernel for all of them on a GPU: `use_packed_tower`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from itertools import accumulate
from math import gcd
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlkit.data.packing import concatenated_ranges
from rlkit.engines.packing.ulysses import Ulysses, to_heads, to_tokens
from rlkit.vlm.families import (
    IMAGES_SEE_THEMSELVES,
    IN_PATCHES,
    NO_INTERFACE,
    bidirectional,
    changing_rope,
    check_rope,
    image_groups,
    packing_obstacle,
)

NAME = "rlkit_packed"
TOWER = "rlkit_flash_tower"


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
        self.images: Tensor | None = None  # [N] number of each token's image, -1 for text, where images see themselves
        self.ulysses: Ulysses | None = None  # the ranks that share the row, if it is shared
        self.asked = 0  # how many layers' attention came here
        self.key_lengths = [before + own for (_, before), own in zip(prefixes, lengths, strict=True)]

    @property
    def sequence_lengths(self) -> list[int]:
        """Of whole sequences; a prompt that answers attend to is a part of theirs."""
        prompts = {start for start, length in self.prefixes if length}
        return [n for start, n in zip(self.starts, self.key_lengths, strict=True) if n and start not in prompts]

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
        return concatenated_ranges(starts, lengths).to(self.device)

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
        there = s < before + own
        block = Block(
            queries=torch.where(real, start + t, 0),
            keys=torch.where(there, keys, 0),
            distance=before[:, :, None] + t[:, None] - s if before.any() else t[:, None] - s,
            real=real.flatten().nonzero()[:, 0],
            there=there,
        )
        return Block(*(x.to(self.device) for x in block))


class Block(NamedTuple):
    """Some segments as a rectangle: places of their queries [S, Q] and keys [S, K] in the row, padded to the right with
    place 0; how far each key lies behind each query ([S, Q, K] or [Q, K]); which of the S * Q queries are real, by
    number; and which keys are [S, K]."""

    queries: Tensor
    keys: Tensor
    distance: Tensor
    real: Tensor
    there: Tensor

    def seen(self, window: int | None, images: Tensor | None) -> Tensor | None:
        """[S, 1, Q, K] or [Q, K]: which keys each query sees; None: causal alone will do."""
        if self.distance.ndim == 2 and window is None and images is None:
            return None
        seen = self.distance >= 0 if window is None else (self.distance >= 0) & (self.distance < window)
        if images is not None:
            of_query, of_key = images[self.queries][:, :, None], images[self.keys][:, None]
            seen = seen | (of_query == of_key) & (of_query >= 0) & self.there[:, None]
        return seen[:, None] if seen.ndim == 3 else seen


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    *,
    scale: float | None = None,
    window: int | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention within each segment of a packed row, and to its prefix.

    Args:
        query: [N, Hq, D].
        key, value: [N, Hkv, D], Hq a multiple of Hkv; values may have a smaller D.
        layout: of the N tokens.
        scale: of the scores; 1/sqrt(D) by default.
        window: attend to this many tokens back, oneself included; all by default.
        dropout: probability; on a GPU without flash-attn it must be 0.
        softcap: bound of the scores, by tanh; without flash-attn in a slower way.
        sinks: [Hq] score of a key without a value, which takes its share of the attention; likewise.

    Returns:
        [N, Hq, D], D of the values.
    """
    by_hand = sinks is not None or layout.images is not None or (softcap is not None and _flash_attn() is None)
    if by_hand or not _has_kernel(query, value):
        return _varlen_sdpa(query, key, value, layout, scale, window, dropout, softcap, sinks)
    if layout.keys is not None:
        key, value = key.index_select(0, layout.keys), value.index_select(0, layout.keys)
    bounds = (layout.cu_queries, layout.cu_keys, max(layout.lengths), max(layout.key_lengths))
    reach = (-1 if window is None else window - 1, 0)  # causal, aligned at the last query and key
    return _flash(query, key, value, bounds, reach, scale, dropout, softcap)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, bounds: tuple[Tensor, Tensor, int, int], reach: tuple[int, int],
    scale: float | None, dropout: float, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """flash-attn's kernel, or torch's, on segments between `bounds` (of queries, of keys; the longest of each), which
    see so far back and forth; -1: all."""
    size = value.shape[-1]
    if size < query.shape[-1]:  # as DeepSeek's; kernels want one size
        value = F.pad(value, (0, query.shape[-1] - size))
    if (flash := _flash_attn()) is not None:
        more = {} if softcap is None else {"softcap": softcap}
        return flash(
            query, key, value, *bounds, dropout_p=dropout, softmax_scale=scale, causal=reach[1] == 0, window_size=reach,
            **more,
        ).narrow(-1, 0, size)  # fmt: skip
    if dropout:
        raise ValueError(f"attention dropout {dropout} on packed rows needs flash-attn on a GPU; set it to 0")
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scale, "window_size": reach}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    else:  # torch 2.11
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out: Any = varlen_attn(query, key, value, *bounds, **options)
    return out.narrow(-1, 0, size)


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether flash kernels take them: on a GPU, in half precision, heads of up to 256 numbers in eights."""
    size, half = query.shape[-1], query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and half and value.shape[-1] <= size <= 256 and size % 8 == 0


def _varlen_sdpa(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float | None, window: int | None, dropout: float,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """One SDPA call for each block of like segments; without prefixes and window a block needs no mask, as padding lies
    to the right of what is causal."""
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    for block in layout.blocks:
        q = query.index_select(0, block.queries.flatten()).unflatten(0, block.queries.shape).transpose(1, 2)
        k, v = (x.index_select(0, block.keys.flatten()).unflatten(0, block.keys.shape) for x in (key, value))
        seen = block.seen(window, layout.images)
        piece = _attend(q, k.transpose(1, 2), v.transpose(1, 2), seen, scale, dropout, softcap, sinks)
        piece = piece.transpose(1, 2).flatten(0, 1).index_select(0, block.real)
        out = out.index_copy(0, block.queries.flatten().index_select(0, block.real), piece)
    return out


def _attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float | None, dropout: float,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """SDPA on [S, H, Q, D], and by hand what it does not have; causal where `seen` is None."""
    grouped = q.shape[1] != k.shape[1]
    if softcap is None and sinks is None:
        causal = seen is None and q.shape[2] > 1
        return F.scaled_dot_product_attention(q, k, v, seen, dropout, causal, scale=scale, enable_gqa=grouped)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if seen is None:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)  # not -inf: padding may see nothing at all
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores)[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)[..., : k.shape[2]]
    return F.dropout(weights, dropout) @ v


@cache
def _flash_attn() -> Any:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


@torch.compiler.disable(reason="its work is laid out anew for every micro-batch")
def _attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, packed_layout: Layout | None = None,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls: query [B, H, N, D] -> [B, N, H, D], B = 1 for packed rows."""
    if packed_layout is not None:
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        beyond = {
            "a mask of its own": attention_mask is not None,
            "keys of something else": key.shape[2] != query.shape[2],
            "no causal order": not causal,
            **{name: kwargs.get(name) is not None for name in ("position_bias", "indices", "block_indices")},
        }
        if any(beyond.values()):
            what = ", ".join(name for name, there in beyond.items() if there)
            raise ValueError(_refusal(type(module).__name__, f"its attention has {what}"))
        packed_layout.asked += 1
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        options: dict[str, Any] = {"window": sliding_window, "dropout": dropout, "softcap": softcap, "sinks": s_aux}
        attend = varlen_attention if packed_layout.ulysses is None else _shared_attention
        return attend(q, k, v, packed_layout, scale=scaling, **options)[None], None
    if attention_mask is None and sliding_window is not None and query.shape[2] == key.shape[2] > sliding_window:
        t = torch.arange(query.shape[2], device=query.device)
        attention_mask = (t[:, None] >= t) & (t[:, None] - t < sliding_window)
    if softcap is None and s_aux is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    seen = None if attention_mask is None else attention_mask[..., : key.shape[2]]
    return _attend(query, key, value, seen, scaling, dropout, softcap, s_aux).transpose(1, 2).contiguous(), None


def _shared_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, *, sinks: Tensor | None, **options: Any
) -> Tensor:
    """`varlen_attention` of a row that the ranks of a group share: [n, H, D] of this rank's tokens, and so back."""
    ulysses, heads = layout.ulysses, query.shape[1]
    assert ulysses is not None
    size = ulysses.size
    if heads % size or len(query) * size != sum(layout.lengths):
        came = f"{len(query)} of {sum(layout.lengths)} tokens and {heads} heads"
        raise ValueError(f"ulysses_sequence_parallel_size={size}: a part of each expected in attention, came {came}")
    key, value = (x.repeat_interleave(size // gcd(size, x.shape[1]), 1) for x in (key, value))
    query, key, value = (to_heads(x, ulysses) for x in (query, key, value))
    sinks = None if sinks is None else sinks.chunk(size)[ulysses.rank]
    return to_tokens(varlen_attention(query, key, value, layout, sinks=sinks, **options), ulysses)


def _mask(
    *, attention_mask: Tensor | None = None, mask_function: Callable[..., Any], use_vmap: bool = False, **kwargs: Any
) -> Tensor | None:
    """No mask for packed rows, which come without an `attention_mask`: it would be of [N, N]. A rule beyond causal
    attention within a window, which transformers joins to it, is not lost: `_attention` refuses the mask."""
    if attention_mask is None and not use_vmap and "or_masks" not in getattr(mask_function, "__qualname__", ""):
        return None
    return sdpa_mask(attention_mask=attention_mask, mask_function=mask_function, use_vmap=use_vmap, **kwargs)


def _refusal(family: str, why: str) -> str:
    return f"{family}: rows cannot be packed: {why}; use use_remove_padding=False"


def use_packed_attention(model: PreTrainedModel, *, packed: bool = False) -> None:
    """Route the text model's attention through `varlen_attention`; a vision tower keeps its own.

    Args:
        model: its forward refuses, by a ValueError before it starts, what this family's attention would get wrong.
        packed: refuse at once a family whose rows cannot be packed.
    """
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    family, text = model.config.model_type, model.config.get_text_config()
    obstacle, both, rope = packing_obstacle(model), bidirectional(model), changing_rope(model.config)
    if obstacle is None:
        subs = getattr(model.config, "sub_configs", {})
        nested = [name for name in subs if getattr(model.config, name, None) is text]
        model.set_attn_implementation({nested[0]: NAME} if nested else NAME)
        if text._attn_implementation != NAME:  # transformers warns and goes on
            obstacle = NO_INTERFACE
    if packed and (obstacle or both):
        raise ValueError(_refusal(family, obstacle) if obstacle else f"{family}: cannot be trained: {both}")

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        layout, mask = kwargs.get("packed_layout"), kwargs.get("attention_mask")
        padded = isinstance(mask, Tensor) and mask.ndim == 2 and kwargs.get("token_type_ids") is None
        if obstacle and layout is not None:
            raise ValueError(_refusal(family, obstacle))
        sees = kwargs.get("pixel_values") is not None
        if both and (layout is not None or padded and sees):
            raise ValueError(f"{family}: cannot be trained: {both}")
        if rope is not None and layout is not None:
            check_rope(family, *rope, layout.sequence_lengths)
        elif rope is not None and isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] > rope[1]:
            check_rope(family, *rope, mask.sum(1).tolist())
        if sees and family in IMAGES_SEE_THEMSELVES:
            tokens, image = kwargs["input_ids"], model.config.image_token_id
            if layout is not None:
                starts = [start for start, length in zip(layout.starts, layout.lengths, strict=True) if length]
                layout.images = image_groups(tokens[0], image, torch.tensor(starts, device=tokens.device))
            elif padded:
                kwargs["token_type_ids"] = (tokens == image).long()
        return args, kwargs

    def after(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        layout = kwargs.get("packed_layout")
        if layout is not None and layout.asked < text.num_hidden_layers:
            came = f"of its {text.num_hidden_layers} layers {layout.asked} asked for packed attention"
            raise ValueError(_refusal(family, came))

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, with_kwargs=True)


def use_packed_tower(model: torch.nn.Module, config: Any) -> bool:
    """Have a vision tower whose images lie end to end attend to all of them by one call, for a GPU.

    transformers cuts such a row apart otherwise: at each layer it waits for the device, and calls SDPA for every image,
    or every window of one. It does not where the name of the attention has "flash" in it; the config of a new model
    cannot have such a name, so the tower is given a copy of its own.

    Args:
        model: with the tower in it.
        config: of the whole model.

    Returns:
        Whether the family's tower is of this kind.
    """
    if config.model_type not in IN_PATCHES:
        return False
    AttentionInterface.register(TOWER, _tower_attention)
    own = copy.copy(config.vision_config)
    own._attn_implementation = TOWER
    for module in model.modules():
        if isinstance(getattr(module, "config", None), type(own)):
            module.config = own
    return True


def _tower_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, *, cu_seq_lens_q: Tensor, max_length_q: int, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls: [1, H, N, D] of images or windows between boundaries -> [1, N, H, D]."""
    if _has_kernel(query, value) and not dropout:
        bounds = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        return _flash(q, k, v, bounds, (-1, -1), scaling, 0.0).unsqueeze(0), None
    lengths = cu_seq_lens_q.diff().tolist()
    parts = zip(*(x.split(lengths, 2) for x in (query, key, value)), strict=True)
    attended = [F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling) for q, k, v in parts]
    return torch.cat(attended, 2).transpose(1, 2), None
