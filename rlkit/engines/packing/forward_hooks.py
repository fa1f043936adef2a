"""Hooks around a model's forward: what rlkit's attention would compute wrongly is refused, images are marked."""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkit.engines.packing.layout import PackedLayout
from rlkit.vlm.families import (
    BLOCK_FAMILIES,
    VISION_EXPERT_FAMILIES,
    attention_layer_count,
    attention_temperature_length,
    bidirectional_obstacle,
    check_rope_lengths,
    has_bidirectional_images,
    has_bidirectional_images_in_windows,
    image_groups,
    indexed_attention_layers,
    layer_types,
    layers_by_sequence,
    length_dependent_rope,
    packing_obstacle,
)
from rlkit.vlm.long_rope import has_long_factors
from rlkit.vlm.processors import placeholder_ids


class ModelFacts(NamedTuple):
    """What `before_forward` has to know of a model.

    Attributes:
        config: of the model.
        obstacle: why its rows cannot be packed; None if they can.
        not_causal: why causal attention would be wrong for it; None if it is right.
        rope: as `rlkit.vlm.families.length_dependent_rope`; None for LongRoPE with long factors.
        temperature_length: as `rlkit.vlm.families.attention_temperature_length`.
        bidirectional_images: tokens of an image attend to later ones of that image in some layers.
        images_in_windows: they do so in layers with a sliding window only, and within that window.
        indexed_attention: it has layers of attention with an indexer.
    """

    config: Any
    obstacle: str | None
    not_causal: str | None
    rope: tuple[str, int] | None
    temperature_length: int | None
    bidirectional_images: bool
    images_in_windows: bool
    indexed_attention: bool


def model_facts(model: Any, longest_sequence: int | None = None) -> ModelFacts:
    config = model.config
    return ModelFacts(
        config=config,
        obstacle=packing_obstacle(model),
        not_causal=bidirectional_obstacle(model),
        rope=None if has_long_factors(config, longest_sequence) else length_dependent_rope(config),
        temperature_length=attention_temperature_length(config),
        bidirectional_images=has_bidirectional_images(config),
        images_in_windows=has_bidirectional_images_in_windows(config),
        indexed_attention=bool(indexed_attention_layers(model)),
    )


def before_forward(module: Any, args: Any, kwargs: dict[str, Any], *, facts: ModelFacts) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook: refuse what would be computed wrongly, and mark the tokens of images where a model asks."""
    layout: PackedLayout | None = kwargs.get("packed_layout")
    _check_supported(kwargs, facts)
    _check_rope(kwargs, facts)
    _check_temperature(kwargs, facts)
    _check_blocks(kwargs, facts)
    if facts.config.model_type in VISION_EXPERT_FAMILIES and kwargs.get("moe_mm_token_type_ids") is None:
        kwargs["moe_mm_token_type_ids"] = _vision_expert_tokens(kwargs["input_ids"], facts.config)
    if facts.indexed_attention and layout is not None:
        kwargs["attention_mask"] = dict.fromkeys(layer_types(facts.config))  # else transformers makes one of [N, N]
    if facts.bidirectional_images and layout is not None:
        _mark_packed_images(kwargs, layout, facts)
    elif facts.bidirectional_images and _has_images(kwargs):
        _mark_padded_images(module, kwargs, facts)
    return args, kwargs


def cannot_pack(family: str, why: str) -> str:
    """The message for a family whose rows cannot be packed."""
    return f"use_remove_padding: expected False for {family}, whose rows cannot be packed, got True: {why}"


def _has_images(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("pixel_values") is not None


def _padding_mask(kwargs: dict[str, Any]) -> Tensor | None:
    """The [B, T] mask of padding; None if there is none, or a mask of another kind."""
    mask = kwargs.get("attention_mask")
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


def _needs_token_types(kwargs: dict[str, Any]) -> bool:
    """Whether these are padded rows without token types, from which transformers would know what is an image."""
    return _padding_mask(kwargs) is not None and kwargs.get("token_type_ids") is None


def _check_supported(kwargs: dict[str, Any], facts: ModelFacts) -> None:
    """Refuse a model whose rows cannot be packed, or whose attention is not causal."""
    family, is_packed = facts.config.model_type, kwargs.get("packed_layout") is not None
    if facts.obstacle and is_packed:
        raise ValueError(cannot_pack(family, facts.obstacle))
    if facts.not_causal and (is_packed or (_has_images(kwargs) and _needs_token_types(kwargs))):
        raise ValueError(f"model: expected causal attention, got {family}: {facts.not_causal}")


def _check_rope(kwargs: dict[str, Any], facts: ModelFacts) -> None:
    """Refuse sequences that are too long for the model's RoPE frequencies."""
    if facts.rope is None:
        return
    (kind, most), layout, mask = facts.rope, kwargs.get("packed_layout"), _padding_mask(kwargs)
    if layout is not None:
        check_rope_lengths(facts.config.model_type, kind, most, layout.sequence_lengths)
    elif mask is not None and mask.shape[1] > most:
        check_rope_lengths(facts.config.model_type, kind, most, mask.sum(1).tolist())


