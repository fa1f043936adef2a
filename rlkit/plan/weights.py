"""The least memory of a run, by arithmetic alone: for runs whose step cannot be rehearsed, or not in time."""

from __future__ import annotations

from typing import Any

import torch

from rlkit.plan.fit import distinct_gib
from rlkit.plan.hardware import USABLE, Gpu
from rlkit.plan.rehearsal import Roles, empty, empty_trained_part


def weight_and_optimizer_bytes(cfg: Any, roles: Roles, world: int) -> int:
    """Bytes of weights, gradients and AdamW's two moments on a rank of fsdp1 or fsdp2, sharded over all ranks.

    With `--offload_between_phases` those of policy or critic, whichever has more. A reference is not counted: it may be
    the trained model without its adapters.
    """
    sizes = []
    for config, head in ((roles.policy, False), (roles.critic, True)):
        if config is not None:
            model = empty_trained_part(cfg, empty(config, getattr(torch, cfg.dtype)), head=head)
            sizes.append(sum(x.numel() * x.element_size() * (4 if x.requires_grad else 1) for x in model.parameters()))
    return (max if cfg.offload_between_phases else sum)(sizes) // cfg.parallel.get("fsdp_size", world)


def least_memory(cfg: Any, roles: Roles, world: int, gpu: Gpu) -> dict[str, Any]:
    """`fits` and the `verdict` in words, of weights, gradients and optimizer state alone.

    Raises:
        ValueError: Megatron, whose whole plan is arithmetic.
    """
    if cfg.engine not in ("fsdp1", "fsdp2"):
        raise ValueError(f"weights_only: expected --engine fsdp1 or fsdp2, got {cfg.engine}")
    size, limit = weight_and_optimizer_bytes(cfg, roles, world), USABLE * gpu.memory
    (taken,), most = distinct_gib([size], limit)
    numbers = f"{taken} GiB, of {most} GiB usable on {gpu.name}"
    alone = f"weights, gradients and optimizer state alone take {numbers}"
    return {"fits": size <= limit, "verdict": alone if size <= limit else f"does not fit: {alone}"}
