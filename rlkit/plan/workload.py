"""The longest batch that a recipe's options allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from rlkit.data.batching import token_budget_batches
from rlkit.data.samples import Batch, Sample, append_response, collate, prompt_sample
from rlkit.engines.packing.micro_batches import micro_batches
from rlkit.runs.options import GivenResponseOptions, SamplingOptions, TrainingOptions
from rlkit.runs.vllm_options import longest_response, longest_row
from rlkit.vlm.families import PATCH_ROW_FAMILIES, numbers_per_patch
from rlkit.vlm.loading import has_vision
from rlkit.vlm.long_rope import usable_context
from rlkit.vlm.processors import placeholder_ids

TEXT_BESIDE_IMAGE = 64  # text tokens of a prompt with an image, unless --image_tokens is given


def samples_to_train(cfg: TrainingOptions) -> bool:
    """Whether a step samples the responses that it trains on. Recipes with given responses sample for evaluation
    only."""
    return isinstance(cfg, SamplingOptions)


def passes(cfg: Any) -> int:
    """How often a step trains on each row."""
    return getattr(cfg, "ppo_epochs", 1)


def optimizer_steps(cfg: Any) -> int:
    """How many optimizer steps a step has: one for each mini-batch of each pass."""
    return passes(cfg) * getattr(cfg, "mini_batches", 1)


@dataclass(frozen=True)
class Workload:
    """Rows of one rank in one step, all of the maximum length.

    Attributes:
        prompt, response: number of tokens.
        image_tokens: how many tokens of a prompt are those of images, or of videos.
        prompts: number of prompts.
        group_size: responses to each prompt.
        rows_together: how many of these are always in one micro-batch: both of a pair, otherwise 1.
        more_prompts: how many prompts are sampled besides, and not trained on.
    """

    prompt: int
    response: int
    image_tokens: int
    prompts: int
    group_size: int
    rows_together: int = 1
    more_prompts: int = 0

    @property
    def rows(self) -> int:
        """Number of responses."""
        return self.prompts * self.group_size

    @property
    def sampled_prompts(self) -> int:
        """Number of prompts whose responses are sampled."""
        return self.prompts + self.more_prompts

    @property
    def sampled_rows(self) -> int:
        """Number of responses that are sampled."""
        return self.sampled_prompts * self.group_size

    def image_patches(self, config: Any) -> int:
        """Vision-tower patches of each prompt; 0 for a model family whose patch layout is not known here."""
        merge = getattr(getattr(config, "vision_config", None), "spatial_merge_size", 0)
        return self.image_tokens * merge**2 if config.model_type in PATCH_ROW_FAMILIES else 0

    def image_bytes(self, config: Any) -> int:
        """Bytes of the images of each prompt on the host, where they are in bfloat16."""
        patches = self.image_patches(config)
        return 2 * patches * numbers_per_patch(config.vision_config) if patches else 0


def longest_batch(
    cfg: TrainingOptions, config: Any, data_parallel_size: int, image_tokens: int | None, *, rows_together: int = 1
) -> Workload:
    """The longest rows that the recipe's options and the model's context allow.

    Args:
        cfg: options of the recipe.
        config: configuration of the model.
        data_parallel_size: number of ranks with different rows.
        image_tokens: image tokens of each prompt. By default a vision-language model gets as many as fit.
        rows_together: 2 for a recipe that trains on pairs.

    Raises:
        ValueError: rows are longer than the model's context, or a prompt has more image tokens than tokens.
    """
    context = usable_context(config, longest_row(cfg))
    if isinstance(cfg, SamplingOptions):
        response = longest_response(cfg)
        length = cfg.max_prompt_tokens or context - (response or context // 2)
        response = response or context - length  # an episode may fill the context
        if length < 1 or response < 1 or length + response > context:
            name = "max_response_tokens" if getattr(cfg, "max_turns", 1) > 1 else "max_new_tokens"
            raise ValueError(
                f"max_prompt_tokens + {name}: expected at most {context}, the model's context, got "
                f"{cfg.max_prompt_tokens} + {response}"
            )
    else:
        longest = (cfg.max_tokens if isinstance(cfg, GivenResponseOptions) else 0) or context
        if not 1 < longest <= context:
            raise ValueError(f"max_tokens: expected at most {context}, the model's context, got {longest}")
        length, response = longest // 2, longest - longest // 2
    if image_tokens is None:
        image_tokens = max(0, length - TEXT_BESIDE_IMAGE) if has_vision(config) else 0
    if image_tokens and not has_vision(config):
        raise ValueError(f"image_tokens: expected 0 for {config.model_type}, a text model, got {image_tokens}")
    if not 0 <= image_tokens < length:
        raise ValueError(f"image_tokens: expected less than the {length} tokens of a prompt, got {image_tokens}")
    even = image_tokens // 2 * 2  # the image is two tokens high
    prompts = -(-cfg.prompts_per_step // data_parallel_size)
    drawn = -(-getattr(cfg, "gen_batch_size", 0) // data_parallel_size)  # dapo.py trains on some of them
    responses = getattr(cfg, "group_size", rows_together)
    return Workload(length, response, even, prompts, responses, rows_together, max(0, drawn - prompts))


def with_limited_rows(cfg: Any, config: Any) -> Any:
    """The options, with rows that fill a micro-batch where rows may otherwise fill the model's context.

    Many shorter rows fill a micro-batch too. A run of real rows thus takes about as much memory. If responses leave
    less than a quarter of a micro-batch, a prompt with its images gets a quarter all the same, and such a row is longer
    than a micro-batch. The same holds for responses of episodes after long prompts.
    """
    context, budget = usable_context(config, longest_row(cfg)), cfg.micro_batch_tokens
    tokens = min(context, budget)

    def left_by(taken: int) -> int:
        return max(1, tokens - taken, min(context - taken, budget // 4))

    if getattr(cfg, "max_turns", 1) > 1 and not cfg.max_response_tokens:
        cfg = replace(cfg, max_response_tokens=left_by(cfg.max_prompt_tokens or tokens // 2))
    if isinstance(cfg, SamplingOptions) and not cfg.max_prompt_tokens:
        cfg = replace(cfg, max_prompt_tokens=left_by(longest_response(cfg)))
    if isinstance(cfg, GivenResponseOptions) and not cfg.max_tokens:
        cfg = replace(cfg, max_tokens=tokens)
    return cfg


class PackedRows(NamedTuple):
    """Rows of a micro-batch.

    Attributes:
        responses: for each prompt that is computed in it, the number of its responses.
    """

    responses: tuple[int, ...]

    @property
    def prompts(self) -> int:
        """How many prompts, with their images, are computed."""
        return len(self.responses)

    @property
    def rows(self) -> int:
        """Number of responses."""
        return sum(self.responses)

    def tokens(self, workload: Workload) -> int:
        """Number of tokens that are computed."""
        return self.prompts * workload.prompt + self.rows * workload.response


def packed_rows(workload: Workload, budget: int, *, share_prompts: bool) -> list[PackedRows]:
    """All micro-batches of a rank, as `rlkit.engines.packing.micro_batches` makes them.

    A prompt counts once for its responses. If these have more tokens than the budget they are split, and each part
    computes the prompt again. Both rows of a pair are in one micro-batch, where the budget counts their prompt twice.

    Args:
        workload: rows of one rank.
        budget: `micro_batch_tokens`.
        share_prompts: as in the engine.
    """
    prompt, response, pair = workload.prompt, workload.response, workload.rows_together
    parts: list[tuple[int, ...]]  # that stay in one micro-batch: the responses to each prompt that is computed
    if pair > 1:
        parts = [(pair,) if share_prompts else (1,) * pair] * (workload.rows // pair)
        costs = [pair * (prompt + response)] * len(parts)
    else:
        group = [response] * (workload.group_size if share_prompts else 1)
        split = [len(rows) for rows in token_budget_batches(group, max(1, budget - prompt))]
        parts = [(responses,) for responses in split * (workload.rows // len(group))]
        costs = [prompt + responses * response for (responses,) in parts]
    batches = token_budget_batches(costs, budget)
    return [PackedRows(tuple(responses for i in batch for responses in parts[i])) for batch in batches]


def largest_micro_batches(workload: Workload, config: Any, budget: int, *, share_prompts: bool) -> Batch:
    """A batch with placeholder tokens that fills the two largest micro-batches of a rank.

    Two, because the second backward pass runs while the gradients of the first exist.

    Args:
        workload: rows of one rank.
        config: configuration of the model.
        budget: `micro_batch_tokens`.
        share_prompts: as in the engine.
    """
    rows_needed = 2 * (budget // max(1, workload.response) + 1)
    prompts = min(workload.prompts, rows_needed // workload.group_size + 1)
    samples = [row for number in range(prompts) for row in _group(workload, config, number)]
    batch = collate(samples)
    if workload.rows_together > 1:
        batch.add(micro_batch_group=torch.arange(len(samples)) // workload.rows_together)
    pieces = [rows for rows, _ in micro_batches(batch, budget, config, share_prompts=share_prompts)]
    return batch.select(sorted(row for rows in pieces[:2] for row in rows))


def _group(workload: Workload, config: Any, number: int) -> Sequence[Sample]:
    """The responses to one prompt. Its tokens depend on `number`, so different groups do not share a prompt.

    Images of a family whose patch layout is not known are text tokens here, which the tower does not encode.
    """
    special = placeholder_ids(config)
    ordinary = [token for token in range(10, 1010 + len(special)) if token not in special]
    vision, text = {}, [ordinary[number % 1000]]
    ids = text * (workload.prompt - workload.image_tokens)
    if patches := workload.image_patches(config):
        vision_config = config.vision_config
        merge = vision_config.spatial_merge_size
        grid = torch.tensor([[1, 2 * merge, patches // (2 * merge)]])
        vision = {"pixel_values": torch.zeros(patches, numbers_per_patch(vision_config)), "image_grid_thw": grid}
        ids += [config.image_token_id] * workload.image_tokens
    else:
        ids += text * workload.image_tokens
    question = prompt_sample(ids, vision=vision, group_id=number)
    return [
        append_response(question, ordinary[:1] * workload.response, [0.0] * workload.response)
        for _ in range(workload.group_size)
    ]
