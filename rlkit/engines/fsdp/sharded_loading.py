"""Weights read from a model's files into shards: no rank ever holds the whole model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlkit.engines.value_head import has_value_head, with_value_head


def on_meta(model: nn.Module) -> bool:
    """Whether the weights are still to be read: see `rlkit.vlm.load_model(..., on_meta=True)`."""
    return any(parameter.is_meta for parameter in model.parameters())


def read_shards(base: Any, device: torch.device) -> None:
    """Give each parameter on the meta device this rank's part of what the model's files hold.

    transformers reads it, renames and converts (experts are one tensor in the model, and many in the files), a slice of
    a file at a time. It does so for its own plain model, which is put around the same shards: adapters and a value head
    have their values already.

    Args:
        base: from transformers, after `fully_shard`; `base.config.name_or_path` says where its files are.
        device: where the weights go.

    Raises:
        ValueError: files that are missing, cut short, not safetensors, or of another model, or weights that can only be
            read whole.
    """
    from safetensors import SafetensorError
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import MergeModulelist, WeightConverter, convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    path, config = base.config.name_or_path, base.config
    with torch.device("meta"):
        plain = type(base)(config)
        if has_value_head(base):
            with_value_head(plain)
    # names of the base, where adapters may be in between, and those of the plain model
    names = {name: name.replace(".base_layer.", ".") for name in base.state_dict() if ".lora_" not in name}
    plain.load_state_dict({names[n]: p.detach() for n, p in base.named_parameters() if n in names}, False, assign=True)
    plain.tie_weights()
    mapping: list[Any] = get_model_conversion_mapping(plain)
    options = LoadStateDictConfig(dtype=next(base.parameters()).dtype, device_map={"": device}, weight_mapping=mapping)
    try:
        with ExitStack() as opened:
            found, _ = convert_and_load_state_dict_in_model(plain, dict(_slices(path, opened)), options)
    except (OSError, SafetensorError, json.JSONDecodeError, KeyError) as error:
        raise ValueError(f"model {path!r}: {error}") from error
    parts = [c for c in mapping if isinstance(c, WeightConverter) and c.was_used()]
    if any(not isinstance(converter.operations[0], MergeModulelist) for converter in parts):
        raise ValueError(f"model {path!r}: weights that change their form on reading; load_model(...) reads it whole")
    plain.tie_weights()
    loaded = {name: x for name, x in plain.state_dict().items() if not x.is_meta}
    head = {name for name, p in base.named_parameters() if p is base.get_output_embeddings().weight and p.shape[0] == 1}
    wrong = {name for name, *_ in found.mismatched_keys} - head
    wrong |= {names[name] for name, p in base.named_parameters() if p.is_meta and names[name] not in loaded}
    if wrong:
        raise ValueError(f"model {path!r}: missing, or of another shape: {', '.join(sorted(wrong))}")
    base.load_state_dict({name: loaded[n] for name, n in names.items() if n in loaded}, False, assign=True)
    base.tie_weights()


def _slices(path: str, opened: ExitStack) -> Iterator[tuple[str, Tensor]]:
    """(name, what reads parts of it) of each tensor in the files of a directory or hub id."""
    from safetensors import safe_open
    from transformers.utils import cached_file

    index = cached_file(path, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    files = ["model.safetensors"]
    if index is not None:
        files = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
    for file in files:
        weights = opened.enter_context(safe_open(cached_file(path, file), "pt"))
        yield from ((name, weights.get_slice(name)) for name in weights.keys())
