"""Converts the weights of a model in training to the names and shapes of its checkpoint files, or peft's adapter files.

A model in training may have adapters, base weights in 4 bits, and other names than its files: `merged_parameters`
merges and dequantizes, and `checkpoint_parameters` converts the result to what the files have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlkit.vlm.families import (
    CHECKPOINT_NAME_FAMILIES,
    TRANSPOSED_EXPERTS,
    VISION_EXPERT_FAMILIES,
    VISION_LAYERS_TOGETHER,
    checkpoint_name,
)
from rlkit.vlm.nf4 import Nf4Linear

# options of peft's LoraConfig with which a layer computes more than W + scale * B A, or a copy of a layer is trained
BESIDE_LORA = """
use_dora lora_bias modules_to_save trainable_token_indices layer_replication use_qalora use_bdlora
alora_invocation_tokens arrow_config kasa_config velora_config monteclora_config
""".split()

Shard = Callable[[Tensor, Tensor], Tensor]  # (full tensor, parameter) -> the tensor, sharded as the parameter is


def merged_parameters(
    model: nn.Module,
    full: Callable[[Sequence[Tensor]], Iterable[Tensor]] = iter,
    bucket_bytes: int = 0,
    cast: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
    shard: Shard = lambda tensor, parameter: tensor,
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every parameter of the base model, with LoRA adapters merged and NF4 weights dequantized.

    The matrices of an adapter are made full first. Each rank merges them into its part of the parameter, and casts it
    before the parameter is made full, too. Only an adapter of an NF4 weight, which has fewer bytes than what is sent,
    is merged into the full weight.

    No reference to a tensor is kept once the next one is requested. To hold one tensor at a time, the caller has to
    drop its own reference before that.

    Args:
        model: plain, or wrapped by `lora`.
        full: turns sharded parameters into full tensors, one by one. It is called once per bucket, and before that
            once for the adapters in it, in the same order on all ranks.
        bucket_bytes: upper bound on the full size of the parameters and adapters in a bucket. A larger parameter is a
            bucket of its own; with 0 every parameter is.
        cast: (name, parameter) -> the parameter in another dtype. It is called before `full`; for a parameter in NF4,
            after that, when it has been dequantized and merged.
        shard: (full tensor, parameter) -> the tensor, sharded as the parameter is.
    """
    for bucket in _buckets(_stored_parameters(model, cast), bucket_bytes):
        yield from _full(_merged_parts(bucket, full, cast, shard), full, cast)
        del bucket  # free it before the next one is made


def check_adapters(model: Any) -> None:
    """Refuse adapters that have more than LoRA's two matrices: what is sent and exported would lack the rest.

    Args:
        model: plain, or wrapped by peft.

    Raises:
        ValueError: names what the adapters have.
    """
    has_embeddings = any(".lora_embedding_" in name for name, _ in model.named_parameters())
    for adapter, config in (getattr(model, "peft_config", None) or {}).items():
        found = [name for name in BESIDE_LORA if getattr(config, name, None)]
        found += [f"peft_type {config.peft_type.value}"] if config.peft_type != "LORA" else []
        found += [f"an adapter named {adapter!r}"] if adapter != "default" else []
        found += ["adapters of embeddings"] if has_embeddings else []
        if found:
            raise ValueError(
                f"model: expected LoRA in an adapter named 'default', such as rlkit.vlm.lora makes, got "
                f"{', '.join(found)}; merge the adapters by peft's merge_and_unload() and add others, and train other "
                "weights by requires_grad"
            )


