"""Megatron's distributed optimizer around an AdamW of the caller's, and its state under Hugging Face names.

Megatron's own checkpoints of it are not used: without Transformer Engine they give all parameters one step counter on
loading, and the second update after it goes wrong. What is saved here are whole tensors under Hugging Face names, each
by one rank, in the form in which the fsdp2 engine saves, with all experts of a layer in one: any split reads them, and
either engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from rlkit.engines.distributed import all_reduce
from rlkit.engines.megatron.weights import (
    all_parts,
    fuse,
    is_copy,
    is_spread_expert,
    joined,
    module_name,
    own_part,
    split,
    taken_apart,
)

Named = Sequence[tuple[nn.Parameter, tuple[str, ...]]]
MOMENTS = ("exp_avg", "exp_avg_sq")


def shard_optimizer(
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], module: DistributedDataParallel
) -> tuple[DistributedOptimizer, dict[nn.Parameter, int]]:
    """Each data-parallel rank keeps and steps its share of the float32 weights and moments.

    Returns:
        The optimizer, and which of the caller's parameter groups each parameter is in.

    Raises:
        ValueError: an optimizer that is not an AdamW.
    """
    optimizer = make([p for p in module.parameters() if p.requires_grad])
    if not isinstance(optimizer, torch.optim.AdamW) or optimizer.defaults.get("amsgrad"):
        came = type(optimizer).__name__
        raise ValueError(
            f"optimizer: torch.optim.AdamW without amsgrad expected, came {came}; Megatron shards no other"
        )
    groups = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    config = OptimizerConfig(
        optimizer="adam",
        bf16=module.config.bf16,
        params_dtype=module.config.params_dtype,
        use_distributed_optimizer=True,
    )
    sharded = DistributedOptimizer(
        optimizer,
        config,
        None,  # no loss scale
        None,
        model_chunks=[module],
        per_model_buffers={0: module.buffers, 1: module.expert_parallel_buffers},
        data_parallel_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        data_parallel_group_gloo=None,
        data_parallel_group_idx=0,
        distributed_optimizer_instance_id=0,
    )
    sharded.grad_stats_parallel_group = dist.group.WORLD
    sharded.tp_group = parallel_state.get_tensor_model_parallel_group()
    for group in optimizer.param_groups:
        on_device = group["fused"] or group["capturable"]  # where AdamW itself would keep its counter
        for shard in group["params"]:
            optimizer.state[shard] = {name: torch.zeros_like(shard) for name in MOMENTS}
            optimizer.state[shard]["step"] = torch.zeros((), device=shard.device if on_device else "cpu")
    return sharded, groups


def shard_of(optimizer: DistributedOptimizer, parameter: nn.Parameter) -> tuple[slice, dict[str, Tensor]] | None:
    """Which of a parameter's numbers this rank keeps, and their float32 weights ("param") and state; None for none."""
    if parameter not in optimizer.model_param_gbuf_map:
        return None
    span = optimizer._get_model_param_range_map(parameter)["param"]
    return slice(span.start, span.end), optimizer._get_main_param_and_optimizer_states(parameter)


def whole_state(
    optimizer: DistributedOptimizer, parameter: nn.Parameter, pick: Callable[[dict[str, Tensor]], Tensor]
) -> Tensor:
    """What the ranks of a stage keep of a parameter's weights or state, put together: float32, on each of them."""
    whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    if (kept := shard_of(optimizer, parameter)) is not None:
        span, tensors = kept
        whole[span] = pick(tensors)
    data = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if is_spread_expert(parameter):
        data = parallel_state.get_expert_data_parallel_group()
    dist.all_reduce(whole, group=data)
    return all_parts(whole.view_as(parameter), parameter)


def place(parameter: nn.Parameter, optimizer: DistributedOptimizer | None, tensors: dict[str, Tensor]) -> None:
    """Set a parameter from the whole float32 "param", and the optimizer's share of it, and of its state if that came.

    Args:
        tensors: "param" and maybe moments, of all tensor ranks together; and "step", the number of updates.
    """
    own = {name: own_part(x, parameter) if x.ndim else x for name, x in tensors.items()}
    parameter.data.copy_(own["param"])
    if optimizer is not None and parameter.requires_grad and (kept := shard_of(optimizer, parameter)) is not None:
        span, here = kept
        for name, x in own.items():
            here[name].data.copy_(x.flatten()[span] if x.ndim else x)


