"""Families that vLLM computes or updates wrongly on any device, and options for others. Importable without vLLM.

Configurations are transformers' own, as `config_or_empty` returns them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlkit.vlm.families import attention_temperature_length, layer_types, stray_window
from rlkit.vlm.loading import load_config, model_path
from rlkit.vlm.weight_files import quantization_method, quantized_message

# rlkit.rollout.vllm_gpt_oss updates all weights of these, except that some GPU attention back ends keep a copy of the
# sinks
UPDATED_ON_CPU_ONLY = frozenset({"gpt_oss"})
# Mistral's repositories have a model twice, for transformers and in Mistral's own format. By default vLLM reads the
# latter, with other names of weights than the trainer's.
TRANSFORMERS_FILES = {"config_format": "hf", "load_format": "hf", "tokenizer_mode": "hf"}
# vLLM's class leaves out weights of these, rlkit.rollout.vllm_gemma3n uses them
NEED_OWN_MODEL = frozenset({"gemma3n_text"})
# modules of models that run transformers' code: vLLM's, and rlkit's for the trainer's process
TRANSFORMERS_MODELS = ("vllm.model_executor.models.transformers", "rlkit.rollout.vllm_transformers")
# rlkit's models for vLLM, and their modules
OWN_MODELS = {
    "Mistral4ForCausalLM": "vllm_mistral4",
    "UpdatableGptOssForCausalLM": "vllm_gpt_oss",
    "ExactApertusForCausalLM": "vllm_apertus",
    "LoadableAXK1ForCausalLM": "vllm_axk1",
    "ExactGemma3nForCausalLM": "vllm_gemma3n",
    "ExactGemma3nForConditionalGeneration": "vllm_gemma3n",
}
# Overrides of the configuration, by model type; for Mistral Small 4 it is that of its text model. "deepseek_v3" has
# vLLM use its kernels for multi-head latent attention. vLLM's class of GLM-4.1V reads GLM-4.6V, which it does not know.
# It knows PhiMoE by the name in published files, and not by that of transformers' class.
OVERRIDES: dict[str, dict[str, Any]] = {
    "mistral4": {"text_config": {"architectures": ["Mistral4ForCausalLM"], "model_type": "deepseek_v3"}},
    "apertus": {"architectures": ["ExactApertusForCausalLM"]},
    "axk1": {"architectures": ["LoadableAXK1ForCausalLM"]},
    "phimoe": {"architectures": ["PhiMoEForCausalLM"]},
    "glm46v": {"architectures": ["Glm4vForConditionalGeneration"], "model_type": "glm4v"},
    "gemma3n": {"architectures": ["ExactGemma3nForConditionalGeneration"]},
    "gemma3n_text": {"architectures": ["ExactGemma3nForCausalLM"]},
}


def config_or_empty(model: str, *, trust_remote_code: bool = False) -> Any:
    """The configuration of a model; one without fields if transformers cannot read it, so that vLLM says why.

    Args:
        model: directory or hub id.
    """
    from transformers import PreTrainedConfig

    try:
        return load_config(model, trust_remote_code=trust_remote_code)
    except ValueError:
        return PreTrainedConfig()


def family_options(model: str, config: Any) -> dict[str, Any]:
    """Options with which vLLM reads the trainer's files and configuration, and computes the trainer's model.

    Args:
        model: directory or hub id.
        config: its configuration.

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
    options: dict[str, Any] = dict(TRANSFORMERS_FILES)
    text = config.get_text_config().model_type
    if overrides := OVERRIDES.get("mistral4" if text == "mistral4" else config.model_type):
        options["hf_overrides"] = overrides
    if config.model_type in ("cohere2", "cohere2_moe") and config.sliding_window:
        # in vLLM a token attends to `sliding_window` tokens before it, in transformers to one less and itself
        options["hf_overrides"] = {"sliding_window": config.sliding_window - 1}
    if config.model_type == "hyperclovax_vision_v2":
        # vLLM runs transformers' code for it, and multiplies logits by what it finds under another name
        options["hf_overrides"] = {"text_config": {"logit_scale": config.text_config.logits_scaling}}
    if stray_window(config):  # vLLM applies it to all layers, transformers to none
        family_overrides = options.get("hf_overrides", {})
        if config.get_text_config() is config:
            options["hf_overrides"] = {**family_overrides, "sliding_window": None}
        else:
            text_overrides = {**family_overrides.get("text_config", {}), "sliding_window": None}
            options["hf_overrides"] = {**family_overrides, "text_config": text_overrides}
    if config.model_type == "exaone4_5":
        # vLLM 0.32 takes it for a model whose vision tower normalizes pixels, and has its processor leave that out
        options["mm_device_do_normalize"] = False
    if text == "llama4_text":
        # vLLM 0.32 ignores what config.json says of the attention temperature, which changes attention from position
        # `floor_scale` (8192) on. Without this entry it uses one if `max_model_len` is above 32,768 tokens.
        has_temperature = attention_temperature_length(config) is not None
        options["override_generation_config"] = {"attn_temperature_tuning": has_temperature}
    return options


