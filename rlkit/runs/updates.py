"""For several optimizer steps on a batch: mini-batches, and weights that stay on the device meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from rlkit.data.samples import Batch


def group_ids_of_all_ranks(group_ids: Tensor, engine: Any) -> np.ndarray:
    """The numbers in the `group_ids` of all data-parallel ranks, sorted and each once. All ranks call this together."""
    group = engine.data_parallel_group
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, group_ids.tolist(), group=group)
    return np.array(sorted(set().union(*of_ranks)), dtype=np.int64)


def mini_batches(batch: Batch, cfg: Any, step: int, engine: Any) -> Iterator[Batch]:
    """The mini-batches of `cfg.ppo_epochs` passes over a batch, each made when it is needed.

    Every pass shuffles the prompts and splits them into `cfg.mini_batches` parts. A mini-batch has all answers to its
    prompts, which are the same on any number of ranks. Its rows are moved so that all ranks have about as many tokens.
    Mini-batches without a trained token are left out; if the whole batch has none, each pass yields it. All ranks call
    this together.

    Args:
        batch: rows of this rank.
        cfg: options of the recipe.
        step: gives, with `cfg.seed`, the order of the prompts.
    """
    from rlkit.engines.balance import rebalance_across_ranks  # it imports transformers, which takes seconds

    if cfg.mini_batches == 1 or not engine.global_sum(batch.mask.sum()):
        for _ in range(cfg.ppo_epochs):
            yield rebalance_across_ranks(batch, engine.data_parallel_group)
        return
    prompts = group_ids_of_all_ranks(batch.group_ids, engine)
    for epoch in range(cfg.ppo_epochs):
        shuffled = np.random.default_rng((cfg.seed, step, epoch)).permutation(prompts)
        for first in range(min(cfg.mini_batches, len(shuffled))):
            rows = np.flatnonzero(np.isin(batch.group_ids, shuffled[first :: cfg.mini_batches]))
            part = batch.select(rows.tolist())
            if engine.global_sum(part.mask.sum()):
                yield rebalance_across_ranks(part, engine.data_parallel_group)


def keep_on_device(engine: Any) -> AbstractContextManager[None]:
    """A context in which weights and optimizer state stay on the GPU between calls of an engine.

    It has an effect with `--offload_between_phases` only, see `Fsdp2Engine.keep_on_device`. Engines of other packages
    need not have it.
    """
    return getattr(engine, "keep_on_device", nullcontext)()
