"""A batch in pieces that fit in memory, and the loss closure that is called for each of them, alike in every engine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlkit.data.batching import token_budget_batches
from rlkit.data.samples import Batch, Sample
from rlkit.engines.distributed import all_reduce
from rlkit.engines.packing.inputs import blank_sample, shared_costs
from rlkit.vlm.inputs import check_images, kinds_seen, position_spec


@dataclass(frozen=True)
class Outputs:
    """What a loss closure is given: [B, T] tensors aligned with the tokens, 0 where the mask is False, reached as
    attributes: `out.logprobs`, `out.entropy`, `out.values`."""

    tensors: Mapping[str, Tensor]
    anchor: Tensor  # 0, with the model's graph behind it: the backward of a rank without rows

    def __getattr__(self, name: str) -> Tensor:
        tensors = self.__dict__.get("tensors", {})
        if name in tensors:
            return tensors[name]
        raise AttributeError(f"no {name!r} among the outputs asked for: {', '.join(tensors)}")


LossFn = Callable[[Outputs, Batch], tuple[Tensor, Mapping[str, Tensor]]]


def micro_batches(
    batch: Batch, budget: int, config: Any, *, share_prompts: bool = False
) -> Iterator[tuple[list[int], Sample | None]]:
    """The rows of each micro-batch, and a blank sequence for a rank that would stay behind: one without rows, or one
    without an image, or a video, where another rank has one: a model's forward calls its vision tower for the images
    and again for the videos, and the ranks gather its weights together. All ranks call this together.

    Args:
        batch: this rank's rows, on the host; rows of equal `micro_batch_group` stay in one micro-batch.
        budget: most tokens in a micro-batch; a longer row goes alone.
        config: of the model, for the blank image.
        share_prompts: rows of one prompt stay in one micro-batch, in which the prompt counts once.

    Raises:
        ValueError: a row whose tokens and images do not match, or a blank image for a family whose image tensors are
            not known.
    """
    check_images(batch, config)
    if "micro_batch_group" in batch.fields:
        lengths, together = batch.lengths, batch.micro_batch_group.tolist()
    elif share_prompts:
        lengths, together = shared_costs(batch)
    else:
        lengths, together = batch.lengths, None
    pieces = token_budget_batches(lengths, budget, micro_batch_group=together)
    count = int(all_reduce(torch.tensor(len(pieces)), dist.ReduceOp.MAX))
    pieces += [[] for _ in range(count - len(pieces))]
    spec = position_spec(config)
    sees = torch.tensor([kinds_seen([batch.vision[i] for i in rows], spec) for rows in pieces]).int().view(-1, 2)
    lacks = all_reduce(sees, dist.ReduceOp.MAX) > sees
    for rows, (image, video) in zip(pieces, lacks.tolist(), strict=True):
        yield rows, blank_sample(config, image=image, video=video) if image or video or not rows else None


def check_same_rows(batch: Batch, data_parallel_rank: int, data_parallel_size: int) -> None:
    """Ranks that compute together must have been given the same rows, or each would compute with part of its own.

    What a sampler or a model has computed for each token is not compared: it may be rounded differently.

    Raises:
        ValueError: on all ranks alike.
    """
    digest = hashlib.blake2b(repr((batch.tokens.shape, batch.lengths, sorted(batch.fields))).encode(), digest_size=7)
    for x in (batch.tokens, batch.mask, *(batch.fields[name] for name in sorted(batch.fields))):
        if x.ndim == 1 or not x.is_floating_point():
            digest.update(x.contiguous().view(torch.uint8).numpy().tobytes())
    ranks = torch.zeros(dist.get_world_size(), 2, dtype=torch.long)
    ranks[dist.get_rank()] = torch.tensor([data_parallel_rank, int.from_bytes(digest.digest(), "big")])
    if len(set(map(tuple, all_reduce(ranks).tolist()))) > data_parallel_size:
        raise ValueError(
            "batch: expected the same rows on all ranks of a model-parallel group, got different ones; give each rank "
            "rows[engine.data_parallel_rank :: engine.data_parallel_size]"
        )


def run_closure(loss_fn: LossFn, out: Outputs, part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """What backward starts from, and what is reported: the closure's metrics and its `loss`, copied and without graph.

    Raises:
        ValueError: the loss is no 0-d tensor, or has no gradient.
    """
    loss, more = loss_fn(out, part)
    if loss.ndim or not loss.requires_grad:
        came = f"{tuple(loss.shape)}, requires_grad={loss.requires_grad}"
        raise ValueError(f"loss_fn: a 0-d loss with a gradient expected, came {came}")
    report = {"loss": loss, **more}
    return loss + out.anchor, {k: torch.as_tensor(x, device=loss.device).detach().clone() for k, x in report.items()}


def add_up(reports: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Metrics summed over micro-batches, or maximised where their name ends in "/max"."""
    totals: dict[str, Tensor] = {}
    for report in reports:
        for name, value in report.items():
            if name in totals:
                value = torch.maximum(totals[name], value) if name.endswith("/max") else totals[name] + value
            totals[name] = value
    return totals
