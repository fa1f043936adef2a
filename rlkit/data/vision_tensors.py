"""`Sample.vision`: the tensors that processors make of images, videos and audios, and how those of several are joined.

Most tensors are [media, ...] and are concatenated along their first dimension. The exceptions of model families, and
what has to be padded first, are here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

AUDIO_FEATURES = "input_features"
"""The tensor of audios: log-mel spectra, or the waveform in pieces. It has one row for each audio."""

AUDIO_MASKS = {"feature_attention_mask": 2, "input_features_mask": 1}
"""Names that families have for the mask of audio frames [audios, frames] -> the dimension of frames in the features."""

FRAME_COUNTS = "num_frames_per_video"
"""The tensor with the number of frames of each video, in Gemma 4 and LLaVA-OneVision."""

NDIM_WITH_IMAGE_DIMENSION = {"pixel_values": 5, "pixel_attention_mask": 4}
"""Tensor -> its number of dimensions in families where a sample's images have a dimension of their own."""


def concatenate_vision(
    vision: Sequence[Mapping[str, Tensor]], only: Sequence[str] | None = None, *, within_sample: bool = False
) -> dict[str, Tensor]:
    """Concatenate vision tensors of the same name, of several samples or of several parts of one sample, in order.

    The dimension is the first one, with two exceptions:

    - MiniCPM-V 4.6, whose processor reports `target_sizes`: pixels are [1, channels, patch side, patches * patch side]
      and are concatenated along the last dimension; so are those of its videos.
    - SmolVLM and Idefics3: pixels are [1, images, channels, height, width]. The images of one sample are concatenated
      along dimension 1. Samples with fewer images than others are padded with zeros, as the processors pad a batch;
      the models skip such images.

    Images, videos and audios of several sizes are padded with zeros, too, where the processors do so in a batch:

    - images where the processor reports `image_sizes`: Mistral 3 in height and width, [images, channels, height,
      width]; LLaVA-NeXT and LLaVA-OneVision in the number of tiles, [images, tiles, channels, height, width];
    - videos of LLaVA-OneVision in the number of frames, [videos, frames, channels, height, width];
    - the features of audios, and their mask, in the number of frames.

    Args:
        vision: of each sample or part its tensors by name.
        only: names to concatenate; None means all.
        within_sample: whether they are parts of one sample.

    Raises:
        ValueError: tensors of one name whose shapes differ in another dimension.
    """
    names = [name for name in dict.fromkeys(name for one in vision for name in one) if only is None or name in only]
    padded = _pad_to_largest({name: [one[name] for one in vision if name in one] for name in names})
    return {name: _concatenate(name, padded, within_sample) for name in names}


def _concatenate(name: str, padded: Mapping[str, Sequence[Tensor]], within_sample: bool) -> Tensor:
    tensors, dimension = padded[name], _dimension(name, padded, within_sample)
    if dimension == 0 and all(x.ndim == NDIM_WITH_IMAGE_DIMENSION.get(name) for x in tensors):
        most = max(x.shape[1] for x in tensors)
        tensors = [F.pad(x, [0, 0] * (x.ndim - 2) + [0, most - x.shape[1]]) for x in tensors]
    if len({x.shape[:dimension] + x.shape[dimension:][1:] for x in tensors}) > 1:
        got = ", ".join(str(tuple(x.shape)) for x in tensors)
        at = dimension % tensors[0].ndim
        raise ValueError(f"{name}: expected shapes that are equal except in dimension {at}, got {got}")
    return torch.cat(list(tensors), dimension)


def _dimension(name: str, tensors: Mapping[str, Sequence[Tensor]], within_sample: bool) -> int:
    """The dimension along which the tensors of this name are concatenated."""
    pixels = tensors.get("pixel_values")
    has_image_dimension = pixels is not None and pixels[0].ndim == 5 and "image_sizes" not in tensors
    if within_sample and has_image_dimension:
        return 1
    sizes = {"pixel_values": "target_sizes", "pixel_values_videos": "target_sizes_videos"}
    return -1 if sizes.get(name) in tensors else 0


def _pad_to_largest(tensors: Mapping[str, Sequence[Tensor]]) -> dict[str, Sequence[Tensor]]:
    """Pads images, videos and audios of several sizes with zeros.

    Args:
        tensors: name -> the tensor of each sample or part.
    """
    padded = dict(tensors)
    if "image_sizes" in padded:
        padded["pixel_values"] = _pad_all_but_first(padded["pixel_values"])
    if all(x.ndim == 5 for x in padded.get("pixel_values_videos", ())) and FRAME_COUNTS in padded:
        padded["pixel_values_videos"] = _pad_all_but_first(padded["pixel_values_videos"])
    for name, dim in audio_frame_dimensions(padded).items():
        longest = max(x.shape[dim] for x in padded[name])
        padded[name] = [F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, longest - x.shape[dim]]) for x in padded[name]]
    return padded


def _pad_all_but_first(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of as many dimensions, padded at the end of all but the first to the largest of each."""
    largest = [max(sizes) for sizes in zip(*(x.shape for x in tensors), strict=True)]

    def pad(x: Tensor) -> Tensor:
        missing = [most - size for most, size in zip(largest[1:], x.shape[1:], strict=True)]
        return F.pad(x, [n for end in reversed(missing) for n in (0, end)])  # torch begins with the last dimension

    return [pad(x) for x in tensors]


def audio_frame_dimensions(names: Iterable[str]) -> dict[str, int]:
    """The dimension of the frames in each tensor of audios among vision tensors of these names; {} without audios."""
    found: dict[str, int] = {}
    for mask in AUDIO_MASKS.keys() & set(names):
        found |= {AUDIO_FEATURES: AUDIO_MASKS[mask], mask: 1}
    return found
