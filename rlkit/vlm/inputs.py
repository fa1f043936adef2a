"""What a model's forward wants beside the tokens; the same for training and for sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkit.data.samples import Batch
from rlkit.vlm.families import IN_PATCHES, tokens_of_fixed_size_image
from rlkit.vlm.rope3d import ROPE3D_MODEL_TYPES, ROPE3D_REFUSED, Rope3DSpec, rope3d_position_ids, rope3d_spec


def position_spec(config: Any) -> Rope3DSpec | None:
    """The family's 3D RoPE rule, or None for a model with plain positions; a ValueError where the rule is not known."""
    several_axes = config.model_type in ROPE3D_MODEL_TYPES or config.model_type in ROPE3D_REFUSED
    if not several_axes and getattr(config, "vision_config", None) is not None:
        several_axes = "mrope_section" in (getattr(config.get_text_config(), "rope_parameters", None) or {})
    return rope3d_spec(config) if several_axes else None


TIMES = ("second_per_grid_ts", "video_second_per_grid")  # of videos; the second is Qwen-Omni's name
POSITION_KEYS = ("image_grid_thw", "video_grid_thw", *TIMES)


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
    joined = join_vision(vision, POSITION_KEYS)
    times: Any = next((joined.pop(name) for name in TIMES if name in joined), None)
    return rope3d_position_ids(tokens, attended, **joined, second_per_grid_ts=times, spec=spec)[0]


def check_images(batch: Batch, config: Any) -> None:
    """Raise a ValueError that names the first row whose tokens, grids and pixels do not speak of the same images.

    A model's forward would say so without the row, or take another row's features. Where it is not known how many
    tokens an image has, nothing but the lack of one is noticed.
    """
    for row, (ids, length, one) in enumerate(zip(batch.tokens, batch.lengths, batch.vision, strict=True)):
        try:
            _check_row(ids[:length], one, config)
        except ValueError as error:
            group = f" (group {int(batch.group_ids[row])})" if "group_ids" in batch.fields else ""
            raise ValueError(f"row {row} of the batch{group}: {error}") from error


def _check_row(ids: Tensor, one: Mapping[str, Tensor], config: Any) -> None:
    if getattr(config, "vision_config", None) is None:
        if one:
            raise ValueError(f"it has {', '.join(one)}, and {config.model_type} sees no images")
        return
    if (spec := position_spec(config)) is not None:
        _check_grids(ids, one, spec, config.model_type in IN_PATCHES)
        return
    pixels = one.get("pixel_values")
    images = 0 if pixels is None else pixels.shape[1] if pixels.ndim == IMAGES_APART["pixel_values"] else len(pixels)
    tokens = int((ids == config.image_token_id).sum())
    each = tokens_of_fixed_size_image(config)
    if (tokens != images * each) if each else bool(tokens) != bool(images):
        raise ValueError(f"{tokens} image tokens, and {images} images{f' of {each} tokens each' if each else ''}")


def _check_grids(ids: Tensor, one: Mapping[str, Tensor], spec: Rope3DSpec, in_patches: bool) -> None:
    found = {"image": spec.image_token_id, "video": spec.video_token_id}
    grids = {kind: one.get(f"{kind}_grid_thw", torch.empty(0, 3, dtype=torch.long)) for kind in found}
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        grid, merge = grids[kind], (spec.temporal_merge_size if kind == "video" else 1, *[spec.merge_size] * 2)
        if bool((grid % torch.tensor(merge)).any()):
            raise ValueError(f"{kind}_grid_thw {grid.tolist()}: (t, h, w) that {merge} divide expected")
        patches = len(one.get(pixels, ()))
        if in_patches and patches != (expected := int(grid.prod(1).sum())):
            raise ValueError(f"{pixels} has {patches} patches, and {kind}_grid_thw {grid.tolist()} says {expected}")
        grids[kind] = grid // torch.tensor(merge)
    if spec.video_start_token_id is not None:  # a video's frames are of image tokens
        grids, found = {"image": torch.cat([*grids.values()])}, {"image": spec.image_token_id}
    for kind, token in found.items():
        tokens, expected = int((ids == token).sum()), int(grids[kind].prod(1).sum())
        if tokens != expected:
            raise ValueError(f"{tokens} {kind} tokens, and features for {expected}, of {len(grids[kind])} {kind}s")
    times = len(next((one[name] for name in TIMES if name in one), ()))
    if spec.tokens_per_second is not None and times != len(grids["video"]):
        raise ValueError(f"{len(grids['video'])} videos, and times of {times}: {TIMES[0]} expected, one a video")
