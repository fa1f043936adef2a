"""Facts of model families: which of them packing, causal attention and fused log-probabilities support."""

from __future__ import annotations

import math
from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

BIDIRECTIONAL_IMAGE_FAMILIES = frozenset({"gemma3"})  # tokens of an image attend to all of that image
CAUSAL_IMAGE_FAMILIES = frozenset({"gemma3n"})  # their forward takes `token_type_ids` and does not use them
# pixel_values is [patches, ...], one row per patch, and a grid (t, h, w) says which patches make up an image
PATCH_ROW_FAMILIES = frozenset(
    {
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl",
        "qwen3_vl_moe",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen4_exp",
        "cohere_compass",
        "cosmos3_edge",
        "cosmos3_omni",
        "glm4v",
        "glm4v_moe",
        "glm46v",
        "glm_ocr",
        "ernie4_5_vl_moe",
        "qwen2_5_omni_thinker",
        "qwen3_omni_moe_thinker",
    }
)
# why rows with images or videos cannot be given to these, and rows of text neither: its forward needs a video
REFUSED_VISION_FAMILIES = {
    "instructblipvideo": "its vision tower reads the question too, as tokens of another tokenizer",
}
# why rows with images or videos cannot be given to these; rows of text can
TEXT_ROWS_ONLY = {
    "minimax_m3_vl": "in transformers the patches of all images in a forward attend to each other",
    "perception_lm": "its processor does not say how many tiles an image has, and images have different numbers",
    "video_llava": "its images and videos have other names than those of all other families (pixel_values_images)",
}
# tokens of images and videos, and those around them, go to experts of their own, by `moe_mm_token_type_ids`
VISION_EXPERT_FAMILIES = frozenset({"ernie4_5_vl_moe"})
IMAGE_DIMENSION_FAMILIES = frozenset({"smolvlm", "idefics3"})  # pixel_values is [samples, images, ...]
# pixel_values is [images, tiles, ...]: the whole image, and tiles of a copy of the resolution that suits it best
TILED_FAMILIES = frozenset({"llava_next", "llava_next_video", "llava_onevision"})
# vLLM accepts only the names of the files
CHECKPOINT_NAME_FAMILIES = frozenset(
    {
        "axk1",
        "llava",
        "llava_next",
        "llava_next_video",
        "llava_onevision",
        "gemma3",
        "gemma4_unified",
        "mixtral",
        "ernie4_5_moe",
        "ernie4_5_vl_moe",
        "glm5_next",
        "granitemoehybrid",
        "hy_v3",
        "kimi_k25",
        "kimi_linear",
        "lfm2_vl",
        "nemotron_h",
        "olmo_hybrid",
        "paddleocr_vl",
        "phimoe",
    }
)
# family of a thinker -> that of the whole model, whose files and configuration have the thinker as a part
WHOLE_MODELS = {"qwen2_5_omni_thinker": "qwen2_5_omni", "qwen3_omni_moe_thinker": "qwen3_omni_moe"}
# the parameters of these layers are converted to those of checkpoint files together, by the beginning of their names
VISION_LAYERS_TOGETHER = {"kimi_k25": r"model\.vision_tower\.layers\.\d+\."}
# parts of names that transformers 5.19 writes into files -> those that vLLM reads; transformers reads both
PUBLISHED_NAMES = {
    "kimi_k25": {
        "language_model.model.blocks.": "language_model.model.layers.",
        "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
        "model.mm_projector.": "mm_projector.",
    },
    "ernie4_5_vl_moe": {"model.vision_model.": "vision_model."},
    "kimi_linear": {  # of layers without experts, too, transformers writes the name that those with experts have
        f".block_sparse_moe.{part}_proj.": f".mlp.{part}_proj." for part in ("gate", "up", "down")
    },
    "olmo_hybrid": {
        ".attention_layer_norm.": ".input_layernorm.",
        ".feedforward_layer_norm.": ".post_attention_layernorm.",
    },
}
TRANSPOSED_EXPERTS = frozenset({"qwen3_vl_moe"})  # [experts, in, out] in checkpoint files and in vLLM
PACKABLE_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
RECURRENT_LAYERS = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
TOKENWISE_LAYERS = frozenset({"mlp", "moe"})  # layers of their own in Nemotron-H, without attention
# classes of transformers with the gated delta rule, whose last state can be handed on from a prompt to its responses
DELTA_RULE_CLASSES = frozenset(
    {
        "Glm5NextTextLinearAttention",
        "Qwen4ExpTextGatedDeltaNet",
        "Qwen3_5GatedDeltaNet",
        "Qwen3_5MoeGatedDeltaNet",
        "Qwen3NextGatedDeltaNet",
        "OlmoHybridGatedDeltaNet",
        "KimiLinearDeltaAttention",
    }
)
# classes of transformers that carry a state, or the last inputs of a convolution, from token to token
RECURRENT_CLASSES = DELTA_RULE_CLASSES | frozenset(
    {
        "Lfm2ShortConv",
        "Lfm2MoeShortConv",
        "NemotronHMamba2Mixer",
        "FalconH1Mixer",
        "BambaMixer",
        "GraniteMoeHybridMambaLayer",
        "JambaMambaMixer",
        "Zamba2MambaMixer",
        "Qwen4ExpTextPLELayer",
    }
)
# classes of transformers in which an indexer chooses, among all tokens of a row, those that a query attends to
INDEXED_ATTENTION_CLASSES = frozenset(
    {"AXK2Attention", "DeepseekV32Attention", "Glm5NextTextAttention", "GlmMoeDsaAttention", "Qwen4ExpTextAttention"}
)
# classes of transformers that apply a sliding window by the mask only, which packed rows do not have
WINDOW_IN_MASK = frozenset({"PhimoeAttention", "Qwen2MoeAttention"})
# classes of transformers whose layers pass none of the forward's further arguments to their attention
KEEPS_LAYOUT_FROM_ATTENTION = frozenset({"NemotronDecoderLayer"})
# families with attention to blocks of tokens, which transformers counts from the first column of padded rows
COMPRESSED_FAMILIES = frozenset({"deepseek_v4"})
# the same, also of families whose queries choose blocks of tokens
BLOCK_FAMILIES = COMPRESSED_FAMILIES | {"minimax_m3_vl_text"}
TAKES_PADDING_MASK = frozenset({"Glm5NextTextAttention"})  # [B, T]; the others take a causal mask
# modality -> the module that encodes it, in families whose encoders have no configuration of their own
ENCODERS_WITHOUT_CONFIG = {"gemma4_unified": {"vision": "model.embed_vision", "audio": "model.embed_audio"}}
NO_ATTENTION_INTERFACE = "its attention does not go through transformers' AttentionInterface"
SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # of logits
# factors of logits; in configs, and in the modules that apply them
LOGIT_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
LOGIT_TRANSFORMS = (*SOFT_CAPS, *LOGIT_SCALES, "unpadded_vocab_size")


