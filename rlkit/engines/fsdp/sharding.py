"""The device mesh of an FSDP engine, the modules that are sharded as units, and `fully_shard` on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlkit.engines.distributed import set_timeouts
from rlkit.engines.value_head import has_value_head
from rlkit.vlm.adapt import encoder_modules


def make_device_mesh(device: torch.device, fsdp_size: int | None, tensor: int) -> DeviceMesh:
    """A mesh of all ranks: ("dp_shard",), ("dp_replicate", "dp_shard") or ("dp_shard", "tp").

    Raises:
        ValueError: a size that does not divide the number of ranks, or both together.
    """
    world = dist.get_world_size()
    for name, size in (("fsdp_size", fsdp_size), ("tensor", tensor)):
        if size is not None and (size < 1 or world % size):
            raise ValueError(f"{name}: expected a divisor of the {world} ranks, got {size}")
    if fsdp_size is not None and tensor > 1:
        raise ValueError(f"fsdp_size: expected None with tensor={tensor}, got {fsdp_size}")
    if tensor > 1:
        return _make_mesh(dist.group.WORLD, device.type, (world // tensor, tensor), ("dp_shard", "tp"))
    if fsdp_size is not None:
        shape = (world // fsdp_size, fsdp_size)
        return _make_mesh(dist.group.WORLD, device.type, shape, ("dp_replicate", "dp_shard"))
    return init_device_mesh(device.type, (world,), mesh_dim_names=("dp_shard",))


@cache
def _make_mesh(world: dist.ProcessGroup, kind: str, shape: tuple[int, int], names: tuple[str, str]) -> DeviceMesh:
    """Shared by all engines of the process, because each group costs connections, and memory on a GPU."""
    return set_timeouts(init_device_mesh(kind, shape, mesh_dim_names=names))


def unsplit_modules(base: Any) -> list[nn.Module]:
    """The modules that a transformers model lists as not to be split: its decoder layers and the layers of its towers.

    Qwen-Omni also lists the towers themselves. A module that contains another one of the list is left out, because a
    weight can belong to one unit of FSDP only.
    """
    listed = [module for module in base.modules() if type(module).__name__ in (base._no_split_modules or ())]
    return [module for module in listed if {*listed}.intersection(module.modules()) == {module}]


def fsdp_units(model: Any, base: Any, dtype: torch.dtype) -> dict[nn.Module, torch.dtype]:
    """The modules whose weights are gathered together, with their precision; the rest of the model is one more unit.

    A layer of a tower without trainable parameters belongs to the rest: it needs no gradient communication, and a rank
    whose rows have no images does not keep other ranks waiting in the vision tower. Layers of the language model are
    units also if they are frozen, so that a rank never gathers all of them.

    Args:
        model: perhaps wrapped by `rlkit.vlm.lora`.
        base: the transformers model in it, or the model itself.
        dtype: of activations and gathered weights; a value head stays in float32.
    """
    in_towers = {part for name in encoder_modules(base) for part in base.get_submodule(name).modules()}
    layers = [m for m in unsplit_modules(base) if m not in in_towers or any(p.requires_grad for p in m.parameters())]
    heads = {base.get_output_embeddings(): torch.float32} if has_value_head(base) else {}
    return {**dict.fromkeys(layers, dtype), **heads}


def cast_to_units(model: nn.Module, units: Mapping[nn.Module, torch.dtype], dtype: torch.dtype) -> None:
    """Cast each parameter to the precision of its unit, as FSDP would in every forward, if that is smaller.

    Each parameter is freed before the next one is cast. Buffers keep their dtype.

    Args:
        model: before `fully_shard`, perhaps on the meta device.
        units: from `fsdp_units`.
        dtype: of the rest.
    """
    unit_dtypes = {p: unit_dtype for module, unit_dtype in units.items() for p in module.parameters()}
    uses: dict[nn.Parameter, list[tuple[nn.Module, str, torch.dtype]]] = {}  # several of a tied parameter
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if p.is_floating_point() and p.dtype.itemsize > (unit_dtype := unit_dtypes.get(p, dtype)).itemsize:
                uses.setdefault(p, []).append((module, name, unit_dtype))
    del unit_dtypes
    while uses:
        p, users = uses.popitem()
        cast = nn.Parameter(p.detach().to(users[0][2]), p.requires_grad)
        for module, name, _ in users:
            setattr(module, name, cast)


def is_whole(model: nn.Module, mesh: DeviceMesh) -> bool:
    """Whether a single rank has every weight, so that FSDP need not wrap any.

    With matrices shared by tensor-parallel ranks it has to wrap the others, too: fused AdamW and norms of gradients
    take no plain tensors beside DTensors.
    """
    return mesh.size() == 1 and not any(isinstance(p, DTensor) for p in model.parameters())


def apply_fsdp2(model: Any, units: Mapping[nn.Module, torch.dtype], dtype: torch.dtype, mesh: DeviceMesh) -> Any:
    """Apply `fully_shard` to each unit and to the rest; gradients are summed over the mesh, not averaged.

    On a single rank that has every weight, those that already have the dtype of the computation stay where they are:
    FSDP casts the inputs of each unit, as on several ranks, and copies no weights.

    Args:
        model: perhaps wrapped by `rlkit.vlm.lora`.
        units: from `fsdp_units`.
        dtype: of the rest.
        mesh: ("dp_shard",), or ("dp_replicate", "dp_shard").
    """
    nothing_to_do = is_whole(model, mesh) and {p.dtype for p in model.parameters()} <= {dtype}
    left_alone = {*model.parameters()} if nothing_to_do else None
    for module, unit_dtype in [*units.items(), (model, dtype)]:
        policy = MixedPrecisionPolicy(param_dtype=unit_dtype, reduce_dtype=torch.float32)
        fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=left_alone)
    for unit in _units(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    return model


def reshard(module: nn.Module) -> None:
    """Shard all parameters that are gathered."""
    for unit in _units(module):
        unit.reshard()


@contextmanager
def gathered_weights(module: nn.Module) -> Iterator[None]:
    """A context in which every rank has the full weights, also after a forward."""
    units = _units(module)
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(unit is not module, recurse=False)
            unit.reshard()


def _units(module: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was applied to, outer ones before inner ones; none on an unwrapped model."""
    return [unit for unit in module.modules() if isinstance(unit, FSDPModule)]


