"""Chats as lists of messages in the form of chat templates, with a place for each image, video and audio.

A message is {"role": "user", "content": ...}. Its content is a text, or a list of parts {"type": "image"},
{"type": "video"}, {"type": "audio"} and {"type": "text", "text": ...}. OpenAI's parts `image_url` and `input_audio`,
and vLLM's `video_url` and `audio_url`, are read as these. A message of the assistant may have `tool_calls`, and its
thinking in a field such as `reasoning_content`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from mimetypes import guess_type
from pathlib import Path
from typing import Any, NamedTuple

from rlkit.data.samples import Row

Message = Mapping[str, Any]

IMAGE_MARK = "<image>"
"""Marks the place of an image in a text."""

VIDEO_MARK = "<video>"
"""Marks the place of a video in a text of a row with videos; in other rows it is text."""

AUDIO_MARK = "<audio>"
"""Marks the place of an audio in a text of a row with audios; in other rows it is text."""

MEDIA = ("image", "video", "audio")
"""Kinds of media, each of which is also the type of a part of a message."""

THINKING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields in which a message of the assistant may hold its thinking; templates differ in which of them they read."""


class Prompt(NamedTuple):
    """Messages, and the images, videos and audios of their parts, in order."""

    messages: list[Message]
    images: list[Any]
    videos: list[Any]
    audios: list[Any]


def message(role: str, text: str, images: int = 0) -> dict[str, Any]:
    """A message with this number of images, followed by the text."""
    parts = [{"type": "image"}] * images + [{"type": "text", "text": text}]
    return {"role": role, "content": parts if images else text}


def thinking_of(message: Message) -> dict[str, Any]:
    """The fields of a message of the assistant that hold its thinking: those with text, or with parts of text.

    Other values, such as `reasoning=True`, are settings.
    """
    found = {name: message.get(name) for name in THINKING_FIELDS}
    return {name: value for name, value in found.items() if value and isinstance(value, str | list | tuple)}


def is_text_alone(message: Message) -> bool:
    """Whether a message has neither calls of tools nor thinking in a field of its own."""
    return not message.get("tool_calls") and not thinking_of(message)


