"""Position ids of M-RoPE, the rotary embedding of the Qwen vision-language models: a time, a height and a width axis.

The rule, of Qwen2-VL (https://arxiv.org/abs/2409.12191, section 2.1, figure 3): an attended text token has the same id
on all three axes, one more than everything that went before it. A visual token at frame f, row y, column x of a grid of
t frames of h x w merged patches, with s the id at which the grid starts, has

    (s + floor(f * interval), s + y, s + x),        and what follows the grid starts at s + max(h, w).

- Qwen2-VL: interval = 1.
- Qwen2.5-VL (https://arxiv.org/abs/2502.13923, section 2.1.2), absolute time: on videos
  interval = tokens_per_second * second_per_grid_ts, on images 1.
- Qwen3-VL and Qwen3.5: timestamps are text between the frames of a video, so each frame is a grid of its own, of t = 1.

All of it is a few cumulative sums over static shapes. There is no loop over tokens, rows, images or frames, and nothing
waits for the accelerator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

# model_type -> are the frames of a video laid out one by one, with text between them?
_FRAMEWISE = {
    "qwen2_vl": False,
    "qwen2_5_vl": False,
    "qwen3_vl": True,
    "qwen3_vl_moe": True,
    "qwen3_5": True,
    "qwen3_5_moe": True,
}
ROPE3D_MODEL_TYPES = tuple(_FRAMEWISE)
"""The `model_type`s that `rope3d_spec` knows."""


@dataclass(frozen=True)
class Rope3DSpec:
    """What `rope3d_position_ids` has to know about a model family.

    Args:
        image_token_id: id of the placeholder that stands for one merged image patch.
        video_token_id: id of the placeholder that stands for one merged video patch.
        vision_start_token_id: id of the token before each image, video or frame. The positions do not depend on it.
        merge_size: side of the square of patches that the vision tower merges into one token.
        tokens_per_second: ids per second on the time axis of a video; None for a family without absolute time, in
            which the frames of a video are 1 apart and `second_per_grid_ts` is ignored.
        framewise_video: each frame of a video starts anew, as a grid of t = 1 (Qwen3-VL), instead of the whole video
            being one grid.
        advance_over_time: what follows a grid starts at s + max(h, w, largest time index + 1), so above every id of the
            grid, instead of at s + max(h, w). False is transformers 5, True is vLLM, verl and transformers 4. They
            differ only after a video that lasts for more ids than it is wide. Train as you sample:
            `dataclasses.replace(spec, advance_over_time=True)` for rollouts from vLLM, with `second_per_grid_ts` a
            float64 tensor, because vLLM floors f * interval in float64.
    """

    image_token_id: int
    video_token_id: int
    vision_start_token_id: int | None = None
    merge_size: int = 2
    tokens_per_second: float | None = None
    framewise_video: bool = False
    advance_over_time: bool = False


def rope3d_spec(hf_config: Any) -> Rope3DSpec:
    """Reads a `Rope3DSpec` from the attributes of a transformers configuration.

    Args:
        hf_config: the configuration of a whole model (not its `text_config`): Qwen2-VL, Qwen2.5-VL, Qwen3-VL and
            Qwen3.5, dense or mixture of experts.

    Returns:
        the spec, with transformers' own rule for what follows a video.

    Raises:
        ValueError: the `model_type` is not in `ROPE3D_MODEL_TYPES`.
    """
    model_type = getattr(hf_config, "model_type", None)
    if model_type not in _FRAMEWISE:
        known = ", ".join(ROPE3D_MODEL_TYPES)
        raise ValueError(f"hf_config: no 3D RoPE rule for model_type {model_type!r}; known are {known}")
    vision = hf_config.vision_config
    return Rope3DSpec(
        image_token_id=hf_config.image_token_id,
        video_token_id=hf_config.video_token_id,
        vision_start_token_id=getattr(hf_config, "vision_start_token_id", None),
        merge_size=vision.spatial_merge_size,
        tokens_per_second=vision.tokens_per_second if model_type == "qwen2_5_vl" else None,
        framewise_video=_FRAMEWISE[model_type],
    )


def rope3d_position_ids(
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    image_grid_thw: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    second_per_grid_ts: Tensor | Sequence[float] | None = None,
    spec: Rope3DSpec,
) -> tuple[Tensor, Tensor]:
    """Time, height and width position ids of a batch of rows with text, images and videos.

    The formula is at the head of this module. The ids equal `get_rope_index` of transformers 5. They follow the order
    of the attended tokens alone, so padding may be on either side, or in between. Two things transformers cannot do:
    images may be adjacent without a token between them, and a row may have no attended token (ids 0, delta 0).

    Args:
        input_ids: integer [B, T], with one placeholder a merged patch (the expanded form).
        attention_mask: bool or integer [B, T], nonzero on the attended tokens; None attends to everything.
        image_grid_thw: integer [images, 3], patches before merging (t, h, w), in the order of the attended placeholders
            over the batch, row by row. An image whose placeholders are not attended has no place in it.
        video_grid_thw: integer [videos, 3], likewise.
        second_per_grid_ts: [videos], seconds a step of the time axis; None is 1 second. A tensor is multiplied and
            floored in its own dtype, a list of floats in float64 and then torch's default dtype, as transformers does.
        spec: the facts of the model family, from `rope3d_spec`.

    Returns:
        ids: int64 [3, B, T]; 0 where not attended.
        delta: int64 [B], the largest id + 1 - the number of attended tokens: what a decoder adds to the plain position
            of each further token.

    Raises:
        ValueError: a wrong shape or dtype; where the tensors are on the CPU (elsewhere it would cost a synchronisation)
            also a grid that `merge_size` does not divide, and placeholders that do not match the grids.
    """
    _check_tokens(input_ids, attention_mask)
    device, shape = input_ids.device, input_ids.shape
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    keep = mask.to(device, torch.bool)
    is_image, is_video = keep & (input_ids == spec.image_token_id), keep & (input_ids == spec.video_token_id)
    images = _merged_grid("image_grid_thw", image_grid_thw, spec.merge_size, device)
    videos = _merged_grid("video_grid_thw", video_grid_thw, spec.merge_size, device)
    seconds = _video_interval(second_per_grid_ts, len(videos), spec, device)
    if device.type == "cpu":
        _check_placeholders("image", is_image, images)
        _check_placeholders("video", is_video, videos)

    # One table of grids: images, videos, and in the last row text, as a grid of 1 x 1 x 1.
    grids = torch.cat([images, videos, images.new_ones(1, 3)])
    t, h, w = grids.unbind(1)
    interval = torch.cat([seconds.new_ones(len(images)), seconds, seconds.new_ones(1)])
    advance = torch.maximum(h, w)
    if spec.advance_over_time:
        advance = torch.maximum(advance, ((t - 1).to(interval.dtype) * interval).long() + 1)
    tokens = grids[:-1].prod(1)
    ends = tokens.cumsum(0)
    starts = pad(ends, (1, 0))

    # The grid of each of the B * T tokens and its place j there: its rank among its kind, searched in the token counts.
    attended, image, video = keep.flatten(), is_image.flatten(), is_video.flatten()
    rank = torch.where(video, tokens[: len(images)].sum() + video.cumsum(0), image.cumsum(0)) - 1
    text = len(grids) - 1
    grid = torch.searchsorted(ends, rank, right=True).masked_fill(~(image | video), text)
    j = torch.where(grid < text, rank - starts.index_select(0, grid), 0)
    width, area = w.index_select(0, grid), (h * w).index_select(0, grid)
    frame = j // area
    j_in_frame = j - frame * area
    y = j_in_frame // width
    x = j_in_frame - y * width
    time = (frame.to(interval.dtype) * interval.index_select(0, grid)).long()

    # The first token of a grid moves its row on by the whole grid's advance; its tokens take that back.
    first = attended & ((j == 0) | (video & (j_in_frame == 0)) if spec.framewise_video else j == 0)
    advance = advance.index_select(0, grid)
    base = torch.where(first, advance, 0).view(shape).cumsum(1).flatten() - advance
    ids = torch.stack([base + time, base + y, base + x]).mul_(attended).view(3, *shape)
    length = keep.sum(1)
    largest = ids.amax((0, 2)) if shape[1] else length
    return ids, torch.where(length > 0, largest + 1 - length, 0)


def _is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _check_tokens(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    if input_ids.ndim != 2 or not _is_integer(input_ids):
        raise ValueError(f"input_ids: expected integer [B, T], got {input_ids.dtype} {list(input_ids.shape)}")
    if attention_mask is None:
        return
    if attention_mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask: expected {list(input_ids.shape)}, got {list(attention_mask.shape)}")
    if attention_mask.dtype != torch.bool and not _is_integer(attention_mask):
        raise ValueError(f"attention_mask: expected bool or integer, got {attention_mask.dtype}")


def _merged_grid(name: str, grid: Tensor | None, merge_size: int, device: torch.device) -> Tensor:
    """[n, 3] patches -> int64 [n, 3] tokens, on `device`; None -> [0, 3]."""
    if grid is None:
        return torch.empty(0, 3, dtype=torch.long, device=device)
    if grid.ndim != 2 or grid.shape[1] != 3 or not _is_integer(grid):
        raise ValueError(f"{name}: expected integer [n, 3] (t, h, w), got {grid.dtype} {list(grid.shape)}")
    if grid.device.type == "cpu" and bool((grid[:, 1:] % merge_size != 0).any()):
        bad = next(row for row in grid.tolist() if row[1] % merge_size or row[2] % merge_size)
        raise ValueError(f"{name}: expected h and w that merge_size {merge_size} divides, got (t, h, w) = {tuple(bad)}")
    grid = grid.to(device, torch.long, non_blocking=True)
    return torch.cat([grid[:, :1], grid[:, 1:] // merge_size], dim=1)


def _video_interval(
    seconds: Tensor | Sequence[float] | None, videos: int, spec: Rope3DSpec, device: torch.device
) -> Tensor:
    """[videos] ids between two frames, in the dtype in which transformers multiplies a frame index with it."""
    if seconds is not None:
        shape = list(seconds.shape) if isinstance(seconds, Tensor) else [len(seconds)]
        if shape != [videos]:
            raise ValueError(f"second_per_grid_ts: expected [{videos}], one a row of video_grid_thw, got {shape}")
    one = torch.ones(videos, dtype=torch.long, device=device)
    if spec.framewise_video or spec.tokens_per_second is None:
        return one * (not spec.framewise_video)
    if seconds is None:
        return one * spec.tokens_per_second
    if isinstance(seconds, Tensor):
        return seconds.to(device, non_blocking=True) * spec.tokens_per_second
    product = torch.tensor(seconds, dtype=torch.float64) * spec.tokens_per_second
    return product.to(device, torch.get_default_dtype(), non_blocking=True)


def _check_placeholders(kind: str, placeholder: Tensor, grids: Tensor) -> None:
    """Every grid has all its tokens, within one row."""
    ends = grids.prod(1).cumsum(0)
    expected, got = int(ends[-1]) if len(ends) else 0, int(placeholder.sum())
    if got != expected:
        raise ValueError(
            f"{kind}_grid_thw: its {len(grids)} grids stand for {expected} tokens, "
            f"but input_ids has {got} attended {kind} tokens"
        )
    row_ends = placeholder.sum(1).cumsum(0)
    straddles = ~torch.isin(row_ends, pad(ends, (1, 0)))
    if bool(straddles.any()):
        row = int(straddles.int().argmax())
        raise ValueError(
            f"{kind}_grid_thw: expected every grid within one row, got a grid that begins in row {row} of input_ids "
            f"({int(placeholder[row].sum())} attended {kind} tokens there) and goes on in a later row"
        )
