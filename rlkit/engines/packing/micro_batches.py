"""A batch in micro-batches that fit in memory, equally many on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from rlkit.data.batching import token_budget_batches
from rlkit.data.samples import Batch, Sample
from rlkit.engines.distributed import all_reduce
from rlkit.engines.packing.dummy_media import dummy_sample
from rlkit.engines.packing.shared_prompts import shared_prompt_costs
from rlkit.vlm.inputs import check_image_tokens, position_spec, vision_kinds


def micro_batches(
    batch: Batch, budget: int, config: Any, *, share_prompts: bool = False
) -> Iterator[tuple[list[int], Sample | None]]:
    """The rows of each micro-batch, and a dummy sequence where this rank needs one. All ranks call this together.

    Sharded weights are gathered by all ranks together, and a model calls its encoders once each for images, videos and
    audios. A rank without rows, or without one of these media while another rank has some, gets a dummy sequence, so
    that every rank joins every collective.

    Args:
        batch: this rank's rows, on the host; rows of equal `micro_batch_group` stay in one micro-batch.
        budget: most tokens in a micro-batch. A longer row, or a longer group of rows with equal `micro_batch_group`, is
            a micro-batch by itself.
        config: of the model, for dummy images.
        share_prompts: rows of one prompt stay in one micro-batch, where the prompt counts once. If they have more
            tokens than the budget, they are split, and each part has the prompt again.

    Raises:
        ValueError: a row whose tokens and images do not match, or a family for which no dummy image is known.
    """
    check_image_tokens(batch, config)
    costs, groups = batch.lengths, None
    if "micro_batch_group" in batch.fields:
        groups = batch.micro_batch_group.tolist()
    elif share_prompts:
        costs, groups = shared_prompt_costs(batch, budget)
    pieces = token_budget_batches(costs, budget, micro_batch_group=groups)
    count = max(1, int(all_reduce(torch.tensor(len(pieces)), dist.ReduceOp.MAX)))  # metrics of no rows are 0
    pieces += [[] for _ in range(count - len(pieces))]
    spec = position_spec(config)
    has = torch.tensor([vision_kinds([batch.vision[i] for i in rows], spec) for rows in pieces]).int().view(-1, 3)
    lacks = all_reduce(has, dist.ReduceOp.MAX) > has
    for rows, (image, video, audio) in zip(pieces, lacks.tolist(), strict=True):
        needed = image or video or audio or not rows
        yield rows, dummy_sample(config, image=image, video=video, audio=audio) if needed else None
