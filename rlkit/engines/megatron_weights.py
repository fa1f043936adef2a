"""Weights under their Hugging Face names, and Megatron's parameters made of them: both ways, bit for bit.

A parameter of Megatron's is one or several of Hugging Face's: queries, keys and values lie together, group of heads by
group of heads, and so do the two halves of a gated MLP, rank by rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from rlkit.vlm.adapt import checkpoint_parameters

HEAD = "lm_head.weight"
EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight")
OF_EXPERT = {"1": ("gate_proj", "up_proj"), "2": ("down_proj",)}
OUTSIDE = {
    "embedding.word_embeddings.weight": "embed_tokens.weight",
    "decoder.final_layernorm.weight": "norm.weight",
}
INSIDE = {
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
    # Transformer Engine's layers hold a norm together with what follows it
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
}


def embedding_name(config: TransformerConfig) -> str:
    return f"{_text(config)}embed_tokens.weight"


def _text(config: TransformerConfig) -> str:
    """How the names of a language model begin, and of one within a vision-language model."""
    return "model." if config.mrope_section is None else "model.language_model."


def hf_names(name: str, first_layer: int, config: TransformerConfig) -> tuple[str, ...]:
    """The Hugging Face parameters that one of Megatron's is made of, on all ranks together.

    Args:
        name: in the model of this pipeline stage.
        first_layer: of the stage, counted over the whole model.
    """
    if name == "output_layer.weight":
        return (HEAD,)
    if name in OUTSIDE:
        return (_text(config) + OUTSIDE[name],)
    if name.startswith("visual."):
        return (f"model.{name}",)
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
    parts: Sequence[str] = () if match is None else INSIDE.get(match[2], ())
    if match is not None and (expert := EXPERT.fullmatch(match[2])):
        ranks = config.expert_model_parallel_size
        here = (config.num_moe_experts or 0) // ranks
        numbers = [rank * here + int(expert[1]) for rank in range(ranks)]
        parts = [f"mlp.experts.{number}.{part}.weight" for number in numbers for part in OF_EXPERT[expert[2]]]
    if match is None or not parts:
        raise ValueError(f"{name}: no Hugging Face parameter is known for it")
    return tuple(f"{_text(config)}layers.{int(match[1]) + first_layer}.{part}" for part in parts)


def is_spread_expert(parameter: Any) -> bool:
    """Whether it is one expert's, and other ranks hold other experts' in its place."""
    return not getattr(parameter, "allreduce", True)


def fuse(parts: Sequence[Tensor], parameter: nn.Parameter, config: TransformerConfig) -> Tensor:
    """Hugging Face's tensors -> Megatron's, of all tensor or expert ranks together."""
    if is_spread_expert(parameter):
        return torch.cat(list(parts))
    if len(parts) == 3:  # queries, keys, values
        groups = [part.unflatten(0, (config.num_query_groups, -1)) for part in parts]
        return torch.cat(groups, 1).flatten(0, 1)
    if len(parts) == 2:  # gate, up
        halves = [part.unflatten(0, (config.tensor_model_parallel_size, -1)) for part in parts]
        return torch.stack(halves, 1).flatten(0, 2)
    return parts[0]


def split(whole: Tensor, count: int, parameter: nn.Parameter, config: TransformerConfig) -> list[Tensor]:
    """The inverse of `fuse`, into so many tensors."""
    if is_spread_expert(parameter):
        return list(whole.chunk(count))
    if count == 3:
        groups, size = config.num_query_groups, config.kv_channels
        parts = whole.unflatten(0, (groups, -1))
        sizes = [config.num_attention_heads // groups * size, size, size]
        return [part.flatten(0, 1) for part in parts.split(sizes, 1)]
    if count == 2:
        halves = whole.unflatten(0, (config.tensor_model_parallel_size, 2, -1))
        return [halves[:, i].flatten(0, 1) for i in range(2)]
    return [whole]


def own_part(whole: Tensor, parameter: Any) -> Tensor:
    """What this rank holds of a parameter."""
    if is_spread_expert(parameter):
        group = parallel_state.get_expert_model_parallel_group()
        return whole.chunk(group.size())[group.rank()]
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    return whole.chunk(ranks, parameter.partition_dim)[parallel_state.get_tensor_model_parallel_rank()]


def all_parts(own: Tensor, parameter: Any) -> Tensor:
    """A tensor shaped as this rank's part of a parameter (or of its optimizer state) -> the whole, on every rank."""
    group, dim = parallel_state.get_tensor_model_parallel_group(), getattr(parameter, "partition_dim", 0)
    if is_spread_expert(parameter):
        group, dim = parallel_state.get_expert_model_parallel_group(), 0
    elif not getattr(parameter, "tensor_model_parallel", False):
        return own
    parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, own.contiguous(), group=group)
    return torch.cat(parts, dim)