def saved_state(
    parameters: Named,
    optimizer: DistributedOptimizer | None,
    groups: dict[nn.Parameter, int],
    config: TransformerConfig,
) -> dict[str, Any]:
    """Weights that train, moments and steps: each whole tensor on one of the ranks of the stage it belongs to."""
    data = parallel_state.get_data_parallel_group(with_context_parallel=True)
    tensor = parallel_state.get_tensor_model_parallel_group()
    ranks, rank = data.size() * tensor.size(), data.rank() * tensor.size() + tensor.rank()
    model: dict[str, Tensor] = {}
    state: dict[str, dict[str, Any]] = {}
    count = None if optimizer is None else updates(optimizer)
    training = [(p, names) for p, names in parameters if p.requires_grad and not is_copy(p)]
    groups_of: dict[str, list[tuple[nn.Parameter, tuple[str, ...]]]] = {}  # experts of a layer lie in one tensor
    for parameter, names in training:
        groups_of.setdefault(module_name(names[0]), []).append((parameter, names))
    for i, members in enumerate(groups_of.values()):
        for kind in ("param", *MOMENTS) if optimizer is not None else ("param",):
            parts: dict[str, Tensor] = {}
            for parameter, names in members:
                if optimizer is None:
                    whole = all_parts(parameter.detach(), parameter)
                else:
                    whole = whole_state(optimizer, parameter, lambda tensors, kind=kind: tensors[kind])  # type: ignore[misc]
                if i % ranks == rank:
                    pieces = split(whole, len(names), parameter, config)
                    parts |= {name: piece.cpu() for name, piece in zip(names, pieces, strict=True)}
            for name, tensor in joined(parts).items():
                if kind == "param":
                    model[name] = tensor
                else:
                    state.setdefault(name, {"step": count})[kind] = tensor
    if optimizer is None:
        return {"model": model, "optimizer": {}}
    return {"model": model, "optimizer": {"state": state, "param_groups": param_groups(training, optimizer, groups)}}


def updates(optimizer: DistributedOptimizer) -> Tensor:
    """How often it stepped, the same for all parameters; 0-d, on the host."""
    count = max((state["step"].item() for state in optimizer.optimizer.state.values()), default=0.0)
    return all_reduce(torch.tensor(count), dist.ReduceOp.MAX)


def param_groups(
    training: Named, optimizer: DistributedOptimizer, groups: dict[nn.Parameter, int]
) -> list[dict[str, Any]]:
    """The optimizer's settings with the Hugging Face names that each group of them is for, of all stages."""
    mine: list[list[str]] = [[] for _ in optimizer.optimizer.param_groups]
    for parameter, names in training:
        mine[groups[parameter]] += [name for name in map(module_name, names) if name not in mine[groups[parameter]]]
    group = parallel_state.get_pipeline_model_parallel_group()
    stages: list[Any] = [None] * group.size()
    dist.all_gather_object(stages, mine, group=group)
    return [
        {**{k: v for k, v in settings.items() if k != "params"}, "params": [n for stage in stages for n in stage[i]]}
        for i, settings in enumerate(optimizer.optimizer.param_groups)
    ]


def wanted_state(
    parameters: Named,
    optimizer: DistributedOptimizer | None,
    groups: dict[nn.Parameter, int],
    shapes: Mapping[str, torch.Size],
) -> dict[str, Any]:
    """Room for what this rank takes of a checkpoint."""
    training = [(p, names) for p, names in parameters if p.requires_grad]
    names = list(dict.fromkeys(module_name(name) for _, own in training for name in own))
    model = {name: torch.empty(shapes[name]) for name in names}
    if optimizer is None:
        return {"model": model, "optimizer": {}}
    state = {name: {"step": torch.zeros(()), **{kind: torch.empty(shapes[name]) for kind in MOMENTS}} for name in names}
    return {"model": model, "optimizer": {"state": state, "param_groups": param_groups(training, optimizer, groups)}}


def take_state(
    parameters: Named, optimizer: DistributedOptimizer | None, config: TransformerConfig, state: dict[str, Any]
) -> None:
    """Set weights, moments, steps and settings from what was read."""
    for parameter, names in parameters:
        if not parameter.requires_grad:
            continue
        tensors = {"param": fuse([taken_apart(name, state["model"]) for name in names], parameter, config)}
        if optimizer is not None:
            saved = state["optimizer"]["state"]
            for kind in MOMENTS:
                here = {module_name(name): saved[module_name(name)][kind] for name in names}
                tensors[kind] = fuse([taken_apart(name, here) for name in names], parameter, config)
            tensors["step"] = saved[module_name(names[0])]["step"]
        place(parameter, optimizer, tensors)
    if optimizer is not None:
        for mine, theirs in zip(optimizer.optimizer.param_groups, state["optimizer"]["param_groups"], strict=True):
            mine.update({k: v for k, v in theirs.items() if k != "params"})
