"""Rows dealt anew among the ranks of a data group, so that none waits long for the one with the most tokens."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from rlkit.data.batching import balanced_partitions
from rlkit.data.samples import Batch
from rlkit.engines.packing.inputs import shared_costs


def deal(costs: Sequence[Sequence[int]]) -> list[list[int]]:
    """Which rank each unit goes to, so that the dearest rank is nearly as cheap as it can be.

    Longest processing time first, see `rlkit.data.balanced_partitions`. Where that does not lower the largest sum, all
    stay where they are.

    Args:
        costs: of each rank the costs of its units, e.g. in tokens.

    Returns:
        Of each rank the new rank of each of its units. Equal input, equal output.
    """
    owners = [(rank, unit) for rank, own in enumerate(costs) for unit in range(len(own))]
    flat = [cost for own in costs for cost in own]
    parts = balanced_partitions(flat, len(costs))
    to = [[rank] * len(own) for rank, own in enumerate(costs)]
    if max(sum(flat[i] for i in part) for part in parts) < max(map(sum, costs)):
        for new, part in enumerate(parts):
            for rank, unit in map(owners.__getitem__, part):
                to[rank][unit] = new
    return to


def rebalance_across_ranks(batch: Batch, group: dist.ProcessGroup | None = None) -> Batch:
    """This rank's share of the rows of all ranks, dealt anew by their tokens: a step takes as long as its slowest rank.

    Rows of one prompt (`group_ids`) stay together, since its tokens and images are computed once for all of them, and
    what compares them can still be worked out behind this; rows of equal `micro_batch_group`
    stay together, too.
    A prompt's tokens count once. What comes out adds up to the same gradient; a batch of mini-batches is dealt one
    mini-batch at a time.

    Args:
        batch: this rank's rows, on the host. A prompt has the same number in `group_ids` on no other rank.
        group: `engine.data_parallel_group`: all of its ranks call this together. Ranks which share a model are in
            several, and are dealt the same rows, as each deal depends on lengths alone.

    Returns:
        Rows with all of their fields and images; numbers in `micro_batch_group` are new. The batch itself where the
        group is one rank, or where no deal is better.

    Raises:
        ValueError: on all ranks alike: some have fields that others lack.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if ranks == 1:
        return batch
    units: dict[int, list[int]] = {}
    ids = batch.fields.get("micro_batch_group", batch.fields.get("group_ids", torch.arange(len(batch))))
    for row, number in enumerate(ids.tolist()):
        units.setdefault(number, []).append(row)
    tokens, _ = shared_costs(batch)
    told: list[Any] = [None] * ranks
    mine = [sum(tokens[row] for row in rows) for rows in units.values()]
    dist.all_gather_object(told, (mine, sorted(batch.fields)), group=group)
    if len(names := {tuple(fields) for costs, fields in told if costs}) > 1:
        raise ValueError(f"batch: the same fields on all ranks expected, came {' and '.join(map(str, sorted(names)))}")
    dealt = deal([costs for costs, _ in told])
    if all(new == old for old, own in enumerate(dealt) for new in own):
        return batch
    outgoing: list[list[int]] = [[] for _ in range(ranks)]
    for rows, new in zip(units.values(), dealt[rank], strict=True):
        outgoing[new] += rows
    parts = [batch.select(sorted(rows)) for rows in outgoing]
    if "micro_batch_group" in batch.fields:  # ranks number theirs alike
        parts = [part.add(micro_batch_group=part.micro_batch_group * ranks + rank) for part in parts]
    sent = [_written(part) if to != rank and len(part) else b"" for to, part in enumerate(parts)]
    came = [_read(piece) for piece in _exchange(sent, group) if piece]
    return _joined([part for part in [parts[rank], *came] if len(part)] or parts[:1])


def _exchange(pieces: Sequence[bytes], group: dist.ProcessGroup | None) -> list[bytes]:
    """Each rank is given the piece that each rank has for it."""
    sizes = torch.tensor([len(piece) for piece in pieces])
    others = torch.empty_like(sizes)
    dist.all_to_all_single(others, sizes, group=group)
    sent = torch.frombuffer(bytearray().join([*pieces, b" "]), dtype=torch.uint8)[:-1]  # it takes nothing empty
    came = torch.empty(int(others.sum()), dtype=torch.uint8)
    dist.all_to_all_single(came, sent, others.tolist(), sizes.tolist(), group=group)
    return [piece.numpy().tobytes() for piece in came.split(others.tolist())]


def _written(part: Batch) -> bytes:
    """As torch.save has it: a tensor that rows share, as they do a prompt's images, is written once and read as one."""
    buffer, vision = io.BytesIO(), [dict(row) for row in part.vision]
    torch.save([part.tokens, part.mask, part.lengths, vision, part.fields], buffer)
    return buffer.getvalue()


def _read(piece: bytes) -> Batch:
    tokens, mask, lengths, vision, fields = torch.load(io.BytesIO(piece), weights_only=True)
    return Batch(tokens, mask, lengths, vision, **fields)


def _joined(parts: Sequence[Batch]) -> Batch:
    """Their rows in one batch, as wide as the longest."""
    width = max(part.tokens.shape[1] for part in parts)

    def join(pieces: Sequence[Tensor], fill: int = 0) -> Tensor:
        if pieces[0].ndim == 1:
            return torch.cat(list(pieces))
        return torch.cat([pad(x, (*[0, 0] * (x.ndim - 2), 0, width - x.shape[1]), value=fill) for x in pieces])

    fields = {
        name: join([part.fields[name] for part in parts], -1 if name == "routed_experts" else 0)
        for name in parts[0].fields
    }
    return Batch(
        join([part.tokens for part in parts]),
        join([part.mask for part in parts]),
        [length for part in parts for length in part.lengths],
        [row for part in parts for row in part.vision],
        **fields,
    )
