"""Families that vLLM computes or updates wrongly on any device, and options for others. Importable without vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlkit.vlm.loading import load_config, model_path
from rlkit.vlm.weight_files import quantization_method, quantized_message

# vLLM copies attention sinks and experts of these families while it loads them, and does not copy new ones
NO_WEIGHT_UPDATES = frozenset({"gpt_oss"})
# vLLM 0.32 adds Gemma 3n's per-layer embeddings only in the class of the whole model, with its towers
UNUSED_WEIGHTS = frozenset({"gemma3n_text"})
# Mistral's repositories have a model twice, for transformers and in Mistral's own format. By default vLLM reads the
# latter, with other names of weights than the trainer's.
TRANSFORMERS_FILES = {"config_format": "hf", "load_format": "hf", "tokenizer_mode": "hf"}
# of rlkit.rollout.vllm_mistral4; the model type has vLLM use its kernels for multi-head latent attention
MISTRAL4 = {"text_config": {"architectures": ["Mistral4ForCausalLM"], "model_type": "deepseek_v3"}}


def family_options(model: str, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Options of vLLM with which it reads the files and the configuration that the trainer reads.

    Args:
        model: directory or hub id.

    Raises:
        ValueError: a directory with two sets of weights, of which vLLM would load both.
    """
    folder = Path(model_path(model))
    if not (folder / "model.safetensors.index.json").exists() and (folder / "model.safetensors").exists():
        if other := next(folder.glob("consolidated*.safetensors"), None):
            raise ValueError(
                f"model: expected one set of weights without an index, got model.safetensors and {other.name} in "
                f"{model!r}, of which vLLM loads both; move the latter, which is in Mistral's own format"
            )
    return {**TRANSFORMERS_FILES, **({"hf_overrides": MISTRAL4} if is_mistral4(model, trust_remote_code) else {})}


def is_mistral4(model: str, trust_remote_code: bool = False) -> bool:
    """Whether this is Mistral Small 4; False for a model without a configuration.

    Args:
        model: directory or hub id.
    """
    try:
        return load_config(model, trust_remote_code=trust_remote_code).get_text_config().model_type == "mistral4"
    except ValueError:  # vLLM will say what is wrong with it
        return False


def register_mistral4() -> None:
    """Register `Mistral4ForCausalLM` with vLLM."""
    from vllm import ModelRegistry

    ModelRegistry.register_model("Mistral4ForCausalLM", "rlkit.rollout.vllm_mistral4:Mistral4ForCausalLM")


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


def check_weight_updates_work(config: Any) -> None:
    """Raise a ValueError for a model of which vLLM would keep some old weights, or scale new ones by old scales.

    Args:
        config: of the model that vLLM loaded, from transformers.
    """
    if config.model_type in NO_WEIGHT_UPDATES:
        raise ValueError(
            f"model: expected a family whose weights vLLM replaces completely, got {config.model_type}; use rollout "
            "'hf'"
        )
    if method := quantization_method(config):
        raise ValueError(quantized_message(config.name_or_path, method))
