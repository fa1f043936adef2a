"""LongRoPE (Phi-3, Phi-4-mini, MiniCPM): one set of rotary factors for a whole run.

Such a model has short factors for sequences up to the length of its first training, and long ones for longer sequences.
transformers chooses in each forward, by its longest row; vLLM once, by `max_model_len`. A token that is sampled with
short factors would be trained with long ones. So an engine chooses once, too: long factors if the longest sequence of
its run is longer than the original length, else short ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from rlkit.vlm.families import length_dependent_rope

FIXED = "fixed longrope"  # a `rope_type` that transformers does not update in the forward pass


def original_length(config: Any) -> int | None:
    """Up to which length a model with LongRoPE has short factors; None for other models."""
    rope = length_dependent_rope(config)
    return rope[1] if rope is not None and rope[0] == "longrope" else None


def has_long_factors(config: Any, longest_sequence: int | None) -> bool:
    """Whether a model has LongRoPE's long factors in a run.

    Args:
        longest_sequence: most tokens of a sequence in the run; None if not known, for short factors.
    """
    original = original_length(config)
    return original is not None and longest_sequence is not None and longest_sequence > original


def factors_sentence(config: Any, longest_sequence: int | None) -> str | None:
    """Which LongRoPE factors a model uses in a run; None for other models.

    Args:
        longest_sequence: as for `has_long_factors`.
    """
    if (original := original_length(config)) is None:
        return None
    if has_long_factors(config, longest_sequence):
        return f"long LongRoPE factors, for sequences of up to {longest_sequence} tokens (short ones: up to {original})"
    return f"short LongRoPE factors, for sequences of up to {original} tokens"


def usable_context(config: Any, longest_sequence: int | None = None) -> int:
    """Most tokens that a model computes in a sequence: with LongRoPE's short factors the original length.

    Args:
        longest_sequence: as for `has_long_factors`.
    """
    context: int = config.get_text_config().max_position_embeddings
    if (original := original_length(config)) is None or has_long_factors(config, longest_sequence):
        return context
    return min(context, original)


def check_factors_of_samplers(config: Any, longest_sequence: int | None, context_lengths: Sequence[int]) -> None:
    """Raise a ValueError if an inference engine uses other LongRoPE factors than an engine of this run.

    Args:
        config: of the model.
        longest_sequence: as for `has_long_factors`.
        context_lengths: `max_model_len` of each inference engine, by which vLLM chooses.
    """
    original, is_long = original_length(config), has_long_factors(config, longest_sequence)
    for context in context_lengths:
        if has_long_factors(config, context) != is_long:
            there, here, most = ("short", "long", "more than") if is_long else ("long", "short", "at most")
            raise ValueError(
                f"max_model_len: expected {most} {original} in the sampler, got {context}: {config.model_type} uses "
                f"{there} LongRoPE factors there and {here} ones in this run, because of sequences of up to "
                f"{longest_sequence or 'an unknown number of'} tokens (--max_prompt_tokens + --max_new_tokens)"
            )


def fix_rope_factors(model: Any, longest_sequence: int | None) -> None:
    """Give a model with LongRoPE the factors of its run, whatever the length of a row; other models do not change.

    Args:
        model: from transformers.
        longest_sequence: as for `has_long_factors`.

    Raises:
        ValueError: a model whose factors cannot be fixed.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if (original := original_length(model.config)) is None:
        return
    is_long, family = has_long_factors(model.config, longest_sequence), model.config.model_type
    if is_long and family == "phimoe":
        raise ValueError(
            f"longest_sequence: expected at most {original} for phimoe, of which transformers computes LongRoPE with "
            f"short factors only, got {longest_sequence}"
        )
    embeddings = [m for m in model.modules() if getattr(m, "rope_type", None) in ("longrope", FIXED)]
    if not embeddings:
        raise ValueError(f"model: expected one kind of LongRoPE in all layers, got {family}, which has several")
    for embedding in embeddings:
        length, device = original + is_long, embedding.inv_freq.device
        embedding.inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](embedding.config, device, seq_len=length)
        embedding.rope_type = FIXED
        if family == "phimoe":  # its forward chooses one of two scales by the longest row; the model's config stays
            embedding.config = deepcopy(embedding.config)
            rope = embedding.config.rope_parameters
            rope["long_mscale"] = rope["short_mscale"]
