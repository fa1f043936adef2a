"""The layout of a micro-batch, decided here and nowhere else: rows -> what the model's forward is given, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from rlkit.data.packing import unpad, unpad_like
from rlkit.data.samples import Batch, Sample, prompt
from rlkit.vlm.inputs import join_vision, position_ids
from rlkit.vlm.rope3d import ROPE3D_MODEL_TYPES, Rope3DSpec


@dataclass(frozen=True)
class ModelInputs:
    """A micro-batch as the model sees it.

    Attributes:
        kwargs: for the model's forward.
        keep: [K] positions, in the flattened layout, whose next token is trained on; K >= 1.
        targets: [K] those next tokens.
        slots: [K'] where the results go in a flattened [B, T]; K' is K, or 0 where `keep` is a stand-in.
        shape: (B, T).
    """

    kwargs: dict[str, Any]
    keep: Tensor
    targets: Tensor
    slots: Tensor
    shape: tuple[int, int]

    def scatter(self, values: Tensor) -> Tensor:
        """[K] per-token results -> [B, T], 0 elsewhere."""
        flat = values.new_zeros(self.shape[0] * self.shape[1])
        return flat.index_copy(0, self.slots, values[: len(self.slots)]).view(self.shape)


def pack(
    batch: Batch, spec: Rope3DSpec | None, device: torch.device, *, packed: bool = True, blank: Sample | None = None
) -> ModelInputs:
    """Lay rows end to end (or leave them padded) with position ids and their vision tensors.

    Args:
        batch: rows on the host.
        spec: of the model's position ids.
        packed: one row of N tokens without padding, else [B, T] with an attention mask.
        blank: a sequence put behind the rows of which nothing is kept: for a rank that has no rows, or no images while
            others have.
    """
    rows, columns = batch.tokens.shape
    width = columns
    tokens, lengths, vision = batch.tokens, batch.lengths, batch.vision
    if blank is not None:
        width = max(columns, len(blank.token_ids))
        tokens = tokens.new_zeros(rows + 1, width)
        tokens[:rows, :columns] = batch.tokens
        tokens[rows, : len(blank.token_ids)] = torch.tensor(blank.token_ids)
        lengths, vision = [*lengths, len(blank.token_ids)], [*vision, blank.vision]
    attended = torch.arange(width) < torch.tensor(lengths)[:, None]
    images = join_vision(vision)
    positions = position_ids(tokens, attended, images, spec)

    row, column = batch.mask[:, 1:].nonzero(as_tuple=True)  # column 0 has no token before it
    slots = row * columns + column + 1
    targets = batch.tokens[row, column + 1]
    if packed:
        ids = unpad(tokens, attended, lengths=lengths)
        keep = ids.cu_seqlens[row] + column
        kwargs = {
            "input_ids": ids.values[None],
            "position_ids": _packed_positions(positions, ids),
            "packed_cu_seqlens": ids.cu_seqlens,
            "packed_max_seqlen": ids.max_seqlen,
        }
    else:
        keep = row * width + column
        kwargs = {"input_ids": tokens, "position_ids": positions, "attention_mask": attended.long()}
    if not len(keep):
        keep, targets = torch.zeros(1, dtype=torch.long), tokens.new_zeros(1)
    if packed:
        kwargs["logits_to_keep"] = keep
    kwargs |= images
    moved = {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    return ModelInputs(moved, keep.to(device), targets.to(device), slots.to(device), (rows, columns))


def _packed_positions(positions: Tensor, ids: Any) -> Tensor:
    if positions.ndim == 2:
        return unpad_like(positions, ids)[None]
    return rearrange(unpad_like(rearrange(positions, "d b t -> b t d"), ids), "n d -> d 1 n")


def blank_sample(config: Any, *, image: bool) -> Sample:
    """The shortest sequence there is, with one blank image if asked for.

    Raises:
        ValueError: a blank image for a family whose image tensors are not known.
    """
    if not image:
        return prompt([0])
    if config.model_type not in ROPE3D_MODEL_TYPES:
        raise ValueError(
            f"{config.model_type}: some ranks have images and others have none, and no blank image is known for this "
            "family; give every rank rows with images"
        )
    vision = config.vision_config
    channels = getattr(vision, "in_channels", getattr(vision, "in_chans", 3))
    side = vision.spatial_merge_size
    pixels = torch.zeros(side * side, channels * vision.temporal_patch_size * vision.patch_size**2)
    grid = torch.tensor([[1, side, side]])
    return prompt([config.image_token_id], vision={"pixel_values": pixels, "image_grid_thw": grid})
