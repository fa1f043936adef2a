"""Weights read from a model's files into FSDP1's flat parameters, so that no rank ever holds the whole model.

FSDP1 flattens the parameters of a unit into one vector, of which each rank keeps a piece, and expects the full weights
of a unit for this. Here it is given memory without values. Each rank has read its rows of every matrix, and the ranks
then send each other what belongs in their pieces, one parameter at a time.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode

from rlkit.engines.distributed import gather_objects, local_part
from rlkit.engines.fsdp.sharded_loading import load_sharded_weights

ELEMENTS_AT_ONCE = 1 << 20  # that a rank sends or receives; gloo holds copies of them


def read_rows(base: Any, mesh: DeviceMesh, device: torch.device) -> dict[nn.Parameter, Tensor]:
    """Read this rank's rows of a model; its parameters are on the meta device afterwards.

    Args:
        base: from transformers, not sharded.
        mesh: of one dimension; its ranks share the rows of each parameter.
        device: where the rows go.

    Returns:
        The rows of each parameter. What has no rows, or was not on the meta device, is a full tensor.

    Raises:
        ValueError: as `load_sharded_weights`.
        NotInShardsError: as `load_sharded_weights`.
    """

    def by_rows(p: nn.Parameter) -> nn.Parameter:
        if not p.is_meta or p.ndim == 0:
            return p
        return nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=None), p.requires_grad)

    rows: dict[nn.Parameter, Tensor] = {}

    def without_memory(p: nn.Parameter) -> nn.Parameter:
        placeholder = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad)
        rows[placeholder] = p.detach()
        return placeholder

    _replace_parameters(base, by_rows)
    load_sharded_weights(base, device)
    _replace_parameters(base, without_memory)
    return rows


def _replace_parameters(model: nn.Module, replacement: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Replace each parameter of a model; tied parameters stay tied."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            if p not in replaced:
                replaced[p] = replacement(p)
            setattr(module, name, replaced[p])


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give the parameters of a module memory, but no values; they stay the same objects, also where they are tied."""
    for p in module.parameters(recurse=False):
        if p.is_meta:
            torch.utils.swap_tensors(p, nn.Parameter(torch.empty_like(p, device=device), p.requires_grad))


class FlattenWithoutValues(TorchFunctionMode):
    """A context in which FSDP1 does not copy the values of the parameters that it flattens and shards.

    `torch.cat` and `Tensor.clone` only allocate their result. On a CPU the system gives a process memory when it is
    first written to, so full flat parameters take none.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.cat:
            return args[0][0].new_empty(sum(len(x) for x in args[0]))
        if function is Tensor.clone:
            return torch.empty_like(args[0])
        return function(*args, **(kwargs or {}))


def fill_flat_parameters(rows: dict[nn.Parameter, Tensor], mesh: DeviceMesh) -> None:
    """Fill each rank's pieces of the parameters that FSDP1 has flattened, and free the rows meanwhile.

    Args:
        rows: from `read_rows`; empty afterwards.
        mesh: that of `read_rows`, and of FSDP1.
    """
    sizes = gather_objects([p.numel() for p in rows], mesh.get_group())  # of the pieces of each rank
    for p, rank_sizes in zip(list(rows), zip(*sizes, strict=True), strict=True):
        _fill(p.detach().view(-1), rows.pop(p), rank_sizes, mesh)
        _return_freed_memory()


def _return_freed_memory() -> None:
    """Have glibc, where it is used, return memory that was freed to the system. It would keep half of the rows."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def _free_pages(x: Tensor) -> None:
    """Return the memory of a contiguous tensor on a CPU to the system; its values are lost.

    The tensor may be part of a larger one. Pages that it shares with other parts stay.
    """
    if x.device.type != "cpu":
        return
    start = -(-x.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (x.data_ptr() + x.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < stop:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)


def _fill(piece: Tensor, rows: Tensor, sizes: Sequence[int], mesh: DeviceMesh) -> None:
    """Fill this rank's piece of a flattened parameter, whose pieces on the ranks have these sizes.

    Rows that were sent are freed at once. Otherwise the largest parameter would be there twice.
    """
    rank, ranks = mesh.get_local_rank(), range(mesh.size())
    pieces = [0, *accumulate(sizes)]  # where each rank's piece starts in the flattened parameter, and where it ends
    if not isinstance(rows, DTensor):
        piece.copy_(rows.reshape(-1)[pieces[rank] : pieces[rank + 1]])
        return
    if not rows.numel():
        return
    size = -(-len(rows) // mesh.size()) * (rows.numel() // len(rows))
    held = [min(i * size, rows.numel()) for i in range(mesh.size() + 1)]  # the same for each rank's rows
    local = local_part(rows).flatten()
    for start in range(0, rows.numel(), ELEMENTS_AT_ONCE):
        stop = start + ELEMENTS_AT_ONCE
        to, source = _within(pieces, start, stop), _within(held, start, stop)
        sent = local[source[rank] - held[rank] : source[rank + 1] - held[rank]]
        dist.all_to_all_single(
            piece[to[rank] - pieces[rank] : to[rank + 1] - pieces[rank]],
            sent,
            [_overlap(to, rank, source, other) for other in ranks],
            [_overlap(source, rank, to, other) for other in ranks],
            mesh.get_group(),
        )
        _free_pages(sent)


def _within(bounds: Sequence[int], start: int, stop: int) -> list[int]:
    """Positions of a flattened parameter, clamped to the elements from `start` to `stop`."""
    return [min(max(x, start), stop) for x in bounds]


def _overlap(spans: Sequence[int], i: int, others: Sequence[int], j: int) -> int:
    """How many elements span i, from `spans[i]` to `spans[i + 1]`, has in common with span j of others."""
    return max(0, min(spans[i + 1], others[j + 1]) - max(spans[i], others[j]))
