"""What a model's forward wants beside the tokens; the same for training and for sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkit.vlm.rope3d import ROPE3D_MODEL_TYPES, ROPE3D_REFUSED, Rope3DSpec, rope3d_position_ids, rope3d_spec


def position_spec(config: Any) -> Rope3DSpec | None:
    """The family's 3D RoPE rule, or None for a model with plain positions; a ValueError where the rule is not known."""
    several_axes = config.model_type in ROPE3D_MODEL_TYPES or config.model_type in ROPE3D_REFUSED
    return rope3d_spec(config) if several_axes else None


POSITION_KEYS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")


def join_vision(vision: Sequence[Mapping[str, Tensor]], only: Sequence[str] | None = None) -> dict[str, Tensor]:
    """The vision tensors of several samples (`only` those named), one behind the other in the order of their rows.

    Where a sample's images have a dimension of their own ([1, images, channels, height, width], SmolVLM, Idefics3),
    those of fewer are filled up with zeros as the processors fill up a batch: the models leave them out.

    Raises:
        ValueError: tensors of samples that do not fit behind each other.
    """
    keys = [key for key in dict.fromkeys(key for one in vision for key in one) if only is None or key in only]
    return {key: _end_to_end(key, [one[key] for one in vision if key in one]) for key in keys}


# tensor -> its dimensions, if a sample's images have one of their own
IMAGES_APART = {"pixel_values": 5, "pixel_attention_mask": 4}


def _end_to_end(key: str, tensors: Sequence[Tensor]) -> Tensor:
    if all(x.ndim == IMAGES_APART.get(key) for x in tensors):
        most = max(x.shape[1] for x in tensors)
        tensors = [F.pad(x, [0, 0] * (x.ndim - 2) + [0, most - x.shape[1]]) for x in tensors]
    if len(shapes := {tuple(x.shape[1:]) for x in tensors}) > 1:
        came = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise ValueError(
            f"{key}: of {len(tensors)} samples, {len(shapes)} different shapes behind the first number: {came}"
        )
    return torch.cat(list(tensors))


def position_ids(
    tokens: Tensor, attended: Tensor, vision: Sequence[Mapping[str, Tensor]], spec: Rope3DSpec | None
) -> Tensor:
    """[3, B, T] for a 3D RoPE model, else [B, T]; padding on either side. `vision` is each row's own."""
    if spec is None:
        return (attended.cumsum(1) - 1).clamp(min=0)
    return rope3d_position_ids(tokens, attended, **join_vision(vision, POSITION_KEYS), spec=spec)[0]
