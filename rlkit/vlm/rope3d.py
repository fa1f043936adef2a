"""Position ids of M-RoPE (3D RoPE), the rotary embedding of most vision-language models, on three axes: time, height
and width.

The rule of Qwen2-VL (https://arxiv.org/abs/2409.12191, section 2.1, figure 3): a text token has the same id on all
three axes, one more than the largest id before it. Let an image or video be a grid of t frames of h x w merged patches
that starts at id s. Its token at frame f, row y, column x has the ids

    (s + floor(f * interval), s + y, s + x),

and the next token after the grid starts at s + max(h, w). Padding is skipped. The families differ as follows:

- Qwen2-VL, PaddleOCR-VL: interval = 1.
- Qwen2.5-VL (https://arxiv.org/abs/2502.13923, section 2.1.2), absolute time: interval = 1 for images, and
  tokens_per_second * second_per_grid_ts for videos.
- ERNIE 4.5 VL: interval = 1; the model merges `temporal_merge_size` frames of a video into one.
- Qwen3-VL, Qwen3.5, Qwen4 (experimental), Cohere Compass, Cosmos3: text timestamps stand between the frames of a video,
  so each frame is a grid of its own with t = 1.
- GLM-4V (4.1V, 4.5V, 4.6V, OCR): each frame is a grid of its own too, and consists of image placeholders. Image
  placeholders between the tokens that start and end a video belong to the video.
- Qwen2.5-Omni (https://arxiv.org/abs/2503.20215, TMRoPE) and Qwen3-Omni, the thinker: absolute time. The next token
  after a grid starts at s + max(h, w, largest time index + 1). An audio token counts as a text token, unless it belongs
  to a video, between its frames: audio token k of a video has id s + k on all axes, so that sound and frames share one
  clock. If the last token of such a video is audio, the next token starts one above it. The order of the tokens decides
  which audio belongs to a video. In Qwen2.5-Omni the two tokens before a video with audio share one id, and so do the
  two after it.

`rlkit.vlm.naive_rope3d` has this rule as plain loops. The functions here compute it with cumulative sums over tensors
of static shape: no loop over tokens, rows, images or frames, and no synchronisation with the accelerator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlkit.vlm.rope3d_sound import find_video_sound, repeats_previous_id

_ONE_GRID_A_VIDEO = ("qwen2_vl", "paddleocr_vl", "qwen2_5_vl", "ernie4_5_vl_moe")
_ONE_GRID_A_FRAME = (
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen4_exp",
    "cohere_compass",
    "cosmos3_edge",
    "cosmos3_omni",
)
_FRAMES_OF_IMAGE_TOKENS = ("glm4v", "glm4v_moe", "glm46v", "glm_ocr")
_OMNI = ("qwen2_5_omni", "qwen2_5_omni_thinker", "qwen3_omni_moe", "qwen3_omni_moe_thinker")
ROPE3D_MODEL_TYPES = (*_ONE_GRID_A_VIDEO, *_ONE_GRID_A_FRAME, *_FRAMES_OF_IMAGE_TOKENS, *_OMNI)
"""The `model_type`s that `rope3d_spec` supports."""

_TALKER = "a talker uses the position ids of its thinker; pass the thinker's configuration"
ROPE3D_REFUSED = {
    "hunyuan_vl": "its axes are width, height and image number, each from 0; not time, height and width",
    "minicpmv4_7": "the thumbnail and the slices of an image share one canvas, which image_grid_thw cannot express",
    "glm_image": "it generates images; its ids depend on the sizes of images that do not exist yet",
    "neomme": "an encoder with two axes, whose processor computes the ids",
    "colqwen2": "a retriever; pass its vlm_config",
    "qwen2_5_omni_talker": _TALKER,
    "qwen3_omni_moe_talker": _TALKER,
}
"""`model_type` -> why `rope3d_spec` refuses it: models with several axes whose position ids follow another rule."""


@dataclass(frozen=True)
class Rope3DSpec:
    """The facts of a model family that `rope3d_position_ids` needs.

    Args:
        image_token_id: id of the placeholder for one merged image patch.
        video_token_id: id of the placeholder for one merged video patch.
        vision_start_token_id: id of the token before each image, video or frame. Position ids do not depend on it.
        merge_size: the vision tower merges merge_size x merge_size patches into one token.
        tokens_per_second: ids per second on the time axis of a video. None: the family has no absolute time; the frames
            of a video are 1 apart, and `second_per_grid_ts` is ignored.
        framewise_video: each frame of a video is a grid of its own with t = 1 (Qwen3-VL). False: a video is one grid.
        advance_over_time: the next token after a grid starts at s + max(h, w, largest time index + 1), instead of
            s + max(h, w). False is the rule of transformers 5; True is that of vLLM, verl and transformers 4, and for
            Qwen-Omni that of transformers 5 too. The two differ only after a video whose last time index is at least
            max(h, w). Train with the rule that the sampler uses: for rollouts from vLLM
            `dataclasses.replace(spec, advance_over_time=True)`, with `second_per_grid_ts` a float64 tensor, because
            vLLM floors f * interval in float64.
        temporal_merge_size: the number of frames of a video that the model merges into one (ERNIE 4.5 VL).
        video_start_token_id, video_end_token_id: if set, image placeholders between these tokens are frames of a video,
            and `video_token_id` is unused (GLM-4V).
        audio_token_id: id of the placeholder for one audio feature (Qwen-Omni). If set, f * second_per_grid_ts is
            rounded to float32 before it is multiplied with tokens_per_second.
        shared_brackets: the two tokens before a video with audio share one id, and so do the two after it
            (Qwen2.5-Omni).
        whole_times: the model does not round time indices down (Qwen3-Omni); fractional ones are refused.
    """

    image_token_id: int
    video_token_id: int
    vision_start_token_id: int | None = None
    merge_size: int = 2
    tokens_per_second: float | None = None
    framewise_video: bool = False
    advance_over_time: bool = False
    temporal_merge_size: int = 1
    video_start_token_id: int | None = None
    video_end_token_id: int | None = None
    audio_token_id: int | None = None
    shared_brackets: bool = False
    whole_times: bool = False


def rope3d_spec(hf_config: Any) -> Rope3DSpec:
    """Reads a `Rope3DSpec` from a transformers configuration.

    Args:
        hf_config: the configuration of a whole model (not its `text_config`) with a `model_type` in
            `ROPE3D_MODEL_TYPES`; for Qwen-Omni also the configuration of the thinker.

    Returns:
        the spec, with transformers' rule for the ids after a video (`advance_over_time`).

    Raises:
        ValueError: the `model_type` is in `ROPE3D_REFUSED`, or not in `ROPE3D_MODEL_TYPES`.
    """
    model_type = getattr(hf_config, "model_type", None)
    if model_type in ROPE3D_REFUSED:
        raise ValueError(
            f"hf_config: expected a supported model_type, got {model_type!r}: {ROPE3D_REFUSED[model_type]}"
        )
    if model_type not in ROPE3D_MODEL_TYPES:
        raise ValueError(f"hf_config: expected a model_type of {', '.join(ROPE3D_MODEL_TYPES)}, got {model_type!r}")
    config = getattr(hf_config, "thinker_config", hf_config)
    vision = config.vision_config
    family: dict[str, Any] = {"framewise_video": model_type in _ONE_GRID_A_FRAME + _FRAMES_OF_IMAGE_TOKENS}
    if model_type == "qwen2_5_vl":
        family["tokens_per_second"] = vision.tokens_per_second
    elif model_type == "ernie4_5_vl_moe":
        family["temporal_merge_size"] = vision.temporal_merge_size
    elif model_type in _FRAMES_OF_IMAGE_TOKENS:
        family["video_start_token_id"] = config.video_start_token_id
        family["video_end_token_id"] = config.video_end_token_id
    elif model_type in _OMNI:
        family["tokens_per_second"] = config.position_id_per_seconds
        family["audio_token_id"] = config.audio_token_id
        family["advance_over_time"] = True
        family["whole_times"] = model_type.startswith("qwen3")
        family["shared_brackets"] = not family["whole_times"]
    return Rope3DSpec(
        image_token_id=config.image_token_id,
        video_token_id=config.video_token_id,
        vision_start_token_id=getattr(config, "vision_start_token_id", None),
        merge_size=vision.spatial_merge_size,
        **family,
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

    The rule is at the top of this module. The ids equal `get_rope_index` of transformers 5. Only attended tokens count,
    so padding may be on either side or in between. Beyond transformers, images may be adjacent without a token between
    them, and a row may have no attended token (ids 0, delta 0).

    Args:
        input_ids: integer [B, T], with one placeholder per merged patch.
        attention_mask: bool or integer [B, T], nonzero on attended tokens; None attends to all tokens.
        image_grid_thw: integer [images, 3], (t, h, w) in patches before merging, in the order of the attended
            placeholders over the batch, row by row. Leave out images whose placeholders are not attended.
        video_grid_thw: integer [videos, 3], likewise.
        second_per_grid_ts: [videos], seconds per step of the time axis; None means 1. As in transformers, a tensor is
            multiplied and floored in its own dtype, and a list of floats in float64 and then torch's default dtype; for
            Qwen-Omni (where it is called `video_second_per_grid`) both in float32.
        spec: the facts of the model family, from `rope3d_spec`.

    Returns:
        ids: int64 [3, B, T]; 0 where not attended.
        delta: int64 [B], largest id + 1 - number of attended tokens. A decoder adds it to the plain position of each
            new token.

    Raises:
        ValueError: a wrong shape or dtype; for Qwen3-Omni fractional time indices, or `second_per_grid_ts` that is not
            on the host. Only for tensors on the CPU (elsewhere the check would synchronise): a grid that the merge
            sizes do not divide, or placeholders that do not match the grids.
    """
    _check_tokens(input_ids, attention_mask)
    device = input_ids.device
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    attended = mask.to(device, torch.bool)
    is_image, is_video = _visual_placeholders(input_ids, attended, spec)
    images = _merged_grid("image_grid_thw", image_grid_thw, spec.merge_size, 1, device)
    videos = _merged_grid("video_grid_thw", video_grid_thw, spec.merge_size, spec.temporal_merge_size, device)
    intervals = _video_intervals(second_per_grid_ts, len(videos), spec, device)
    if device.type == "cpu":
        _check_placeholders("image", is_image, images)
        _check_placeholders("video", is_video, videos)

    grids = _grid_table(images, videos, intervals, spec)
    grid, index = _locate_in_grids(is_image, is_video, grids)
    offsets, starts_grid = _offsets(grid, index, attended, is_video, grids, spec)
    advance = grids.advance
    if spec.audio_token_id is not None and len(videos):
        is_audio = attended & (input_ids == spec.audio_token_id)
        sound = find_video_sound(is_audio, attended, is_video, grid, index, grids.tokens)
        grid = sound.grid
        offsets = torch.where(sound.is_sound, sound.place, offsets)
        advance = torch.where(sound.ends_grid, sound.audio_tokens, advance)
        starts_grid = starts_grid & ~sound.is_sound
        if spec.shared_brackets:
            is_text = attended & ~(is_image | is_video | sound.is_sound)
            has_sound = (is_video | sound.is_sound) & (sound.audio_tokens[grid] > 0)
            starts_grid = starts_grid & ~repeats_previous_id(attended, is_text, has_sound, has_sound & starts_grid)

    # a grid's first token adds its advance to the running sum, so the grid starts at the sum without its own advance
    start = (advance[grid] * starts_grid).cumsum(1) - advance[grid]
    ids = (start + offsets) * attended
    length = attended.sum(1)
    largest = ids.amax((0, 2)) if input_ids.shape[1] else length
    return ids, torch.where(length > 0, largest + 1 - length, 0)


