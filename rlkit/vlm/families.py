"""What a model family's attention wants beyond "each token sees those before it", read from its config and class."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

BIDIRECTIONAL_IMAGE_FAMILIES = frozenset({"gemma3"})  # the tokens of one image see each other, whatever their order
# an image is one row of numbers a patch, and its grid
PATCH_ROW_FAMILIES = frozenset(
    {
        "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe", "glm46v",
        "glm_ocr", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker",
    }
)  # fmt: skip
IMAGE_DIMENSION_FAMILIES = frozenset({"smolvlm", "idefics3"})  # a sample's images have a dimension of their own
CHECKPOINT_NAME_FAMILIES = frozenset({"llava", "gemma3", "mixtral"})  # vLLM knows no other names of their weights
TRANSPOSED_EXPERTS = frozenset({"qwen3_vl_moe"})  # [experts, in, out] in published files, and so in vLLM
PACKABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})
NO_ATTENTION_INTERFACE = "its attention does not go through transformers' AttentionInterface"
LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier")


def packing_obstacle(model: Any) -> str | None:
    """Why sequences laid end to end would give wrong numbers in this model; None if they do not."""
    text, decoder = model.config.get_text_config(), model.get_decoder()
    layers = set(getattr(text, "layer_types", None) or ())
    if has_recurrent_state(model) or layers & {"linear_attention", "conv", "hybrid", "hybrid_sliding"}:
        return "the state of its linear-attention, state-space or convolution layers runs on into the next sequence"
    if layers - PACKABLE_LAYERS:
        return f"its layers of {', '.join(sorted(layers - PACKABLE_LAYERS))} are not known to packed attention"
    if not getattr(decoder, "_supports_attention_backend", False):
        return NO_ATTENTION_INTERFACE
    return None


def has_recurrent_state(model: Any) -> bool:
    return any(getattr(part, "_is_stateful", False) for part in (model, model.get_decoder()))


def bidirectional_obstacle(model: Any) -> str | None:
    """Why causal attention alone, packed or padded, is not this model's; None if it is.

    A model that tells images (or a prefix) from text by `token_type_ids` lets some tokens see later ones.
    """
    prefixed = hasattr(model.config, "vision_config") and "token_type_ids" in signature(model.forward).parameters
    if prefixed and model.config.model_type not in BIDIRECTIONAL_IMAGE_FAMILIES:
        return "its image and prefix tokens see later ones, by token_type_ids that the engine does not make"
    if getattr(model.config.get_text_config(), "use_bidirectional_attention", None):
        return "its config sets use_bidirectional_attention: some of its tokens see later ones"
    return None


def length_dependent_rope(config: Any) -> tuple[str, int] | None:
    """RoPE that changes with the longest sequence of a forward: its kind, and the length up to which it does not."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    for one in (rope, *rope.values()):
        if isinstance(one, dict) and one.get("rope_type") == "dynamic":
            return "dynamic", text.max_position_embeddings
        if isinstance(one, dict) and one.get("rope_type") == "longrope":
            return "longrope", one["original_max_position_embeddings"]
    return None


def check_rope_lengths(model_type: str, kind: str, most: int, lengths: Sequence[int]) -> None:
    """Refuse sequences that would change each other's RoPE: their numbers would depend on who is in the batch.

    Beyond `most` tokens longrope has other frequencies than up to it, so that both kinds cannot share a forward;
    dynamic has others for each length, and keeps those of the longest sequence so far.
    """
    longest = max(lengths, default=0)
    if longest > most and (kind == "dynamic" or min(lengths) <= most):
        advice = "" if kind == "dynamic" else ", or the longer ones by themselves (micro_batch_tokens=1)"
        raise ValueError(
            f"{model_type}: sequences of {min(lengths)} to {longest} tokens in one forward: its RoPE ({kind}) changes "
            f"with the longest of them beyond {most} tokens; at most as many expected{advice}"
        )


def head_obstacle(config: Any) -> str | None:
    """Why logits are not the output layer's alone, so that they cannot be had from hidden states; None if they are."""
    text = config.get_text_config()
    changed = [name for name in LOGIT_TRANSFORMS if getattr(text, name, None) not in (None, 1.0)]
    return f"its logits are changed after the output layer ({', '.join(changed)})" if changed else None


def tokens_per_image(config: Any) -> int:
    """How many tokens stand for an image, in families whose images are all of one size; 0 for others."""
    vision = config.vision_config
    if config.model_type == "internvl" or config.model_type == "llava" and vision.model_type != "pixtral":
        return config.image_seq_length
    if config.model_type == "gemma3":
        return config.mm_tokens_per_image
    if config.model_type in IMAGE_DIMENSION_FAMILIES:
        return (vision.image_size // vision.patch_size // config.scale_factor) ** 2
    return 0


def image_groups(tokens: Tensor, image_token: int, starts: Tensor | None = None) -> Tensor:
    """[..., N] number of the image that each token is of, -1 for text; images end at `starts` of segments too."""
    image = tokens == image_token
    first = image.clone()
    first[..., 1:] &= ~image[..., :-1]
    if starts is not None:
        first[..., starts] = image[..., starts]
    return torch.where(image, first.long().cumsum(-1) - 1, -1)
