"""Images that the trainer's processor has prepared, as inputs of vLLM in this process, which would prepare them again.

Importable without vLLM.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlkit.data.samples import Sample, expand_placeholders, expanded_lengths

# vLLM's models whose images have one row of `pixel_values` for each patch, and a row of `image_grid_thw` for each image
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
IMAGE_ROWS = frozenset({"LlavaForConditionalGeneration"})  # one row of `pixel_values` for each image, and nothing else


def normalization_options(config: Any) -> dict[str, Any]:
    """Options of `vllm.LLM` for a model that is given prepared images, which are normalized already.

    Args:
        config: of the model, from transformers.
    """
    takes = not (PATCH_ROWS | IMAGE_ROWS).isdisjoint(config.architectures or ())
    return {"mm_device_do_normalize": False} if takes else {}


def takes_prepared_images(model_config: Any) -> bool:
    """Whether a model can be given prepared images: one of the above, by vLLM's code, that does not normalize them.

    Args:
        model_config: `vllm.LLM(...).model_config`.
    """
    of_media = model_config.multimodal_config
    is_known = model_config.architecture in PATCH_ROWS | IMAGE_ROWS
    return is_known and of_media is not None and not of_media.mm_device_do_normalize


def has_prepared_images(request: Sample) -> bool:
    """Whether the images of a sample can be given to vLLM as they are; it prepares videos and audios itself."""
    runs = [run for images in request.placeholders.values() for run in images]
    is_repetition = all(isinstance(run, int) for run in runs) and len(request.placeholders) == 1
    known = {"pixel_values"} <= set(request.vision) <= {"pixel_values", "image_grid_thw"}
    return known and is_repetition and len(runs) == len(request.images) and not request.videos and not request.audios


def prepared_prompt(request: Sample, model_config: Any) -> Any:
    """vLLM's input for a prompt with images: the expanded track, and for each image its tensors, place and hash.

    Args:
        request: a sample for which `has_prepared_images` is True.
        model_config: `vllm.LLM(...).model_config`.
    """
    from vllm.inputs import mm_input
    from vllm.multimodal import MultiModalHasher, MultiModalKwargsItems
    from vllm.multimodal.inputs import MultiModalFieldConfig, PlaceholderRange

    pixels: torch.Tensor = request.vision["pixel_values"].to(model_config.dtype)
    vision = {**request.vision, "pixel_values": pixels}
    fields = {"pixel_values": MultiModalFieldConfig.batched("image")}
    if (grids := request.vision.get("image_grid_thw")) is not None:
        fields["pixel_values"] = MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1))
        fields["image_grid_thw"] = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
    algorithm = model_config.multimodal_config.mm_hasher_algorithm
    return mm_input(
        prompt_token_ids=expand_placeholders(request.compact_ids, request.placeholders),
        mm_kwargs=MultiModalKwargsItems.from_hf_inputs(vision, fields),
        mm_hashes={"image": [MultiModalHasher.hash_kwargs(algorithm, image=image) for image in request.images]},
        mm_placeholders={"image": [PlaceholderRange(*run) for run in _placeholder_runs(request)]},
    )


def _placeholder_runs(request: Sample) -> list[tuple[int, int]]:
    """(index of the first token in the expanded track, number of tokens) of each image."""
    ((token, lengths),) = request.placeholders.items()
    repeats = expanded_lengths(request.compact_ids, request.placeholders)
    first = (repeats.cumsum() - repeats)[np.asarray(request.compact_ids) == token]
    return list(zip(first.tolist(), lengths, strict=True))
