"""Megatron's parameters made of Hugging Face tensors, and back, bit for bit.

One parameter of Megatron is made of one or several Hugging Face tensors. Queries, keys and values are interleaved by
key-value head; the gate and up projections of an MLP are interleaved by tensor-parallel rank. Each rank takes only the
slices of these tensors that its part of a parameter is made of, from memory or from the model's files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from rlkit.engines.megatron.hf_tensors import LM_HEAD, HFTensor, shape_of

# the names of Megatron's parameters -> the names of the Hugging Face tensors that they are made of
OUTSIDE_LAYERS = {
    "embedding.word_embeddings.weight": "embed_tokens.weight",
    "decoder.final_layernorm.weight": "norm.weight",
}
IN_LAYER = {
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
    "self_attention.linear_qkv.bias": tuple(f"self_attn.{x}_proj.bias" for x in "qkv"),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
    "input_layernorm.weight": ("input_layernorm.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.router.weight": ("mlp.gate.weight",),
    # in Transformer Engine's layers a norm is part of the linear layer after it
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
}
EXPERT_PROJECTIONS = {"mlp.experts.gate_up_proj": ("gate_proj", "up_proj"), "mlp.experts.down_proj": ("down_proj",)}


# --- names


def embedding_name(config: TransformerConfig) -> str:
    """The Hugging Face name of the token embedding."""
    return f"{_language_model(config)}embed_tokens.weight"


def _language_model(config: TransformerConfig) -> str:
    """The prefix of all names in the language model, which may be part of a vision-language model."""
    return "model.language_model." if config.has_vision else "model."


def hf_names(name: str, first_layer: int, config: TransformerConfig) -> tuple[str, ...]:
    """The Hugging Face tensors that a parameter of Megatron is made of, on all ranks together.

    Args:
        name: of the parameter in the model of this pipeline stage.
        first_layer: number of this stage's first layer in the whole model.
        config: Megatron's.

    Raises:
        ValueError: an unknown parameter.
    """
    if name == "output_layer.weight":
        return (LM_HEAD,)
    if name in OUTSIDE_LAYERS:
        return (_language_model(config) + OUTSIDE_LAYERS[name],)
    if name.startswith("visual."):
        return (f"model.{name}",)
    in_layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
    hf_in_layer = () if in_layer is None else IN_LAYER.get(in_layer[2]) or _expert_names(in_layer[2], config)
    if in_layer is None or not hf_in_layer:
        raise ValueError(f"model: expected parameters with Hugging Face names, got {name}, for which none is known")
    layer = int(in_layer[1]) + first_layer
    return tuple(f"{_language_model(config)}layers.{layer}.{hf_name}" for hf_name in hf_in_layer)


def _expert_names(name: str, config: TransformerConfig) -> tuple[str, ...]:
    """The names of the tensors of all experts of a layer, in their order in `GroupedExperts`."""
    projections, experts = EXPERT_PROJECTIONS.get(name, ()), range(config.num_moe_experts or 0)
    return tuple(f"mlp.experts.{expert}.{projection}.weight" for expert in experts for projection in projections)


class MappedParameter(NamedTuple):
    """A parameter of this pipeline stage, and the names of the Hugging Face tensors that it is made of."""

    parameter: nn.Parameter
    hf_names: tuple[str, ...]


def map_parameters(model: nn.Module, config: TransformerConfig) -> list[MappedParameter]:
    """All parameters of this stage, including the last stage's copy of tied embeddings."""
    first_layer = get_transformer_layer_offset(config)
    mapped = []
    for name, parameter in model.named_parameters():
        names = (embedding_name(config),) if is_tied_copy(parameter) else hf_names(name, first_layer, config)
        mapped.append(MappedParameter(parameter, names))
    return mapped


def is_tied_copy(parameter: nn.Parameter) -> bool:
    """Whether a parameter is the last stage's copy of tied embeddings; the first stage has the original."""
    return getattr(parameter, "shared", False)


def is_expert(parameter: Any) -> bool:
    """Whether a parameter belongs to the experts of a layer, which expert-parallel ranks share."""
    return getattr(parameter, "is_expert", False)


