"""Responses to train on -> sequences whose mask says which tokens the assistant wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlkit.data.messages import Message, prompt_of, text_of
from rlkit.data.placeholders import expand_placeholders, expanded_lengths
from rlkit.data.samples import Row, Sample, append_response, prompt_sample
from rlkit.vlm.frames import text_with_frames
from rlkit.vlm.processors import FRAMES_AS_IMAGES
from rlkit.vlm.turns import assistant_turn, end_token

RESPONSE_COLUMNS = ("chosen", "rejected", "completion")  # of rows that have been read


def encode_responses(
    prompt: Sample, processor: Any, responses: Sequence[str | Message], ends: Sequence[int], max_tokens: int
) -> list[Sample]:
    """One sequence per response: the prompt and the response, with the response in the mask.

    Args:
        prompt: from `encode_prompt`; the sequences share its image tensors.
        processor: a transformers processor or tokenizer with a chat template.
        responses: texts, or messages of the assistant.
        ends: token ids that end a response. The first one is in the mask. If the template writes none after the last
            message, it is the one that the template writes before the next message, or else the tokenizer's end token,
            or the first of these.
        max_tokens: the longest sequence allowed.

    A template may write a response otherwise than the policy samples it after the prompt: R1's removes the thinking
    from a response, and others write no empty thought where the prompt has one. A response of text alone is then
    appended to the prompt as it is, with the template's end token.

    Raises:
        ValueError: a sequence that is too long; thinking that the prompt begins and the response does not end; or a
            message with tool calls or thinking that the template leaves out, or for which it changes the prompt.
    """
    messages, row = prompt_of(prompt.row).messages, prompt.row
    prefix = row.get("response_prefix") or ""
    samples = []
    for response in responses:
        reply = _assistant_message(response, row)
        name = next((name for name in RESPONSE_COLUMNS if row.get(name) == response), "response")
        ids = assistant_turn(processor, row, messages, reply, ends, prefix=prefix, name=name).ids
        samples.append(append_response(prompt, ids, [0.0] * len(ids), text=text_of(reply)))
    for sample in samples:
        _check_length(sample, max_tokens)
    return samples


def encode_chat(
    prompt: Sample, processor: Any, ends: Sequence[int], max_tokens: int, *, last_only: bool = False
) -> Sample:
    """A whole chat as one sequence, with every assistant message and its end token in the mask.

    A row with `plain_text` is tokenized without a chat template. Its mask has all tokens but the first, which nothing
    predicts.

    Args:
        prompt: from `encode_prompt`; its row has the last response as `completion`, see rlkit.data.load_chats.
        processor, ends, max_tokens: as in `encode_responses`.
        last_only: only the last assistant message is in the mask. Earlier ones are as the template writes them.

    Raises:
        ValueError: as in `encode_responses`, or a chat template that changes an earlier response when messages follow.
    """
    if prompt.row.get("plain_text") is not None:
        sample = _encode_plain_text(prompt, processor, ends)
    else:
        compact, mask = _tokens_of_chat(prompt, processor, ends, last_only)
        ids = expand_placeholders(compact, prompt.placeholders)
        mask = np.repeat(mask, expanded_lengths(compact, prompt.placeholders)).tolist()
        sample = replace(prompt, token_ids=ids, compact_ids=compact, mask=mask, logprobs=[0.0] * len(ids))
    _check_length(sample, max_tokens)
    return sample


def _encode_plain_text(prompt: Sample, processor: Any, ends: Sequence[int]) -> Sample:
    tokenizer, text = getattr(processor, "tokenizer", processor), prompt.row["plain_text"]
    ids, end = list(tokenizer(text)["input_ids"]), end_token(tokenizer, ends)
    ids += [end] * (ids[-1:] != [end])
    sample = prompt_sample(ids, row=prompt.row, group_id=prompt.group_id, text=text)
    return replace(sample, mask=[False] + [True] * len(ids[1:]))


def _tokens_of_chat(
    prompt: Sample, processor: Any, ends: Sequence[int], last_only: bool
) -> tuple[list[int], list[bool]]:
    """The compact tokens of a whole chat, and which of them are trained."""
    tokenizer, row = getattr(processor, "tokenizer", processor), prompt.row
    before = prompt_of(row).messages
    messages = [*before, _assistant_message(row.get("completion"), row)]
    prefix = row.get("response_prefix") or ""  # of the last response
    videos = iter(prompt.videos)
    compact: list[int] = []
    mask: list[bool] = []
    rendered = ""  # the chat up to and including the last response and its end token
    for i, one in enumerate(messages):
        is_last = i == len(before)
        if one["role"] != "assistant" or (last_only and not is_last):
            continue
        turn = assistant_turn(
            processor,
            row,
            messages[:i],
            one,
            ends,
            prefix=prefix if is_last else "",
            name=f"messages[{i}]",
            following=messages[i + 1 : i + 2],
        )
        if not turn.before.startswith(rendered):
            raise ValueError(
                f"{row.get('where', 'row')}: expected a chat template that keeps a response when messages follow, got "
                "a change; train on the last response alone (sft.py has --train_on last), or use a template that keeps "
                "all (--chat_template FILE)"
            )
        between = turn.before.removeprefix(rendered)
        if prompt.videos and type(processor).__name__ in FRAMES_AS_IMAGES:
            between = text_with_frames(processor, between, videos)
        context = tokenizer(between, add_special_tokens=False)["input_ids"]
        compact += context + turn.ids
        mask += [False] * len(context) + [True] * len(turn.ids)
        rendered = turn.after
    return compact, mask


def _assistant_message(response: str | Message | None, row: Row) -> Message:
    if isinstance(response, str):
        return {"role": "assistant", "content": response}
    if not isinstance(response, Mapping):
        raise ValueError(f"{row.get('where', 'row')}: expected a response to train on, got {response!r}")
    return response


def _check_length(sample: Sample, max_tokens: int) -> None:
    if (n := len(sample.token_ids)) > max_tokens:
        where = sample.row.get("where", "row")
        raise ValueError(f"{where}: expected at most {max_tokens} tokens with the response, got {n}")
