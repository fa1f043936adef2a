r"""Reads rows of common data set formats.

The formats (docs/formats.md has examples):

| format | columns |
|---|---|
| question and answer | `question`, `prompt` or `problem`; `answer`, `solution` or `label` |
| TRL, prompt and completion | `prompt`, `completion`: texts or messages |
| TRL and OpenAI, messages | `messages`, maybe `tools` |
| ShareGPT, LLaVA | `conversations` of {"from", "value"}, maybe `system`, `tools` |
| Alpaca | `instruction`, `input`, `output`, maybe `system`, `history` |
| verl | `prompt` of messages, `reward_model` with a `ground_truth`, `images`, `extra_info` |
| plain text | `text` |
| preference pairs | `chosen`, `rejected`: texts, messages, or Anthropic's "\n\nHuman: ... \n\nAssistant: ..." |
| unpaired preferences | `completion` or `messages`, with a `label` that is true or false |

A row that has been read keeps its columns and gets these: `messages` (the prompt), `question` (its last question as
text), `images` and, if it has any, `videos` and `audios` (in the order of their places), `answer` (the correct answer,
for reward functions) and `tools`; for supervised fine-tuning `completion`; for preference pairs `chosen` and
`rejected`; for unpaired preferences `completion` and `label`. A response is a text, or a message if it calls tools or
has its thinking in a field of its own. `read_as` marks a row that has been read; it is not read again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from os.path import commonprefix
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from rlkit.data.messages import (
    AUDIO_MARK,
    IMAGE_MARK,
    VIDEO_MARK,
    Message,
    from_json,
    is_text_alone,
    place_media,
    read_messages,
    single,
    text_of,
)
from rlkit.data.samples import Row

QUESTION_COLUMNS = ("question", "prompt", "problem")
CHAT_COLUMNS = ("messages", "conversations")
PROMPT_COLUMNS = (*QUESTION_COLUMNS, *CHAT_COLUMNS, "instruction")
OTHER_PROMPT_COLUMNS = ("input", "inputs", "query", "context", "user", "user_prompt", "conversation", "post", "text")
ANSWER_COLUMNS = ("answer", "solution", "label")
IMAGE_COLUMNS = ("images", "image")
VIDEO_COLUMNS = ("videos", "video")
AUDIO_COLUMNS = ("audios", "audio")
TEXT_COLUMNS = (  # never media; the prompt, the answer, and what belongs to them
    *PROMPT_COLUMNS,
    *OTHER_PROMPT_COLUMNS,
    *ANSWER_COLUMNS,
    *("completion", "output", "chosen", "rejected", "system", "tools", "history", "reward_model", "extra_info"),
)
MEDIA_SUFFIXES = {
    IMAGE_COLUMNS: (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic"),
    VIDEO_COLUMNS: (".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg"),
    AUDIO_COLUMNS: (".wav", ".mp3", ".flac", ".ogg", ".opus", ".m4a", ".aac"),
}
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
    "function_call": "assistant",
}


class Chat(NamedTuple):
    """A prompt, and the assistant's response if the row has one."""

    messages: list[Message]
    completion: Message | None


# --- kinds of rows


def task_row(raw: Row) -> dict[str, Any]:
    """A prompt and the correct answer: from an answer column, or else the last message of the assistant.

    A response of the chat is also kept as `completion`, for supervised fine-tuning on the task.

    Raises:
        ValueError: no question or several, images without places, or several answers that differ.
    """
    chat = read_chat(raw)
    row = {**_prompt(raw, chat.messages, "task"), "answer": _right_answer(raw)}
    if chat.completion is not None:
        row["completion"] = _text_if_all(chat.completion)
        row["answer"] = text_of(chat.completion) if row["answer"] is None else row["answer"]
    return row


