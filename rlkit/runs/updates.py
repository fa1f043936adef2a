"""For several optimizer steps on a batch: mini-batches, and weights that stay on the device meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from rlkit.data.samples import Batch


def mini_batches(batch: Batch, prompts: Sequence[int] | np.ndarray, count: int, engine: Any) -> Iterator[Batch]:
    """Split a batch into mini-batches with the answers to every count-th prompt. All ranks call this together.

    A mini-batch has the same prompts on any number of ranks. Its rows are redistributed so that all ranks have about
    the same number of tokens.

    Args:
        batch: rows of this rank.
        prompts: group ids of the prompts of all ranks, in order.
        count: number of mini-batches; at most one per prompt.
    """
    from rlkit.engines.balance import rebalance_across_ranks  # it imports transformers, which takes seconds

    for first in range(min(count, len(prompts))):
        rows = np.flatnonzero(np.isin(batch.group_ids, prompts[first::count]))
        yield rebalance_across_ranks(batch.select(rows.tolist()), engine.data_parallel_group)


def keep_on_device(engine: Any) -> AbstractContextManager[None]:
    """A context in which weights and optimizer state stay on the GPU between calls of an engine.

    It has an effect with `--offload_between_phases` only, see `Fsdp2Engine.keep_on_device`. Engines of other packages
    need not have it.
    """
    return getattr(engine, "keep_on_device", nullcontext)()
