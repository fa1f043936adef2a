"""Roofline estimate of a step's duration. Each phase takes

    max(FLOPs / peak FLOP/s, bytes / memory bandwidth, bytes / link bandwidth, bytes / host bandwidth)

seconds. This is a lower bound: it assumes that compute, memory, communication and copies to and from the host overlap
completely and run at the speed of the data sheet. A compute-bound phase at 40 % MFU takes two and a half times as long.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

from rlkit.engines.flops import forward_flops
from rlkit.engines.megatron.supported import ParallelDims
from rlkit.plan.cache import HALF
from rlkit.plan.hardware import HOST_BYTES_PER_SECOND, NETWORK_BYTES_PER_SECOND, Gpu
from rlkit.plan.megatron import activation_link_bytes, link_bytes
from rlkit.plan.rehearsal import Rehearsal
from rlkit.plan.sampler import SamplerMemory, sequence_bytes
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

    With a critic, or several updates on a batch, the policy scores all rows before the first update ("old logprobs"),
    and so does the critic ("values"). KTO's policy and reference score the answers to other prompts ("baseline"), which
    take less memory than training.
    """
    step = _step_size(cfg, config, rehearsal, world)
    phases = {}
    samples = hasattr(cfg, "rollout")
    if samples and cfg.max_new_tokens:
        phases["generate"] = _generation_cost(cfg, config, rehearsal.workload, sampler, step.weights)
    if models > 1 or _updates(cfg) > 1 or getattr(cfg, "mini_batches", 1) > 1:
        phases["old logprobs"] = _scoring_cost(cfg, config, rehearsal, step)
    if has_reference:
        phases["reference"] = _scoring_cost(cfg, config, rehearsal, step)
    if getattr(cfg, "baseline", False):
        passes = [_scoring_cost(cfg, config, rehearsal, step)] * (1 + has_reference)
        phases["baseline"] = Cost(*(sum(numbers) for numbers in zip(*map(astuple, passes), strict=True)))
    if models > 1:
        phases["values"] = _scoring_cost(cfg, config, rehearsal, step)
    phases["train"] = _training_cost(cfg, config, rehearsal, step, world, models)
    if samples:
        phases["weight sync"] = _sync_cost(cfg, rehearsal, sampler, step)
    return phases


class _StepSize(NamedTuple):
    """Sizes of a step on which several phases depend.

    Attributes:
        forward: FLOPs of one forward pass over all rows of a rank.
        micro_batches: number of micro-batches of a rank.
        weights: bytes of the policy's weights in 16 bits.
        others: share of a sharded model that is on the other ranks.
    """

    forward: float
    micro_batches: int
    weights: int
    others: float


def _step_size(cfg: Any, config: Any, rehearsal: Rehearsal, world: int) -> _StepSize:
    workload, model_parallel = rehearsal.workload, world // rehearsal.data_parallel_size
    tokens = workload.prompts * (workload.prompt + workload.group_size * workload.answer)
    micro_batches = max(1, -(-tokens // max(cfg.micro_batch_tokens, workload.prompt + workload.answer)))
    forward = rank_flops(config, workload) / model_parallel
    return _StepSize(forward, micro_batches, HALF * rehearsal.parameters, (world - 1) / world)


def _updates(cfg: Any) -> int:
    """How often each row is trained on."""
    return getattr(cfg, "updates_per_batch", getattr(cfg, "ppo_epochs", 1))


def _training_cost(cfg: Any, config: Any, rehearsal: Rehearsal, step: _StepSize, world: int, models: int) -> Cost:
    """All updates of all trained models.

    What is offloaded between phases, of all models, is brought back and put away at least once a step.
    """
    backward = 1 if cfg.lora_rank else 2
    passes = 1 + backward + cfg.enable_gradient_checkpointing
    memory = step.micro_batches * passes * step.weights + 28 * rehearsal.trainable / world
    if cfg.engine == "megatron":
        link = link_bytes(cfg, config, rehearsal, world)
    else:  # weights are gathered for forward and backward, gradients reduced in float32
        link = step.others * step.micro_batches * (2 * step.weights + 4 * rehearsal.trainable)
    repeats = models * _updates(cfg)
    return Cost(repeats * passes * step.forward, repeats * memory, repeats * link, host=2 * rehearsal.host)


def _scoring_cost(cfg: Any, config: Any, rehearsal: Rehearsal, step: _StepSize) -> Cost:
    """One forward pass over all rows."""
    link: float = step.others * step.micro_batches * step.weights
    if cfg.engine == "megatron":
        dims = ParallelDims(**cfg.parallel)
        link = activation_link_bytes(config, dims, rehearsal.workload, forwards=1, backwards=0)
    return Cost(step.forward, step.micro_batches * step.weights, link)


def _sync_cost(cfg: Any, rehearsal: Rehearsal, sampler: SamplerMemory, step: _StepSize) -> Cost:
    """Gathering of the policy's weights, or of its adapters alone, for the sampler."""
    adapters = sends_adapters(cfg)
    gathered = HALF * (rehearsal.trainable if adapters else rehearsal.parameters)
    put_away = (
        2 * sampler.weights if adapters and cfg.rollout == "vllm" else 0
    )  # vLLM's base model, as the trainer works
    return Cost(memory=2 * gathered, link=step.others * gathered, host=put_away)


def _generation_cost(cfg: Any, config: Any, workload: Workload, sampler: SamplerMemory, weights: int) -> Cost:
    """Prefill of each prompt once, then one read of the weights and of the KV cache for each token of an answer.

    The GPUs of a vLLM engine share its work equally; what they send each other is not counted. For servers whose number
    is not given it assumes one sampling GPU per rank, of the same kind, with room for all answers.
    """
    gpus, sequences = sampler.tensor_parallel, max(1, min(sampler.rows, sampler.sequences))
    rounds = -(-sampler.rows // sequences)
    tokens = min(workload.answer, getattr(cfg, "max_turns", 1) * cfg.max_new_tokens)  # a tool may write the others
    mean_cache = sequences * sequence_bytes(config, workload.prompt + workload.answer // 2, gpus)
    flops = rank_flops(config, workload) * sampler.rows / workload.rows / gpus
    return Cost(flops=flops, memory=rounds * tokens * ((sampler.weights or weights) + mean_cache))
