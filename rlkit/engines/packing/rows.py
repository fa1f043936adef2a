"""The segments of a packed row as rows of a batch, for layers that carry a state from token to token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from rlkit.data.packing import concatenated_ranges


class Rows(NamedTuple):
    """A packed row of N tokens as rows in blocks of similar length.

    Attributes:
        blocks: in the order in which they are computed.
        outputs: [N] index of each token of the packed row in the outputs of all blocks, flattened and concatenated.
    """

    blocks: list[RowBlock]
    outputs: Tensor


class RowBlock(NamedTuple):
    """S rows of K tokens.

    Attributes:
        tokens: [S, K] index of each token in the packed row; N for padding.
        prompts: [S] the row whose last state each row continues, counted over all rows of the blocks before that start
            with a state of zeros; None if this block starts with a state of zeros.
    """

    tokens: Tensor
    prompts: Tensor | None = None

    def to(self, device: torch.device) -> RowBlock:
        prompts = None if self.prompts is None else self.prompts.to(device, non_blocking=True)
        return RowBlock(self.tokens.to(device, non_blocking=True), prompts)


def rows_with_prefixes(
    starts: Sequence[int], lengths: Sequence[int], prefixes: Sequence[tuple[int, int]], device: torch.device
) -> Rows:
    """Each segment with its prefix before it: a shared prompt is in the row of each of its responses."""
    count, blocks, own = sum(lengths), [], []
    row_lengths = [length and prefix + length for (_, prefix), length in zip(prefixes, lengths, strict=True)]
    for group in _similar(range(len(lengths)), row_lengths):
        rows = [concatenated_ranges([prefixes[i][0], starts[i]], [prefixes[i][1], lengths[i]]) for i in group]
        tokens = pad_sequence(rows, batch_first=True, padding_value=count)
        in_prefix = torch.arange(tokens.shape[1]) < torch.tensor([prefixes[i][1] for i in group])[:, None]
        blocks.append(RowBlock(tokens))
        own.append(tokens.masked_fill(in_prefix, count))
    return _to_device(blocks, own, count, device)


def rows_that_continue(
    starts: Sequence[int], lengths: Sequence[int], prefixes: Sequence[tuple[int, int]], device: torch.device
) -> Rows:
    """Each segment alone. Those with a prefix continue the state in which their shared prompt ended.

    Prompts are padded on the left, where tokens of zeros leave a state of zeros as it is. Responses are padded on the
    right, to at least two tokens: transformers computes a single token that continues a state as in generation, by
    kernels without a backward pass.
    """
    count = sum(lengths)

    def tokens(group: Sequence[int], padding_side: str) -> Tensor:
        rows = [torch.arange(starts[i], starts[i] + lengths[i]) for i in group]
        return pad_sequence(rows, batch_first=True, padding_value=count, padding_side=padding_side)

    prompts = _similar([i for i, (_, prefix) in enumerate(prefixes) if not prefix], lengths)
    responses = _similar([i for i, (_, prefix) in enumerate(prefixes) if prefix], lengths)
    row_of = {starts[i]: row for row, i in enumerate(chain.from_iterable(prompts))}
    blocks = [RowBlock(tokens(group, "left")) for group in prompts]
    for group in responses:
        response_tokens = tokens(group, "right")
        response_tokens = pad(response_tokens, (0, max(0, 2 - response_tokens.shape[1])), value=count)
        blocks.append(RowBlock(response_tokens, torch.tensor([row_of[prefixes[i][0]] for i in group])))
    return _to_device(blocks, [block.tokens for block in blocks], count, device)


def _similar(segments: Iterable[int], lengths: Sequence[int]) -> list[list[int]]:
    """Segments in groups, in which none is twice as long as another. Segments without tokens are left out."""

    def bits(segment: int) -> int:
        return lengths[segment].bit_length()

    return [list(group) for _, group in groupby(sorted(filter(bits, segments), key=bits), bits)]


def _to_device(blocks: Sequence[RowBlock], own: Sequence[Tensor], count: int, device: torch.device) -> Rows:
    """`Rows` of these blocks; `own` are their tokens, with `count` for those whose outputs are not used."""
    outputs = torch.cat([tokens.flatten() for tokens in own]).argsort()[:count]
    return Rows([block.to(device) for block in blocks], outputs.to(device, non_blocking=True))
