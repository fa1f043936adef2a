"""Vision-language models: 3D RoPE ids, processors, chat templates, freezing and LoRA, loading, and tiny models."""

from rlkit.vlm.adapt import (
    audio_tower_pattern,
    disable_dropout,
    encoder_modules,
    freeze,
    lora,
    quantize_base,
    trainable_summary,
    vision_tower_pattern,
)
from rlkit.vlm.audios import load_audio
from rlkit.vlm.checkpoint_weights import merged_parameters
from rlkit.vlm.images import load_image
from rlkit.vlm.loading import load_model, model_path
from rlkit.vlm.observations import encode_observation
from rlkit.vlm.processors import decode, load_processor, placeholder_ids, suppressed_token_ids
from rlkit.vlm.prompts import encode_prompt, encode_prompts
from rlkit.vlm.rendering import render
from rlkit.vlm.responses import encode_chat, encode_responses
from rlkit.vlm.rope3d import ROPE3D_MODEL_TYPES, ROPE3D_REFUSED, Rope3DSpec, rope3d_position_ids, rope3d_spec
from rlkit.vlm.tiny import (
    build_tiny,
    model_or_tiny,
    tiny_config,
    tiny_processor,
    tiny_text_config,
    tiny_text_tokenizer,
    tiny_tokenizer,
)
from rlkit.vlm.videos import load_video

__all__ = [
    "ROPE3D_MODEL_TYPES",
    "ROPE3D_REFUSED",
    "Rope3DSpec",
    "audio_tower_pattern",
    "build_tiny",
    "decode",
    "encode_responses",
    "encode_chat",
    "encode_observation",
    "encode_prompt",
    "encode_prompts",
    "disable_dropout",
    "encoder_modules",
    "freeze",
    "load_audio",
    "load_image",
    "load_model",
    "load_processor",
    "load_video",
    "lora",
    "merged_parameters",
    "model_or_tiny",
    "model_path",
    "placeholder_ids",
    "quantize_base",
    "render",
    "rope3d_position_ids",
    "rope3d_spec",
    "suppressed_token_ids",
    "tiny_config",
    "tiny_processor",
    "tiny_text_config",
    "tiny_text_tokenizer",
    "tiny_tokenizer",
    "trainable_summary",
    "vision_tower_pattern",
]
