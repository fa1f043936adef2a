"""Weights read from a model's files directly into shards, so that no rank ever holds the whole model."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlkit.engines.distributed import local_part, shard_like
from rlkit.engines.model_files import check_weights, open_slices
from rlkit.engines.value_head import has_value_head, with_value_head
from rlkit.vlm.loading import keep_in_float32, other_head_message, ties_output_layer
from rlkit.vlm.nf4 import Nf4Linear, Nf4Weight, quantize_nf4
from rlkit.vlm.weight_files import report_unused


def load_sharded_weights(base: Any, device: torch.device) -> None:
    """Replace each parameter on the meta device by this rank's shard of it, read from the model's files.

    transformers reads, renames and converts tensors slice by slice, but only into a model of its own class without
    adapters. Such a plain model is therefore made of the same shards, read, and its tensors are assigned to `base`.
    Adapters and a value head already have their values.

    NF4 weights are read into host memory, and quantized one by one. Weights that have to be converted as full tensors,
    see `_conversions`, are also made in host memory, and each rank then keeps its shard.

    Args:
        base: from transformers, after `fully_shard`; `base.config.name_or_path` says where its files are.
        device: where the weights go.

    Raises:
        ValueError: files that are missing, cut short, or of another model.
        NotInShardsError: files that are not safetensors.
    """
    path = base.config.name_or_path
    dtype = base.config.dtype  # that the caller of `load_model` asked for
    quantized = {name: module for name, module in base.named_modules() if isinstance(module, Nf4Linear)}
    unquantized = {f"{name}.weight": _unquantized(layer) for name, layer in quantized.items()}
    codes_and_scales = {f"{name}.{part}" for name in quantized for part in Nf4Weight._fields}
    own = {name: p.detach() for name, p in base.named_parameters() if name not in codes_and_scales}
    parameters = own | unquantized
    names = _plain_names([*base.state_dict(), *unquantized], codes_and_scales)
    plain = _plain_model(base, {names[name]: x for name, x in parameters.items() if name in names}, dtype)
    mismatched = _read_files(plain, path, device, dtype, on_host={names[name] for name in unquantized})
    _check_tied_weights(plain, path)
    plain.tie_weights()
    loaded = {name: x for name, x in plain.state_dict().items() if not x.is_meta}
    missing = {names[name] for name, x in parameters.items() if x.is_meta} - loaded.keys()
    check_weights(path, missing | (mismatched - _value_head(base)))
    # transformers uses these to rename weights for an export. It finds them by class names, which FSDP changes.
    base._weight_conversions = plain._weight_conversions
    del plain, parameters, own, unquantized  # each weight is freed when it has been quantized
    state = {name: loaded.pop(plain_name) for name, plain_name in names.items() if plain_name in loaded}
    for name, layer in quantized.items():
        state |= _quantized_state(name, layer, state.pop(f"{name}.weight"), device)
    base.load_state_dict(state, strict=False, assign=True)
    base.tie_weights()


def _plain_names(names: Iterable[str], left_out: set[str]) -> dict[str, str]:
    """Names in a model, whose layers adapters may wrap -> names in the model without adapters."""
    read = (name for name in names if ".lora_" not in name and name not in left_out)
    return {name: name.replace(".base_layer.", ".") for name in read}


def _value_head(base: Any) -> set[str]:
    """The name of a value head's weight, if there is one; the output layer in the files has another shape."""
    weight = base.get_output_embeddings().weight
    return {name for name, p in base.named_parameters() if p is weight and p.shape[0] == 1}


def _unquantized(layer: Nf4Linear) -> Tensor:
    """A tensor on the meta device that is sharded as the layer's codes are, and has the shape of its weight."""
    local = torch.empty(len(local_part(layer.codes)), layer.in_features, dtype=layer.dtype, device="meta")
    return _with_local_part(layer.codes, local, (len(layer.codes), layer.in_features))


def _quantized_state(name: str, layer: Nf4Linear, weight: Tensor, device: torch.device) -> dict[str, Tensor]:
    """The layer's codes and scales by their names, made of this rank's part of its weight."""
    quantized = quantize_nf4(local_part(weight).to(device))._asdict()
    shards = {part: getattr(layer, part) for part in quantized}
    return {f"{name}.{part}": _with_local_part(shards[part], x, shards[part].shape) for part, x in quantized.items()}


