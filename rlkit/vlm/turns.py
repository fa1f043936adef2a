"""Where a response of the assistant lies in a rendered chat, and which tokens it becomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from os.path import commonprefix
from typing import Any, NamedTuple

from rlkit.data.messages import Message, is_text_alone, text_of
from rlkit.data.samples import Row
from rlkit.data.thinking_tags import THINKING_TAGS, thinking_tags_of
from rlkit.vlm.missing_text import missing_text
from rlkit.vlm.rendering import OBSERVATION, RESPONSE, render_unchecked, template_options

Render = Callable[..., str]  # (messages, add_generation_prompt=False) -> text, with the options of a row
CHANGED_PROMPT = (
    "expected a chat template that keeps the prompt when a response follows, got a change; set an option of the "
    "template (such as enable_thinking) to what the response has, or use another template (--chat_template FILE)"
)


class Turn(NamedTuple):
    """An assistant turn of a chat."""

    before: str  # the rendered chat up to the response
    ids: list[int]  # tokens of the response, with its end token
    after: str  # the rendered chat up to and including the end token, if the template writes one


def assistant_turn(
    processor: Any,
    row: Row,
    messages: Sequence[Message],
    response: Message,
    ends: Sequence[int],
    *,
    prefix: str,
    name: str,
    following: Sequence[Message] = (),
) -> Turn:
    """A response in the template's form, or as it is if the template changes it or the prompt.

    Args:
        messages: the chat before the response.
        ends: token ids that end a response.
        prefix: the beginning of the response that is part of the prompt.
        name: what errors call the response.
        following: the next message, if there is one.
    """
    tokenizer = getattr(processor, "tokenizer", processor)

    def write(chat: Sequence[Message], add_generation_prompt: bool = False) -> str:
        options = template_options(row)
        return render_unchecked(processor, chat, add_generation_prompt=add_generation_prompt, **options)

    try:  # `encode_prompt` has checked that the messages appear
        before = write(messages, add_generation_prompt=True) + prefix
        after = write([*messages, {**response, "content": prefix + text_of(response)}])
        text = after.removeprefix(before)
        wrong: str | None = CHANGED_PROMPT
        if after.startswith(before):
            wrong = missing_text(processor, text, [response], thinking_tags_of(row), name=name)
        if wrong is not None:
            text = _verbatim(write, row, messages, response, before, wrong)
    except ValueError as error:
        raise ValueError(f"{row.get('where', 'row')}: {error}") from error
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    n = next((i + 1 for i, token in enumerate(ids) if token in ends), None) if wrong is None else None
    if n is not None:
        end = tokenizer.decode(ids[n - 1 : n])
        return Turn(before, ids[:n], before + text[: text.index(end) + len(end)])
    written = _closing(write, tokenizer, messages, response, ends, following)
    return Turn(before, ids + (written or [end_token(tokenizer, ends)]), before + text + tokenizer.decode(written))


def end_token(tokenizer: Any, ends: Sequence[int]) -> int:
    """The tokenizer's end token, or the first of `ends` if it has none."""
    return ends[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id


def _verbatim(write: Render, row: Row, messages: Sequence[Message], response: Message, before: str, wrong: str) -> str:
    """A response of text as the policy would sample it after the prompt `before`.

    Raises:
        ValueError: `wrong`, for a response with calls or thinking in a field, or if the template writes something
            before responses; thinking that does not fit the prompt.
    """
    space = _space_before_responses(write, row, messages, before) if is_text_alone(response) else None
    if space is None:
        raise ValueError(wrong)
    return space + _as_sampled(row, before, text_of(response))


def _space_before_responses(write: Render, row: Row, messages: Sequence[Message], before: str) -> str | None:
    """White space that the template writes between the prompt and a response of text; None if it writes more there.

    Thinking tags may be there too; then, and if the template changes the prompt, a response follows without space.
    """
    head, found, _ = write([*messages, {"role": "assistant", "content": RESPONSE}]).rpartition(RESPONSE)
    added = head.removeprefix(commonprefix([head, before]))
    without_tags = added
    for tag in (*thinking_tags_of(row), *THINKING_TAGS):
        without_tags = without_tags.replace(tag.strip(), "")
    if not found or without_tags.strip():
        return None
    return added if head.startswith(before) and without_tags == added else ""


def _as_sampled(row: Row, before: str, response: str) -> str:
    """A response without what the prompt has begun or ended of its thinking."""
    begin, end = (tag.strip() for tag in thinking_tags_of(row))
    if before.rstrip().endswith(begin):
        if end not in response:
            raise ValueError(
                f"expected a response that ends the thinking which the prompt begins, got one without {end!r}; write "
                f"the thinking into the response, or end it in the prompt with --response_prefix {end!r} or an option "
                "of the template"
            )
        return response.lstrip().removeprefix(begin).lstrip("\n")
    if before.rstrip().endswith(end) and end in response:
        raise ValueError(
            f"expected a response without thinking after a prompt that ends with {end!r}, got {end!r} in it"
        )
    return response


def _closing(
    write: Render,
    tokenizer: Any,
    messages: Sequence[Message],
    response: Message,
    ends: Sequence[int],
    following: Sequence[Message],
) -> list[int]:
    """Tokens that the template writes between a response and the next message, up to the first of `ends`.

    Without a next message it is one of a tool if the response calls tools, else one of the user.
    """
    probe = {"role": "tool" if response.get("tool_calls") else "user", "content": OBSERVATION}
    chat = [*messages, {"role": "assistant", "content": RESPONSE}, *(following or [probe])]
    try:
        added = write(chat).rpartition(RESPONSE)[2]
    except ValueError:  # it refuses the probe
        return []
    ids = tokenizer(added, add_special_tokens=False)["input_ids"]
    special = [*takewhile(tokenizer.added_tokens_decoder.__contains__, ids)]
    n = next((i + 1 for i, token in enumerate(special) if token in ends), 0)
    return ids[:n]
