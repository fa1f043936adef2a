"""Images and videos that the trainer's processor has prepared, as inputs of vLLM in this process.

Otherwise vLLM would prepare them again. Importable without vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from rlkit.data.placeholders import Expansion, expand_placeholders, expanded_lengths
from rlkit.data.samples import Sample
from rlkit.vlm.inputs import PIXEL_KEYS
from rlkit.vlm.processors import placeholder_id

# vLLM's models of which every image and video has a row of pixels for each patch, and one row in `..._grid_thw`
PATCH_ROWS = frozenset(
    {
        "Glm4vForConditionalGeneration",
        "Glm4vMoeForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    }
)
IMAGE_ROWS = frozenset({"LlavaForConditionalGeneration"})  # those of which every image has one row of pixels
# those of which every tile of an image has a row of pixels and one of the mask; frames of videos are images
TILE_ROWS = frozenset({"SmolVLMForConditionalGeneration"})
TAKES_PREPARED = PATCH_ROWS | IMAGE_ROWS | TILE_ROWS
SECONDS = "second_per_grid_ts"  # of videos of Qwen2.5-VL
MASK, TILES = "pixel_attention_mask", "num_patches"  # of TILE_ROWS; vLLM's name for the number of tiles of each image
NAMES = frozenset({"pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", SECONDS, MASK})


def normalization_options(config: Any) -> dict[str, Any]:
    """Options of `vllm.LLM` for a model that is given prepared inputs, which are normalized already.

    Args:
        config: of the model, from transformers.
    """
    takes = not TAKES_PREPARED.isdisjoint(config.architectures or ())
    return {"mm_device_do_normalize": False} if takes else {}


def takes_prepared(model_config: Any) -> bool:
    """Whether a model can be given prepared inputs: one of the above, by vLLM's code, that does not normalize them.

    Args:
        model_config: `vllm.LLM(...).model_config`.
    """
    media_config = model_config.multimodal_config
    is_known = model_config.architecture in TAKES_PREPARED
    return is_known and media_config is not None and not media_config.mm_device_do_normalize


def has_prepared(request: Sample) -> bool:
    """Whether a sample has images or videos, which go into its hashes, no audios, and tensors of known names alone."""
    places = sum(len(runs) for runs in request.placeholders.values())
    videos = sum(len(one.frames) for one in request.videos) if MASK in request.vision else len(request.videos)
    has_all = 0 < places == len(request.images) + videos
    return has_all and bool(request.vision) and set(request.vision) <= NAMES and not request.audios


def prepared_prompt(request: Sample, processor: Any, model_config: Any) -> Any:
    """vLLM's input for a prompt: its `token_ids`, and the tensors, place and hash of each image and video.

    Args:
        request: a sample for which `has_prepared` is True.
        processor: the trainer's.
        model_config: `vllm.LLM(...).model_config`.
    """
    from transformers import BatchFeature
    from vllm.inputs import mm_input
    from vllm.multimodal import MultiModalHasher, MultiModalKwargsItems

    vision = _tiles(request, processor) if MASK in request.vision else request.vision
    images: Sequence[Any] = request.images
    videos = [{"video": one.frames, "fps": one.fps} for one in request.videos]
    if TILES in vision:  # frames are images too
        images, videos = vision["pixel_values"].split(vision[TILES].tolist()), []
    digest = partial(MultiModalHasher.hash_kwargs, model_config.multimodal_config.mm_hasher_algorithm)
    hashes = {"image": [digest(image=one) for one in images], "video": [digest(**one) for one in videos]}
    kinds = [kind for kind in hashes if hashes[kind]]
    cast = {name: x.to(model_config.dtype) for name, x in vision.items() if name in PIXEL_KEYS.values()}
    return mm_input(
        prompt_token_ids=expand_placeholders(request.compact_ids, request.placeholders),
        mm_kwargs=MultiModalKwargsItems.from_hf_inputs(BatchFeature({**vision, **cast}), _fields(vision)),
        mm_hashes={kind: hashes[kind] for kind in kinds},
        mm_placeholders={kind: _places(request, processor, kind) for kind in kinds},
    )


def is_prepared(prompt: Any) -> bool:
    """Whether a prompt of vLLM is one of `prepared_prompt`."""
    return prompt.get("type") == "multimodal"


def copy_parts(prompts: Iterable[Any]) -> None:
    """Give each image and video tensors of its own, shared by the prompts that have it.

    Of a part of a tensor, pickle takes the whole tensor; of a tensor that several prompts share, it takes one.
    """
    copies: dict[tuple[str, str], torch.Tensor] = {}
    for prompt in prompts:
        for kind, items in prompt["mm_kwargs"].items():
            for hash_, item in zip(prompt["mm_hashes"][kind], items, strict=True):
                for name, element in item.items():
                    if isinstance(element.data, torch.Tensor):
                        if (hash_, name) not in copies:
                            copies[hash_, name] = element.data.clone()
                        element.data = copies[hash_, name]


def _tiles(request: Sample, processor: Any) -> dict[str, torch.Tensor]:
    """The vision tensors of a sample of SmolVLM with a row for each tile, and the number of tiles of each image."""
    image = placeholder_id(processor, "image")
    tokens = [list(run.tokens).count(image) for run in request.placeholders[image] if isinstance(run, Expansion)]
    tiles = torch.tensor(tokens) // processor.image_seq_len
    return {**{name: x[0] for name, x in request.vision.items()}, TILES: tiles}


def _fields(vision: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """How vLLM divides each tensor among the images or videos of a sample."""
    from vllm.multimodal.inputs import MultiModalFieldConfig

    if TILES in vision:
        tile_field = MultiModalFieldConfig.flat_from_sizes("image", vision[TILES])
        tiles = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
        return {"pixel_values": tile_field, MASK: tile_field, TILES: tiles}
    fields = {}
    for kind in ("image", "video"):
        fields[PIXEL_KEYS[kind]] = MultiModalFieldConfig.batched(kind)
        if (grids := vision.get(grid_name := f"{kind}_grid_thw")) is not None:
            fields[PIXEL_KEYS[kind]] = MultiModalFieldConfig.flat_from_sizes(kind, grids.prod(-1))
            fields[grid_name] = MultiModalFieldConfig.batched(kind, keep_on_cpu=True)
    return fields | {SECONDS: MultiModalFieldConfig.batched("video", keep_on_cpu=True)}


def _places(request: Sample, processor: Any, kind: str) -> list[Any]:
    """The tokens of each image or video in `token_ids`, and which of them features replace."""
    from vllm.multimodal.inputs import PlaceholderRange

    token = placeholder_id(processor, kind)
    feature_ids = torch.tensor([placeholder_id(processor, "image"), token])  # GLM-4V has the image's in videos too
    repeats = expanded_lengths(request.compact_ids, request.placeholders)
    first = (repeats.cumsum() - repeats)[np.asarray(request.compact_ids) == token].tolist()
    return [
        PlaceholderRange(start, len(run.tokens), torch.isin(torch.tensor(run.tokens), feature_ids))
        if isinstance(run, Expansion)
        else PlaceholderRange(start, run)
        for start, run in zip(first, request.placeholders[token], strict=True)
    ]
