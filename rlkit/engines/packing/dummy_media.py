"""Dummy sequences: the smallest image, video and audio of each family, for ranks that have none.

A model calls its encoders once each for images, videos and audios, and all ranks join the collectives of each call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlkit.data.samples import Sample, append_observation, prompt_sample
from rlkit.data.vision_tensors import AUDIO_FEATURES, AUDIO_MASKS, FRAME_COUNTS
from rlkit.vlm.families import (
    IMAGE_DIMENSION_FAMILIES,
    PATCH_ROW_FAMILIES,
    TILED_FAMILIES,
    audio_mask_name,
    audio_tokens,
    numbers_per_patch,
    tokens_at_end_of_video,
    tokens_of_frame,
    tokens_of_tiled_image,
    tokens_per_image,
)
from rlkit.vlm.inputs import PIXEL_KEYS, VIDEO_TIME_KEYS
from rlkit.vlm.rope3d import rope3d_spec


def dummy_sample(config: Any, *, image: bool, video: bool = False, audio: bool = False) -> Sample:
    """The shortest sequence, with one blank image, one blank video and one blank audio if they are asked for.

    It ends with a text token: packed rows are filled up with their last token, and families with experts for text use
    these, too.

    Raises:
        ValueError: a family for which no dummy image is known.
    """
    sample = _dummy_images(config, image=image, video=video) if image or video else prompt_sample([])
    if audio:
        sample = append_observation(sample, _dummy_audio(config))
    return append_observation(sample, prompt_sample([_text_token(config)]))


def _text_token(config: Any) -> int:
    """A token other than padding, whose embedding may be zeros, for which gradients of Gemma 3n are nan."""
    return int(config.get_text_config().pad_token_id == 0)


def _dummy_images(config: Any, *, image: bool, video: bool) -> Sample:
    if config.model_type in PATCH_ROW_FAMILIES:
        return _patch_row_media(config, ["image"] * image + ["video"] * video)
    if tensors := _smallest_image(config):
        return _smallest_media(config, tensors, image=image, video=video)
    if config.model_type in TILED_FAMILIES:
        return _dummy_tiles(config, image=image, video=video)
    if tokens := tokens_per_image(config):
        return prompt_sample([config.image_token_id] * tokens, vision={"pixel_values": _blank_pixels(config)})
    raise ValueError(
        f"batch: expected images on every rank or on none, got them on some; no dummy image is known for "
        f"{config.model_type}"
    )


def _patch_row_media(config: Any, kinds: Sequence[str]) -> Sample:
    """One blank image or video of each kind, of one token, in families whose pixels are rows of patches."""
    tensors = {name: x for kind in kinds for name, x in _blank_patches(config, kind).items()}
    return prompt_sample([getattr(config, f"{kind}_token_id") for kind in kinds], vision=tensors)


def _smallest_media(config: Any, tensors: Mapping[str, Tensor], *, image: bool, video: bool) -> Sample:
    """The blank image of `_smallest_image`, and a video that has it as its only frame."""
    family, ids = config.model_type, list[int]()
    vision: dict[str, Tensor] = {}
    if image:
        ids += [config.image_token_id] * (2 if family == "mistral3" else 1)
        vision |= tensors
    if video:
        if family == "glm5_next":
            ids += [config.video_start_token_id, config.image_token_id, config.video_end_token_id]
        else:
            ids += [config.video_token_id]
        vision |= {_video_name(name): x for name, x in tensors.items()}
        if family == "video_llama_3":
            vision["video_compression_mask"] = torch.ones(1, dtype=torch.bool)
    return prompt_sample(ids, vision=vision)


def _video_name(name: str) -> str:
    return name.replace("image", "video") if "image" in name else f"{name}_videos"


def _blank_pixels(config: Any) -> Tensor:
    """The pixels of a blank image, in families whose images all have the same size."""
    vision = config.vision_config
    side = getattr(vision, "image_size", 32)  # Gemma 3n takes every size that its tower can halve five times
    size = side if isinstance(side, Sequence) else [side] * 2
    pixels = torch.ones(1, getattr(vision, "num_channels", 3), *size)  # models leave out images of zeros
    return pixels[None] if config.model_type in IMAGE_DIMENSION_FAMILIES else pixels


def _dummy_tiles(config: Any, *, image: bool, video: bool) -> Sample:
    """A blank image of the smallest resolution, which is not padded, and a blank video of one frame."""
    tile, ids = [3, *[config.vision_config.image_size] * 2], list[int]()
    vision: dict[str, Tensor] = {}
    if image:
        size = min(config.image_grid_pinpoints, key=math.prod)
        tiles = 1 + math.prod(size) // config.vision_config.image_size**2
        ids += [config.image_token_id] * tokens_of_tiled_image(size, config)
        vision |= {"pixel_values": torch.zeros(1, tiles, *tile), "image_sizes": torch.tensor([size])}
        vision |= (
            {"batch_num_images": torch.ones(1, dtype=torch.long)} if config.model_type == "llava_onevision" else {}
        )
    if video:
        ids += [config.video_token_id] * (tokens_of_frame(config) + tokens_at_end_of_video(config))
        vision |= {"pixel_values_videos": torch.zeros(1, 1, *tile), FRAME_COUNTS: torch.tensor([1])}
    return prompt_sample(ids, vision=vision)


def _smallest_image(config: Any) -> dict[str, Tensor]:
    """Vision tensors of a blank image of one token, in families whose images differ in size; {} for other families.

    Mistral 3 gets an image of two tokens, because transformers loses a dimension with one.
    """
    family, vision = config.model_type, config.vision_config
    if family == "gemma4":
        side = vision.pooling_kernel_size
        cells = torch.arange(side)
        where = torch.cartesian_prod(cells, cells).flip(1)[None]
        return {"pixel_values": torch.zeros(1, side**2, 3 * vision.patch_size**2), "image_position_ids": where}
    if family == "gemma4_unified":
        pixels = torch.zeros(1, 1, 3 * vision.model_patch_size**2)
        return {"pixel_values": pixels, "image_position_ids": torch.zeros(1, 1, 2, dtype=torch.long)}
    if family == "lfm2_vl":
        side = config.downsample_factor
        pixels = torch.zeros(1, side**2, vision.num_channels * vision.patch_size**2)
        mask = torch.ones(1, side**2, dtype=torch.long)
        return {"pixel_values": pixels, "spatial_shapes": torch.tensor([[side, side]]), "pixel_attention_mask": mask}
    if family == "mistral3":
        side = config.spatial_merge_size * vision.patch_size
        return {"pixel_values": torch.zeros(1, 3, side, 2 * side), "image_sizes": torch.tensor([[side, 2 * side]])}
    if family == "minicpmv4_6":
        window = (1, 1) if config.downsample_mode == "4x" else vision.window_kernel_size
        kernels = zip(config.merge_kernel_size, window, strict=True)
        rows, columns = (side**config.merger_times * before for side, before in kernels)
        pixels = torch.zeros(1, vision.num_channels, vision.patch_size, rows * columns * vision.patch_size)
        return {"pixel_values": pixels, "target_sizes": torch.tensor([[rows, columns]], dtype=torch.int32)}
    if family in ("exaone4_5", "glm5_next", "hyperclovax_vision_v2"):
        side = vision.spatial_merge_size
        pixels = torch.zeros(side**2, numbers_per_patch(vision))
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]])}
    if family == "muse_glimmer":
        side, channels = vision.merge_size, 3 * vision.patch_temporal
        pixels = torch.zeros(side**2, channels * vision.patch_size**2)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]])}
    if family == "video_llama_3":  # images and videos have merge sizes of their own, 1 the smallest
        one = torch.ones(1, 3, dtype=torch.long)
        pixels = torch.zeros(1, vision.num_channels * vision.patch_size**2)
        return {"pixel_values": pixels, "image_grid_thw": one, "image_merge_sizes": one[0, :1]}
    if family in ("kimi_k25", "paddleocr_vl"):
        sides = getattr(vision, "merge_kernel_size", None) or [vision.spatial_merge_size] * 2
        pixels = torch.zeros(sides[0] * sides[1], 3, vision.patch_size, vision.patch_size)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, *sides]])}
    return {}


def _blank_patches(config: Any, kind: str) -> dict[str, Tensor]:
    """Vision tensors of one blank image or video, of one token."""
    vision, spec = config.vision_config, rope3d_spec(config)
    side, frames = vision.spatial_merge_size, spec.temporal_merge_size if kind == "video" else 1
    tensors = {
        PIXEL_KEYS[kind]: torch.zeros(frames * side**2, numbers_per_patch(vision)),
        f"{kind}_grid_thw": torch.tensor([[frames, side, side]]),
    }
    if kind == "video" and spec.tokens_per_second is not None:
        tensors[VIDEO_TIME_KEYS[spec.audio_token_id is not None]] = torch.ones(1)
    return tensors


def _dummy_audio(config: Any) -> Sample:
    """A blank audio of one frame, or of four in Qwen-Omni."""
    family, audio = config.model_type, config.audio_config
    if family == "gemma4":  # its convolutions have as many channels as a frame has mel bins
        features = torch.zeros(1, 1, audio.subsampling_conv_channels[0])
    elif family == "gemma4_unified":
        features = torch.zeros(1, 1, audio.audio_embed_dim)
    elif family == "gemma3n":  # for silence its language model would divide by 0
        features = torch.ones(1, 1, audio.input_feat_size)
    else:
        features = torch.zeros(1, audio.num_mel_bins, 4)
    name = audio_mask_name(config)
    mask = torch.ones(1, features.shape[AUDIO_MASKS[name]], dtype=torch.bool)
    tokens = int(audio_tokens(mask.sum(1), config))
    return prompt_sample([config.audio_token_id] * tokens, vision={AUDIO_FEATURES: features, name: mask})
