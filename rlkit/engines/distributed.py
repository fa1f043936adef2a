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
from torch.nn.functional import pad


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


def ranks_with_equal_rows(data_rank: int, data_world: int) -> dist.ProcessGroup | None:
    """The ranks whose share of rows is number `data_rank` of `data_world`; None where each rank has its own."""
    world = dist.get_world_size()
    if data_world == world:
        return None
    numbers: list[Any] = [None] * world
    dist.all_gather_object(numbers, data_rank)
    members = [[rank for rank in range(world) if numbers[rank] == number] for number in range(data_world)]
    return [dist.new_group(ranks) for ranks in members][data_rank]


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


def whole(x: Tensor) -> Tensor:
    """A tensor as it is without sharding, on every rank; all of them call this together."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def whole_in_turn(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """`whole` of several tensors, one after the other; those that are cut alike by rows come together, at once."""
    first = tensors[0]
    alike = len(tensors) > 1 and all(
        isinstance(x, DTensor) and x.placements[-1] == Shard(0) and set(x.placements[:-1]) <= {Replicate()}
        for x in tensors
    )
    if not alike or len({(x.device_mesh, x.dtype) for x in tensors}) > 1:  # type: ignore[attr-defined]
        yield from map(whole, tensors)
        return
    mesh, placements = first.device_mesh, first.placements  # type: ignore[attr-defined]
    ranks = mesh.size(mesh.ndim - 1)
    rows = [-(-x.shape[0] // ranks) for x in tensors]  # of the first rank, which has the most
    sizes = [n * x.numel() // x.shape[0] for n, x in zip(rows, tensors, strict=True)]
    mine = [x.to_local().flatten() for x in tensors]  # type: ignore[attr-defined]
    joined = torch.cat([pad(part, (0, size - len(part))) for part, size in zip(mine, sizes, strict=True)])
    every = DTensor.from_local(joined, mesh, placements, run_check=False).full_tensor().view(ranks, -1)
    del joined
    for x, part in zip(tensors, every.split(sizes, 1), strict=True):
        yield part.flatten()[: x.numel()].view(x.shape)