def checkpoint_name(family: str, name: str) -> str:
    """The name that a parameter has in the files of published checkpoints, and for vLLM.

    Args:
        name: in the files that transformers writes.
    """
    for written, published in PUBLISHED_NAMES.get(family, {}).items():
        name = name.replace(written, published)
    return f"thinker.{name}" if family in WHOLE_MODELS else name


def square_experts(config: Any) -> str | None:
    """The expert matrix that is square, in a family whose files hold experts transposed; None for none.

    transformers transposes a matrix that has another shape in the files than in the model, vLLM every one. They would
    read different experts from a file with square ones. No published model has them.
    """
    if config.model_type not in TRANSPOSED_EXPERTS:
        return None
    text = config.get_text_config()
    shapes = {"gate_up_proj": 2 * text.moe_intermediate_size, "down_proj": text.moe_intermediate_size}
    square = next((name for name, rows in shapes.items() if rows == text.hidden_size), None)
    return square and f"{square} of {text.hidden_size} x {text.hidden_size}"


def packing_obstacle(model: Any) -> str | None:
    """Why this model would compute wrong results on packed sequences; None if it would not."""
    decoder, kinds = model.get_decoder(), set(layer_types(model.config))
    is_compressed = model.config.get_text_config().model_type in COMPRESSED_FAMILIES  # whose cache alone has a state
    is_recurrent = has_recurrent_state(model) and not is_compressed
    if (is_recurrent or kinds & RECURRENT_LAYERS) and not recurrent_layers(model):
        return "the state of its linear-attention, state-space or convolution layers leaks into the next sequence"
    indexed = {"indexed_attention"} if indexed_attention_layers(model) else set()
    if unknown := sorted(kinds - PACKABLE_LAYERS - RECURRENT_LAYERS - TOKENWISE_LAYERS - indexed):
        return f"its layers of {', '.join(unknown)} are not supported by packed attention"
    if _decoder_modules(model, KEEPS_LAYOUT_FROM_ATTENTION):
        return "its layers do not hand the layout of packed rows to their attention"
    # the hybrid families do not declare it; if their attention were different, the first forward would raise
    if not getattr(decoder, "_supports_attention_backend", False) and not recurrent_layers(model):
        return NO_ATTENTION_INTERFACE
    return None


