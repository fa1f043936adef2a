"""Figures of a step: summed over all ranks, or averaged over its updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from rlkit.data.samples import Batch
from rlkit.engines.flops import batch_flops
from rlkit.runs.options import AdapterOptions


def totals(engine: Any, **counts: float | Tensor) -> dict[str, float]:
    """Each count summed over all ranks."""
    summed = engine.global_sum(torch.tensor([float(x) for x in counts.values()], dtype=torch.float64))
    return dict(zip(counts, summed.tolist(), strict=True))


def batch_totals(
    cfg: AdapterOptions,
    engine: Any,
    batch: Batch,
    *,
    updates: int = 1,
    forwards: int = 0,
    head: bool = True,
    flops: float = 0.0,
    **counts: float | Tensor,
) -> dict[str, float]:
    """`tokens`, `flops` and further counts of a step, over all ranks: what `Run.log` computes throughput and MFU from.

    Args:
        batch: this rank's rows.
        updates: optimizer steps that each row takes part in.
        forwards: other forward passes of all rows, e.g. of the reference policy.
        head: False for a value model.
        flops: of other models on this rank's rows.
        counts: of this rank.
    """
    passes = training_passes(cfg, updates) + forwards
    flops += passes * batch_flops(engine.config, batch, head=head)
    return totals(engine, tokens=batch.mask.sum(), flops=flops, **counts)


def training_passes(cfg: AdapterOptions, updates: int = 1) -> int:
    """What optimizer steps on a batch cost, in forward passes: a backward pass is two, or one with LoRA."""
    return updates * (2 if cfg.lora_rank else 3)


def mean_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each metric's mean over the updates; for a name that ends in /max its maximum."""
    names = updates[0] if updates else {}
    return {name: (max if name.endswith("/max") else fmean)([u[name] for u in updates]) for name in names}
