"""Inputs of a model's forward besides the tokens: vision tensors and position ids, for training and for sampling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkit.data.samples import Batch
from rlkit.data.vision_tensors import (
    AUDIO_FEATURES,
    AUDIO_MASKS,
    FRAME_COUNTS,
    NDIM_WITH_IMAGE_DIMENSION,
    concatenate_vision,
)
from rlkit.vlm.families import (
    PATCH_ROW_FAMILIES,
    TILED_FAMILIES,
    audio_mask_name,
    audio_tokens,
    tokens_at_end_of_video,
    tokens_of_frame,
    tokens_of_tiled_image,
    tokens_per_image,
)
from rlkit.vlm.rope3d import ROPE3D_MODEL_TYPES, ROPE3D_REFUSED, Rope3DSpec, rope3d_position_ids, rope3d_spec

# families whose text model has several axes, all with the same position
PLAIN_POSITIONS = frozenset({"minicpmv4_6"})


def position_spec(config: Any) -> Rope3DSpec | None:
    """The `Rope3DSpec` of a model, or None for a model with one position per token.

    In Qwen2-VL and Qwen2.5-VL the ids after a video continue from the largest id of all three axes, as in Qwen's own
    code, vLLM and verl. transformers continues from the larger of height and width: the two differ after long videos.

    Raises:
        ValueError: a model with several axes whose rule is not supported.
    """
    if config.model_type in PLAIN_POSITIONS:
        return None
    several_axes = config.model_type in ROPE3D_MODEL_TYPES or config.model_type in ROPE3D_REFUSED
    if not several_axes and getattr(config, "vision_config", None) is not None:
        several_axes = "mrope_section" in (getattr(config.get_text_config(), "rope_parameters", None) or {})
    if not several_axes:
        return None
    spec = rope3d_spec(config)
    return replace(spec, advance_over_time=True) if config.model_type in ("qwen2_vl", "qwen2_5_vl") else spec


VIDEO_TIME_KEYS = ("second_per_grid_ts", "video_second_per_grid")  # Qwen2.5-VL, Qwen-Omni
PIXEL_KEYS = {"image": "pixel_values", "video": "pixel_values_videos", "audio": AUDIO_FEATURES}
GEMMA_VIDEO_KEYS = ("pixel_values_videos", "video_position_ids", FRAME_COUNTS)
POSITION_KEYS = ("image_grid_thw", "video_grid_thw", *VIDEO_TIME_KEYS)


def vision_kwargs(tokens: Tensor, vision: Sequence[Mapping[str, Tensor]], spec: Rope3DSpec | None) -> dict[str, Tensor]:
    """Vision keyword arguments of a model's forward for rows [B, T].

    They differ from `concatenate_vision` for GLM-4V only, where frames of videos are passed as images. Compute position
    ids from the original tensors, not from these.
    """
    if spec is not None and spec.video_start_token_id is not None:
        rows = zip(tokens, vision, strict=True)
        vision = [frames_as_images(row, one, spec) if PIXEL_KEYS["video"] in one else one for row, one in rows]
    return concatenate_vision(vision)


def frames_as_images(row: Tensor, one: Mapping[str, Tensor], spec: Rope3DSpec) -> dict[str, Tensor]:
    """GLM-4V: the vision tensors of a row with all frames of its videos as images, in the order of their placeholders.

    The vision tower treats a frame like an image, and both have the same placeholder. transformers' forward accepts
    images or videos, but not both, because it cannot tell their placeholders apart.

    Args:
        row: [T] token ids.
        one: the row's vision tensors, with a video.
        spec: of the model, with `video_start_token_id`.
    """
    t, *sides = one["video_grid_thw"].unbind(1)
    frames = torch.stack([torch.ones_like(t), *sides], 1).repeat_interleave(t, 0)
    images = one.get("image_grid_thw", frames[:0])
    is_image = row == spec.image_token_id
    opens, closes = (row.eq(token or -1).int() for token in (spec.video_start_token_id, spec.video_end_token_id))
    in_video = (opens - closes).cumsum(0) > 0
    starts = []
    for grids, placeholders in ((images, is_image & ~in_video), (frames, is_image & in_video)):
        tokens = grids.prod(1) // spec.merge_size**2
        starts.append(placeholders.nonzero()[:, 0][tokens.cumsum(0) - tokens])
    order, grids = torch.cat(starts).argsort(), torch.cat([images, frames])
    both_pixels = [one[PIXEL_KEYS[kind]] for kind in ("image", "video") if PIXEL_KEYS[kind] in one]
    pixels = torch.cat(both_pixels).split(grids.prod(1).tolist())
    return {PIXEL_KEYS["image"]: torch.cat([pixels[i] for i in order]), "image_grid_thw": grids[order]}


def gemma_frames_as_images(inputs: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Gemma 4: the inputs of a forward with the frames of videos as images, in the order of their placeholders.

    The vision tower treats a frame like an image with fewer patches. transformers 5.19's forward fails with videos: it
    calls `get_video_features` without `num_frames_per_video`, which that function requires.

    Args:
        inputs: of the forward of any model, `input_ids` [B, T] and vision tensors among them. Without videos of Gemma 4
            they are returned as they are.
    """
    if "video_position_ids" not in inputs:
        return dict(inputs)
    tokens, pixels, positions, starts = inputs["input_ids"], [], [], []
    for kind in ("image", "video"):
        if PIXEL_KEYS[kind] in inputs:
            pixels.append(inputs[PIXEL_KEYS[kind]])
            positions.append(inputs[f"{kind}_position_ids"])
            counts = torch.tensor(_gemma_tokens(positions[-1], config), device=tokens.device)
            placeholders = (tokens == getattr(config, f"{kind}_token_id")).flatten().nonzero()[:, 0]
            starts.append(placeholders[counts.cumsum(0) - counts])
    order, patches = torch.cat(starts).argsort(), max(x.shape[1] for x in pixels)
    pixels = [F.pad(x, (0, 0, 0, patches - x.shape[1])) for x in pixels]
    positions = [F.pad(x, (0, 0, 0, patches - x.shape[1]), value=-1) for x in positions]
    return {
        **{name: x for name, x in inputs.items() if name not in GEMMA_VIDEO_KEYS},
        "input_ids": tokens.where(tokens != config.video_token_id, config.image_token_id),
        "pixel_values": torch.cat(pixels)[order],
        "image_position_ids": torch.cat(positions)[order],
    }