def layer_types(config: Any) -> list[str]:
    """The kind of each decoder layer, by transformers' names; empty if the family has one kind only."""
    return list(getattr(config.get_text_config(), "layer_types", None) or ())


def kinds_of_layers(config: Any) -> list[str]:
    """`layer_types`, also of a family that has one kind only and does not list it."""
    text = config.get_text_config()
    has_window = getattr(text, "sliding_window", None) and not stray_window(config)
    only = "sliding_attention" if has_window else "full_attention"
    return layer_types(config) or [only] * text.num_hidden_layers


def stray_window(config: Any) -> int | None:
    """The `sliding_window` of a configuration whose class of transformers has none, so that its model ignores it.

    None for classes that declare one, and for those of other packages.
    """
    text = config.get_text_config()
    is_transformers = type(text).__module__.startswith("transformers.models.")
    declared = hasattr(type(text), "sliding_window") or "sliding_window" in text.attribute_map
    return getattr(text, "sliding_window", None) if is_transformers and not declared else None


def attention_layer_count(config: Any) -> int:
    """How many decoder layers have attention without an indexer.

    A layer of a hybrid kind has attention and a recurrent part.
    """
    kinds = layer_types(config)
    without = TOKENWISE_LAYERS | {"linear_attention", "conv", "indexed_attention"}
    return sum(kind not in without for kind in kinds) if kinds else config.get_text_config().num_hidden_layers


def attention_chunk_size(layer: Any) -> int | None:
    """Tokens in a chunk of a layer of chunked attention, which is the kind that `layer_types` names; None for others.

    Args:
        layer: an attention module of transformers.
    """
    config: Any = getattr(layer, "config", None)
    size = getattr(config, "attention_chunk_size", None)
    return size if size is not None and config.layer_types[layer.layer_idx] == "chunked_attention" else None


def attention_window(layer: Any) -> int | None:
    """How many tokens a query of a layer of `WINDOW_IN_MASK` attends to, its own included; None for other layers.

    Other classes pass their window to the attention function, or have none, whatever their config says.

    Args:
        layer: an attention module of transformers.
    """
    if type(layer).__name__ not in WINDOW_IN_MASK:
        return None
    config: Any = layer.config
    return config.sliding_window if kinds_of_layers(config)[layer.layer_idx] == "sliding_attention" else None


def has_attention_temperature(layer: Any) -> bool:
    """Whether this attention module scales its queries by their index in the row: Llama 4's layers without RoPE."""
    return getattr(layer, "attn_temperature_tuning", False) and not layer.use_rope


def attention_temperature_length(config: Any) -> int | None:
    """From which length on Llama 4 scales queries of its layers without RoPE; None for other models."""
    text = config.get_text_config()
    return text.floor_scale if getattr(text, "attn_temperature_tuning", False) else None


def attention_cache_numbers(layer: Any) -> int:
    """How many numbers are cached for a token by a layer of attention with this configuration.

    Keys and values; for multi-head latent attention the latent vector and the rotary key, except for MiniCPM3, of which
    vLLM caches keys, and values padded to their size.
    """
    if layer.model_type == "minicpm3":
        return 2 * layer.num_attention_heads * layer.qk_head_dim
    if getattr(layer, "kv_lora_rank", None):
        return layer.kv_lora_rank + layer.qk_rope_head_dim
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    return 2 * heads * (getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)


def recurrent_layers(model: Any) -> list[Any]:
    """The modules that carry a state from token to token."""
    return _decoder_modules(model, RECURRENT_CLASSES)


def indexed_attention_layers(model: Any) -> list[Any]:
    """The modules of attention whose indexer chooses, among all tokens of a row, those that a query attends to."""
    return _decoder_modules(model, INDEXED_ATTENTION_CLASSES)


def layers_by_sequence(model: Any) -> list[Any]:
    """The modules that compute one sequence per row: in a packed row, sequences would affect each other."""
    return _decoder_modules(model, RECURRENT_CLASSES | INDEXED_ATTENTION_CLASSES)


def _decoder_modules(model: Any, classes: frozenset[str]) -> list[Any]:
    return [module for module in model.get_decoder().modules() if type(module).__name__ in classes]


