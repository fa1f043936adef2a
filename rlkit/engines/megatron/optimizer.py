"""Megatron's distributed optimizer around the caller's AdamW, and its state under Hugging Face names.

Megatron's own checkpoints of the optimizer are not used: without Transformer Engine they give all parameters one step
counter on loading, and the second update after that is wrong. Checkpoints hold full tensors under Hugging Face names,
each saved by one rank, in the form of the fsdp2 engine. They can be loaded with any parallelism and by either engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rlkit.engines.checkpoint import TensorReader, parameters_with_moments
from rlkit.engines.distributed import all_reduce
from rlkit.engines.megatron.hf_tensors import files_to_module, module_name, module_to_file
from rlkit.engines.megatron.weights import (
    MappedParameter,
    copy_local_part,
    gather_parts,
    is_expert,
    is_tied_copy,
    megatron_to_hf,
)

MOMENTS = ("exp_avg", "exp_avg_sq")


MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def wrap_model(
    model: nn.Module, config: TransformerConfig, make: MakeOptimizer
) -> tuple[DistributedDataParallel, DistributedOptimizer, dict[nn.Parameter, int]]:
    """Megatron's data parallelism around a model, and what `make_distributed_optimizer` returns for it.

    Raises:
        ValueError: a pipeline stage without trained parameters.
    """
    trained = torch.tensor(sum(p.requires_grad for p in model.parameters()))
    if not all_reduce(trained, dist.ReduceOp.MIN):
        raise ValueError("pipeline: expected trained parameters in every stage, got a stage without any")
    options = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    module = DistributedDataParallel(config, options, model)
    return module, *make_distributed_optimizer(make, module)


def make_distributed_optimizer(
    make: MakeOptimizer, module: DistributedDataParallel
) -> tuple[DistributedOptimizer, dict[nn.Parameter, int]]:
    """An optimizer of which each data-parallel rank keeps and steps a shard of the float32 weights and moments.

    Returns:
        The optimizer, and for each parameter the number of its parameter group in the caller's optimizer.

    Raises:
        ValueError: the caller's optimizer is not a plain AdamW.
    """
    optimizer = make([p for p in module.parameters() if p.requires_grad])
    if not isinstance(optimizer, torch.optim.AdamW) or optimizer.defaults.get("amsgrad"):
        got = type(optimizer).__name__
        raise ValueError(f"optimizer: expected torch.optim.AdamW without amsgrad in the megatron engine, got {got}")
    groups = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    config = OptimizerConfig(
        optimizer="adam",
        bf16=module.config.bf16,
        params_dtype=module.config.params_dtype,
        use_distributed_optimizer=True,
    )
    # Megatron numbers the weights of a group in the order of the buffers, but puts float32 ones first into the group
    buffers = sorted(module.buffers, key=lambda buffer: buffer.param_dtype != torch.float32)
    distributed = DistributedOptimizer(
        optimizer,
        config,
        grad_scaler=None,
        init_state_fn=None,
        model_chunks=[module],
        per_model_buffers={0: buffers, 1: module.expert_parallel_buffers},
        data_parallel_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        data_parallel_group_gloo=None,
        data_parallel_group_idx=0,
        distributed_optimizer_instance_id=0,
    )
    distributed.grad_stats_parallel_group = dist.group.WORLD
    distributed.tp_group = parallel_state.get_tensor_model_parallel_group()
    for group in optimizer.param_groups:
        step_on_device = group["fused"] or group["capturable"]  # as AdamW itself does
        for shard in group["params"]:
            optimizer.state[shard] = {name: torch.zeros_like(shard) for name in MOMENTS}
            optimizer.state[shard]["step"] = torch.zeros((), device=shard.device if step_on_device else "cpu")
    return distributed, groups


def clip_grad_norm(optimizer: DistributedOptimizer, max_norm: float) -> float:
    """Scale gradients down to `max_norm`; returns the norm over all ranks before that.

    Megatron's own method reads the norm of each tensor from the GPU if Transformer Engine is not installed.
    """
    grads = optimizer.get_main_grads_for_grad_norm()
    norm = get_total_norm(grads) if grads else torch.zeros((), device=torch.cuda.current_device())
    squared = norm.square()
    dist.all_reduce(squared, group=optimizer.get_grad_stats_parallel_group())
    norm = squared.sqrt()
    clip_grads_with_norm_(optimizer.get_parameters(), max_norm, norm)
    return norm.item()


# --- values of one parameter


def local_shard(optimizer: DistributedOptimizer, parameter: nn.Parameter) -> tuple[slice, dict[str, Tensor]] | None:
    """This rank's shard of a parameter: its range in the flat parameter, and its float32 weights ("param") and state.

    None if this rank keeps nothing of the parameter.
    """
    if parameter not in optimizer.model_param_gbuf_map:
        return None
    span = optimizer._get_model_param_range_map(parameter)["param"]
    return slice(span.start, span.end), optimizer._get_main_param_and_optimizer_states(parameter)


def gather_state(
    optimizer: DistributedOptimizer, parameter: nn.Parameter, select: Callable[[dict[str, Tensor]], Tensor]
) -> Tensor:
    """The full float32 tensor of a parameter's weights or state, on each rank of its stage.

    Args:
        optimizer: whose ranks keep shards.
        parameter: of this stage.
        select: picks one tensor of `local_shard`, e.g. "param".
    """
    local = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    if (shard := local_shard(optimizer, parameter)) is not None:
        span, tensors = shard
        local[span] = select(tensors)
    if is_expert(parameter):
        data_parallel_group = parallel_state.get_expert_data_parallel_group()
    else:
        data_parallel_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(local, group=data_parallel_group)
    return gather_parts(local.view_as(parameter), parameter)


def set_values(parameter: nn.Parameter, optimizer: DistributedOptimizer | None, values: dict[str, Tensor]) -> None:
    """Set a parameter, and this rank's optimizer shard of it.

    Args:
        parameter: of this stage.
        optimizer: None for an engine without one.
        values: "param" or moments, in the shape of the parameter; "step", the number of updates.
    """
    if "param" in values:
        parameter.data.copy_(values["param"])
    if optimizer is not None and parameter.requires_grad and (shard := local_shard(optimizer, parameter)) is not None:
        span, tensors = shard
        for name, x in values.items():
            tensors[name].data.copy_(x.flatten()[span] if x.ndim else x)


# --- checkpoints


def checkpoint_state(
    parameters: Sequence[MappedParameter],
    optimizer: DistributedOptimizer | None,
    groups: dict[nn.Parameter, int],
    config: TransformerConfig,
) -> dict[str, Any]:
    """Trainable weights, moments and steps: each full tensor on one of the ranks of its stage."""
    data = parallel_state.get_data_parallel_group(with_context_parallel=True)
    tensor = parallel_state.get_tensor_model_parallel_group()
    ranks, rank = data.size() * tensor.size(), data.rank() * tensor.size() + tensor.rank()
    training = [one for one in parameters if one.parameter.requires_grad and not is_tied_copy(one.parameter)]
    model: dict[str, Tensor] = {}
    state: dict[str, dict[str, Any]] = {}
    step = None if optimizer is None else step_count(optimizer)
    for i, one in enumerate(training):
        for kind in ("param", *MOMENTS) if optimizer is not None else ("param",):
            tensors = _gather_module_tensors(one, optimizer, kind, config, keep=i % ranks == rank)
            if kind == "param":
                model |= tensors
            else:
                for name, x in tensors.items():
                    state.setdefault(name, {"step": step})[kind] = x
    if optimizer is None:
        return {"model": model, "optimizer": {}}
    return {"model": model, "optimizer": {"state": state, "param_groups": param_groups(training, optimizer, groups)}}


def _gather_module_tensors(
    mapped: MappedParameter,
    optimizer: DistributedOptimizer | None,
    kind: str,
    config: TransformerConfig,
    *,
    keep: bool,
) -> dict[str, Tensor]:
    """Weights or moments of a parameter by names of the transformers module, on the host; empty without `keep`.

    All ranks of a stage call this together.
    """
    parameter, names = mapped
    if optimizer is None:
        full = gather_parts(parameter.detach(), parameter)
    else:
        full = gather_state(optimizer, parameter, itemgetter(kind))
    if not keep:
        return {}
    tensors = megatron_to_hf(full.cpu(), len(names), parameter, config)
    return files_to_module(dict(zip(names, tensors, strict=True)))


def step_count(optimizer: DistributedOptimizer) -> Tensor:
    """The number of updates, the same for all parameters; 0-d, on the host."""
    count = max((state["step"].item() for state in optimizer.optimizer.state.values()), default=0.0)
    return all_reduce(torch.tensor(count), dist.ReduceOp.MAX)


def param_groups(
    training: Sequence[MappedParameter], optimizer: DistributedOptimizer, groups: dict[nn.Parameter, int]
) -> list[dict[str, Any]]:
    """The optimizer's parameter groups with the Hugging Face names of all stages."""
    own: list[list[str]] = [[] for _ in optimizer.optimizer.param_groups]
    for parameter, names in training:
        group_names = own[groups[parameter]]
        group_names += [name for name in map(module_name, names) if name not in group_names]
    group = parallel_state.get_pipeline_model_parallel_group()
    stages: list[Any] = [None] * group.size()
    dist.all_gather_object(stages, own, group=group)
    return [
        {**{k: v for k, v in settings.items() if k != "params"}, "params": [n for stage in stages for n in stage[i]]}
        for i, settings in enumerate(optimizer.optimizer.param_groups)
    ]


