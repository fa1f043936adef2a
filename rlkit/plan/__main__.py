"""Say whether a run fits on given GPUs, and the minimum time of a step; it needs no GPU itself.

python -m rlkit.plan RECIPE --nproc N --gpu NAME [options]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlkit.plan.fit import GIB, SERVERS, Plan, distinct_gib, make_plan, ways_to_fit
from rlkit.plan.hardware import USABLE, Gpu, gpu_named
from rlkit.plan.recipes import load_recipe, recipe_options, recipe_roles
from rlkit.plan.rehearsal import Roles
from rlkit.plan.report import describe, host_memory, samples_on_servers, summary
from rlkit.plan.sampler import Servers, server_memory
from rlkit.plan.weights import least_memory
from rlkit.plan.workload import with_limited_rows
from rlkit.runs.options import check_engine_options, check_patterns, check_quantize_base, check_sync_adapters
from rlkit.runs.start import one_sentence_errors


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the plan of a run; the exit status is 1 if it does not fit."""
    parser = argparse.ArgumentParser(
        "python -m rlkit.plan", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("recipe", help="e.g. recipes/grpo_vlm.py; may be followed by any option of the recipe")
    parser.add_argument("--nproc", type=int, default=1, help="GPUs that train, on all machines; default: 1")
    parser.add_argument("--gpu", default="h100-80gb", help="default: h100-80gb; pass an unknown name to list all")
    parser.add_argument("--gpus_per_node", type=int, default=8, help="GPUs per machine; default: 8")
    parser.add_argument(
        "--image_tokens", type=int, help="tokens of images or videos in a prompt; default: an image that fills it"
    )
    parser.add_argument(
        "--server_gpus", type=int, default=0, help="GPUs of the servers that sample; 0: do not plan the servers"
    )
    parser.add_argument("--server_tensor_parallel", type=int, help="GPUs of each server; default: 1")
    parser.add_argument(
        "--gpu_memory",
        type=float,
        help="GiB per GPU. Overrides the data sheet; required for a GPU that is not listed",
    )
    parser.add_argument(
        "--host_memory", type=float, help="GiB of host memory per machine; default: not known, so not checked"
    )
    parser.add_argument(
        "--fill_micro_batch",
        action="store_true",
        help="where no option limits the length of rows, assume rows that fill a micro-batch, not the model's context",
    )
    parser.add_argument(
        "--weights_only",
        action="store_true",
        help="count only weights, gradients and optimizer state; takes a few seconds",
    )
    parser.add_argument("--json", action="store_true", help="print the memory of each phase as one line of JSON")
    parser.add_argument("--no_advice", action="store_true", help="do not search for options that make the run fit")
    options, rest = parser.parse_known_args(arguments)
    with one_sentence_errors("plan"):
        sys.exit(0 if run(options, rest) else 1)


def run(options: Any, arguments: Sequence[str]) -> bool:
    """Print the plan, and return whether the run fits.

    Raises:
        ValueError: an option is unknown, or two options contradict each other.
    """
    gpu = gpu_named(options.gpu, options.gpu_memory)
    check_counts(options)
    module = load_recipe(options.recipe)
    cfg = recipe_options(module, arguments)
    check_sync_adapters(cfg)
    check_quantize_base(cfg)
    check_patterns(cfg)
    check_engine_options(cfg)
    if not options.weights_only:
        check_can_be_planned(cfg)
    roles = recipe_roles(module, cfg)
    if options.weights_only:
        least = least_memory(cfg, roles, options.nproc, gpu)
        print(json.dumps(least) if options.json else least["verdict"])
        return least["fits"]
    if options.fill_micro_batch:
        cfg = with_limited_rows(cfg, roles.policy or roles.critic)
    if options.server_gpus and not samples_on_servers(cfg):
        got = options.server_gpus
        raise ValueError(f"server_gpus: expected 0 unless servers sample (--rollout vllm_server), got {got}")
    servers = Servers(options.server_gpus, options.server_tensor_parallel or 1) if options.server_gpus else None
    plan = whole_plan(cfg, roles, options.nproc, gpu, servers, options)
    if options.json:
        print(json.dumps(summary(cfg, plan)))
        return plan.fits
    print(describe(cfg, roles, plan, options.nproc, options.gpus_per_node))
    if not plan.fits and not options.no_advice:
        print(advice(cfg, roles, plan, options))
    return plan.fits


def whole_plan(cfg: Any, roles: Roles, world: int, gpu: Gpu, servers: Servers | None, options: Any) -> Plan:
    """The plan of GPUs, with the host memory of a machine."""
    plan = make_plan(cfg, roles, world, gpu, options.image_tokens, servers)
    host = host_memory(cfg, roles.policy or roles.critic, plan, world, options.gpus_per_node)
    limit = None if options.host_memory is None else int(options.host_memory * GIB)
    return replace(plan, host=host, host_limit=limit)


def check_counts(options: Any) -> None:
    """Raise a ValueError that names a number of GPUs which is too small, or is not used."""
    for name, least in (("nproc", 1), ("gpus_per_node", 1), ("server_gpus", 0)):
        if (got := getattr(options, name)) < least:
            raise ValueError(f"{name}: expected at least {_gpus(least)}, got {got}")
    if options.host_memory is not None and options.host_memory <= 0:
        raise ValueError(f"host_memory: expected more than 0 GiB, got {options.host_memory:g}")
    if options.server_tensor_parallel is not None and not options.server_gpus:
        got = options.server_tensor_parallel
        raise ValueError(f"server_tensor_parallel: expected it with --server_gpus N, got {got} without")


def _gpus(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"


def check_can_be_planned(cfg: Any) -> None:
    """Raise a ValueError that names an option with which a step can neither be rehearsed nor estimated."""
    if cfg.engine not in ("fsdp2", "megatron"):
        raise ValueError(f"engine: expected fsdp2 or megatron in a plan, got {cfg.engine}")
    if not cfg.use_remove_padding and cfg.engine == "megatron":
        raise ValueError("use_remove_padding: expected True in the megatron engine, got False; use --engine fsdp2")
    if not cfg.use_remove_padding:
        raise ValueError(
            "use_remove_padding: expected True in a plan, got False: masks of padded rows are not counted; use "
            "--weights_only"
        )


def advice(cfg: Any, roles: Roles, plan: Plan, options: Any) -> str:
    """Try options that need less memory until the run fits. Returns sentences that name them."""
    config, servers = roles.policy or roles.critic, plan.sampler.servers
    sentences = []
    if servers and (SERVERS in plan.too_large or not plan.sampler.sequences):
        sentences.append(server_advice(servers, config, plan))
    if not servers or set(plan.too_large) - {SERVERS} or not plan.host_fits:
        sentences.append(trainer_advice(cfg, roles, plan, options))
    return "\n".join(sentences)


def trainer_advice(cfg: Any, roles: Roles, plan: Plan, options: Any) -> str:
    """One sentence: the options with which all fits on the GPUs that train."""
    config, servers = roles.policy or roles.critic, plan.sampler.servers
    attempts = [plan]
    for way in ways_to_fit(cfg, plan, config, options.nproc, options.gpus_per_node):
        new_roles, changes = roles, ", ".join(way.changes)
        if way.cfg.lora_rank and not cfg.lora_rank and roles.reference is not None and not hasattr(cfg, "teacher"):
            new_roles = replace(roles, reference=None, adapter_reference=True)
        try:
            attempt = whole_plan(way.cfg, new_roles, way.world, plan.gpu, servers, options)
        except ValueError as error:  # this model or this number of ranks does not allow it
            print(f"  with {changes}: not possible: {error}", flush=True)
            continue
        host = "" if attempt.host_fits else f", {attempt.host_peak / GIB:.1f} GiB of host memory"
        print(f"  with {changes}: {attempt.peak / GIB:.1f} GiB{host}", flush=True)
        if _fits_gpu(attempt) and attempt.host_fits and (servers or attempt.sampler.sequences):
            return f"fits with {changes}"
        attempts.append(attempt)
    return f"does not fit with any of these options: {_what_is_too_small(attempts)}"


def _fits_gpu(plan: Plan) -> bool:
    """Whether all phases fit on the GPUs that train."""
    return not set(plan.too_large) - {SERVERS}


def _what_is_too_small(plans: Sequence[Plan]) -> str:
    """Why none of these plans fits: the GPU, the host's memory, or the sampler's cache."""
    on_gpu, on_host = list(filter(_fits_gpu, plans)), [plan for plan in plans if plan.host_fits]
    if any(plan.host_fits for plan in on_gpu):
        return "the sampler's cache has no room for one sequence"
    causes = []
    if on_host or not on_gpu:
        usable = USABLE * plans[0].gpu.memory
        causes.append("{} {} GiB, of {} GiB usable".format(*_least(plans, on_host, "host", "peak", usable)))
    if on_gpu or not on_host:
        limit = plans[0].host_limit or 0
        causes.append("{} {} GiB of host memory, of {} GiB".format(*_least(plans, on_gpu, "GPU", "host_peak", limit)))
    return "; ".join(causes)


def _least(plans: Sequence[Plan], fitting: Sequence[Plan], where: str, size: str, limit: float) -> tuple[str, str, str]:
    """Words for the least of a size, this least and its limit in GiB; among plans that fit elsewhere, if any do."""
    (least,), most = distinct_gib([min(getattr(plan, size) for plan in fitting or plans)], limit)
    some = 0 < len(fitting) < len(plans)
    return f"those that fit on the {where} take at least" if some else "the least is", least, most


def server_advice(servers: Servers, config: Any, plan: Plan) -> str:
    """One sentence: over how many GPUs a server has to be split."""
    for factor in (2, 4, 8):
        larger = Servers(servers.gpus, servers.tensor_parallel * factor)
        try:
            memory = server_memory(larger, config, plan.rehearsal, plan.gpu)
        except ValueError:  # not a divisor of the GPUs, or of the attention heads
            continue
        if memory.sequences:
            return f"servers fit with --server_tensor_parallel {larger.tensor_parallel}"
    return f"servers do not fit on {_gpus(servers.gpus)}; raise --server_gpus and --server_tensor_parallel"


if __name__ == "__main__":
    main()
