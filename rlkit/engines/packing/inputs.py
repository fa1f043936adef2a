"""The layout of a micro-batch, decided here and nowhere else: rows -> what the model's forward is given, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlkit.data.packing import concatenated_ranges
from rlkit.data.samples import Batch, Sample, prompt
from rlkit.engines.packing.attention import Layout
from rlkit.engines.packing.ulysses import Ulysses
from rlkit.vlm.families import IMAGES_OF_A_SAMPLE, IN_PATCHES, tokens_of_fixed_size_image
from rlkit.vlm.inputs import PIXELS, TIMES, model_vision, position_ids
from rlkit.vlm.rope3d import Rope3DSpec, rope3d_spec


@dataclass(frozen=True)
class ModelInputs:
    """A micro-batch as the model sees it.

    Attributes:
        kwargs: for the model's forward.
        keep: [K] positions, in the flattened layout, whose next token is trained on; K >= 1.
        targets: [K] those next tokens.
        slots: [K'] where the results go in a flattened [B, T]; K' is K, or 0 where `keep` is a stand-in.
        shape: (B, T).
        counts: how many of `slots` each rank of a Ulysses group works out, in order; `keep` and `targets` are then this
            rank's alone, and `keep` counts from the beginning of its part.
    """

    kwargs: dict[str, Any]
    keep: Tensor
    targets: Tensor
    slots: Tensor
    shape: tuple[int, int]
    counts: Sequence[int] = ()

    def kept(self, x: Tensor) -> Tensor:
        """[K, ...] at `keep` of what a forward gave: all of [B, T, ...], or what it was asked for, [1, K, ...]; some
        models do not know `logits_to_keep`."""
        x = x.flatten(0, 1)
        return x if len(x) == len(self.keep) else x[self.keep]

    def scatter(self, values: Tensor) -> Tensor:
        """[K] per-token results -> [B, T], 0 elsewhere."""
        flat = values.new_zeros(self.shape[0] * self.shape[1])
        return flat.index_copy(0, self.slots, values[: len(self.slots)]).view(self.shape)


def pack(
    batch: Batch,
    spec: Rope3DSpec | None,
    device: torch.device,
    *,
    packed: bool = True,
    share_prompts: bool = True,
    blank: Sample | None = None,
    ulysses: Ulysses | None = None,
    router_replay: bool = False,
) -> ModelInputs:
    """Lay rows end to end (or leave them padded) with position ids and their vision tensors.

    Args:
        batch: rows on the host.
        spec: of the model's position ids.
        packed: one row of N tokens without padding, else [B, T] with an attention mask.
        share_prompts: rows that answer the same prompt hold its tokens and images once; needs `packed`.
        blank: a sequence put behind the rows of which nothing is kept: for a rank that has no rows, or no images or no
            videos while others have.
        ulysses: the ranks that share the packed row, which is filled up to as many tokens for each of them.
        router_replay: hand the rows' `routed_experts`, if they have them, to the model.
    """
    rows, columns = batch.tokens.shape
    tokens, lengths, vision = batch.tokens, batch.lengths, batch.vision
    if blank is not None:
        tokens = tokens.new_zeros(rows + 1, max(columns, len(blank.token_ids)))
        tokens[:rows, :columns] = batch.tokens
        tokens[rows, : len(blank.token_ids)] = torch.tensor(blank.token_ids)
        lengths, vision = [*lengths, len(blank.token_ids)], [*vision, blank.vision]
    attended = torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]
    positions = position_ids(tokens, attended, vision, spec)

    row, column = batch.mask[:, 1:].nonzero(as_tuple=True)  # column 0 has no token before it
    slots, targets = row * columns + column + 1, batch.tokens[row, column + 1]
    keep = row * tokens.shape[1] + column
    counts: list[int] = []
    routing: Tensor | None = None
    if router_replay and "routed_experts" in batch.fields:  # of each token of the rows, and of the blank one
        more = (0, tokens.shape[1] - columns, 0, len(lengths) - rows)
        routing = pad(batch.routed_experts, (0, 0, 0, 0, *more), value=-1).flatten(0, 1)
    if packed:
        groups = shared_prompts(batch) if share_prompts else [[i] for i in range(rows)]
        groups += [[i] for i in range(rows, len(lengths))]
        prompts = prompt_lengths(batch) + [0] * (len(lengths) - rows)
        parts = 1 if ulysses is None else ulysses.size
        layout, source, place = lay_out(groups, prompts, lengths, tokens.shape[1], device, parts)
        heads = [group[0] for group in groups]
        keep, fill = place[keep], (0, sum(layout.lengths) - len(source))
        routing = None if routing is None else pad(routing[source], (0, 0, 0, 0, *fill), value=-1)
        if ulysses is not None:
            layout.ulysses, size = ulysses, sum(layout.lengths) // parts
            order = (keep // size).argsort(stable=True)
            slots, counts = slots[order], (keep // size).bincount(minlength=parts).tolist()
            mine = order.split(counts)[ulysses.rank]
            keep, targets = keep[mine] % size, targets[mine]
            routing = None if routing is None else routing.split(size)[ulysses.rank]
        kwargs: dict[str, Any] = {
            "input_ids": pad(tokens.flatten()[source], fill)[None],
            "position_ids": pad(positions.flatten(-2)[..., source], fill).unsqueeze(-2),
            "packed_layout": layout,
            **model_vision(tokens[heads], [vision[i] for i in heads], spec),
        }
    else:
        mask = attended.long()
        kwargs = {"input_ids": tokens, "position_ids": positions, "attention_mask": mask}
        kwargs |= model_vision(tokens, vision, spec)
    if not len(keep):
        keep, targets = torch.zeros(1, dtype=torch.long), tokens.new_zeros(1)
    if packed:
        kwargs["logits_to_keep"] = keep
    if routing is not None:
        kwargs["routed_experts"] = routing
    moved = {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    return ModelInputs(moved, keep.to(device), targets.to(device), slots.to(device), (rows, columns), counts)


def prompt_lengths(batch: Batch) -> list[int]:
    """Tokens of each row before the first that is trained on; all of them where there is none."""
    written = batch.mask.int()
    first = torch.where(batch.mask.any(1), written.argmax(1) if written.shape[1] else 0, torch.tensor(batch.lengths))
    return first.tolist()


def shared_prompts(batch: Batch) -> list[list[int]]:
    """Rows in groups of one prompt: the same tokens, to the same experts, and the very same vision tensors, before what
    was sampled.

    A row with images and an observation behind its prompt stands alone: some of its images may be the observation's.
    """
    groups: dict[Any, list[int]] = {}
    for i, length in enumerate(prompt_lengths(batch)):
        images = tuple((name, id(tensor)) for name, tensor in batch.vision[i].items())
        shares = 0 < length < batch.lengths[i] and not (images and _observes(batch, i, length))
        parts = [batch.tokens, *([batch.routed_experts] if "routed_experts" in batch.fields else [])]
        same = tuple(part[i, :length].contiguous().numpy().tobytes() for part in parts)
        groups.setdefault((same, images) if shares else i, []).append(i)
    return list(groups.values())


def _observes(batch: Batch, row: int, prompt: int) -> bool:
    return not batch.mask[row, prompt : batch.lengths[row]].all()


def lay_out(
    groups: Sequence[Sequence[int]], prompts: Sequence[int], lengths: Sequence[int], width: int, device: torch.device,
    multiple: int = 1,
) -> tuple[Layout, Tensor, Tensor]:  # fmt: skip
    """Segments end to end: a row alone is one; rows of a group are their prompt, and then what each adds to it. A last
    one fills up to a multiple of so many tokens.

    Returns:
        The layout; `source` [N], where each packed token stands in the flattened [B, width]; and `place` [B * width],
        the inverse (where each attended token of the rows went).
    """
    pieces: list[tuple[int, int, int]] = []  # row, first column, end
    heads: list[int | None] = []  # the piece that holds a piece's prompt
    for group in groups:
        if len(group) == 1:
            pieces.append((group[0], 0, lengths[group[0]]))
            heads.append(None)
            continue
        head = len(pieces)
        pieces += [(group[0], 0, prompts[group[0]]), *((i, prompts[i], lengths[i]) for i in group)]
        heads += [None, *[head] * len(group)]
    sizes = [end - first for _, first, end in pieces]
    starts = [0, *accumulate(sizes)][:-1]
    prefixes = [(0, 0) if head is None else (starts[head], sizes[head]) for head in heads]
    source = concatenated_ranges([row * width + first for row, first, _ in pieces], sizes)
    place = torch.zeros(len(lengths) * width, dtype=torch.long)
    place[source] = torch.arange(len(source))
    begins, before = zip(*prefixes, strict=True)
    place[concatenated_ranges([row * width for row, _, _ in pieces], before)] = concatenated_ranges(begins, before)
    if short := -len(source) % multiple:
        starts, sizes, prefixes = [*starts, len(source)], [*sizes, short], [*prefixes, (0, 0)]
    return Layout(starts, sizes, prefixes, device), source, place


def shared_costs(batch: Batch) -> tuple[list[int], list[int]]:
    """For each row the tokens it adds to a micro-batch that holds its whole group, and the number of that group."""
    cost, number, prompts = list(batch.lengths), [0] * len(batch), prompt_lengths(batch)
    for k, group in enumerate(shared_prompts(batch)):
        for i in group:
            number[i] = k
            cost[i] -= prompts[i] if i != group[0] else 0
    return cost, number


def blank_sample(config: Any, *, image: bool, video: bool = False) -> Sample:
    """The shortest sequence there is, with one blank image, and one blank video, if asked for.

    Raises:
        ValueError: a blank image for a family whose image tensors are not known.
    """
    if not image and not video:
        return prompt([0])
    vision, tensors = config.vision_config, dict[str, Tensor]()
    if config.model_type in IN_PATCHES:
        channels = getattr(vision, "in_channels", getattr(vision, "in_chans", 3))
        side, kinds = vision.spatial_merge_size, ["image"] * image + ["video"] * video
        for kind in kinds:
            tensors[PIXELS[kind]] = torch.zeros(side**2, channels * vision.temporal_patch_size * vision.patch_size**2)
            tensors[f"{kind}_grid_thw"] = torch.tensor([[1, side, side]])
        if video and (spec := rope3d_spec(config)).tokens_per_second is not None:
            tensors[TIMES[spec.audio_token_id is not None]] = torch.ones(1)
        return prompt([getattr(config, f"{kind}_token_id") for kind in kinds], vision=tensors)
    if count := tokens_of_fixed_size_image(config):
        size = vision.image_size if isinstance(vision.image_size, Sequence) else [vision.image_size] * 2
        pixels = torch.ones(1, vision.num_channels, *size)  # images of zeros are left out
        tensors["pixel_values"] = pixels[None] if config.model_type in IMAGES_OF_A_SAMPLE else pixels
    else:
        raise ValueError(
            f"{config.model_type}: some ranks have images and others have none, and no blank image is known for this "
            "family; give every rank rows with images"
        )
    return prompt([config.image_token_id] * count, vision=tensors)