def chat_row(raw: Row) -> dict[str, Any]:
    """A prompt and a response for supervised fine-tuning, or `plain_text` without either.

    Raises:
        ValueError: as `task_row`; no response, or several columns that could be it.
    """
    if (text := _plain_text(raw)) is not None:
        return {**raw, "plain_text": text, "question": "", "images": [], "answer": None}
    chat = read_chat(raw)
    completion = _text_if_all(chat.completion) if chat.completion is not None else _only_response(raw)
    answer = _right_answer(raw)
    return {
        **_prompt(raw, chat.messages, "chat"),
        "completion": completion,
        "answer": (completion if isinstance(completion, str) else text_of(completion)) if answer is None else answer,
    }


def pair_row(raw: Row) -> dict[str, Any]:
    """A prompt with a chosen and a rejected response.

    If `chosen` and `rejected` are chats (lists of messages, or Anthropic's texts), the messages with which both begin
    are the prompt, and a prompt column is ignored. If they begin with the assistant, they go on from the prompt column,
    unless they repeat its last message. If `chosen` and `rejected` are texts without a prompt column, the prompt is
    their common beginning, up to its last white space.

    Raises:
        ValueError: no prompt, one that may be in a column of another name, no responses, the same response twice, or
            responses of several messages.
    """
    chosen, rejected = _turns(_value(raw, "chosen"), "chosen"), _turns(_value(raw, "rejected"), "rejected")
    if chosen is not None and chosen == rejected:
        raise ValueError("chosen, rejected: expected two different responses, got the same")
    shared = 0
    if isinstance(chosen, list) and isinstance(rejected, list):
        shared = next((i for i, two in enumerate(zip(chosen, rejected, strict=False)) if two[0] != two[1]), 0)
        messages = chosen[:shared]
        goes_on = not messages or messages[0]["role"] == "assistant" and _columns(raw, PROMPT_COLUMNS)
        before = read_chat(raw).messages if goes_on else []
        messages = [*before, *messages] if before and before[-1] not in messages else _with_system(raw, messages)
        chosen, rejected = chosen[shared:], rejected[shared:]
    elif isinstance(chosen, str) and isinstance(rejected, str) and not _columns(raw, PROMPT_COLUMNS):
        if other := [name for name in OTHER_PROMPT_COLUMNS if _value(raw, name) not in (None, "")]:
            raise ValueError(f"{other[0]}: expected a prompt in a column prompt; rename this one, or remove it")
        beginning = commonprefix([chosen, rejected])
        start = len(beginning) - len(re.split(r"\s", beginning)[-1])
        messages = read_chat({**raw, "question": chosen[:start] or None}).messages
        chosen, rejected = chosen[start:], rejected[start:]
    else:
        messages = read_chat(raw).messages
    return {
        **_prompt(raw, messages, "pair"),
        "chosen": _one_response(chosen, "chosen"),
        "rejected": _one_response(rejected, "rejected"),
        "answer": _right_answer(raw, ("answer", "solution")),
    }


def unpaired_row(raw: Row) -> dict[str, Any]:
    """A prompt with one response, and a label that is true if the response is good.

    From a preference pair the chosen response is taken if `label` is true, otherwise the rejected one.

    Raises:
        ValueError: as `pair_row`; a label that is neither true nor false.
    """
    label = raw.get("label")
    if isinstance(label, str):
        label = {"true": True, "1": True, "false": False, "0": False}.get(label.strip().lower(), label)
    if isinstance(label, str) or label not in (True, False):
        raise ValueError(f"label: expected true or false, got {label!r}")
    if _value(raw, "completion") is None and _value(raw, "chosen") is not None:
        pair = pair_row(raw)
        return {**pair, "completion": pair["chosen"] if label else pair["rejected"], "label": bool(label)}
    chat = read_chat(raw)
    completion = _one_response(None if chat.completion is None else [chat.completion], "completion")
    answer = _right_answer(raw, ("answer", "solution"))
    return {**_prompt(raw, chat.messages, "unpaired"), "completion": completion, "label": bool(label), "answer": answer}


# --- one function per format


