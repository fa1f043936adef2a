"""Whether a rendered chat has all that its messages contain; chat templates leave things out silently."""

from __future__ import annotations

import json
import re
from bisect import bisect, insort
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from rlkit.data.messages import THINKING_FIELDS, Message, parts_of, thinking_of
from rlkit.data.thinking_tags import THINKING_TAGS

SYSTEM_ROLES = ("system", "developer")
FIRST_WINDOW = 256  # letters; most pieces follow the one before them closely


class Piece(NamedTuple):
    """Something that a template has to write: a text, a number, a boolean or None."""

    message_index: int
    field: str
    value: Any


def missing_text(
    processor: Any, text: str, messages: Sequence[Message], thinking_tags: tuple[str, str], *, name: str = ""
) -> str | None:
    """An error message that says what of the messages a rendered text lacks; None if it has all.

    All must appear in the order of the messages, at different places. White space at the ends of a piece does not
    count, as many templates strip it. Exceptions, for templates that move things:

    - System messages may all come first, or those at the beginning before the last message of the user.
    - The parts of a message may come in any order (content, thinking, calls, the arguments of a call), and so may those
      of a message with calls together with the messages of tools that follow it.

    What comes before the first message is searched with it: a short first message that is left out can be found there.

    Args:
        processor: for its chat template, of which the message gives advice.
        name: what the error calls the message, if there is one only.
    """
    pieces = [_pieces(one, i, thinking_tags, is_last=i + 1 == len(messages)) for i, one in enumerate(messages)]
    missing = []
    for in_any_order in (False, True):
        for order in _orders(messages):
            found = _first_lost(text, [_joined(pieces, block) for block in _blocks(messages, order)], in_any_order)
            if found is None:
                return None
            if order == [*range(len(messages))]:
                missing.append(found)
    is_absent = _find(text, missing[0].value, 0) is None
    piece = missing[0] if is_absent else missing[1]
    where = name if name and len(messages) == 1 else f"messages[{piece.message_index}]"
    one = messages[piece.message_index]
    return (
        f"{where}.{piece.field}: expected a chat template that writes it for the role {one['role']!r}, got a text "
        f"without {piece.value!r:.80}{'' if is_absent else ' in its place'}; {_advice(processor, text, one, piece)}"
    )


def _orders(messages: Sequence[Message]) -> Iterator[list[int]]:
    """Orders in which templates write messages, beginning with that of the chat."""
    yield [*range(len(messages))]
    system = [i for i, one in enumerate(messages) if one["role"] in SYSTEM_ROLES]
    others = [i for i, one in enumerate(messages) if one["role"] not in SYSTEM_ROLES]
    if system and others:
        yield system + others
        leading = [i for i, j in zip(system, range(len(messages)), strict=False) if i == j]
        rest = [i for i in range(len(messages)) if i not in leading]
        last = next((n for n in reversed(range(len(rest))) if messages[rest[n]]["role"] == "user"), 0)
        yield rest[:last] + leading + rest[last:]


def _blocks(messages: Sequence[Message], order: Sequence[int]) -> Iterator[list[int]]:
    """Messages whose parts a template may mix: a message with calls and those of the tools, and any other alone."""
    block: list[int] = []
    for i in order:
        if block and not (messages[i]["role"] == "tool" and messages[block[0]].get("tool_calls")):
            yield block
            block = []
        block.append(i)
    yield block


def _joined(pieces: Sequence[list[Piece]], block: Sequence[int]) -> list[Piece]:
    return [*chain.from_iterable(pieces[i] for i in block)]


def _first_lost(text: str, blocks: Sequence[list[Piece]], in_any_order: bool) -> Piece | None:
    """The first piece that does not follow those of earlier blocks."""
    start = 0
    for pieces in blocks:
        found = [_end_in_order(text, pieces, start)]
        if in_any_order:
            found.append(_end_in_any_order(text, pieces, start))
        ends = [end for end in found if isinstance(end, int)]
        if not ends:
            (*_, missing) = found
            return missing if isinstance(missing, Piece) else None
        start = min(ends)
    return None


def _end_in_order(text: str, pieces: Sequence[Piece], start: int) -> int | Piece:
    """Where the last of the pieces ends, or the first that does not follow the one before it."""
    for piece in pieces:
        found = _find(text, piece.value, start)
        if found is None:
            return piece
        start = found[1]
    return start


