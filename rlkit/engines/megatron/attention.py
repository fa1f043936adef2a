"""A packed row sharded over context-parallel ranks, and attention over it.

A row consists of segments: sequences, shared prompts, and responses to these. With C context-parallel ranks each
segment is padded to a multiple of 2 C tokens and cut into 2 C chunks. Rank r has chunk r from the front and chunk r
from the back, so that causal attention costs all ranks the same.

Attention is rlkit's on every device, because Transformer Engine's does not support shared prompts. All index tensors
are computed on the host, once for each micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from rlkit.data.packing import concatenated_ranges
from rlkit.engines.packing.attention import AttentionOptions, varlen_attention
from rlkit.engines.packing.inputs import ModelInputs
from rlkit.engines.packing.layout import PackedLayout


@dataclass
class PackedRowParams(PackedSeqParams):
    """What `PackedAttention` and the model need to know of a packed row.

    Its `qkv_format` is "sbhd", one sequence for Megatron: rotary embeddings then follow the position ids. Under "thd"
    Megatron would count positions from the start of each segment, and read the boundaries from the GPU in every layer.

    Attributes:
        layout: of this rank's tokens. With context parallelism their keys are this rank's own, followed by those that
            `key_order` selects.
        key_order: for each segment of the whole row, its prefix and its own tokens: their indices among the tokens of
            all context ranks, rank by rank. None for one rank.
        source: [n] position of each of this rank's tokens in the row before padding, on the host; -1 for padding.
        routed_experts: [n, layers, K] experts for these tokens, see rlkit.vlm.routers; None if the routers choose.
    """

    layout: PackedLayout | None = None
    key_order: Tensor | None = None
    source: Tensor | None = None
    routed_experts: Tensor | None = None


class _PaddedSegments(NamedTuple):
    """The segments of a packed row, each padded for context parallelism.

    Attributes:
        starts, lengths: of the padded segments.
        prefixes: (start, length) of the tokens before its own that each segment attends to; (0, 0) for none.
        source: position in the row before padding of each token of the padded row; -1 for padding.
    """

    starts: list[int]
    lengths: list[int]
    prefixes: list[tuple[int, int]]
    source: Tensor


def context_parallel_inputs(
    inputs: ModelInputs, *, ranks: int, rank: int, multiple: int, device: torch.device
) -> ModelInputs:
    """This context-parallel rank's part of a packed row, as arguments of Megatron's model.

    Args:
        inputs: of the whole row, from `prepare_model_inputs`, on the host.
        ranks, rank: of the context-parallel group.
        multiple: that the length of each rank's part must be divisible by: the degree of sequence parallelism.
        device: where the model runs.
    """
    ids, routed_experts = inputs.kwargs["input_ids"][0], inputs.kwargs.get("routed_experts")
    padded = _pad_segments(inputs.kwargs["packed_layout"], ranks, multiple)
    source = padded.source[concatenated_ranges(*_chunks(padded, ranks, rank))]  # of this rank's tokens
    is_token, position = source >= 0, source.clamp(min=0)
    if routed_experts is not None:
        routed_experts = routed_experts[position].masked_fill(~is_token[:, None, None], -1)
        routed_experts = routed_experts.to(device, non_blocking=True)
    key_order = _key_order(padded, ranks)
    params = PackedRowParams(
        qkv_format="sbhd",
        layout=_local_layout(padded, ranks, rank, device),
        key_order=None if key_order is None else key_order.to(device, non_blocking=True),
        source=source,
        routed_experts=routed_experts,
    )
    kwargs = {
        "input_ids": torch.where(is_token, ids[position], 0)[None].to(device, non_blocking=True),
        "position_ids": inputs.kwargs["position_ids"][..., position].expand(3, 1, -1).to(device, non_blocking=True),
        "attention_mask": None,
        "packed_seq_params": params,
    }
    return _select_local_tokens(inputs, kwargs, source, len(ids), device)


def _pad_segments(layout: PackedLayout, ranks: int, multiple: int) -> _PaddedSegments:
    chunks = 2 * ranks if ranks > 1 else 1
    lengths = [-(-length // chunks) * chunks for length in layout.lengths]
    lengths[-1] += -sum(lengths) % (chunks * multiple)
    ends = list(accumulate(lengths))
    starts = [0, *ends[:-1]]
    padded_start = dict(zip(layout.starts, starts, strict=True))
    prefixes = [(padded_start[start], length) if length else (0, 0) for start, length in layout.prefixes]
    source = torch.full((ends[-1],), -1)
    source[concatenated_ranges(starts, layout.lengths)] = torch.arange(sum(layout.lengths))
    return _PaddedSegments(starts, lengths, prefixes, source)


def _chunks(padded: _PaddedSegments, ranks: int, rank: int) -> tuple[list[int], list[int]]:
    """Starts and lengths, in the padded row, of the chunks that one context-parallel rank has."""
    if ranks == 1:
        return [0], [len(padded.source)]
    starts, lengths = [], []
    for start, length in zip(padded.starts, padded.lengths, strict=True):
        size = length // (2 * ranks)
        starts += [start + rank * size, start + (2 * ranks - 1 - rank) * size]
        lengths += [size, size]
    return starts, lengths


def _key_order(padded: _PaddedSegments, ranks: int) -> Tensor | None:
    """`key_order` of `PackedRowParams`."""
    if ranks == 1:
        return None
    gathered = torch.cat([concatenated_ranges(*_chunks(padded, ranks, rank)) for rank in range(ranks)])
    order = torch.empty_like(gathered)  # of the tokens of the padded row
    order[gathered] = torch.arange(len(gathered))
    segments = zip(padded.prefixes, padded.starts, padded.lengths, strict=True)
    ranges = [one for prefix, start, length in segments for one in (prefix, (start, length))]
    return order[concatenated_ranges([start for start, _ in ranges], [length for _, length in ranges])]


def _local_layout(padded: _PaddedSegments, ranks: int, rank: int, device: torch.device) -> PackedLayout:
    """The layout of one rank's tokens.

    Each chunk attends to the prefix of its segment and to the tokens of the segment before it. These stand together in
    `key_order`, whose keys follow the rank's own keys.
    """
    if ranks == 1:
        return PackedLayout(padded.starts, padded.lengths, padded.prefixes, device)
    starts, lengths = _chunks(padded, ranks, rank)
    keys = [prefix + own for (_, prefix), own in zip(padded.prefixes, padded.lengths, strict=True)]
    first_keys = accumulate(keys[:-1], initial=sum(lengths))
    prefixes = []
    for segment, first_key in enumerate(first_keys):
        for start in starts[2 * segment : 2 * segment + 2]:
            prefixes.append((first_key, padded.prefixes[segment][1] + start - padded.starts[segment]))
    return PackedLayout([0, *accumulate(lengths)][:-1], lengths, prefixes, device)


def _select_local_tokens(
    inputs: ModelInputs, kwargs: dict[str, Any], source: Tensor, row_length: int, device: torch.device
) -> ModelInputs:
    """The scored tokens of the row that this rank has, with positions among its own tokens."""
    is_token = source >= 0
    local_position = torch.full((row_length,), -1)
    local_position[source[is_token]] = is_token.nonzero()[:, 0]
    positions = local_position[inputs.logits_to_keep]
    is_local = positions >= 0
    positions, targets = positions[is_local], inputs.targets[is_local]
    output_indices = inputs.output_indices[is_local[: len(inputs.output_indices)]]
    if not len(positions):  # the model needs at least one position
        positions, targets = positions.new_zeros(1), targets.new_zeros(1)
    positions, targets = (x.to(device, non_blocking=True) for x in (positions, targets))
    return ModelInputs(kwargs, positions, targets, output_indices, inputs.shape)


class PackedAttention(nn.Module):
    """Megatron's core attention for packed rows; context ranks gather the keys and values of the whole row."""

    def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, packed_seq_params: PackedRowParams, **kwargs: Any
    ) -> Tensor:
        """[n, 1, heads, D] queries, keys and values of this rank's tokens -> [n, 1, heads * D]."""
        query, key, value = (x[:, 0] for x in (query, key, value))
        order = packed_seq_params.key_order
        if order is not None:
            key, value = (torch.cat([x, _gather_row(x, order)]) for x in (key, value))
        assert packed_seq_params.layout is not None
        options = AttentionOptions(scale=self.scale)
        return varlen_attention(query, key, value, packed_seq_params.layout, options).flatten(1)[:, None]


def _gather_row(x: Tensor, order: Tensor) -> Tensor:
    """Tokens of all context ranks, in a given order; backward sums the gradients of all ranks."""
    group = parallel_state.get_context_parallel_group()
    return gather_from_sequence_parallel_region(x.contiguous(), group=group).index_select(0, order)
