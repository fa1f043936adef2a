"""How to sample, and the noise to sample with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit.data.samples import Sample

# (i, the n samples of request i of a call), told while other requests are still being written: once for each, in any
# order, from any thread. What a sample carries for training alone (routed experts) may still be missing.
Written = Callable[[int, list[Sample]], None]


@dataclass(frozen=True)
class Sampling:
    """How `generate` samples, all requests of a call alike or each its own way.

    Attributes:
        max_new_tokens: longest response.
        temperature: 0 takes the most likely token. There is no top-k and no top-p: the trainer scores the distribution
            that was sampled from, and it would not know of them.
        seed: any integers, say (run seed, step). The noise of a sample is keyed by them, its prompt and its number, and
            a sample that goes on goes on in its stream, so what is sampled depends neither on the batch, nor on how
            many ranks share it, nor on where it was interrupted.
        stop: tokens that end a response, beside the model's own end tokens; the one that did is part of it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    seed: tuple[int, ...] = (0,)
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: at least 1 expected, came {self.max_new_tokens}")
        if self.temperature < 0:
            raise ValueError(f"temperature: at least 0 expected, came {self.temperature}")


def of_each(sampling: Sampling | Sequence[Sampling], requests: Sequence[Sample]) -> list[Sampling]:
    """How to sample each request.

    Raises:
        ValueError: neither one for all nor one for each.
    """
    if isinstance(sampling, Sampling):
        return [sampling] * len(requests)
    if len(sampling) != len(requests):
        raise ValueError(f"sampling: one, or one for each of {len(requests)} requests expected, came {len(sampling)}")
    return list(sampling)


def uniforms(
    seed: Sequence[int],
    group_ids: Sequence[int],
    n: int,
    count: int,
    *,
    numbers: Sequence[int] | None = None,
    used: Sequence[int] | None = None,
) -> Tensor:
    """[len(group_ids) * n, count] uniform float64 numbers in [0, 1), a stream for each (seed, group id, sample).

    Args:
        numbers: of samples that go on: sample `number` of a group has the n streams from `number * n`.
        used: how many numbers of its stream each has used already.
    """
    first = numbers or [0] * len(group_ids)
    skip = used or [0] * len(group_ids)
    streams = [
        np.random.default_rng((*seed, group, number * n + i)).random(before + count)[before:]
        for group, number, before in zip(group_ids, first, skip, strict=True)
        for i in range(n)
    ]
    return torch.from_numpy(np.stack(streams)) if streams else torch.zeros(0, count, dtype=torch.float64)


def sample_tokens(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """[B] token ids by inversion: the first token whose cumulative probability exceeds the uniform number.

    Args:
        logprobs: [B, V] normalised.
        uniform: [B] in [0, 1).
    """
    cumulative = logprobs.double().exp().cumsum(-1)
    whole = cumulative[:, -1:].contiguous()
    index = torch.searchsorted(cumulative, uniform[:, None] * whole, right=True)
    last = torch.searchsorted(cumulative, whole)  # the last token that has a probability: rounding may point beyond it
    return index.minimum(last)[:, 0]


def end_tokens(tokenizer: Any, eos_token_id: int | Sequence[int] | None) -> list[int]:
    """Every token that ends a response: the tokenizer's, and `eos_token_id` of the model's generation config."""
    ends = [tokenizer.eos_token_id, *(eos_token_id if isinstance(eos_token_id, Sequence) else [eos_token_id])]
    if not (found := sorted({end for end in ends if end is not None})):
        raise ValueError("neither the tokenizer nor the model's generation config names an end token")
    return found


def with_routing(sample: Sample, routing: Tensor) -> Sample:
    """The sample with the experts that its tokens went to; what was known of it before this call stays.

    Args:
        routing: [<= T, layers, K] of the tokens that the sampler saw, from the first on; the last written one it did
            not.
    """
    known = sample.routed_experts
    return replace(sample, routed_experts=routing if known is None else torch.cat([known, routing[len(known) :]]))


def where(sample: Sample) -> str:
    """What an error calls a sample."""
    return sample.row.get("where", f"group {sample.group_id}")
