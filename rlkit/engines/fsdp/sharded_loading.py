"""Weights read from a model's files directly into shards, so that no rank ever holds the whole model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlkit.engines.value_head import CLASSIFIER_HEAD, has_value_head, head_name, is_classifier, with_value_head


class NotInShardsError(ValueError):
    """The files of a model hold weights that cannot be read slice by slice; `load_model(path)` may read them whole."""


def has_meta_weights(model: nn.Module) -> bool:
    """Whether weights are still to be read, see `rlkit.vlm.load_model(..., on_meta=True)`."""
    return any(parameter.is_meta for parameter in model.parameters())


def load_sharded_weights(base: Any, device: torch.device) -> None:
    """Replace each parameter on the meta device by this rank's shard of it, read from the model's files.

    transformers reads, renames and converts the tensors, a slice of a file at a time. (A mixture of experts is one
    tensor in the model and many in the files, for example.) It can do so only for its own plain model. So a plain model
    is made that contains the same shards; adapters and a value head already have their values.

    Args:
        base: from transformers, after `fully_shard`; `base.config.name_or_path` says where its files are.
        device: where the weights go.

    Raises:
        ValueError: files that are missing, cut short, or of another model.
        NotInShardsError: files that are not safetensors, or weights that transformers cannot convert slice by slice.
    """
    path = base.config.name_or_path
    # names in the base model, where adapters may wrap a layer -> names in the plain model
    names = {name: name.replace(".base_layer.", ".") for name in base.state_dict() if ".lora_" not in name}
    plain = _plain_model(base, names)
    mismatched = _read_files(plain, path, device, dtype=next(base.parameters()).dtype)
    plain.tie_weights()
    loaded = {name: x for name, x in plain.state_dict().items() if not x.is_meta}
    # the output layer in the files has another shape than a value head
    head = {name for name, p in base.named_parameters() if p is base.get_output_embeddings().weight and p.shape[0] == 1}
    wrong = mismatched - head
    wrong |= {names[name] for name, p in base.named_parameters() if p.is_meta and names[name] not in loaded}
    if wrong:
        listed = ", ".join(sorted(wrong))
        raise ValueError(f"model {path!r}: expected every weight in its shape, got missing or different ones: {listed}")
    base.load_state_dict({name: loaded[n] for name, n in names.items() if n in loaded}, False, assign=True)
    base.tie_weights()


def _plain_model(base: Any, names: dict[str, str]) -> Any:
    """A transformers model without adapters, made of the parameters of `base`."""
    with torch.device("meta"):
        plain = type(base)(base.config)
        if has_value_head(base):
            with_value_head(plain)
    plain.load_state_dict({names[n]: p.detach() for n, p in base.named_parameters() if n in names}, False, assign=True)
    plain.tie_weights()
    return plain


def _read_files(plain: Any, path: str, device: torch.device, dtype: torch.dtype) -> set[str]:
    """Have transformers read a model's files into its shards; the names of tensors that have other shapes there."""
    from safetensors import SafetensorError
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import MergeModulelist, WeightConverter, convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    mapping: list[Any] = get_model_conversion_mapping(plain)
    options = LoadStateDictConfig(dtype=dtype, device_map={"": device}, weight_mapping=mapping)
    try:
        with ExitStack() as opened:
            slices = dict(_slices(path, opened))
            if is_classifier(plain.config):
                slices[head_name(plain)] = slices.pop(CLASSIFIER_HEAD)
            info, _ = convert_and_load_state_dict_in_model(plain, slices, options)
    except (OSError, SafetensorError, json.JSONDecodeError, KeyError) as error:
        raise ValueError(f"model {path!r}: expected readable safetensors files, got an error: {error}") from error
    used = [converter for converter in mapping if isinstance(converter, WeightConverter) and converter.was_used()]
    if any(not isinstance(converter.operations[0], MergeModulelist) for converter in used):
        raise NotInShardsError(
            f"model {path!r}: expected weights that can be read in slices, got a family whose weights are converted; "
            "read them whole with load_model(...)"
        )
    return {name for name, *_ in info.mismatched_keys}


def _slices(path: str, opened: ExitStack) -> Iterator[tuple[str, Tensor]]:
    """(name, object that reads slices of it) of each tensor in the files of a directory or hub id."""
    from safetensors import safe_open
    from transformers.utils import cached_file

    index, single = (
        cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        for name in ("model.safetensors.index.json", "model.safetensors")
    )
    files = ["model.safetensors"]
    if index is None and single is None:
        raise NotInShardsError(f"model {path!r}: expected model.safetensors, got no such file")
    if index is not None:
        files = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
    for file in files:
        weights = opened.enter_context(safe_open(cached_file(path, file), "pt"))
        yield from ((name, weights.get_slice(name)) for name in weights.keys())
