"""The rule of `rlkit.vlm.rope3d` as plain loops over rows, segments and tokens: to be read, and to test against.

Every row is cut into segments: a text token, an image, a video, or a frame of a video. A segment starts at one id `s`,
each of its tokens has an offset (time, height, width) from `s`, and the next segment starts at `s + advance`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlkit.vlm.rope3d import Rope3DSpec

Offset = tuple[int, int, int]


class Segment(NamedTuple):
    """Tokens that start at one id.

    Attributes:
        offsets: (time, height, width) of each token, from the id at which the segment starts.
        advance: how far behind that id the next segment starts.
        is_text: a single text token.
        has_sound: a video with its sound between the frames.
    """

    offsets: list[Offset]
    advance: int
    is_text: bool = False
    has_sound: bool = False


class Grid(NamedTuple):
    """An image or a video: its size in merged patches, and the interval between two frames, see `_time`."""

    t: int
    h: int
    w: int
    interval: Tensor


def naive_rope3d_position_ids(
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    image_grid_thw: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    second_per_grid_ts: Tensor | Sequence[float] | None = None,
    spec: Rope3DSpec,
) -> tuple[Tensor, Tensor]:
    """What `rope3d_position_ids` returns, row by row; arguments as there, and not checked."""
    attended = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    images = _grids(image_grid_thw, 1, None, spec)
    intervals = None if second_per_grid_ts is None else _intervals(second_per_grid_ts, spec)
    if intervals is None and video_grid_thw is not None:
        intervals = _intervals(torch.ones(len(video_grid_thw)), spec)
    videos = _grids(video_grid_thw, spec.temporal_merge_size, intervals, spec)
    ids = torch.zeros(3, *input_ids.shape, dtype=torch.long)
    delta = torch.zeros(len(input_ids), dtype=torch.long)
    for row, tokens in enumerate(input_ids):
        columns = attended[row].nonzero()[:, 0].tolist()
        segments = _row_segments(tokens[columns].tolist(), images, videos, spec)
        row_ids = _row_ids(segments, spec)
        for column, token_ids in zip(columns, row_ids, strict=True):
            ids[:, row, column] = torch.tensor(token_ids)
        if row_ids:
            delta[row] = max(max(token_ids) for token_ids in row_ids) + 1 - len(row_ids)
    return ids, delta


def _grids(
    grid_thw: Tensor | None, temporal_merge_size: int, intervals: Tensor | None, spec: Rope3DSpec
) -> Iterator[Grid]:
    """The grids in their order, which is that of their placeholders over the whole batch."""
    rows = [] if grid_thw is None else grid_thw.tolist()
    intervals = torch.ones(len(rows)) if intervals is None else intervals
    for (t, h, w), interval in zip(rows, intervals, strict=True):
        yield Grid(t // temporal_merge_size, h // spec.merge_size, w // spec.merge_size, interval)


def _intervals(seconds: Tensor | Sequence[float], spec: Rope3DSpec) -> Tensor:
    """What the index of a video's frame is multiplied with, in the dtype that transformers uses."""
    if spec.tokens_per_second is None:
        return torch.ones(len(seconds))
    if spec.audio_token_id is not None:  # Qwen-Omni; `_time` multiplies with tokens_per_second
        return torch.as_tensor(seconds, dtype=torch.float32)
    if isinstance(seconds, Tensor):
        return seconds * spec.tokens_per_second
    return (torch.tensor(seconds, dtype=torch.float64) * spec.tokens_per_second).to(torch.get_default_dtype())


def _row_segments(
    tokens: Sequence[int], images: Iterator[Grid], videos: Iterator[Grid], spec: Rope3DSpec
) -> list[Segment]:
    """The segments of the attended tokens of a row."""
    segments: list[Segment] = []
    frames: list[Grid] = []  # of the video that has begun, where every frame is a segment
    brackets = 0  # video_start tokens that are still open (GLM-4V)
    place = 0
    while place < len(tokens):
        token = tokens[place]
        if spec.video_start_token_id is not None:
            brackets += (token == spec.video_start_token_id) - (token == spec.video_end_token_id)
        in_brackets = spec.video_start_token_id is not None and brackets > 0
        is_video = token == (spec.video_token_id if spec.video_start_token_id is None else spec.image_token_id)
        is_video = is_video and (spec.video_start_token_id is None or in_brackets)
        if not is_video and token != spec.image_token_id:
            segments.append(Segment([(0, 0, 0)], advance=1, is_text=True))
            place += 1
        elif not is_video:
            segments.append(_grid_segment(tokens[place:], next(images), spec))
            place += len(segments[-1].offsets)
        elif spec.framewise_video:
            if not frames:
                video = next(videos)
                frames = [video] * video.t
            frame = frames.pop()
            segments.append(Segment(_offsets(frame, [0]), advance=max(frame.h, frame.w)))
            place += len(segments[-1].offsets)
        else:
            segments.append(_grid_segment(tokens[place:], next(videos), spec))
            place += len(segments[-1].offsets)
    return segments


def _offsets(grid: Grid, times: Sequence[int]) -> list[Offset]:
    """Offsets of the tokens of a grid: frame by frame, and in a frame row by row."""
    return [(time, y, x) for time in times for y in range(grid.h) for x in range(grid.w)]


def _grid_segment(tokens: Sequence[int], grid: Grid, spec: Rope3DSpec) -> Segment:
    """An image or a whole video that begins at the first of `tokens`; a video with the sound that is part of it."""
    times = [_time(frame, grid.interval, spec) for frame in range(grid.t)]
    visual = _offsets(grid, times)
    offsets: list[Offset] = []
    seen = heard = 0
    for token in tokens:
        if token == tokens[0] and seen < len(visual):
            offsets.append(visual[seen])
            seen += 1
        elif tokens[0] == spec.video_token_id and token == spec.audio_token_id:
            offsets.append((heard, heard, heard))
            heard += 1
        else:
            break
    advance = max(grid.h, grid.w)
    if spec.advance_over_time:
        advance = max(advance, times[-1] + 1)
    if heard and tokens[len(offsets) - 1] == spec.audio_token_id:  # the sound ends the video
        advance = heard
    return Segment(offsets, advance, has_sound=heard > 0)


def _time(frame: int, interval: Tensor, spec: Rope3DSpec) -> int:
    """Index of a frame on the time axis, from the start of the video."""
    if spec.audio_token_id is not None and spec.tokens_per_second is not None:
        return int(frame * interval * spec.tokens_per_second)
    return int(frame * interval)


def _row_ids(segments: Sequence[Segment], spec: Rope3DSpec) -> list[Offset]:
    """Position ids of the tokens of a row: the start of their segment plus their offset."""
    repeated = _repeated_ids(segments) if spec.shared_brackets else set()
    ids = []
    start = 0
    for i, segment in enumerate(segments):
        if i in repeated:
            start -= 1
        ids += [(start + time, start + y, start + x) for time, y, x in segment.offsets]
        start += segment.advance
    return ids


def _repeated_ids(segments: Sequence[Segment]) -> set[int]:
    """Segments with the id of the one before: the second of the two text tokens beside a video with sound."""
    repeated = set()
    for i in (i for i, segment in enumerate(segments) if segment.has_sound):
        if i >= 2 and segments[i - 2].is_text and segments[i - 1].is_text:
            repeated.add(i - 1)
        if i + 2 < len(segments) and segments[i + 1].is_text and segments[i + 2].is_text:
            repeated.add(i + 2)
    return repeated
