"""Options of the image processor, for the trainer and vLLM alike."""

from __future__ import annotations

from typing import Any

from rlkit.vlm.model_config import json_or_text


def processor_options(cfg: Any) -> dict[str, Any]:
    """The run's options of the image processor by name."""
    pairs = [text.partition("=") for text in cfg.processor_options]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise ValueError(f"processor_options: expected name=value, as in max_pixels=602112, got {wrong[0]!r}")
    return {name: json_or_text(value) for name, _, value in pairs}
