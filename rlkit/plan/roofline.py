"""Roofline estimate of a step's duration. Each phase takes

    max(FLOPs / peak FLOP/s, bytes / memory bandwidth, bytes / link bandwidth, bytes / host bandwidth)

seconds. This is a lower bound: it assumes that compute, memory, communication and copies to and from the host overlap
completely and run at the speed of the data sheet. A compute-bound phase at 40 % MFU takes two and a half times as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlkit.engines.flops import forward_flops
from rlkit.engines.megatron.supported import ParallelDims
from rlkit.plan.cache import HALF, cache_bytes
from rlkit.plan.hardware import HOST_BYTES_PER_SECOND, NETWORK_BYTES_PER_SECOND, Gpu
from rlkit.plan.megatron import activation_link_bytes, link_bytes
from rlkit.plan.rehearsal import Rehearsal
from rlkit.plan.sampler import SamplerMemory
from rlkit.plan.workload import Workload
from rlkit.runs.options import sends_adapters


@dataclass(frozen=True)
class Cost:
    """Cost of one phase on one rank.

    Attributes:
        flops: floating-point operations.
        memory: bytes read from and written to the GPU's memory.
        link: bytes sent to other GPUs.
        host: bytes copied from and to host memory.
    """

    flops: float = 0.0
    memory: float = 0.0
    link: float = 0.0
    host: float = 0.0

    def seconds(self, gpu: Gpu, link: float) -> dict[str, float]:
        """Seconds that compute, memory traffic, communication and copies to the host would each take alone."""
        return {
            "compute": self.flops / gpu.flops,
            "memory": self.memory / gpu.memory_bandwidth,
            "link": self.link / link,
            "host": self.host / HOST_BYTES_PER_SECOND,
        }


def link_bandwidth(gpu: Gpu, world: int, gpus_per_node: int) -> float:
    """Bytes per second between ranks: that of the network if the run spans several machines."""
    return gpu.link_bandwidth if world <= gpus_per_node else NETWORK_BYTES_PER_SECOND


def rank_flops(config: Any, workload: Workload) -> int:
    """FLOPs of one forward pass over all rows of a rank. Each prompt is computed once."""
    prompt = (workload.prompt, 0)
    answers = [(workload.answer, workload.prompt)] * workload.group_size
    patches = workload.image_patches(config)
    group_flops = forward_flops(
        config, [prompt, *answers], workload.group_size * workload.answer, [patches] if patches else []
    )
    return group_flops * workload.prompts


def costs(
    cfg: Any, config: Any, rehearsal: Rehearsal, sampler: SamplerMemory, world: int, *, has_reference: bool, models: int
) -> dict[str, Cost]:
    """The cost of each phase of a step on one rank.

    Args:
        cfg: options of the recipe.
        config: configuration of the policy.
        rehearsal, sampler: memory in the plan.
        world: number of ranks.
        has_reference: whether a reference model, or the policy without its adapters, scores all rows.
        models: number of trained models: 2 with a critic, which is assumed to have the policy's size.
    """
    workload, model_parallel = rehearsal.workload, world // rehearsal.data_parallel_size
    forward = rank_flops(config, workload) / model_parallel
    tokens = workload.prompts * (workload.prompt + workload.group_size * workload.answer)
    micro_batches = max(1, -(-tokens // max(cfg.micro_batch_tokens, workload.prompt + workload.answer)))
    weights = HALF * rehearsal.parameters
    others = (world - 1) / world
    updates = getattr(cfg, "updates_per_batch", getattr(cfg, "ppo_epochs", 1))
    backward = 1 if cfg.lora_rank else 2
    passes = 1 + backward + cfg.enable_gradient_checkpointing
    trained = {
        "flops": passes * forward * updates,
        "memory": micro_batches * updates * passes * weights + 28 * rehearsal.trainable / world * updates,
        # weights are gathered for forward and backward, gradients reduced in float32
        "link": others * micro_batches * updates * (2 * weights + 4 * rehearsal.trainable),
    }
    if cfg.engine == "megatron":
        trained["link"] = link_bytes(cfg, config, rehearsal, world) * updates
    found = {"generate": _generation(cfg, config, workload, sampler, weights)} if hasattr(cfg, "rollout") else {}
    if not getattr(cfg, "max_new_tokens", 0):
        found = {}
    if has_reference:
        gathered = others * micro_batches * weights
        if cfg.engine == "megatron":
            gathered = activation_link_bytes(config, ParallelDims(**cfg.parallel), workload, forwards=1, backwards=0)
        found["reference"] = Cost(forward, micro_batches * weights, gathered)
    # what is offloaded between phases, of all models, is brought back and put away at least once a step
    found["train"] = Cost(**{name: models * x for name, x in trained.items()}, host=2 * rehearsal.host)
    if not hasattr(cfg, "rollout"):  # a recipe that does not sample, such as reward_model.py
        return found
    size = 4 if cfg.dtype == "float32" and cfg.rollout not in ("hf", "vllm") else HALF  # vLLM's own dtype
    adapters = sends_adapters(cfg)
    gathered = size * (rehearsal.trainable if adapters else rehearsal.parameters)
    put_away = 2 * weights if adapters and cfg.rollout == "vllm" else 0  # vLLM's base model, while the trainer works
    found["weight sync"] = Cost(memory=2 * gathered, link=others * gathered, host=put_away)
    return found


def _generation(cfg: Any, config: Any, workload: Workload, sampler: SamplerMemory, weights: int) -> Cost:
    """Prefill of each prompt once, then one read of the weights and of the KV cache for each token of an answer.

    For servers it assumes one sampling GPU per rank, of the same kind.
    """
    sequences = max(1, min(workload.rows, sampler.sequences))
    rounds = -(-workload.rows // sequences)
    mean_cache = sequences * cache_bytes(config, workload.prompt + workload.answer // 2)
    return Cost(flops=rank_flops(config, workload), memory=rounds * workload.answer * (weights + mean_cache))