def read_chat(raw: Row) -> Chat:
    """The prompt of a row, and the response if the row has one; the columns decide the format.

    Raises:
        ValueError: no question, several that differ, or one that is neither text nor messages.
    """
    if raw.get("read_as"):
        completion = _value(raw, "completion")
        return Chat(raw["messages"], _assistant_message(completion) if isinstance(completion, str) else completion)
    texts, chats = _columns(raw, QUESTION_COLUMNS), _columns(raw, CHAT_COLUMNS)
    found = [*chats, *texts, *_columns(raw, ("instruction",))]
    if not found:
        raise ValueError("question: expected text or messages, got none")
    name = found[0]
    chat = READERS[name](raw, name)
    if len(found) > 1 and not _same_question(raw, chat, found):
        raise ValueError(f"{' and '.join(found)}: expected one question, got {len(found)}")
    return chat._replace(messages=_with_system(raw, chat.messages))


def _with_system(raw: Row, messages: list[Message]) -> list[Message]:
    """The messages, after the system message of a column `system` unless they begin with the same one."""
    system = _value(raw, "system")
    if not system or raw.get("read_as"):
        return messages
    if not isinstance(system, str):
        raise ValueError(f"system: expected text, got {system!r:.80}")
    if messages[0]["role"] == "system":
        if text_of(messages[0]) == system:
            return messages
        raise ValueError("system: expected one system message, got a column and a message that differ")
    return [{"role": "system", "content": system}, *messages]


def _same_question(raw: Row, chat: Chat, found: Sequence[str]) -> bool:
    """Whether a question column beside a chat repeats the chat's first question, as UltraChat's `prompt` does."""
    first = next((text_of(one) for one in chat.messages if one["role"] == "user"), None)
    return found[0] in CHAT_COLUMNS and all(isinstance(raw[name], str) and raw[name] == first for name in found[1:])


def _from_question(raw: Row, name: str) -> Chat:
    """A question as text or messages; possibly with TRL's `completion`, a text or one message."""
    question = _turns(raw[name], name)
    if isinstance(question, str):
        question = [{"role": "user", "content": question}]
    if not isinstance(question, list):
        raise ValueError(f"{name}: expected text or a list of messages, got {question!r}")
    if question[-1] == {"role": "assistant", "content": ""}:
        question = question[:-1]  # Anthropic's prompts end with an empty assistant turn
    if _value(raw, "completion") is None:
        return _split_response(question)
    completion = _one_response(_turns(raw["completion"], "completion"), "completion")
    return Chat(question, _assistant_message(completion) if isinstance(completion, str) else completion)


def _from_messages(raw: Row, name: str) -> Chat:
    """OpenAI's {"role", "content"}; if there is a `completion` column too, they are the prompt alone."""
    chat = _split_response(read_messages(raw[name], name))
    if _value(raw, "completion") is None:
        return chat
    if chat.completion is not None:
        raise ValueError(f"{name} and completion: expected one response, got two")
    return _from_question({"question": chat.messages, "completion": raw["completion"]}, "question")


def _from_sharegpt(raw: Row, name: str) -> Chat:
    """{"from": "human", "value": ...}; a function_call is {"name", "arguments"} as JSON text."""
    turns = from_json(raw[name])
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, Mapping) for turn in turns):
        raise ValueError(f'{name}: expected a list of {{"from": ..., "value": ...}}, got {turns!r:.80}')
    if all(turn.get("role") is not None for turn in turns):
        return _from_messages(raw, name)
    return _split_response([_from_turn(turn, f"{name}[{i}]") for i, turn in enumerate(turns)])


def _from_turn(turn: Mapping[str, Any], name: str) -> Message:
    role, value = ROLES.get(str(turn.get("from"))), turn.get("value")
    if role is None or not isinstance(value, str):
        raise ValueError(f"{name}: expected from human, gpt, system, ... and a text as value, got {str(turn):.80}")
    if turn["from"] != "function_call":
        return {"role": role, "content": value}
    calls = from_json(value)
    calls = calls if isinstance(calls, list) else [calls]
    return read_messages([{"role": role, "content": "", "tool_calls": calls}], name)[0]