def _check_temperature(kwargs: dict[str, Any], facts: ModelFacts) -> None:
    """Refuse left padding where it would change the attention temperature."""
    length, mask = facts.temperature_length, _padding_mask(kwargs)
    if length is not None and mask is not None and mask.shape[1] >= length and not mask[:, 0].all():
        raise ValueError(
            f"attention_mask: expected less than {length} columns for {facts.config.model_type} in rows padded on the "
            f"left, because its attention temperature counts padding, got {mask.shape[1]}; use rollout 'vllm' for "
            "longer sequences"
        )


def _check_blocks(kwargs: dict[str, Any], facts: ModelFacts) -> None:
    """Refuse left padding where blocks of tokens are counted from the first column."""
    family, mask = facts.config.get_text_config().model_type, _padding_mask(kwargs)
    if family in BLOCK_FAMILIES and mask is not None and not mask[:, 0].all():
        raise ValueError(
            f"attention_mask: expected no padding on the left for {family}, whose blocks of tokens would count "
            "it; use rollout 'vllm' (on a GPU)"
        )


def _vision_expert_tokens(tokens: Tensor, config: Any) -> Tensor:
    """[B, T]: 1 for tokens that go to the experts of images and videos, else 0."""
    return reduce(torch.logical_or, (tokens == token for token in placeholder_ids(config))).int()


def _mark_packed_images(kwargs: dict[str, Any], layout: PackedLayout, facts: ModelFacts) -> None:
    """Say in the layout which tokens belong to which image."""
    if facts.images_in_windows:
        layout.images_in_windows = True
        kwargs["attention_mask"] = dict.fromkeys(layer_types(facts.config))  # else transformers makes masks itself
    if _has_images(kwargs):
        tokens = kwargs["input_ids"][0]
        starts = [start for start, length in zip(layout.starts, layout.lengths, strict=True) if length]
        starts_on_device = torch.tensor(starts).to(tokens.device, non_blocking=True)
        layout.image_ids = image_groups(tokens, facts.config.image_token_id, starts_on_device)


def _mark_padded_images(module: Any, kwargs: dict[str, Any], facts: ModelFacts) -> None:
    """Pass what transformers makes the masks of images from, or these masks."""
    if facts.images_in_windows:
        kwargs["attention_mask"] = _masks_with_images(module, kwargs, facts.config)
    elif _needs_token_types(kwargs):
        kwargs["token_type_ids"] = (kwargs["input_ids"] == facts.config.image_token_id).long()


def _masks_with_images(module: Any, kwargs: dict[str, Any], config: Any) -> Any:
    """The masks of a Gemma 4 forward, by kind of layer: those with which transformers generates.

    The forward of Gemma 4 Unified in transformers 5.19 makes others, in which images are bidirectional in all layers.
    """
    tokens = kwargs["input_ids"]
    embeddings = module.get_input_embeddings().weight
    return module.create_masks_for_generate(
        config,
        embeddings.new_empty(*tokens.shape, 1),
        kwargs.get("attention_mask"),
        kwargs.get("past_key_values"),
        kwargs.get("position_ids"),
        mm_token_type_ids=(tokens == config.image_token_id).long(),
    )


def after_forward(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook: raise if a layer computed its attention in another way, which knows nothing of segments."""
    layout = kwargs.get("packed_layout")
    if layout is None:
        return
    attention, by_sequence = attention_layer_count(module.config), len(layers_by_sequence(module))
    if layout.attention_calls < attention:
        why = f"only {layout.attention_calls} of its {attention} layers call packed attention"
        raise ValueError(cannot_pack(module.config.model_type, why))
    if layout.calls_by_sequence < by_sequence:
        why = f"only {layout.calls_by_sequence} of its {by_sequence} recurrent or sparse layers keep sequences apart"
        raise ValueError(cannot_pack(module.config.model_type, why))
