"""The plan as text."""

from __future__ import annotations

import math
import platform
from typing import Any

import torch

from rlkit.engines.export import FILE_BYTES
from rlkit.engines.flops import flops_obstacle
from rlkit.plan.fit import GIB, LOADING, Plan, distinct_gib
from rlkit.plan.hardware import NETWORK_BANDWIDTH, USABLE
from rlkit.plan.rehearsal import Roles
from rlkit.plan.roofline import costs
from rlkit.plan.sampler import NOT_READ, SamplerMemory
from rlkit.plan.workload import Workload
from rlkit.runs.options import sends_adapters
from rlkit.vlm.weight_files import has_only_pickled_weights

KINDS = [
    "parameters",
    "gradients",
    "optimizer",
    "reference",
    "gathered weights",
    "activations",
    "logits",
    "largest tensor",
    "sampler's weights",
    "sampler's workspace",
    "sampler's cache",
]


def describe(cfg: Any, roles: Roles, plan: Plan, world: int, gpus_per_node: int) -> str:
    """The whole plan: tables of memory and time, and whether the run fits."""
    import transformers

    config, rehearsal, gpu = roles.policy or roles.critic, plan.rehearsal, plan.gpu
    workload = rehearsal.workload
    lines = [
        f"{config.model_type}: {rehearsal.parameters / 1e9:.2f}B parameters, {rehearsal.trainable / 1e9:.3f}B trained, "
        f"on {world} x {gpu.name}; planned without a GPU, with torch {torch.__version__}, transformers "
        f"{transformers.__version__}, Python {platform.python_version()}",
        f"each rank: {describe_rows(workload)}",
        *([describe_servers(plan.sampler)] if plan.sampler.servers else []),
        *(f"not planned: {part}" for part in not_planned(cfg, config, workload, plan.sampler)),
        "",
        "GiB a rank, at the peak of each phase"
        + ("; Megatron is not rehearsed: an estimate by arithmetic" if cfg.engine == "megatron" else ""),
        memory_table(plan.phases),
        "",
        "host memory of a machine",
        *(f"  {name}: {size / GIB:.1f} GiB" for name, size in plan.host.items()),
        "",
        time_table(cfg, roles, plan, world, gpus_per_node),
        "",
        verdict(cfg, plan),
    ]
    return "\n".join(lines)


def describe_rows(workload: Workload) -> str:
    """The rows of a rank, in words."""
    prompts = f"{_counted(workload.prompts, 'prompt')} of {_counted(workload.prompt, 'token')}"
    responses = f"{_counted(workload.group_size, 'response')} of {_counted(workload.response, 'token')} to each"
    drawn = f", of {workload.sampled_prompts} drawn" if workload.more_prompts else ""
    return f"{prompts} ({workload.image_tokens} of images){drawn}, {responses}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def summary(cfg: Any, plan: Plan) -> dict[str, Any]:
    """What `--json` prints: `fits`, the `verdict` and the `rows` of a rank in words, bytes by phase and kind, and bytes
    of a machine's host memory by purpose.
    """
    return {
        "fits": plan.fits,
        "verdict": verdict(cfg, plan),
        "rows": describe_rows(plan.rehearsal.workload),
        "phases": plan.phases,
        "host_memory": dict(plan.host),
    }


def describe_servers(sampler: SamplerMemory) -> str:
    """The sampling servers, in words."""
    assert sampler.servers is not None
    count, gpus = sampler.servers.gpus // sampler.tensor_parallel, _counted(sampler.tensor_parallel, "GPU")
    return (
        f"servers: {count} on {gpus} each; each generates {_counted(sampler.rows, 'response')} in a step, "
        f"{min(sampler.rows, sampler.sequences)} of them at once"
    )


def not_planned(cfg: Any, config: Any, workload: Workload, sampler: SamplerMemory) -> list[str]:
    """What a run takes that is in none of the numbers.

    Tokens of videos count as those of images: for each, the vision tower encodes as many patches.
    """
    towers = []
    if workload.image_tokens and not workload.image_patches(config):
        towers.append("the vision tower, whose patches are not known here")
    if getattr(config, "audio_config", None) is not None:
        towers.append("the audio tower")
    parts = [f"activations and FLOPs of {' and '.join(towers)}"] if towers else []
    if saving := _not_read(cfg):
        parts.append(f"what vLLM saves with {saving}")
    if samples_on_servers(cfg) and sampler.servers is None:
        parts.insert(0, "the GPUs of the sampling servers (--server_gpus); for the seconds, one for each rank")
    return ["the GPUs of the teacher's servers", *parts] if getattr(cfg, "teacher_servers", ()) else parts


