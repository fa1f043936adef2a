"""Text with images, videos and audios -> the prompt of a sample, by the processor of a model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from rlkit.data.media import Audio, Video
from rlkit.data.messages import MEDIA
from rlkit.data.placeholders import Expansion, expand_placeholders
from rlkit.data.samples import Sample, append_observation, prompt_sample
from rlkit.data.vision_tensors import AUDIO_MASKS, FRAME_COUNTS, audio_frame_dimensions, concatenate_vision
from rlkit.vlm.expansions import expansions_by_kind
from rlkit.vlm.frames import images_and_frames, text_with_frames
from rlkit.vlm.processors import (
    AUDIO_PROCESSORS,
    FRAMES_AS_IMAGES,
    FRAMES_NOT_COUNTED,
    GEMMA3N,
    OMNI_PROCESSORS,
    STACKED_VIDEOS,
    TWO_FRAMES_AT_LEAST,
    VIDEO_PROCESSORS,
    WITHOUT_MEDIA,
    feature_id,
    placeholder_id,
)

# outputs of a processor that are not vision tensors; the engine computes its own
TEXT_OUTPUTS = frozenset(
    {
        "input_ids",
        "attention_mask",
        "mm_token_type_ids",
        "moe_mm_token_type_ids",
        "token_type_ids",
        "num_chunks_per_video",  # of Kimi K2.5, whose text has a run of placeholders for each chunk
    }
)


def encode_text(
    processor: Any,
    text: str,
    images: Sequence[Image.Image] = (),
    videos: Sequence[Video] = (),
    audios: Sequence[Audio] = (),
) -> Sample:
    """Tokenizes a text that has one placeholder per image, video and audio into a sample's tokens.

    Its `token_ids` are the processor's output. Which of its tokens stand for which image follows from the
    replacements of placeholders that the processor reports (`return_text_replacement_offsets`). The processors of
    Qwen-Omni report none, but only repeat placeholders.

    Raises:
        ValueError: text that is not Unicode, the number of images, videos or audios is not the number of placeholders,
            the processor rejects an image, or its tokens cannot be assigned to the images, videos and audios; videos
            or audios for a family without them.
    """
    if stray := re.search("[\ud800-\udfff]", text):
        raise ValueError(f"prompt: expected Unicode text, got the unpaired surrogate {stray[0]!r}")
    media: dict[str, Sequence[Any]] = {"image": images, "video": videos, "audio": audios}
    tokenizer = getattr(processor, "tokenizer", processor)
    compact = tokenizer(text, add_special_tokens=False)["input_ids"]
    arguments = _media_arguments(processor, media)
    _check_counts(processor, text, compact, media)
    if not any(media.values()):
        return prompt_sample(compact)
    if videos and type(processor).__name__ in FRAMES_AS_IMAGES:
        return _encode_frames(processor, text, media, arguments)
    if videos and type(processor).__name__ in OMNI_PROCESSORS and text != _bracketed_video(processor):
        return _encode_videos_apart(processor, text, compact, media)
    processed = _call_processor(processor, text, media, arguments)
    placeholders = _placeholders(processor, text, compact, processed, media)
    decoded = {"images": images, "videos": list(videos), "audios": list(audios)}
    return prompt_sample(processed.token_ids, compact, vision=processed.vision, placeholders=placeholders, **decoded)


def _media_arguments(processor: Any, media: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Arguments with which a processor uses these media.

    Raises:
        ValueError: the family does not support them.
    """
    for kind, given in media.items():
        if given and not hasattr(processor, "tokenizer"):
            raise ValueError(f"{kind}s: expected none, as the model's processor is a tokenizer, got {len(given)}")
        if given and (why := WITHOUT_MEDIA.get(name := type(processor).__name__)) is not None:
            raise ValueError(f"{kind}s: expected none for a {name}, got {len(given)}: {why}")
    arguments: dict[str, Any] = {"images": list(media["image"])} if media["image"] else {}
    arguments |= video_arguments(processor, media["video"]) if media["video"] else {}
    arguments |= audio_arguments(processor, media["audio"]) if media["audio"] else {}
    return arguments


class _Processed(NamedTuple):
    """What a processor makes of a text with media.

    Attributes:
        token_ids: with placeholders expanded.
        replacements: the text that stands for each placeholder, see `rlkit.vlm.expansions`; none for Qwen-Omni.
        vision: tensors by their names.
    """

    token_ids: list[int]
    replacements: Sequence[Mapping[str, Any]]
    vision: dict[str, torch.Tensor]


