"""Sampling parameters, and random numbers that depend on the sample alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit.data.samples import Sample

# Called as on_finished(i, samples) with the n samples of request i of a call, while other requests are still being
# generated: once for each request, in any order, from any thread. What a sample carries for training alone (routed
# experts) may still be missing.
OnFinished = Callable[[int, list[Sample]], None]


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of `generate`: one for all requests of a call, or one for each.

    There is no top-k and no top-p: the trainer scores the full distribution, so the sampler has to sample from it.

    Attributes:
        max_new_tokens: longest response.
        temperature: 0 is greedy decoding.
        seed: any integers, e.g. (run seed, step). With the prompt's group id and the sample's number they determine
            the random numbers of a sample. Its tokens therefore depend neither on the batch nor on the number of ranks,
            and a continued sample resumes its random stream.
        stop: token ids that end a response, besides the model's own end tokens. The response includes its end token.
    """

    max_new_tokens: int
    temperature: float = 1.0
    seed: tuple[int, ...] = (0,)
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: expected at least 1, got {self.max_new_tokens}")
        if self.temperature < 0:
            raise ValueError(f"temperature: expected at least 0, got {self.temperature}")


def sampling_per_request(sampling: Sampling | Sequence[Sampling], requests: Sequence[Sample]) -> list[Sampling]:
    """Sampling parameters of each request.

    Raises:
        ValueError: a list that has not one for each request.
    """
    if isinstance(sampling, Sampling):
        return [sampling] * len(requests)
    if len(sampling) != len(requests):
        raise ValueError(f"sampling: expected one, or one for each of {len(requests)} requests, got {len(sampling)}")
    return list(sampling)


def uniforms(
    seed: Sequence[int],
    group_ids: Sequence[int],
    n: int,
    count: int,
    *,
    sample_numbers: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
) -> Tensor:
    """Uniform float64 numbers in [0, 1), from one random stream for each (seed, group id, sample).

    Args:
        seed: of the call.
        group_ids: of the requests.
        n: samples of each request.
        count: numbers of each sample, one for each token.
        sample_numbers: of requests that are continued samples; sample `number` of a group has the n streams from
            `number * n` on. 0 by default.
        offsets: how many numbers of its streams each request has used already. 0 by default.

    Returns:
        [len(group_ids) * n, count]
    """
    first_numbers = sample_numbers or [0] * len(group_ids)
    skipped = offsets or [0] * len(group_ids)
    streams = [
        np.random.default_rng((*seed, group_id, number * n + i)).random(offset + count)[offset:]
        for group_id, number, offset in zip(group_ids, first_numbers, skipped, strict=True)
        for i in range(n)
    ]
    return torch.from_numpy(np.stack(streams)) if streams else torch.zeros(0, count, dtype=torch.float64)


def sample_tokens(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Sample by inversion: the first token whose cumulative probability exceeds the uniform number.

    Args:
        logprobs: [B, V], normalised.
        uniform: [B] in [0, 1).

    Returns:
        [B] token ids.
    """
    cumulative = logprobs.double().exp().cumsum(-1)
    total = cumulative[:, -1:].contiguous()  # 1 up to rounding
    index = torch.searchsorted(cumulative, uniform[:, None] * total, right=True)
    last_possible = torch.searchsorted(cumulative, total)  # rounding may lead past the last token of probability > 0
    return index.minimum(last_possible)[:, 0]


def end_token_ids(tokenizer: Any, eos_token_id: int | Sequence[int] | None) -> list[int]:
    """Every token that ends a response: the tokenizer's, and `eos_token_id` of the model's generation config.

    Raises:
        ValueError: neither names one.
    """
    ids = [tokenizer.eos_token_id, *(eos_token_id if isinstance(eos_token_id, Sequence) else [eos_token_id])]
    if not (token_ids := sorted({token for token in ids if token is not None})):
        raise ValueError("eos_token_id: expected one in the tokenizer or in the model's generation config, got none")
    return token_ids


def model_end_token_ids(path: str, config: Any, tokenizer: Any) -> list[int]:
    """`end_token_ids` of a model. Without a generation_config.json its config.json names them, as in transformers.

    Args:
        path: directory or hub id of the model.
        config: its transformers configuration.
    """
    from transformers import GenerationConfig

    try:
        generation_config = GenerationConfig.from_pretrained(path)
    except OSError:
        generation_config = GenerationConfig.from_model_config(config)
    return end_token_ids(tokenizer, generation_config.eos_token_id)


def with_routed_experts(sample: Sample, routed_experts: Tensor) -> Sample:
    """The sample with the experts of its tokens; those that it had before this call stay.

    Args:
        routed_experts: [<= T, layers, K] of the tokens that the sampler ran through the model, from the first on. The
            last token of a response is not among them.
    """
    before = sample.routed_experts
    if before is not None:
        routed_experts = torch.cat([before, routed_experts[len(before) :]])
    return replace(sample, routed_experts=routed_experts)


def sample_name(sample: Sample) -> str:
    """How errors name a sample: by its data row, or by its group."""
    return sample.row.get("where", f"group {sample.group_id}")
