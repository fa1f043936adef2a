"""Whether a run fits on its GPUs, and which options would make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rlkit.plan import megatron
from rlkit.plan.hardware import USABLE, Gpu
from rlkit.plan.rehearsal import Rehearsal, Roles, rehearse
from rlkit.plan.sampler import SamplerMemory, Servers, sampler_memory, sequence_bytes
from rlkit.vlm.families import head_obstacle
from rlkit.vlm.weight_files import has_only_pickled_weights

GIB = 2**30
SERVERS = "servers"


@dataclass(frozen=True)
class Plan:
    """The memory that a run takes on each GPU.

    Attributes:
        phases: bytes by phase and kind of tensor; "servers" are those of a GPU that only samples.
        gpu: the GPU that the plan is for.
    """

    rehearsal: Rehearsal
    sampler: SamplerMemory
    phases: dict[str, dict[str, int]]
    gpu: Gpu

    @property
    def peak(self) -> int:
        """Bytes of the phase that needs the most memory of a GPU that trains."""
        return max(sum(kinds.values()) for name, kinds in self.phases.items() if name != SERVERS)

    @property
    def too_large(self) -> list[str]:
        """Phases that need more memory than a GPU has."""
        return [name for name, kinds in self.phases.items() if sum(kinds.values()) > USABLE * self.gpu.memory]

    @property
    def fits(self) -> bool:
        """Whether no phase is too large, and the sampler has room for one sequence."""
        return not self.too_large and self.sampler.sequences > 0


def make_plan(
    cfg: Any, roles: Roles, world: int, gpu: Gpu, image_tokens: int | None, servers: Servers | None = None
) -> Plan:
    """Rehearse a step, or estimate it for Megatron, and add estimates for model loading and for the sampler.

    Raises:
        ValueError: the engine or the model refuses an option.
    """
    rehearsal = (megatron.estimate if cfg.engine == "megatron" else rehearse)(cfg, roles, world, image_tokens)
    config = roles.policy or roles.critic
    resident = rehearsal.resident
    rows = rehearsal.workload.rows
    sampler = SamplerMemory(0, 0, rows, rows)
    phases = {"load": loading(cfg, rehearsal), **rehearsal.peaks}
    if roles.policy is not None and cfg.max_new_tokens:
        sampler = sampler_memory(cfg, config, rehearsal, world, gpu, servers)
        taken = {
            "sampler's weights": sampler.weights,
            "sampler's workspace": sampler.workspace,
            "sampler's cache": sampler.cache,
        }
        if cfg.rollout == "vllm":
            phases["weight sync"] = {**phases["weight sync"], "sampler's weights": sampler.weights}
        taken = {kind: size for kind, size in taken.items() if size}
        phases["generate"] = resident if sampler.servers else {**resident, **taken}
        if sampler.servers:
            phases[SERVERS] = taken
    return Plan(rehearsal, sampler, phases, gpu)


def loading(cfg: Any, rehearsal: Rehearsal) -> dict[str, int]:
    """Bytes by kind right after loading: the weights, and a buffer for the largest tensor that a rank reads.

    From pickled files a rank reads the whole model at once.
    """
    kinds = ("parameters", "reference")
    kept = {kind: max(phase.get(kind, 0) for phase in rehearsal.peaks.values()) for kind in kinds}
    kept = {kind: size for kind, size in kept.items() if size}
    read = rehearsal.parameters if has_only_pickled_weights(cfg.model) else rehearsal.largest_tensor
    return {**kept, "largest tensor": 4 * read}


class Way(NamedTuple):
    """A way to save memory.

    Attributes:
        changes: what is changed, as for a person: options to add to the command, or the number of GPUs.
        cfg: options of the recipe with the changes.
        world: number of ranks.
    """

    changes: list[str]
    cfg: Any
    world: int


def ways_to_fit(cfg: Any, plan: Plan, config: Any, world: int, gpus_per_node: int) -> Iterator[Way]:
    """Ways to save memory, the cheapest first.

    All but the last two accumulate. LoRA and each number of GPUs are tried on top of them, and not with each other:

    - a smaller share of the GPU for the sampler: fewer answers at once; or a larger one if it has no room
    - a sampler on several ranks' GPUs together: they communicate for each token
    - fused log-probabilities from hidden states: the output layer is computed twice
    - gradient checkpointing: a third more time
    - smaller micro-batches: weights are gathered more often
    - offloading of weights and optimizer state to host memory between phases: copies in every step
    - LoRA: only adapters are trained
    - more GPUs, each with a smaller shard
    """
    options: dict[str, Any] = {}
    most, share = plan.sampler.utilization, plan.sampler.share
    if most is not None and share is not None and "gpu_memory_utilization" not in cfg.rollout_options:
        if 0.1 < most < share or (share < most and not plan.sampler.sequences):
            options["gpu_memory_utilization"] = most
    if (gpus := _sampler_gpus(plan, config, world, gpus_per_node)) > plan.sampler.tensor_parallel:
        options["rollout_options"] = {**cfg.rollout_options, "tensor_parallel_size": str(gpus)}
    is_fsdp2 = cfg.engine == "fsdp2"
    if is_fsdp2 and not cfg.use_fused_kernels and not head_obstacle(config):
        options["use_fused_kernels"] = True
    if not cfg.enable_gradient_checkpointing:
        options["enable_gradient_checkpointing"] = True
    longest = plan.rehearsal.workload.prompt + plan.rehearsal.workload.answer
    if cfg.micro_batch_tokens > longest:
        options["micro_batch_tokens"] = longest
    if is_fsdp2 and not cfg.offload_between_phases:
        options["offload_between_phases"] = True
    changes: list[str] = []
    for name, value in options.items():
        cfg = replace(cfg, **{name: value})
        changes = [*changes, _as_option(name, value)]
        yield Way(changes, cfg, world)
    if is_fsdp2 and not cfg.lora_rank:
        yield Way([*changes, "--lora_rank 32"], replace(cfg, lora_rank=32), world)
    for factor in (2, 4, 8):
        yield Way([*changes, f"{factor * world} GPUs in place of {world}"], cfg, factor * world)


def _as_option(name: str, value: Any) -> str:
    """An option as on the command line."""
    if value is True:
        return f"--{name}"
    words = [word for pair in value.items() for word in pair] if isinstance(value, dict) else [str(value)]
    return " ".join([f"--{name}", *words])


def _sampler_gpus(plan: Plan, config: Any, world: int, gpus_per_node: int) -> int:
    """The fewest GPUs of one machine over which vLLM's weights leave room for the trainer and a sequence.

    As many as it has now if that is enough, and as many as possible if nothing is.
    """
    sampler, workload = plan.sampler, plan.rehearsal.workload
    if sampler.utilization is None:
        return sampler.tensor_parallel
    heads, weights = config.get_text_config().num_attention_heads, sampler.weights * sampler.tensor_parallel
    sync = sum(plan.phases["weight sync"].values()) - sampler.weights
    resident, row = sum(plan.rehearsal.resident.values()), workload.prompt + workload.answer

    def fits(gpus: int) -> bool:
        generate = resident + sampler.workspace + sequence_bytes(config, row, gpus)
        taken = weights // gpus + max(sync, generate)
        return taken <= USABLE * plan.gpu.memory

    counts = [sampler.tensor_parallel * factor for factor in (1, 2, 4, 8)]
    possible = [gpus for gpus in counts if gpus <= gpus_per_node and not world % gpus and not heads % gpus]
    return next(filter(fits, possible), max(possible, default=sampler.tensor_parallel))
