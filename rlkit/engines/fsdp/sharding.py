"""What of a model is sharded as one, and `fully_shard` on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rlkit.engines.value_head import has_value_head


def units(model: Any, base: Any, dtype: torch.dtype) -> dict[nn.Module, torch.dtype]:
    """The modules whose weights are gathered together, and their precision; the rest of the model is one unit more.

    A layer none of whose parameters train stays with the rest: it needs no gradient communication, and a rank whose
    rows have no images does not keep the others waiting in it.

    Args:
        model: perhaps wrapped by `rlkit.vlm.lora`.
        base: the transformers model in it, or itself.
        dtype: of activations and gathered weights; a value head stays in float32.
    """
    names = base._no_split_modules or ()
    layers = [m for m in model.modules() if type(m).__name__ in names and any(p.requires_grad for p in m.parameters())]
    exact = {base.get_output_embeddings(): torch.float32} if has_value_head(base) else {}
    return {**dict.fromkeys(layers, dtype), **exact}


def shard(model: Any, parts: Mapping[nn.Module, torch.dtype], dtype: torch.dtype, mesh: DeviceMesh) -> Any:
    """Apply `fully_shard` to each unit and to the rest, with gradients summed over the mesh and not averaged.

    A single rank whose weights have the precision they are computed in is left as it is: there is nothing to share, and
    copies of all weights in every forward and backward would be a tenth of a short step.

    Args:
        model: perhaps wrapped by `rlkit.vlm.lora`.
        parts: see `units`.
        dtype: of the rest.
        mesh: one dimension, the ranks that share a copy of the weights, or two: those that hold a copy each before it.
    """
    if mesh.size() == 1 and {p.dtype for p in model.parameters()} <= {dtype}:
        return model
    for module, precision in [*parts.items(), (model, dtype)]:
        policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model
