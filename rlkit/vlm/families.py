"""What a model family's attention wants beyond "each token sees those before it", read from its config and class."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor

IMAGES_SEE_THEMSELVES = frozenset({"gemma3"})  # the tokens of one image see each other, whatever their order
PACKABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})
NO_INTERFACE = "its attention does not go through transformers' AttentionInterface"
AFTER_THE_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier")


def packing_obstacle(model: Any) -> str | None:
    """Why sequences laid end to end would give wrong numbers in this model; None if they do not."""
    text, decoder = model.config.get_text_config(), model.get_decoder()
    layers = set(getattr(text, "layer_types", None) or ())
    if stateful(model) or layers & {"linear_attention", "conv", "hybrid", "hybrid_sliding"}:
        return "the state of its linear-attention, state-space or convolution layers runs on into the next sequence"
    if layers - PACKABLE_LAYERS:
        return f"its layers of {', '.join(sorted(layers - PACKABLE_LAYERS))} are not known to packed attention"
    if not getattr(decoder, "_supports_attention_backend", False):
        return NO_INTERFACE
    return None


def stateful(model: Any) -> bool:
    return any(getattr(part, "_is_stateful", False) for part in (model, model.get_decoder()))


def bidirectional(model: Any) -> str | None:
    """Why causal attention alone, packed or padded, is not this model's; None if it is.

    A model that tells images (or a prefix) from text by `token_type_ids` lets some tokens see later ones.
    """
    prefixed = hasattr(model.config, "vision_config") and "token_type_ids" in signature(model.forward).parameters
    if prefixed and model.config.model_type not in IMAGES_SEE_THEMSELVES:
        return "its image and prefix tokens see later ones, by token_type_ids that the engine does not make"
    if getattr(model.config.get_text_config(), "use_bidirectional_attention", None):
        return "its config sets use_bidirectional_attention: some of its tokens see later ones"
    return None


def head_obstacle(config: Any) -> str | None:
    """Why logits are not the output layer's alone, so that they cannot be had from hidden states; None if they are."""
    text = config.get_text_config()
    changed = [name for name in AFTER_THE_HEAD if getattr(text, name, None) not in (None, 1.0)]
    return f"its logits are changed after the output layer ({', '.join(changed)})" if changed else None


def image_groups(tokens: Tensor, image_token: int, starts: Tensor | None = None) -> Tensor:
    """[..., N] number of the image that each token is of, -1 for text; images end at `starts` of segments too."""
    image = tokens == image_token
    first = image.clone()
    first[..., 1:] &= ~image[..., :-1]
    if starts is not None:
        first[..., starts] = image[..., starts]
    return torch.where(image, first.long().cumsum(-1) - 1, -1)
