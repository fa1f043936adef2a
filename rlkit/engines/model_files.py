"""The weights in a model's files, of which a rank reads only the slices that it needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from rlkit.engines.value_head import CLASSIFIER_HEAD, head_name, is_classifier
from rlkit.vlm.weight_files import check_not_scaled, quantization_method, quantized_message, weight_files


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
        ValueError: files that are missing or cut short, or quantized weights.
        NotInShardsError: files that are not safetensors.
    """
    from safetensors import SafetensorError

    path = model.config.name_or_path
    if method := quantization_method(model.config):
        raise ValueError(quantized_message(path, method))
    with ExitStack() as opened:
        try:
            slices = dict(_slices(path, opened))
            dtypes = [(name, x.get_dtype()) for name, x in slices.items()]
            if is_classifier(model.config):
                slices[head_name(model)] = slices.pop(CLASSIFIER_HEAD)
        except (OSError, SafetensorError, KeyError) as error:
            raise ValueError(f"model {path!r}: expected readable safetensors files, got an error: {error}") from error
        check_not_scaled(path, dtypes)
        yield slices


def check_weights(path: str, wrong: set[str]) -> None:
    """Raise a ValueError that lists the weights which are missing in the files, or have other shapes there."""
    if wrong:
        listed = ", ".join(sorted(wrong))
        raise ValueError(f"model {path!r}: expected every weight in its shape, got missing or different ones: {listed}")


def _slices(path: str, opened: ExitStack) -> Iterator[tuple[str, Any]]:
    """(name, object that reads slices of it) of each tensor in the files of a directory or hub id."""
    from safetensors import safe_open

    files = weight_files(path)
    if not files:
        raise NotInShardsError(f"model {path!r}: expected model.safetensors, got no such file")
    for file in files:
        weights = opened.enter_context(safe_open(file, "pt"))
        yield from ((name, weights.get_slice(name)) for name in weights.keys())
