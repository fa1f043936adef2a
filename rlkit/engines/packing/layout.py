"""Where the sequences of a packed row lie, and which keys each of its tokens attends to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from rlkit.data.packing import concatenated_ranges
from rlkit.engines.packing.rows import Rows, rows_that_continue, rows_with_prefixes
from rlkit.engines.packing.ulysses import UlyssesGroup


class PackedLayout:
    """The segments of a packed row: consecutive queries, and the keys that they attend to.

    A sequence is one segment. Where several responses share a prompt, the prompt is one segment and each response
    another, which attends to the prompt as its prefix. Index tensors are computed once, since every layer needs them.
    (This is not a dataclass: FSDP rebuilds dataclass arguments at every layer.)

    Args:
        starts, lengths: of the queries of each segment in the row, in order and without gaps.
        prefixes: (start, length) of the tokens before its own that each segment attends to; (0, 0) for none.
        device: where attention runs.

    Attributes:
        key_lengths: keys of each segment, its prefix included.
        image_ids: [N] number of the image that a token belongs to, -1 for text; None unless the tokens of an image
            attend to each other.
        images_in_windows: whether they do so in layers with a sliding window only, and within that window.
        ulysses: the ranks that share the row; None if one rank has all of it.
        attention_calls: how many layers have called packed attention with this layout.
        calls_by_sequence: how many of `layers_by_sequence` have computed its sequences as separate rows.
    """

    def __init__(
        self,
        starts: Sequence[int],
        lengths: Sequence[int],
        prefixes: Sequence[tuple[int, int]],
        device: torch.device,
    ) -> None:
        self.starts, self.lengths, self.prefixes, self.device = starts, lengths, prefixes, device
        self.key_lengths = [prefix + own for (_, prefix), own in zip(prefixes, lengths, strict=True)]
        self.image_ids: Tensor | None = None
        self.images_in_windows = False
        self.ulysses: UlyssesGroup | None = None
        self.attention_calls = self.calls_by_sequence = 0
        self._chunked: dict[int, PackedLayout] = {}

    def image_ids_for(self, window: int | None) -> Tensor | None:
        """`image_ids` for a layer with this window; None if its images are causal."""
        return None if self.images_in_windows and window is None else self.image_ids

    def chunked(self, size: int) -> PackedLayout:
        """The layout of chunked attention, in which each chunk of a sequence is a segment of its own.

        A query attends to the earlier keys of its chunk. Chunks are counted from the start of the sequence, its prefix
        included.
        """
        if max(self.key_lengths, default=0) <= size:
            return self
        if size not in self._chunked:
            self._chunked[size] = PackedLayout(*self._cut(size), self.device)
        return self._chunked[size]

    def _cut(self, size: int) -> tuple[list[int], list[int], list[tuple[int, int]]]:
        """starts, lengths and prefixes of the segments, cut where a chunk of `size` tokens ends."""
        starts, lengths, prefixes = [], [], []
        for start, length, (prefix_start, prefix) in zip(self.starts, self.lengths, self.prefixes, strict=True):
            done = 0
            while done < length:
                chunk_start = (prefix + done) // size * size  # position in the sequence
                part = min(length, chunk_start + size - prefix) - done
                prefix_part = max(0, prefix - chunk_start)
                starts.append(start + done)
                lengths.append(part)
                prefixes.append((prefix_start + chunk_start, prefix_part) if prefix_part else (0, 0))
                done += part
        return starts, lengths, prefixes

    @cached_property
    def positions(self) -> Tensor:
        """[N] position of each token in its sequence, counted from 0."""
        ranges = concatenated_ranges([length for _, length in self.prefixes], self.lengths)
        return ranges.to(self.device, non_blocking=True)

    @property
    def sequence_lengths(self) -> list[int]:
        """Length of each sequence, its shared prompt included; the prompt's own segment is not a sequence."""
        prompts = {start for start, length in self.prefixes if length}
        return [n for start, n in zip(self.starts, self.key_lengths, strict=True) if n and start not in prompts]

    @property
    def has_shared_prompts(self) -> bool:
        """Whether any segment has a prefix."""
        return any(length for _, length in self.prefixes)

    @cached_property
    def rows_with_prefixes(self) -> Rows:
        """The segments as rows of a batch, each with its prefix before it."""
        return rows_with_prefixes(self.starts, self.lengths, self.prefixes, self.device)

    @cached_property
    def rows_that_continue(self) -> Rows:
        """The segments as rows of a batch, of which those with a prefix continue from its last state."""
        return rows_that_continue(self.starts, self.lengths, self.prefixes, self.device)

    @cached_property
    def cu_seqlens_q(self) -> Tensor:
        """[S + 1] int32 boundaries of the queries, as flash-attn and torch's varlen_attn take them."""
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32).to(self.device, non_blocking=True)

    @cached_property
    def cu_seqlens_k(self) -> Tensor:
        """[S + 1] int32 boundaries of the keys."""
        return torch.tensor([0, *accumulate(self.key_lengths)], dtype=torch.int32).to(self.device, non_blocking=True)

    @cached_property
    def key_indices(self) -> Tensor | None:
        """[K] index in the row of each key, segment after segment; None if keys and row are the same."""
        if not self.has_shared_prompts:
            return None
        own = zip(self.starts, self.lengths, strict=True)
        ranges = [one for pair in zip(self.prefixes, own, strict=True) for one in pair]
        indices = concatenated_ranges([start for start, _ in ranges], [length for _, length in ranges])
        return indices.to(self.device, non_blocking=True)

    @cached_property
    def blocks(self) -> list[AttentionBlock]:
        """The segments as rectangles for SDPA: segments of similar shape are padded and computed together."""
        return [self._block(segments) for segments in self._similar_segments()]

    def _similar_segments(self) -> list[list[int]]:
        """Segments in groups. Padding a group to one rectangle at most doubles its number of attention scores.

        Segments with a prefix and segments without one are never in a group together: the latter need no mask.
        """
        shapes = sorted(
            (keys == queries, keys, queries, segment)
            for segment, (keys, queries) in enumerate(zip(self.key_lengths, self.lengths, strict=True))
            if queries
        )
        groups: list[list[int]] = []
        group_is_square, most_keys, most_queries, scores = False, 0, 0, 0
        for is_square, keys, queries, segment in shapes:
            grown_keys, grown_queries = max(most_keys, keys), max(most_queries, queries)
            grown_scores = scores + keys * queries
            similar = groups and is_square == group_is_square
            if similar and (len(groups[-1]) + 1) * grown_keys * grown_queries <= 2 * grown_scores:
                groups[-1].append(segment)
                most_keys, most_queries, scores = grown_keys, grown_queries, grown_scores
            else:
                groups.append([segment])
                group_is_square, most_keys, most_queries, scores = is_square, keys, queries, keys * queries
        return groups

    def _block(self, segments: Sequence[int]) -> AttentionBlock:
        def column(values: Sequence[int]) -> Tensor:
            return torch.tensor([values[i] for i in segments])[:, None]

        start, queries = column(self.starts), column(self.lengths)
        prefix_start, prefix = (column([one[part] for one in self.prefixes]) for part in (0, 1))
        q, k = torch.arange(int(queries.max())), torch.arange(int((prefix + queries).max()))  # within a segment
        is_query, is_key = q < queries, k < prefix + queries
        key_indices = torch.where(k < prefix, prefix_start + k, start + k - prefix)
        distance = q[:, None] - k
        if prefix.any():  # a padding query gets keys: otherwise attention could be nan, and so could gradients
            distance = (prefix[:, :, None] + distance).masked_fill(~is_query[:, :, None], 0)
        block = AttentionBlock(
            query_indices=torch.where(is_query, start + q, 0),
            key_indices=torch.where(is_key, key_indices, 0),
            distance=distance,
            valid_queries=is_query.flatten().nonzero()[:, 0],
            is_key=is_key,
        )
        return AttentionBlock(*(x.to(self.device, non_blocking=True) for x in block))


