"""Chats -> tokens with the processor's chat template: prompts, observations of an environment, and answers to train on.

No other module of rlkit calls a chat template.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import takewhile
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from rlkit.data.messages import (
    MEDIA,
    Message,
    is_text_alone,
    prompt_of,
    text_of,
)
from rlkit.data.samples import (
    THINKING_TAGS,
    Row,
    Sample,
    append_response,
    expand_placeholders,
    expanded_lengths,
    prompt_sample,
    thinking_tags_of,
)
from rlkit.vlm.audios import load_audios
from rlkit.vlm.encoding import encode_text
from rlkit.vlm.frames import text_with_frames
from rlkit.vlm.images import load_image
from rlkit.vlm.inputs import VIDEO_TIME_KEYS
from rlkit.vlm.missing_text import missing_text
from rlkit.vlm.processors import FRAMES_AS_IMAGES
from rlkit.vlm.videos import load_videos

SET_BY_RENDER = frozenset({"messages", "add_generation_prompt"})
FUNCTIONS_OF_TRANSFORMERS = frozenset({"raise_exception", "strftime_now"})  # which it gives to every template


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
    text = _render_unchecked(processor, messages, add_generation_prompt=add_generation_prompt, **options)
    if missing := missing_text(processor, text, messages, thinking_tags):
        raise ValueError(missing)
    return text


def _render_unchecked(
    processor: Any,
    messages: Sequence[Message],
    *,
    tools: Any,
    chat_template_kwargs: Mapping[str, Any] | None,
    add_generation_prompt: bool = False,
) -> str:
    """`render`, but the template may leave out what the messages contain."""
    has_vision = hasattr(processor, "tokenizer")
    if getattr(processor, "chat_template", "") is None:
        raise ValueError(_no_template(processor))
    shaped = [{**one, "content": _as_parts(one) if has_vision else _as_text(one)} for one in messages]
    options = {**(chat_template_kwargs or {}), **({"tools": list(tools)} if tools else {})}
    check_template_options(processor, chat_template_kwargs or {}, with_tools=bool(tools))
    if tools:
        _check_template_shows_tools(processor)
    with _template_errors():
        return processor.apply_chat_template(
            shaped, tokenize=False, add_generation_prompt=add_generation_prompt, **options
        )


def set_chat_template(processor: Any, file: str | Path) -> None:
    """Replaces the chat template of a processor and of its tokenizer, with which it is saved.

    Raises:
        ValueError: no such file, or one that is no Jinja template.
    """
    try:
        template = Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat_template: expected a Jinja file, got {str(file)!r}: {error}") from error
    with _template_errors():
        _template_variables(template)
    processor.chat_template = getattr(processor, "tokenizer", processor).chat_template = template


def check_template_options(processor: Any, options: Mapping[str, Any], *, with_tools: bool | None = None) -> None:
    """Raise a ValueError for options that the chat template does not read: it would ignore them without a word.

    Args:
        with_tools: whether the chat has tools; by default unknown, and an option of either template will do.
    """
    cases = [False, True] if with_tools is None else [with_tools]
    of_cases = [_options_of_template(processor, with_tools=case) for case in cases if options]
    known = frozenset[str]().union(*(names for names in of_cases if names is not None))
    wrong = [name for name in options if name not in known]
    if wrong and None not in of_cases:
        names = ", ".join(sorted(known)) or "none"
        raise ValueError(
            f"chat_template_kwargs: expected options of the model's chat template ({names}), got {wrong[0]!r}"
        )


def _check_template_shows_tools(processor: Any) -> None:
    known = _options_of_template(processor, with_tools=True)
    if known is not None and "tools" not in known:
        tokenizer = getattr(processor, "tokenizer", processor)
        raise ValueError(
            f"tools: expected a chat template that shows them, got that of {tokenizer.name_or_path!r}, which does not; "
            "take a model whose template has tools, or describe them in a system message and remove the column"
        )


def _options_of_template(processor: Any, *, with_tools: bool) -> frozenset[str] | None:
    """Names that the chat template reads and that rlkit does not set; None without a template.

    Of several templates, transformers renders "tool_use" for a tokenizer with tools, and otherwise "default".
    """
    template = getattr(processor, "chat_template", None)
    if isinstance(template, Mapping):
        is_tokenizer = not hasattr(processor, "tokenizer")
        tool_template = template.get("tool_use") if with_tools and is_tokenizer else None
        template = tool_template or template.get("default")
    if not template:
        return None
    with _template_errors():
        return _template_variables(template) - SET_BY_RENDER


@cache
def _template_variables(template: str) -> frozenset[str]:
    """Variables that a chat template can be given.

    A name that the template assigns is one only if it does so where the name is not defined, or as its default.
    """
    from jinja2 import nodes
    from jinja2.meta import find_undeclared_variables
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    without_marks = re.sub(r"{%[-+]?\s*(end)?generation\s*[-+]?%}", "", template)  # a statement of transformers' own
    parsed = environment.parse(without_marks)
    assigned = {name.name for name in parsed.find_all(nodes.Name) if name.ctx == "store"}
    optional = set()
    deciding = [(node, node.test) for node in parsed.find_all(nodes.If)]
    for node, expression in [*deciding, *((node, node.node) for node in parsed.find_all(nodes.Assign))]:
        set_here = {name.name for name in node.find_all(nodes.Name) if name.ctx == "store"}
        optional |= _names_tested(expression) & set_here
    return frozenset(find_undeclared_variables(parsed) - FUNCTIONS_OF_TRANSFORMERS - (assigned - optional))


def _names_tested(expression: Any) -> set[str]:
    """Names of which an expression of a template tests whether they are defined, or for which it has a default."""
    from jinja2 import nodes

    root = nodes.Output([expression])  # `find_all` leaves out the node itself
    tests = [*root.find_all(nodes.Test), *root.find_all(nodes.Filter)]
    of_presence = [found.node for found in tests if found.name in ("defined", "undefined", "default", "d")]
    return {node.name for node in of_presence if isinstance(node, nodes.Name)}


@contextmanager
def _template_errors() -> Iterator[None]:
    """What a template can fail with, as a ValueError."""
    from jinja2 import TemplateError

    try:
        yield
    except (TemplateError, ArithmeticError, LookupError, MemoryError, RecursionError, TypeError) as error:
        raise ValueError(f"chat template: {str(error) or type(error).__name__}") from error


def _no_template(processor: Any) -> str:
    """The error for a model without a chat template, or with one for its tokenizer alone."""
    expected = "chat template: expected one in chat_template.jinja among the model's files, got "
    if getattr(getattr(processor, "tokenizer", None), "chat_template", None):
        return expected + "one for the tokenizer alone; if it takes images, save it in that file"
    return expected + "none; copy that of the chat model, or write one"


def _as_parts(message: Message) -> list[Any]:
    content = message["content"]
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content)


def _as_text(message: Message) -> str:
    content = message["content"]
    for kind in MEDIA if not isinstance(content, str) else ():
        if count := sum(part["type"] == kind for part in content):
            raise ValueError(
                f"{kind}s: expected none, as the model's processor is a tokenizer, got {count} in a message"
            )
    return text_of(message)


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
            `chat_template_kwargs` are passed to the template, and the prompt ends with `answer_prefix`. A row with
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
        text += row.get("answer_prefix") or ""
        thinking_opened = text.rstrip().endswith(thinking_tags_of(row)[0].rstrip())
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


# --- observations of an environment

# an assistant turn that stands in for the sampled one; a template must keep both parts
THOUGHT, ANSWER = "(rlkit's probe: a thought)", "(rlkit's probe: an answer)"
OBSERVATION = "(rlkit's probe: an observation)"  # stands in for a message after it


def encode_observation(
    processor: Any,
    messages: Sequence[Message],
    reply: Message,
    images: Sequence[Image.Image] = (),
    *,
    tools: Any = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    thinking_tags: tuple[str, str] = THINKING_TAGS,
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
        ended_by: the last sampled token of the assistant's turn; by default the template's end token.

    Raises:
        ValueError: the template rewrites earlier turns when a message follows (some remove thoughts), so the sampled
            tokens would no longer be in it; it leaves the reply out; it does not end a turn with a special token; or an
            image cannot be encoded.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    begin, end = thinking_tags
    turns = [*messages, {"role": "assistant", "content": f"{begin}\n{THOUGHT}\n{end}\n\n{ANSWER}"}]
    options = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
    before = _render_unchecked(processor, turns, **options)
    after = _render_unchecked(processor, [*turns, reply], add_generation_prompt=True, **options)
    template = f"chat template of {tokenizer.name_or_path or type(processor).__name__!r}"
    head, has_answer, _ = before.rpartition(ANSWER)
    if not has_answer or THOUGHT not in head or not after.startswith(head + ANSWER):
        raise ValueError(
            f"{template}: expected earlier turns to stay as they were sampled when a message of the role "
            f"{reply['role']!r} follows, got rewritten ones; another role or another template is needed "
            "(--chat_template FILE)"
        )
    added = after.removeprefix(head + ANSWER)
    if missing := missing_text(processor, added, [reply], thinking_tags, name="observation"):
        raise ValueError(f"{template}: {missing}")
    sample = encode_text(processor, added, images)
    if sample.token_ids[0] not in tokenizer.added_tokens_decoder:
        first = tokenizer.decode(sample.token_ids[:1])
        raise ValueError(f"{template}: expected an end token after the assistant's turn, got {first!r}")
    ending = list(takewhile(tokenizer.added_tokens_decoder.__contains__, sample.token_ids))
    sampled = 1 if ended_by is None else ending.index(ended_by) + 1 if ended_by in ending else 0
    after_end = {name: getattr(sample, name)[sampled:] for name in ("token_ids", "compact_ids", "mask", "logprobs")}
    return replace(sample, **after_end)


# --- answers to train on

ANSWER_COLUMNS = ("chosen", "rejected", "completion")  # of rows that have been read


def encode_answers(
    prompt: Sample, processor: Any, answers: Sequence[str | Message], ends: Sequence[int], max_tokens: int
) -> list[Sample]:
    """One sequence per answer: the prompt and the answer, with the answer in the mask.

    Args:
        prompt: from `encode_prompt`; the sequences share its image tensors.
        processor: a transformers processor or tokenizer with a chat template.
        answers: texts, or messages of the assistant.
        ends: token ids that end an answer. The first one is in the mask. If the template writes none after the last
            message, it is the one that the template writes before the next message, or else the tokenizer's end token,
            or the first of these.
        max_tokens: the longest sequence allowed.

    A template may write an answer otherwise than the policy samples it after the prompt: R1's removes the thinking from
    an answer, and others write no empty thought where the prompt has one. An answer of text alone is then appended to
    the prompt as it is, with the template's end token.

    Raises:
        ValueError: a sequence that is too long; thinking that the prompt begins and the answer does not end; or a
            message with tool calls or thinking that the template leaves out, or for which it changes the prompt.
    """
    messages = prompt_of(prompt.row).messages
    samples = []
    for answer in answers:
        reply = _assistant_message(answer, prompt.row)
        name = next((name for name in ANSWER_COLUMNS if prompt.row.get(name) == answer), "answer")
        prefix = prompt.row.get("answer_prefix") or ""
        ids = _turn(processor, prompt.row, messages, reply, ends, prefix=prefix, name=name).ids
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
        prompt: from `encode_prompt`; its row has the last answer as `completion`, see rlkit.data.load_chats.
        processor, ends, max_tokens: as in `encode_answers`.
        last_only: only the last assistant message is in the mask. Earlier ones are as the template writes them.

    Raises:
        ValueError: as in `encode_answers`, or a chat template that changes an earlier answer when messages follow.
    """
    tokenizer, row = getattr(processor, "tokenizer", processor), prompt.row
    if (text := row.get("plain_text")) is not None:
        ids = list(tokenizer(text)["input_ids"])
        end = _end_token(tokenizer, ends)
        ids += [end] * (ids[-1:] != [end])
        sample = replace(
            prompt_sample(ids, row=row, group_id=prompt.group_id, text=text), mask=[False] + [True] * len(ids[1:])
        )
        _check_length(sample, max_tokens)
        return sample
    before = prompt_of(row).messages
    messages = [*before, _assistant_message(row.get("completion"), row)]
    compact: list[int] = []
    mask: list[bool] = []
    rendered = ""  # the chat up to and including the last answer and its end token
    videos = iter(prompt.videos)
    for i, one in enumerate(messages):
        if one["role"] != "assistant" or (last_only and i < len(before)):
            continue
        prefix = row.get("answer_prefix") or "" if i == len(before) else ""
        turn = _turn(
            processor,
            row,
            messages[:i],
            one,
            ends,
            prefix=prefix,
            name=f"messages[{i}]",
            following=messages[i + 1 : i + 2],
        )
        if not turn.before.startswith(rendered):
            raise ValueError(
                f"{_where(row)}: expected a chat template that keeps an answer when messages follow, got a change; "
                "train on the last answer alone (sft.py has --train_on last), or use a template that keeps all "
                "(--chat_template FILE)"
            )
        between = turn.before.removeprefix(rendered)
        if prompt.videos and type(processor).__name__ in FRAMES_AS_IMAGES:
            between = text_with_frames(processor, between, videos)
        context = tokenizer(between, add_special_tokens=False)["input_ids"]
        compact += context + turn.ids
        mask += [False] * len(context) + [True] * len(turn.ids)
        rendered = turn.after
    ids = expand_placeholders(compact, prompt.placeholders)
    marks = np.repeat(mask, expanded_lengths(compact, prompt.placeholders)).tolist()
    sample = replace(prompt, token_ids=ids, compact_ids=compact, mask=marks, logprobs=[0.0] * len(ids))
    _check_length(sample, max_tokens)
    return sample


