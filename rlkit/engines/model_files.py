"""The weights in a model's files, of which a rank reads only the slices that it needs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from rlkit.engines.value_head import CLASSIFIER_HEAD, head_name, is_classifier


class NotInShardsError(ValueError):
    """The files of a model hold weights that cannot be read slice by slice; `load_model(path)` may read them whole."""


def has_meta_weights(model: nn.Module) -> bool:
    """Whether weights are still to be read, see `rlkit.vlm.load_model(..., on_meta=True)`."""
    return any(parameter.is_meta for parameter in model.parameters())


@contextmanager
def open_slices(model: Any) -> Iterator[dict[str, Any]]:
    """Open a model's files: name -> object that reads a slice of this tensor when it is indexed.

    Names are those in the files. The only exception is a classifier's score, which has the name of the model's output
    layer here, because rlkit puts value heads in its place.

    Args:
        model: from transformers; `model.config.name_or_path` says where its files are.

    Raises:
        ValueError: files that are missing or cut short.
        NotInShardsError: files that are not safetensors, or quantized weights.
    """
    from safetensors import SafetensorError

    path = model.config.name_or_path
    if getattr(model.config, "quantization_config", None) is not None:
        raise NotInShardsError(f"model {path!r}: expected weights that are not quantized, got a quantization_config")
    with ExitStack() as opened:
        try:
            slices = dict(_slices(path, opened))
            if is_classifier(model.config):
                slices[head_name(model)] = slices.pop(CLASSIFIER_HEAD)
        except (OSError, SafetensorError, json.JSONDecodeError, KeyError) as error:
            raise ValueError(f"model {path!r}: expected readable safetensors files, got an error: {error}") from error
        yield slices


def check_weights(path: str, wrong: set[str]) -> None:
    """Raise a ValueError that lists the weights which are missing in the files, or have other shapes there."""
    if wrong:
        listed = ", ".join(sorted(wrong))
        raise ValueError(f"model {path!r}: expected every weight in its shape, got missing or different ones: {listed}")


def _slices(path: str, opened: ExitStack) -> Iterator[tuple[str, Any]]:
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
