"""Process groups and devices, small reductions and checks over ranks, and full tensors of sharded ones."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rlkit.data.samples import Batch

T = TypeVar("T")

# devices whose all-gather (gloo's) needs a second copy of the result; there each rank broadcasts its part instead
GATHER_BY_BROADCAST = ("cpu",)
# of NCCL and gloo alike. A rank may wait that long for the longest response of another, or for its rewards; NCCL's own
# 10 minutes would end such a run. The watchdog of a run says long before where it stands.
TIMEOUT = timedelta(hours=1)
# size of the full tensors that an engine gathers at once for a sampler: those of a 7B, 729, are in about 60 buckets
BUCKET_BYTES = 256 << 20


def init_distributed(device: str | None = None) -> torch.device:
    """Join the process group of torchrun, or make one of a single process, and return this rank's device."""
    kind = (device or ("cuda" if torch.cuda.is_available() else "cpu")).partition(":")[0]
    local = torch.device(kind) if kind == "cpu" else torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)))
    if kind == "cuda":
        torch.cuda.set_device(local)
    if not dist.is_initialized():
        backend = "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:nccl"
        bound = None if kind == "cpu" else local  # NCCL connects now, on this GPU, and not at the first use
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=TIMEOUT, device_id=bound)
        else:
            dist.init_process_group(
                backend, timeout=TIMEOUT, device_id=bound, store=dist.HashStore(), rank=0, world_size=1
            )
    return local


def set_timeouts(mesh: DeviceMesh) -> DeviceMesh:
    """Give the groups of a mesh the time-out of the process group, which new groups do not take over."""
    for group in mesh.get_all_groups():
        _set_pg_timeout(TIMEOUT, group)
    return mesh


def make_model_parallel_group(data_parallel_rank: int, data_parallel_size: int) -> dist.ProcessGroup | None:
    """The group of all ranks with this data-parallel rank; None if each rank has its own. All ranks call this."""
    if data_parallel_size == dist.get_world_size():
        return None
    data_parallel_ranks = gather_objects(data_parallel_rank)
    members = [[rank for rank, x in enumerate(data_parallel_ranks) if x == i] for i in range(data_parallel_size)]
    return _make_groups(dist.group.WORLD, tuple(map(tuple, members)))[data_parallel_rank]


@cache
def _make_groups(world: dist.ProcessGroup, members: tuple[tuple[int, ...], ...]) -> list[dist.ProcessGroup]:
    """A group of each of these ranks, shared by all engines of the process, as each costs connections and memory."""
    return [dist.new_group(ranks, timeout=TIMEOUT) for ranks in members]


