"""Processes and devices: one process without a launcher, or the ranks that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor


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
