"""How samples travel to vLLM and back, in process or to a server; imports no vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rlkit.data.samples import Sample, append_response
from rlkit.rollout.sampling import Sampling, where
from rlkit.vlm.processors import decode

NEVER = -1e30  # as a logit bias: probability 0, and a number that JSON has
MOST_NEVER = 1024  # tokens that vLLM takes a bias for; with more its engine ends, on a GPU
KEEPS_ITS_WEIGHTS = frozenset({"gpt_oss"})  # vLLM copies sinks and experts into what a running engine throws away


def request_prompt(request: Sample) -> dict[str, Any]:
    """vLLM's prompt: the compact track, which has one placeholder an image, and the images themselves.

    vLLM expands a placeholder once itself; expanded ids would be expanded again.
    """
    found: dict[str, Any] = {"prompt_token_ids": list(request.compact_ids)}
    return found | ({"multi_modal_data": {"image": list(request.images)}} if request.images else {})


def sampling_options(
    sampling: Sampling, request: Sample, *, n: int, unsampled: Iterable[int], ends: Sequence[int]
) -> dict[str, Any]:
    """vLLM's sampling parameters of one request: the distribution that the trainer scores, and nothing else.

    Args:
        unsampled: token ids that have probability 0.
        ends: token ids that end a response; the one that did is part of it.
    """
    return {
        "n": n,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "seed": request_seed(sampling.seed, request),
        "logit_bias": dict.fromkeys(unsampled, NEVER),
        "stop_token_ids": [*ends, *sampling.stop],
        "ignore_eos": True,  # it is one of `ends`
        "logprobs": 0,  # of the sampled token alone
        "flat_logprobs": True,
        "detokenize": False,
        "skip_special_tokens": False,
    }


def check_unsampled(unsampled: Sequence[int]) -> None:
    """Raise a ValueError if more tokens have probability 0 than vLLM can be told of."""
    if len(unsampled) > MOST_NEVER:
        raise ValueError(
            f"model: {len(unsampled)} tokens must not be sampled (placeholders, and a vocabulary larger than the "
            f"tokenizer's), vLLM takes {MOST_NEVER} at most: resize the model's embeddings to its tokenizer"
        )


def request_seed(seed: Sequence[int], request: Sample) -> int:
    """The seed of a prompt's first answer, and of a sample that goes on; vLLM adds 1 for each further answer."""
    keys = (*seed, request.group_id, request.number, sum(request.mask))
    return int(np.random.default_rng(keys).integers(2**53))


def check_takes_weights(family: str) -> None:
    """Raise a ValueError for a family of which vLLM would keep some of its old weights."""
    if family in KEEPS_ITS_WEIGHTS:
        raise ValueError(f"vllm: {family}: vLLM takes new weights in part only; sample with rollout 'hf'")


def check_context(requests: Sequence[Sample], how: Sequence[Sampling], most: int) -> None:
    """Raise a ValueError that names the first prompt which leaves no room for an answer."""
    for request, sampling in zip(requests, how, strict=True):
        if (needed := len(request.token_ids) + sampling.max_new_tokens) > most:
            raise ValueError(
                f"{where(request)}: {len(request.token_ids)} prompt tokens and max_new_tokens "
                f"{sampling.max_new_tokens} make {needed}, the sampler's context has {most}: skip the row or raise "
                "max_model_len"
            )


def check_expansion(request: Sample, came: Sequence[int] | None) -> None:
    """Raise a ValueError unless the sampler saw the tokens that training will see."""
    if came is None or list(came) != request.token_ids:
        raise ValueError(
            f"{where(request)}: the sampler expanded the prompt to {0 if came is None else len(came)} tokens, training "
            f"has {len(request.token_ids)}: do both load the same image processor, with the same pixel budget?"
        )


def finished(
    request: Sample, ids: Sequence[int], logprobs: Sequence[float], reason: str | None, *, processor: Any, version: int
) -> Sample:
    """The request with the answer behind it.

    Raises:
        RuntimeError: the sampler gave it up.
    """
    if reason not in ("stop", "length"):
        raise RuntimeError(f"group {request.group_id}: the sampler ended an answer with {reason!r}")
    text = decode(processor, ids)
    return append_response(request, list(ids), list(logprobs), finish_reason=reason, text=text, version=version)