def _from_alpaca(raw: Row, name: str) -> Chat:
    """An instruction, its `input` below it, `history` as pairs of earlier questions and answers, and the `output`."""
    texts = {part: raw[part] for part in (name, "input") if _value(raw, part) not in (None, "")}
    if wrong := [part for part, text in texts.items() if not isinstance(text, str | int | float)]:
        raise ValueError(f"{wrong[0]}: expected text, got {texts[wrong[0]]!r:.80}")
    question = "\n".join(map(str, texts.values()))
    messages = []
    for turn in _value(raw, "history") or ():
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise ValueError(f"history: expected pairs of a question and an answer, got {turn!r:.80}")
        messages += [{"role": "user", "content": str(turn[0])}, _assistant_message(str(turn[1]))]
    messages.append({"role": "user", "content": question})
    column = "output" if _value(raw, "completion") is None else "completion"
    output = _value(raw, column)
    completion = None if output is None else _one_response(output, column)
    return Chat(messages, _assistant_message(completion) if isinstance(completion, str) else completion)


READERS = {
    **dict.fromkeys(QUESTION_COLUMNS, _from_question),
    "messages": _from_messages,
    "conversations": _from_sharegpt,
    "instruction": _from_alpaca,
}


def _plain_text(raw: Row) -> str | None:
    text = raw.get("text")
    return text if isinstance(text, str) and not _columns(raw, PROMPT_COLUMNS) else None


def _turns(found: Any, name: str) -> Any:
    r"""Converts messages, a message, JSON text of messages or Anthropic's text to messages; leaves others unchanged.

    Anthropic's helpful-harmless texts, https://huggingface.co/datasets/Anthropic/hh-rlhf, begin with "\n\nHuman:".
    """
    if isinstance(found, Mapping):
        found = [found]
    if isinstance(found, str) and re.match(r"\s*\[\s*\{", found):
        parsed = from_json(found)
        is_chat = all(isinstance(one, Mapping) and _is_turn(one) for one in parsed)
        found = parsed if is_chat else found
    if isinstance(found, list | tuple | np.ndarray):
        if len(found) and all(isinstance(one, Mapping) and "from" in one for one in found):
            return [_from_turn(one, f"{name}[{i}]") for i, one in enumerate(found)]
        return read_messages(list(found), name)
    if not isinstance(found, str) or not re.match(r"\s*Human:", found) or "\n\nAssistant:" not in found:
        return found
    _, *pieces = re.split(r"(?:^|\n\n)\s*(Human|Assistant):", found)
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[who], "content": said.strip()} for who, said in zip(pieces[::2], pieces[1::2], strict=True)]


def _is_turn(found: Mapping[str, Any]) -> bool:
    return found.keys() >= {"from", "value"} or (
        "role" in found and not found.keys().isdisjoint({"content", "tool_calls"})
    )


def _split_response(messages: Sequence[Message]) -> Chat:
    """Separates the response from the prompt, if the last message is the assistant's."""
    if len(messages) > 1 and messages[-1]["role"] == "assistant":
        return Chat(list(messages[:-1]), messages[-1])
    return Chat(list(messages), None)


# --- columns


def _prompt(raw: Row, messages: Sequence[Message], read_as: str) -> dict[str, Any]:
    """The row with the columns of its prompt: messages, question, images and tools."""
    videos, audios = _one_or_many(raw, VIDEO_COLUMNS), _one_or_many(raw, AUDIO_COLUMNS)
    placed, images, videos, audios = place_media(messages, _images(raw), videos, audios)
    question = next((text_of(one) for one in reversed(messages) if one["role"] == "user"), "")
    for mark, is_mark in ((IMAGE_MARK, True), (VIDEO_MARK, bool(videos)), (AUDIO_MARK, bool(audios))):
        question = question.replace(mark, "").strip() if is_mark and mark in question else question
    tools = from_json(_value(raw, "tools") or [])
    if not isinstance(tools, list):
        raise ValueError(f"tools: expected a list of functions, got {tools!r:.80}")
    read = {"question": question, "messages": placed, "images": images, "tools": tools, "read_as": read_as}
    return {**raw, **read, **({"videos": videos} if videos else {}), **({"audios": audios} if audios else {})}


