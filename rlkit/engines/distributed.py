"""Processes and devices: one process without a launcher, or the ranks that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor


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