def has_recurrent_state(model: Any) -> bool:
    """Whether the model carries a state from token to token, as linear attention and state-space models do."""
    return any(getattr(part, "_is_stateful", False) for part in (model, model.get_decoder()))


def bidirectional_obstacle(model: Any) -> str | None:
    """Why purely causal attention would be wrong for this model; None if it is right.

    Models that distinguish images (or a prefix) from text by `token_type_ids` let some tokens attend to later ones.
    """
    prefixed = hasattr(model.config, "vision_config") and "token_type_ids" in signature(model.forward).parameters
    if prefixed and model.config.model_type not in BIDIRECTIONAL_IMAGE_FAMILIES | CAUSAL_IMAGE_FAMILIES:
        return "its image and prefix tokens attend to later ones, by token_type_ids that the engine does not compute"
    text = model.config.get_text_config()
    if getattr(text, "use_bidirectional_attention", None) and not has_bidirectional_images_in_windows(model.config):
        return "its config sets use_bidirectional_attention: some tokens attend to later ones"
    if getattr(text, "prefix_lm", False):
        return "its config sets prefix_lm: tokens of a prompt attend to later ones, by token_type_ids"
    return None


def has_bidirectional_images_in_windows(config: Any) -> bool:
    """Whether tokens of an image attend to later ones of that image in layers with a sliding window, and only there.

    That is so in larger models of Gemma 4. In Gemma 3 it is so in all layers, whatever the window.
    """
    text = config.get_text_config()
    is_gemma4 = text.model_type in ("gemma4_text", "gemma4_unified_text")
    return is_gemma4 and getattr(text, "use_bidirectional_attention", None) == "vision"


def has_bidirectional_images(config: Any) -> bool:
    """Whether tokens of an image attend to later ones of that image in some layers."""
    return config.model_type in BIDIRECTIONAL_IMAGE_FAMILIES or has_bidirectional_images_in_windows(config)


