"""Sums counts of a step over all ranks, and averages metrics over its updates."""

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
    """Sum each count over all ranks."""
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
    """`tokens`, `flops` and further counts of a step, over all ranks. `Run.log` computes throughput and MFU from them.

    Args:
        batch: this rank's rows.
        updates: optimizer steps per row.
        forwards: further forward passes over all rows, e.g. of the reference policy.
        head: whether the model has an output layer over the vocabulary; False for a value model.
        flops: FLOPs of other models on this rank's rows.
        counts: further counts of this rank. By default `tokens` are those in the mask.
    """
    passes = training_passes(cfg, updates) + forwards
    flops += passes * engine_flops(engine, batch, head=head)
    return totals(engine, **{"tokens": batch.mask.sum(), "flops": flops, **counts})


def engine_flops(engine: Any, batch: Batch, *, head: bool = True) -> float:
    """FLOPs of one forward pass of an engine over this rank's rows. See `rlkit.engines.flops.batch_flops`."""
    return batch_flops(engine.config, batch, share_prompts=getattr(engine, "share_prompts", True), head=head)


def training_passes(cfg: AdapterOptions, updates: int = 1) -> int:
    """Cost of optimizer steps on a batch, in forward passes: a backward pass counts as two, or as one with LoRA."""
    return updates * (2 if cfg.lora_rank else 3)


def mean_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the updates; the maximum if its name ends in /max."""
    names = updates[0] if updates else {}
    return {name: (max if name.endswith("/max") else fmean)([u[name] for u in updates]) for name in names}
