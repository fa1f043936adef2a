"""Estimates the memory that sampling takes on a trainer's GPU: the sampler's weights and its KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlkit.plan.cache import HALF, cache_bytes
from rlkit.plan.hardware import USABLE, Gpu
from rlkit.plan.workload import Workload
from rlkit.rollout.hf import cache_bytes_per_token
from rlkit.runs.models import DEFAULT_UTILIZATION


@dataclass(frozen=True)
class SamplerMemory:
    """Memory of sampling on each trainer's GPU.

    Attributes:
        weights, cache: bytes.
        sequences: how many are decoded at once.
        utilization: largest `gpu_memory_utilization` that the trainer leaves room for; None unless vLLM samples.
    """

    weights: int
    cache: int
    sequences: int
    utilization: float | None = None


def sampler_memory(
    cfg: Any, config: Any, workload: Workload, parameters: int, resident: int, gpu: Gpu
) -> SamplerMemory:
    """Memory of the sampling back end on a GPU that it shares with the trainer.

    Args:
        cfg: options of the recipe.
        config: configuration of the policy.
        workload: rows of one rank.
        parameters: number of parameters of the policy.
        resident: bytes that the trainer keeps while answers are sampled.
        gpu: the GPU.
    """
    tokens = workload.prompt + workload.answer
    if cfg.rollout == "hf":  # samples with the trainer's gathered weights; the cache may fill the rest
        row = tokens * cache_bytes_per_token(config, HALF)
        free = int((cfg.gpu_memory_utilization or DEFAULT_UTILIZATION) * gpu.memory) - resident - HALF * parameters
        sequences = max(1, min(workload.rows, 512, free // row))
        return SamplerMemory(HALF * parameters, sequences * row, sequences)
    if cfg.rollout == "vllm":
        most = int(100 * (USABLE * gpu.memory - resident) / gpu.memory) / 100
        cache = int((cfg.gpu_memory_utilization or most) * gpu.memory) - HALF * parameters
        sequences = max(0, cache // cache_bytes(config, tokens))
        return SamplerMemory(HALF * parameters, max(0, cache), sequences, most)
    return SamplerMemory(0, 0, workload.rows)
