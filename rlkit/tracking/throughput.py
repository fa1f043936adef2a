"""Tokens per second, model FLOPs utilisation and peak memory."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

PHASES_OUTSIDE_STEPS = ("time/evaluate", "time/checkpoint")  # not counted in tokens per second

# Dense bfloat16 FLOP/s of one GPU, from the vendors' data sheets (V100: float16, as it has no bfloat16).
# The first key that occurs in the device's name (in upper case) is used, so "H100 PCIE" is before "H100".
PEAK_FLOPS = {
    "H100 PCIE": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.4e12,
    "H800 PCIE": 756e12,
    "H800": 989.4e12,
    "GH200": 989.4e12,
    "H200 NVL": 835e12,
    "H200": 989.4e12,
    "H20": 148e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "A10": 125e12,
    "A30": 165e12,
    "A40": 149.7e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "V100": 125e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "MI325X": 1307.4e12,
    "MI300X": 1307.4e12,
    "MI250X": 383e12,
}


def rates(metrics: Mapping[str, Any], times: Mapping[str, float], peak: float | None) -> dict[str, float]:
    """Tokens per second, FLOP/s, and model FLOPs utilisation (MFU).

    tokens / step seconds; flops / train seconds; flops / (train seconds * peak). MFU is defined as in PaLM
    (https://arxiv.org/abs/2204.02311, appendix B), without the FLOPs of recomputation.

    Args:
        metrics: metrics of a step. `tokens` and `flops` are sums over all ranks; `flops` is nan if unknown.
        times: seconds by phase, such as `time/train`.
        peak: peak FLOP/s of all ranks together; None if unknown.
    """
    speeds = {}
    seconds = sum(x for name, x in times.items() if name not in PHASES_OUTSIDE_STEPS)
    if "tokens" in metrics and seconds:
        speeds["time/tokens_per_second"] = metrics["tokens"] / seconds
    if times.get("time/train") and math.isfinite(metrics.get("flops", math.nan)):
        speeds["time/train_flops_per_second"] = metrics["flops"] / times["time/train"]
        if peak:
            speeds["time/mfu"] = speeds["time/train_flops_per_second"] / peak
    return speeds


def peak_flops(device: str) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU, by its name from `torch.cuda.get_device_name`; None for an unknown GPU."""
    words = f" {device.upper().replace('-', ' ')} "
    return next((peak for name, peak in PEAK_FLOPS.items() if f" {name} " in words), None)


def peak_flops_of_all_ranks() -> float | None:
    """`peak_flops` of this rank's GPU times the number of ranks; None without a GPU, or with an unknown one."""
    import torch

    if not torch.cuda.is_available():
        return None
    peak = peak_flops(torch.cuda.get_device_name())
    return None if peak is None else peak * int(os.environ.get("WORLD_SIZE", 1))


def gpu_peak(sampler_bytes: int = 0) -> float:
    """Peak of torch's allocations on this rank's GPU since the last call, in GiB; 0 without a GPU.

    vLLM in this process allocates weights and cache by a memory pool of torch, and torch counts this pool also while
    vLLM sleeps and its memory belongs to the trainer again (https://github.com/vllm-project/vllm/issues/17117).
    Therefore its bytes are subtracted. Memory that torch does not allocate, such as that of NCCL and CUDA, is not
    counted.

    Args:
        sampler_bytes: what vLLM holds, `VllmRollout.allocated_bytes`.
    """
    import torch

    if not torch.cuda.is_available():
        return 0.0
    peak = torch.cuda.max_memory_allocated() - sampler_bytes
    torch.cuda.reset_peak_memory_stats()
    return max(0, peak) / 2**30


def sum_of_all_ranks(x: float) -> float:
    """The sum of a number over all ranks, which call this together."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return x
    total = torch.tensor(x, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def highest_of_all_ranks(values: Mapping[str, float]) -> dict[str, float]:
    """The highest value of each name over all ranks; on a CPU, where nothing is measured, those of this rank."""
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available() or not dist.is_initialized():
        return dict(values)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, dict(values))
    return {name: max(rank_values.get(name, 0.0) for rank_values in gathered) for name in values}
