"""Several optimizer steps on one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rlkit.data.samples import Batch


def mini_batches(batch: Batch, prompts: Sequence[int] | np.ndarray, count: int, engine: Any) -> Iterator[Batch]:
    """Parts of a batch, each with the answers to every count-th prompt; all ranks call this together.

    A part has the same prompts on any number of ranks, and its rows are shared out anew, so that each rank has about as
    many tokens.

    Args:
        batch: of this rank.
        prompts: group ids of the prompts of all ranks, in the order in which they are taken.
        count: parts; at most one for each prompt.
    """
    from rlkit.engines.balance import rebalance_across_ranks  # it imports transformers, which takes seconds

    for first in range(min(count, len(prompts))):
        rows = np.flatnonzero(np.isin(batch.group_ids, prompts[first::count]))
        yield rebalance_across_ranks(batch.select(rows.tolist()), engine.data_parallel_group)
