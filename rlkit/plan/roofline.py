"""Seconds of a step by a roofline: for each phase the longest of compute, memory and communication.

    max(FLOPs / peak, bytes / memory bandwidth, bytes / link bandwidth)

These seconds are a floor: they assume that the three overlap completely, and that each runs at the number of the data
sheet. A run that reaches 40 % of a GPU's peak (MFU) takes two and a half times as long where compute is the limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlkit.engines.flops import forward_flops
from rlkit.plan.hardware import NETWORK_BYTES_PER_SECOND, Gpu
from rlkit.plan.rehearsal import Rehearsal
from rlkit.plan.sampler import HALF, SamplerMemory, cache_bytes
from rlkit.plan.workload import Workload


@dataclass(frozen=True)
class Cost:
    """FLOPs, bytes read and written in memory, and bytes sent over the link, for one phase on one rank."""

    flops: float = 0.0
    memory: float = 0.0
    link: float = 0.0

    def seconds(self, gpu: Gpu, link: float) -> dict[str, float]:
        """Seconds that each of the three would take alone."""
        return {
            "compute": self.flops / gpu.flops,
            "memory": self.memory / gpu.memory_bandwidth,
            "link": self.link / link,
        }


def link_bandwidth(gpu: Gpu, world: int, gpus_per_node: int) -> float:
    """Bytes per second between the ranks of a run: of the network if there are several machines."""
    return gpu.link_bandwidth if world <= gpus_per_node else NETWORK_BYTES_PER_SECOND


def rank_flops(config: Any, workload: Workload) -> int:
    """FLOPs of one forward of all rows of a rank; each prompt once."""
    prompt = (workload.prompt, 0)
    answers = [(workload.answer, workload.prompt)] * workload.group_size
    patches = workload.image_patches(config)
    of_group = forward_flops(
        config, [prompt, *answers], workload.group_size * workload.answer, [patches] if patches else []
    )
    return of_group * workload.prompts


def costs(
    cfg: Any, config: Any, rehearsal: Rehearsal, sampler: SamplerMemory, world: int, *, has_reference: bool, models: int
) -> dict[str, Cost]:
    """The cost of each phase of a step on one rank.

    Args:
        cfg: options of the recipe.
        config: of the policy.
        rehearsal, sampler: of the plan.
        world: ranks.
        has_reference: whether a reference model, or the policy without its adapters, scores all rows.
        models: number of trained models: 2 with a critic, which is assumed to have the policy's size.
    """
    workload, model_parallel = rehearsal.workload, world // rehearsal.data_parallel_size
    forward = rank_flops(config, workload) / model_parallel
    tokens = workload.prompts * (workload.prompt + workload.group_size * workload.answer)
    micro_batches = max(1, -(-tokens // max(cfg.micro_batch_tokens, workload.prompt + workload.answer)))
    weights = HALF * rehearsal.parameters
    others = (world - 1) / world
    updates = getattr(cfg, "updates_per_batch", 1)
    backward = 1 if cfg.lora_rank else 2
    passes = 1 + backward + cfg.enable_gradient_checkpointing
    trained = {
        "flops": passes * forward * updates,
        "memory": micro_batches * updates * passes * weights + 28 * rehearsal.trainable / world * updates,
        # weights are gathered for forward and backward, gradients reduced in float32
        "link": others * micro_batches * updates * (2 * weights + 4 * rehearsal.trainable),
    }
    found = {"generate": _generation(cfg, config, workload, sampler, weights)} if hasattr(cfg, "rollout") else {}
    if not getattr(cfg, "max_new_tokens", 0):
        found = {}
    if has_reference:
        found["reference"] = Cost(forward, micro_batches * weights, others * micro_batches * weights)
    found["train"] = Cost(**{name: models * x for name, x in trained.items()})
    if not hasattr(cfg, "rollout"):  # a recipe that does not sample, such as reward_model.py
        return found
    gathered = 4 if cfg.dtype == "float32" and cfg.rollout not in ("hf", "vllm") else HALF  # vLLM's own dtype
    found["weight sync"] = Cost(
        memory=2 * gathered * rehearsal.parameters, link=others * gathered * rehearsal.parameters
    )
    return found


def _generation(cfg: Any, config: Any, workload: Workload, sampler: SamplerMemory, weights: int) -> Cost:
    """Prefill of each prompt once, and one pass over weights and cache for each token of an answer.

    Servers are counted as if each rank had a GPU like its own that samples for it.
    """
    sequences = max(1, min(workload.rows, sampler.sequences))
    rounds = -(-workload.rows // sequences)
    mean_cache = sequences * cache_bytes(config) * (workload.prompt + workload.answer / 2)
    return Cost(flops=rank_flops(config, workload), memory=rounds * workload.answer * (weights + mean_cache))