def named(model: nn.Module, config: TransformerConfig) -> list[tuple[nn.Parameter, tuple[str, ...]]]:
    """This stage's parameters with their Hugging Face names, the last stage's copy of tied embeddings among them."""
    first_layer = get_transformer_layer_offset(config)
    found = []
    for name, parameter in model.named_parameters():
        names = (embedding_name(config),) if is_copy(parameter) else hf_names(name, first_layer, config)
        found.append((parameter, names))
    return found


class Source(NamedTuple):
    """A tensor of the transformers model, and whether it trains."""

    tensor: Tensor
    trains: bool


def sources(model: Any) -> dict[str, Source]:
    """What the model's files hold, by the names it has there: experts one by one, for example."""
    found = {}
    for name, parameter in model.named_parameters():
        for piece, tensor in checkpoint_parameters(model, [(name, parameter.detach())]):
            found[piece] = Source(tensor, parameter.requires_grad)
    return found


def is_copy(parameter: nn.Parameter) -> bool:
    """Whether it is the last stage's copy of tied embeddings, which are the first stage's."""
    return getattr(parameter, "shared", False)


class Facts(NamedTuple):
    """What the other pipeline stages need to know of a tensor that they receive."""

    name: str
    shape: torch.Size
    dtype: torch.dtype


def facts_of_stages(
    parameters: Sequence[tuple[nn.Parameter, tuple[str, ...]]], shapes: Mapping[str, torch.Size]
) -> list[list[Facts]]:
    """Of every pipeline stage, in the order in which `whole_parameters` sends its tensors.

    Args:
        parameters: of this stage, from `named`.
        shapes: of the Hugging Face parameters.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    mine = [Facts(name, shapes[name], p.dtype) for p, names in parameters if not is_copy(p) for name in names]
    stages: list[Any] = [None] * group.size()
    dist.all_gather_object(stages, mine, group=group)
    return stages


def whole_parameters(
    parameters: Sequence[tuple[nn.Parameter, tuple[str, ...]]],
    stages: Sequence[Sequence[Facts]],
    config: TransformerConfig,
    device: torch.device,
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor) of every parameter, on every rank, one after the other; all iterate together.

    Args:
        parameters: of this stage, from `named`.
        stages: from `facts_of_stages`.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    for stage, facts in enumerate(stages):
        if stage == group.rank():
            for name, part in _own_parameters(parameters, config):
                if len(stages) > 1:
                    dist.broadcast(part, group=group, group_src=stage)
                yield name, part
        else:
            for name, shape, dtype in facts:
                part = torch.empty(shape, dtype=dtype, device=device)
                dist.broadcast(part, group=group, group_src=stage)
                yield name, part


def _own_parameters(
    parameters: Sequence[tuple[nn.Parameter, tuple[str, ...]]], config: TransformerConfig
) -> Iterator[tuple[str, Tensor]]:
    for parameter, names in parameters:
        if not is_copy(parameter):
            whole = all_parts(parameter.detach(), parameter)
            parts = split(whole, len(names), parameter, config)
            yield from ((name, part.contiguous()) for name, part in zip(names, parts, strict=True))
