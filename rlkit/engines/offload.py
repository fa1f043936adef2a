"""Weights and optimizer state in host memory while a sampler, or another engine, needs the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rlkit.engines.distributed import local_part

Method = TypeVar("Method", bound=Callable[..., Any])

BLOCK_BYTES = 1 << 26  # of host memory; a power of two, because torch rounds pinned allocations up to one


class Offloaded:
    """Tensors that give back the memory of their device and keep their contents on the host.

    The tensors stay the same objects, and only their storages become empty, so FSDP2 and optimizers can go on holding
    them. Host memory is pinned if the device is a GPU, and is reused by the next `unload`. The copies lie end to end in
    blocks of `BLOCK_BYTES`: an allocation for each tensor would take up to twice the memory.

    On a GPU `unload` and `start_loading` do not wait for their copies: these run in a stream of their own beside what
    the host and the GPU do next. torch's allocator gives the memory of a tensor to nobody before its copy to the host
    has ended, and waits for that in `torch.cuda.empty_cache`, which a sampler calls before it allocates.

    A tensor must not be used between `unload` and the end of `load`. Unchanged contents need no second copy: the
    earlier one is still on the host.

    Attributes:
        host_bytes: size of the copies.
    """

    def __init__(self) -> None:
        self.host_bytes = 0
        self._storages: list[tuple[torch.UntypedStorage, int, int]] = []  # with their bytes, and where the copy starts
        self._blocks: list[Tensor] = []
        self._is_unloaded = False
        self._stream: torch.cuda.Stream | None = None  # of the copies; None on a CPU

    @torch.no_grad()
    def unload(self, tensors: Iterable[Tensor], unchanged: Iterable[Tensor] = ()) -> None:
        """Copy tensors to the host and free their memory; of a sharded tensor the part of this rank.

        Args:
            tensors: plain tensors, or DTensors.
            unchanged: those of them whose contents are those of the last `unload`.
        """
        if self._is_unloaded:
            return
        storages = {storage._cdata: storage for x in tensors for storage in _storages(x) if storage.nbytes()}
        current = {storage._cdata for x in unchanged for storage in _storages(x)}
        copied = {(storage._cdata, start) for storage, _, start in self._storages}
        self._storages, self.host_bytes = [], 0
        if self._stream is None and any(storage.device.type == "cuda" for storage in storages.values()):
            self._stream = torch.cuda.Stream()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for key, storage in storages.items():
                self._storages.append((storage, storage.nbytes(), self.host_bytes))
                if key not in current or (key, self.host_bytes) not in copied:
                    copy_to_host(storage, self._blocks, self.host_bytes)
                self.host_bytes += storage.nbytes()
        for storage in storages.values():
            _release(storage, self._stream)
        self._is_unloaded = True

    @torch.no_grad()
    def start_loading(self) -> None:
        """Give tensors that were unloaded their memory, and begin to copy their contents back; `load` has to follow."""
        if not self._is_unloaded:
            return
        for storage, size, _ in self._storages:
            storage.resize_(size)  # memory of the current stream, which may still work in it
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for storage, _, start in self._storages:
                copy_from_host(storage, self._blocks, start)
        self._is_unloaded = False

    def load(self) -> None:
        """Bring back what was unloaded: the current stream waits for the copies."""
        self.start_loading()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


class OffloadedBetweenUses:
    """Tensors that are on their device in a context that uses them, and on the host at all other times.

    Contexts may be nested or overlap: the tensors go to the host with the last one.

    Args:
        tensors: returns those to move; called whenever they go to the host.
        enabled: False leaves the tensors where they are.

    Attributes:
        changed: set by a use that may have changed the contents, which are then copied to the host at its end. Those of
            a frozen parameter do not change.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, enabled: bool) -> None:
        self.on_host = Offloaded()
        self.enabled = enabled
        self.changed = False
        self._tensors = tensors
        self._uses = 0

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """A context that uses the tensors."""
        self.on_host.load()
        with self.kept():
            yield

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A context in which tensors do not go back to the host, once one within it has used them."""
        self._uses += 1
        try:
            yield
        finally:
            self._uses -= 1
            if self.enabled and not self._uses:
                self.unload()

    def start_loading(self) -> None:
        """Begin to copy the tensors to the device, for a use to come in the `kept` context that this call is in."""
        if self._uses:
            self.on_host.start_loading()

    def unload(self) -> None:
        """Move the tensors to the host, even if there is no copy of them yet."""
        tensors = list(self._tensors())
        frozen = [x for x in tensors if isinstance(x, nn.Parameter) and not x.requires_grad]
        self.on_host.unload(tensors, unchanged=frozen if self.changed else tensors)
        self.changed = False


class OffloadingEngine:
    """Methods of the engines that can keep weights and optimizer state on the host between calls.

    Attributes:
        offload_between_phases: whether they do.
    """

    def _set_up_offloading(
        self, weights: Callable[[], Iterable[Tensor]], state: Callable[[], Iterable[Tensor]], *, enabled: bool
    ) -> None:
        """Move weights and optimizer state to the host, if offloading is enabled.

        Args:
            weights, state: return the tensors, see `OffloadedBetweenUses`.
        """
        self.offload_between_phases = enabled
        self._offloaded_weights = OffloadedBetweenUses(weights, enabled=enabled)
        self._offloaded_state = OffloadedBetweenUses(state, enabled=enabled)
        self._optimizer_steps, self._takes_several_steps = 0, False  # several: in the last context with a step
        if enabled:
            own_memory(weights())
            self._offloaded_state.unload()
            self._offloaded_weights.unload()

    @property
    def host_bytes(self) -> int:
        """Bytes of weights and optimizer state that this rank keeps in host memory between calls."""
        return self._offloaded_weights.on_host.host_bytes + self._offloaded_state.on_host.host_bytes

    @contextmanager
    def keep_on_device(self) -> Iterator[None]:
        """A context for several calls. With `offload_between_phases` they copy weights and optimizer state only once.

        Weights come to the device with the first call, the optimizer state with the first optimizer step. Both go back
        to the host at the end, with what the caller has written to them; what it has written to frozen weights is lost.

        If the last context had several optimizer steps, the state comes beside the first forward: there was memory for
        both in the second one.
        """
        before = self._optimizer_steps
        with self._offloaded_weights.kept(), self._offloaded_state.kept():
            try:
                yield
            finally:
                self._mark_changed()  # by the caller, perhaps
                if steps := self._optimizer_steps - before:
                    self._takes_several_steps = steps > 1

    def _start_loading_state(self) -> None:
        """Begin to copy the optimizer state to the device, if that takes no more memory than later forwards take."""
        if self._takes_several_steps:
            self._offloaded_state.start_loading()

    @contextmanager
    def _changing_weights(self) -> Iterator[None]:
        """A context that changes weights and optimizer state; the state is on the device in it."""
        self._optimizer_steps += 1
        with self._offloaded_state.on_device():
            self._mark_changed()
            yield

    def _mark_changed(self) -> None:
        self._offloaded_weights.changed = True
        self._offloaded_state.changed = True

    def _check_not_offloading(self, device: torch.device | str) -> None:
        if self.offload_between_phases:
            raise ValueError(f"to: expected no offload_between_phases, which moves weights itself, got {device}")

    def _iterate_on_device(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same pairs, with the weights on the device.

        With `offload_between_phases`, yields copies: a tensor may share memory with the weights.
        """
        with self._offloaded_weights.on_device():
            for name, tensor in weights:
                yield name, tensor.clone() if self.offload_between_phases else tensor
                del tensor  # free it before the next one is gathered