class AttentionBlock(NamedTuple):
    """S segments as one rectangle of Q queries and K keys each, padded on the right.

    Attributes:
        query_indices: [S, Q] index of each query in the row; 0 for padding.
        key_indices: [S, K] index of each key in the row; 0 for padding.
        distance: [S, Q, K], or [Q, K] if no segment has a prefix: how many tokens a key lies before a query. With
            prefixes it is 0 for a padding query.
        valid_queries: flat indices of the queries, of all S * Q, that are not padding.
        is_key: [S, K], False for padding.
    """

    query_indices: Tensor
    key_indices: Tensor
    distance: Tensor
    valid_queries: Tensor
    is_key: Tensor

    def attention_mask(
        self, window: int | None, image_ids: Tensor | None, images_in_windows: bool = False
    ) -> Tensor | None:
        """[S, 1, Q, K] or [Q, K] bool: which keys each query attends to; None where plain causal attention is enough.

        Padding needs no mask of its own there: it lies to the right, where a causal mask hides it.
        """
        if self.distance.ndim == 2 and window is None and image_ids is None:
            return None
        mask = self.distance >= 0
        if window is not None and not images_in_windows:
            mask = mask & (self.distance < window)
        if image_ids is not None:
            query_images, key_images = image_ids[self.query_indices][:, :, None], image_ids[self.key_indices][:, None]
            mask = mask | (query_images == key_images) & (query_images >= 0) & self.is_key[:, None]
        if window is not None and images_in_windows:
            mask = mask & (self.distance < window)
        return mask[:, None] if mask.ndim == 3 else mask
