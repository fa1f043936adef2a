"""Counts the running sequences of all ranks on each server, so that ranks balance load as one client would."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

log = logging.getLogger(__name__)


class SharedLoad:
    """One counter per server, in a store that all ranks share.

    There is no lock: a rank that took a server at the same moment as another rank notices it in the count, see
    `reserve`. If the store fails, this rank continues with its own counts.

    Args:
        urls: URLs of the servers, the same on all ranks.
        store: store of the ranks; None for one rank.
    """

    def __init__(self, urls: Sequence[str], store: dist.Store | None = None) -> None:
        self._own = dict.fromkeys(urls, 0)
        self._store = None if store is None else dist.PrefixStore("rlkit.servers", store)
        for url in urls:
            self.add(url, 0)  # `multi_get` waits for missing keys

    @property
    def is_shared(self) -> bool:
        """Whether other ranks' sequences are counted."""
        return self._store is not None

    def add(self, url: str, sequences: int) -> int:
        """Add to a server's counter when sequences start; negative when they have ended. Returns the new count."""
        self._own[url] += sequences
        count = self._ask("add", url, sequences)
        return self._own[url] if count is None else count

    def reserve(self, url: str, sequences: int, seen: int) -> bool:
        """Add to a server's counter, unless another rank has added to it since it was read.

        Args:
            seen: the count that was read.
        """
        if self.add(url, sequences) <= seen + sequences:
            return True
        self.add(url, -sequences)
        return False

    def read(self) -> dict[str, int]:
        """Running sequences by server."""
        counts = self._ask("multi_get", list(self._own))
        return dict(self._own) if counts is None else dict(zip(self._own, map(int, counts), strict=True))

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the store. Returns None if there is no store or it has failed."""
        if self._store is None:
            return None
        try:
            return getattr(self._store, method)(*arguments)
        except RuntimeError as error:  # DistStoreError and DistNetworkError, when the rank with the store has ended
            log.warning("servers: the load of other ranks is not known any more: %s", error)
            self._store = None
            return None


def connect_to_store() -> dist.Store | None:
    """A new connection to the store of the default process group; None for a single process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    # a shared connection would block: it handles one call at a time
    return dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]  # not in its stubs
