"""Simulates one rank of many in one process. Tensors take no memory, and collectives contact no other process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from rlkit.engines import distributed, offload
from rlkit.engines.fsdp import fsdp2
from rlkit.losses import _kernels, logprobs
from rlkit.plan.kernels import planned_head
from rlkit.plan.ledger import Ledger

MOST_REAL_NUMBERS = 1 << 26  # larger integer tensors from factory functions are fake too


class FloatsWithoutMemory(FakeTensorMode):
    """Makes floating-point tensors fake and has a ledger count them. Integer tensors stay real: code branches on them.

    An operation whose inputs are all real is computed. Reading the value of a fake tensor, e.g. `loss.item()`, gives 1.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.ledger = ledger
        self.depth = 0

    def __enter__(self) -> Any:
        self.depth += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.depth -= 1
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_query = func is torch.ops.prim.device.default  # more than half of all calls
        if is_query or self.depth > 1:  # DTensor computes the shapes of full tensors there; they are not counted
            return super().__torch_dispatch__(func, types, args, kwargs)
        tensors = _tensors((*args, *kwargs.values()))
        if tensors and all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors):
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
            args = (args[0], _positions(args[1]), *args[2:])  # masks are real, so the shape of the result is known
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if not tensors and isinstance(out, FakeTensor) and _is_index(out):
            return func(*args, **kwargs)
        for tensor in _tensors([out]):
            if isinstance(tensor, FakeTensor):
                self.ledger.see(tensor)
        return out


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among an operation's arguments or results, and in lists and tuples of them."""
    found: list[Tensor] = []
    for x in values:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, list | tuple):
            found += _tensors(x)
    return found


def _is_index(x: Tensor) -> bool:
    is_integer = not x.dtype.is_floating_point and x.dtype != torch.uint8  # FSDP communicates in uint8 buffers
    return is_integer and x.numel() <= MOST_REAL_NUMBERS


def _positions(indices: Any) -> list[Any]:
    """The indices, with each real boolean mask replaced by positions, of which only the number is right.

    Masks may have an entry for each number of each token, whose positions would take 8 bytes for each dimension.
    """
    positions: list[Any] = []
    for index in indices:
        is_mask = type(index) is Tensor and index.dtype == torch.bool
        if not is_mask:
            positions.append(index)
            continue
        chosen = int(index.count_nonzero())
        positions += [torch.zeros(1, dtype=torch.int64).expand(chosen)] * index.ndim
    return positions


def _no_copy(*_: Any) -> None:
    """Replaces copies to and from host memory."""


@contextmanager
def fake_ranks(world: int) -> Iterator[Ledger]:
    """Inside, this process is rank 0 of `world` ranks, and a ledger counts the memory that its tensors would take.

    Args:
        world: number of ranks.

    Raises:
        RuntimeError: this process already has a process group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("fake_ranks: expected a process without a process group, got one that has joined others")
    ledger = Ledger()
    resize = torch.UntypedStorage.resize_

    def resize_and_count(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        ledger.resized(storage)
        return result

    with ExitStack() as stack:
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        # FSDP frees gathered weights by resizing their storage, which no dispatch mode sees
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resize_and_count))
        # the tensors are on the CPU, but chunk sizes have to be those of a GPU
        stack.enter_context(mock.patch.object(_kernels, "CPU_CACHE_BYTES", _kernels.PIECE_BYTES))
        stack.enter_context(mock.patch.object(_kernels, "CPU_CHUNK_BYTES", _kernels.CHUNK_BYTES))
        head = stack.enter_context(planned_head())
        stack.enter_context(mock.patch.object(logprobs, "kernels_for", lambda hidden: head))
        stack.enter_context(mock.patch.object(distributed, "GATHER_BY_BROADCAST", ()))
        # the ledger would count a copy in host memory as GPU memory
        stack.enter_context(mock.patch.object(offload, "copy_to_host", _no_copy))
        stack.enter_context(mock.patch.object(offload, "copy_from_host", _no_copy))
        # these communicate with the other ranks, which do not exist
        stack.enter_context(mock.patch.object(distributed, "gather_objects", lambda x, group=None: [x]))
        stack.enter_context(mock.patch.object(fsdp2, "make_model_parallel_group", lambda rank, size: None))
        stack.enter_context(FloatsWithoutMemory(ledger))
        yield ledger
