"""What all inference engines outside the trainer (vLLM, SGLang) have in common: checks of a request and its
response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlkit.data.samples import Sample, append_response
from rlkit.data.thinking_tags import thinking_tags_of
from rlkit.rollout.sampling import Sampling, sample_name
from rlkit.vlm.processors import decode

SUPPRESSED_LOGIT_BIAS = -1e30  # gives a token probability 0; unlike -inf it can be written as JSON


def check_context_length(requests: Sequence[Sample], sampling: Sequence[Sampling], max_model_len: int) -> None:
    """Raise a ValueError that names the first prompt which leaves no room for its response."""
    for request, params in zip(requests, sampling, strict=True):
        prompt_tokens, new_tokens = len(request.token_ids), params.max_new_tokens
        if prompt_tokens + new_tokens > max_model_len:
            raise ValueError(
                f"{sample_name(request)}: expected at most {max_model_len} tokens of prompt and response, the context "
                f"of the sampler, got {prompt_tokens} + {new_tokens} (max_new_tokens): skip the row, or raise "
                "max_model_len"
            )


def check_prompt_expansion(request: Sample, token_ids: Sequence[int] | None) -> None:
    """Raise a ValueError unless the sampler expanded image placeholders to the tokens that training will see.

    Args:
        token_ids: of the prompt, as the sampler reports them.
    """
    expanded_by_trainer, expanded_by_sampler = request.token_ids, list(token_ids or ())
    if expanded_by_sampler != expanded_by_trainer:
        pairs = enumerate(zip(expanded_by_trainer, expanded_by_sampler, strict=False))
        shorter = min(len(expanded_by_trainer), len(expanded_by_sampler))
        first_difference = next((t for t, (a, b) in pairs if a != b), shorter)
        raise ValueError(
            f"{sample_name(request)}: expected the sampler to expand the prompt to the trainer's "
            f"{len(expanded_by_trainer)} tokens, got {len(expanded_by_sampler)}, the first difference at token "
            f"{first_difference}: do both load the same image processor, with the same pixel budget?"
        )


def finished_sample(
    request: Sample,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    finish_reason: str | None,
    *,
    processor: Any,
    version: int,
) -> Sample:
    """The request followed by its response.

    Raises:
        RuntimeError: the sampler aborted the response.
    """
    if finish_reason not in ("stop", "length"):
        raise RuntimeError(
            f"group {request.group_id}: expected finish_reason 'stop' or 'length' from the sampler, "
            f"got {finish_reason!r}"
        )
    text = decode(processor, token_ids, thinking_tags_of(request.row))
    return append_response(
        request, list(token_ids), list(logprobs), finish_reason=finish_reason, text=text, version=version
    )
