"""Sums counts of a step over all ranks, and averages metrics over its updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor


def totals(engine: Any, **counts: float | Tensor) -> dict[str, float]:
    """Sum each count over all ranks, for example the trained tokens of a step: `tokens=batch.mask.sum()`.

    `Run.log` computes tokens per second from `tokens`.
    """
    summed = engine.global_sum(torch.tensor([float(x) for x in counts.values()], dtype=torch.float64))
    return dict(zip(counts, summed.tolist(), strict=True))


def mean_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the updates that have it; the maximum if its name ends in /max."""
    values: dict[str, list[float]] = {}
    for update in updates:
        for name, value in update.items():
            values.setdefault(name, []).append(value)
    return {name: (max if name.endswith("/max") else fmean)(found) for name, found in values.items()}
