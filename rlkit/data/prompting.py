"""Additions to the prompts of a task: a system message, a template for the question, a prefix of the response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlkit.data.messages import Message, parts_of, prompt_of
from rlkit.data.samples import Row
from rlkit.data.tasks import Task, map_rows
from rlkit.data.thinking_tags import thinking_tags_of

PLACE = "{question}"


def with_prompt(
    task: Task,
    *,
    system_prompt: str = "",
    prompt_template: str = "",
    response_prefix: str = "",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    thinking_tags: Sequence[str] = (),
) -> Task:
    r"""A task with a system message, a prompt template, a response prefix and options of the model added to its rows.

        with_prompt(task, prompt_template="{question}\nResponse with a letter in \\boxed{}.",
        response_prefix="<think>\n")

    Args:
        task: held-out rows are changed too, so choose them first (`with_heldout`).
        system_prompt: the system message of every row.
        prompt_template: a text with `{question}` as the place of the last question, with its images, videos and audios.
            Other braces have no meaning.
        response_prefix: the beginning of every response. It is part of the prompt: the policy neither samples it nor is
            trained on it, and reward functions get the response without it.
        chat_template_kwargs: options of the model's chat template, such as {"enable_thinking": False}. Options that a
            row already has are kept.
        thinking_tags: what begins and ends the thinking in responses, such as ("[THINK]", "[/THINK]"); by default
            `<think>` and `</think>`. Tags that a row already has are kept.

    Raises:
        ValueError: `{question}` is not in the template exactly once, or `thinking_tags` are not two texts. A row that
            cannot be changed (it has a system message already, for example) is marked as unreadable, and skipped when
            it is encoded.
    """
    if prompt_template and prompt_template.count(PLACE) != 1:
        raise ValueError(f"prompt_template: expected a text with {PLACE} once, got {prompt_template!r}")
    tags = {"thinking_tags": thinking_tags_of({"thinking_tags": thinking_tags})} if thinking_tags else {}
    if not (system_prompt or prompt_template or response_prefix or chat_template_kwargs or tags):
        return task

    def row(raw: Row) -> Row:
        raw = raw if raw.get("thinking_tags") else {**raw, **tags}
        if chat_template_kwargs:
            raw = {**raw, "chat_template_kwargs": {**chat_template_kwargs, **(raw.get("chat_template_kwargs") or {})}}
        try:
            return _prompted(raw, system_prompt, prompt_template, response_prefix)
        except ValueError as error:
            return {**raw, "unreadable": str(error)}

    return map_rows(task, row)


def _prompted(row: Row, system_prompt: str, prompt_template: str, response_prefix: str) -> dict[str, Any]:
    if row.get("plain_text") is not None:
        raise ValueError("prompt_template: expected rows with a question, got plain text")
    messages, images, videos, audios = prompt_of(row)
    if system_prompt:
        if messages[0]["role"] == "system":
            raise ValueError("system_prompt: expected rows without a system message, got one that has it")
        messages = [{"role": "system", "content": system_prompt}, *messages]
    if prompt_template:
        last = max((i for i, one in enumerate(messages) if one["role"] == "user"), default=None)
        if last is None:
            raise ValueError("prompt_template: expected a message of the user, got none")
        messages = [*messages[:last], _apply_template(messages[last], prompt_template), *messages[last + 1 :]]
    added: dict[str, Any] = {"response_prefix": response_prefix} if response_prefix else {}
    added |= {name: found for name, found in (("videos", videos), ("audios", audios)) if found}
    return {**row, "messages": messages, "images": images, **added}


def _apply_template(message: Message, template: str) -> Message:
    before, _, after = template.partition(PLACE)
    if isinstance(message["content"], str):
        return {**message, "content": before + message["content"] + after}
    ends = ([{"type": "text", "text": text}] if text else [] for text in (before, after))
    return {**message, "content": [*next(ends), *parts_of(message), *next(ends)]}
