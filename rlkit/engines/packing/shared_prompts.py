"""Rows of a batch that answer the same prompt: its tokens and images are computed once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlkit.data.batching import token_budget_batches
from rlkit.data.samples import Batch


def prompt_lengths(batch: Batch) -> list[int]:
    """Tokens of each row before the first one that is trained on; the whole length of a row without any."""
    mask = batch.mask.int()
    first = torch.where(batch.mask.any(1), mask.argmax(1) if mask.shape[1] else 0, torch.tensor(batch.lengths))
    return first.tolist()


def shared_prompt_groups(batch: Batch) -> list[list[int]]:
    """Row numbers in groups of one prompt: equal tokens, equal experts and the same vision tensors before the response.

    A row with images and with observations in its response is a group by itself, since some of its images may belong to
    the observations.
    """
    groups: dict[Any, list[int]] = {}
    routed = [batch.routed_experts] if "routed_experts" in batch.fields else []
    for row, prompt in enumerate(prompt_lengths(batch)):
        length = batch.lengths[row]
        images = tuple((name, id(tensor)) for name, tensor in batch.vision[row].items())
        observes_images = images and not batch.mask[row, prompt:length].all()
        if 0 < prompt < length and not observes_images:
            contents = tuple(x[row, :prompt].contiguous().numpy().tobytes() for x in (batch.tokens, *routed))
            groups.setdefault((contents, images), []).append(row)
        else:
            groups[row] = [row]
    return list(groups.values())


def shared_prompt_costs(batch: Batch, budget: int | None = None) -> tuple[list[int], list[int]]:
    """Tokens that each row adds to a micro-batch that contains its whole group, and the number of its group.

    Args:
        batch: on the host.
        budget: most tokens in a group. A larger group is split, and each part has the prompt again; a row that is
            longer than the budget is a part by itself. By default groups are not split.
    """
    costs, group_numbers, prompts = list(batch.lengths), [0] * len(batch), prompt_lengths(batch)
    groups = shared_prompt_groups(batch)
    if budget is not None:
        groups = [part for group in groups for part in _split(group, prompts[group[0]], batch.lengths, budget)]
    for number, group in enumerate(groups):
        for row in group:
            group_numbers[row] = number
        for row in group[1:]:
            costs[row] -= prompts[row]
    return costs, group_numbers


def _split(group: Sequence[int], prompt: int, lengths: Sequence[int], budget: int) -> list[list[int]]:
    """The rows of a group in few parts; prompt and responses of a part fit in the budget, or it is one row."""
    responses = [lengths[row] - prompt for row in group]
    parts = token_budget_batches(responses, max(1, budget - prompt))
    return [[group[i] for i in part] for part in parts]
