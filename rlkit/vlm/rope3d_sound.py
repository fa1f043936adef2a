"""3D RoPE of videos with sound (Qwen-Omni): which audio tokens belong to a video, and which text tokens share an id."""

from typing import NamedTuple

import torch
from torch import Tensor


class VideoSound(NamedTuple):
    """Audio tokens that belong to videos. The first three are per token [B, T], the others per grid."""

    is_sound: Tensor
    grid: Tensor  # the grid of each token, of sound that of its video
    place: Tensor  # of sound: the number of the audio token in its video, from 0
    audio_tokens: Tensor  # audio tokens of the grid
    ends_grid: Tensor  # audio follows the last frame


def find_video_sound(
    is_audio: Tensor, attended: Tensor, is_video: Tensor, grid: Tensor, index: Tensor, tokens: Tensor
) -> VideoSound:
    """An audio token belongs to the video before it if only audio tokens are in between.

    Args:
        is_audio, attended, is_video, grid, index: [B, T].
        tokens: of each grid.
    """
    column = torch.arange(is_audio.shape[1], device=is_audio.device)
    previous = torch.where(attended & ~is_audio, column, -1).cummax(1).values  # the last attended token but audio
    is_sound = is_audio & _take(is_video, previous)
    previous = previous.clamp(min=0)
    grid = torch.where(is_sound, grid.gather(1, previous), grid)
    audio_tokens = _count_by_grid(is_sound, grid, tokens)
    sounds_so_far = is_sound.flatten().cumsum(0, dtype=torch.int32).view(is_sound.shape)
    sounds_before_grid = audio_tokens.cumsum(0, dtype=torch.int32) - audio_tokens
    place = sounds_so_far - 1 - sounds_before_grid[grid]
    follows_last_frame = is_sound & (index.gather(1, previous) + 1 == tokens[grid])
    return VideoSound(is_sound, grid, place, audio_tokens, _count_by_grid(follows_last_frame, grid, tokens) > 0)


def _count_by_grid(mask: Tensor, grid: Tensor, tokens: Tensor) -> Tensor:
    """How many tokens of each grid are True; of the shape and dtype of `tokens`."""
    return torch.zeros_like(tokens).index_add(0, grid.flatten(), mask.flatten().to(tokens.dtype))


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
