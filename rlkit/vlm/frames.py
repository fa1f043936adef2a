"""Videos of SmolVLM, which has no token for a video: text with the times of frames, and an image for each frame."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkit.data.media import Video


def text_with_frames(processor: Any, text: str, videos: Iterator[Video]) -> str:
    """The text with what the processor writes for each video, but the placeholder of an image for each frame.

    For a video of two frames in a second, the processor writes

        You are provided the following series of two frames from a 0:00:01 [H:MM:SS] video.

        Frame from 00:00:<the tokens of an image>
        Frame from 00:00:<the tokens of an image>

    Args:
        text: with `processor.video_token` for each video.
        videos: as many are taken as the text has places for.
    """
    from transformers.video_utils import VideoMetadata

    def written(video: Video) -> str:
        frames = torch.empty(1, len(video.frames))  # the processor reads their number alone
        inputs = {"pixel_values": frames, "video_metadata": [VideoMetadata(**video.metadata)]}
        return processor.replace_video_token(inputs, 0).replace(_tokens_of_frame(processor), processor.image_token)

    return re.sub(re.escape(processor.video_token), lambda _: written(next(videos)), text)


def images_and_frames(
    processor: Any, text: str, images: Sequence[Any], video_arguments: Mapping[str, Any]
) -> tuple[list[str], dict[str, Tensor]]:
    """What the processor writes for each image and each frame, in the order of a text, and their vision tensors.

    Called with both, transformers' processor loses the pixels of images, as it has one name for those of images and
    videos. An image may be split into tiles; a frame is not.

    Args:
        text: with `processor.image_token` for each image, and `processor.video_token` for each video.
        video_arguments: of the video processor.

    Raises:
        ValueError: frames of another size than tiles of images.
    """
    given = {
        processor.image_token: iter(_images(processor, images) if images else ()),
        processor.video_token: iter(_videos(processor, video_arguments)),
    }
    found = [next(given[token]) for token in re.findall("|".join(map(re.escape, given)), text)]
    if len(sizes := {tuple(x.shape[-2:]) for one in found for x in one.vision.values()}) > 1:
        raise ValueError(f"videos: expected frames of the size of images' tiles, got {sorted(sizes)}")
    vision = {name: torch.cat([one.vision[name] for one in found])[None] for name in found[0].vision}
    return [text for one in found for text in one.texts], vision


class _Pictures(NamedTuple):
    """An image or a video.

    Attributes:
        texts: what the processor writes for the image, or for each frame.
        vision: tensors by name, with a row for each tile or frame.
    """

    texts: list[str]
    vision: dict[str, Tensor]


def _images(processor: Any, images: Sequence[Any]) -> list[_Pictures]:
    inputs = processor.image_processor([*images], return_row_col_info=True, return_tensors="pt")
    texts = [processor.replace_image_token(inputs, i) for i in range(len(images))]
    tiles = [text.count(processor.image_token) // processor.image_seq_len for text in texts]
    tensors = {name: inputs[name][0].split(tiles) for name in inputs if isinstance(inputs[name], Tensor)}
    return [_Pictures([text], {name: x[i] for name, x in tensors.items()}) for i, text in enumerate(texts)]


def _videos(processor: Any, arguments: Mapping[str, Any]) -> list[_Pictures]:
    inputs = processor.video_processor(**arguments, return_tensors="pt")
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    texts = [_tokens_of_frame(processor)] * inputs["pixel_values"].shape[1]
    return [_Pictures(texts, {name: x[i] for name, x in tensors.items()}) for i in range(len(inputs["pixel_values"]))]


def _tokens_of_frame(processor: Any) -> str:
    """What the processor writes for an image that is not split."""
    return processor.replace_image_token({"rows": [[0]], "cols": [[0]]}, 0)
