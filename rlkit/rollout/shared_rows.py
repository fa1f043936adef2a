"""Ranks that share rows (a model-parallel group) train on the same samples: each generates some, and gets all of them.

Tools are called, and rewards computed (`rlkit.rewards.RewardScorer`), on one rank for each sample. The results are
shared.

If each rank generated all of them, the samples would diverge at the first token that two GPUs, or two batches on a
server, round differently.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from rlkit.data.samples import Sample
from rlkit.rollout.sampling import OnFinished, Sampling


class SharedRowsRollout:
    """A rollout whose requests are split over the ranks of a group; everything but `generate` is the wrapped rollout's.

    Args:
        rollout: of this rank, from `make_rollout`.
        group: the ranks that are given the same requests.
        collective: all ranks generate all requests together, because they hold shards of the same matrices; the samples
            of the first rank are used.
    """

    def __init__(self, rollout: Any, group: dist.ProcessGroup, *, collective: bool) -> None:
        self.rollout, self.group, self.collective = rollout, group, collective

    def generate(
        self,
        requests: Sequence[Sample],
        sampling: Sampling | Sequence[Sampling],
        n: int = 1,
        *,
        on_finished: OnFinished | None = None,
    ) -> list[Sample]:
        """As the wrapped rollout's `generate`. Images and data rows are not sent: all ranks have them."""
        ranks, rank = self.group.size(), self.group.rank()
        if self.collective:
            indices = [range(len(requests))] * ranks
            sources = [0]  # ranks whose samples are used
        else:
            indices = [range(r, len(requests), ranks) for r in range(ranks)]
            sources = list(range(ranks))
        own_indices = indices[rank]

        def on_own_finished(j: int, samples: list[Sample]) -> None:
            if on_finished is not None:
                on_finished(own_indices[j], samples)

        report = on_finished is not None and rank in sources
        generated = self.rollout.generate(
            [requests[i] for i in own_indices],
            [sampling[i] for i in own_indices] if isinstance(sampling, Sequence) else sampling,
            n,
            on_finished=on_own_finished if report else None,
        )
        gathered: list[Any] = [None] * ranks
        to_send = [replace(sample, vision={}, images=(), videos=(), audios=(), row={}) for sample in generated]
        dist.all_gather_object(gathered, to_send, group=self.group)
        groups: list[list[Sample]] = [[] for _ in requests]
        for source in sources:
            for j, i in enumerate(indices[source]):
                request, samples = requests[i], gathered[source][j * n : (j + 1) * n]
                local = {name: getattr(request, name) for name in ("vision", "images", "videos", "audios", "row")}
                groups[i] = [replace(sample, **local) for sample in samples]
                if on_finished is not None and source != rank:
                    on_finished(i, groups[i])
        return [sample for group in groups for sample in group]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rollout, name)


def call_on_one_rank(
    rollout: Any, function: Callable[[list[Sample]], list[Any]], samples: Sequence[Sample], indices: Sequence[int]
) -> list[Any]:
    """`function(samples)`; if ranks share rows, each calls it with some of the samples, and gets the results of all.

    Args:
        rollout: a `SharedRowsRollout` if ranks share rows.
        function: returns one result for each sample.
        indices: of the samples' requests. Those of request i are on rank `i % ranks`, as is its reward.
    """
    if not isinstance(rollout, SharedRowsRollout):
        return function(list(samples))
    ranks, rank = rollout.group.size(), rollout.group.rank()
    own = [j for j, i in enumerate(indices) if i % ranks == rank]
    own_results = dict(zip(own, function([samples[j] for j in own]), strict=True))
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, {j: _pickled(result) for j, result in own_results.items()}, group=rollout.group)
    # the rank's own are read from their pickles, too
    results = {j: pickle.loads(data) for rank_results in gathered for j, data in rank_results.items()}
    for j, result in own_results.items():
        if isinstance(result, Exception):
            results[j].__traceback__ = result.__traceback__  # which is not pickled
    return [results[j] for j in range(len(samples))]


def _pickled(result: Any) -> bytes:
    """A result, or an error that names it if it cannot be sent to another process."""
    try:
        data = pickle.dumps(result)
        pickle.loads(data)
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(result).__name__}: {result}"))
    return data
