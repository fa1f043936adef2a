"""Which expanded tokens of a prompt stand for which image, video or audio of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from rlkit.data.placeholders import Expansion
from rlkit.vlm.processors import OMNI_PROCESSORS, placeholder_id


def expansions_by_kind(
    processor: Any,
    text: str,
    expanded: Sequence[int],
    replacements: Sequence[Mapping[str, Any]],
    placeholders: Mapping[str, int],
) -> dict[str, list[int | Expansion]]:
    """The tokens that stand for each image, video or audio, by kind.

    Args:
        expanded: tokens of the processor's output.
        replacements: as the processor reports them, see `expansions`.
        placeholders: kind -> token id, for the kinds that the prompt has.
    """
    if type(processor).__name__ in OMNI_PROCESSORS:
        if [*placeholders] == ["video"] and placeholder_id(processor, "audio") in expanded:  # a video with its sound
            return {"video": [Expansion(expanded[1:-1])]}
        return {kind: _run_lengths(expanded, token) for kind, token in placeholders.items()}
    kinds = [one.get("type", "image") for one in replacements]
    found = expansions(processor.tokenizer, text, replacements, [placeholder_id(processor, kind) for kind in kinds])
    return {kind: [one for one, of in zip(found, kinds, strict=True) if of == kind] for kind in placeholders}


def _run_lengths(tokens: Sequence[int], placeholder: int) -> list[int | Expansion]:
    """The number of tokens in each run of a placeholder."""
    return [len([*run]) for token, run in groupby(tokens) if token == placeholder]


class _Gap(NamedTuple):
    """A range of characters outside all replacements: before the first, between two of them, or after the last."""

    start: int
    end: int
    shift: int  # its offset in the expanded text minus that in the text


class _Boundary(NamedTuple):
    """A character of a gap at which a token begins both in the text and in the expanded text: the two tokens."""

    compact: int
    expanded: int


def expansions(
    tokenizer: Any, text: str, replacements: Sequence[Mapping[str, Any]], placeholders: Sequence[int]
) -> list[int | Expansion]:
    r"""The tokens that stand for each image (or video) in the expanded prompt.

    The processor replaces each placeholder in the text with another text, and tokenizes the result. A tokenizer may
    merge the end of a replacement with the text beside it. The tokens of an image therefore reach from the last
    boundary before it to the first one after it. If there is no boundary between two images, the first gets the tokens
    of both. A boundary is a character outside all replacements at which a token begins both in the text and in the
    expanded text.

    For example, let the processor replace <image> by "<i><i>\n":

        text            Look<image>\nDone       tokens   Look | <image> | \n | Done
        expanded text   Look<i><i>\n\nDone      tokens   Look | <i> | <i> | \n\n | Done

    No token of the expanded text begins at the line end that the text had already, so the first boundary after the
    image is at Done. The image therefore has the tokens <i> <i> \n\n, which replace <image> and one token after it:
    `Expansion([<i>, <i>, \n\n], before=0, after=1)`.

    Args:
        replacements: for each image (or video) the `span` of its placeholder in the text, its `replacement`, and the
            `new_span` of that in the expanded text.
        placeholders: token id of each.
    """
    compact_ids, compact_at = _tokens_by_character(tokenizer, text)
    expanded_ids, expanded_at = _tokens_by_character(tokenizer, _expanded_text(text, replacements))
    boundaries = [
        [
            _Boundary(compact_at[x], expanded_at[x + gap.shift])
            for x in range(gap.start, gap.end + 1)
            if x in compact_at and x + gap.shift in expanded_at
        ]
        for gap in _gaps(text, replacements)
    ]
    placeholder_at = [i for i, token in enumerate(compact_ids) if token in placeholders]
    found: list[int | Expansion] = []
    while (image := len(found)) < len(replacements):
        next_gap = next(i for i in range(image + 1, len(boundaries)) if boundaries[i])
        start, stop = boundaries[image][-1], boundaries[next_gap][0]
        tokens = expanded_ids[start.expanded : stop.expanded]
        before, after = placeholder_at[image] - start.compact, stop.compact - placeholder_at[image] - 1
        is_repetition = not before and not after and set(tokens) == {placeholders[image]}
        found.append(len(tokens) if is_repetition else Expansion(tokens, before, after))
        found += [Expansion([])] * (next_gap - image - 1)
    return found


def _expanded_text(text: str, replacements: Sequence[Mapping[str, Any]]) -> str:
    pieces, end = [], 0
    for one in replacements:
        pieces += [text[end : one["span"][0]], one["replacement"]]
        end = one["span"][1]
    return "".join([*pieces, text[end:]])


def _gaps(text: str, replacements: Sequence[Mapping[str, Any]]) -> list[_Gap]:
    starts = [0, *(one["span"][1] for one in replacements)]
    ends = [*(one["span"][0] for one in replacements), len(text)]
    shifts = [0, *(one["new_span"][1] - one["span"][1] for one in replacements)]
    return [_Gap(*gap) for gap in zip(starts, ends, shifts, strict=True)]


def _tokens_by_character(tokenizer: Any, text: str) -> tuple[list[int], dict[int, int]]:
    """Token ids, and: character -> index of the first token that begins there. The end of the text is an entry too."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts = [*(start for start, _ in encoded["offset_mapping"]), len(text)]
    return encoded["input_ids"], {start: i for i, start in reversed([*enumerate(starts)])}
