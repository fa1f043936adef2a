"""What a model's forward wants beside the tokens; the same for training and for sampling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkit.data.samples import Batch
from rlkit.vlm.families import PATCH_ROW_FAMILIES, tokens_per_image
from rlkit.vlm.rope3d import ROPE3D_MODEL_TYPES, ROPE3D_REFUSED, Rope3DSpec, rope3d_position_ids, rope3d_spec


def position_spec(config: Any) -> Rope3DSpec | None:
    """The family's 3D RoPE rule, or None for a model with plain positions; a ValueError where the rule is not known."""
    several_axes = config.model_type in ROPE3D_MODEL_TYPES or config.model_type in ROPE3D_REFUSED
    if not several_axes and getattr(config, "vision_config", None) is not None:
        several_axes = "mrope_section" in (getattr(config.get_text_config(), "rope_parameters", None) or {})
    return rope3d_spec(config) if several_axes else None


VIDEO_TIME_KEYS = ("second_per_grid_ts", "video_second_per_grid")  # of videos; the second is Qwen-Omni's name
PIXEL_KEYS = {"image": "pixel_values", "video": "pixel_values_videos"}
POSITION_KEYS = ("image_grid_thw", "video_grid_thw", *VIDEO_TIME_KEYS)


def concatenate_vision(vision: Sequence[Mapping[str, Tensor]], only: Sequence[str] | None = None) -> dict[str, Tensor]:
    """The vision tensors of several samples (`only` those named), one behind the other in the order of their rows.

    Where a sample's images have a dimension of their own ([1, images, channels, height, width], SmolVLM, Idefics3),
    those of fewer are filled up with zeros as the processors fill up a batch: the models leave them out.

    Raises:
        ValueError: tensors of samples that do not fit behind each other.
    """
    keys = [key for key in dict.fromkeys(key for one in vision for key in one) if only is None or key in only]
    return {key: _end_to_end(key, [one[key] for one in vision if key in one]) for key in keys}


def vision_kwargs(tokens: Tensor, vision: Sequence[Mapping[str, Tensor]], spec: Rope3DSpec | None) -> dict[str, Tensor]:
    """`concatenate_vision` of rows [B, T] for a model's forward; position ids are made of the rows as they were."""
    if spec is not None and spec.video_start_token_id is not None:
        rows = zip(tokens, vision, strict=True)
        vision = [frames_as_images(row, one, spec) if PIXEL_KEYS["video"] in one else one for row, one in rows]
    return concatenate_vision(vision)


def frames_as_images(row: Tensor, one: Mapping[str, Tensor], spec: Rope3DSpec) -> dict[str, Tensor]:
    """GLM-4V's images and frames of videos, all as images in the order of the row's tokens.

    To its vision tower a frame is an image, and both have the same placeholder. transformers takes images or videos in
    a forward, but not both, and would not know whose placeholders are whose.
    """
    t, *sides = one["video_grid_thw"].unbind(1)
    frames = torch.stack([torch.ones_like(t), *sides], 1).repeat_interleave(t, 0)
    images = one.get("image_grid_thw", frames[:0])
    is_image = row == spec.image_token_id
    opens, closes = (row.eq(token or -1).int() for token in (spec.video_start_token_id, spec.video_end_token_id))
    inside = (opens - closes).cumsum(0) > 0
    starts = []
    for grids, of_kind in ((images, is_image & ~inside), (frames, is_image & inside)):
        tokens = grids.prod(1) // spec.merge_size**2
        starts.append(of_kind.nonzero()[:, 0][tokens.cumsum(0) - tokens])
    order, grids = torch.cat(starts).argsort(), torch.cat([images, frames])
    pixels = torch.cat([one[name] for name in PIXEL_KEYS.values() if name in one]).split(grids.prod(1).tolist())
    return {PIXEL_KEYS["image"]: torch.cat([pixels[i] for i in order]), "image_grid_thw": grids[order]}


def vision_kinds(vision: Sequence[Mapping[str, Tensor]], spec: Rope3DSpec | None) -> list[bool]:
    """Whether a forward of these rows calls the vision tower for images, and whether it does so for videos."""
    seen = [any(name in one for one in vision) for name in PIXEL_KEYS.values()]
    return [any(seen), False] if spec is not None and spec.video_start_token_id is not None else seen


