"""The FSDP1 engine: `FullyShardedDataParallel`, for set-ups that still need it; all else is as in the fsdp2 engine.

    engine = make_engine("fsdp1", model=model, optimizer=lambda params: AdamW(params, lr=1e-5))

Its checkpoints are those of fsdp2: either engine loads the other's. Options that FSDP1 does not support are refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import CustomPolicy

from rlkit.engines.distributed import gather_objects, gather_pieces
from rlkit.engines.fsdp.fsdp1_loading import FlattenWithoutValues, allocate, fill_flat_parameters, read_rows
from rlkit.engines.fsdp.fsdp2 import Fsdp2Engine
from rlkit.engines.fsdp.sharding import fsdp_units, mixed_dtypes_message
from rlkit.engines.fsdp.value_engine import Fsdp2ValueEngine
from rlkit.engines.sampled_copy import sampled_copy

# options of the fsdp2 engine that are not supported, and the value that each may have
UNSUPPORTED = {
    "fsdp_size": None,
    "tensor": 1,
    "ulysses_sequence_parallel_size": 1,
    "use_fused_kernels": False,
    "router_replay": False,
    "offload_between_phases": False,
    "only_scores": False,
}


class Fsdp1Engine(Fsdp2Engine):
    """Trains and scores a model whose weights FSDP1 shards.

    Args:
        model: from transformers, without adapters. With `rlkit.vlm.load_model(..., on_meta=True)` each rank reads only
            its part of the weights, see `rlkit.engines.fsdp.fsdp1_loading`.
        options: those of `Fsdp2Engine` except `fsdp_size`, `tensor`, `ulysses_sequence_parallel_size`,
            `use_fused_kernels`, `router_replay`, `offload_between_phases` and `only_scores`.

    Raises:
        ValueError: an unsupported option, or a model with adapters.
    """

    def __init__(self, *, model: Any, **options: Any) -> None:
        for name, supported in UNSUPPORTED.items():
            if (value := options.get(name, supported)) != supported:
                raise ValueError(f"{name}: expected {supported} in the fsdp1 engine, got {value}; use the fsdp2 engine")
        if hasattr(model, "get_base_model"):
            raise ValueError("model: expected no adapters in the fsdp1 engine, got some; use the fsdp2 engine")
        self.shapes = {name: p.shape for name, p in model.named_parameters()}
        super().__init__(model=model, **options)

    def _shard(self, model: Any, param_init_fn: Callable[[nn.Module], None] | None = None) -> Any:
        units = {
            module: {"mixed_precision": _precision(dtype)}
            for module, dtype in fsdp_units(model, self.base, self.compute_dtype).items()
        }
        with warnings.catch_warnings():  # FSDP1 warns a single process that there is nothing to shard
            warnings.simplefilter("ignore", UserWarning)
            try:
                module = FullyShardedDataParallel(
                    model,
                    device_mesh=self.fsdp_mesh,
                    device_id=self.device,
                    auto_wrap_policy=CustomPolicy(lambda module: units.get(module, False)),
                    mixed_precision=_precision(self.compute_dtype),
                    param_init_fn=param_init_fn,
                    use_orig_params=True,
                )
            except ValueError as error:
                if "uniform dtype" not in str(error):
                    raise
                raise ValueError(mixed_dtypes_message(str(error))) from error
        module.register_comm_hook(self.fsdp_mesh.get_group(), _sum_gradients)
        return module

    def _shard_and_read(self, model: Any) -> Any:
        rows = read_rows(self.base, self.fsdp_mesh, self.device)
        with FlattenWithoutValues():
            module = self._shard(model, param_init_fn=partial(allocate, device=self.device))
        fill_flat_parameters(rows, self.fsdp_mesh)
        return module

    def _check_plain_head(self) -> None:
        raise ValueError("output_layer: expected the fsdp2 engine, got fsdp1, which cannot gather one layer alone")

    def _clip_gradients(self) -> Tensor:
        return self.module.clip_grad_norm_(self.max_grad_norm)

    def _free_gradients(self) -> None:
        super()._free_gradients()
        for unit in FullyShardedDataParallel.fsdp_modules(self.module):
            if unit._flat_param is not None:
                unit._flat_param.grad = None  # FSDP1 itself would free it at the next forward

    def _reshard(self) -> None:
        """FSDP1 reads and writes sharded parameters by itself."""

    def _weights(self, bucket_bytes: int, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """One tensor at a time, whatever `bucket_bytes` is.

        FSDP1 makes each parameter a view of this rank's piece of the flattened one. A single rank has all of it.
        """
        group = self.fsdp_mesh.get_group()
        pieces = {
            name.replace("_fsdp_wrapped_module.", ""): p.detach().view(-1) for name, p in self.base.named_parameters()
        }
        sizes = gather_objects({name: len(piece) for name, piece in pieces.items()}, group)
        for name, shape in self.shapes.items():
            full = pieces[name].new_empty(shape, device="meta")
            piece = pieces[name].to(self._cast_for_sampler(dtype, name, full).dtype)
            if group.size() > 1:
                piece = gather_pieces(piece, [rank_sizes[name] for rank_sizes in sizes], group)
            yield name, piece.view(shape)

    @contextmanager
    def gathered(self) -> Iterator[Any]:
        """Yield a copy of the model with full weights in `compute_dtype` on every rank, freed after the context."""
        yield sampled_copy(  # it alone holds the weights: a local name would keep them while the copy samples
            self.base,
            dict(self.get_per_tensor_param(dtype=self.compute_dtype)),
            self.device,
            self.compute_dtype,
            self.longest_sequence,
        )

    def to(self, device: torch.device | str, *, model: bool = True, optimizer: bool = True) -> None:
        """Move optimizer state; FSDP1 cannot move its weights.

        Raises:
            ValueError: `model` with another device than the weights are on.
        """
        if model and torch.device(device).type != self.device.type:
            raise ValueError("to: expected model=False in the fsdp1 engine, got True; use the fsdp2 engine")
        super().to(device, model=False, optimizer=optimizer)


class Fsdp1ValueEngine(Fsdp1Engine, Fsdp2ValueEngine):
    """`Fsdp1Engine` for a value or reward model, see `Fsdp2ValueEngine`."""


def _precision(dtype: torch.dtype) -> MixedPrecision:
    return MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32)


def _sum_gradients(group: dist.ProcessGroup, gradient: Tensor, shard: Tensor | None = None) -> None:
    """Communication hook: gradients are summed over ranks, where FSDP1 averages them. One process has no shards."""
    if shard is None:
        dist.all_reduce(gradient, group=group)
    else:
        dist.reduce_scatter_tensor(shard, gradient, group=group)
