"""The longest batch that a recipe's options allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlkit.data.samples import Batch, Sample, append_response, collate, prompt_sample
from rlkit.engines.packing.micro_batches import micro_batches
from rlkit.vlm.families import PATCH_ROW_FAMILIES
from rlkit.vlm.loading import has_vision

TEXT_BESIDE_IMAGE = 64  # tokens of a prompt that are the question, unless --image_tokens says otherwise


@dataclass(frozen=True)
class Workload:
    """Rows of one rank, all of the greatest length.

    Attributes:
        prompt, answer: tokens of each row.
        image_tokens: tokens of the prompt that stand for images.
        prompts: of a rank and step.
        group_size: answers to each prompt.
    """

    prompt: int
    answer: int
    image_tokens: int
    prompts: int
    group_size: int

    @property
    def rows(self) -> int:
        """Answers of a rank and step."""
        return self.prompts * self.group_size

    def image_patches(self, config: Any) -> int:
        """Patches of the vision tower for each prompt; 0 for a family whose patches are not known."""
        merge = getattr(getattr(config, "vision_config", None), "spatial_merge_size", 0)
        return self.image_tokens * merge**2 if config.model_type in PATCH_ROW_FAMILIES else 0


def longest_batch(cfg: Any, config: Any, data_parallel_size: int, image_tokens: int | None) -> Workload:
    """The longest rows that the options of a recipe and the context of a model allow.

    Args:
        cfg: of a recipe.
        config: of the model.
        data_parallel_size: ranks that have rows of their own.
        image_tokens: of each prompt; by default a vision-language model sees an image as large as the prompt allows.

    Raises:
        ValueError: rows that are longer than the model's context, or more image tokens than a prompt has.
    """
    context = config.get_text_config().max_position_embeddings
    if hasattr(cfg, "max_prompt_tokens"):
        answer = cfg.max_new_tokens
        length = cfg.max_prompt_tokens or context - answer
        if length < 1 or length + answer > context:
            raise ValueError(
                f"max_prompt_tokens + max_new_tokens: expected at most {context}, the model's context, got "
                f"{cfg.max_prompt_tokens} + {answer}"
            )
    else:
        longest = getattr(cfg, "max_tokens", 0) or context
        if not 1 < longest <= context:
            raise ValueError(f"max_tokens: expected at most {context}, the model's context, got {longest}")
        length, answer = longest // 2, longest - longest // 2
    if image_tokens is None:
        image_tokens = max(0, length - TEXT_BESIDE_IMAGE) if has_vision(config) else 0
    if image_tokens and not has_vision(config):
        raise ValueError(f"image_tokens: expected 0 for {config.model_type}, a text model, got {image_tokens}")
    if not 0 <= image_tokens < length:
        raise ValueError(f"image_tokens: expected less than the {length} tokens of a prompt, got {image_tokens}")
    merged = image_tokens // 2 * 2  # an image is a rectangle
    prompts = -(-cfg.prompts_per_step // data_parallel_size)
    return Workload(length, answer, merged, prompts, getattr(cfg, "group_size", 1))


def largest_micro_batches(workload: Workload, config: Any, budget: int, *, share_prompts: bool, most: int = 2) -> Batch:
    """The rows of the largest micro-batches that a rank has in a step, as rows of random answers.

    There are two by default, because the second backward pass needs memory while the gradients of the first exist.

    Args:
        workload: of a rank.
        config: of the model.
        budget: `micro_batch_tokens`.
        share_prompts: as in the engine.
        most: micro-batches.
    """
    rows_needed = most * (budget // max(1, workload.answer) + 1)
    prompts = min(workload.prompts, rows_needed // workload.group_size + 1)
    samples = [row for number in range(prompts) for row in _group(workload, config, number)]
    batch = collate(samples)
    pieces = [rows for rows, _ in micro_batches(batch, budget, config, share_prompts=share_prompts)]
    return batch.select(sorted(row for rows in pieces[:most] for row in rows))


def _group(workload: Workload, config: Any, number: int) -> Sequence[Sample]:
    """The answers to one prompt. Its tokens depend on `number`, so different groups do not share a prompt."""
    vision, ids = {}, [number % 1000 + 10] * (workload.prompt - workload.image_tokens)
    if patches := workload.image_patches(config):
        of_config = config.vision_config
        channels = getattr(of_config, "in_channels", getattr(of_config, "in_chans", 3))
        merge = of_config.spatial_merge_size
        grid = torch.tensor([[1, 2 * merge, patches // (2 * merge)]])
        size = channels * of_config.temporal_patch_size * of_config.patch_size**2
        vision = {"pixel_values": torch.zeros(patches, size), "image_grid_thw": grid}
        ids += [config.image_token_id] * workload.image_tokens
    question = prompt_sample(ids, vision=vision, group_id=number)
    return [
        append_response(question, [10] * workload.answer, [0.0] * workload.answer) for _ in range(workload.group_size)
    ]