def text_of(message: Message) -> str:
    """The text of a message, without its images, videos and audios."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def prompt_of(row: Row) -> Prompt:
    """The messages of a row's prompt, and the images, videos and audios of their parts.

    Args:
        row: with `messages`, or a `question` that is a text or messages; and `images`, `videos` or one `video`, and
            `audios` or one `audio`, see `place_media`.

    Raises:
        ValueError: the row could not be read, has no question, or the number of images, videos or audios is not the
            number of places for them.
    """
    if reason := row.get("unreadable"):
        raise ValueError(reason)
    name = "question" if row.get("messages") is None else "messages"
    question = row.get(name)
    images = [] if row.get("images") is None else _several(row, "images")
    videos, audios = _one_or_many(row, "video"), _one_or_many(row, "audio")
    if name == "question" and isinstance(question, str):
        return place_media([message("user", question)], images, videos, audios)
    return place_media(read_messages(question, name), images, videos, audios)


def _one_or_many(row: Row, kind: str) -> list[Any]:
    if row.get(f"{kind}s") is None:
        return [] if _missing(row.get(kind)) else [single(row[kind], kind)]
    return _several(row, f"{kind}s")


def single(media: Any, kind: str) -> Any:
    """What is in a row's column `video` or `audio`, where a list is one video, as frames, or one audio, as samples.

    Raises:
        ValueError: a list of files, which belongs in the column for several.
    """
    first = media[0] if isinstance(media, list | tuple) and media else None
    if kind == "audio":
        is_file = isinstance(first, str | bytes | Path | Mapping)
    else:  # frames may be files too
        path = first.get("path") if isinstance(first, Mapping) else first
        is_file = isinstance(path, str | Path) and str(guess_type(str(path))[0]).startswith("video/")
    if is_file:
        raise ValueError(f"{kind}: expected one, got a list of {len(media)} files; put several into a column {kind}s")
    return media


def _several(row: Row, name: str) -> list[Any]:
    found = row[name]
    if isinstance(found, str | bytes | Mapping):  # `list` would take it apart
        raise ValueError(f"{name}: expected a list, got {_short(found)}; a single one is a list of one entry")
    return list(found)


def read_messages(found: Any, name: str = "messages") -> list[Message]:
    """Checks a list of messages; removes empty fields, and those with thinking that the content begins with as well.

    Args:
        found: a list of {"role", "content"}, or such a list as JSON text.
        name: of the column, for errors.

    Raises:
        ValueError: not a list of messages, or a content that is neither text nor parts of text, images, videos and
            audios.
    """
    found = from_json(found)
    if not isinstance(found, list | tuple) or not found:
        raise ValueError(f"{name}: expected text or a list of messages, got {_short(found)}")
    return [_read_message(one, f"{name}[{i}]") for i, one in enumerate(found)]


def from_json(found: Any) -> Any:
    """Parses JSON text; returns other text and other values unchanged."""
    try:
        return json.loads(found) if isinstance(found, str) else found
    except ValueError:
        return found


def _read_message(one: Any, name: str) -> Message:
    if not isinstance(one, Mapping) or not isinstance(one.get("role"), str):
        raise ValueError(f'{name}: expected {{"role": ..., "content": ...}}, got {_short(one)}')
    read = {key: value for key, value in one.items() if value is not None}  # tables fill missing fields with None
    content = read.get("content")
    if calls := read.pop("tool_calls", None):
        read["tool_calls"] = [_read_call(call, f"{name}.tool_calls") for call in calls]
        content = read["content"] = content or ""
    if isinstance(content, list | tuple):
        read["content"] = [_read_part(part, f"{name}.content") for part in content]
    elif not isinstance(content, str):
        raise ValueError(f"{name}.content: expected text or a list of parts, got {_short(content)}")
    return {key: value for key, value in read.items() if key not in THINKING_FIELDS or not _begins_with(read, value)}


def _begins_with(message: Message, thinking: Any) -> bool:
    """Whether the content begins with this thinking between tags, so that a field with it says it a second time."""
    if not isinstance(thinking, str) or not thinking.strip():
        return False
    before, found, after = text_of(message).partition(thinking.strip())
    begin, end = before.strip(), after.lstrip()
    return bool(found) and (not begin or begin[0] in "<[" and len(begin.split()) == 1) and end[:1] in ("<", "[")


def _read_part(part: Any, name: str) -> Mapping[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "input_audio":
        return {"type": "audio", "audio": _input_audio(part.get("input_audio"), name)}
    medium = str(kind).removesuffix("_url")
    if medium not in MEDIA:
        raise ValueError(f"{name}: expected parts of type text, image, video and audio, got {_short(part)}")
    keys = (medium, f"{medium}_url", "url", "path", "bytes")
    source = next((part[key] for key in keys if not _missing(part.get(key))), None)
    if kind == f"{medium}_url" and isinstance(source, Mapping):
        source = source.get("url")
    return {"type": medium} if source is None else {"type": medium, medium: source}


def bytes_or_path(struct: Mapping[str, Any], name: str) -> Any:
    """The bytes in the {"bytes", "path"} struct of Hugging Face sets, or its path if it has none.

    Raises:
        ValueError: the bytes are something else. A text there would later be opened as a path.
    """
    data = struct.get("bytes")
    if data and not isinstance(data, bytes | bytearray):
        raise ValueError(f"{name}: expected bytes under 'bytes', got {type(data).__name__}")
    return data or struct.get("path")


def _input_audio(found: Any, name: str) -> str:
    """OpenAI's {"data": base64 of a file, "format": "wav"} as a data URL."""
    data, kind = (found.get("data"), found.get("format")) if isinstance(found, Mapping) else (None, None)
    if not (isinstance(data, str) and data and isinstance(kind, str) and re.fullmatch(r"[\w.+-]+", kind)):
        raise ValueError(
            f'{name}: expected an input_audio of {{"data": base64 of a file, "format": "wav"}}, got {_short(found)}'
        )
    return f"data:audio/{kind};base64,{data}"


