"""Models from a directory or a hub id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def load_model(path: str, *, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False) -> Any:
    """A vision-language model, or a text one, with its weights.

    Raises:
        ValueError: a directory that is not there or holds no model, or a family that transformers does not know.
    """
    import transformers

    if Path(path).exists() and not (Path(path) / "config.json").is_file():
        raise ValueError(f"model {path!r}: the directory holds no config.json")
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        sees = getattr(config, "vision_config", None) is not None
        auto = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
        return auto.from_pretrained(path, config=config, dtype=dtype, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"model {path!r}: {error}") from error
