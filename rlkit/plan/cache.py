"""What vLLM keeps in memory for a sequence, by the kind of each layer."""

from __future__ import annotations

from typing import Any

from rlkit.vlm.families import TOKENWISE_LAYERS, attention_cache_numbers, kinds_of_layers

HALF = 2  # bytes of a bfloat16 number


def cache_bytes(config: Any, tokens: int) -> int:
    """Bytes that vLLM 0.32 keeps for a sequence of `tokens` tokens, in bfloat16 and without the rest of its last block.

    - full attention: keys and values of each token, 2 K D numbers (K key-value heads of size D)
    - sliding window: the same for the last tokens of the window
    - chunked attention: the same for the tokens of a chunk, at most
    - multi-head latent attention: the latent vector and the rotary key of each token
    - recurrent layers (gated delta rule, Kimi delta attention, Mamba, short convolution): a state that does not grow
    - hybrid layers: both
    - layers that use the keys and values of another one, or have no attention: nothing

    Args:
        config: of the transformers model.
        tokens: prompt and response.

    Raises:
        ValueError: the family has layers of another kind.
    """
    text, kinds = config.get_text_config(), kinds_of_layers(config)
    total = 0
    for i, kind in enumerate(kinds[: len(kinds) - (getattr(text, "num_kv_shared_layers", None) or 0)]):
        if kind not in ATTENTION | SLIDING | CHUNKED | RECURRENT | TOKENWISE_LAYERS:
            raise ValueError(f"model: expected layers whose cache is known, got {kind} of {config.model_type}")
        if kind in ATTENTION | SLIDING | CHUNKED:
            most = text.sliding_window if kind in SLIDING else text.attention_chunk_size if kind in CHUNKED else tokens
            kept = min(tokens, most)
            total += HALF * kept * attention_cache_numbers(text.per_layer_config[i])
        if kind in RECURRENT:
            total += state_bytes(text)
    return total


ATTENTION = frozenset({"full_attention", "attention", "hybrid"})  # to all tokens
SLIDING = frozenset({"sliding_attention", "hybrid_sliding"})
CHUNKED = frozenset({"chunked_attention"})
RECURRENT = frozenset({"linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding"})


def state_bytes(text: Any) -> int:
    """Bytes of the state of one recurrent layer: the inputs of its convolution, and its recurrent state.

    Raises:
        ValueError: a recurrent layer of another kind.
    """
    if hasattr(text, "linear_value_head_dim"):  # gated delta rule
        keys = text.linear_num_key_heads * text.linear_key_head_dim
        values = text.linear_num_value_heads * text.linear_value_head_dim
        inputs = (text.linear_conv_kernel_dim - 1) * (2 * keys + values)
        size = 4 if getattr(text, "mamba_ssm_dtype", None) == "float32" else HALF
        return HALF * inputs + size * values * text.linear_key_head_dim
    if hasattr(text, "linear_num_heads"):  # Kimi delta attention
        inner = text.linear_num_heads * text.linear_head_dim
        return HALF * (text.linear_conv_kernel_dim - 1) * 3 * inner + 4 * inner * text.linear_head_dim
    if hasattr(text, "mamba_d_state") and hasattr(text, "mamba_n_groups"):  # Mamba-2
        inner = text.mamba_n_heads * text.mamba_d_head
        inputs = (text.mamba_d_conv - 1) * (inner + 2 * text.mamba_n_groups * text.mamba_d_state)
        return HALF * (inputs + inner * text.mamba_d_state)
    if hasattr(text, "n_mamba_heads"):  # Mamba-2 in Zamba2
        inner = text.mamba_expand * text.hidden_size
        inputs = (text.mamba_d_conv - 1) * (inner + 2 * text.mamba_ngroups * text.mamba_d_state)
        return HALF * (inputs + inner * text.mamba_d_state)
    if hasattr(text, "mamba_d_state"):  # Mamba, in Jamba
        return HALF * text.mamba_expand * text.hidden_size * (text.mamba_d_conv - 1 + text.mamba_d_state)
    if hasattr(text, "ssm_state_size") and hasattr(text, "n_groups"):  # Mamba-2 in Nemotron-H
        inner = text.mamba_num_heads * text.mamba_head_dim
        inputs = (text.conv_kernel - 1) * (inner + 2 * text.n_groups * text.ssm_state_size)
        size = 4 if text.mamba_ssm_cache_dtype == "float32" else HALF
        return HALF * inputs + size * inner * text.ssm_state_size
    if hasattr(text, "conv_L_cache"):  # short convolution
        return HALF * (text.conv_L_cache - 1) * text.hidden_size
    raise ValueError(f"model: expected recurrent layers whose state is known, got those of {text.model_type}")