def _not_read(cfg: Any) -> str:
    """The options of vLLM that save memory and are not counted."""
    names = [name for name in NOT_READ if getattr(cfg, "rollout", "") == "vllm" and name in cfg.rollout_options]
    return f"--rollout_options {' and '.join(names)}" if names else ""


def samples_on_servers(cfg: Any) -> bool:
    """Whether responses are generated, by servers."""
    return getattr(cfg, "rollout", "") in ("vllm_server", "sglang") and cfg.max_new_tokens > 0


def memory_table(phases: dict[str, dict[str, int]]) -> str:
    """GiB by phase and kind, as a Markdown table."""
    kinds = [kind for kind in KINDS if any(sizes.get(kind) for sizes in phases.values())]
    table = [["phase", *kinds, "sum"], ["---", *["---:"] * (len(kinds) + 1)]]
    for name, sizes in phases.items():
        table.append([name, *(_gib(sizes.get(kind, 0)) for kind in kinds), f"{sum(sizes.values()) / GIB:.1f}"])
    return "\n".join("| " + " | ".join(row) + " |" for row in table)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}" if size else ""


def host_memory(cfg: Any, config: Any, plan: Plan, world: int, gpus_per_node: int) -> dict[str, int]:
    """Bytes of one machine's host memory, by purpose.

    Loading: each rank reads its slices of one tensor after the other. It has all of the weights that are made of full
    tensors, its shard of all weights if these are quantized there, and the whole model if its files are pickles.
    Export: rank 0 holds the content of one file. vLLM that is sent adapters alone keeps its base model there while it
    sleeps. Images of this step and the next, and those of held-out rows during the whole run, are as long as prompts
    may be.
    """
    rehearsal, ranks = plan.rehearsal, min(world, gpus_per_node)
    itemsize = 4 if cfg.dtype == "float32" else 2
    loading = ranks * itemsize * (rehearsal.largest_tensor + rehearsal.fully_read)
    if cfg.quantize_base:
        loading += ranks * itemsize * rehearsal.parameters // cfg.parallel.get("fsdp_size", world)
    if has_only_pickled_weights(cfg.model):
        loading = ranks * itemsize * rehearsal.parameters
    export = (4 if cfg.export_dtype == "float32" else 2) * rehearsal.parameters
    offloaded = {"weights and optimizer, between phases": ranks * rehearsal.host} if rehearsal.host else {}
    if sends_adapters(cfg) and cfg.rollout == "vllm":
        offloaded["vLLM's base model, while it sleeps"] = ranks * plan.sampler.weights
    image, held_out = rehearsal.workload.image_bytes(config), -(-cfg.heldout_rows // rehearsal.data_parallel_size)
    images = {"images of two steps": ranks * 2 * rehearsal.workload.sampled_prompts * image}
    images[f"images of {cfg.heldout_rows} held-out rows (--heldout_rows)"] = ranks * held_out * image
    images = {name: size for name, size in images.items() if size}
    return {LOADING: loading, "export, at most": min(FILE_BYTES, export), **offloaded, **images}


def time_table(cfg: Any, roles: Roles, plan: Plan, world: int, gpus_per_node: int) -> str:
    """FLOPs, bytes and the lower bound of seconds by phase, as a Markdown table; or why there is none."""
    gpu = plan.gpu
    for config in filter(None, (roles.policy, roles.critic, roles.reference)):
        if why := flops_obstacle(config):
            return f"no floor of seconds, since the FLOPs of {config.model_type} are not known: {why}"
    if math.isnan(gpu.flops):
        return f"no floor of seconds, since the rates of a {gpu.name} are not known"
    phases = costs(cfg, roles, plan.rehearsal, plan.sampler, world, gpus_per_node)
    rates = [f"FLOPs / {gpu.flops / 1e12:.0f} TFLOP/s", f"bytes / {gpu.memory_bandwidth / 1e12:g} TB/s of memory"]
    rates.append(f"bytes / {gpu.link_bandwidth / 1e9:.0f} GB/s of link")
    if world > gpus_per_node:
        rates.append(f"bytes / {NETWORK_BANDWIDTH / 1e9:.0f} GB/s of network")
    if any(cost.host for cost in phases.values()):
        rates.append(f"bytes / {gpu.host_bandwidth / 1e9:.0f} GB/s to and from the host")
    table = [
        f"a floor of seconds, the longest of: {', '.join(rates)}",
        "| phase | TFLOPs | GB of memory | GB of link | GB of network | seconds | limited by |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    totals = dict[str, float]()
    for name, cost in phases.items():
        seconds = cost.seconds(gpu)
        limit = max(seconds, key=lambda resource: seconds[resource])
        totals[name] = seconds[limit]
        sizes = (cost.flops / 1e12, cost.memory / 1e9, cost.link.machine / 1e9, cost.link.network / 1e9)
        table.append(" | ".join([f"| {name}", *(f"{size:.0f}" for size in sizes), f"{totals[name]:.1f}", f"{limit} |"]))
    generation = totals.pop("generate", 0.0)
    if samples_ahead(cfg):
        step, note = max(generation, sum(totals.values())), " the longer of generate and the rest"
    else:
        step, note = generation + sum(totals.values()), ""
    table.append(f"| step | | | | | {step:.1f} |{note} |")
    return "\n".join([*table, *(caveats(roles, plan) if "generate" in phases else [])])


def caveats(roles: Roles, plan: Plan) -> list[str]:
    """Where the floor of generation may be above the real time."""
    text, sampler = (roles.policy or roles.critic).get_text_config(), plan.sampler
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    sequences = min(sampler.rows, sampler.sequences)
    if not experts or (share := 1 - (1 - text.num_experts_per_tok / experts) ** sequences) > 0.95:
        return []
    return [
        f"generate counts the weights of all experts for each token; {_counted(sequences, 'sequence')} at once use "
        f"{share:.0%} of them if tokens are spread evenly"
    ]


def samples_ahead(cfg: Any) -> bool:
    """Whether servers generate the next responses while the trainer trains."""
    return getattr(cfg, "max_staleness", 0) > 0


def _host(plan: Plan) -> str:
    """What the verdict says of host memory, if it is known how much a machine has."""
    if plan.host_limit is None:
        return ""
    enough = "" if plan.host_fits else ", which is too little"
    (taken,), most = distinct_gib([plan.host_peak], plan.host_limit)
    return f"; {taken} GiB of a machine's {most} GiB of host memory{enough}"


def verdict(cfg: Any, plan: Plan) -> str:
    """One sentence: whether the run fits, with the numbers, and what would save memory and is not counted."""
    saving = "" if plan.fits else _not_read(cfg)
    return _verdict(cfg, plan) + (f"; what vLLM saves with {saving} is not counted" if saving else "")


def _verdict(cfg: Any, plan: Plan) -> str:
    gpu, large = plan.gpu, plan.too_large
    sizes = [sum(plan.phases[name].values()) for name in large] or [plan.peak]
    shown, limit = distinct_gib(sizes, USABLE * gpu.memory)
    usable_memory = f"of {limit} GiB usable on {gpu.name} ({USABLE:.0%} of {gpu.memory / GIB:.1f})"
    if large:
        phases = ", ".join(f"{name} {size}" for name, size in zip(large, shown, strict=True))
        return f"does not fit: {phases} GiB {usable_memory}{_host(plan)}"
    if plan.sampler.sequences:
        return f"{'fits' if plan.fits else 'does not fit'}: {shown[0]} GiB {usable_memory}{_host(plan)}"
    if plan.sampler.servers:
        return "does not fit: the servers' cache has no room for one sequence; raise --server_tensor_parallel"
    most, share = plan.sampler.utilization, plan.sampler.share
    in_options = "gpu_memory_utilization" in cfg.rollout_options  # it has precedence over the recipe's option
    option = "--rollout_options gpu_memory_utilization" if in_options else "--gpu_memory_utilization"
    larger = f"raise {option}, at most to {most:g}, or " if most and share and share < most else ""
    if share is None:
        larger = "raise --rollout_options kv_cache_memory_bytes, or "
    return (
        f"does not fit: the sampler's cache has no room for one sequence; {larger}split the sampler with "
        f"--rollout_options tensor_parallel_size{_host(plan)}"
    )
