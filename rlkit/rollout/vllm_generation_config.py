"""Entries of vLLM's generation config without which it would compute another model than the trainer."""

from __future__ import annotations

from typing import Any

from rlkit.vlm.families import attention_temperature_length
from rlkit.vlm.loading import load_config


def generation_config_overrides(model: str, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Overrides of the generation config for a model; {} for most.

    vLLM 0.32 ignores what config.json says of Llama 4's attention temperature. Unless the generation config says it, it
    uses the temperature if `max_model_len` is above 32,768 tokens, and otherwise not. The temperature changes attention
    from position `floor_scale` (8192) on.

    Args:
        model: directory or hub id.
    """
    try:
        config = load_config(model, trust_remote_code=trust_remote_code)
    except ValueError:  # vLLM will say what is wrong with it
        return {}
    if config.get_text_config().model_type != "llama4_text":
        return {}
    return {"attn_temperature_tuning": attention_temperature_length(config) is not None}