def _images(raw: Row) -> list[Any]:
    if raw.get("read_as"):
        return list(raw["images"])
    found = _columns(raw, IMAGE_COLUMNS)
    if len(found) > 1:
        raise ValueError("images and image: expected one of them, got both")
    images = raw[found[0]] if found else []
    return list(images) if isinstance(images, list | tuple | np.ndarray) else [images]


def _one_or_many(raw: Row, columns: tuple[str, str]) -> list[Any]:
    """The videos or audios of a row.

    A list in the column `video` is one video, as frames, and one in `audio` is one audio, as (samples, sampling rate).

    Args:
        columns: of several, and of one.

    Raises:
        ValueError: both columns, or a list of files in that for one.
    """
    many, one = columns
    if raw.get("read_as"):
        return list(raw.get(many) or ())
    found = _columns(raw, columns)
    if len(found) > 1:
        raise ValueError(f"{many} and {one}: expected one of them, got both")
    if found == [one]:
        return [single(raw[one], one)]
    media = raw[many] if found else []
    return list(media) if isinstance(media, list | tuple | np.ndarray) else [media]


def _right_answer(raw: Row, names: Sequence[str] = ANSWER_COLUMNS) -> Any:
    """The correct answer: verl's `reward_model["ground_truth"]`, or the first of these columns.

    `answer` comes before `solution`, which may contain the derivation.
    """
    if raw.get("read_as"):
        return raw["answer"]
    found = _columns(raw, names)
    truth = raw.get("reward_model")
    truth = _value(truth, "ground_truth") if isinstance(truth, Mapping) else None
    if truth is not None:
        if other := [name for name in found if str(raw[name]) != str(truth)]:
            raise ValueError(f"reward_model.ground_truth and {other[0]}: expected one answer, got two that differ")
        return truth
    if "label" in found and len(found) > 1:
        raise ValueError(f"{' and '.join(found)}: expected one of them, got both")
    return raw[found[0]] if found else None


def _only_response(raw: Row) -> str:
    found = _columns(raw, ("answer",) if raw.get("read_as") else ANSWER_COLUMNS)
    if len(found) > 1:
        raise ValueError(f"{' and '.join(found)}: expected one response to imitate, got {len(found)}")
    return _one_response(raw[found[0]] if found else None, found[0] if found else "answer")


def _one_response(found: Any, name: str) -> Any:
    """A single response from a text, a number, or a list with one message of the assistant."""
    if isinstance(found, list) and len(found) == 1 and isinstance(found[0], str):
        return found[0]
    messages = found if isinstance(found, list) and all(isinstance(x, Mapping) for x in found) else []
    if len(messages) == 1 and messages[0].get("role") == "assistant":
        return _text_if_all(messages[0])
    if messages:
        got = f"{len(messages)} messages, the first of role {messages[0].get('role')!r}"
        raise ValueError(f"{name}: expected a text or one message of the assistant, got {got}")
    if isinstance(found, bool) or not isinstance(found, str | int | float | np.number):
        raise ValueError(f"{name}: expected a text or one message of the assistant, got {found!r:.80}")
    is_whole = isinstance(found, float) and found.is_integer()  # a column of integers with a gap is one of floats
    return str(int(found) if is_whole else found)


def _text_if_all(response: Message) -> Any:
    """The text of a response, or the whole message if it has more: tool calls, or thinking in a field of its own."""
    return text_of(response) if is_text_alone(response) else response