def _read_call(call: Any, name: str) -> Mapping[str, Any]:
    """A tool call with its arguments as an object, as chat templates expect; in OpenAI's form they are JSON text.

    It keeps its `id`, which some templates write.
    """
    function = call.get("function") or call if isinstance(call, Mapping) else {}
    arguments = from_json(function.get("arguments"))
    if not isinstance(function.get("name"), str) or not isinstance(arguments, Mapping):
        raise ValueError(f"{name}: expected a function's name and its arguments, got {_short(call)}")
    call_id = {} if call.get("id") is None else {"id": call["id"]}
    return {**call_id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def place_media(
    messages: Sequence[Message], images: Sequence[Any] = (), videos: Sequence[Any] = (), audios: Sequence[Any] = ()
) -> Prompt:
    """Messages with a part for each image, video and audio, and these media in the order of their parts.

    The place of an image is an image part, which may contain the image itself, or `<image>` in a text, which is split
    there. If there are no places, the images go before the text of the first message of the user. The same holds for
    videos, with `<video>`, and for audios, with `<audio>`; in a chat without videos `<video>` is text, and in one
    without audios `<audio>`.

    Args:
        messages: from `read_messages`.
        images, videos, audios: of the row, for marks in the text and for parts without a source.

    Raises:
        ValueError: the number of images, videos or audios is not the number of places, or there are both marks and
            parts.
    """
    messages, images = _place("image", messages, images, IMAGE_MARK)
    messages, videos = _place("video", messages, videos, VIDEO_MARK if videos else "")
    messages, audios = _place("audio", messages, audios, AUDIO_MARK if audios else "")
    return Prompt(messages, images, videos, audios)


def _place(
    kind: str, messages: Sequence[Message], sources: Sequence[Any], mark: str
) -> tuple[list[Message], list[Any]]:
    """Places the media of one kind; see `place_media`.

    Args:
        kind: one of `MEDIA`.
        sources: of the row.
        mark: of a place in a text; if empty, texts have no places.
    """
    places = [part for one in messages for part in parts_of(one) if part["type"] == kind]
    held = [part[kind] for part in places if kind in part]
    if held and (len(sources) or len(held) < len(places)):
        raise ValueError(
            f"{kind}s: expected all in the messages or all beside them, got {len(held)} and {len(sources)}"
        )
    found = held or list(sources)
    marks = sum(text_of(one).count(mark) for one in messages) if mark else 0
    user_turn = next((i for i, one in enumerate(messages) if one["role"] == "user"), None)
    if len(places) == len(found) and not marks:
        return [_without_sources(one, kind) for one in messages], found
    if marks == len(found) and not places:
        return [_split_at_marks(one, kind, mark) for one in messages], found
    if not marks and not places and user_turn is not None:
        front = {**messages[user_turn], "content": [{"type": kind}] * len(found) + parts_of(messages[user_turn])}
        return [*messages[:user_turn], front, *messages[user_turn + 1 :]], found
    spots = " and ".join(f"{n} {name}" for n, name in ((marks, mark), (len(places), f"{kind} parts")) if n)
    raise ValueError(f"{kind}s: expected one for each place, got {len(found)} for {spots or 'no place'}")


def parts_of(message: Message) -> list[Mapping[str, Any]]:
    """The content of a message as a list of parts."""
    content = message.get("content") or []
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _without_sources(message: Message, kind: str) -> Message:
    if isinstance(message.get("content"), str):
        return message
    parts = [{"type": kind} if part["type"] == kind else part for part in parts_of(message)]
    return {**message, "content": parts}


def _split_at_marks(message: Message, kind: str, mark: str) -> Message:
    if mark not in text_of(message):
        return message
    parts: list[Mapping[str, Any]] = []
    for part in parts_of(message):
        pieces = re.split(f"({mark})", part["text"]) if part["type"] == "text" else []
        parts += [{"type": kind} if piece == mark else {"type": "text", "text": piece} for piece in pieces if piece]
        parts += [part] if part["type"] != "text" else []
    return {**message, "content": parts}


def _missing(found: Any) -> bool:
    return found is None or isinstance(found, list | tuple | str) and not found


def _short(found: Any) -> str:
    shown = repr(found)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
