"""Prompts of rows -> samples without a response."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from rlkit.data.messages import prompt_of
from rlkit.data.samples import Row, Sample, prompt_sample
from rlkit.data.thinking_tags import opens_thinking, thinking_tags_of
from rlkit.vlm.audios import load_audios
from rlkit.vlm.encoding import encode_text
from rlkit.vlm.images import load_image
from rlkit.vlm.inputs import VIDEO_TIME_KEYS
from rlkit.vlm.rendering import render, template_options
from rlkit.vlm.videos import load_videos


def encode_prompt(
    processor: Any,
    row: Row,
    *,
    max_tokens: int | None = None,
    group_id: int = 0,
    dtype: torch.dtype | None = None,
) -> Sample:
    """The prompt of a row in the model's chat template, as a sample without a response.

    Args:
        processor: a transformers processor (or a tokenizer, for rows of text).
        row: `question` or `messages`, `images`, `videos` and `audios`; see rlkit.data.tasks. `tools` and
            `chat_template_kwargs` are passed to the template, and the prompt ends with `response_prefix`. A row with
            `plain_text` has an empty prompt. If the prompt ends with the first of the row's `thinking_tags`, by default
            `<think>`, the sample's row says so: `thinking_opened` is True.
        max_tokens: the longest prompt allowed, in expanded tokens.
        group_id: of the sample.
        dtype: of pixel values and other floating-point inputs except times; by default float32, as the processor makes
            them. A model that computes in bfloat16 rounds them anyway, and in bfloat16 they take half the memory.

    Raises:
        ValueError: an image, video or audio that cannot be read, a number of them that is not the number of places,
            no question, or a prompt that is too long. Prompts are never truncated, as that would cut an image's tokens.
    """
    where = row.get("where", "row")
    try:
        if row.get("plain_text") is not None and not row.get("unreadable"):
            return prompt_sample([], row=row, group_id=group_id)
        messages, image_sources, video_sources, audio_sources = prompt_of(row)
        images = [load_image(source) for source in image_sources]
        videos, audios = load_videos(processor, video_sources), load_audios(processor, audio_sources)
        options = {"thinking_tags": thinking_tags_of(row), **template_options(row)}
        text = render(processor, messages, add_generation_prompt=True, **options)
        text += row.get("response_prefix") or ""
        thinking_opened = opens_thinking(text, thinking_tags_of(row))
        sample = encode_text(processor, text, images, videos, audios)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if max_tokens is not None and (n := len(sample.token_ids)) > max_tokens:
        raise ValueError(f"{where}: expected a prompt of at most {max_tokens} tokens, got {n}")
    if dtype is not None:
        vision = {
            name: x.to(dtype) if x.is_floating_point() and name not in VIDEO_TIME_KEYS else x
            for name, x in sample.vision.items()
        }
        sample = replace(sample, vision=vision)
    if thinking_opened:
        row = {**row, "thinking_opened": True}
    return replace(sample, row=row, group_id=group_id)


def encode_prompts(
    processor: Any, rows: Iterable[tuple[int, Row]], *, max_tokens: int | None = None
) -> tuple[list[Sample], list[str]]:
    """Prompts of (group id, row) pairs, and an error message for each row that was skipped."""
    samples, skipped = [], []
    for group_id, row in rows:
        try:
            samples.append(encode_prompt(processor, row, max_tokens=max_tokens, group_id=group_id))
        except ValueError as error:
            skipped.append(str(error))
    return samples, skipped
