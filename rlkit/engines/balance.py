"""Rows moved between data-parallel ranks, so that all ranks have about as many tokens."""

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
from rlkit.engines.packing.shared_prompts import shared_prompt_costs


def assign_to_ranks(costs: Sequence[Sequence[int]]) -> list[list[int]]:
    """Assign units of work to ranks so that the largest sum of costs on a rank is small.

    Longest processing time first, see `rlkit.data.balanced_partitions`. If that does not lower the largest sum, every
    unit stays on its rank. Equal input gives equal output.

    Args:
        costs: for each rank the costs of its units, e.g. in tokens.

    Returns:
        For each rank the new ranks of its units.
    """
    units = [(rank, unit) for rank, rank_costs in enumerate(costs) for unit in range(len(rank_costs))]
    flat = [cost for rank_costs in costs for cost in rank_costs]
    parts = balanced_partitions(flat, len(costs))
    new_ranks = [[rank] * len(rank_costs) for rank, rank_costs in enumerate(costs)]
    if max(sum(flat[i] for i in part) for part in parts) < max(map(sum, costs)):
        for new_rank, part in enumerate(parts):
            for rank, unit in (units[i] for i in part):
                new_ranks[rank][unit] = new_rank
    return new_ranks


def rebalance_across_ranks(batch: Batch, group: dist.ProcessGroup | None = None) -> Batch:
    """Move rows between data-parallel ranks so that all have about as many tokens: a step waits for the slowest rank.

    Rows of one prompt (`group_ids`) move together. Its tokens and images are computed once for all of them, and they
    count once here; functions of a group can still be computed afterwards. Rows of equal `micro_batch_group` move
    together, too. The gradient stays the same. Rebalance each mini-batch by itself, just before it is trained on.

    Args:
        batch: this rank's rows, on the host. Each number in `group_ids` occurs on one rank only.
        group: `engine.data_parallel_group`; all of its ranks call this together. All ranks of a model-parallel group
            get the same rows, because the assignment depends on lengths only.

    Returns:
        This rank's new rows with all of their fields and images, and new numbers in `micro_batch_group`. The batch
        itself if the group is one rank or if nothing would be gained.

    Raises:
        ValueError: on all ranks, if batches have different fields.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if ranks == 1:
        return batch
    units = _units(batch)
    tokens, _ = shared_prompt_costs(batch)
    costs = [sum(tokens[row] for row in rows) for rows in units]
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, (costs, sorted([*batch.fields, *batch.token_fields])), group=group)
    _check_same_fields(gathered)
    new_ranks = assign_to_ranks([costs for costs, _ in gathered])
    if all(new == old for old, unit_ranks in enumerate(new_ranks) for new in unit_ranks):
        return batch
    outgoing: list[list[int]] = [[] for _ in range(ranks)]
    for rows, new_rank in zip(units, new_ranks[rank], strict=True):
        outgoing[new_rank] += rows
    parts = [batch.select(sorted(rows)) for rows in outgoing]
    if "micro_batch_group" in batch.fields:  # each rank has numbered its groups by itself
        parts = [part.add(micro_batch_group=part.micro_batch_group * ranks + rank) for part in parts]
    sent = [_serialise(part) if to != rank and len(part) else b"" for to, part in enumerate(parts)]
    received = [_deserialise(piece) for piece in _all_to_all(sent, group) if piece]
    return _concatenate([part for part in [parts[rank], *received] if len(part)] or [parts[rank]])


def _units(batch: Batch) -> list[list[int]]:
    """The rows that move together."""
    ids = batch.fields.get("micro_batch_group", batch.fields.get("group_ids", torch.arange(len(batch))))
    units: dict[int, list[int]] = {}
    for row, number in enumerate(ids.tolist()):
        units.setdefault(number, []).append(row)
    return list(units.values())


def _check_same_fields(gathered: Sequence[tuple[list[int], list[str]]]) -> None:
    fields = sorted({tuple(names) for costs, names in gathered if costs})
    if len(fields) > 1:
        raise ValueError(f"batch: expected the same fields on all ranks, got {' and '.join(map(str, fields))}")


def _all_to_all(pieces: Sequence[bytes], group: dist.ProcessGroup | None) -> list[bytes]:
    """Send `pieces[r]` to each rank r; returns the pieces that the ranks sent to this one."""
    sizes = torch.tensor([len(piece) for piece in pieces])
    incoming = torch.empty_like(sizes)
    dist.all_to_all_single(incoming, sizes, group=group)
    sent = torch.frombuffer(bytearray().join([*pieces, b" "]), dtype=torch.uint8)[:-1]  # frombuffer needs one byte
    received = torch.empty(int(incoming.sum()), dtype=torch.uint8)
    dist.all_to_all_single(received, sent, incoming.tolist(), sizes.tolist(), group=group)
    return [piece.numpy().tobytes() for piece in received.split(incoming.tolist())]


def _serialise(part: Batch) -> bytes:
    """By torch.save: a tensor that rows share, as they share the images of a prompt, is sent once and stays shared."""
    buffer, vision = io.BytesIO(), [dict(row) for row in part.vision]
    torch.save([part.tokens, part.mask, part.lengths, vision, part.fields, part.token_fields], buffer)
    return buffer.getvalue()


def _deserialise(piece: bytes) -> Batch:
    tokens, mask, lengths, vision, fields, token_fields = torch.load(io.BytesIO(piece), weights_only=True)
    return Batch(tokens, mask, lengths, vision, **fields).add_token_fields(**token_fields)


def _concatenate(parts: Sequence[Batch]) -> Batch:
    """All rows in one batch, as wide as the longest row."""
    width = max(part.tokens.shape[1] for part in parts)

    def concatenate(pieces: Sequence[Tensor], fill: int = 0) -> Tensor:
        if pieces[0].ndim == 1:
            return torch.cat(list(pieces))
        return torch.cat([pad(x, (*[0, 0] * (x.ndim - 2), 0, width - x.shape[1]), value=fill) for x in pieces])

    fields = {
        name: concatenate([part.fields[name] for part in parts], -1 if name == "routed_experts" else 0)
        for name in parts[0].fields
    }
    token_fields = {name: torch.cat([part.token_fields[name] for part in parts]) for name in parts[0].token_fields}
    batch = Batch(
        concatenate([part.tokens for part in parts]),
        concatenate([part.mask for part in parts]),
        [length for part in parts for length in part.lengths],
        [row for part in parts for row in part.vision],
        **fields,
    )
    return batch.add_token_fields(**token_fields)
