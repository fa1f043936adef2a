"""The steps of a decoding loop with a key-value cache: prefill, sample a token, drop finished rows, run the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlkit.data.samples import Sample
from rlkit.losses.logprobs import suppress_tokens
from rlkit.rollout.sampling import Sampling, sample_tokens, uniforms, with_routed_experts
from rlkit.vlm.inputs import gemma_frames_as_images, position_ids, position_spec, vision_kwargs


@dataclass
class RowParams:
    """Sampling parameters of a batch, one row for each of its B = len(requests) * n samples.

    Attributes:
        temperature: [B, 1]; 1 where decoding is greedy.
        greedy: [B] bool.
        max_new_tokens: [B].
        end_token_ids: [B, E], padded with -1.
        uniforms: [B, steps] random numbers, one for each token.
        any_greedy, any_sampled: of the batch, known without waiting for the device.
    """

    temperature: Tensor
    greedy: Tensor
    max_new_tokens: Tensor
    end_token_ids: Tensor
    uniforms: Tensor
    any_greedy: bool
    any_sampled: bool

    @property
    def steps(self) -> int:
        """Most tokens of a response."""
        return self.uniforms.shape[1]


def row_params(
    requests: Sequence[Sample],
    sampling: Sequence[Sampling],
    n: int,
    end_token_ids: Sequence[set[int]],
    device: torch.device,
) -> RowParams:
    """Sampling parameters of n rows for each request.

    Args:
        sampling: for each request.
        end_token_ids: tokens that end a response, for each request.
    """

    def rows(values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, device=device).repeat_interleave(n, 0)

    steps = max(params.max_new_tokens for params in sampling)
    most_ends = max(map(len, end_token_ids))
    streams = [
        uniforms(
            params.seed, [request.group_id], n, steps, sample_numbers=[request.number], offsets=[sum(request.mask)]
        )
        for request, params in zip(requests, sampling, strict=True)
    ]
    return RowParams(
        temperature=rows([params.temperature or 1.0 for params in sampling])[:, None],
        greedy=rows([params.temperature == 0 for params in sampling]),
        max_new_tokens=rows([params.max_new_tokens for params in sampling]),
        end_token_ids=rows([[*ids, *[-1] * (most_ends - len(ids))] for ids in end_token_ids]),
        uniforms=torch.cat(streams).to(device),
        any_greedy=any(params.temperature == 0 for params in sampling),
        any_sampled=any(params.temperature != 0 for params in sampling),
    )


@dataclass
class DecodingState:
    """The R rows of a batch that are in the key-value cache.

    Attributes:
        cache: of transformers.
        logits: [R, V] of the next token.
        rows: [R] their indices in the batch.
        finished: [R] bool: responses that have ended; such rows stay in the cache until many have.
        attention_mask: [R, T] bool.
        last_positions: [R] position of the last token; the three axes of 3D positions agree on text.
        position_axes: 3 for a model with 3D positions, else 1.
        prompt_shape: [requests, longest prompt]; shorter prompts are padded on the left.
    """

    cache: Any
    logits: Tensor
    rows: Tensor
    finished: Tensor
    attention_mask: Tensor
    last_positions: Tensor
    position_axes: int
    prompt_shape: torch.Size


def prefill(module: Any, requests: Sequence[Sample], n: int) -> DecodingState:
    """Run each prompt through the model once, and repeat its row of the cache for its n samples."""
    device = next(module.parameters()).device
    tokens, attention_mask = _left_pad([request.token_ids for request in requests])
    vision = [request.vision for request in requests]
    spec = position_spec(module.config)
    positions = position_ids(tokens, attention_mask, vision, spec)
    inputs = {"input_ids": tokens, "attention_mask": attention_mask.long(), "position_ids": positions}
    inputs = gemma_frames_as_images({**inputs, **vision_kwargs(tokens, vision, spec)}, module.config)
    # not `logits_to_keep=1`: a slice is not contiguous, and a CPU would multiply each row with its own copy of the head
    inputs["logits_to_keep"] = torch.tensor([tokens.shape[1] - 1])
    out = module(**{name: x.to(device) for name, x in inputs.items()}, use_cache=True)
    _select_rows(out.past_key_values, torch.arange(len(requests), device=device).repeat_interleave(n))
    last_positions = (positions.amax(0) if positions.ndim == 3 else positions)[:, -1]
    batch_size = len(requests) * n
    return DecodingState(
        cache=out.past_key_values,
        logits=out.logits[:, -1].repeat_interleave(n, 0),
        rows=torch.arange(batch_size, device=device),
        finished=torch.zeros(batch_size, dtype=torch.bool, device=device),
        attention_mask=attention_mask.to(device).repeat_interleave(n, 0),
        last_positions=last_positions.to(device).repeat_interleave(n, 0),
        position_axes=len(positions) if positions.ndim == 3 else 1,
        prompt_shape=tokens.shape,
    )


def _select_rows(cache: Any, rows: Tensor) -> None:
    """Make a cache of these rows of it, in this order; a row may be repeated.

    Qwen4 (experimental) keeps the positions of all tokens in the cache, [axes, B, T], which transformers does not
    reorder.
    """
    cache.reorder_cache(rows)
    if hasattr(cache, "position_ids"):
        cache.position_ids = cache.position_ids.index_select(1, rows)


def sample_next_tokens(
    state: DecodingState, params: RowParams, step: int, suppressed_token_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """The next token of each row in the cache, and its logprob in the distribution it was sampled from.

    Args:
        step: number of the token in its response, from 0 on.
        suppressed_token_ids: token ids that get probability 0.
    """
    logits = suppress_tokens(state.logits.float(), suppressed_token_ids)
    logprobs = (logits / params.temperature[state.rows]).log_softmax(-1)
    if not params.any_sampled:
        tokens = logprobs.argmax(-1)
    else:
        tokens = sample_tokens(logprobs, params.uniforms[state.rows, step])
        if params.any_greedy:
            tokens = logprobs.argmax(-1).where(params.greedy[state.rows], tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def mark_finished(state: DecodingState, params: RowParams, step: int, tokens: Tensor) -> None:
    """A row is finished with an end token, and at its `max_new_tokens`."""
    at_end = (tokens[:, None] == params.end_token_ids[state.rows]).any(1)
    state.finished = state.finished | at_end | (params.max_new_tokens[state.rows] == step + 1)


def drop_finished_rows(state: DecodingState, tokens: Tensor) -> Tensor:
    """Remove finished rows from the cache once they are half of it; each removal copies the cache.

    Returns:
        tokens of the rows that remain.
    """
    running = ~state.finished
    if running.sum() > len(running) // 2:
        return tokens
    _select_rows(state.cache, running.nonzero()[:, 0])
    state.rows, state.finished = state.rows[running], state.finished[running]
    state.attention_mask, state.last_positions = state.attention_mask[running], state.last_positions[running]
    return tokens[running]


def decode_one_token(module: Any, state: DecodingState, tokens: Tensor) -> None:
    """Run a new token of each row through the model: the cache grows by it, and `logits` are those of the next one."""
    state.attention_mask = torch.cat([state.attention_mask, state.attention_mask.new_ones(len(tokens), 1)], 1)
    state.last_positions = state.last_positions + 1
    positions = state.last_positions[:, None]
    if state.position_axes > 1:
        positions = positions.expand(state.position_axes, -1, -1)
    out = module(
        input_ids=tokens[:, None],
        attention_mask=state.attention_mask.long(),
        position_ids=positions,
        past_key_values=state.cache,
        use_cache=True,
    )
    state.logits = out.logits[:, -1]


class RecordedExperts:
    """Experts of all tokens of a batch, collected after each forward pass.

    Args:
        last_routing: experts of the tokens of the last forward pass, from `rlkit.vlm.routers.record_routing`.
        state: after the prefill.
        n: samples of each request.
    """

    def __init__(self, last_routing: Callable[[], Tensor], state: DecodingState, n: int) -> None:
        self.last_routing = last_routing
        prompts = last_routing().unflatten(0, state.prompt_shape)  # [requests, T, layers, K]
        self.parts = [prompts.repeat_interleave(n, 0).cpu()]

    def add_step(self, state: DecodingState) -> None:
        """Add those of a decoding step; rows that were dropped get -1."""
        experts = torch.full_like(self.parts[0][:, :1], -1)
        experts[state.rows.cpu(), 0] = self.last_routing().cpu()
        self.parts.append(experts)

    def add_to(self, samples: Sequence[Sample], prompt_lengths: Sequence[int]) -> list[Sample]:
        """The samples with their routed experts; those of the last token of a response are unknown.

        Args:
            samples: of all rows of the batch.
            prompt_lengths: of the row of each, without padding.
        """
        longest_prompt = self.parts[0].shape[1]
        return [
            with_routed_experts(sample, row[longest_prompt - length :][: len(sample.token_ids) - 1])
            for sample, row, length in zip(samples, torch.cat(self.parts, 1), prompt_lengths, strict=True)
        ]


def _left_pad(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Token ids of unequal lengths as one tensor.

    Returns:
        [B, T] int64, padded on the left with 0, and the attention mask, [B, T] bool.
    """
    width = max(len(row) for row in rows)
    tokens = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return tokens, torch.arange(width) >= (width - lengths)[:, None]