# tensor -> its dimensions, if a sample's images have one of their own
IMAGE_DIMENSION_NDIM = {"pixel_values": 5, "pixel_attention_mask": 4}


def _end_to_end(key: str, tensors: Sequence[Tensor]) -> Tensor:
    if all(x.ndim == IMAGE_DIMENSION_NDIM.get(key) for x in tensors):
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
    joined = concatenate_vision(vision, POSITION_KEYS)
    times: Any = next((joined.pop(name) for name in VIDEO_TIME_KEYS if name in joined), None)
    return rope3d_position_ids(tokens, attended, **joined, second_per_grid_ts=times, spec=spec)[0]


def check_image_tokens(batch: Batch, config: Any) -> None:
    """Raise a ValueError that names the first row whose tokens, grids and pixels do not speak of the same images.

    A model's forward would say so without the row, or take another row's features. Where it is not known how many
    tokens an image has, nothing but the lack of one is noticed.
    """
    attended = torch.arange(batch.tokens.shape[1]) < torch.tensor(batch.lengths).view(-1, 1)
    counted: dict[int, list[int]] = {}  # by token id: how many each row has
    needed: dict[int, list[_Seen]] = {}  # by the vision tensors, which the answers to one prompt share
    for row, one in enumerate(batch.vision):
        try:
            if id(one) not in needed:
                needed[id(one)] = _seen(one, config)
            for kind, token, images, features in needed[id(one)]:
                if token not in counted:
                    counted[token] = ((batch.tokens == token) & attended).sum(1).tolist()
                tokens = counted[token][row]
                if bool(tokens) != bool(images) if features is None else tokens != features:
                    of_them = "" if features is None else f"features for {features}, of "
                    raise ValueError(f"{tokens} {kind} tokens, and {of_them}{images} {kind}s")
        except ValueError as error:
            group = f" (group {int(batch.group_ids[row])})" if "group_ids" in batch.fields else ""
            raise ValueError(f"row {row} of the batch{group}: {error}") from error


class _Seen(NamedTuple):
    """What a row's vision tensors hold of one kind; None where it is not known how many tokens stand for it."""

    kind: str
    token: int
    images: int
    features: int | None


def _seen(one: Mapping[str, Tensor], config: Any) -> list[_Seen]:
    if getattr(config, "vision_config", None) is None:
        if one:
            raise ValueError(f"it has {', '.join(one)}, and {config.model_type} sees no images")
        return []
    if (spec := position_spec(config)) is not None:
        return _seen_by_grids(one, spec, config.model_type in PATCH_ROW_FAMILIES)
    pixels = one.get("pixel_values")
    images = (
        0 if pixels is None else pixels.shape[1] if pixels.ndim == IMAGE_DIMENSION_NDIM["pixel_values"] else len(pixels)
    )
    each = tokens_per_image(config)
    return [_Seen("image", config.image_token_id, images, images * each if each else None)]


def _seen_by_grids(one: Mapping[str, Tensor], spec: Rope3DSpec, in_patches: bool) -> list[_Seen]:
    seen = []
    for kind, token, frames in (
        ("image", spec.image_token_id, 1),
        ("video", spec.video_token_id, spec.temporal_merge_size),
    ):
        grids, merge = one.get(f"{kind}_grid_thw", torch.empty(0, 3)).tolist(), (frames, *[spec.merge_size] * 2)
        if any(size % by for grid in grids for size, by in zip(grid, merge, strict=True)):
            raise ValueError(f"{kind}_grid_thw {grids}: (t, h, w) that {merge} divide expected")
        patches, expected = len(one.get(PIXEL_KEYS[kind], ())), sum(map(math.prod, grids))
        if in_patches and patches != expected:
            raise ValueError(f"{PIXEL_KEYS[kind]} has {patches} patches, and {kind}_grid_thw {grids} says {expected}")
        seen.append(_Seen(kind, token, len(grids), expected // math.prod(merge)))
    times = len(next((one[name] for name in VIDEO_TIME_KEYS if name in one), ()))
    if spec.tokens_per_second is not None and times != seen[1].images:
        raise ValueError(f"{seen[1].images} videos, and times of {times}: {VIDEO_TIME_KEYS[0]} expected, one a video")
    if spec.video_start_token_id is not None:  # a video's frames are of image tokens
        image, video = seen
        features = (image.features or 0) + (video.features or 0)
        return [_Seen("image", image.token, image.images + video.images, features)]
    return seen