def freeze_parameters(parameters: Sequence[MappedParameter], tensors: Mapping[str, HFTensor]) -> None:
    """Freeze the parameters that are frozen in the transformers model.

    Raises:
        ValueError: a parameter of Megatron is made of frozen and of trained tensors.
    """
    for parameter, names in parameters:
        if len({tensors[name].trains for name in names}) > 1:
            raise ValueError(
                f"model: expected {', '.join(names)}, which are one matrix in Megatron, to be all frozen or all "
                "trained, got both"
            )
        parameter.requires_grad_(tensors[names[0]].trains)


# --- Hugging Face tensors -> this rank's part of a parameter


def copy_local_part(
    part: Tensor,
    tensors: Sequence[Any],
    parameter: Any,
    config: TransformerConfig,
    dtype: torch.dtype | None = None,
) -> None:
    """Copy this rank's part of the parameter that Hugging Face tensors make up. Nothing else of them is read.

    Each slice is copied to its place, so no part is held twice.

    Args:
        part: of the parameter's shape; it is overwritten.
        tensors: full tensors, or objects that read a slice when they are indexed, see `open_slices`.
        parameter: Megatron's.
        config: Megatron's.
        dtype: slices of a larger dtype are rounded to this one first.
    """
    if is_expert(parameter):
        group = parallel_state.get_expert_model_parallel_group()
        count = len(tensors) // group.size()
        tensors = tensors[group.rank() * count : (group.rank() + 1) * count]
    for place, tensor in zip(_places(part, tensors, parameter, config), tensors, strict=True):
        local = tensor[:] if is_expert(parameter) else _local_slice(tensor, parameter)
        if dtype is not None and torch.promote_types(local.dtype, dtype) != dtype:
            local = local.to(dtype)
        if place.ndim > local.ndim:
            local = local.unflatten(0, place.shape[:2])
        place[: len(local)].copy_(local)
        place[len(local) :].zero_()  # the vocabulary is padded to a multiple of the ranks


