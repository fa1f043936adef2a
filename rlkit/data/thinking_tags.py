"""The tags around the thinking in a response, which a row may set."""

from __future__ import annotations

from rlkit.data.samples import Row

THINKING_TAGS = ("<think>", "</think>")
"""What begins and ends the thinking in a response, unless the row has other `thinking_tags`."""


def thinking_tags_of(row: Row) -> tuple[str, str]:
    """What begins and ends the thinking in responses to a row: its `thinking_tags`, or `THINKING_TAGS`.

    Raises:
        ValueError: not two different texts.
    """
    tags = row.get("thinking_tags") or THINKING_TAGS
    if len(tags) != 2 or not all(isinstance(tag, str) and tag.strip() for tag in tags) or tags[0] == tags[1]:
        raise ValueError(f"thinking_tags: expected two different texts, got {tags!r}")
    return tags[0], tags[1]


def opens_thinking(prompt: str, tags: tuple[str, str] = THINKING_TAGS) -> bool:
    """Whether a prompt ends with the tag that begins thinking, so that the response begins with thinking."""
    return prompt.rstrip().endswith(tags[0].rstrip())
