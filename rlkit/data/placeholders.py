"""One placeholder token per image, video or audio, and the tokens that it is expanded to for the model.

vLLM gets a prompt with one placeholder per image (`Sample.compact_ids`), the model one with a placeholder per image
feature (`Sample.token_ids`), in many families with further tokens between them (`Expansion`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Expansion(NamedTuple):
    """The expanded tokens of an image or video that are not just its placeholder repeated: with brackets, rows, times.

    Attributes:
        tokens: what `token_ids` has for the image.
        before, after: how many compact tokens before and after the placeholder they replace as well, because the
            tokenizer merges what the processor inserts with the text beside it (Gemma3's line ends).
    """

    tokens: Sequence[int]
    before: int = 0
    after: int = 0


def expand_placeholders(compact_ids: Sequence[int], placeholders: Mapping[int, Sequence[int | Expansion]]) -> list[int]:
    """`compact_ids` -> `token_ids`: replaces the placeholder of each image with the image's tokens.

    Args:
        compact_ids: tokens with one placeholder per image.
        placeholders: as in `Sample`.
    """
    ids = np.asarray(compact_ids, dtype=np.int64)
    repeats = expanded_lengths(compact_ids, placeholders)
    expanded, first = ids.repeat(repeats), repeats.cumsum() - repeats
    for token, images in placeholders.items():
        for place, image in zip(np.flatnonzero(ids == token), images, strict=True):
            if isinstance(image, Expansion):
                expanded[first[place] : first[place] + len(image.tokens)] = image.tokens
    return expanded.tolist()


def expanded_lengths(compact_ids: Sequence[int], placeholders: Mapping[int, Sequence[int | Expansion]]) -> np.ndarray:
    """The number of expanded tokens for each compact token; their sum is the length of `token_ids`.

    Raises:
        ValueError: the number of placeholders is not the number of images.
    """
    ids = np.asarray(compact_ids, dtype=np.int64)
    repeats = np.ones_like(ids)
    for token, images in placeholders.items():
        at = np.flatnonzero(ids == token)
        if len(at) != len(images):
            raise ValueError(f"compact_ids: expected {len(images)} placeholders of token {token}, got {len(at)}")
        for place, image in zip(at, images, strict=True):
            if isinstance(image, Expansion):
                repeats[place - image.before : place + image.after + 1] = 0
                repeats[place] = len(image.tokens)
            else:
                repeats[place] = image
    return repeats
