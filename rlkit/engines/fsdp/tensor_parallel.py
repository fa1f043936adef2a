"""Tensor parallelism by transformers' own plans, beside FSDP2: ranks share the matrices of each layer.

A model's plan says which matrices are cut, and how; transformers makes DTensors of them and puts the sums in their
places. What the plan does not name, and the embedding and the output layer, each rank of a group computes as a whole,
from the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rlkit.engines.distributed import full_tensor

COPIED = "replicated_with_grad_allreduce"  # weights that each rank has, and uses for its own heads


def share_matrices(base: Any, mesh: DeviceMesh) -> list[nn.Module]:
    """Cut the matrices that the model's plan names over the ranks of a mesh, before `fully_shard`.

    Args:
        base: from transformers, without adapters.
        mesh: one dimension.

    Returns:
        The modules whose gradients are each rank's own part, see `add_up_copies`.

    Raises:
        ValueError: a model without a plan, with parts of a plan that are not supported, or heads that cannot be shared.
    """
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism, replace_layer_number_by_wildcard

    size, text = mesh.size(), base.config.get_text_config()
    whole = base.get_output_embeddings(), base.get_input_embeddings()  # which are often one
    names = {replace_layer_number_by_wildcard(name): module for name, module in base.named_modules()}
    plan = {name: style for name, style in base.tp_plan.items() if names.get(name) not in whole}
    if others := set(plan.values()) - {"colwise", "rowwise", COPIED}:
        raise ValueError(f"tensor={size}: {text.model_type}: {', '.join(sorted(others))} in its plan is not supported")
    if "colwise" not in plan.values():
        raise ValueError(f"tensor={size}: {text.model_type} has no plan in transformers")
    for name in ("num_attention_heads", "num_key_value_heads"):
        if getattr(text, name) % size:
            raise ValueError(
                f"tensor={size}: a divisor of {name} expected, {text.model_type} has {getattr(text, name)}"
            )
    apply_tensor_parallelism(base, mesh, {name: style for name, style in plan.items() if style != COPIED})
    every = base.named_modules()
    return [module for name, module in every if plan.get(replace_layer_number_by_wildcard(name)) == COPIED]


def add_up_copies(modules: Iterable[nn.Module], group: dist.ProcessGroup) -> None:
    """Sum over the ranks of a group the gradients of weights that each used for its own heads."""
    for parameter in (p for module in modules for p in module.parameters() if p.grad is not None):
        grad = parameter.grad
        dist.all_reduce(grad.to_local() if isinstance(grad, DTensor) else grad, group=group)


def clip_gradients(parameters: Iterable[nn.Parameter], most: float) -> Tensor:
    """As `torch.nn.utils.clip_grad_norm_`, which takes parameters of one mesh alone; the norm is a plain tensor.

    Args:
        parameters: some cut by the plan, some not, all of them sharded.
        most: the norm that gradients are scaled down to.
    """
    meshes: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        meshes.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    gradients = [[p.grad for p in part if p.grad is not None] for part in meshes.values()]
    norms = [full_tensor(torch.nn.utils.get_total_norm(part)) for part in gradients if part]
    norm = torch.nn.utils.get_total_norm(norms)
    for part in meshes.values():
        torch.nn.utils.clip_grads_with_norm_(part, most, norm)
    return norm
