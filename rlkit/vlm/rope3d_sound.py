"""3D RoPE of videos with sound (Qwen-Omni): which audio tokens belong to a video, and which text tokens share an id."""

from typing import NamedTuple

import torch
from torch import Tensor


class VideoSound(NamedTuple):
    """Audio tokens that belong to videos. The first three are per token [B * T], the others per grid."""

    is_sound: Tensor
    grid: Tensor  # the grid of each token, of sound that of its video
    place: Tensor  # of sound: the number of the audio token in its video, from 0
    audio_tokens: Tensor  # audio tokens of the grid
    ends_grid: Tensor  # audio follows the last frame


def find_video_sound(
    is_audio: Tensor, attended: Tensor, is_video: Tensor, grid: Tensor, index: Tensor, tokens: Tensor
) -> VideoSound:
    """An audio token belongs to the video before it if only audio tokens are in between."""
    shape = is_audio.shape
    column = torch.arange(shape[1], device=is_audio.device)
    previous = torch.where(attended & ~is_audio, column, -1).cummax(1).values  # the last attended token but audio
    is_sound, previous = (is_audio & _take(is_video, previous)).flatten(), previous.clamp(min=0)
    grid = torch.where(is_sound, grid.view(shape).gather(1, previous).flatten(), grid)
    count = torch.zeros_like(tokens).index_add_(0, grid, is_sound.int())
    count_before = count.cumsum(0, dtype=torch.int32) - count
    sound_index = is_sound.cumsum(0, dtype=torch.int32) - 1 - count_before.index_select(0, grid)
    previous_index = index.view(shape).gather(1, previous).flatten()
    follows_last_frame = is_sound & (previous_index + 1 == tokens.index_select(0, grid))
    ends_grid = torch.zeros_like(tokens).index_add_(0, grid, follows_last_frame.int()) > 0
    return VideoSound(is_sound, grid, sound_index, count, ends_grid)


def repeats_previous_id(attended: Tensor, is_text: Tensor, has_sound: Tensor, begins: Tensor) -> Tensor:
    """The second of the two text tokens before, and of the two after, each video with sound; all bool [B, T].

    Args:
        has_sound: tokens of videos with sound, the sound included.
        begins: the first token of each such video.
    """
    width = attended.shape[1]
    column = torch.arange(width, device=attended.device)
    previous = torch.where(column > 0, torch.where(attended, column, -1).cummax(1).values.roll(1, 1), -1)
    two_before = torch.where(previous >= 0, previous.gather(1, previous.clamp(min=0)), -1)
    after = is_text & _take(is_text, previous) & _take(has_sound, two_before)
    opens = begins & _take(is_text, previous) & _take(is_text, two_before)
    before = attended.new_zeros(len(attended), width + 1).scatter_(1, torch.where(opens, previous, width), True)
    return after | before[:, :width]


def _take(x: Tensor, column: Tensor) -> Tensor:
    """x[b, column[b, t]] of a bool tensor; False where the column is -1."""
    return x.gather(1, column.clamp(min=0)) & (column >= 0)
