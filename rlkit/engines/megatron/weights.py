"""Weights under their Hugging Face names, and Megatron's parameters made of them: both ways, bit for bit.

A parameter of Megatron's is one or several of Hugging Face's: queries, keys and values lie together, group of heads by
group of heads, and so do the two halves of a gated MLP, rank by rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from rlkit.vlm.adapt import checkpoint_parameters

HEAD = "lm_head.weight"
EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight")
OF_EXPERT = {"1": ("gate_proj", "up_proj"), "2": ("down_proj",)}
OF_LAYER = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")  # one expert's, in Hugging Face's files
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
    (whole,) = parts
    short = -len(whole) % config.tensor_model_parallel_size if hasattr(parameter, "vocabulary") else 0
    return F.pad(whole, (0, 0, 0, short)) if short else whole


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
    return [whole[: getattr(parameter, "vocabulary", None)]]


def module_name(name: str) -> str:
    """The parameter of the transformers module that holds a tensor of its files: all experts of a layer are one."""
    expert = OF_LAYER.fullmatch(name)
    if expert is None:
        return name
    return f"{expert[1]}.{'down_proj' if expert[3] == 'down' else 'gate_up_proj'}"


def joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by their names in files -> the module's, for which all experts of a layer have to be there."""
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    found = {}
    for name, tensor in tensors.items():
        if (expert := OF_LAYER.fullmatch(name)) is None:
            found[name] = tensor
        else:
            experts.setdefault(module_name(name), {}).setdefault(int(expert[2]), {})[expert[3]] = tensor
    for name, rows in experts.items():
        parts = [list(rows[number].values()) for number in sorted(rows)]
        found[name] = torch.stack([torch.cat(part) for part in parts])
    return found


def taken_apart(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """A tensor by its name in files, out of the module's."""
    whole, expert = tensors[module_name(name)], OF_LAYER.fullmatch(name)
    if expert is None:
        return whole
    own = whole[int(expert[2])]
    return own if expert[3] == "down" else own.chunk(2)[expert[3] == "up"]


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
    return _gathering(own, parameter)()


def _gathering(own: Tensor, parameter: Any) -> Callable[[], Tensor]:
    """`all_parts` under way; what it returns waits for it."""
    group, dim = parallel_state.get_tensor_model_parallel_group(), getattr(parameter, "partition_dim", 0)
    if is_spread_expert(parameter):
        group, dim = parallel_state.get_expert_model_parallel_group(), 0
    elif not getattr(parameter, "tensor_model_parallel", False):
        return lambda: own
    own = own.contiguous()
    parts = [torch.empty_like(own) for _ in range(group.size())]
    work = dist.all_gather(parts, own, group=group, async_op=True)

    def whole() -> Tensor:
        work.wait()
        return torch.cat(parts, dim)

    return whole


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
    bucket_bytes: int = 0,
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor) of every parameter, on every rank, one after the other; all iterate together.

    Args:
        parameters: of this stage, from `named`.
        stages: from `facts_of_stages`.
        bucket_bytes: tensors of so many bytes are under way at once; what is larger goes alone, and so does each
            parameter by default.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    own = [(parameter, names) for parameter, names in parameters if not is_copy(parameter)]
    for stage, facts in enumerate(stages):
        sizes = {fact.name: fact.shape.numel() * fact.dtype.itemsize for fact in facts}
        rows = [names for _, names in own] if stage == group.rank() else [(fact.name,) for fact in facts]
        for bucket in _buckets([sum(sizes[name] for name in names) for names in rows], bucket_bytes):
            if stage == group.rank():
                coming = [(p, names, _gathering(p.detach(), p)) for p, names in own[bucket]]
                pieces = [piece for one in coming for piece in _pieces(*one, config)]
                del coming
            else:
                pieces = [(f.name, torch.empty(f.shape, dtype=f.dtype, device=device)) for f in facts[bucket]]
            works = [
                dist.broadcast(part, group=group, group_src=stage, async_op=True) if len(stages) > 1 else None
                for _, part in pieces
            ]
            for work in works:
                if work is not None:
                    work.wait()
                yield pieces.pop(0)


def _pieces(
    parameter: nn.Parameter, names: Sequence[str], whole: Callable[[], Tensor], config: TransformerConfig
) -> list[tuple[str, Tensor]]:
    parts = split(whole(), len(names), parameter, config)
    return [(name, part.contiguous()) for name, part in zip(names, parts, strict=True)]


def _buckets(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Runs of rows whose sizes add up to no more than `most`, or of one."""
    start = held = 0
    for i, size in enumerate(sizes):
        if i > start and held + size > most:
            yield slice(start, i)
            start, held = i, 0
        held += size
    if sizes:
        yield slice(start, len(sizes))
