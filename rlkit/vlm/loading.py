"""Loads models and their configurations from a directory, the Hugging Face hub, ModelScope or a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlkit.data.lookup import check_source, requires_extra
from rlkit.vlm.pretrained import SMOLLM2, gguf_path, smollm2_path

MODELSCOPE = "modelscope:"


@cache
def model_path(path: str) -> str:
    """Downloads or converts a model that is named by its source, and returns its directory.

    A model named `modelscope:OWNER/NAME` is downloaded. `smollm2` and GGUF files are converted once, see
    rlkit.vlm.pretrained. Other names are returned unchanged.

    Raises:
        ValueError: the download from ModelScope failed, or a GGUF file cannot be read.
        ImportError: the package modelscope, or one that a conversion needs, is not installed.
    """
    if path == SMOLLM2:
        return smollm2_path()
    if path.endswith(".gguf"):
        return gguf_path(path)
    if not path.startswith(MODELSCOPE):
        return path
    with requires_extra("modelscope"):
        from modelscope import snapshot_download
    try:
        return snapshot_download(path.removeprefix(MODELSCOPE))
    except Exception as error:  # modelscope raises many types, some of them no OSError
        raise ValueError(f"model {path!r}: {error}") from error


def load_config(path: str, *, trust_remote_code: bool = False) -> Any:
    """The transformers configuration of a model.

    Raises:
        ValueError: a directory without a model, a name that cannot be found, or a model type transformers lacks.
    """
    import transformers

    path = model_path(path)
    check_source(path, "model")
    if Path(path).exists() and not (Path(path) / "config.json").is_file():
        raise ValueError(f"model: expected a directory with a config.json, got {path!r}, which has none")
    try:
        return transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"model {path!r}: {error}") from error


def has_vision(config: Any) -> bool:
    """Whether the model has a vision tower."""
    return getattr(config, "vision_config", None) is not None


def load_model(
    path: str, *, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False, on_meta: bool = False
) -> Any:
    """Loads a vision-language model or a text model.

    Args:
        path: a directory, a hub id, or `modelscope:OWNER/NAME`.
        dtype: of the weights.
        trust_remote_code: run model code that lies in the model's repository.
        on_meta: create parameters on the meta device, without memory. The fsdp2 engine then loads only its own shard on
            each rank.

    Raises:
        ValueError: as `load_config`, or weights that are missing or cannot be read.
    """
    config = load_config(path, trust_remote_code=trust_remote_code)
    if getattr(config, "value_head", False):
        raise ValueError(f"model: expected a language model, got the value model {path!r}; use load_value_model for it")
    load = empty_model if on_meta else load_pretrained
    return load(path, config, dtype=dtype, trust_remote_code=trust_remote_code)


def empty_model(path: str, config: Any, **options: Any) -> Any:
    """The model that `load_pretrained` returns, with its parameters on the meta device.

    Buffers are on the CPU and have their values, because checkpoint files may lack them.
    """
    import transformers
    from accelerate import init_empty_weights

    path = model_path(path)
    auto = transformers.AutoModelForImageTextToText if has_vision(config) else transformers.AutoModelForCausalLM
    with init_empty_weights(include_buffers=False):
        model = auto.from_config(config, **options).eval()
    model.tie_weights()  # init_empty_weights unties parameters
    try:
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    except OSError:  # the model has none
        pass
    return model


def load_pretrained(path: str, config: Any, **options: Any) -> Any:
    """`from_pretrained` of the auto class that fits the configuration.

    Raises:
        ValueError: the weights are missing or cannot be read.
    """
    import transformers
    from safetensors import SafetensorError

    path = model_path(path)
    auto = transformers.AutoModelForImageTextToText if has_vision(config) else transformers.AutoModelForCausalLM
    try:
        return auto.from_pretrained(path, config=config, **options)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"model {path!r}: {error}") from error


def copy_with_weights(model: Any, weights: Mapping[str, Tensor]) -> Any:
    """A copy of a transformers model with other weights, in the dtype of those.

    Args:
        model: it may be on the meta device.
        weights: all weights by their Hugging Face names.
    """
    dtype = next(iter(weights.values())).dtype
    copy = type(model).from_pretrained(None, config=model.config, state_dict=dict(weights), dtype=dtype)
    copy.generation_config = model.generation_config
    return copy
