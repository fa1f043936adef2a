"""Weights and optimizer state in host memory while a sampler, or another engine, needs the GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Offloaded:
    """Tensors that give back the memory of their device and keep their contents on the host.

    The tensors stay the same objects, and only their storages become empty, so FSDP2 and optimizers can go on holding
    them. Host memory is pinned if the device is a GPU, and is reused by the next `unload`. All copies are queued before
    the first one is waited for.

    A tensor must not be used between `unload` and `load`.

    Attributes:
        host_bytes: size of the copies.
    """

    def __init__(self) -> None:
        self.host_bytes = 0
        self._copies: dict[int, tuple[torch.UntypedStorage, int, Any]] = {}  # by storage: it, its bytes, their copy
        self._is_unloaded = False

    @torch.no_grad()
    def unload(self, tensors: Iterable[Tensor]) -> None:
        """Copy tensors to the host and free their memory; of a sharded tensor the part of this rank."""
        if self._is_unloaded:
            return
        earlier, self._copies = self._copies, {}
        for tensor in tensors:
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._copies and size:
                _, old_size, copy = earlier.get(key, (None, 0, None))
                self._copies[key] = storage, size, copy_to_host(storage, copy if size == old_size else None)
        if any(storage.device.type == "cuda" for storage, *_ in self._copies.values()):
            torch.cuda.synchronize()
        for storage, *_ in self._copies.values():
            storage.resize_(0)
        self.host_bytes, self._is_unloaded = sum(size for _, size, _ in self._copies.values()), True

    @torch.no_grad()
    def load(self) -> None:
        """Bring back what was unloaded, in the order of the current stream."""
        if self._is_unloaded:
            for storage, size, copy in self._copies.values():
                storage.resize_(size)
                copy_from_host(storage, copy)
        self._is_unloaded = False


@torch.no_grad()
def own_memory(tensors: Iterable[Tensor]) -> None:
    """Give tensors that are mapped from a file memory that can be given back; only those of a CPU are mapped."""
    for tensor in tensors:
        tensor = getattr(tensor, "_local_tensor", tensor)
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.clone()


def copy_to_host(storage: torch.UntypedStorage, copy: Tensor | None) -> Tensor:
    """The bytes of a storage, in an earlier copy of the same size if there is one."""
    if copy is None:
        copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    return copy.copy_(_bytes(storage), non_blocking=True)


def copy_from_host(storage: torch.UntypedStorage, copy: Tensor) -> None:
    """Fill a storage with bytes."""
    _bytes(storage).copy_(copy, non_blocking=True)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
