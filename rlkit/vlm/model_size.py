"""Whether a model's configuration fits the files of its weights: a wrong number may ask for all memory there is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

MOST_LAYERS = 1000  # published models have up to about 130
COUNTS_LAYERS = re.compile(r".*(layers|blocks)|depth|n_layer")
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth")


def check_layer_counts(config: Mapping[str, Any]) -> None:
    """Refuse a configuration with more layers than any model has: to list or make them takes memory already.

    Args:
        config: the content of config.json.

    Raises:
        ValueError: it names the number.
    """
    for name, count in _layer_counts(config):
        if count > MOST_LAYERS:
            raise ValueError(f"{name}: expected at most {MOST_LAYERS} in config.json, got {count}")


def check_fits_files(path: str, config: Any, empty_model: torch.nn.Module) -> None:
    """Refuse a configuration for many more weights than the files in a directory hold; those would be made up.

    A weight takes a byte in a file at least (an eighth, if the files are quantized), and up to half of the weights may
    be missing, as an output layer is.

    Args:
        path: of the model; what is no directory is not checked.
        empty_model: made of the configuration, on the meta device.

    Raises:
        ValueError: with both numbers.
    """
    size = sum(file.stat().st_size for pattern in WEIGHT_FILES for file in Path(path).glob(pattern))
    if not size:  # whoever reads the weights says so
        return
    count = sum(parameter.numel() for parameter in empty_model.parameters())
    most = size * (8 if getattr(config, "quantization_config", None) else 2)
    if count > most:
        raise ValueError(
            f"model {path!r}: expected a config.json for at most {most} weights, as its files have {size} bytes, got "
            f"one for {count}"
        )


def _layer_counts(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    """(name, number) of each number of layers in a configuration and those in it."""
    for name, x in config.items():
        if isinstance(x, Mapping):
            yield from _layer_counts(x, f"{prefix}{name}.")
        elif isinstance(x, int) and COUNTS_LAYERS.fullmatch(name):
            yield prefix + name, x
        elif isinstance(x, list) and name == "depths":  # of the stages of a vision tower
            yield prefix + name, sum(depth for depth in x if isinstance(depth, int))
