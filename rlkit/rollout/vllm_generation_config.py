"""Entries of vLLM's generation config without which it would compute another model than the trainer."""

from __future__ import annotations

from typing import Any

from rlkit.vlm.families import attention_temperature_length
from rlkit.vlm.loading import load_config


def generation_config_overrides(model: str, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Overrides of the generation config for a model; {} for most.

    vLLM 0.32 switches off Llama 4's attention temperature for a `max_model_len` of at most 32,768 tokens, unless the
    generation config says otherwise. The temperature changes attention from position `floor_scale` (8192) on.

    Args:
        model: directory or hub id.
    """
    try:
        config = load_config(model, trust_remote_code=trust_remote_code)
    except ValueError:  # vLLM will say what is wrong with it
        return {}
    return {} if attention_temperature_length(config) is None else {"attn_temperature_tuning": True}
