"""Models from a directory or a hub id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def load_config(path: str, *, trust_remote_code: bool = False) -> Any:
    """The configuration of a model.

    Raises:
        ValueError: a directory without a model, a name that cannot be found, or a family transformers does not know.
    """
    import transformers

    if Path(path).exists() and not (Path(path) / "config.json").is_file():
        raise ValueError(f"model {path!r}: the directory holds no config.json")
    try:
        return transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"model {path!r}: {error}") from error


def can_see(config: Any) -> bool:
    """Whether the model has a vision tower."""
    return getattr(config, "vision_config", None) is not None


def load_model(path: str, *, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False) -> Any:
    """A vision-language model, or a text one, with its weights.

    Raises:
        ValueError: as `load_config`, or weights that are missing or cannot be read.
    """
    config = load_config(path, trust_remote_code=trust_remote_code)
    if getattr(config, "value_head", False):
        raise ValueError(f"model {path!r}: a value model; rlkit.engines.value_head.load_value_model reads it")
    return read_model(path, config, dtype=dtype, trust_remote_code=trust_remote_code)


def read_model(path: str, config: Any, **options: Any) -> Any:
    """What `from_pretrained` gives, of the class that the configuration asks for; a ValueError if it cannot."""
    import transformers
    from safetensors import SafetensorError

    auto = transformers.AutoModelForImageTextToText if can_see(config) else transformers.AutoModelForCausalLM
    try:
        return auto.from_pretrained(path, config=config, **options)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"model {path!r}: {error}") from error
