"""Which models the megatron engine supports, with which degrees of parallelism. Needs no Megatron-Core."""

from __future__ import annotations

from typing import Any, NamedTuple

FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama", "qwen2_5_vl")


class ParallelDims(NamedTuple):
    """Degrees of parallelism; the remaining ranks are data-parallel."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    sequence_parallel: bool = False
    expert: int = 1


def check_supported(config: Any, dims: ParallelDims, world: int) -> None:
    """Raise a ValueError if a model, or its parallelism over `world` ranks, is not supported.

    Args:
        config: of the transformers model.
        dims: degrees of parallelism.
        world: number of ranks.
    """
    if config.model_type not in FAMILIES:
        families = ", ".join(FAMILIES)
        raise ValueError(f"model: expected one of {families}, got {config.model_type}; use the fsdp2 engine")
    text = config.get_text_config()
    _check_architecture(text)
    _check_divisors(text, dims)
    pipeline, expert = dims.pipeline, dims.expert
    if world % (pipeline * expert):
        product = f"pipeline * expert = {pipeline} * {expert}"
        raise ValueError(f"pipeline, expert: expected a divisor of the {world} ranks, got {product}")
    if world % (dims.tensor * pipeline * dims.context):
        product = f"tensor * pipeline * context = {dims.tensor} * {pipeline} * {dims.context}"
        raise ValueError(f"tensor, pipeline, context: expected a divisor of the {world} ranks, got {product}")


def _check_architecture(text: Any) -> None:
    unsupported = {
        "attention_bias": getattr(text, "attention_bias", False),
        "mlp_bias": getattr(text, "mlp_bias", False),
        "sliding windows": "sliding_attention" in (getattr(text, "layer_types", None) or ()),
        "attention_dropout": text.attention_dropout,
        "mlp_only_layers": getattr(text, "mlp_only_layers", None),
        "decoder_sparse_step": getattr(text, "decoder_sparse_step", 1) != 1,
        f"hidden_act {text.hidden_act!r}": text.hidden_act != "silu",
        f"rope_type {_rope_type(text)!r}": _rope_type(text) not in ("default", "linear", "llama3"),
    }
    if found := ", ".join(name for name, is_there in unsupported.items() if is_there):
        raise ValueError(
            f"model: expected an architecture that the megatron engine supports, got {text.model_type} with {found}; "
            "use the fsdp2 engine"
        )


def _check_divisors(text: Any, dims: ParallelDims) -> None:
    for name in ("tensor", "pipeline", "context", "expert"):
        if (size := getattr(dims, name)) < 1:
            raise ValueError(f"{name}: expected at least 1, got {size}")
    divided = [
        ("tensor", text.num_attention_heads, "attention heads"),
        ("tensor", text.num_key_value_heads, "key-value heads"),
        ("pipeline", text.num_hidden_layers, "layers"),
        ("expert", text.num_experts if is_moe(text) else 1, "experts"),
    ]
    if not is_moe(text):
        divided.insert(2, ("tensor", text.intermediate_size, "neurons of the MLP"))
    for name, count, what in divided:
        if count % getattr(dims, name):
            raise ValueError(f"{name}: expected a divisor of the {count} {what}, got {getattr(dims, name)}")
    if is_moe(text) and (text.hidden_size % 8 or text.moe_intermediate_size % 8):
        sizes = f"{text.hidden_size} and {text.moe_intermediate_size}"
        raise ValueError(
            "model: expected a hidden_size and a moe_intermediate_size that 8 divides, for grouped matrix products, "
            f"got {sizes}; use the fsdp2 engine"
        )
    if dims.sequence_parallel and dims.tensor == 1:
        raise ValueError("sequence_parallel: expected tensor above 1, whose ranks share the tokens, got tensor=1")
    if is_moe(text) and dims.tensor > 1 and not (dims.sequence_parallel and dims.expert > 1):
        raise ValueError(
            f"tensor: expected sequence_parallel and expert above 1 for a mixture of experts, got {dims.tensor} with "
            f"sequence_parallel={dims.sequence_parallel} and expert={dims.expert}"
        )


def is_moe(config: Any) -> bool:
    return config.model_type == "qwen3_moe"


def padded_vocabulary(config: Any, dims: ParallelDims) -> int:
    """The vocabulary size, rounded up to a multiple of the tensor-parallel ranks."""
    return -(-config.get_text_config().vocab_size // dims.tensor) * dims.tensor


def _rope_type(config: Any) -> str:
    return config.rope_parameters["rope_type"]