def _visual_placeholders(input_ids: Tensor, attended: Tensor, spec: Rope3DSpec) -> tuple[Tensor, Tensor]:
    """Which tokens are image placeholders, and which are video placeholders: two bool [B, T]."""
    is_image = attended & (input_ids == spec.image_token_id)
    if spec.video_start_token_id is None:
        return is_image, attended & (input_ids == spec.video_token_id)
    opens = attended & (input_ids == spec.video_start_token_id)
    closes = attended & (input_ids == spec.video_end_token_id)
    is_video = is_image & ((opens.char() - closes.char()).cumsum(1, dtype=torch.int32) > 0)
    return is_image & ~is_video, is_video


class _Grids(NamedTuple):
    """All grids of a batch: images, then videos, and last one grid of 1 x 1 x 1 that stands for every text token.

    Each field but `images` has one number per grid, int32; `interval` in the dtype of the time computation.
    """

    h: Tensor
    w: Tensor
    interval: Tensor  # ids between two frames
    tokens: Tensor  # t * h * w
    advance: Tensor  # from the start of the grid to the start of the next token after it
    images: int  # number of images
    timed: bool  # some grid has another interval than 1


def _grid_table(images: Tensor, videos: Tensor, intervals: Tensor, spec: Rope3DSpec) -> _Grids:
    t, h, w = torch.cat([images, videos, images.new_ones(1, 3)]).unbind(1)
    interval = torch.cat([intervals.new_ones(len(images)), intervals, intervals.new_ones(1)])
    advance = torch.maximum(h, w)
    if spec.advance_over_time:
        advance = torch.maximum(advance, _time_index(t - 1, interval, spec) + 1)
    timed = spec.tokens_per_second is not None and (len(videos) > 0 or spec.audio_token_id is not None)
    return _Grids(h, w, interval, t * h * w, advance, len(images), timed)