def _call_processor(
    processor: Any, text: str, media: Mapping[str, Sequence[Any]], arguments: Mapping[str, Any]
) -> _Processed:
    """The processor's output; Gemma 3n's reports no replacements, and pads audios in a way that changes features."""
    reports = type(processor).__name__ != GEMMA3N
    arguments = {**arguments, "return_text_replacement_offsets": True} if reports else arguments
    inputs = processor(text=[text], return_tensors="pt", add_special_tokens=False, **arguments)
    reported = (inputs.pop("text_replacement_offsets", None) or [[]])[0]
    replacements = reported if reports else _gemma3n_replacements(processor, text, media)
    vision = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor) and name not in TEXT_OUTPUTS}
    vision = {name: x.float() if x.is_floating_point() else x for name, x in vision.items()}  # Llama 4: bfloat16
    if media["video"] and type(processor).__name__ in FRAMES_NOT_COUNTED:
        vision[FRAME_COUNTS] = torch.tensor([len(one.frames) for one in media["video"]])
    if media["audio"] and not reports:
        vision |= _gemma3n_audios(processor, media["audio"])
    else:
        vision |= _longest_audio_frames(vision)
    return _Processed(inputs["input_ids"][0].tolist(), replacements, vision)


def _placeholders(
    processor: Any,
    text: str,
    compact: Sequence[int],
    processed: _Processed,
    media: Mapping[str, Sequence[Any]],
) -> dict[int, list[int | Expansion]]:
    """`placeholders` of the sample: placeholder id -> the tokens that stand for each of its media.

    Raises:
        ValueError: they do not expand `compact` to the processor's tokens.
    """
    token_of = {kind: placeholder_id(processor, kind) for kind, given in media.items() if given}
    found = expansions_by_kind(processor, text, processed.token_ids, processed.replacements, token_of)
    placeholders = {token_of[kind]: kind_expansions for kind, kind_expansions in found.items()}
    has_all = all(len(kind_expansions) == len(media[kind]) for kind, kind_expansions in found.items())
    if not has_all or expand_placeholders(compact, placeholders) != processed.token_ids:
        family, kinds = type(processor).__name__, " and ".join(f"{kind}s" for kind in found)
        source = "runs of its placeholder" if family in OMNI_PROCESSORS else "text_replacement_offsets"
        raise ValueError(
            f"processor: expected {source} that reproduce its tokens, got a {family} whose tokens cannot be assigned "
            f"to the {kinds} of the prompt"
        )
    return placeholders


