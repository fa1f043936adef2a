"""The FSDP1 engine: `FullyShardedDataParallel`, for those whose set-up still needs it; all else is the fsdp2 engine's.

    engine = make_engine("fsdp1", model=model, optimizer=lambda params: AdamW(params, lr=1e-5))

Checkpoints are those of fsdp2: either engine loads the other's. What FSDP1 is not made for is refused by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import CustomPolicy

from rlkit.engines.distributed import full_tensor
from rlkit.engines.fsdp.fsdp2 import Fsdp2Engine, Fsdp2ValueEngine
from rlkit.engines.fsdp.sharded_loading import on_meta
from rlkit.engines.fsdp.sharding import units
from rlkit.vlm.loading import copy_with

# options of fsdp2 that are left out here, and what they are when they are not used
LEFT_OUT = {
    "fsdp_size": None, "tensor": 1, "ulysses_sequence_parallel_size": 1, "use_fused_kernels": False,
    "router_replay": False,
}  # fmt: skip


class Fsdp1Engine(Fsdp2Engine):
    """Trains and scores a model whose weights FSDP1 shards.

    Args:
        model: from transformers, without adapters.
        options: those of `Fsdp2Engine`, without `fsdp_size`, `tensor`, `ulysses_sequence_parallel_size`,
            `use_fused_kernels` and `router_replay`.

    Raises:
        ValueError: an option that is left out, or a model with adapters or without its weights.
    """

    def __init__(self, *, model: Any, **options: Any) -> None:
        for name, unused in LEFT_OUT.items():
            if options.get(name, unused) != unused:
                raise ValueError(f"{name}={options[name]}: not in the fsdp1 engine; use the fsdp2 engine")
        if hasattr(model, "get_base_model"):
            raise ValueError("model: the fsdp1 engine takes none with adapters; use the fsdp2 engine")
        if on_meta(model):
            raise ValueError("model: its weights are on the meta device, read ones expected: load_model(path)")
        self.names = [name for name, _ in model.named_parameters()]
        super().__init__(model=model, **options)

    def _shard(self, model: Any, dtype: torch.dtype, mesh: DeviceMesh) -> Any:
        parts = {module: {"mixed_precision": _precision(x)} for module, x in units(model, self.base, dtype).items()}
        with warnings.catch_warnings():  # one process is told that it has nothing to shard
            warnings.simplefilter("ignore", UserWarning)
            module = FullyShardedDataParallel(
                model,
                device_mesh=mesh,
                device_id=self.device,
                auto_wrap_policy=CustomPolicy(lambda module: parts.get(module, False)),
                mixed_precision=_precision(dtype),
                use_orig_params=True,
            )
        module.register_comm_hook(mesh.get_group(), _add_up)
        return module

    def _clip(self) -> Tensor:
        return self.module.clip_grad_norm_(self.max_grad_norm)

    def _reshard(self) -> None:
        """FSDP1 reads and writes parameters in their shards by itself."""

    def _weights(self, bucket_bytes: int = 0) -> Iterator[tuple[str, Tensor]]:
        """One at a time, whatever the bucket: each rank makes a copy of its part of the model first."""
        parts: dict[str, Any] = get_model_state_dict(self.module)
        for name in self.names:
            yield name, full_tensor(parts.pop(name))

    @contextmanager
    def gathered(self) -> Iterator[Any]:
        """The model with whole weights, a copy on every rank that is gone when the context ends: sampling gathers them
        once."""
        yield copy_with(self.base, dict(self.get_per_tensor_param())).to(self.device)

    def to(self, device: torch.device | str, *, model: bool = True, optimizer: bool = True) -> None:
        """Move optimizer state. FSDP1 keeps its weights where they are.

        Raises:
            ValueError: the model was to be moved.
        """
        if model and torch.device(device).type != self.device.type:
            raise ValueError("to: FSDP1 does not let its weights be moved; model=False, or the fsdp2 engine, expected")
        super().to(device, model=False, optimizer=optimizer)


class Fsdp1ValueEngine(Fsdp1Engine, Fsdp2ValueEngine):
    """As `Fsdp1Engine`, of a value or reward model, see `Fsdp2ValueEngine`."""


def _precision(dtype: torch.dtype) -> MixedPrecision:
    return MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32)


def _add_up(group: dist.ProcessGroup, gradient: Tensor, shard: Tensor | None = None) -> None:
    """The sum of the ranks' gradients, of which each keeps its shard; FSDP1 by itself gives the mean. One process has
    no shards."""
    if shard is None:
        dist.all_reduce(gradient, group=group)
    else:
        dist.reduce_scatter_tensor(shard, gradient, group=group)