def _places(part: Tensor, tensors: Sequence[Any], parameter: Any, config: TransformerConfig) -> Sequence[Tensor]:
    """The views of a rank's part that its slices of the tensors are copied to."""
    if len(tensors) != 3 or is_expert(parameter):
        return part.chunk(len(tensors))  # one tensor, gate and up, or experts
    ranks = config.tensor_model_parallel_size
    kv_heads = config.num_query_groups // ranks
    # rows of queries, of keys and of values for each key-value head
    sizes = [shape_of(tensor)[0] // ranks // kv_heads for tensor in tensors]
    return part.unflatten(0, (kv_heads, -1)).split(sizes, 1)


def _local_slice(tensor: Any, parameter: Any) -> Tensor:
    """This tensor rank's slice; those of the last ranks may be shorter."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return tensor[:]
    ranks, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    dim, length = parameter.partition_dim, shape_of(tensor)[parameter.partition_dim]
    size = -(-length // ranks)
    span = slice(min(rank * size, length), min((rank + 1) * size, length))
    return tensor[span] if dim == 0 else tensor[:, span]


# --- full tensors of Megatron -> Hugging Face tensors


def megatron_to_hf(full: Tensor, count: int, parameter: nn.Parameter, config: TransformerConfig) -> list[Tensor]:
    """The `count` Hugging Face tensors of a parameter's full tensor, of all tensor or expert ranks together."""
    if is_expert(parameter):
        return list(full.chunk(count))
    if count == 3:
        kv_heads, size = config.num_query_groups, config.kv_channels
        sizes = [config.num_attention_heads // kv_heads * size, size, size]
        return [part.flatten(0, 1) for part in full.unflatten(0, (kv_heads, -1)).split(sizes, 1)]
    if count == 2:
        by_rank = full.unflatten(0, (config.tensor_model_parallel_size, 2, -1))
        return [by_rank[:, i].flatten(0, 1) for i in range(2)]
    return [full[: getattr(parameter, "vocabulary", None)]]


def gather_parts(local: Tensor, parameter: Any) -> Tensor:
    """A tensor of the shape of this rank's part (of a parameter or of its optimizer state) -> the full tensor."""
    return _gather_async(local, parameter)()


def _gather_async(local: Tensor, parameter: Any) -> Callable[[], Tensor]:
    """Start `gather_parts`; the returned function waits for it."""
    if is_expert(parameter):
        group, dim = parallel_state.get_expert_model_parallel_group(), 0
    elif getattr(parameter, "tensor_model_parallel", False):
        group, dim = parallel_state.get_tensor_model_parallel_group(), parameter.partition_dim
    else:
        return lambda: local
    local = local.contiguous()
    parts = [torch.empty_like(local) for _ in range(group.size())]
    work = dist.all_gather(parts, local, group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return torch.cat(parts, dim)

    return wait


# --- all parameters on all ranks


class TensorInfo(NamedTuple):
    """What other pipeline stages need to know of a tensor to receive it."""

    name: str
    shape: torch.Size
    dtype: torch.dtype

    def as_meta(self) -> Tensor:
        """A tensor without values."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def tensors_of_stages(
    parameters: Sequence[MappedParameter], shapes: Mapping[str, torch.Size]
) -> list[list[TensorInfo]]:
    """The tensors of every pipeline stage, in the order in which `full_parameters` sends them.

    Args:
        parameters: of this stage.
        shapes: of the Hugging Face tensors.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    own = [
        TensorInfo(name, shapes[name], parameter.dtype)
        for parameter, names in parameters
        if not is_tied_copy(parameter)
        for name in names
    ]
    stages: list[Any] = [None] * group.size()
    dist.all_gather_object(stages, own, group=group)
    return stages


def full_parameters(
    parameters: Sequence[MappedParameter],
    stages: Sequence[Sequence[TensorInfo]],
    config: TransformerConfig,
    device: torch.device,
    bucket_bytes: int = 0,
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor) of every parameter, on every rank, one by one; all ranks iterate together.

    Args:
        parameters: of this stage.
        stages: from `tensors_of_stages`, with the dtypes that are wanted; parameters are cast before they are gathered.
        config: Megatron's.
        device: where tensors are received.
        bucket_bytes: gather and send tensors of up to this many bytes at once; by default one parameter at a time.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    own = [mapped for mapped in parameters if not is_tied_copy(mapped.parameter)]
    for stage, infos in enumerate(stages):
        is_own = stage == group.rank()
        size_of = {info.name: info.shape.numel() * info.dtype.itemsize for info in infos}
        dtype_of = {info.name: info.dtype for info in infos}
        names = [mapped.hf_names for mapped in own] if is_own else [(info.name,) for info in infos]
        for bucket in _buckets([sum(size_of[name] for name in own_names) for own_names in names], bucket_bytes):
            if is_own:
                tensors = _gather_hf_tensors(own[bucket], dtype_of, config)
            else:
                tensors = [(x.name, torch.empty(x.shape, dtype=x.dtype, device=device)) for x in infos[bucket]]
            works = [
                dist.broadcast(tensor, group=group, group_src=stage, async_op=True) if len(stages) > 1 else None
                for _, tensor in tensors
            ]
            for work in works:
                if work is not None:
                    work.wait()
                yield tensors.pop(0)  # not kept here when the next one is asked for


def _gather_hf_tensors(
    parameters: Sequence[MappedParameter], dtypes: Mapping[str, torch.dtype], config: TransformerConfig
) -> list[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor) of some parameters, in the dtype of their names; all are gathered at once."""
    gathered = [_gather_async(parameter.detach().to(dtypes[names[0]]), parameter) for parameter, names in parameters]
    tensors = []
    for (parameter, names), wait in zip(parameters, gathered, strict=True):
        parts = megatron_to_hf(wait(), len(names), parameter, config)
        tensors += [(name, part.contiguous()) for name, part in zip(names, parts, strict=True)]
    return tensors


def _buckets(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Consecutive items whose sizes add up to at most `most`; a larger item is a bucket by itself."""
    start = total = 0
    for i, size in enumerate(sizes):
        if i > start and total + size > most:
            yield slice(start, i)
            start, total = i, 0
        total += size
    if sizes:
        yield slice(start, len(sizes))
