"""The inputs of a model's forward for one micro-batch, and the way back from its outputs to [B, T].

How the rows of a micro-batch are laid out is decided here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlkit.data.packing import concatenated_ranges
from rlkit.data.samples import Batch, Sample
from rlkit.engines.packing.layout import PackedLayout
from rlkit.engines.packing.shared_prompts import prompt_lengths, shared_prompt_groups
from rlkit.engines.packing.ulysses import UlyssesGroup
from rlkit.vlm.inputs import gemma_frames_as_images, position_ids, vision_kwargs
from rlkit.vlm.rope3d import Rope3DSpec


@dataclass(frozen=True)
class ModelInputs:
    """The inputs of a model's forward for one micro-batch.

    Attributes:
        kwargs: of the model's forward.
        logits_to_keep: [K] positions, in the flattened input, whose next token is scored; K >= 1.
        targets: [K] these next tokens.
        output_indices: [K'] where the results belong in a flattened [B, T], on the host. K' is K, or 0 if no token is
            scored and the one position in `logits_to_keep` is a placeholder.
        shape: (B, T).
        outputs_per_rank: under Ulysses, how many of `output_indices` each rank computes, in rank order.
            `logits_to_keep` and `targets` are then this rank's, and positions count from the start of its part.
    """

    kwargs: dict[str, Any]
    logits_to_keep: Tensor
    targets: Tensor
    output_indices: Tensor
    shape: tuple[int, int]
    outputs_per_rank: Sequence[int] = ()

    def select_outputs(self, x: Tensor) -> Tensor:
        """A model's output at `logits_to_keep`: [B, T, ...] -> [K, ...].

        A model that supports the argument `logits_to_keep` has selected them already, and returned [1, K, ...].
        """
        x = x.flatten(0, 1)
        return x if len(x) == len(self.logits_to_keep) else x[self.logits_to_keep]

    def scatter(self, values: Tensor) -> Tensor:
        """[K] results -> [B, T], 0 where no token is scored."""
        flat = values.new_zeros(self.shape[0] * self.shape[1])
        indices = self.output_indices.to(values.device, non_blocking=True)
        return flat.index_copy(0, indices, values[: len(indices)]).view(self.shape)


def prepare_model_inputs(
    batch: Batch,
    spec: Rope3DSpec | None,
    device: torch.device,
    *,
    remove_padding: bool = True,
    share_prompts: bool = True,
    dummy: Sample | None = None,
    ulysses: UlyssesGroup | None = None,
    router_replay: bool = False,
    config: Any = None,
) -> ModelInputs:
    """Concatenate the rows of a micro-batch (or keep them padded), with position ids and vision tensors.

    Args:
        batch: rows on the host.
        spec: the model's rule for 3D RoPE ids; None for plain position ids.
        device: where the model runs.
        remove_padding: one packed row of N tokens; otherwise [B, T] with an attention mask.
        share_prompts: rows that answer the same prompt contain its tokens and images once; needs `remove_padding`.
        dummy: a sequence to add after the rows, none of whose outputs are used: for a rank that has no rows, or no
            images, videos or audios while other ranks do.
        ulysses: ranks that share the packed row, which is padded to a multiple of their number.
        router_replay: pass the rows' `routed_experts`, if there are any, to the model.
        config: of the model, which rows with videos of Gemma 4 need.
    """
    rows = _padded_rows(batch, spec, dummy, router_replay=router_replay)
    scored, outputs_per_rank = _scored_tokens(batch, rows.tokens.shape[1]), list[int]()
    if remove_padding:
        packing = _pack(batch, rows, device, share_prompts=share_prompts, ulysses=ulysses)
        kwargs = _packed_kwargs(rows, packing, spec)
        scored = scored._replace(logits_to_keep=packing.destination[scored.logits_to_keep])
        if ulysses is not None:
            scored, outputs_per_rank = _split_among_ranks(scored, kwargs["input_ids"].shape[1], ulysses)
    else:
        kwargs = _padded_kwargs(rows, spec)
    kwargs = gemma_frames_as_images(kwargs, config)  # on the host, which would wait for a device
    if not len(scored.logits_to_keep):  # a model needs at least one position
        scored = scored._replace(logits_to_keep=torch.zeros(1, dtype=torch.long), targets=rows.tokens.new_zeros(1))
    if remove_padding:
        kwargs["logits_to_keep"] = scored.logits_to_keep
    on_device = {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    logits_to_keep, targets = (x.to(device, non_blocking=True) for x in (scored.logits_to_keep, scored.targets))
    height, width = batch.tokens.shape
    return ModelInputs(on_device, logits_to_keep, targets, scored.output_indices, (height, width), outputs_per_rank)


class _PaddedRows(NamedTuple):
    """The R rows of a micro-batch, with the dummy sequence as the last if there is one; W columns.

    Attributes:
        tokens, attended: [R, W].
        position_ids: [3, R, W] or [R, W].
        lengths, vision: of each row.
        routed_experts: [R * W, layers, K], -1 where unknown; None if they are not replayed.
    """

    tokens: Tensor
    attended: Tensor
    position_ids: Tensor
    lengths: list[int]
    vision: list[Any]
    routed_experts: Tensor | None


def _padded_rows(batch: Batch, spec: Rope3DSpec | None, dummy: Sample | None, *, router_replay: bool) -> _PaddedRows:
    count, width = batch.tokens.shape
    tokens, lengths, vision = batch.tokens, list(batch.lengths), list(batch.vision)
    if dummy is not None:
        size = len(dummy.token_ids)
        tokens = pad(tokens, (0, max(0, size - width), 0, 1))
        tokens[count, :size] = torch.tensor(dummy.token_ids)
        lengths, vision = [*lengths, size], [*vision, dummy.vision]
    attended = torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]
    routed_experts: Tensor | None = None
    if router_replay and "routed_experts" in batch.fields:
        more = (0, 0, 0, 0, 0, tokens.shape[1] - width, 0, len(lengths) - count)
        routed_experts = pad(batch.routed_experts, more, value=-1).flatten(0, 1)
    ids = position_ids(tokens, attended, vision, spec)
    return _PaddedRows(tokens, attended, ids, lengths, vision, routed_experts)


class _ScoredTokens(NamedTuple):
    """The fields of `ModelInputs` with these names, on the host."""

    logits_to_keep: Tensor
    targets: Tensor
    output_indices: Tensor


def _scored_tokens(batch: Batch, width: int) -> _ScoredTokens:
    """Masked tokens and the positions before them in rows of `width` columns; column 0 has no token before it."""
    row, column = batch.mask[:, 1:].nonzero(as_tuple=True)
    targets, output_indices = batch.tokens[row, column + 1], row * batch.tokens.shape[1] + column + 1
    return _ScoredTokens(row * width + column, targets, output_indices)


def _split_among_ranks(
    scored: _ScoredTokens, row_length: int, ulysses: UlyssesGroup
) -> tuple[_ScoredTokens, list[int]]:
    """This rank's part of the row with the output indices of all ranks, and the number of outputs per rank."""
    part = row_length // ulysses.size
    rank_of = scored.logits_to_keep // part
    order, outputs_per_rank = rank_of.argsort(stable=True), rank_of.bincount(minlength=ulysses.size).tolist()
    local = order.split(outputs_per_rank)[ulysses.rank]
    logits_to_keep, targets = scored.logits_to_keep[local] % part, scored.targets[local]
    return _ScoredTokens(logits_to_keep, targets, scored.output_indices[order]), outputs_per_rank


def _fill_token(rows: _PaddedRows) -> Tensor:
    """The token that fills padding: the last one of the first row, which is text unless a row ends with an image.

    It is not the padding token, whose embedding may be zeros, for which gradients of Gemma 3n are nan.
    """
    return rows.tokens[0, rows.lengths[0] - 1]


def _padded_kwargs(rows: _PaddedRows, spec: Rope3DSpec | None) -> dict[str, Any]:
    tokens = torch.where(rows.attended, rows.tokens, _fill_token(rows))
    kwargs = {"input_ids": tokens, "position_ids": rows.position_ids, "attention_mask": rows.attended.long()}
    kwargs |= vision_kwargs(rows.tokens, rows.vision, spec)
    return kwargs if rows.routed_experts is None else {**kwargs, "routed_experts": rows.routed_experts}


class _Packing(NamedTuple):
    """How padded rows [R, W] become one packed row.

    Attributes:
        layout: of the packed row, with the segment that pads it to a multiple.
        source: [N] index in the flattened [R, W] of each packed token.
        destination: [R * W] index in the packed row of each attended token; those of a shared prompt are the same for
            all of its rows.
        first_rows: the row of each group that its prompt and its images are taken from.
        ulysses: ranks that share the packed row; None if one rank has all of it.
    """

    layout: PackedLayout
    source: Tensor
    destination: Tensor
    first_rows: list[int]
    ulysses: UlyssesGroup | None


class _Segment(NamedTuple):
    """Columns `start` to `end` of a row; `prompt` is the number of the segment with its shared prompt, or None."""

    row: int
    start: int
    end: int
    prompt: int | None


def _pack(
    batch: Batch, rows: _PaddedRows, device: torch.device, *, share_prompts: bool, ulysses: UlyssesGroup | None
) -> _Packing:
    groups = shared_prompt_groups(batch) if share_prompts else [[row] for row in range(len(batch))]
    groups += [[row] for row in range(len(batch), len(rows.lengths))]  # the dummy sequence
    segments = _segments(groups, prompt_lengths(batch), rows.lengths)
    sizes = [segment.end - segment.start for segment in segments]
    starts = [0, *accumulate(sizes)][:-1]
    prefixes = [(0, 0) if one.prompt is None else (starts[one.prompt], sizes[one.prompt]) for one in segments]
    source, destination = _index_maps(segments, prefixes, rows.tokens.shape)
    if ulysses is not None and (fill := -len(source) % ulysses.size):
        starts, sizes, prefixes = [*starts, len(source)], [*sizes, fill], [*prefixes, (0, 0)]
    layout = PackedLayout(starts, sizes, prefixes, device)
    layout.ulysses = ulysses
    return _Packing(layout, source, destination, [group[0] for group in groups], ulysses)


def _segments(groups: Sequence[Sequence[int]], prompts: Sequence[int], lengths: Sequence[int]) -> list[_Segment]:
    """A segment for each single row; for a group of rows one for their prompt, then one for each response."""
    segments: list[_Segment] = []
    for group in groups:
        if len(group) == 1:
            segments.append(_Segment(group[0], 0, lengths[group[0]], None))
        else:
            prompt = len(segments)
            segments.append(_Segment(group[0], 0, prompts[group[0]], None))
            segments += [_Segment(row, prompts[row], lengths[row], prompt) for row in group]
    return segments


def _index_maps(
    segments: Sequence[_Segment], prefixes: Sequence[tuple[int, int]], shape: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """`source` and `destination` of a `_Packing`."""
    height, width = shape
    sizes = [one.end - one.start for one in segments]
    source = concatenated_ranges([one.row * width + one.start for one in segments], sizes)
    destination = torch.zeros(height * width, dtype=torch.long)
    destination[source] = torch.arange(len(source))
    prompt_starts, prompt_sizes = [start for start, _ in prefixes], [size for _, size in prefixes]
    prompt_columns = concatenated_ranges([one.row * width for one in segments], prompt_sizes)
    destination[prompt_columns] = concatenated_ranges(prompt_starts, prompt_sizes)
    return source, destination


def _packed_kwargs(rows: _PaddedRows, packing: _Packing, spec: Rope3DSpec | None) -> dict[str, Any]:
    source, first_rows, ulysses = packing.source, packing.first_rows, packing.ulysses
    fill = sum(packing.layout.lengths) - len(source)
    tokens = rows.tokens.flatten()[source]
    kwargs: dict[str, Any] = {
        "input_ids": torch.cat([tokens, _fill_token(rows).expand(fill)])[None],
        "position_ids": pad(rows.position_ids.flatten(-2)[..., source], (0, fill)).unsqueeze(-2),
        "packed_layout": packing.layout,
        **vision_kwargs(rows.tokens[first_rows], [rows.vision[row] for row in first_rows], spec),
    }
    if rows.routed_experts is not None:
        routed_experts = pad(rows.routed_experts[source], (0, 0, 0, 0, 0, fill), value=-1)
        if ulysses is not None:
            routed_experts = routed_experts.chunk(ulysses.size)[ulysses.rank]
        kwargs["routed_experts"] = routed_experts
    return kwargs
