"""For several optimizer steps on a batch: parts of it, and weights that stay on the device meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from rlkit.data.samples import Batch
from rlkit.engines.balance import rebalance_across_ranks


def group_ids_of_all_ranks(group_ids: Tensor, engine: Any) -> np.ndarray:
    """The numbers in the `group_ids` of all data-parallel ranks, sorted and each once. All ranks call this together."""
    group = engine.data_parallel_group
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, group_ids.tolist(), group=group)
    return np.array(sorted(set().union(*of_ranks)), dtype=np.int64)


def split_by_prompt(batch: Batch, parts: int, engine: Any, seed: Sequence[int]) -> Iterator[Batch]:
    """Shuffle the prompts of all ranks and split them into parts, each made when it is needed.

    A part has all responses to its prompts, which are the same on any number of ranks. Parts without a trained token
    are left out. One part is the batch itself, and so is the only part of a batch without any trained token. All ranks
    call this together.

    Args:
        batch: rows of this rank.
        parts: number of parts; at most one for each prompt.
        seed: numbers that give the order of the prompts, such as (seed of the run, step, epoch).
    """
    if parts == 1 or not engine.global_sum(batch.mask.sum()):
        yield batch
        return
    shuffled = np.random.default_rng(seed).permutation(group_ids_of_all_ranks(batch.group_ids, engine))
    for first in range(min(parts, len(shuffled))):
        rows = np.flatnonzero(np.isin(batch.group_ids, shuffled[first::parts]))
        part = batch.select(rows.tolist())
        if engine.global_sum(part.mask.sum()):
            yield part


def mini_batches(batch: Batch, cfg: Any, step: int, engine: Any) -> Iterator[Batch]:
    """The mini-batches of a batch, `cfg.mini_batches` in each of `cfg.ppo_epochs` passes, made when they are needed.

    Each pass shuffles the prompts (`split_by_prompt`). Rows of a mini-batch are moved between ranks, so that all have
    about as many tokens. All ranks call this together.
    """
    for epoch in range(cfg.ppo_epochs):
        for part in split_by_prompt(batch, cfg.mini_batches, engine, (cfg.seed, step, epoch)):
            yield rebalance_across_ranks(part, engine.data_parallel_group)


def keep_on_device(engine: Any) -> AbstractContextManager[None]:
    """A context in which weights and optimizer state stay on the GPU between calls of an engine.

    It has an effect with `--offload_between_phases` only, see `Fsdp2Engine.keep_on_device`. Engines of other packages
    need not have it.
    """
    return getattr(engine, "keep_on_device", nullcontext)()
