"""Chats -> text in the processor's chat template. No other module of rlkit calls a chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rlkit.data.messages import MEDIA, Message, parts_of, text_of
from rlkit.data.samples import Row
from rlkit.data.thinking_tags import THINKING_TAGS
from rlkit.vlm.chat_template import check_template_options, check_template_shows_tools, template_errors
from rlkit.vlm.missing_text import missing_text

# contents of messages that are rendered to see what a template writes around them
RESPONSE = "(rlkit's probe: a response)"
OBSERVATION = "(rlkit's probe: an observation)"


def render(
    processor: Any,
    messages: Sequence[Message],
    *,
    tools: Any = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = False,
    thinking_tags: tuple[str, str] = THINKING_TAGS,
) -> str:
    """The text of a chat in the processor's chat template.

    All that the messages contain must appear in the text in its order, see `missing_text`, except the thinking of
    assistant messages before the last message, which templates of reasoning models leave out.

    The content of each message is passed as a list of parts to processors, and as text to tokenizers. Other forms fail
    silently: templates of some vision families (LLaVA, SmolVLM) drop plain text, and those of text models print a list
    as Python does.

    Args:
        processor: a transformers processor, or the tokenizer of a text model.
        messages: as in rlkit.data.messages.
        tools: JSON schemas of functions, for templates that show them.
        chat_template_kwargs: options of the template itself, such as {"enable_thinking": False}.
        add_generation_prompt: begin the assistant's turn at the end.
        thinking_tags: what begins and ends thinking in the content of assistant messages.

    Raises:
        ValueError: no chat template, a template that fails, refuses the messages, leaves something out, does not have
            an option or does not show tools, or images, videos or audios for a text model. Templates run in
            transformers' sandbox, which has no limit of time.
    """
    options = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
    text = render_unchecked(processor, messages, add_generation_prompt=add_generation_prompt, **options)
    if missing := missing_text(processor, text, messages, thinking_tags):
        raise ValueError(missing)
    return text


def render_unchecked(
    processor: Any,
    messages: Sequence[Message],
    *,
    tools: Any = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = False,
) -> str:
    """`render`, but the template may leave out what the messages contain."""
    if getattr(processor, "chat_template", "") is None:
        raise ValueError(_no_template(processor))
    options = {**(chat_template_kwargs or {}), **({"tools": list(tools)} if tools else {})}
    check_template_options(processor, chat_template_kwargs or {}, with_tools=bool(tools))
    if tools:
        check_template_shows_tools(processor)
    shaped = [{**one, "content": _content_for(processor, one)} for one in messages]
    write = partial(
        processor.apply_chat_template, tokenize=False, add_generation_prompt=add_generation_prompt, **options
    )
    with template_errors():
        try:
            return write(shaped)
        except TypeError:  # a template that joins arguments to text, such as DeepSeek's, expects them as text
            return write([_with_arguments_as_text(one) for one in shaped])


def _with_arguments_as_text(message: Message) -> Message:
    """A message whose calls have their arguments as JSON text, as in OpenAI's format."""
    calls = [
        {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
        for call in message.get("tool_calls", ())
        if (function := call["function"])
    ]
    return {**message, "tool_calls": calls} if calls else message


def template_options(row: Row) -> dict[str, Any]:
    """What a row gives to the chat template beside its messages."""
    return {"tools": row.get("tools"), "chat_template_kwargs": row.get("chat_template_kwargs")}


def _no_template(processor: Any) -> str:
    """The error for a model without a chat template, or with one for its tokenizer alone."""
    expected = "chat template: expected one in chat_template.jinja among the model's files, got "
    if getattr(getattr(processor, "tokenizer", None), "chat_template", None):
        return expected + "one for the tokenizer alone; if it takes images, save it in that file"
    return expected + "none; copy that of the chat model, or write one"


def _content_for(processor: Any, message: Message) -> Any:
    """The content of a message as parts for a processor, and as text for a tokenizer."""
    parts = parts_of(message)
    if hasattr(processor, "tokenizer"):
        return parts
    for kind in MEDIA:
        if count := sum(part["type"] == kind for part in parts):
            raise ValueError(
                f"{kind}s: expected none, as the model's processor is a tokenizer, got {count} in a message"
            )
    return text_of(message)
