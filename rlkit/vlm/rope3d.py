"""Position ids of M-RoPE, the rotary embedding of most vision-language models: a time, a height and a width axis.

The rule, of Qwen2-VL (https://arxiv.org/abs/2409.12191, section 2.1, figure 3): an attended text token has the same id
on all three axes, one more than everything that went before it. A visual token at frame f, row y, column x of a grid of
t frames of h x w merged patches, with s the id at which the grid starts, has

    (s + floor(f * interval), s + y, s + x),        and what follows the grid starts at s + max(h, w).

- Qwen2-VL, PaddleOCR-VL: interval = 1.
- Qwen2.5-VL (https://arxiv.org/abs/2502.13923, section 2.1.2), absolute time: on videos
  interval = tokens_per_second * second_per_grid_ts, on images 1.
- ERNIE 4.5 VL: interval = 1, and `temporal_merge_size` frames of a video become one.
- Qwen3-VL, Qwen3.5, Qwen4 (experimental), Cohere Compass, Cosmos3: timestamps are text between the frames of a video,
  so each frame is a grid of its own, of t = 1.
- GLM-4V (4.1V, 4.5V, 4.6V, OCR): likewise, but a frame is made of image placeholders; those between the tokens that
  start and end a video are the video's.
- Qwen2.5-Omni (https://arxiv.org/abs/2503.20215, TMRoPE) and Qwen3-Omni, the thinker: absolute time; what follows a
  grid starts at s + max(h, w, largest time index + 1); a piece of sound is like a text token. With the sound of a video
  between its frames, piece k of the sound is at s + k on all axes, so that both tell the same time, and what follows
  starts one above the last token of the two; the order of the tokens says which piece is where. In Qwen2.5-Omni the two
  tokens before such a video share one id, and so do the two after it.

All of it is a few cumulative sums over static shapes. There is no loop over tokens, rows, images or frames, and nothing
waits for the accelerator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

_WHOLE = ("qwen2_vl", "paddleocr_vl", "qwen2_5_vl", "ernie4_5_vl_moe")  # a video is one grid
_FRAMES = (
    "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "cohere_compass", "cosmos3_edge", "cosmos3_omni",
)  # fmt: skip
_BRACKETS = ("glm4v", "glm4v_moe", "glm46v", "glm_ocr")  # frames, of image placeholders
_OMNI = ("qwen2_5_omni", "qwen2_5_omni_thinker", "qwen3_omni_moe", "qwen3_omni_moe_thinker")
ROPE3D_MODEL_TYPES = (*_WHOLE, *_FRAMES, *_BRACKETS, *_OMNI)
"""The `model_type`s that `rope3d_spec` knows."""

_TALKER = "a talker's ids are those of the thinker that it speaks for; pass the thinker's configuration"
ROPE3D_REFUSED = {
    "hunyuan_vl": "its axes are width, height and number of the image, each from 0; not time, height and width",
    "minicpmv4_7": "the thumbnail and the slices of an image share one canvas, which image_grid_thw cannot say",
    "glm_image": "it draws; its ids depend on the sizes of images that are not yet there",
    "neomme": "an encoder with two axes, whose processor makes the ids",
    "colqwen2": "a retriever; pass its vlm_config",
    "qwen2_5_omni_talker": _TALKER,
    "qwen3_omni_moe_talker": _TALKER,
}
"""`model_type` -> why `rope3d_spec` refuses it: models with several axes whose ids are made by another rule."""


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
            float64 tensor, because vLLM floors f * interval in float64. True is also transformers 5 for Qwen-Omni.
        temporal_merge_size: frames of a video that the model merges into one (ERNIE 4.5 VL).
        video_start_token_id, video_end_token_id: not None: between these tokens image placeholders stand for frames of
            a video, and `video_token_id` stands for nothing (GLM-4V).
        audio_token_id: id of the placeholder for a piece of sound (Qwen-Omni). With it f * second_per_grid_ts is
            rounded to float32 before it is multiplied with tokens_per_second.
        shared_brackets: the two tokens that start a video with sound have one id, and so have the two that end it
            (Qwen2.5-Omni).
        whole_times: the model does not round times down (Qwen3-Omni); those that are not whole are refused.
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
    """Reads a `Rope3DSpec` from the attributes of a transformers configuration.

    Args:
        hf_config: the configuration of a whole model (not its `text_config`), of a type in `ROPE3D_MODEL_TYPES`; of
            Qwen-Omni also that of the thinker alone.

    Returns:
        the spec, with transformers' own rule for what follows a video.

    Raises:
        ValueError: the `model_type` is in `ROPE3D_REFUSED`, or not in `ROPE3D_MODEL_TYPES`.
    """
    model_type = getattr(hf_config, "model_type", None)
    if model_type in ROPE3D_REFUSED:
        raise ValueError(f"hf_config: model_type {model_type!r} is not supported: {ROPE3D_REFUSED[model_type]}")
    if model_type not in ROPE3D_MODEL_TYPES:
        known = ", ".join(ROPE3D_MODEL_TYPES)
        raise ValueError(f"hf_config: no 3D RoPE rule for model_type {model_type!r}; known are {known}")
    config = getattr(hf_config, "thinker_config", hf_config)
    vision = config.vision_config
    rules: dict[str, Any] = {"framewise_video": model_type in _FRAMES + _BRACKETS}
    if model_type == "qwen2_5_vl":
        rules["tokens_per_second"] = vision.tokens_per_second
    elif model_type == "ernie4_5_vl_moe":
        rules["temporal_merge_size"] = vision.temporal_merge_size
    elif model_type in _BRACKETS:
        rules |= {name: getattr(config, name) for name in ("video_start_token_id", "video_end_token_id")}
    elif model_type in _OMNI:
        rules |= {"tokens_per_second": config.position_id_per_seconds, "audio_token_id": config.audio_token_id}
        rules["advance_over_time"] = True
        rules["whole_times" if model_type.startswith("qwen3") else "shared_brackets"] = True
    return Rope3DSpec(
        image_token_id=config.image_token_id,
        video_token_id=config.video_token_id,
        vision_start_token_id=getattr(config, "vision_start_token_id", None),
        merge_size=vision.spatial_merge_size,
        **rules,
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
            floored in its own dtype, a list of floats in float64 and then torch's default dtype, as transformers does;
            in Qwen-Omni (`video_second_per_grid` there) either in float32.
        spec: the facts of the model family, from `rope3d_spec`.

    Returns:
        ids: int64 [3, B, T]; 0 where not attended.
        delta: int64 [B], the largest id + 1 - the number of attended tokens: what a decoder adds to the plain position
            of each further token.

    Raises:
        ValueError: a wrong shape or dtype; frames of Qwen3-Omni at times that are not whole, or that are not on the
            host; where the tensors are on the CPU (elsewhere it would cost a synchronisation) also a grid that the
            merge sizes do not divide, and placeholders that do not match the grids.
    """
    _check_tokens(input_ids, attention_mask)
    device, shape = input_ids.device, input_ids.shape
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    keep = mask.to(device, torch.bool)
    is_image = keep & (input_ids == spec.image_token_id)
    if spec.video_start_token_id is None:
        is_video = keep & (input_ids == spec.video_token_id)
    else:
        opens, closes = (keep & (input_ids == i) for i in (spec.video_start_token_id, spec.video_end_token_id))
        is_video = is_image & ((opens.char() - closes.char()).cumsum(1, dtype=torch.int32) > 0)
        is_image = is_image & ~is_video
    images = _merged_grid("image_grid_thw", image_grid_thw, spec.merge_size, 1, device)
    videos = _merged_grid("video_grid_thw", video_grid_thw, spec.merge_size, spec.temporal_merge_size, device)
    seconds = _video_interval(second_per_grid_ts, len(videos), spec, device)
    if device.type == "cpu":
        _check_placeholders("image", is_image, images)
        _check_placeholders("video", is_video, videos)

    # One table of grids: images, videos, and in the last row text, as a grid of 1 x 1 x 1; in int32, half the bytes.
    grids = torch.cat([images, videos, images.new_ones(1, 3)])
    t, h, w = grids.unbind(1)
    interval = torch.cat([seconds.new_ones(len(images)), seconds, seconds.new_ones(1)])
    advance = torch.maximum(h, w)
    if spec.advance_over_time:
        advance = torch.maximum(advance, _time(t - 1, interval, spec) + 1)
    tokens = t * h * w
    ends = tokens[:-1].cumsum(0, dtype=torch.int32)
    starts = pad(ends, (1, 0))

    # The grid of each of the B * T tokens and its place j there, from `seen`, the visual tokens of its kind so far: how
    # many grids end before that many is looked up in a table, which is faster than a search for each token. All this is
    # in place where it can be: fresh memory costs more than the arithmetic.
    attended, image, video = keep.flatten(), is_image.flatten(), is_video.flatten()
    visual, seen = image, image.cumsum(0, dtype=torch.int32)
    if len(videos):
        before = tokens[: len(images)].sum(dtype=torch.int32)
        visual = image | video
        seen = torch.where(video, video.cumsum(0, dtype=torch.int32) + before, seen).clamp_(max=len(video))
    ended = torch.zeros(len(video) + 2, dtype=torch.int32, device=device)
    ended.index_add_(0, ends.clamp(max=len(video)) + 1, torch.ones_like(ends)).cumsum_(0)
    grid = ended.index_select(0, seen).masked_fill_(~visual, len(grids) - 1)
    j = seen.sub_(starts.index_select(0, grid)).sub_(1).masked_fill_(~visual, 0)

    # Quotients in float32, many at a time: floor((j + 1/2) / n) is j // n below 2 ** 21, with 2 ulp to spare.
    width, area = w.float().index_select(0, grid), (h * w).float().index_select(0, grid)
    rest = j.float().add_(0.5)
    frame = (rest / area).floor_()
    rest.addcmul_(frame, area, value=-1)
    first = attended & (j == 0)
    if spec.framewise_video:
        first |= video & (rest < 1)
        frame.masked_fill_(video, 0)
    y = (rest / width).floor_()
    x = rest.addcmul_(y, width, value=-1)
    ids = torch.empty(3, *shape, dtype=torch.long, device=device)
    places = ids.view(3, -1)
    timed = spec.tokens_per_second is not None and (len(videos) > 0 or spec.audio_token_id is not None)
    places[0] = _time(frame, interval.index_select(0, grid), spec) if timed else frame
    places[1], places[2] = y, x
    if spec.audio_token_id is not None and len(videos):
        audio = keep & (input_ids == spec.audio_token_id)
        sound, grid, k, pieces, last = _video_sound(audio, keep, is_video, grid.view(shape), j.view(shape), tokens)
        places.copy_(torch.where(sound, k, places))
        advance = torch.where(last, pieces, advance)
        first &= ~sound
        if spec.shared_brackets:
            spoken = (video | sound) & (pieces.index_select(0, grid) > 0)
            flags = attended & ~(image | video | sound), spoken, spoken & first
            first &= ~_shared_brackets(keep, *(flag.view(shape) for flag in flags)).flatten()

    # The first token of a grid moves its row on by the whole grid's advance; its tokens take that back.
    step = advance.index_select(0, grid)
    places += (step * first).view(shape).cumsum_(1).flatten().sub_(step).mul_(attended)
    length = keep.sum(1)
    largest = ids.amax((0, 2)) if shape[1] else length
    return ids, torch.where(length > 0, largest + 1 - length, 0)