def gather_objects(x: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The objects of all ranks of a group (all ranks by default), in rank order. They are pickled."""
    per_rank: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(per_rank, x, group)
    return per_rank


def all_reduce(
    x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Reduce a small tensor over the ranks of a group (all ranks by default); the result is on the host."""
    x = x.detach().to("cpu", copy=True)
    dist.all_reduce(x, op=op, group=group)
    return x


def start_copy_to_host(tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """Start to copy tensors of one device to the host.

    Returns:
        A function that waits for the copies, but for no later work on the device, and returns them.
    """
    copies = {name: x.to("cpu", non_blocking=True) for name, x in tensors.items()}  # in pinned memory
    device = next(iter(tensors.values())).device
    if device.type == "cpu":
        return lambda: copies
    copied = torch.get_device_module(device).current_stream(device).record_event()

    def wait() -> dict[str, Tensor]:
        copied.synchronize()
        return copies

    return wait


def reduce_metrics(metrics: Mapping[str, Tensor | float], group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """Sum each metric over the ranks of a group (all by default); for names that end in "/max" take the maximum.

    Ranks may have different metrics. The device is synchronised once.
    """
    names = sorted(set().union(*gather_objects(list(metrics), group)))
    device = next((x.device for x in metrics.values() if isinstance(x, Tensor)), None)
    found = {name: metrics.get(name, -math.inf if name.endswith("/max") else 0.0) for name in names}
    numbers = [torch.as_tensor(x, dtype=torch.float64, device=device) for x in found.values()]
    values = torch.stack([number.detach().reshape(()) for number in numbers]).cpu()
    is_max = torch.tensor([name.endswith("/max") for name in names])
    sums, maxima = (all_reduce(values, op, group) for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX))
    return dict(zip(names, torch.where(is_max, maxima, sums).tolist(), strict=True))


def check_same_rows(batch: Batch, data_parallel_rank: int, data_parallel_size: int) -> None:
    """Check that all ranks of a model-parallel group were given the same rows; they would mix up different ones.

    Values that a model or a sampler computed for each token are not compared, because they may be rounded differently.

    Raises:
        ValueError: on all ranks.
    """
    digest = hashlib.blake2b(repr((batch.tokens.shape, batch.lengths, sorted(batch.fields))).encode(), digest_size=7)
    for x in (batch.tokens, batch.mask, *(batch.fields[name] for name in sorted(batch.fields))):
        if x.ndim == 1 or not x.is_floating_point():
            digest.update(x.contiguous().view(torch.uint8).numpy().tobytes())
    digests = torch.zeros(dist.get_world_size(), 2, dtype=torch.long)
    digests[dist.get_rank()] = torch.tensor([data_parallel_rank, int.from_bytes(digest.digest(), "big")])
    if len(set(map(tuple, all_reduce(digests).tolist()))) > data_parallel_size:
        raise ValueError(
            "batch: expected the same rows on all ranks of a model-parallel group, got different ones; give each rank "
            "rows[engine.data_parallel_rank :: engine.data_parallel_size]"
        )


def local_part(x: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, a plain tensor without gradient; other tensors as they are."""
    return x._local_tensor if isinstance(x, DTensor) else x  # `to_local` of a parameter returns a view of it


def shard_like(full: Tensor, x: Tensor) -> Tensor:
    """A full tensor, sharded as `x` is; every rank keeps its part, and sends nothing. `full` itself if `x` is plain."""
    if not isinstance(x, DTensor):
        return full
    return distribute_tensor(full, x.device_mesh, x.placements, src_data_rank=None)


def full_tensor(x: Tensor) -> Tensor:
    """The full tensor of a sharded one, on every rank. All ranks call this together.

    A tensor that is sharded by rows takes no memory beside the result.
    """
    if not isinstance(x, DTensor):
        return x
    if _is_sharded_by_rows(x) and x.device.type in GATHER_BY_BROADCAST:
        return _gather_rows([x])[0].view(x.shape)
    return x.full_tensor()


def full_tensors(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """`full_tensor` of several tensors, one after the other.

    Tensors that are all sharded by rows over one mesh are gathered at once, those of each dtype in one collective. Then
    the memory needed is that of all of them and of the one that is yielded.
    """
    by_rows = len(tensors) > 1 and all(isinstance(x, DTensor) and _is_sharded_by_rows(x) for x in tensors)
    if not by_rows or len({x.device_mesh for x in tensors}) > 1:  # type: ignore[attr-defined]
        yield from map(full_tensor, tensors)
        return
    parts: dict[torch.dtype, Iterator[tuple[Tensor, ...]]] = {}  # of each tensor of a dtype, in their order
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        same = [x for x in tensors if x.dtype == dtype]
        gathered, sizes = _gather_rows(same)  # type: ignore[arg-type]
        by_rank = gathered.split([size for part_sizes in sizes for size in part_sizes])
        parts[dtype] = iter([by_rank[i :: len(same)] for i in range(len(same))])
    for x in tensors:
        yield torch.cat(next(parts[x.dtype])).view(x.shape)


def _is_sharded_by_rows(x: DTensor) -> bool:
    """Whether the last mesh dimension shards the rows, over several ranks, and the other dimensions replicate."""
    several = x.device_mesh.size(x.device_mesh.ndim - 1) > 1
    return several and x.placements[-1] == Shard(0) and set(x.placements[:-1]) <= {Replicate()}


@torch.no_grad()
def _gather_rows(tensors: Sequence[DTensor]) -> tuple[Tensor, list[list[int]]]:
    """Gather tensors that are sharded by rows into one flat tensor.

    Returns:
        The flat tensor: rank 0's part of each tensor, then rank 1's part of each, and so on; and the number of elements
        of each part, by rank and tensor.
    """
    mesh, placements = tensors[0].device_mesh, tensors[0].placements
    group = mesh.get_group(mesh.ndim - 1)
    ranks = range(group.size())
    rows = [-(-x.shape[0] // len(ranks)) for x in tensors]  # like torch.chunk: the last ranks have fewer, or none
    sizes = [
        [max(0, min(n, x.shape[0] - rank * n)) * x.shape[1:].numel() for n, x in zip(rows, tensors, strict=True)]
        for rank in ranks
    ]
    rank_sizes = [sum(part_sizes) for part_sizes in sizes]
    local = [local_part(x).flatten() for x in tensors]
    if local[0].device.type not in GATHER_BY_BROADCAST and len(set(rank_sizes)) == 1:
        return DTensor.from_local(torch.cat(local), mesh, placements, run_check=False).full_tensor(), sizes
    gathered = torch.empty(sum(rank_sizes), dtype=local[0].dtype, device=local[0].device)
    parts = gathered.split(rank_sizes)
    torch.cat(local, out=parts[group.rank()])
    _broadcast_parts(parts, group)
    return gathered, sizes


@torch.no_grad()
def gather_pieces(piece: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The pieces of all ranks, one after the other, on every rank. All ranks of the group call this together.

    Args:
        piece: this rank's, flat.
        sizes: number of elements of each rank's piece.
        group: of these ranks.
    """
    gathered = piece.new_empty(sum(sizes))
    parts = gathered.split(list(sizes))
    parts[group.rank()].copy_(piece)
    _broadcast_parts(parts, group)
    return gathered


def _broadcast_parts(parts: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Each rank sends its part, which is flat, to all others."""
    for rank, part in enumerate(parts):
        if len(part):
            dist.broadcast(part.view(torch.uint8), group=group, group_src=rank)  # as bytes: gloo supports few dtypes
