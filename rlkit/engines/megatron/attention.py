"""A packed row spread over context-parallel ranks, and attention over it where Transformer Engine is absent.

Under context parallelism of degree C each sequence is padded to a multiple of 2 C tokens and cut into 2 C pieces; rank
r holds the r-th from the front and the r-th from the back, so that causal attention costs every rank the same. The
order is Megatron's own and Transformer Engine's.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from rlkit.data.packing import concatenated_ranges
from rlkit.engines.packing.attention import Layout, varlen_attention
from rlkit.engines.packing.inputs import ModelInputs


@dataclass
class PackedRow(PackedSeqParams):
    """What Megatron is told of a packed row, and what `PackedAttention` asks of it.

    Attributes:
        layout: of this rank's tokens; under context parallelism their keys are its own and then those of the row.
        order: where each token of the padded row stands among the tokens of all context ranks; None for one rank.
        source: [n] where each of this rank's tokens stands in the row before padding; -1 for padding.
        routing: [n, layers, K] experts that each of them goes to, see rlkit.vlm.routers; None if the routers choose.
    """

    layout: Layout | None = None
    order: Tensor | None = None
    source: Tensor | None = None
    routing: Tensor | None = None


def share_of_row(inputs: ModelInputs, *, ranks: int, rank: int, multiple: int, on_host: bool) -> ModelInputs:
    """This context rank's part of a packed row, in Megatron's arguments.

    Args:
        inputs: the row, as `rlkit.engines.packing.inputs.pack` lays it out with `share_prompts=False`.
        ranks, rank: of the context-parallel group.
        multiple: what the length of each rank's part must divide by (the degree of sequence parallelism).
        on_host: leave the boundaries on the host, where Megatron's own rotary embedding reads them; Transformer Engine
            wants them on the device.
    """
    ids, whole = inputs.kwargs["input_ids"], inputs.kwargs["packed_layout"]
    device, pieces = ids.device, 2 * ranks if ranks > 1 else 1
    padded = [-(-length // pieces) * pieces for length in whole.lengths]
    padded[-1] += -sum(padded) % (pieces * multiple)
    starts = [0, *accumulate(padded)]
    source = torch.full((starts[-1],), -1)  # [padded N], place in the row before padding
    source[concatenated_ranges(starts[:-1], whole.lengths)] = torch.arange(ids.shape[1])
    mine = concatenated_ranges(*_pieces(starts, padded, ranks, rank))
    order = None
    if ranks > 1:
        everyone = torch.cat([concatenated_ranges(*_pieces(starts, padded, ranks, r)) for r in range(ranks)])
        order = torch.empty_like(everyone)
        order[everyone] = torch.arange(len(everyone))
        order = order.to(device)

    taken = source[mine]
    real = (taken >= 0).nonzero()[:, 0]
    place = torch.full((ids.shape[1],), -1)  # of each token of the row among mine
    place[taken[real]] = real
    fill, real = taken.clamp(min=0).to(device), real.to(device)
    tokens = ids.new_zeros(1, len(mine)).index_copy(1, real, ids[:, fill[real]])
    positions = inputs.kwargs["position_ids"][..., source.clamp(min=0).to(device)]  # Megatron takes this rank's part

    routing = inputs.kwargs.get("routed_experts")
    if routing is not None:
        routing = routing[fill].masked_fill((taken < 0).to(device)[:, None, None], -1)
    keep = place.to(device)[inputs.keep]
    here = keep >= 0
    keep, targets, slots = keep[here], inputs.targets[here], inputs.slots[here[: len(inputs.slots)]]
    if not len(keep):
        keep, targets = keep.new_zeros(1), targets.new_zeros(1)
    bounds = torch.tensor(starts, dtype=torch.int32, device="cpu" if on_host else device)
    row = PackedRow(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(padded),
        max_seqlen_kv=max(padded),
        layout=_local_layout(starts, padded, ranks, rank, device),
        order=order,
        source=taken.to(device),
        routing=routing,
    )
    kwargs = {"input_ids": tokens, "position_ids": positions, "attention_mask": None, "packed_seq_params": row}
    return ModelInputs(kwargs, keep, targets, slots, inputs.shape)


def _pieces(starts: list[int], padded: list[int], ranks: int, rank: int) -> tuple[list[int], list[int]]:
    """Starts and lengths, in the padded row, of what one context rank holds."""
    if ranks == 1:
        return [0], [starts[-1]]
    begins, sizes = [], []
    for start, length in zip(starts, padded, strict=False):
        size = length // (2 * ranks)
        begins += [start + rank * size, start + (2 * ranks - 1 - rank) * size]
        sizes += [size, size]
    return begins, sizes


def _local_layout(starts: list[int], padded: list[int], ranks: int, rank: int, device: torch.device) -> Layout:
    """Of one rank's tokens. Each piece of a sequence attends to what lies before it, which is found in the whole row
    that stands behind the rank's own tokens."""
    if ranks == 1:
        return Layout(starts[:-1], padded, [(0, 0)] * len(padded), device)
    begins, sizes = _pieces(starts, padded, ranks, rank)
    own = sum(sizes)
    firsts = [start for start in starts[:-1] for _ in range(2)]
    before = [(own + first, begin - first) for first, begin in zip(firsts, begins, strict=True)]
    return Layout([0, *accumulate(sizes)][:-1], sizes, before, device)


class PackedAttention(nn.Module):
    """Megatron's core attention for packed rows; keys and values of the whole row are gathered over context ranks."""

    def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, packed_seq_params: PackedRow, **kwargs: Any
    ) -> Tensor:
        """[n, heads, D] queries, [n, key heads, D] keys and values of this rank's tokens -> [n, heads, D]."""
        if packed_seq_params.order is not None:
            key, value = (torch.cat([x, _gather(x, packed_seq_params.order)]) for x in (key, value))
        assert packed_seq_params.layout is not None
        return varlen_attention(query, key, value, packed_seq_params.layout, scale=self.scale)


def _gather(x: Tensor, order: Tensor) -> Tensor:
    """Every context rank's tokens in the order of the row; backward adds up what the ranks did with them."""
    group = parallel_state.get_context_parallel_group()
    return gather_from_sequence_parallel_region(x.contiguous(), group=group).index_select(0, order)