def adapter_parameters(
    model: nn.Module, full: Callable[[Sequence[Tensor]], Iterable[Tensor]] = iter, bucket_bytes: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every LoRA parameter, with the names that peft's adapter files use.

    Args:
        model: wrapped by `lora`.
        full: as for `merged_parameters`.
        bucket_bytes: as for `merged_parameters`.
    """
    stored = (
        _Stored(name.replace(".default.", "."), [parameter.detach()])
        for name, parameter in model.named_parameters()
        if ".lora_" in name
    )
    for bucket in _buckets(stored, bucket_bytes):
        yield from _full(bucket, full, lambda name, tensor: tensor)


class _Stored(NamedTuple):
    """A parameter as the model holds it.

    Attributes:
        name: without the modules that peft puts around it.
        tensors: the parameter; or the codes and scales of a layer in NF4; then A and B of its adapter, if it has one.
        layer: the layer in NF4.
        adapter: peft's module that holds the adapter.
    """

    name: str
    tensors: list[Tensor]
    layer: Any = None
    adapter: Any = None


def _stored_parameters(model: nn.Module, cast: Callable[[str, Tensor], Tensor]) -> Iterator[_Stored]:
    """The parameters of the base model; those that are one tensor are cast."""
    adapted: list[Any] = [module for module in model.modules() if "default" in getattr(module, "lora_A", ())]
    adapters = {id(_adapted(module)): module for module in adapted}
    quantized = {id(module.codes): module for module in model.modules() if isinstance(module, Nf4Linear)}
    scales = {id(layer.scales) for layer in quantized.values()}
    for name, parameter in model.named_parameters():
        if ".lora_" in name or id(parameter) in scales:
            continue
        adapter, layer = adapters.get(id(parameter)), quantized.get(id(parameter))
        name = re.sub(r"^base_model\.model\.", "", name).replace(".base_layer", "")
        tensors = [parameter.detach()]
        if layer is not None:
            name = re.sub("codes$", "weight", name)
            tensors.append(layer.scales.detach())
        if adapter is not None:
            tensors += [adapter.lora_A["default"].weight.detach(), adapter.lora_B["default"].weight.detach()]
        if len(tensors) == 1:
            tensors = [cast(name, *tensors)]
        yield _Stored(name, tensors, layer, adapter)


def _buckets(parameters: Iterable[_Stored], bucket_bytes: int) -> Iterator[list[_Stored]]:
    """Parameters in buckets of at most this size, or of one parameter."""
    bucket: list[_Stored] = []
    bucket_size = 0
    for parameter in parameters:
        size = sum(x.numel() * x.element_size() for x in parameter.tensors)
        if bucket and bucket_size + size > bucket_bytes:
            yield bucket
            bucket, bucket_size = [], 0
        bucket.append(parameter)
        bucket_size += size
    yield bucket


def _merged_parts(
    bucket: Sequence[_Stored],
    full: Callable[[Sequence[Tensor]], Iterable[Tensor]],
    cast: Callable[[str, Tensor], Tensor],
    shard: Shard,
) -> list[_Stored]:
    """The same parameters, with adapters merged into this rank's part and cast, except into NF4 weights."""
    adapted = [x for x in bucket if x.adapter is not None and x.layer is None]
    matrices = iter(full([x for parameter in adapted for x in parameter.tensors[1:]]) if adapted else ())
    parts = []
    for parameter in bucket:
        name, stored, layer, adapter = parameter
        if adapter is not None and layer is None:
            delta = _delta(adapter, next(matrices), next(matrices)).to(stored[0].dtype)
            parameter = _Stored(name, [cast(name, stored[0] + shard(delta, stored[0]))])
            del delta
        parts.append(parameter)
    return parts


def _full(
    bucket: Sequence[_Stored],
    full: Callable[[Sequence[Tensor]], Iterable[Tensor]],
    cast: Callable[[str, Tensor], Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of each parameter; one in NF4 is dequantized, merged and cast here."""
    tensors = iter(full([x for parameter in bucket for x in parameter.tensors]))
    for name, _, layer, adapter in bucket:
        tensor = next(tensors)
        if layer is not None:
            tensor = layer.dequantized(tensor, next(tensors))
            if adapter is not None:
                tensor = tensor + _delta(adapter, next(tensors), next(tensors)).to(tensor.dtype)
            tensor = cast(name, tensor)
        yield name, tensor
        del tensor  # free it before the next one is made


def _adapted(adapter: Any) -> Tensor:
    """The base parameter of an adapter. For experts, which are not linear layers, peft adapts single parameters."""
    if hasattr(adapter, "parameter_name"):
        return adapter.get_param()
    base = adapter.get_base_layer()
    return base.codes if isinstance(base, Nf4Linear) else base.weight


def _delta(adapter: Any, down: Tensor, up: Tensor) -> Tensor:
    """The weight update of an adapter, float32: scale * B A, per expert if the parameter holds several experts."""
    down, up = down.float(), up.float()
    scale, experts = adapter.scaling["default"], getattr(adapter, "num_experts", 1)
    if experts == 1:
        delta = scale * (up @ down)
        return delta.T if adapter.fan_in_fan_out else delta  # GPT-2 stores its weights transposed
    down, up = down.view(experts, -1, down.shape[1]), up.view(len(up), -1, experts)
    delta = scale * torch.einsum("ore,eri->eoi", up, down)
    return delta.transpose(1, 2) if getattr(adapter.get_base_layer(), "is_transposed", False) else delta


def converted_together(model: Any, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Groups (name -> tensor) of parameters that transformers converts to the form of checkpoint files together.

    In most families each parameter is converted alone. ERNIE 4.5 VL has experts for text and experts for images, which
    its files number in one list. The files of Kimi K2.5 have one matrix for queries, keys and values of its vision
    tower. To free the tensors of a group, the caller clears the dictionary.

    Raises:
        ValueError: experts for text without those for images, or the reverse.
    """
    family = model.config.model_type
    if family in VISION_LAYERS_TOGETHER:
        yield from _layers_together(parameters, VISION_LAYERS_TOGETHER[family])
        return
    waiting: dict[str, tuple[str, Tensor]] = {}
    for name, tensor in parameters:
        pair = re.sub(r"\.(text|vision)_moe\.", ".moe.", name)
        group = dict([waiting.pop(pair)]) if pair in waiting else {}
        group[name] = tensor
        del tensor
        if family not in VISION_EXPERT_FAMILIES or pair == name or len(group) == 2:
            yield group
        else:
            waiting[pair] = group.popitem()
    if waiting:
        alone, _ = next(iter(waiting.values()))
        raise ValueError(f"parameters: expected experts for text and for images of each layer, got only {alone}")


def _layers_together(parameters: Iterable[tuple[str, Tensor]], layer: str) -> Iterator[dict[str, Tensor]]:
    """Successive parameters whose names begin with the same match of a pattern; each other parameter alone."""
    group: dict[str, Tensor] = {}
    current = ""
    for name, tensor in parameters:
        found = re.match(layer, name)
        if group and (found is None or found[0] != current):
            yield group
            group = {}
        if found is None:
            alone = {name: tensor}
            del tensor
            yield alone
            del alone
        else:
            current, group[name] = found[0], tensor
            del tensor
    if group:
        yield group


def as_in_files(model: Any, group: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    """The tensors of the family's published checkpoint files, by their names there, that a group becomes.

    Args:
        model: from transformers.
        group: of `converted_together`.
    """
    from transformers.core_model_loading import revert_weight_conversion

    family, pieces = model.config.model_type, revert_weight_conversion(model, group)
    if family in TRANSPOSED_EXPERTS:
        # transformers reads both layouts, and writes its own, or with FSDP1's flat parameters the published one
        pieces |= {name: x.mT.contiguous() for name, x in group.items() if ".mlp.experts." in name}
    return [(checkpoint_name(family, name), x) for name, x in pieces.items()]


def checkpoint_parameters(
    model: Any, parameters: Iterable[tuple[str, Tensor]], renamed: dict[str, str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Convert (name, tensor) pairs of a transformers model to the names and tensors of its checkpoint files.

    For example, transformers holds all experts of a layer in one tensor, while checkpoint files, and vLLM, have one
    tensor per expert. A parameter whose tensor does not change keeps its name in the model, except for the families in
    `CHECKPOINT_NAME_FAMILIES`. The names of a thinker begin with "thinker.".

    Args:
        renamed: name in the model -> name in the files, of parameters whose tensors do not change. A caller that
            converts a model again and again passes the same dictionary: it is filled in the first call, and spares the
            others the search for each name, half a second for 700 tensors.
    """
    family, renamed = model.config.model_type, {} if renamed is None else renamed
    for group in converted_together(model, parameters):
        if len(group) == 1 and (file_name := renamed.get(next(iter(group)))) is not None:
            yield file_name, group.popitem()[1]
            continue
        pieces = as_in_files(model, group)
        is_one = len(group) == 1
        name, tensor = group.popitem()
        if is_one and len(pieces) == 1 and pieces[0][1] is tensor:
            if family not in CHECKPOINT_NAME_FAMILIES:
                pieces = [(checkpoint_name(family, name), tensor)]
            renamed[name] = pieces[0][0]
        del tensor
        group.clear()
        while pieces:
            yield pieces.pop(0)


def checkpoint_buffers(model: Any) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each buffer that is in a model's checkpoint files, such as the correction bias of a router.

    Args:
        model: from transformers, perhaps with adapters, or with modules that FSDP1 has wrapped. `state_dict()` would
            say which buffers are saved, but FSDP1 gathers all weights there.
    """
    from transformers.core_model_loading import revert_weight_conversion

    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(path, recurse=False):
            if name.rpartition(".")[2] in module._non_persistent_buffers_set:
                continue
            plain = name.replace(".base_layer", "").replace("_fsdp_wrapped_module.", "")
            for renamed, tensor in revert_weight_conversion(model, {plain: buffer}).items():
                yield checkpoint_name(model.config.model_type, renamed), tensor