def uses_own_model(options: Mapping[str, Any]) -> bool:
    """Whether vLLM runs one of rlkit's models, by the options of `family_options`."""
    overrides = options.get("hf_overrides") or {}
    names = overrides.get("text_config", overrides).get("architectures", ())
    return any(name in OWN_MODELS for name in names)


def register_models() -> None:
    """Register rlkit's models with vLLM, which imports those that it needs."""
    from vllm import ModelRegistry

    for name, module in OWN_MODELS.items():
        ModelRegistry.register_model(name, f"rlkit.rollout.{module}:{name}")


def runs_by_transformers(config: Any, options: Mapping[str, Any], registered: Mapping[str, Any]) -> bool:
    """Whether vLLM runs a model by transformers' code: it has no model of its own, or is told to.

    A model whose configuration transformers cannot read runs by vLLM's code.

    Args:
        config: of the model, see `config_or_empty`.
        options: of `vllm.LLM`, also those of `family_options`.
        registered: vLLM's models by the names in `architectures` of a config: `vllm.ModelRegistry.models`.
    """
    if not config.model_type:
        return options.get("model_impl") == "transformers"
    overrides = options.get("hf_overrides")
    names = (overrides.get("architectures") if isinstance(overrides, Mapping) else None) or config.architectures or ()
    known = [registered[name] for name in names if name in registered]
    return options.get("model_impl") == "transformers" or not known or _module(known[0]) in TRANSFORMERS_MODELS


def _module(entry: Any) -> str:
    """The module of a model in vLLM's registry, which has the class where it has been imported, else names."""
    cls = getattr(entry, "model_cls", None)
    return cls.__module__ if cls else getattr(entry, "module_name", "")


def check_windows_work(config: Any, max_model_len: int | None, sampler: str = "vLLM") -> None:
    """Raise a ValueError for a model whose sliding windows a sampler would leave out: classes of Qwen2-MoE have none.

    If all layers have a window, vLLM applies it to each of them; SGLang does not.

    Args:
        config: of the model, from transformers.
        max_model_len: of the sampler; None for the context of the model.
        sampler: "vLLM" or "SGLang".
    """
    text, kinds = config.get_text_config(), set(layer_types(config))
    in_all_layers = kinds == {"sliding_attention"}
    if text.model_type != "qwen2_moe" or "sliding_attention" not in kinds or (in_all_layers and sampler == "vLLM"):
        return
    if (longest := max_model_len or text.max_position_embeddings) > text.sliding_window:
        raise ValueError(
            f"max_model_len: expected at most the sliding window of {text.sliding_window} tokens for qwen2_moe, whose "
            f"windows {sampler} leaves out, got {longest}; use shorter sequences (--max_prompt_tokens, "
            "--max_new_tokens; --max-model-len of vLLM's servers, --context-length of SGLang's), or rollout 'hf'"
        )


def check_weight_updates_work(config: Any, *, on_cpu: bool) -> None:
    """Raise a ValueError for a model of which vLLM would keep some old weights, or scale new ones by old scales.

    Args:
        config: of the model that vLLM loaded, from transformers.
        on_cpu: whether vLLM runs on a CPU, with rlkit's options.
    """
    if config.model_type in UPDATED_ON_CPU_ONLY and not on_cpu:
        raise ValueError(
            f"model: expected a family whose weights vLLM replaces completely on a GPU, got {config.model_type}; use "
            "rollout 'hf', or vLLM on a CPU (rollout 'vllm', or servers that rlkit.rollout.serve started)"
        )
    if method := quantization_method(config):
        raise ValueError(quantized_message(config.name_or_path, method))