def _with_local_part(x: Tensor, local: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor of this shape, sharded as `x` is, of which this rank has the part `local`; `local` if `x` is plain."""
    if not isinstance(x, DTensor):
        return local
    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=size, stride=stride)


def _plain_model(base: Any, parameters: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """A transformers model with these parameters, of the class of `base`. Buffers have the dtypes of a full load."""
    with torch.device("meta"):
        plain = type(base)._from_config(copy.deepcopy(base.config), dtype=dtype)
        keep_in_float32(plain, dtype)
        if has_value_head(base):
            with_value_head(plain)
    plain.load_state_dict(parameters, strict=False, assign=True)
    plain.tie_weights()
    return plain


def _read_files(plain: Any, path: str, device: torch.device, dtype: torch.dtype, on_host: Iterable[str]) -> set[str]:
    """Have transformers read a model's files into its shards, some of them on the host.

    Returns:
        The names of tensors that have other shapes in the files.
    """
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    with open_slices(plain) as slices:
        mapping, from_full = _conversions(plain, slices)
        places: dict[str, Any] = {"": device, **dict.fromkeys([*on_host, *from_full], "cpu")}
        options = LoadStateDictConfig(dtype=dtype, device_map=places, weight_mapping=mapping)
        shards = {name: x for name, x in plain.state_dict().items() if name in from_full}
        full_shapes = {name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in shards.items()}
        plain.load_state_dict(full_shapes, strict=False, assign=True)
        info, _ = convert_and_load_state_dict_in_model(plain, slices, options)
    for name, x in shards.items():
        full = plain.state_dict()[name]
        if not full.is_meta:
            plain.load_state_dict({name: _cut(full, x, device)}, strict=False, assign=True)
    if dist.get_rank() == 0:
        report_unused(path, plain, info.unexpected_keys)
    return {name for name, *_ in info.mismatched_keys}


def _conversions(plain: Any, slices: Mapping[str, Any]) -> tuple[list[Any], set[str]]:
    """How transformers renames and converts the tensors of a model's files.

    A rank can convert its slices alone if the files have a tensor for each expert, or stacks of transposed matrices.
    Other weights have to be made of full tensors, for example if one tensor in the files has several matrices of the
    model.

    Returns:
        What transformers calls the weight mapping, and the names of weights that have to be made of full tensors.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter, rename_source_key

    mapping: list[Any] = get_model_conversion_mapping(plain)
    converters = [x for x in mapping if isinstance(x, WeightConverter)]
    renamings = [x for x in mapping if not isinstance(x, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, from_full, not_needed = plain.state_dict(), set[str](), set[int]()
    for name in slices:
        renamed, pattern = rename_source_key(name, renamings, converters, plain.base_model_prefix, state)
        if pattern is None or renamed not in state:
            continue
        converter = by_pattern[pattern]
        first, shape = converter.operations[0], state[renamed].shape
        if isinstance(first, Transpose) and first.check_dims and tuple(slices[name].get_shape()) == shape:
            not_needed.add(id(converter))  # transformers would compare the shape with that of a shard
        elif not _converts_slices(converter):
            targets = converter.target_patterns
            from_full |= {renamed.replace(targets[0], target) for target in targets}
    return [x for x in mapping if id(x) not in not_needed], from_full


def _converts_slices(converter: Any) -> bool:
    """Whether one of transformers' converters gives a rank's slice if it gets this rank's slices."""
    from transformers.core_model_loading import MergeModulelist, Transpose

    first = converter.operations[0]
    return isinstance(first, MergeModulelist) or (isinstance(first, Transpose) and 0 not in (first.dim0, first.dim1))


def fully_read_parameters(model: Any) -> set[str]:
    """Names of the weights that each rank makes of full tensors before it keeps its shard, for published files.

    Args:
        model: from transformers, perhaps on the meta device.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    renamings, converters, from_full = list[Any](), list[Any](), set[str]()
    for conversion in reversed(get_model_conversion_mapping(model, add_legacy=False)):
        reverse = conversion.reverse_transform()
        if not isinstance(conversion, WeightConverter):
            renamings.append(reverse)
            continue
        converters.append(reverse)
        if not _converts_slices(conversion):
            from_full.update(reverse.source_patterns)
    names = (name for name, _ in model.named_parameters())
    patterns = ((name, rename_source_key(name, renamings, converters, reverse=True)[1]) for name in names)
    return {name for name, pattern in patterns if pattern in from_full}


def _cut(full: Tensor, shard: Tensor, device: torch.device) -> Tensor:
    """This rank's part of a full tensor, on the device, as a tensor that is sharded as `shard` is."""
    if not isinstance(shard, DTensor):
        return full.to(device)
    return _with_local_part(shard, local_part(shard_like(full, shard)).to(device, copy=True), shard.shape)


def _check_tied_weights(plain: Any, path: str) -> None:
    """Raise a ValueError if an output layer that is tied to the embedding was read, and differs from it."""
    if not ties_output_layer(plain):
        return
    layers = plain.get_output_embeddings(), plain.get_input_embeddings()
    head, embedding = (local_part(layer.weight.detach()) for layer in layers)
    if not head.is_meta and head.shape == embedding.shape and not torch.equal(head, embedding):
        raise ValueError(other_head_message(path))
