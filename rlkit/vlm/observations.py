"""Observations of an environment -> the tokens between two turns of the assistant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from PIL import Image

from rlkit.data.messages import Message
from rlkit.data.samples import Sample
from rlkit.data.thinking_tags import THINKING_TAGS, opens_thinking
from rlkit.vlm.encoding import encode_text
from rlkit.vlm.missing_text import missing_text
from rlkit.vlm.rendering import RESPONSE, render_unchecked

THOUGHT = "(rlkit's probe: a thought)"  # stands for that of the sampled turn, as RESPONSE stands for its response


def encode_observation(
    processor: Any,
    messages: Sequence[Message],
    reply: Message,
    images: Sequence[Image.Image] = (),
    *,
    tools: Any = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    thinking_tags: tuple[str, str] = THINKING_TAGS,
    response_prefix: str = "",
    ended_by: int | None = None,
) -> Sample:
    """The tokens between one assistant turn and the next: an environment's message, and the start of the next turn.

    Only the suffix that the chat template adds is tokenized, so tokens of earlier turns stay as they were sampled. It
    begins after the end token of the assistant's turn if the policy has sampled that token, else with what the template
    writes after the turn's text.

    Args:
        messages: the chat before the assistant's turn. The content of that turn does not matter.
        reply: the environment's message, with an image part for each of `images`.
        images: of the reply.
        tools, chat_template_kwargs: as for `render`.
        thinking_tags: what begins and ends thinking.
        response_prefix: the beginning of the next turn, which the policy does not sample.
        ended_by: the last sampled token of the assistant's turn; by default the template's end token.

    Returns:
        A sample without a response. `thinking_opened` in its row says whether the next turn begins with thinking.

    Raises:
        ValueError: the template rewrites earlier turns when a message follows (some remove thoughts), so the sampled
            tokens would no longer be in it; it leaves the reply out; it does not end a turn with a special token; or an
            image cannot be encoded.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    options = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
    template = f"chat template of {tokenizer.name_or_path or type(processor).__name__!r}"
    added = _text_after_response(processor, messages, reply, options, thinking_tags, template)
    if missing := missing_text(processor, added, [reply], thinking_tags, name="observation"):
        raise ValueError(f"{template}: {missing}")
    added += response_prefix
    sample = encode_text(processor, added, images)
    ending = [*takewhile(tokenizer.added_tokens_decoder.__contains__, sample.token_ids)]
    if not ending:
        first = tokenizer.decode(sample.token_ids[:1])
        raise ValueError(f"{template}: expected an end token after the assistant's turn, got {first!r}")
    last = ending[0] if ended_by is None else ended_by
    sampled = ending.index(last) + 1 if last in ending else 0
    rest = {name: getattr(sample, name)[sampled:] for name in ("token_ids", "compact_ids", "mask", "logprobs")}
    return replace(sample, row={"thinking_opened": opens_thinking(added, thinking_tags)}, **rest)


def _text_after_response(
    processor: Any,
    messages: Sequence[Message],
    reply: Message,
    options: Mapping[str, Any],
    thinking_tags: tuple[str, str],
    template: str,
) -> str:
    """What the template adds to the text of an assistant's turn if a reply follows, up to the next turn."""
    begin, end = thinking_tags
    turns = [*messages, {"role": "assistant", "content": f"{begin}\n{THOUGHT}\n{end}\n\n{RESPONSE}"}]
    before = render_unchecked(processor, turns, **options)
    after = render_unchecked(processor, [*turns, reply], add_generation_prompt=True, **options)
    head, has_response, _ = before.rpartition(RESPONSE)
    if not has_response or THOUGHT not in head or not after.startswith(head + RESPONSE):
        raise ValueError(
            f"{template}: expected earlier turns to stay as they were sampled when a message of the role "
            f"{reply['role']!r} follows, got rewritten ones; another role or another template is needed "
            "(--chat_template FILE)"
        )
    return after.removeprefix(head + RESPONSE)
