"""What sampling takes on a trainer's GPU: the sampler's weights and its key-value cache, by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlkit.plan.hardware import USABLE, Gpu
from rlkit.plan.workload import Workload
from rlkit.runs.models import DEFAULT_UTILIZATION

HALF = 2  # bytes of a bfloat16 number


@dataclass(frozen=True)
class SamplerMemory:
    """Bytes on each trainer's GPU, and how many sequences are decoded at once.

    Attributes:
        utilization: largest `gpu_memory_utilization` that the trainer leaves room for; of a sampler that has its own.
    """

    weights: int
    cache: int
    sequences: int
    utilization: float | None = None


def cache_bytes(config: Any) -> int:
    """Bytes of keys and values for one token: 2 L K D numbers of two bytes."""
    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * text.num_key_value_heads * size * HALF


def sampler_memory(
    cfg: Any, config: Any, workload: Workload, parameters: int, resident: int, gpu: Gpu
) -> SamplerMemory:
    """What the sampling back end of these options takes beside a trainer.

    Args:
        cfg: options of a recipe.
        config, parameters: of the policy, and how many it has.
        workload: of a rank.
        resident: bytes that the trainer keeps while answers are sampled.
        gpu: which is shared.
    """
    token = cache_bytes(config)
    row = token * (workload.prompt + workload.answer)
    if cfg.rollout == "hf":  # the trainer's weights, gathered; the cache may fill the share that is left
        free = int((cfg.gpu_memory_utilization or DEFAULT_UTILIZATION) * gpu.memory) - resident - HALF * parameters
        sequences = max(1, min(workload.rows, 512, free // row))
        return SamplerMemory(HALF * parameters, sequences * row, sequences)
    if cfg.rollout == "vllm":
        most = int(100 * (USABLE * gpu.memory - resident) / gpu.memory) / 100
        cache = int((cfg.gpu_memory_utilization or most) * gpu.memory) - HALF * parameters
        return SamplerMemory(HALF * parameters, max(0, cache), max(0, cache // row), most)
    return SamplerMemory(0, 0, workload.rows)