def _end_in_any_order(text: str, pieces: Sequence[Piece], start: int) -> int | Piece:
    """Where the last of the pieces ends, or the first that has no place of its own.

    Longer pieces are looked up first, as they may contain shorter ones.
    """
    taken: list[tuple[int, int]] = []
    last: dict[str, int] = {}  # equal pieces need not search the same places again
    for piece in sorted(pieces, key=lambda piece: -len(str(piece.value))):
        found = _find(text, piece.value, last.get(repr(piece.value), start))
        while found is not None and (other := _overlapping(taken, found)):
            found = _find(text, piece.value, other[1])
        if found is None:
            return piece
        insort(taken, found)
        last[repr(piece.value)] = found[1]
    return max((end for _, end in taken), default=start)


def _overlapping(taken: Sequence[tuple[int, int]], span: tuple[int, int]) -> tuple[int, int] | None:
    n = bisect(taken, span)
    return next((one for one in taken[max(n - 1, 0) : n + 1] if one[0] < span[1] and span[0] < one[1]), None)


def _find(text: str, value: Any, start: int) -> tuple[int, int] | None:
    """The beginning and the end of the occurrence that ends first, in any of the forms of a value."""
    forms = _written_forms(value)
    width = FIRST_WINDOW + max(map(len, forms))
    while True:
        places = [(at, at + len(form)) for form in forms if (at := text.find(form, start, start + width)) >= 0]
        if places:
            return min(places, key=lambda place: place[1])
        if start + width >= len(text):
            return None
        width *= 4


def _written_forms(value: Any) -> list[str]:
    """How a template may write a value: as it is, or as JSON or Python."""
    if value is None or isinstance(value, bool | int | float):
        return [*{json.dumps(value), str(value)}]
    quoted = (json.dumps(value, ensure_ascii=False), json.dumps(value), repr(value)) if isinstance(value, str) else ()
    return [*{str(value), *(one[1:-1] for one in quoted)}]


def _pieces(message: Message, index: int, thinking_tags: tuple[str, str], *, is_last: bool) -> list[Piece]:
    """The pieces of a message, in the order of most templates."""
    return [Piece(index, field, one) for field, values in _values(message, thinking_tags, is_last) for one in values]


def _values(message: Message, thinking_tags: tuple[str, str], is_last: bool) -> Iterator[tuple[str, list[Any]]]:
    """(field, values) of the parts of a message."""
    texts = [part["text"] for part in parts_of(message) if part["type"] == "text"]
    pattern = "/(?:no_?)?think|/system_override"  # which SmolLM3's template removes from a system message
    if message["role"] == "assistant":
        tags = [*thinking_tags, *THINKING_TAGS]
        texts = texts if is_last else ["".join(texts).split(thinking_tags[1])[-1].split(THINKING_TAGS[1])[-1]]
        pattern = "|".join(re.escape(tag.strip()) for tag in tags)
        held = list(thinking_of(message).items()) if is_last else []
        for i, (field, thinking) in enumerate(held):
            if thinking not in [other for _, other in held[:i]]:  # two fields may have the same
                yield field, _stripped([thinking])
    yield "content", _stripped([piece for text in texts for piece in re.split(pattern, text)])
    for call in message.get("tool_calls") or ():
        function = call.get("function") or call
        yield "tool_calls", _stripped([function["name"], *_leaves(function["arguments"])])


def _stripped(values: Sequence[Any]) -> list[Any]:
    """Without white space at the ends of texts, and without empty texts."""
    stripped = [value.strip() if isinstance(value, str) else value for value in values]
    return [value for value in stripped if value != ""]


def _leaves(found: Any) -> Iterator[Any]:
    """The keys and values of arguments."""
    if isinstance(found, Mapping):
        for key, value in found.items():
            if value is not None:  # tables have None in place of arguments that a call lacks
                yield key
                yield from _leaves(value)
    elif isinstance(found, list | tuple):
        for one in found:
            yield from _leaves(one)
    else:
        yield found


def _advice(processor: Any, text: str, message: Message, piece: Piece) -> str:
    other = "use a template that writes it (--chat_template FILE)"
    if piece.field == "tool_calls":
        for call in message["tool_calls"]:
            name = (call.get("function") or call)["name"]
            if name == piece.value and str(call.get("id") or "\0") in text:
                return (
                    f"the template writes the call's id {call['id']!r} in place of the name; set the id as the model "
                    f"does (Kimi K2: 'functions.{name}:0', with the number of the call in the chat)"
                )
        return f"write the calls into the content, as the model does, or {other}"
    if piece.field in THINKING_FIELDS:
        read = [name for name in THINKING_FIELDS if name in str(getattr(processor, "chat_template", ""))]
        rename = f"rename the field to {' or '.join(read)}, which the template reads; or " if read else ""
        return f"{rename}put it between the model's thinking tags at the start of the content, or {other}"
    if message.get("tool_calls"):
        return f"remove the text beside the calls, or {other}"
    return other if message["role"] == "assistant" else f"take another role, or {other}"