def _assistant_message(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _columns(raw: Row, names: Sequence[str]) -> list[str]:
    return [name for name in names if _value(raw, name) is not None]


def _value(raw: Row, name: str) -> Any:
    """The value of a column; None if the row has none, which is nan in tables of numbers."""
    value = raw.get(name)
    return None if isinstance(value, float) and math.isnan(value) else value


# --- tables


def check_columns(columns: Collection[str], *needed: Sequence[str], media: Mapping[str, str] | None = None) -> None:
    """Refuse a table with unsupported, ambiguous or missing columns.

    Args:
        columns: of the table.
        needed: groups of column names; the table needs at least one column of each group.
        media: column -> `image`, `video` or `audio`, for the columns of media in the table's schema.

    Raises:
        ValueError: both `image` and `images`, `video` and `videos`, or `audio` and `audios`; images, videos or audios
            in a column of another name; a reserved name; a group without a column in the table.
    """
    has = f"got columns {list(columns)}"
    if reserved := [name for name in ("read_as", "unreadable", "where") if name in columns]:
        raise ValueError(f"{reserved[0]}: expected another name of a column, as rlkit marks rows with this one, {has}")
    for many, one in (IMAGE_COLUMNS, VIDEO_COLUMNS, AUDIO_COLUMNS):
        own = {many, one} & set(columns)
        if len(own) > 1:
            raise ValueError(f"{many} and {one}: expected one of them, {has}")
        if stray := _stray_columns(columns, one, bool(own), media or {}):
            expected = f"all in one column {many}, not also in" if own else f"a column {many} or {one}, not"
            raise ValueError(f"{many}: expected {expected} {stray[0]!r}, {has}")
    for names in needed:
        if not set(names) & set(columns):
            raise ValueError(f"{names[0]}: expected a column {' or '.join(names)}, {has}")


def check_no_unread_media(raw: Sequence[Row]) -> None:
    """Refuse a column with media among the first rows of a table that has no column of media.

    A column has media if each of its values is bytes, an image struct, or a text that ends as the name of a media file
    does. Columns of prompts and answers are texts in any case.

    Raises:
        ValueError: there is such a column.
    """
    has = list(dict.fromkeys(name for row in raw for name in row))
    for name in has:
        found = [row[name] for row in raw if _value(row, name) not in (None, "", [])]
        kind = media_columns_of(found) if found and name not in TEXT_COLUMNS else None
        if kind:
            many, one = kind
            expected = f"expected a column {many} or {one}, not {name!r}, which has {found[0]!r:.60}"
            raise ValueError(f"{many}: {expected}, got columns {has}")


def media_columns_of(found: Any) -> tuple[str, str] | None:
    """The columns for a value if it is one of media, or a list of nothing else; bytes count as an image's."""
    if isinstance(found, bytes):
        return IMAGE_COLUMNS
    if isinstance(found, str):
        suffix = PurePath(found).suffix.lower()
        return next((columns for columns, suffixes in MEDIA_SUFFIXES.items() if suffix in suffixes), None)
    if isinstance(found, Mapping):
        return media_columns_of(found.get("path") or found.get("bytes")) if found.keys() <= {"bytes", "path"} else None
    kinds = [media_columns_of(one) for one in found] if isinstance(found, list) else []
    return kinds[0] if kinds and all(kinds) else None


def _stray_columns(columns: Collection[str], kind: str, has_own: bool, media: Mapping[str, str]) -> list[str]:
    """The columns of other names that have images, videos or audios, by the table's schema or by their names.

    Beside a column of this kind, only names such as `image_2` tell: others may be paths, numbers or captions of it.
    """
    word = "(image|img)" if kind == "image" else kind
    numbered = r"_?(\d+|[a-d]|left|right|list)"
    if has_own:
        pattern = f"{word}s?{numbered}"
    else:
        before = r"(?!(n|num|no|has|is|with|needs|contains)_).*" if kind == "image" else ""
        pattern = f"{before}{word}s?({numbered}|_?(path|file|url|name|byte)s?|_?data{'|' if kind == 'image' else ''})"
    known = (*IMAGE_COLUMNS, *VIDEO_COLUMNS, *AUDIO_COLUMNS)
    return [
        name
        for name in columns
        if name not in known and (media.get(name) == kind or re.fullmatch(pattern, name, re.IGNORECASE))
    ]