def _longest_audio_frames(vision: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of audios cut to the frames of the longest one; processors pad to their limit, or to a multiple."""
    dimensions = audio_frame_dimensions(vision)
    frames = max((int(vision[name].sum(1).max()) for name in dimensions if name in AUDIO_MASKS), default=0)
    return {name: vision[name].narrow(dim, 0, frames).clone() for name, dim in dimensions.items()}


def _gemma3n_replacements(processor: Any, text: str, media: Mapping[str, Sequence[Any]]) -> Sequence[Mapping[str, Any]]:
    """What Gemma 3n's processor puts in the place of each image and audio, which it does not report itself."""
    _, replaced = processor.get_text_with_replacements(
        [text],
        images_replacements=[processor.full_image_sequence] * len(media["image"]),
        audio_replacements=[processor.full_audio_sequence] * len(media["audio"]),
    )
    return replaced[0]


def _gemma3n_audios(processor: Any, audios: Sequence[Audio]) -> dict[str, torch.Tensor]:
    """The features and masks of audios, each computed alone: beside a longer one its last frames would be others."""
    alone = [processor.feature_extractor([one.samples], return_tensors="pt") for one in audios]
    return concatenate_vision(alone)


def _bracketed_video(processor: Any) -> str:
    """What stands for a video in a text of Qwen-Omni; the processor inserts the tokens of its sound in the brackets."""
    return processor.vision_bos_token + processor.video_token + processor.vision_eos_token


def _encode_videos_apart(
    processor: Any, text: str, compact: Sequence[int], media: Mapping[str, Sequence[Any]]
) -> Sample:
    """`encode_text` for a text of Qwen-Omni with videos; the processor is called once for each video.

    In one call all videos would have the same frame rate, and either all or none of them would have sound.

    Args:
        compact: the tokens of the text.
        media: kind -> images, videos or audios.

    Raises:
        ValueError: the chat template writes videos without brackets, or the tokenizer merges a bracket with other text.
    """
    images, videos, audios = (iter(media[kind]) for kind in MEDIA)
    bracketed = _bracketed_video(processor)
    samples, pieces = [], text.split(bracketed)
    if len(pieces) != len(media["video"]) + 1:
        raise ValueError(f"chat template: expected {bracketed!r} for each video, got one without its brackets")
    for i, piece in enumerate(pieces):
        if i:
            samples.append(encode_text(processor, bracketed, videos=[*islice(videos, 1)]))
        if piece:
            own_images = [*islice(images, piece.count(processor.image_token))]
            own_audios = [*islice(audios, piece.count(processor.audio_token))]
            samples.append(encode_text(processor, piece, own_images, audios=own_audios))
    joined = reduce(append_observation, samples)
    if joined.compact_ids != list(compact):
        raise ValueError(f"chat template: expected {bracketed!r} not to change the tokens of the text beside it")
    return joined


def _encode_frames(
    processor: Any, text: str, media: Mapping[str, Sequence[Any]], arguments: Mapping[str, Any]
) -> Sample:
    """`encode_text` for a text of SmolVLM with videos: for the sampler, too, each frame is an image.

    Args:
        media: kind -> images, videos or audios.
        arguments: of the processor, those of its image processor among them.
    """
    image_options = {name: x for name, x in arguments.items() if name != "images"}
    texts, vision = images_and_frames(processor, text, media["image"], image_options)
    text = text_with_frames(processor, text, iter(media["video"]))
    (expanded,), (replacements,) = processor.get_text_with_replacements([text], images_replacements=texts)
    compact, ids = (processor.tokenizer(one, add_special_tokens=False)["input_ids"] for one in (text, expanded))
    processed = _Processed(ids, replacements, vision)
    placeholders = _placeholders(processor, text, compact, processed, {"image": texts})
    decoded = {"images": media["image"], "videos": list(media["video"])}
    return prompt_sample(ids, compact, vision=vision, placeholders=placeholders, **decoded)


def _check_counts(processor: Any, text: str, tokens: Sequence[int], media: Mapping[str, Sequence[Any]]) -> None:
    """Check that a prompt has as many placeholders as media of each kind.

    The numbers differ if, for example, the text of a question contains a placeholder.

    Args:
        text, tokens: of the prompt, before placeholders are expanded.
        media: kind -> images, videos or audios.

    Raises:
        ValueError: names the kind and both numbers.
    """
    feature = feature_id(processor)
    slots = {kind: tokens.count(placeholder_id(processor, kind)) for kind in media}
    counts = {kind: len(given) for kind, given in media.items()}
    if media["video"] and type(processor).__name__ in FRAMES_AS_IMAGES:
        slots["video"] = text.count(processor.video_token)
    if feature not in (None, placeholder_id(processor, "image")):
        slots["image feature"], counts["image feature"] = tokens.count(feature), 0
    for kind, slot_count in slots.items():
        if slot_count != counts[kind]:
            raise ValueError(f"{kind}s: expected {slot_count}, one per placeholder in the prompt, got {counts[kind]}")


def audio_arguments(processor: Any, audios: Sequence[Audio]) -> dict[str, Any]:
    """Arguments with which a processor uses these audios.

    Raises:
        ValueError: a family without audio input.
    """
    name = type(processor).__name__
    if name not in AUDIO_PROCESSORS:
        raise ValueError(f"audios: expected a model with one of {', '.join(sorted(AUDIO_PROCESSORS))}, got {name}")
    return {"audio": [one.samples for one in audios], "sampling_rate": audios[0].rate}


def video_arguments(processor: Any, videos: Sequence[Video]) -> dict[str, Any]:
    """Arguments with which a processor uses the frames of these videos as they are.

    Raises:
        ValueError: a family without videos, or no torchvision.
    """
    name = type(processor).__name__
    if name not in VIDEO_PROCESSORS:
        raise ValueError(f"videos: expected a model with one of {', '.join(sorted(VIDEO_PROCESSORS))}, got {name}")
    if getattr(processor, "video_processor", None) is None:
        raise ValueError(
            f"videos: expected the video processor of {name}, which needs torchvision, got none: "
            "pip install -e '.[video]'"
        )
    from transformers.video_utils import VideoMetadata

    _check_frame_counts(name, [len(one.frames) for one in videos])
    arguments = {
        "videos": [torch.from_numpy(np.ascontiguousarray(one.frames.transpose(0, 3, 1, 2))) for one in videos],
        "video_metadata": [VideoMetadata(**one.metadata) for one in videos],
        "do_sample_frames": False,
        "return_metadata": True,  # without it the processor of Cosmos3 Edge fails
    }
    if name in OMNI_PROCESSORS:
        arguments["fps"] = videos[0].fps
        if sounds := [one.sound for one in videos if one.sound is not None]:
            arguments |= {**audio_arguments(processor, sounds), "use_audio_in_video": True}
    return arguments


def _check_frame_counts(name: str, counts: Sequence[int]) -> None:
    """Raise a ValueError for numbers of frames that the processor of this name cannot encode."""
    if name in STACKED_VIDEOS and len(set(counts)) > 1:
        raise ValueError(
            f"videos: expected as many frames in each video of a row, as {name} stacks them, got videos of "
            f"{' and '.join(map(str, sorted(set(counts))))} frames"
        )
    if name in TWO_FRAMES_AT_LEAST and min(counts) < 2:
        raise ValueError(
            f"videos: expected at least 2 frames, as {name} merges two into one, got 1; raise video_fps for short files"
        )
