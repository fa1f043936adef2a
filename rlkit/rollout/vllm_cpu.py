"""What vLLM can compute on a CPU, and with which options, by model family. Imports no vLLM."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch

from rlkit.vlm.families import RECURRENT_LAYERS, layer_types

# Model types in vLLM 0.32: those of text models, and in OBSTACLES also of whole models (muse_glimmer, kimi_k25,
# ernie4_5_vl_moe, cosmos3_edge and cosmos3_omni)
BFLOAT16_ONLY = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})  # its kernel for the gated delta rule
# vLLM's models of these, and of multi-head latent attention, give RoPE queries of [tokens, heads, size]. Its kernel for
# CPUs takes their second dimension for the tokens, and so gives most of them the position of another one.
ROPE_BY_HEADS = frozenset({"lfm2", "lfm2_moe"})
# of rlkit.rollout.vllm_gpt_oss
GPT_OSS = {"architectures": ["UpdatableGptOssForCausalLM"]}
OBSTACLES = {
    "kimi_linear": "its kernels for linear attention need Triton, so a GPU",
    "olmo_hybrid": "its kernels for linear attention need Triton, so a GPU",
    "glm5_next_text": "its kernels for linear attention need Triton, so a GPU",
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), "vLLM has no sparse attention for CPUs"),
    "cohere_compass_text": "the rotary frequencies of a head have another order in vLLM than in transformers",
    "bamba": "vLLM has no model of it, and does not run its Mamba layers by transformers' code",
    "jamba": "its kernels for Mamba need a GPU",
    **dict.fromkeys(
        ("laguna", "minimax_m2"), "its routers score experts by a sigmoid, for which vLLM has no kernel for CPUs"
    ),
    "longcat_flash": "vLLM computes the experts that return their input with Triton, so on a GPU",
    "mimo_v2_flash": "its values are smaller than its keys, for which vLLM needs Triton, so a GPU",
    "jetmoe": "vLLM has no model of it, and takes the keys that transformers' code repeats for those of further tokens",
    "dbrx": "vLLM looks for its experts by names that its own layers do not have",
    "axk2": "vLLM has no model of it, and does not run its sparse attention by transformers' code",
    "youtu": "vLLM has no model of it, and does not run its latent attention by transformers' code on a CPU",
    "qwen4_exp_text": "its sparse attention needs FlashAttention, so a GPU",
    "muse_glimmer": "vLLM expects another image processor than transformers has",
    "kimi_k25": "vLLM reads the configuration and the processor of published files only",
    "ernie4_5_vl_moe": "vLLM reads the configuration and the processor of published files only, by their own code",
    **dict.fromkeys(
        ("cosmos3_edge", "cosmos3_omni"),
        "vLLM reads its published files only, not a model directory that transformers has written",
    ),
}


def cpu_dtype_and_options(config: Any, dtype: str | None) -> tuple[str, dict[str, Any]]:
    """The dtype of vLLM's weights on a CPU, and options that the model's family needs there.

    Args:
        config: of the model, see `rlkit.rollout.vllm_families.config_or_empty`.
        dtype: as asked for; None for float32, or bfloat16 where the family has no other.

    Raises:
        ValueError: a family that vLLM cannot compute on a CPU, or not on this one, or not in this dtype.
    """
    family = config.get_text_config().model_type
    obstacle = OBSTACLES.get(config.model_type) or OBSTACLES.get(family)
    if family in BFLOAT16_ONLY and not has_avx512():
        obstacle = "its kernel for the gated delta rule needs AVX-512, which this CPU does not have"
    if obstacle:
        raise ValueError(
            f"model: expected a family that vLLM can compute on a CPU, got {config.model_type}: {obstacle}; "
            "use rollout 'hf'"
        )
    if family in BFLOAT16_ONLY and dtype not in (None, "bfloat16"):
        raise ValueError(f"dtype: expected bfloat16 for {config.model_type} in vLLM on a CPU, got {dtype}")
    recurrent = RECURRENT_LAYERS & {*layer_types(config)}
    # states are cached only with chunked prefill, which is off on a CPU
    options: dict[str, Any] = {"enable_prefix_caching": False} if recurrent else {}
    if family in ROPE_BY_HEADS or getattr(config.get_text_config(), "kv_lora_rank", None):
        options["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}  # RoPE by PyTorch
    if family == "gpt_oss":
        options["hf_overrides"] = GPT_OSS
    return dtype or ("bfloat16" if family in BFLOAT16_ONLY else "float32"), options


def with_family_options(needed_options: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """A user's options of vLLM, which replace those that a family needs.

    `override_generation_config`, `compilation_config` and `hf_overrides` have the entries of both.

    Args:
        needed_options: of `family_options` and `cpu_dtype_and_options`.

    Raises:
        ValueError: a `compilation_config` or `hf_overrides` other than a dict, for a family that needs one, or other
            `hf_overrides` than it needs.
    """
    merged = {**needed_options, **options}
    if generation := needed_options.get("override_generation_config"):
        merged["override_generation_config"] = {**generation, **(options.get("override_generation_config") or {})}
    needed, given = needed_options.get("compilation_config"), options.get("compilation_config")
    if needed and given is not None:
        if not isinstance(given, Mapping):
            raise ValueError(f"compilation_config: expected a dict for this model, which needs {needed}, got {given!r}")
        operators = [*needed["custom_ops"], *given.get("custom_ops", ())]
        merged["compilation_config"] = {**given, "custom_ops": list(dict.fromkeys(operators))}
    if overrides := needed_options.get("hf_overrides"):
        merged["hf_overrides"] = _with_needed_overrides(overrides, options.get("hf_overrides") or {})
    return merged


def _with_needed_overrides(needed: Mapping[str, Any], given: Any) -> dict[str, Any]:
    """Overrides of the configuration, given by a user, with those that a family needs."""
    if not isinstance(given, Mapping):
        raise ValueError(f"hf_overrides: expected a dict for this model, which needs {needed}, got {given!r}")
    merged = {**given, **needed}
    for name in needed.keys() & given.keys():
        if isinstance(needed[name], Mapping):
            merged[name] = _with_needed_overrides(needed[name], given[name])
        elif given[name] != needed[name]:
            raise ValueError(
                f"hf_overrides: expected {name} {needed[name]!r}, which this model needs, got {given[name]!r}"
            )
    return merged


def has_avx512() -> bool:
    """False for an x86 CPU without AVX-512, also if ATEN_CPU_CAPABILITY says so; others have kernels of their own."""
    return platform.machine() != "x86_64" or torch.backends.cpu.get_cpu_capability() == "AVX512"


def repack_weights(model: Any) -> None:
    """Pack weights of vLLM's model again after an update: layers compute with packed copies on a CPU.

    vLLM does it except for two kinds. An output layer tied to the embedding receives no weight of its own; experts are
    packed when they are first loaded.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if "cpu_linear" in vars(module) and type(module).__name__ in ("ParallelLMHead", "VocabParallelEmbedding"):
            method.process_weights_after_loading(module)
        if (kernel := getattr(method, "moe_kernel", None)) is not None:
            kernel.fused_experts.process_weights_after_loading(module)