def _time(frame: Tensor, interval: Tensor, spec: Rope3DSpec) -> Tensor:
    """Index on the time axis, from the start of the grid."""
    time = frame.to(interval.dtype) * interval
    if spec.audio_token_id is not None and spec.tokens_per_second is not None:
        time = time * spec.tokens_per_second
    return time.int()


def _take(x: Tensor, place: Tensor) -> Tensor:
    """x[b, place[b, t]], False where there is no such place, -1."""
    return x.gather(1, place.clamp(min=0)) & (place >= 0)


def _video_sound(
    audio: Tensor, keep: Tensor, video: Tensor, grid: Tensor, j: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Audio tokens with a video before them and nothing but audio tokens in between are the video's sound.

    Returns, of each token (flat): is it such sound, its grid, and which piece of the grid's sound it is; and of each
    grid: how many pieces it has, and whether they end it, after its last frame.
    """
    column = torch.arange(audio.shape[1], device=audio.device)
    before = torch.where(keep & ~audio, column, -1).cummax(1).values
    sound, before = (audio & _take(video, before)).flatten(), before.clamp(min=0)
    grid = torch.where(sound, grid.gather(1, before).flatten(), grid.flatten())
    pieces = torch.zeros_like(tokens).index_add_(0, grid, sound.int())
    earlier = pieces.cumsum(0, dtype=torch.int32) - pieces
    k = sound.cumsum(0, dtype=torch.int32) - 1 - earlier.index_select(0, grid)
    after_all = sound & (j.gather(1, before).flatten() + 1 == tokens.index_select(0, grid))
    last = torch.zeros_like(tokens).index_add_(0, grid, after_all.int()) > 0
    return sound, grid, k, pieces, last


def _shared_brackets(keep: Tensor, text: Tensor, spoken: Tensor, begins: Tensor) -> Tensor:
    """The second of the two text tokens before, and of the two after, each video with sound (`spoken`)."""
    width = keep.shape[1]
    column = torch.arange(width, device=keep.device)
    before = torch.where(column > 0, torch.where(keep, column, -1).cummax(1).values.roll(1, 1), -1)
    two_before = torch.where(before >= 0, before.gather(1, before.clamp(min=0)), -1)
    after = text & _take(text, before) & _take(spoken, two_before)
    opens = begins & _take(text, before) & _take(text, two_before)
    second = keep.new_zeros(len(keep), width + 1).scatter_(1, torch.where(opens, before, width), True)
    return after | second[:, :width]


def _is_integer(x: Any) -> bool:
    return isinstance(x, Tensor) and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _came(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


def _check_tokens(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    if not _is_integer(input_ids) or input_ids.ndim != 2:
        raise ValueError(f"input_ids: expected integer [B, T], got {_came(input_ids)}")
    if attention_mask is None:
        return
    if not isinstance(attention_mask, Tensor):
        raise ValueError(f"attention_mask: expected a tensor or None, got {_came(attention_mask)}")
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
        raise ValueError(f"{name}: expected integer [n, 3] (t, h, w), got {_came(grid)}")
    if grid.device.type == "cpu" and bool((grid[:, 1:] % merge_size != 0).any()):
        bad = next(row for row in grid.tolist() if row[1] % merge_size or row[2] % merge_size)
        raise ValueError(f"{name}: expected h and w that merge_size {merge_size} divides, got (t, h, w) = {tuple(bad)}")
    if grid.device.type == "cpu" and bool((grid[:, 0] % temporal_merge_size != 0).any()):
        bad = next(row for row in grid.tolist() if row[0] % temporal_merge_size)
        raise ValueError(
            f"{name}: expected t that temporal_merge_size {temporal_merge_size} divides, got (t, h, w) = {tuple(bad)}"
        )
    grid = grid.to(device, torch.int32, non_blocking=True)
    return torch.cat([grid[:, :1] // temporal_merge_size, grid[:, 1:] // merge_size], dim=1)


def _video_interval(
    seconds: Tensor | Sequence[float] | None, videos: int, spec: Rope3DSpec, device: torch.device
) -> Tensor:
    """[videos] what a frame index is multiplied with, in the dtype in which transformers does so; see `_time`."""
    if seconds is not None:
        shape = list(seconds.shape) if isinstance(seconds, Tensor) else [len(seconds)]
        if shape != [videos]:
            raise ValueError(f"second_per_grid_ts: expected [{videos}], one a row of video_grid_thw, got {shape}")
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
    if isinstance(seconds, Tensor) and seconds.device.type != "cpu":
        raise ValueError(
            "second_per_grid_ts: Qwen3-Omni does not round times down, and only whole ones are supported, which has to "
            f"be checked: expected floats or a tensor on the CPU, got one on {seconds.device}"
        )
    second = torch.as_tensor(seconds, dtype=torch.float32).double()
    fractional = second * tokens_per_second % 1 != 0
    if bool(fractional.any()):
        video = int(fractional.int().argmax())
        raise ValueError(
            "second_per_grid_ts: Qwen3-Omni does not round times down, and ids that are not whole are not supported: "
            f"expected a whole {tokens_per_second} ids a second * seconds a frame, got {float(second[video]):g} s in "
            f"video {video}"
        )


def _check_placeholders(kind: str, placeholder: Tensor, grids: Tensor) -> None:
    """Every grid has all its tokens, within one row."""
    ends = pad(grids.prod(1).cumsum(0), (1, 0))
    in_row = placeholder.sum(1)
    row_ends = in_row.cumsum(0)
    expected, got = int(ends[-1]), int(in_row.sum())
    if got != expected:
        raise ValueError(
            f"{kind}_grid_thw: its {len(grids)} grids stand for {expected} tokens, "
            f"but input_ids has {got} attended {kind} tokens"
        )
    straddles = ends[torch.searchsorted(ends, row_ends)] != row_ends
    if bool(straddles.any()):
        row = int(straddles.int().argmax())
        raise ValueError(
            f"{kind}_grid_thw: expected every grid within one row, got a grid that begins in row {row} of input_ids "
            f"({int(in_row[row])} attended {kind} tokens there) and goes on in a later row"
        )
