"""Chats -> tokens, by the processor's own chat template: prompts, replies of an environment, and answers to learn from.

Nothing else in rlkit calls a chat template.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from rlkit.data.messages import Message, prompt_of, text_of
from rlkit.data.samples import Row, Sample, append_response, expand_placeholders, expanded_lengths, prompt_sample
from rlkit.vlm.processors import encode_text, load_image


def render(
    processor: Any, messages: Sequence[Message], *, tools: Any = None, add_generation_prompt: bool = False
) -> str:
    """A chat as the text that the processor's chat template makes of it.

    Templates differ in the contents that they read: those of some vision families (LLaVA, SmolVLM) drop plain text
    without a word, and those of text models write a list of parts as Python would. So a model that sees is given parts,
    and another one text.

    Args:
        processor: a transformers processor, or the tokenizer of a text model.
        messages: as of rlkit.data.messages.
        tools: JSON schemas of functions, for templates that show them.
        add_generation_prompt: open the assistant's turn.

    Raises:
        ValueError: no chat template, one that refuses the messages, or images for a model that cannot see.
    """
    from jinja2 import TemplateError

    sees = hasattr(processor, "tokenizer")
    shaped = [{**one, "content": _as_parts(one) if sees else _as_text(one)} for one in messages]
    options = {"tools": list(tools)} if tools else {}
    try:
        return processor.apply_chat_template(
            shaped, tokenize=False, add_generation_prompt=add_generation_prompt, **options
        )
    except TemplateError as error:
        raise ValueError(f"chat template: {error}") from error


def _as_parts(message: Message) -> list[Any]:
    content = message["content"]
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content)


def _as_text(message: Message) -> str:
    content = message["content"]
    if not isinstance(content, str) and (images := sum(part["type"] == "image" for part in content)):
        raise ValueError(f"images: expected none, as the model's processor is a tokenizer, got {images} in a message")
    return text_of(message)


def encode_prompt(processor: Any, row: Row, *, max_tokens: int | None = None, group_id: int = 0) -> Sample:
    """The prompt of a row, in the model's chat template.

    Args:
        processor: a transformers processor (or a tokenizer, for rows without images).
        row: `question` or `messages`, and `images`; see rlkit.data.tasks. `tools` are shown by the template, an
            `answer_prefix` begins the answer. A row of `plain_text` has an empty prompt.
        max_tokens: longest prompt, in expanded tokens.

    Raises:
        ValueError: an image that cannot be read, images without a place for them or places without an image,
            no question, or a prompt that is too long (it is never cut: half an image's tokens are no image).
    """
    where = row.get("where", "row")
    try:
        if row.get("plain_text") is not None and not row.get("unreadable"):
            return prompt_sample([], row=row, group_id=group_id)
        messages, sources = prompt_of(row)
        images = [load_image(source) for source in sources]
        text = render(processor, messages, tools=row.get("tools"), add_generation_prompt=True)
        sample = encode_text(processor, text + (row.get("answer_prefix") or ""), images)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if max_tokens is not None and (n := len(sample.token_ids)) > max_tokens:
        raise ValueError(f"{where}: the prompt has {n} tokens, more than the limit of {max_tokens}")
    return replace(sample, row=row, group_id=group_id)


def encode_prompts(
    processor: Any, rows: Iterable[tuple[int, Row]], *, max_tokens: int | None = None
) -> tuple[list[Sample], list[str]]:
    """Prompts of (group id, row) pairs, and one message for each row that had to be skipped."""
    samples, skipped = [], []
    for group_id, row in rows:
        try:
            samples.append(encode_prompt(processor, row, max_tokens=max_tokens, group_id=group_id))
        except ValueError as error:
            skipped.append(str(error))
    return samples, skipped


# --- replies of an environment

THOUGHT, ANSWER = "(rlkit's probe: a thought)", "(rlkit's probe: an answer)"  # a template must keep both


def encode_observation(
    processor: Any,
    messages: Sequence[Message],
    reply: Message,
    images: Sequence[Image.Image] = (),
    *,
    tools: Any = None,
) -> Sample:
    """What the chat template puts between an assistant's turn and its next: a reply, and the next turn opened.

    The text is the suffix that the template adds, so no token of an earlier turn is made again. It begins behind the
    end token of the turn, which the policy has sampled.

    Args:
        messages: the chat before the assistant's turn. What the turn says makes no difference.
        reply: the message that follows it, with a part for each of `images`.
        images: of the reply.
        tools: as for `render`.

    Raises:
        ValueError: the template rewrites earlier turns when a message follows (some drop thoughts): the tokens that
            were sampled would not be those that it shows; or it ends a turn with no token of its own; or an image
            cannot be encoded.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    turns = [*messages, {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"}]
    before = render(processor, turns, tools=tools)
    after = render(processor, [*turns, reply], tools=tools, add_generation_prompt=True)
    whose = f"chat template of {tokenizer.name_or_path or type(processor).__name__!r}"
    if not after.startswith(before) or THOUGHT not in before or ANSWER not in before:
        raise ValueError(
            f"{whose}: expected earlier turns to stay as they were sampled when a message of the role "
            f"{reply['role']!r} follows, got rewritten ones; another role or another template is needed"
        )
    sample = encode_text(processor, after[before.rindex(ANSWER) + len(ANSWER) :], images)
    if sample.token_ids[0] not in tokenizer.added_tokens_decoder:
        first = tokenizer.decode(sample.token_ids[:1])
        raise ValueError(f"{whose}: expected an end token behind the assistant's turn, got {first!r}")
    behind = {name: getattr(sample, name)[1:] for name in ("token_ids", "compact_ids", "mask", "logprobs")}
    return replace(sample, **behind)


# --- answers to learn from


def encode_answers(
    asked: Sample, processor: Any, answers: Sequence[str | Message], ends: Sequence[int], max_tokens: int
) -> list[Sample]:
    """A prompt with each of several answers behind it, as one sequence each, with the answer in its mask.

    Args:
        asked: the prompt, of `encode_prompt`; the sequences share its image tensors.
        processor: a transformers processor or tokenizer with a chat template.
        answers: texts, or messages of the assistant.
        ends: tokens that end an answer. One is in the mask; where the template writes none, it is the tokenizer's own.
        max_tokens: longest sequence.

    Raises:
        ValueError: a longer sequence, or a chat template that changes the prompt when an answer follows.
    """
    messages, _ = prompt_of(asked.row)
    samples = []
    for answer in answers:
        said = _said(answer, asked.row)
        ids = _turn(processor, asked.row, messages, said, ends, asked.row.get("answer_prefix") or "").ids
        samples.append(append_response(asked, ids, [0.0] * len(ids), text=text_of(said)))
    for sample in samples:
        _check_length(sample, max_tokens)
    return samples


def encode_chat(asked: Sample, processor: Any, ends: Sequence[int], max_tokens: int) -> Sample:
    """A whole chat as one sequence with every message of the assistant in its mask, each with the token that ends it.

    A row of `plain_text` is its text without a chat template, all of it in the mask but the first token, which nothing
    predicts.

    Args:
        asked: the prompt, of `encode_prompt`; its row has the last answer as `completion`, see rlkit.data.load_chats.
        processor, ends, max_tokens: as in `encode_answers`.

    Raises:
        ValueError: as `encode_answers`; an earlier answer that the chat template changes when messages follow.
    """
    tokenizer, row = getattr(processor, "tokenizer", processor), asked.row
    if (text := row.get("plain_text")) is not None:
        ids = list(tokenizer(text)["input_ids"])
        ids += [tokenizer.eos_token_id] * (ids[-1:] != [tokenizer.eos_token_id])
        sample = replace(
            prompt_sample(ids, row=row, group_id=asked.group_id, text=text), mask=[False] + [True] * len(ids[1:])
        )
        _check_length(sample, max_tokens)
        return sample
    before, _ = prompt_of(row)
    messages = [*before, _said(row.get("completion"), row)]
    compact: list[int] = []
    mask: list[bool] = []
    rest: list[int] = []
    done = ""
    for i, one in enumerate(messages):
        if one["role"] != "assistant":
            continue
        prefix = row.get("answer_prefix") or "" if i == len(before) else ""
        turn = _turn(processor, row, messages[:i], one, ends, prefix)
        if not turn.before.startswith(done):
            raise ValueError(f"{_where(row)}: the chat template changes an answer when messages follow")
        question = rest + tokenizer(turn.before.removeprefix(done), add_special_tokens=False)["input_ids"]
        compact += question + turn.ids
        mask += [False] * len(question) + [True] * len(turn.ids)
        done, rest = turn.after, turn.rest
    ids = expand_placeholders(compact, asked.placeholders)
    marks = np.repeat(mask, expanded_lengths(compact, asked.placeholders)).tolist()
    sample = replace(asked, token_ids=ids, compact_ids=compact, mask=marks, logprobs=[0.0] * len(ids))
    _check_length(sample, max_tokens)
    return sample


def _said(answer: str | Message | None, row: Row) -> Message:
    if isinstance(answer, str):
        return {"role": "assistant", "content": answer}
    if not isinstance(answer, Mapping):
        raise ValueError(f"{_where(row)}: expected an answer to learn from, got {answer!r}")
    return answer


def _check_length(sample: Sample, max_tokens: int) -> None:
    if (n := len(sample.token_ids)) > max_tokens:
        raise ValueError(f"{_where(sample.row)}: {n} tokens with its answer, more than the limit of {max_tokens}")


class _Turn(NamedTuple):
    """An answer in its chat."""

    before: str  # the text up to it
    ids: list[int]  # its tokens, with the one that ends it
    rest: list[int]  # what the template writes behind that
    after: str  # the text with all of it


def _turn(
    processor: Any, row: Row, messages: Sequence[Message], answer: Message, ends: Sequence[int], prefix: str
) -> _Turn:
    tokenizer, tools = getattr(processor, "tokenizer", processor), row.get("tools")
    answer = {**answer, "content": prefix + text_of(answer)}
    before = render(processor, messages, tools=tools, add_generation_prompt=True) + prefix
    after = render(processor, [*messages, answer], tools=tools)
    if not after.startswith(before):
        raise ValueError(f"{_where(row)}: the chat template changes the prompt when an answer follows")
    ids = tokenizer(after.removeprefix(before), add_special_tokens=False)["input_ids"]
    end = next((i + 1 for i, token in enumerate(ids) if token in ends), None)
    if end is None:
        return _Turn(before, [*ids, tokenizer.eos_token_id], [], after)
    return _Turn(before, ids[:end], ids[end:], after)


def _where(row: Row) -> str:
    return str(row.get("where", "row"))