def length_dependent_rope(config: Any) -> tuple[str, int] | None:
    """RoPE whose frequencies depend on the longest sequence in a forward: (rope type, longest length without effect).

    None for other kinds of RoPE. Of "longrope" an engine fixes the frequencies, see rlkit.vlm.long_rope.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    for one in (rope, *rope.values()):
        if isinstance(one, dict) and one.get("rope_type") == "dynamic":
            return "dynamic", text.max_position_embeddings
        if isinstance(one, dict) and one.get("rope_type") == "longrope":
            return "longrope", one["original_max_position_embeddings"]
    return None


def check_rope_lengths(model_type: str, kind: str, most: int, lengths: Sequence[int]) -> None:
    """Refuse a batch with a sequence that is too long for the RoPE frequencies of a model.

    "longrope" has other frequencies in a run with sequences of more than `most` tokens. "dynamic" has other frequencies
    for each length beyond `most`, and keeps those of the longest sequence so far.

    Args:
        model_type: for the error.
        kind, most: of `length_dependent_rope`.
        lengths: tokens of each sequence in a forward.

    Raises:
        ValueError: a sequence is too long.
    """
    longest = max(lengths, default=0)
    if kind == "longrope":
        if longest > most + 1:  # nothing is read at the last token, such as that of `scoring_batch`
            raise ValueError(
                f"lengths: expected at most {most} tokens in a sequence of {model_type} with LongRoPE's short factors, "
                f"got {longest}; for long factors say how long sequences become: longest_sequence of the engine, or "
                "--max_prompt_tokens (or --max_tokens) of a recipe"
            )
    elif longest > most:
        raise ValueError(
            f"lengths: expected at most {most} tokens in a forward of {model_type}, because its RoPE ({kind}) "
            f"depends on the longest sequence beyond that, got sequences of {min(lengths)} to {longest} tokens"
        )


def head_obstacle(config: Any, head: Any = None) -> str | None:
    """Why logits cannot be computed from hidden states by the output layer's weight alone; None if they can.

    Args:
        config: of the model.
        head: its output layer, if there may be adapters.
    """
    if hasattr(head, "lora_A"):
        return "its output layer has adapters"
    if config.model_type == "chameleon":
        return "it suppresses the tokens of images in its logits, after the output layer"
    text = config.get_text_config()
    changed = [name for name in LOGIT_TRANSFORMS if getattr(text, name, None) not in (None, 1.0)]
    return f"its logits are transformed after the output layer ({', '.join(changed)})" if changed else None


def tokens_per_image(config: Any) -> int:
    """Tokens per image in families that resize all images to one size, or of a tile of one size; 0 for others."""
    vision = config.vision_config
    if config.model_type == "internvl" or config.model_type == "llava" and vision.model_type != "pixtral":
        return config.image_seq_length
    if config.model_type == "gemma3":
        return config.mm_tokens_per_image
    if config.model_type in IMAGE_DIMENSION_FAMILIES:
        return (vision.image_size // vision.patch_size // config.scale_factor) ** 2
    if config.model_type == "gemma3n":
        return config.vision_soft_tokens_per_image
    if config.model_type == "llama4":  # pixel_values has one entry for each tile
        return round(((vision.image_size // vision.patch_size) * vision.pixel_shuffle_ratio) ** 2)
    return 0


def tokens_of_tiled_image(size: Sequence[int], config: Any) -> int:
    """Tokens of an image of `TILED_FAMILIES`: those of the whole image in one tile, and those of its tiles.

    Rows and columns that are padding alone are cut off the tiles, and each row ends with a token. LLaVA-OneVision
    scales down the features of images with more tiles than `vision_aspect_ratio` says.

    Args:
        size: height and width in pixels.
        config: of the model.
    """
    from transformers.image_processing_utils import select_best_resolution

    (height, width), vision = size, config.vision_config
    side = vision.image_size // vision.patch_size
    resolution = select_best_resolution((height, width), config.image_grid_pinpoints)
    rows, columns = (pixels // vision.image_size * side for pixels in resolution)
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    if config.model_type == "llava_onevision":
        most = int(config.vision_aspect_ratio.removeprefix("anyres_max_"))
        scale = math.sqrt(rows * columns / (most * side**2))
        if scale > 1.1:
            rows, columns = int(rows // scale), int(columns // scale)
    return side**2 + rows * (columns + 1)


def tokens_of_frame(config: Any) -> int:
    """Tokens of each frame of a video of LLaVA-OneVision and LLaVA-NeXT-Video, which pool squares of four."""
    side = config.vision_config.image_size // config.vision_config.patch_size
    if config.model_type == "llava_next_video":
        return (side // config.spatial_pool_stride) ** 2
    return math.ceil(side / 2) ** 2


def tokens_at_end_of_video(config: Any) -> int:
    """Tokens of a video of `TILED_FAMILIES` after those of its frames: one of LLaVA-OneVision."""
    return int(config.model_type == "llava_onevision")


def numbers_per_patch(vision: Any) -> int:
    """Length of a row of pixel_values in `PATCH_ROW_FAMILIES`: the colours of a patch, in one frame or several.

    Args:
        vision: the configuration of the vision tower.
    """
    channels = getattr(vision, "in_channels", getattr(vision, "in_chans", 3))
    return channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2


def audio_mask_name(config: Any) -> str:
    """What the family calls the mask of audio frames."""
    return "feature_attention_mask" if config.model_type in WHOLE_MODELS else "input_features_mask"


def audio_tokens(frames: Tensor, config: Any) -> Tensor:
    """Tokens of audios with these numbers of frames, int64 [audios].

    Qwen2.5-Omni and Gemma 4 halve the frames twice, rounded down and up. Qwen3-Omni makes an eighth of each chunk of
    2 * n_window frames, rounded up. A frame of Gemma 4 Unified, a piece of the waveform, is a token. Audios of Gemma 3n
    have one number of tokens, whatever their length.
    """
    if config.model_type == "qwen2_5_omni_thinker":
        return ((frames - 1) // 2 - 1) // 2 + 1
    if config.model_type == "gemma4":
        return (frames + 3) // 4
    if config.model_type == "gemma4_unified":
        return frames
    if config.model_type == "gemma3n":
        return torch.full_like(frames, config.audio_soft_tokens_per_image)
    chunk = 2 * config.audio_config.n_window
    return frames // chunk * ((chunk + 7) // 8) + (frames % chunk + 7) // 8


def image_groups(tokens: Tensor, image_token: int, starts: Tensor | None = None) -> Tensor:
    """Which image each token belongs to: [..., N], counted from 0; -1 for text.

    Args:
        tokens: [..., N] token ids.
        image_token: the placeholder; adjacent placeholders are one image.
        starts: indices at which a packed segment starts; an image ends there.
    """
    image = tokens == image_token
    first = image.clone()
    first[..., 1:] &= ~image[..., :-1]
    if starts is not None:
        first[..., starts] = image[..., starts]
    return torch.where(image, first.long().cumsum(-1) - 1, -1)