def _gemma_tokens(positions: Tensor, config: Any) -> list[int]:
    """Tokens of each image or frame of Gemma 4 with these positions of patches, which are -1 in padding."""
    pooled = 1 if config.model_type == "gemma4_unified" else config.vision_config.pooling_kernel_size**2
    return ((positions >= 0).all(-1).sum(1) // pooled).tolist()


def vision_kinds(vision: Sequence[Mapping[str, Tensor]], spec: Rope3DSpec | None) -> list[bool]:
    """[images, videos, audios]: whether a forward of these rows calls the encoder of each kind."""
    images, videos, audios = (any(name in one for one in vision) for name in PIXEL_KEYS.values())
    frames_are_images = spec is not None and spec.video_start_token_id is not None
    frames_are_images |= any("video_position_ids" in one for one in vision)  # Gemma 4
    return [images or videos, False, audios] if frames_are_images else [images, videos, audios]


def position_ids(
    tokens: Tensor, attended: Tensor, vision: Sequence[Mapping[str, Tensor]], spec: Rope3DSpec | None
) -> Tensor:
    """Position ids: [3, B, T] for a model with 3D RoPE, otherwise [B, T].

    Args:
        tokens: [B, T], padded on either side.
        attended: bool [B, T], False on padding.
        vision: of each row its vision tensors.
        spec: of `position_spec`.
    """
    if spec is None:
        return (attended.cumsum(1) - 1).clamp(min=0)
    joined = concatenate_vision(vision, POSITION_KEYS)
    times: Any = next((joined.pop(name) for name in VIDEO_TIME_KEYS if name in joined), None)
    if times is not None:
        # vLLM multiplies and floors in float64 (for Qwen-Omni `rope3d_position_ids` uses float32)
        times = times.double()
    return rope3d_position_ids(tokens, attended, **joined, second_per_grid_ts=times, spec=spec)[0]


def check_image_tokens(batch: Batch, config: Any) -> None:
    """Check that in each row the placeholder tokens, grids and pixels describe the same images.

    Without this check a model's forward would fail without naming the row, or silently use another row's features. If
    the number of tokens per image is not known, the check is only that images and placeholders occur together.

    Raises:
        ValueError: names the first row that is inconsistent.
    """
    attended = torch.arange(batch.tokens.shape[1]) < torch.tensor(batch.lengths).view(-1, 1)
    token_counts: dict[int, list[int]] = {}  # placeholder id -> tokens in each row
    contents: dict[int, list[_VisionContent]] = {}  # id() of vision tensors, which responses to a prompt share
    for row, one in enumerate(batch.vision):
        try:
            if id(one) not in contents:
                contents[id(one)] = _vision_contents(one, config)
            for kind, token, images, features in contents[id(one)]:
                if token not in token_counts:
                    token_counts[token] = ((batch.tokens == token) & attended).sum(1).tolist()
                tokens = token_counts[token][row]
                if features is None and bool(tokens) != bool(images):
                    raise ValueError(
                        f"{kind} tokens: expected {'some' if images else 'none'} for {images} {kind}s, got {tokens}"
                    )
                if features is not None and tokens != features:
                    raise ValueError(f"{kind} tokens: expected {features} for {images} {kind}s, got {tokens}")
        except ValueError as error:
            group = f" (group {int(batch.group_ids[row])})" if "group_ids" in batch.fields else ""
            raise ValueError(f"row {row} of the batch{group}: {error}") from error


class _VisionContent(NamedTuple):
    """The images, videos or audios of a row, and the tokens they need; None if that number is not known."""

    kind: str
    token: int
    images: int
    features: int | None


def _vision_contents(one: Mapping[str, Tensor], config: Any) -> list[_VisionContent]:
    if getattr(config, "vision_config", None) is None:
        if one:
            raise ValueError(f"vision: expected none for {config.model_type}, a text model, got {', '.join(one)}")
        return []
    return [*_image_contents(one, config), *_audio_contents(one, config)]


def _image_contents(one: Mapping[str, Tensor], config: Any) -> list[_VisionContent]:
    """The images and videos in a row's vision tensors."""
    if (spec := position_spec(config)) is not None:
        return _contents_from_grids(one, spec, config)
    if config.model_type in IMAGE_SIZE_KEYS:
        kinds = {"image": IMAGE_SIZE_KEYS[config.model_type]}
        if config.model_type in FRAME_SIZE_KEYS:
            kinds["video"] = FRAME_SIZE_KEYS[config.model_type]
        contents = []
        for kind, size_key in kinds.items():
            counts, token = _tokens_of_each_image(one, config, kind, size_key), getattr(config, f"{kind}_token_id")
            name = "video frame" if kind == "video" else "image"
            contents.append(_VisionContent(name, token, len(counts), sum(counts)))
        return [_images_and_frames(*contents)] if config.model_type == "glm5_next" else contents
    pixels, images = one.get("pixel_values"), 0
    if pixels is not None:
        images = pixels.shape[1] if pixels.ndim == NDIM_WITH_IMAGE_DIMENSION["pixel_values"] else len(pixels)
    per_image = tokens_per_image(config)
    return [_VisionContent("image", config.image_token_id, images, images * per_image if per_image else None)]


# family -> the tensor beside its pixels that describes the size of each image (in LFM2-VL, of each tile)
IMAGE_SIZE_KEYS = {
    "exaone4_5": "image_grid_thw",
    "gemma4": "image_position_ids",
    "gemma4_unified": "image_position_ids",
    "glm5_next": "image_grid_thw",
    "hyperclovax_vision_v2": "image_grid_thw",
    "kimi_k25": "image_grid_thw",
    "lfm2_vl": "spatial_shapes",
    "llava_next": "image_sizes",
    "llava_next_video": "image_sizes",
    "llava_onevision": "image_sizes",
    "minicpmv4_6": "target_sizes",
    "mistral3": "image_sizes",
    "muse_glimmer": "image_grid_thw",
    "video_llama_3": "image_grid_thw",
}


# the same for each frame of a video (in MiniCPM-V, for each slice of a frame; in Kimi K2.5, for each chunk of frames;
# in EXAONE 4.5, GLM-5.3-Flash, LLaVA, Muse Glimmer and VideoLLaMA 3, for each video)
FRAME_SIZE_KEYS = {
    "exaone4_5": "video_grid_thw",
    "gemma4": "video_position_ids",
    "gemma4_unified": "video_position_ids",
    "glm5_next": "video_grid_thw",
    "kimi_k25": "video_grid_thw",
    "llava_next_video": FRAME_COUNTS,
    "llava_onevision": FRAME_COUNTS,
    "minicpmv4_6": "target_sizes_videos",
    "muse_glimmer": "video_grid_thw",
    "video_llama_3": "video_grid_thw",
}


def _tokens_of_each_image(one: Mapping[str, Tensor], config: Any, kind: str, size_key: str) -> list[int]:
    """Placeholder tokens of each image, or of each frame of a video.

    The counts are those of transformers' processors and models: features are pooled in whole squares of patches.

    Args:
        one: the vision tensors of a row.
        kind: "image" or "video".
        size_key: the tensor with the sizes of the images or frames.
    """
    family, vision, sizes = config.model_type, config.vision_config, one.get(size_key)
    if sizes is None and PIXEL_KEYS[kind] in one:
        raise ValueError(f"{size_key}: expected the sizes of the {kind}s in {PIXEL_KEYS[kind]}, got None")
    if sizes is None:
        return []
    if family in ("gemma4", "gemma4_unified"):
        return _gemma_tokens(sizes, config)
    if family in ("exaone4_5", "glm5_next", "hyperclovax_vision_v2"):
        return (sizes.prod(1) // vision.spatial_merge_size**2).tolist()
    if family == "video_llama_3":
        return _video_llama_tokens(one, kind, sizes)
    if family == "muse_glimmer":
        return (sizes.prod(1) // vision.merge_size**2).tolist()
    if family in TILED_FAMILIES and kind == "video":
        return (sizes * tokens_of_frame(config) + tokens_at_end_of_video(config)).tolist()
    if family in TILED_FAMILIES:
        return [tokens_of_tiled_image(size, config) for size in sizes.tolist()]
    if family == "kimi_k25":  # the frames of a chunk are merged
        return (sizes[:, 1:].prod(1) // math.prod(vision.merge_kernel_size)).tolist()
    if family == "lfm2_vl":  # in patches; an odd row or column is padded
        return (sizes / config.downsample_factor).ceil().long().prod(1).tolist()
    if family == "minicpmv4_6":  # of slices, in patches
        merged = config.merge_kernel_size[0] * config.merge_kernel_size[1]
        before = 1 if config.downsample_mode == "4x" else math.prod(vision.window_kernel_size)
        return (sizes.prod(1) // (before * merged**config.merger_times)).tolist()
    return (sizes // (vision.patch_size * config.spatial_merge_size)).prod(1).tolist()


def _video_llama_tokens(one: Mapping[str, Tensor], kind: str, grids: Tensor) -> list[int]:
    """Tokens of each image or video of VideoLLaMA 3, which leaves out those of a frame that equal the frame before."""
    tokens = (grids.prod(1) // one[f"{kind}_merge_sizes"] ** 2).tolist()
    kept = one.get("video_compression_mask") if kind == "video" else None
    return tokens if kept is None else [int(x.sum()) for x in kept.split(tokens)]


def _contents_from_grids(one: Mapping[str, Tensor], spec: Rope3DSpec, config: Any) -> list[_VisionContent]:
    contents, in_patches = [], config.model_type in PATCH_ROW_FAMILIES
    for kind, token, frames in (
        ("image", spec.image_token_id, 1),
        ("video", spec.video_token_id, spec.temporal_merge_size),
    ):
        grids, merge = one.get(f"{kind}_grid_thw", torch.empty(0, 3)).tolist(), (frames, *[spec.merge_size] * 2)
        if any(size % by for grid in grids for size, by in zip(grid, merge, strict=True)):
            raise ValueError(f"{kind}_grid_thw: expected (t, h, w) that {merge} divide, got {grids}")
        patches, expected = len(one.get(PIXEL_KEYS[kind], ())), sum(map(math.prod, grids))
        if in_patches and patches != expected:
            raise ValueError(
                f"{PIXEL_KEYS[kind]}: expected {expected} patches for {kind}_grid_thw {grids}, got {patches}"
            )
        contents.append(_VisionContent(kind, token, len(grids), expected // math.prod(merge)))
    times = len(next((one[name] for name in VIDEO_TIME_KEYS if name in one), ()))
    if spec.tokens_per_second is not None and times != contents[1].images:
        raise ValueError(f"{VIDEO_TIME_KEYS[0]}: expected {contents[1].images}, one per video, got {times}")
    if spec.video_start_token_id is not None:  # the frames of a video consist of image tokens
        return [_images_and_frames(*contents)]
    return contents


def _images_and_frames(image: _VisionContent, video: _VisionContent) -> _VisionContent:
    """Images and videos together, for GLM, where frames of videos consist of image tokens."""
    features = (image.features or 0) + (video.features or 0)
    return _VisionContent("image", image.token, image.images + video.images, features)


def _audio_contents(one: Mapping[str, Tensor], config: Any) -> list[_VisionContent]:
    """The audios in a row's vision tensors; [] for a family without audios."""
    features = one.get(AUDIO_FEATURES)
    if getattr(config, "audio_config", None) is None:
        if features is not None:
            why = f"the config of this {config.model_type} has no audio_config"
            raise ValueError(f"audios: expected none, as {why}, got {len(features)}")
        return []
    if features is None:
        return [_VisionContent("audio", config.audio_token_id, 0, 0)]
    name = audio_mask_name(config)
    mask, expected = one.get(name), [len(features), features.shape[AUDIO_MASKS[name]]]
    if mask is None or list(mask.shape) != expected:
        got = None if mask is None else list(mask.shape)
        raise ValueError(f"{name}: expected {expected} as {AUDIO_FEATURES}, got {got}")
    tokens = audio_tokens(mask.sum(1), config)
    return [_VisionContent("audio", config.audio_token_id, len(features), int(tokens.sum()))]