def _locate_in_grids(is_image: Tensor, is_video: Tensor, grids: _Grids) -> tuple[Tensor, Tensor]:
    """The grid of each token, and the token's index in that grid, both [B, T]; text: the last grid, and 0.

    `seen` is the number of visual tokens up to and including this one, with all images before all videos. The token's
    grid is the first that ends at `seen` or later.
    """
    ends = grids.tokens[:-1].cumsum(0, dtype=torch.int32)
    starts = pad(ends, (1, 0))
    image_tokens = grids.tokens[: grids.images].sum(dtype=torch.int32)
    seen = torch.where(is_video, image_tokens + _count_so_far(is_video), _count_so_far(is_image))
    is_visual = is_image | is_video
    grid = torch.where(is_visual, torch.searchsorted(ends, seen), len(ends))
    index = torch.where(is_visual, seen - starts[grid] - 1, 0)
    return grid, index


def _count_so_far(mask: Tensor) -> Tensor:
    """int32 [B, T]: how many tokens are True up to and including this one, over all rows in their order."""
    return mask.flatten().cumsum(0, dtype=torch.int32).view(mask.shape)


def _offsets(
    grid: Tensor, index: Tensor, attended: Tensor, is_video: Tensor, grids: _Grids, spec: Rope3DSpec
) -> tuple[Tensor, Tensor]:
    """(time, y, x) of each token from the start of its grid, int64 [3, B, T]; and whether it is the first token there.

    With `framewise_video` each frame of a video counts as a grid of its own.
    """
    width, area = grids.w[grid], (grids.h * grids.w)[grid]
    frame, in_frame = index // area, index % area
    y, x = in_frame // width, in_frame % width
    starts_grid = attended & (index == 0)
    if spec.framewise_video:
        starts_grid = starts_grid | (is_video & (in_frame == 0))
        frame = torch.where(is_video, 0, frame)
    time = _time_index(frame, grids.interval[grid], spec) if grids.timed else frame
    return torch.stack([time, y, x]).long(), starts_grid


