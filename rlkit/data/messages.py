"""Chats as lists of messages in the form of chat templates, with a place for each image.

A message is {"role": "user", "content": ...}. Its content is a text, or a list of parts {"type": "image"} and
{"type": "text", "text": ...}. A message of the assistant may have `tool_calls`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlkit.data.samples import Row

Message = Mapping[str, Any]

IMAGE_MARK = "<image>"
"""Marks the place of an image in a text."""

UNSUPPORTED_COLUMNS = ("video", "videos", "audio", "audios")
"""Columns that are refused: to ignore them would change the question."""


def message(role: str, text: str, images: int = 0) -> dict[str, Any]:
    """A message with this number of images, followed by the text."""
    parts = [{"type": "image"}] * images + [{"type": "text", "text": text}]
    return {"role": role, "content": parts if images else text}


def text_of(message: Message) -> str:
    """The text of a message, without its images."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def prompt_of(row: Row) -> tuple[list[Message], list[Any]]:
    """The messages of a row's prompt, and the images of their image parts, in order.

    Args:
        row: with `messages`, or a `question` that is a text or messages; and `images`, see `place_images`.

    Raises:
        ValueError: the row could not be read, has no question, has a video or audio column, or the number of images is
            not the number of places for them.
    """
    if reason := row.get("unreadable"):
        raise ValueError(reason)
    if found := next((name for name in UNSUPPORTED_COLUMNS if not _missing(row.get(name))), None):
        raise ValueError(f"{found}: expected text and images alone, got a column of this name")
    name = "question" if row.get("messages") is None else "messages"
    question = row.get(name)
    images = [] if row.get("images") is None else list(row["images"])
    if name == "question" and isinstance(question, str):
        return place_images([message("user", question)], images)
    return place_images(read_messages(question, name), images)


def read_messages(found: Any, name: str = "messages") -> list[Message]:
    """Checks a list of messages and removes empty fields.

    Args:
        found: a list of {"role", "content"}, or such a list as JSON text.
        name: of the column, for errors.

    Raises:
        ValueError: not a list of messages, or a content that is neither text nor parts of text and images.
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
    if calls := read.get("tool_calls"):
        read |= {"tool_calls": [_read_call(call, f"{name}.tool_calls") for call in calls], "content": content or ""}
    elif isinstance(content, list | tuple):
        read["content"] = [_read_part(part, f"{name}.content") for part in content]
    elif not isinstance(content, str):
        raise ValueError(f"{name}.content: expected text or a list of parts, got {_short(content)}")
    return read


def _read_part(part: Any, name: str) -> Mapping[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind not in ("image", "image_url"):
        raise ValueError(f"{name}: expected parts of type text and image, got {_short(part)}")
    source = next((part[key] for key in ("image", "image_url", "url", "path", "bytes") if part.get(key)), None)
    if kind == "image_url" and isinstance(source, Mapping):
        source = source.get("url")
    return {"type": "image"} if source is None else {"type": "image", "image": source}


def _read_call(call: Any, name: str) -> Mapping[str, Any]:
    """A tool call with its arguments as an object, as chat templates expect; in OpenAI's form they are JSON text."""
    function = call.get("function") or call if isinstance(call, Mapping) else {}
    arguments = from_json(function.get("arguments"))
    if not isinstance(function.get("name"), str) or not isinstance(arguments, Mapping):
        raise ValueError(f"{name}: expected a function's name and its arguments, got {_short(call)}")
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def place_images(messages: Sequence[Message], images: Sequence[Any] = ()) -> tuple[list[Message], list[Any]]:
    """Messages with an image part for each image, and the images in the order of these parts.

    The place of an image is an image part, which may contain the image itself, or `<image>` in a text, which is split
    there. If there are no places, the images go before the text of the first message of the user.

    Args:
        messages: from `read_messages`.
        images: of the row, for `<image>` and for image parts without an image.

    Raises:
        ValueError: the number of images is not the number of places, or there are places of both kinds.
    """
    places = [part for one in messages for part in parts_of(one) if part["type"] == "image"]
    held = [part["image"] for part in places if "image" in part]
    if held and (images or len(held) < len(places)):
        raise ValueError(f"images: expected all in the messages or all beside them, got {len(held)} and {len(images)}")
    images = list(held or images)
    marks = sum(text_of(one).count(IMAGE_MARK) for one in messages)
    user_turn = next((i for i, one in enumerate(messages) if one["role"] == "user"), None)
    if len(places) == len(images) and not marks:
        return [_without_sources(one) for one in messages], images
    if marks == len(images) and not places:
        return [_split_at_marks(one) for one in messages], images
    if not marks and not places and user_turn is not None:
        front = {**messages[user_turn], "content": [{"type": "image"}] * len(images) + parts_of(messages[user_turn])}
        return [*messages[:user_turn], front, *messages[user_turn + 1 :]], images
    spots = " and ".join(f"{n} {kind}" for n, kind in ((marks, IMAGE_MARK), (len(places), "image parts")) if n)
    raise ValueError(f"images: expected one for each place, got {len(images)} for {spots or 'no place'}")


def parts_of(message: Message) -> list[Mapping[str, Any]]:
    """The content of a message as a list of parts."""
    content = message.get("content") or []
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _without_sources(message: Message) -> Message:
    if isinstance(message.get("content"), str):
        return message
    parts = [{"type": "image"} if part["type"] == "image" else part for part in parts_of(message)]
    return {**message, "content": parts}


def _split_at_marks(message: Message) -> Message:
    if IMAGE_MARK not in text_of(message):
        return message
    pieces = [piece for part in parts_of(message) for piece in re.split(f"({IMAGE_MARK})", part["text"]) if piece]
    parts = [{"type": "image"} if piece == IMAGE_MARK else {"type": "text", "text": piece} for piece in pieces]
    return {**message, "content": parts}


def _missing(found: Any) -> bool:
    return found is None or isinstance(found, list | tuple | str) and not found


def _short(found: Any) -> str:
    shown = repr(found)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