def _assistant_message(answer: str | Message | None, row: Row) -> Message:
    if isinstance(answer, str):
        return {"role": "assistant", "content": answer}
    if not isinstance(answer, Mapping):
        raise ValueError(f"{_where(row)}: expected an answer to train on, got {answer!r}")
    return answer


def _check_length(sample: Sample, max_tokens: int) -> None:
    if (n := len(sample.token_ids)) > max_tokens:
        raise ValueError(f"{_where(sample.row)}: expected at most {max_tokens} tokens with the answer, got {n}")


class _Turn(NamedTuple):
    """An assistant turn of a chat."""

    before: str  # the rendered chat up to the answer
    ids: list[int]  # tokens of the answer, with its end token
    after: str  # the rendered chat up to and including the end token, if the template writes one


def _turn(
    processor: Any,
    row: Row,
    messages: Sequence[Message],
    answer: Message,
    ends: Sequence[int],
    *,
    prefix: str,
    name: str,
    following: Sequence[Message] = (),
) -> _Turn:
    """An answer in the template's form, or as it is if the template changes it or the prompt.

    Args:
        messages: the chat before the answer.
        prefix: the beginning of the answer that is part of the prompt.
        name: what errors call the answer.
        following: the next message, if there is one.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    try:  # `encode_prompt` has checked that the messages appear
        before = _render_unchecked(processor, messages, add_generation_prompt=True, **template_options(row)) + prefix
        text, is_verbatim = _answer_text(processor, row, messages, answer, before, prefix, name)
    except ValueError as error:
        raise ValueError(f"{_where(row)}: {error}") from error
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    n = None if is_verbatim else next((i + 1 for i, token in enumerate(ids) if token in ends), None)
    if n is not None:
        end = tokenizer.decode(ids[n - 1 : n])
        return _Turn(before, ids[:n], before + text[: text.index(end) + len(end)])
    written = _closing(processor, row, messages, answer, ends, following)
    return _Turn(before, ids + (written or [_end_token(tokenizer, ends)]), before + text + tokenizer.decode(written))


def _answer_text(
    processor: Any, row: Row, messages: Sequence[Message], answer: Message, before: str, prefix: str, name: str
) -> tuple[str, bool]:
    """What follows the prompt `before`, and whether that is the answer as it is."""
    whole = {**answer, "content": prefix + text_of(answer)}
    after = _render_unchecked(processor, [*messages, whole], **template_options(row))
    text = after.removeprefix(before)
    if after.startswith(before):
        wrong = missing_text(processor, text, [answer], thinking_tags_of(row), name=name)
    else:
        wrong = (
            "expected a chat template that keeps the prompt when an answer follows, got a change; set an option of the "
            "template (such as enable_thinking) to what the answer has, or use another template (--chat_template FILE)"
        )
    if wrong is None:
        return text, False
    space = _space_before_answers(processor, row, messages, before) if is_text_alone(answer) else None
    if space is None:
        raise ValueError(wrong)
    return space + _as_sampled(row, before, text_of(answer)), True


def _space_before_answers(processor: Any, row: Row, messages: Sequence[Message], before: str) -> str | None:
    """White space that the template writes between the prompt and an answer of text; None if it writes more there.

    Thinking tags may be there too; then, and if the template changes the prompt, an answer follows without space.
    """
    probe = [*messages, {"role": "assistant", "content": ANSWER}]
    head, found, _ = _render_unchecked(processor, probe, **template_options(row)).rpartition(ANSWER)
    added = head.removeprefix(commonprefix([head, before]))
    without_tags = added
    for tag in (*thinking_tags_of(row), *THINKING_TAGS):
        without_tags = without_tags.replace(tag.strip(), "")
    if not found or without_tags.strip():
        return None
    return added if head.startswith(before) and without_tags == added else ""


def _as_sampled(row: Row, before: str, answer: str) -> str:
    """An answer as the policy would sample it after the prompt, which may have begun or ended the thinking."""
    begin, end = (tag.strip() for tag in thinking_tags_of(row))
    if before.rstrip().endswith(begin):
        if end not in answer:
            raise ValueError(
                f"expected an answer that ends the thinking which the prompt begins, got one without {end!r}; write "
                f"the thinking into the answer, or end it in the prompt with --answer_prefix {end!r} or an option of "
                "the template"
            )
        return answer.lstrip().removeprefix(begin).lstrip("\n")
    if before.rstrip().endswith(end) and end in answer:
        raise ValueError(
            f"expected an answer without thinking after a prompt that ends with {end!r}, got {end!r} in it"
        )
    return answer


def _closing(
    processor: Any,
    row: Row,
    messages: Sequence[Message],
    answer: Message,
    ends: Sequence[int],
    following: Sequence[Message],
) -> list[int]:
    """Tokens that the template writes between an answer and the next message, up to the first of `ends`.

    Without a next message it is one of a tool if the answer calls tools, else one of the user.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    probe = {"role": "tool" if answer.get("tool_calls") else "user", "content": OBSERVATION}
    chat = [*messages, {"role": "assistant", "content": ANSWER}, *(following or [probe])]
    try:
        added = _render_unchecked(processor, chat, **template_options(row)).rpartition(ANSWER)[2]
    except ValueError:  # it refuses the probe
        return []
    ids = tokenizer(added, add_special_tokens=False)["input_ids"]
    special = [*takewhile(tokenizer.added_tokens_decoder.__contains__, ids)]
    n = next((i + 1 for i, token in enumerate(special) if token in ends), 0)
    return ids[:n]


def _end_token(tokenizer: Any, ends: Sequence[int]) -> int:
    """The tokenizer's end token, or the first of `ends` if it has none."""
    return ends[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id


def template_options(row: Row) -> dict[str, Any]:
    """What a row gives to the chat template beside its messages."""
    return {"tools": row.get("tools"), "chat_template_kwargs": row.get("chat_template_kwargs")}


def _where(row: Row) -> str:
    return str(row.get("where", "row"))
