"""Model families that vLLM computes or updates wrongly on any device, refused by name. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlkit.vlm.loading import load_config

# vLLM copies attention sinks and experts of these families while it loads them, and does not copy new ones
NO_WEIGHT_UPDATES = frozenset({"gpt_oss"})
# vLLM 0.32 adds Gemma 3n's per-layer embeddings only in the class of the whole model, with its towers
UNUSED_WEIGHTS = frozenset({"gemma3n_text"})


def check_weights_are_used(model: str, *, trust_remote_code: bool = False) -> None:
    """Raise a ValueError for a model some of whose weights vLLM would ignore.

    Args:
        model: directory or hub id.
    """
    try:
        family = load_config(model, trust_remote_code=trust_remote_code).model_type
    except ValueError:  # vLLM will say what is wrong with it
        return
    if family in UNUSED_WEIGHTS:
        raise ValueError(f"model: expected a family whose weights vLLM uses completely, got {family}; use rollout 'hf'")


def check_trainers_class_is_not_used(model: str, registered: Mapping[str, Any], *, trust_remote_code: bool) -> None:
    """Raise a ValueError for a model that vLLM runs by transformers' own class.

    vLLM changes that class, for a compiler, and a model of the same class in this process can no longer be called.

    Args:
        model: directory or hub id.
        registered: vLLM's models by the names in `architectures` of a config: `vllm.ModelRegistry.models`.
    """
    try:
        config = load_config(model, trust_remote_code=trust_remote_code)
    except ValueError:  # vLLM will say what is wrong with it
        return
    for entry in (registered.get(name) for name in config.architectures or ()):
        cls: Any = getattr(entry, "model_cls", None)  # where it has been imported; otherwise its module is named
        module: str = cls.__module__ if cls else getattr(entry, "module_name", "")
        if module.startswith("vllm.model_executor.models.transformers"):
            raise ValueError(
                "model: expected a family that vLLM does not run by the trainer's own class, which it changes, got "
                f"{config.model_type}; use rollout 'vllm_server' or 'hf'"
            )


def check_weight_updates_work(family: str) -> None:
    """Raise a ValueError for a model family of which vLLM would keep some old weights."""
    if family in NO_WEIGHT_UPDATES:
        raise ValueError(
            f"model: expected a family whose weights vLLM replaces completely, got {family}; use rollout 'hf'"
        )
