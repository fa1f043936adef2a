"""Models from a directory, a hub id, or ModelScope."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlkit.data.lookup import check_source, requires_extra

MODELSCOPE = "modelscope:"


@cache
def model_path(path: str) -> str:
    """Where a model's files are: what is named `modelscope:OWNER/NAME` is fetched from there, all else stays as it is.

    Returns:
        A directory, or a hub id.

    Raises:
        ValueError: ModelScope cannot give it.
        ImportError: ModelScope's package is not installed.
    """
    if not path.startswith(MODELSCOPE):
        return path
    with requires_extra("modelscope"):
        from modelscope import snapshot_download
    try:
        return snapshot_download(path.removeprefix(MODELSCOPE))
    except Exception as error:  # of many kinds, of which only some are OSErrors
        raise ValueError(f"model {path!r}: {error}") from error


def load_config(path: str, *, trust_remote_code: bool = False) -> Any:
    """The configuration of a model.

    Raises:
        ValueError: a directory without a model, a name that cannot be found, or a family transformers does not know.
    """
    import transformers

    path = model_path(path)
    check_source(path, "model")
    if Path(path).exists() and not (Path(path) / "config.json").is_file():
        raise ValueError(f"model {path!r}: the directory holds no config.json")
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
    """A vision-language model, or a text one, with its weights.

    Args:
        path: a directory, a hub id, or `modelscope:OWNER/NAME`.
        dtype: of the weights.
        trust_remote_code: run model code that lies beside the weights.
        on_meta: parameters without memory. The fsdp2 engine reads into each rank its part of them, so that none holds
            the whole model.

    Raises:
        ValueError: as `load_config`, or weights that are missing or cannot be read.
    """
    config = load_config(path, trust_remote_code=trust_remote_code)
    if getattr(config, "value_head", False):
        raise ValueError(f"model {path!r}: a value model; rlkit.engines.value_head.load_value_model reads it")
    read = empty_model if on_meta else load_pretrained
    return read(path, config, dtype=dtype, trust_remote_code=trust_remote_code)


def empty_model(path: str, config: Any, **options: Any) -> Any:
    """The model that `load_pretrained` returns, with parameters on the meta device. Buffers have values, as checkpoint
    files may lack them."""
    import transformers
    from accelerate import init_empty_weights

    path = model_path(path)
    auto = transformers.AutoModelForImageTextToText if has_vision(config) else transformers.AutoModelForCausalLM
    with init_empty_weights(include_buffers=False):
        model = auto.from_config(config, **options).eval()
    model.tie_weights()  # the context takes tied parameters apart
    try:
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    except OSError:  # none beside the weights
        pass
    return model


def load_pretrained(path: str, config: Any, **options: Any) -> Any:
    """What `from_pretrained` gives, of the class that the configuration asks for; a ValueError if it cannot."""
    import transformers
    from safetensors import SafetensorError

    path = model_path(path)
    auto = transformers.AutoModelForImageTextToText if has_vision(config) else transformers.AutoModelForCausalLM
    try:
        return auto.from_pretrained(path, config=config, **options)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"model {path!r}: {error}") from error


def copy_with_weights(model: Any, weights: Mapping[str, Tensor]) -> Any:
    """A transformers model of the same kind as another, with weights of its own, in their precision.

    Args:
        model: with or without weights.
        weights: all of them, under their Hugging Face names.
    """
    dtype = next(iter(weights.values())).dtype
    copy = type(model).from_pretrained(None, config=model.config, state_dict=dict(weights), dtype=dtype)
    copy.generation_config = model.generation_config
    return copy
