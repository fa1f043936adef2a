"""Bytes of all tensors by kind (parameters, gradients, activations, ...), at the peak of each phase."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor

OTHER = "activations"
GATHERED = "gathered weights"


class Ledger:
    """Bytes of all live tensor storages, by kind.

    A storage counts as activations until `mark` gives it another kind. Only FSDP resizes storages: a resized activation
    is its buffer of weights gathered for a forward or backward pass, and counts as gathered weights.

    Attributes:
        peaks: for each phase, the bytes of each kind at the moment when their sum was largest.
        logits_width: vocabulary size; a tensor whose last dimension has this size counts as logits.
    """

    def __init__(self) -> None:
        self.logits_width = 0
        self.peaks: dict[str, dict[str, int]] = {}
        self._storages: dict[int, tuple[Any, int, str]] = {}  # address -> weak reference, bytes, kind
        self._bytes: dict[str, int] = Counter()
        self._total = self._peak = 0
        self._phase = ""
        self._at_peak: dict[str, int] = {}

    @property
    def bytes(self) -> dict[str, int]:
        """Current bytes, by kind."""
        return {kind: size for kind, size in self._bytes.items() if size}

    def see(self, tensor: Tensor) -> None:
        """Count the storage of a tensor, if it is not counted yet."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._storages:
            is_logits = tensor.ndim > 1 and tensor.shape[-1] == self.logits_width
            kind, size = "logits" if is_logits else OTHER, storage.nbytes()
            self._storages[address] = (weakref.ref(storage, partial(self._freed, address)), size, kind)
            self._add(kind, size)

    def mark(self, kind: str, tensors: Iterable[Tensor], *, at_peak: bool = False) -> None:
        """Change the kind of these tensors' storages; with `at_peak` also in the recorded peak of this phase."""
        for tensor in tensors:
            self.see(tensor)
            address = tensor.untyped_storage()._cdata
            reference, size, old = self._storages[address]
            self._storages[address] = (reference, size, kind)
            for counted in (self._bytes, self._at_peak) if at_peak else (self._bytes,):
                counted[old] = counted.get(old, 0) - size
                counted[kind] = counted.get(kind, 0) + size

    def resized(self, storage: Any) -> None:
        """Count the new size of a storage that was resized in place."""
        if (entry := self._storages.get(storage._cdata)) is not None:
            reference, size, kind = entry
            self._add(kind, -size)
            kind = GATHERED if kind == OTHER else kind
            self._storages[storage._cdata] = (reference, storage.nbytes(), kind)
            self._add(kind, storage.nbytes())

    def begin(self, phase: str) -> None:
        """End the current phase and begin another one. A phase may begin several times; its highest peak counts."""
        self.end()
        self._phase, self._peak, self._at_peak = phase, self._total, dict(self._bytes)

    def end(self) -> None:
        """End the current phase and add its peak to `peaks`."""
        if self._phase and self._peak >= sum(self.peaks.get(self._phase, {}).values()):
            self.peaks[self._phase] = {kind: size for kind, size in self._at_peak.items() if size}
        self._phase = ""

    def _freed(self, address: int, _: Any) -> None:
        _, size, kind = self._storages.pop(address)
        self._add(kind, -size)

    def _add(self, kind: str, size: int) -> None:
        self._bytes[kind] += size
        self._total += size
        if self._total > self._peak:
            self._peak, self._at_peak = self._total, dict(self._bytes)
