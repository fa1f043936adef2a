"""Encodes rows whose responses are in the data, and computes the held-out loss on them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlkit.data.samples import Batch, Sample
from rlkit.engines.distributed import reduce_metrics
from rlkit.runs.models import response_ends
from rlkit.runs.options import GivenResponseOptions
from rlkit.runs.sampling import Prompts, encode_share, encoder_for
from rlkit.tracking import Run
from rlkit.vlm import encode_chat, encode_responses
from rlkit.vlm.long_rope import usable_context

RowEncoder = Callable[[Iterable[tuple[int, Any]]], "GivenResponses"]


@dataclass
class GivenResponses(Prompts):
    """This rank's share of some rows, encoded: prompts for evaluation, and sequences for training.

    Attributes:
        sequences: a prompt followed by a response, with the response in the mask. Sequences of a row are adjacent.
        others: the same with responses that a row can do without; see `response_encoder`.
    """

    sequences: list[Sample] = field(default_factory=list)
    others: list[Sample] = field(default_factory=list)


def response_encoder(
    cfg: GivenResponseOptions,
    run: Run,
    path: str,
    processor: Any,
    engine: Any,
    responses_of: Callable[[Mapping[str, Any]], Sequence[Any]],
    others_of: Callable[[Mapping[str, Any]], Sequence[Any]] | None = None,
) -> RowEncoder:
    """A function that encodes this rank's share of the (group id, row) pairs of all ranks, one sequence per response.

    Rows that cannot be read or are longer than `cfg.max_tokens` are skipped, and named in the log.

    Args:
        responses_of: returns the responses of a row, as texts or as assistant messages.
        others_of: likewise, further responses; those that cannot be encoded or are too long are left out.
    """
    ends, max_tokens = response_ends(cfg, path, processor), _most_tokens(cfg, engine)

    encoder = encoder_for(cfg, processor)

    def with_responses(prompt: Sample) -> tuple[Sample, list[Sample], list[Sample]]:
        sequences, others = encode_responses(prompt, processor, responses_of(prompt.row), ends, max_tokens), []
        for other in others_of(prompt.row) if others_of else ():
            with suppress(ValueError):
                others += encode_responses(prompt, processor, [other], ends, max_tokens)
        return prompt, sequences, others

    return lambda rows: _given_responses(*encode_share(rows, with_responses, encoder, run, engine))


def chat_encoder(
    cfg: GivenResponseOptions, run: Run, path: str, processor: Any, engine: Any, *, last_only: bool = False
) -> RowEncoder:
    """`response_encoder` for chats: one sequence per row, with all assistant messages in the mask, or the last one."""
    ends, max_tokens = response_ends(cfg, path, processor), _most_tokens(cfg, engine)

    encoder = encoder_for(cfg, processor)

    def with_chat(prompt: Sample) -> tuple[Sample, list[Sample], list[Sample]]:
        return prompt, [encode_chat(prompt, processor, ends, max_tokens, last_only=last_only)], []

    return lambda rows: _given_responses(*encode_share(rows, with_chat, encoder, run, engine))


def _most_tokens(cfg: GivenResponseOptions, engine: Any) -> int:
    return cfg.max_tokens or usable_context(engine.config)


def _given_responses(rows: Sequence[tuple[Sample, list[Sample], list[Sample]]], skipped: list[str]) -> GivenResponses:
    prompts = [prompt for prompt, _, _ in rows]
    sequences = [sequence for _, of_row, _ in rows for sequence in of_row]
    return GivenResponses(prompts, skipped, sequences, [sequence for _, _, of_row in rows for sequence in of_row])


def global_loss(
    engine: Any,
    loss_fn: Callable[[Any, Batch], tuple[Tensor, Mapping[str, Tensor]]],
    out: Mapping[str, Tensor],
    batch: Batch,
) -> dict[str, float]:
    """Compute `loss` and metrics of a batch over all ranks, as `engine.train_batch` does, but without an update.

    Args:
        loss_fn: as for `train_batch`.
        out: outputs of `engine.infer_batch(batch)`.
        batch: this rank's rows. Its totals are set to those of all ranks.

    Returns:
        Values by name; nan if no rank has a row.
    """
    counts = torch.stack([batch.mask.sum(), batch.mask.any(1).sum()])
    batch.total_tokens, batch.total_sequences = engine.global_sum(counts)
    # in float64, so that 19 of 20 gives 0.95, not 0.949999988; the batch too, so that equal log-probabilities have
    # equal sums
    exact = copy.copy(batch)
    exact.fields = _in_float64(batch.fields)
    loss, metrics = loss_fn(SimpleNamespace(**_in_float64(out)), exact)
    found = reduce_metrics({"loss": loss, **metrics}, engine.data_parallel_group)
    return found if batch.total_sequences else dict.fromkeys(found, math.nan)


def _in_float64(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
