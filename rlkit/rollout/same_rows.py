"""Ranks that compute together train on the same rows and so must have the same answers: each asks for a share of them.

Left alone each would ask for all, and the answers would part at the first token that two GPUs, or two batches of a
server, round differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from rlkit.data.samples import Sample
from rlkit.rollout.sampling import Sampling, Written


class SameRows:
    """A sampler of which each of several ranks has one, and whose requests they share; all else is the sampler's own.

    Args:
        rollout: from `make_rollout`.
        group: the ranks that are given the same requests.
        together: all ranks ask for all, and the first one's answers count: where they may share the matrices that are
            sampled with.
    """

    def __init__(self, rollout: Any, group: dist.ProcessGroup, *, together: bool) -> None:
        self.rollout, self.group, self.together = rollout, group, together

    def generate(
        self,
        requests: Sequence[Sample],
        sampling: Sampling | Sequence[Sampling],
        n: int = 1,
        *,
        written: Written | None = None,
    ) -> list[Sample]:
        """As the sampler's; the images and data rows of the requests, which all ranks have, are not sent."""
        ranks, rank = self.group.size(), self.group.rank()
        shares = [range(0 if self.together else r, len(requests), 1 if self.together else ranks) for r in range(ranks)]
        mine, tell = shares[rank], None
        if written is not None and not (self.together and rank):

            def tell(j: int, samples: list[Sample]) -> None:
                written(mine[j], samples)

        how = [sampling[i] for i in mine] if isinstance(sampling, Sequence) else sampling
        found = self.rollout.generate([requests[i] for i in mine], how, n, written=tell)
        told: list[Any] = [None] * ranks
        dist.all_gather_object(told, [replace(s, vision={}, images=(), row={}) for s in found], group=self.group)
        answers: list[list[Sample]] = [[] for _ in requests]
        for r in range(1 if self.together else ranks):
            for j, i in enumerate(shares[r]):
                own = {"vision": requests[i].vision, "images": requests[i].images, "row": requests[i].row}
                answers[i] = [replace(sample, **own) for sample in told[r][j * n : (j + 1) * n]]
                if written is not None and r != rank:
                    written(i, answers[i])
        return [sample for group in answers for sample in group]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rollout, name)
