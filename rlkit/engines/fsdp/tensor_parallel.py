"""Tensor parallelism beside FSDP2, by the tensor-parallel plans of transformers.

A model's plan names the matrices to shard and how to shard them. transformers replaces these by DTensors and inserts
the all-reduces. Every rank of a group computes all other modules, the embedding and the output layer completely, from
the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rlkit.engines.distributed import full_tensor, local_part
from rlkit.vlm.families import recurrent_layers

REPLICATED = "replicated_with_grad_allreduce"  # the plan's name for weights that every rank uses for its own heads


def apply_tensor_parallel(base: Any, mesh: DeviceMesh) -> list[nn.Module]:
    """Shard the matrices that the model's plan names over a one-dimensional mesh, before `fully_shard`.

    Args:
        base: from transformers, without adapters.
        mesh: one dimension.

    Returns:
        The replicated modules, whose gradients differ between ranks: see `all_reduce_gradients`.

    Raises:
        ValueError: a model without a plan, with recurrent layers or activation sparsity, an unsupported style in its
            plan, or heads that the ranks cannot share.
    """
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism, replace_layer_number_by_wildcard

    size, text = mesh.size(), base.config.get_text_config()
    if recurrent_layers(base):
        raise ValueError(
            f"tensor: expected 1 for {text.model_type}, whose recurrent layers are not sharded, got {size}"
        )
    if any(getattr(text, "activation_sparsity_pattern", None) or ()):
        raise ValueError(
            f"tensor: expected 1 for {text.model_type}, whose activation sparsity needs all neurons, got {size}"
        )
    embeddings = base.get_output_embeddings(), base.get_input_embeddings()  # often the same module
    modules = {replace_layer_number_by_wildcard(name): module for name, module in base.named_modules()}
    plan = {name: style for name, style in base.tp_plan.items() if modules.get(name) not in embeddings}
    if unsupported := sorted(set(plan.values()) - {"colwise", "rowwise", REPLICATED}):
        styles = ", ".join(unsupported)
        raise ValueError(
            f"tensor: expected 1 for {text.model_type}, whose plan has unsupported {styles}, got {size}; "
            "use ulysses_sequence_parallel_size for long rows, or the megatron engine"
        )
    if "colwise" not in plan.values():
        raise ValueError(f"tensor: expected 1 for {text.model_type}, which has no plan in transformers, got {size}")
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(text, name)) % size:
            raise ValueError(f"tensor: expected a divisor of the {heads} {name} of {text.model_type}, got {size}")
    apply_tensor_parallelism(base, mesh, {name: style for name, style in plan.items() if style != REPLICATED})
    names = base.named_modules()
    return [module for name, module in names if plan.get(replace_layer_number_by_wildcard(name)) == REPLICATED]


def all_reduce_gradients(modules: Iterable[nn.Module], group: dist.ProcessGroup) -> None:
    """Sum the gradients of replicated modules over a group whose ranks used them for different heads."""
    for gradient in (p.grad for module in modules for p in module.parameters() if p.grad is not None):
        dist.all_reduce(local_part(gradient), group=group)


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for parameters on several device meshes, which torch's does not accept.

    Args:
        parameters: sharded over one mesh or several.
        max_norm: gradients are scaled down to this norm.

    Returns:
        The norm before clipping, a plain 0-d tensor.
    """
    meshes: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        meshes.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    gradients = [[p.grad for p in part if p.grad is not None] for part in meshes.values()]
    norms = [full_tensor(torch.nn.utils.get_total_norm(part)) for part in gradients if part]
    norm = torch.nn.utils.get_total_norm(norms)
    for part in meshes.values():
        torch.nn.utils.clip_grads_with_norm_(part, max_norm, norm)
    return norm
