"""Whether a run fits on its GPUs, and which options would make it fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product, starmap
from typing import Any, NamedTuple

from rlkit.engines.megatron.supported import ParallelDims, check_supported, is_moe
from rlkit.plan import megatron
from rlkit.plan.cache import cache_bytes
from rlkit.plan.hardware import USABLE, Gpu
from rlkit.plan.rehearsal import Rehearsal, Roles, rehearse
from rlkit.plan.sampler import SamplerMemory, Servers, sampler_memory, sequence_bytes, weight_bytes
from rlkit.runs.options import generates, sends_adapters
from rlkit.vlm.families import head_obstacle
from rlkit.vlm.weight_files import has_only_pickled_weights

GIB = 2**30
SERVERS = "servers"
LOADING = "loading, at most"  # host memory of a machine
MORE_GPUS = (2, 4, 8)  # times as many as there are
LONG_ROW = 4096  # tokens; with longer rows the advice tries Ulysses


@dataclass(frozen=True)
class Plan:
    """The memory that a run takes on each GPU.

    Attributes:
        phases: bytes by phase and kind of tensor; "servers" are those of a GPU that only samples.
        gpu: the GPU that the plan is for.
        host: bytes of a machine's host memory by purpose, see `rlkit.plan.report.host_memory`; empty if not known.
        host_limit: how many bytes of host memory a machine has; None if that is not known.
    """

    rehearsal: Rehearsal
    sampler: SamplerMemory
    phases: dict[str, dict[str, int]]
    gpu: Gpu
    host: Mapping[str, int] = field(default_factory=dict)
    host_limit: int | None = None

    @property
    def peak(self) -> int:
        """Bytes of the phase that needs the most memory of a GPU that trains."""
        return max(sum(kinds.values()) for name, kinds in self.phases.items() if name != SERVERS)

    @property
    def too_large(self) -> list[str]:
        """Phases that need more memory than a GPU has."""
        return [name for name, kinds in self.phases.items() if sum(kinds.values()) > USABLE * self.gpu.memory]

    @property
    def host_peak(self) -> int:
        """Bytes of a machine's host memory that a run needs: while it loads, or while it exports its weights.

        Images are not among them, since they are only that large if all prompts are as long as they may be.
        """
        needed = {name: size for name, size in self.host.items() if not name.startswith("images")}
        loading = needed.pop(LOADING, 0)
        return max(loading, sum(needed.values()))

    @property
    def host_fits(self) -> bool:
        """Whether host memory suffices, if it is known."""
        return self.host_limit is None or self.host_peak <= self.host_limit

    @property
    def fits(self) -> bool:
        """Whether no phase is too large, the sampler has room for one sequence, and host memory suffices."""
        return not self.too_large and self.sampler.sequences > 0 and self.host_fits


def distinct_gib(sizes: Iterable[int], limit: float) -> tuple[list[str], str]:
    """Bytes and their limit in GiB, with as many of up to four decimals as it takes to tell each of them from it."""
    sizes = list(sizes)
    for decimals in (1, 2, 3, 4):
        shown, most = [f"{size / GIB:.{decimals}f}" for size in sizes], f"{limit / GIB:.{decimals}f}"
        if most not in shown:
            break
    return shown, most


def make_plan(
    cfg: Any, roles: Roles, world: int, gpu: Gpu, image_tokens: int | None, servers: Servers | None = None
) -> Plan:
    """Rehearse a step, or estimate it for Megatron, and add estimates for model loading and for the sampler.

    Raises:
        ValueError: the engine or the model refuses an option.
    """
    config, samples = roles.policy or roles.critic, roles.policy is not None and cfg.max_new_tokens
    if samples and (cfg.rollout == "vllm" or servers is not None):
        cache_bytes(config, 1)  # refuse layers whose cache is not known now, and not after minutes of rehearsal
    rehearsal = (megatron.estimate if cfg.engine == "megatron" else rehearse)(cfg, roles, world, image_tokens)
    resident = rehearsal.resident
    rows = rehearsal.workload.sampled_rows
    sampler = SamplerMemory(0, 0, rows, rows)
    phases = {"load": loading(cfg, rehearsal), **rehearsal.peaks}
    if samples:
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

    The first six accumulate. The others are tried on top of them, and not with each other:

    - a smaller share of the GPU for the sampler: fewer responses at once; or a larger one if it has no room
    - a sampler on several ranks' GPUs together: they communicate for each token
    - fused log-probabilities from hidden states: the output layer is computed twice
    - gradient checkpointing: a third more time
    - smaller micro-batches: weights are gathered more often
    - offloading of weights and optimizer state between phases (fsdp2, Megatron), if the host has room: copies in every
      step
    - Ulysses, for long rows: ranks that share rows communicate in each layer
    - LoRA: only adapters are trained; then with a base in bfloat16; then in 4 bits
    - Megatron: weights and gradients split over tensor or expert ranks, then also over pipeline stages
    - more GPUs, each with a smaller shard, and a sampler on as many of them as it needs; with Megatron, which shards
      only the optimizer over them, in the last layout
    - LoRA with a base in bfloat16 or 4 bits on more GPUs
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
    longest = plan.rehearsal.workload.prompt + plan.rehearsal.workload.response
    if cfg.micro_batch_tokens > longest:
        options["micro_batch_tokens"] = longest
    offloaded = min(world, gpus_per_node) * sum(plan.rehearsal.resident.values())
    may_offload = cfg.engine in ("fsdp2", "megatron") and not cfg.offload_between_phases
    if may_offload and (plan.host_limit is None or offloaded <= plan.host_limit):
        options["offload_between_phases"] = True
    names = list(options)
    for count in range(len(names)):
        yield _way(cfg, {name: options[name] for name in names[: count + 1]}, world)
    adapters = _adapter_changes(cfg)
    for more in [*_ulysses_changes(cfg, config, longest, world, gpus_per_node), *adapters]:
        yield _way(cfg, {**options, **more}, world)
    layouts = _megatron_layouts(cfg, config, world, gpus_per_node) if cfg.engine == "megatron" else []
    for layout in layouts:
        yield _way(cfg, {**options, "parallel": layout}, world)
    if layouts:
        options["parallel"] = layouts[-1]
    in_bfloat16 = [more for more in adapters if replace(cfg, **more).dtype == "bfloat16"]
    for factor, more in [*product(MORE_GPUS, [{}]), *product(MORE_GPUS, in_bfloat16)]:
        split = {}
        if (gpus := _sampler_gpus(plan, config, world, gpus_per_node, factor)) > plan.sampler.tensor_parallel:
            split["rollout_options"] = {**cfg.rollout_options, "tensor_parallel_size": str(gpus)}
        yield _way(cfg, {**options, **split, **more}, factor * world, f"{factor * world} GPUs in place of {world}")


def _way(cfg: Any, options: dict[str, Any], world: int, *gpus: str) -> Way:
    """The options of a recipe with others, on a number of ranks."""
    return Way([*starmap(_as_option, options.items()), *gpus], replace(cfg, **options), world)


def least_bytes(cfg: Any, plan: Plan, config: Any, world: int) -> int:
    """Bytes that a GPU needs at least, by arithmetic; 0 for Megatron, whose whole plan is arithmetic. The larger of

    - a rank's shard of weights, gradients and AdamW's two moments
    - its shard of the weights, and those of vLLM on the same GPU, which are sent

    Args:
        cfg: options of the recipe, with those of a way to save memory.
        plan: without these.
        config: configuration of the policy.
        world: number of ranks.
    """
    if cfg.engine != "fsdp2":
        return 0
    size, parameters = (4 if cfg.dtype == "float32" else 2), plan.rehearsal.parameters
    trained = 0 if cfg.lora_rank else plan.rehearsal.trainable
    shards = cfg.parallel.get("fsdp_size", world)
    weights = (0.5 if cfg.quantize_base else size) * parameters / shards
    training = weights + 3 * size * trained / shards
    if not generates(cfg) or cfg.rollout != "vllm":
        return int(training)
    gpus = int(cfg.rollout_options.get("tensor_parallel_size", 1))
    sampling = weight_bytes(config, parameters, cfg.rollout_options.get("quantization")) / gpus
    return int(max(training, sampling + (0 if sends_adapters(cfg) else weights)))


def _ulysses_changes(cfg: Any, config: Any, longest: int, world: int, gpus_per_node: int) -> list[dict[str, Any]]:
    """Numbers of ranks that can share a row of more than `LONG_ROW` tokens."""
    if cfg.engine != "fsdp2" or longest <= LONG_ROW:
        return []
    name, heads = "ulysses_sequence_parallel_size", config.get_text_config().num_attention_heads
    sizes = [size for size in (2, 4, 8) if cfg.ulysses_sequence_parallel_size < size <= gpus_per_node]
    return [{name: size} for size in sizes if not world % size and not heads % size]


def _adapter_changes(cfg: Any) -> list[dict[str, Any]]:
    """LoRA; the same with frozen weights in bfloat16; and with frozen weights in 4 bits."""
    if cfg.engine != "fsdp2":
        return []
    new: dict[str, Any] = {} if cfg.lora_rank else {"lora_rank": 32}
    changes = [new]
    if cfg.dtype != "bfloat16":
        new = {**new, "dtype": "bfloat16"}
        changes.append(new)
    if not cfg.quantize_base and not sends_adapters(cfg):
        changes.append({**new, "quantize_base": True})
    return [change for change in changes if change]


def _megatron_layouts(cfg: Any, config: Any, world: int, gpus_per_node: int) -> list[dict[str, int]]:
    """Values of `--parallel` with more tensor or expert ranks of one machine, then also with more pipeline stages."""
    name = "expert" if is_moe(config.get_text_config()) else "tensor"
    layouts = []
    for stages in (1, 2, 4, 8):
        for size in (1, 2, 4, 8):
            layout = {**cfg.parallel, name: max(size, cfg.parallel.get(name, 1))}
            layout["pipeline"] = max(stages, cfg.parallel.get("pipeline", 1))
            if layout[name] > gpus_per_node:
                continue
            if layout.get("tensor", 1) > 1:
                layout["sequence_parallel"] = 1
            layout = {key: value for key, value in layout.items() if value > 1 or key == "sequence_parallel"}
            if layout in layouts or layout == cfg.parallel:
                continue
            try:
                check_supported(config, ParallelDims(**layout), world)
            except ValueError:  # not a divisor of the ranks, or of something in the model
                continue
            layouts.append(layout)
    return layouts


def _as_option(name: str, value: Any) -> str:
    """An option as on the command line."""
    if value is True:
        return f"--{name}"
    words = [word for pair in value.items() for word in pair] if isinstance(value, dict) else [value]
    return " ".join([f"--{name}", *map(str, words)])


def _sampler_gpus(plan: Plan, config: Any, world: int, gpus_per_node: int, factor: int = 1) -> int:
    """The fewest GPUs of one machine over which vLLM's weights leave room for the trainer and a sequence.

    As many as it has now if that is enough, and as many as possible if nothing is.

    Args:
        world: number of ranks of the plan.
        factor: how many times as many ranks there are to be; each has as much less of what the trainer keeps.
    """
    sampler, workload = plan.sampler, plan.rehearsal.workload
    if sampler.utilization is None:
        return sampler.tensor_parallel
    heads, weights = config.get_text_config().num_attention_heads, sampler.weights * sampler.tensor_parallel
    sync = (sum(plan.phases["weight sync"].values()) - sampler.weights) // factor
    resident, row = sum(plan.rehearsal.resident.values()) // factor, workload.prompt + workload.response

    def fits(gpus: int) -> bool:
        generate = resident + sampler.workspace + sequence_bytes(config, row, gpus)
        taken = weights // gpus + max(sync, generate)
        return taken <= USABLE * plan.gpu.memory

    counts = [sampler.tensor_parallel * times for times in (1, 2, 4, 8)]
    possible = [gpus for gpus in counts if gpus <= gpus_per_node and not factor * world % gpus and not heads % gpus]
    return next(filter(fits, possible), max(possible, default=sampler.tensor_parallel))