def load_tensors(
    reader: TensorReader,
    parameters: Sequence[MappedParameter],
    optimizer: DistributedOptimizer | None,
    config: TransformerConfig,
    shapes: Mapping[str, torch.Size],
) -> None:
    """Set trained weights, moments and steps from a checkpoint.

    The tensors of one parameter are read at a time: a rank never holds the model, nor its optimizer state. Moments and
    steps that the checkpoint does not have, for example because it was saved before the first update, are 0.

    Args:
        reader: of the checkpoint, whose shapes are `expected_shapes`.
        parameters: of this stage.
        optimizer: None for an engine without one.
        config: Megatron's.
        shapes: of the parameters of the transformers module.
    """
    with_moments = parameters_with_moments(reader.names)
    for parameter, names in parameters:
        if not parameter.requires_grad:
            continue
        has_shard = optimizer is not None and local_shard(optimizer, parameter) is not None
        module_names = list(dict.fromkeys(map(module_name, names)))
        for kind in ("param", *MOMENTS) if has_shard else ("param",):
            tensors = {name: torch.zeros(shapes[name]) for name in module_names}
            moments = {name: {kind: x} for name, x in tensors.items() if name in with_moments}
            reader.fill({"model": tensors} if kind == "param" else {"optimizer": {"state": moments}})
            part = torch.empty(parameter.shape)
            copy_local_part(part, [module_to_file(name, tensors) for name in names], parameter, config)
            set_values(parameter, optimizer, {kind: part})
        if has_shard:
            step = torch.zeros(())
            if module_names[0] in with_moments:
                reader.fill({"optimizer": {"state": {module_names[0]: {"step": step}}}})
            set_values(parameter, optimizer, {"step": step})


def expected_shapes(
    reader: TensorReader,
    parameters: Sequence[MappedParameter],
    optimizer: DistributedOptimizer | None,
    shapes: Mapping[str, torch.Size],
) -> dict[str, torch.Size]:
    """The shapes of the tensors that `load_tensors` reads from a checkpoint, by their names there."""
    with_moments = parameters_with_moments(reader.names)
    training = [one for one in parameters if one.parameter.requires_grad]
    expected = {}
    for name in dict.fromkeys(module_name(name) for one in training for name in one.hf_names):
        expected[f"model.{name}"] = shapes[name]
        if optimizer is not None and name in with_moments:
            expected |= {f"optimizer.state.{name}.{kind}": shapes[name] for kind in MOMENTS}
            expected[f"optimizer.state.{name}.step"] = torch.Size()
    return expected


def load_param_groups(optimizer: DistributedOptimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Restore the settings of the parameter groups, such as the learning rate, from a checkpoint."""
    for group, saved_group in zip(optimizer.optimizer.param_groups, saved, strict=True):
        group.update({name: x for name, x in saved_group.items() if name != "params"})