def with_weights_on_device(method: Method) -> Method:
    """Wraps an engine's method so that its `_offloaded_weights` are on the device during the call."""

    @wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        with self._offloaded_weights.on_device():
            return method(self, *args, **options)

    return cast(Method, call)


@torch.no_grad()
def own_memory(tensors: Iterable[Tensor]) -> None:
    """Give tensors that are mapped from a file memory that can be given back; only those of a CPU are mapped."""
    for tensor in tensors:
        local = local_part(tensor)
        if not local.untyped_storage().resizable():
            local.data = local.clone()


def without_memory_of(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> list[Tensor]:
    """Those of the tensors that are no views of others."""
    owned = {storage._cdata for x in others for storage in _storages(x)}
    return [x for x in tensors if not any(storage._cdata in owned for storage in _storages(x))]


def _release(storage: torch.UntypedStorage, stream: torch.cuda.Stream | None) -> None:
    """Give back the memory of a storage, on a GPU once the work that this stream has so far has ended."""
    if stream is not None and storage.device.type == "cuda":
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).record_stream(stream)
    storage.resize_(0)


def copy_to_host(storage: torch.UntypedStorage, blocks: list[Tensor], start: int) -> None:
    """Copy the bytes of a storage into blocks of host memory, from byte `start` on. Adds blocks that are missing."""
    while len(blocks) * BLOCK_BYTES < start + storage.nbytes():
        blocks.append(torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=storage.device.type == "cuda"))
    for part, copy in _parts(storage, blocks, start):
        copy.copy_(part, non_blocking=True)


def copy_from_host(storage: torch.UntypedStorage, blocks: Sequence[Tensor], start: int) -> None:
    """Fill a storage with the bytes from byte `start` on."""
    for part, copy in _parts(storage, blocks, start):
        part.copy_(copy, non_blocking=True)


def _parts(storage: torch.UntypedStorage, blocks: Sequence[Tensor], start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The bytes of a storage in parts, each with its place in one block."""
    rest = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    while len(rest):
        block, offset = divmod(start, BLOCK_BYTES)
        copy = blocks[block][offset : offset + len(rest)]
        yield rest[: len(copy)], copy
        start, rest = start + len(copy), rest[len(copy) :]


def _storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Those of the plain tensors in a tensor: of a DTensor its part, of 8-bit optimizer state the codes and scales."""
    if is_traceable_wrapper_subclass(tensor):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for part in parts:
            if isinstance(part, Tensor):  # a DTensor also lists its mesh
                yield from _storages(part)
    else:
        yield tensor.untyped_storage()