def reduce_unused_experts(module: nn.Module) -> None:
    """Have FSDP count experts that no token of a rank was routed to as zero gradients, if they are separate modules.

    FSDP2 reduces those weights of a unit that have gradients, by their position. Ranks that use other experts would add
    up gradients of different ones.

    Args:
        module: after `fully_shard`.

    Raises:
        ValueError: an older torch, which cannot do so.
    """
    units = _units(module)
    owner = {part: unit for unit in units for part in unit.modules()}
    for name, part in module.named_modules():
        is_list_of_experts = name.rpartition(".")[2] == "experts" and isinstance(part, nn.ModuleList | nn.ModuleDict)
        if not is_list_of_experts or part not in owner or not any(p.requires_grad for p in part.parameters()):
            continue
        if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            owner[part].set_reduce_scatter_unused_params(True, recurse=False)
        elif dist.get_world_size() > 1:
            raise ValueError(
                f"torch: expected version 2.13 or newer to train {name} on several ranks, whose experts are separate "
                f"modules, got {torch.__version__}"
            )


def check_uniform_dtypes(module: nn.Module) -> None:
    """Refuse trained weights of several dtypes in one unit, which FSDP reduces together.

    Args:
        module: after `fully_shard`.

    Raises:
        ValueError: `from_pretrained` keeps some weights of a family in float32, such as ERNIE's routers.
    """
    units = _units(module)
    owner = {parameter: unit for unit in units for parameter in unit.parameters()}
    trained: dict[FSDPModule, dict[str, torch.dtype]] = {unit: {} for unit in units}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter in owner:  # a model on one rank may have no units
            trained[owner[parameter]][name] = parameter.dtype
    for dtypes in trained.values():
        if len(set(dtypes.values())) > 1:
            in_float32 = next(name for name, dtype in dtypes.items() if dtype == torch.float32)
            other = next(str(dtype).removeprefix("torch.") for dtype in dtypes.values() if dtype != torch.float32)
            raise ValueError(mixed_dtypes_message(f"{in_float32} in float32 and others in {other}"))


def mixed_dtypes_message(got: str) -> str:
    """The error for weights that FSDP cannot train together."""
    return f"dtype: expected float32 for this family, as FSDP trains weights of one dtype, got {got}"
