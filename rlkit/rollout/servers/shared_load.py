"""How many sequences all ranks have running on each server, so that they share servers as one client would."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

log = logging.getLogger(__name__)


class SharedLoad:
    """A counter for each server, in a store that all ranks can reach.

    Counters are read and changed without waiting for other ranks: two ranks that choose at the same moment may both
    choose the same server. If the store fails, this rank goes on with its own counts.

    Args:
        urls: of the servers, the same on all ranks.
        store: of the ranks; None for one rank.
    """

    def __init__(self, urls: Sequence[str], store: dist.Store | None = None) -> None:
        self._own = dict.fromkeys(urls, 0)
        self._store = None if store is None else dist.PrefixStore("rlkit.servers", store)
        for url in urls:
            self.add(url, 0)  # counters that are read have to exist

    @property
    def is_shared(self) -> bool:
        """Whether other ranks' sequences are counted."""
        return self._store is not None

    def add(self, url: str, sequences: int) -> None:
        """Count sequences that were started on a server, or, below 0, that have ended."""
        self._own[url] += sequences
        self._ask("add", url, sequences)

    def read(self) -> dict[str, int]:
        """Sequences on each server."""
        counts = self._ask("multi_get", list(self._own))
        return dict(self._own) if counts is None else dict(zip(self._own, map(int, counts), strict=True))

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call the store; None without one."""
        if self._store is None:
            return None
        try:
            return getattr(self._store, method)(*arguments)
        except RuntimeError as error:  # DistStoreError and DistNetworkError, when the rank with the store has ended
            log.warning("servers: the load of other ranks is not known any more: %s", error)
            self._store = None
            return None


def store_of_ranks() -> dist.Store | None:
    """A connection of its own to the store of the process group; None for a single process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    # a connection serves one call at a time
    return dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]  # not in its stubs