def _time_index(frame: Tensor, interval: Tensor, spec: Rope3DSpec) -> Tensor:
    """floor(frame * interval): the index on the time axis, from the start of the grid."""
    time = frame.to(interval.dtype) * interval
    if spec.audio_token_id is not None and spec.tokens_per_second is not None:
        time = time * spec.tokens_per_second
    return time.int()


def _is_integer(x: Any) -> bool:
    return isinstance(x, Tensor) and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _describe(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


def _check_tokens(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    if not _is_integer(input_ids) or input_ids.ndim != 2:
        raise ValueError(f"input_ids: expected integer [B, T], got {_describe(input_ids)}")
    if attention_mask is None:
        return
    if not isinstance(attention_mask, Tensor):
        raise ValueError(f"attention_mask: expected a tensor or None, got {_describe(attention_mask)}")
    if attention_mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask: expected {list(input_ids.shape)}, got {list(attention_mask.shape)}")
    if attention_mask.dtype != torch.bool and not _is_integer(attention_mask):
        raise ValueError(f"attention_mask: expected bool or integer, got {attention_mask.dtype}")


def _merged_grid(
    name: str, grid: Tensor | None, merge_size: int, temporal_merge_size: int, device: torch.device
) -> Tensor:
    """[n, 3] patches -> int32 [n, 3] tokens, on `device`; None -> [0, 3]."""
    if grid is None:
        return torch.empty(0, 3, dtype=torch.int32, device=device)
    if not _is_integer(grid) or grid.ndim != 2 or grid.shape[1] != 3:
        raise ValueError(f"{name}: expected integer [n, 3] (t, h, w), got {_describe(grid)}")
    if grid.device.type == "cpu" and bool((grid[:, 1:] % merge_size != 0).any()):
        row = next(row for row in grid.tolist() if row[1] % merge_size or row[2] % merge_size)
        raise ValueError(f"{name}: expected h and w that merge_size {merge_size} divides, got (t, h, w) = {tuple(row)}")
    if grid.device.type == "cpu" and bool((grid[:, 0] % temporal_merge_size != 0).any()):
        row = next(row for row in grid.tolist() if row[0] % temporal_merge_size)
        raise ValueError(
            f"{name}: expected t that temporal_merge_size {temporal_merge_size} divides, got (t, h, w) = {tuple(row)}"
        )
    grid = grid.to(device, torch.int32, non_blocking=True)
    return torch.cat([grid[:, :1] // temporal_merge_size, grid[:, 1:] // merge_size], dim=1)


def _video_intervals(
    seconds: Tensor | Sequence[float] | None, videos: int, spec: Rope3DSpec, device: torch.device
) -> Tensor:
    """[videos] what the index of a frame is multiplied with, in the dtype that transformers uses; see `_time_index`."""
    if seconds is not None:
        shape = list(seconds.shape) if isinstance(seconds, Tensor) else [len(seconds)]
        if shape != [videos]:
            raise ValueError(f"second_per_grid_ts: expected [{videos}], one per row of video_grid_thw, got {shape}")
    one = torch.ones(videos, dtype=torch.long, device=device)
    if spec.framewise_video or spec.tokens_per_second is None:
        return one * (not spec.framewise_video)
    if spec.audio_token_id is not None:
        if seconds is None:
            return one.float()
        if spec.whole_times:
            _check_whole(seconds, spec.tokens_per_second)
        return torch.as_tensor(seconds, dtype=torch.float32).to(device, non_blocking=True)
    if seconds is None:
        return one * spec.tokens_per_second
    if isinstance(seconds, Tensor):
        return seconds.to(device, non_blocking=True) * spec.tokens_per_second
    product = torch.tensor(seconds, dtype=torch.float64) * spec.tokens_per_second
    return product.to(device, torch.get_default_dtype(), non_blocking=True)


def _check_whole(seconds: Tensor | Sequence[float], tokens_per_second: float) -> None:
    """Refuse fractional time indices: Qwen3-Omni does not round them down, and position ids here are integers."""
    if isinstance(seconds, Tensor) and seconds.device.type != "cpu":
        raise ValueError(
            "second_per_grid_ts: expected floats or a tensor on the CPU (Qwen3-Omni needs a check for fractional time "
            f"indices), got one on {seconds.device}"
        )
    second = torch.as_tensor(seconds, dtype=torch.float32).double()
    fractional = second * tokens_per_second % 1 != 0
    if bool(fractional.any()):
        video = int(fractional.int().argmax())
        raise ValueError(
            f"second_per_grid_ts: expected seconds that times {tokens_per_second} ids a second are whole numbers "
            f"(Qwen3-Omni does not round time indices), got {float(second[video]):g} s in video {video}"
        )


def _check_placeholders(kind: str, placeholder: Tensor, grids: Tensor) -> None:
    """Every grid has all its tokens, within one row."""
    ends = pad(grids.prod(1).cumsum(0), (1, 0))
    in_row = placeholder.sum(1)
    row_ends = in_row.cumsum(0)
    tokens_of_grids, tokens_of_rows = int(ends[-1]), int(in_row.sum())
    if tokens_of_rows != tokens_of_grids:
        raise ValueError(
            f"input_ids: expected {tokens_of_grids} attended {kind} tokens for the {len(grids)} grids of "
            f"{kind}_grid_thw, got {tokens_of_rows}"
        )
    straddles = ends[torch.searchsorted(ends, row_ends)] != row_ends
    if bool(straddles.any()):
        row = int(straddles.int().argmax())
        raise ValueError(
            f"{kind}_grid_thw: expected every grid within one row, got a grid that begins in row {row} of input_ids "
            f"({int(in_row[row])} attended {kind} tokens there) and continues in a later row"
        )
