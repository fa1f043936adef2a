"""A packed row sharded over context-parallel ranks, and attention over it without Transformer Engine.

With C context-parallel ranks each sequence is padded to a multiple of 2 C tokens and cut into 2 C chunks. Rank r has
chunk r from the front and chunk r from the back, so that causal attention costs all ranks the same. Megatron and
Transformer Engine use the same order.
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
from rlkit.engines.packing.attention import varlen_attention
from rlkit.engines.packing.inputs import ModelInputs
from rlkit.engines.packing.layout import PackedLayout


@dataclass
class PackedRowParams(PackedSeqParams):
    """Megatron's description of a packed row, with what `PackedAttention` and the model need beside it.

    Attributes:
        layout: of this rank's tokens. With context parallelism their keys are this rank's own, followed by all of the
            row's.
        gather_order: where each token of the padded row stands among the tokens of all context ranks, rank by rank;
            None for one rank.
        source: [n] position of each of this rank's tokens in the row before padding; -1 for padding.
        routed_experts: [n, layers, K] experts for these tokens, see rlkit.vlm.routers; None if the routers choose.
    """

    layout: PackedLayout | None = None
    gather_order: Tensor | None = None
    source: Tensor | None = None
    routed_experts: Tensor | None = None


class _PaddedSequences(NamedTuple):
    """The sequences of a packed row, each padded for context parallelism.

    Attributes:
        starts: S + 1 boundaries in the padded row.
        lengths: of the S padded sequences.
        source: position in the row before padding of each token of the padded row; -1 for padding.
    """

    starts: list[int]
    lengths: list[int]
    source: Tensor


def context_parallel_inputs(
    inputs: ModelInputs, *, ranks: int, rank: int, multiple: int, boundaries_on_host: bool
) -> ModelInputs:
    """This context-parallel rank's part of a packed row, as arguments of Megatron's model.

    Args:
        inputs: of the whole row, from `prepare_model_inputs` with `share_prompts=False`.
        ranks, rank: of the context-parallel group.
        multiple: that the length of each rank's part must be divisible by: the degree of sequence parallelism.
        boundaries_on_host: keep `cu_seqlens` on the host, where Megatron's rotary embedding reads them; Transformer
            Engine needs them on the device.
    """
    ids = inputs.kwargs["input_ids"]
    device = ids.device
    padded = _pad_sequences(inputs.kwargs["packed_layout"], ranks, multiple)
    source = padded.source[concatenated_ranges(*_chunks(padded, ranks, rank))]  # of this rank's tokens
    source_on_device, is_token = source.clamp(min=0).to(device), (source >= 0).to(device)
    row_positions = padded.source.clamp(min=0).to(device)  # of the whole row: Megatron selects this rank's
    kwargs = {
        "input_ids": torch.where(is_token, ids[0, source_on_device], 0)[None],
        "position_ids": inputs.kwargs["position_ids"][..., row_positions],
        "attention_mask": None,
    }
    routed_experts = inputs.kwargs.get("routed_experts")
    if routed_experts is not None:
        routed_experts = routed_experts[source_on_device].masked_fill(~is_token[:, None, None], -1)
    cu_seqlens = torch.tensor(padded.starts, dtype=torch.int32, device="cpu" if boundaries_on_host else device)
    gather_order = _gather_order(padded, ranks)
    kwargs["packed_seq_params"] = PackedRowParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(padded.lengths),
        max_seqlen_kv=max(padded.lengths),
        layout=_local_layout(padded, ranks, rank, device),
        gather_order=None if gather_order is None else gather_order.to(device),
        source=source.to(device),
        routed_experts=routed_experts,
    )
    return _select_local_tokens(inputs, kwargs, source, ids.shape[1])


def _pad_sequences(layout: PackedLayout, ranks: int, multiple: int) -> _PaddedSequences:
    chunks = 2 * ranks if ranks > 1 else 1
    lengths = [-(-length // chunks) * chunks for length in layout.lengths]
    lengths[-1] += -sum(lengths) % (chunks * multiple)
    starts = [0, *accumulate(lengths)]
    source = torch.full((starts[-1],), -1)
    source[concatenated_ranges(starts[:-1], layout.lengths)] = torch.arange(sum(layout.lengths))
    return _PaddedSequences(starts, lengths, source)


def _chunks(padded: _PaddedSequences, ranks: int, rank: int) -> tuple[list[int], list[int]]:
    """Starts and lengths, in the padded row, of the chunks that one context-parallel rank has."""
    if ranks == 1:
        return [0], [padded.starts[-1]]
    starts, lengths = [], []
    for start, length in zip(padded.starts, padded.lengths, strict=False):
        size = length // (2 * ranks)
        starts += [start + rank * size, start + (2 * ranks - 1 - rank) * size]
        lengths += [size, size]
    return starts, lengths


def _gather_order(padded: _PaddedSequences, ranks: int) -> Tensor | None:
    """`gather_order` of `PackedRowParams`."""
    if ranks == 1:
        return None
    gathered = torch.cat([concatenated_ranges(*_chunks(padded, ranks, rank)) for rank in range(ranks)])
    order = torch.empty_like(gathered)
    order[gathered] = torch.arange(len(gathered))
    return order


def _local_layout(padded: _PaddedSequences, ranks: int, rank: int, device: torch.device) -> PackedLayout:
    """The layout of one rank's tokens.

    Each chunk attends to the tokens of its sequence before it. These are found in the whole row, whose keys follow the
    rank's own keys.
    """
    if ranks == 1:
        return PackedLayout(padded.starts[:-1], padded.lengths, [(0, 0)] * len(padded.lengths), device)
    starts, lengths = _chunks(padded, ranks, rank)
    own = sum(lengths)
    sequence_starts = [start for start in padded.starts[:-1] for _ in range(2)]  # two chunks of each sequence
    prefixes = [(own + first, start - first) for first, start in zip(sequence_starts, starts, strict=True)]
    return PackedLayout([0, *accumulate(lengths)][:-1], lengths, prefixes, device)


def _select_local_tokens(inputs: ModelInputs, kwargs: dict[str, Any], source: Tensor, row_length: int) -> ModelInputs:
    """The scored tokens of the row that this rank has, with positions among its own tokens."""
    is_token = source >= 0
    local_position = torch.full((row_length,), -1)
    local_position[source[is_token]] = is_token.nonzero()[:, 0]
    positions = local_position.to(inputs.logits_to_keep.device)[inputs.logits_to_keep]
    is_local = positions >= 0
    positions, targets = positions[is_local], inputs.targets[is_local]
    output_indices = inputs.output_indices[is_local[: len(inputs.output_indices)]]
    if not len(positions):  # the model needs at least one position
        positions, targets = positions.new_zeros(1), targets.new_zeros(1)
    return ModelInputs(kwargs, positions, targets, output_indices, inputs.shape)


class PackedAttention(nn.Module):
    """Megatron's core attention for packed rows; context ranks gather the keys and values of the whole row."""

    def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, packed_seq_params: PackedRowParams, **kwargs: Any
    ) -> Tensor:
        """[n, heads, D] queries, [n, key-value heads, D] keys and values of this rank's tokens -> [n, heads, D]."""
        order = packed_seq_params.gather_order
        if order is not None:
            key, value = (torch.cat([x, _gather_row(x, order)]) for x in (key, value))
        assert packed_seq_params.layout is not None
        return varlen_attention(query, key, value, packed_seq_params.layout, scale=self.scale)


def _gather_row(x: Tensor, order: Tensor) -> Tensor:
    """The tokens of all context ranks, in the order of the row; backward sums the gradients of all ranks."""
    group = parallel_state.get_context_parallel_group()
    return gather_from_sequence_parallel_region(x.contiguous(), group=group).index_select(0, order)
