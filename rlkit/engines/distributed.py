"""Processes and devices: one process without a launcher, or the ranks that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

GATHERS_TWICE = ("cpu",)  # where an all-gather, gloo's, makes a second copy of all: there each rank broadcasts its own


def init_distributed(device: str | None = None) -> torch.device:
    """Join the process group (make one of a single rank where there is no launcher) and return this rank's device."""
    kind = (device or ("cuda" if torch.cuda.is_available() else "cpu")).partition(":")[0]
    here = torch.device(kind) if kind == "cpu" else torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)))
    if kind == "cuda":
        torch.cuda.set_device(here)
    if not dist.is_initialized():
        backend = "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:nccl"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return here


def layout(device: torch.device, copies_of: int | None, tensor: int) -> DeviceMesh:
    """The ranks as ("copy", "shard", "tensor"): those that hold a copy each, share one, and share matrices.

    Raises:
        ValueError: what does not divide the number of ranks, or does not go together.
    """
    world = dist.get_world_size()
    for name, size in (("fsdp_size", copies_of), ("tensor", tensor)):
        if size is not None and (size < 1 or world % size):
            raise ValueError(f"{name}={size}: a divisor of the number of ranks expected, which is {world}")
    if copies_of is not None and tensor > 1:
        raise ValueError(f"fsdp_size={copies_of}: it does not go together with tensor={tensor}")
    if tensor > 1:
        return init_device_mesh(device.type, (world // tensor, tensor), mesh_dim_names=("shard", "tensor"))
    if copies_of is not None:
        return init_device_mesh(device.type, (world // copies_of, copies_of), mesh_dim_names=("copy", "shard"))
    return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))


def make_model_parallel_group(data_parallel_rank: int, data_parallel_size: int) -> dist.ProcessGroup | None:
    """The group of ranks that share this data-parallel rank's rows; None if every rank has rows of its own."""
    world = dist.get_world_size()
    if data_parallel_size == world:
        return None
    numbers: list[Any] = [None] * world
    dist.all_gather_object(numbers, data_parallel_rank)
    members = [[rank for rank in range(world) if numbers[rank] == number] for number in range(data_parallel_size)]
    return [dist.new_group(ranks) for ranks in members][data_parallel_rank]


def all_reduce(
    x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Of a small tensor over the ranks of a group (all ranks by default), on the host."""
    x = x.detach().to("cpu", copy=True)
    dist.all_reduce(x, op=op, group=group)
    return x


def reduce_metrics(metrics: Mapping[str, Tensor | float], group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """Each metric summed over the ranks of a group (all by default); those whose name ends in "/max" by their maximum.
    One wait for the device."""
    names = sorted(metrics)
    where = next((x.device for x in metrics.values() if isinstance(x, Tensor)), None)
    numbers = [torch.as_tensor(metrics[name], dtype=torch.float64, device=where) for name in names]
    values = torch.stack([number.detach().reshape(()) for number in numbers])
    is_max = torch.tensor([name.endswith("/max") for name in names])
    sums, largest = (all_reduce(values, op, group) for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX))
    return dict(zip(names, torch.where(is_max, largest, sums).tolist(), strict=True))


def full_tensor(x: Tensor) -> Tensor:
    """A tensor as it is without sharding, on every rank; all of them call this together. Rows take no memory beside
    it."""
    if not isinstance(x, DTensor):
        return x
    if _cut_by_rows(x) and x.device.type in GATHERS_TWICE:
        return _gather([x])[0].view(x.shape)
    return x.full_tensor()


def full_tensors(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """`whole` of several tensors, one after the other; those that are cut alike by rows come together, at once, and
    take their own memory and that of the one that is handed out."""
    alike = len(tensors) > 1 and all(isinstance(x, DTensor) and _cut_by_rows(x) for x in tensors)
    if not alike or len({(x.device_mesh, x.dtype) for x in tensors}) > 1:  # type: ignore[attr-defined]
        yield from map(full_tensor, tensors)
        return
    every, sizes = _gather(tensors)  # type: ignore[arg-type]
    parts = every.split([size for of_rank in sizes for size in of_rank])
    for i, x in enumerate(tensors):
        yield torch.cat(parts[i :: len(tensors)]).view(x.shape)


def _cut_by_rows(x: DTensor) -> bool:
    """Whether the ranks of the mesh's last dimension share its rows, and those of the others hold copies."""
    several = x.device_mesh.size(x.device_mesh.ndim - 1) > 1
    return several and x.placements[-1] == Shard(0) and set(x.placements[:-1]) <= {Replicate()}


@torch.no_grad()
def _gather(tensors: Sequence[DTensor]) -> tuple[Tensor, list[list[int]]]:
    """Tensors that are cut alike by rows, flat in one piece of memory: the first rank's part of each, the second's part
    of each, and so on; and how many elements these parts have, by rank and tensor."""
    mesh, placements = tensors[0].device_mesh, tensors[0].placements
    group = mesh.get_group(mesh.ndim - 1)
    ranks = range(group.size())
    rows = [-(-x.shape[0] // len(ranks)) for x in tensors]  # as torch.chunk cuts: the last ranks have fewer, or none
    sizes = [
        [max(0, min(n, x.shape[0] - rank * n)) * x.shape[1:].numel() for n, x in zip(rows, tensors, strict=True)]
        for rank in ranks
    ]
    of_ranks = [sum(of_rank) for of_rank in sizes]
    mine = [x.to_local().flatten() for x in tensors]
    if mine[0].device.type not in GATHERS_TWICE and len(set(of_ranks)) == 1:
        return DTensor.from_local(torch.cat(mine), mesh, placements, run_check=False).full_tensor(), sizes
    every = torch.empty(sum(of_ranks), dtype=mine[0].dtype, device=mine[0].device)
    parts = every.split(of_ranks)
    torch.cat(mine, out=parts[group.rank()])
    for rank, part in enumerate(parts):
        if len(part):
            dist.broadcast(part.view(torch.uint8), group=group, group_src=rank)  # bytes: gloo knows few types
    return every, sizes
