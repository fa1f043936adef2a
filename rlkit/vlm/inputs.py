"""What a model's forward wants beside the tokens; the same for training and for sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlkit.vlm.rope3d import ROPE3D_MODEL_TYPES, ROPE3D_REFUSED, Rope3DSpec, rope3d_position_ids, rope3d_spec


def position_spec(config: Any) -> Rope3DSpec | None:
    """The family's 3D RoPE rule, or None for a model with plain positions; a ValueError where the rule is not known."""
    several_axes = config.model_type in ROPE3D_MODEL_TYPES or config.model_type in ROPE3D_REFUSED
    return rope3d_spec(config) if several_axes else None


POSITION_KEYS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")


def join_vision(vision: Sequence[Mapping[str, Tensor]], only: Sequence[str] | None = None) -> dict[str, Tensor]:
    """The vision tensors of several samples (`only` those named), one behind the other in the order of their rows."""
    keys = [key for key in dict.fromkeys(key for one in vision for key in one) if only is None or key in only]
    return {key: torch.cat([one[key] for one in vision if key in one]) for key in keys}


def position_ids(
    tokens: Tensor, attended: Tensor, vision: Sequence[Mapping[str, Tensor]], spec: Rope3DSpec | None
) -> Tensor:
    """[3, B, T] for a 3D RoPE model, else [B, T]; padding on either side. `vision` is each row's own."""
    if spec is None:
        return (attended.cumsum(1) - 1).clamp(min=0)
    return rope3d_position_ids(tokens, attended, **join_vision(vision, POSITION_KEYS), spec=spec)[0]
