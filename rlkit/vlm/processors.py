"""Processors and tokenizers: text and media -> both token tracks of a sample; torchvision is optional."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import stat
import time
from collections.abc import Mapping, Sequence
from functools import cache, reduce
from itertools import groupby, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from rlkit.data.messages import MEDIA, bytes_or_path
from rlkit.data.samples import (
    AUDIO_KEYS,
    Audio,
    Expansion,
    Sample,
    Video,
    append_observation,
    expand_placeholders,
    prompt_sample,
)
from rlkit.vlm.loading import has_vision, load_config, model_path

# formats of photographs and figures; not PostScript, say, which Pillow would have another program draw
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "ICO")

DECODING_SECONDS = 10.0  # of processor time
LONGEST_PATH, LONGEST_NAME = 4096, 255  # characters of a path and of a file's name; Linux opens no longer ones


def load_image(source: Any) -> Image.Image:
    """An RGB image from a path, bytes, a PIL image, a data URL, or the {"bytes", "path"} struct of Hugging Face sets.

    A data URL is a text that holds the image: "data:image/png;base64,...". A path must be that of a regular file: a
    pipe or a device is not opened. Images of more than `PIL.Image.MAX_IMAGE_PIXELS` pixels are not decoded. Decoding
    takes at most `DECODING_SECONDS`, except for formats that Pillow decodes in one call (TIFF, JPEG 2000, WebP, AVIF):
    their time is limited by the number of pixels.

    Raises:
        ValueError: it cannot be read, is empty, too large, takes too long or is not in one of `FORMATS`, or is a URL
            (fetch those beforehand: a run that depends on the network cannot be repeated).
    """
    source, name = resolve_source(source, "image", "a PIL image")
    try:
        if isinstance(source, bytes | bytearray):
            image = _as_rgb(_open_image(io.BytesIO(source)))
        elif isinstance(source, str | Path):
            with open_regular_file(source) as file:
                image = _as_rgb(_open_image(file))
        elif isinstance(source, Image.Image):
            image = _as_rgb(source)
        else:
            raise ValueError("expected a path, bytes or a PIL image")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"image {name}: cannot be read: {error}") from error
    if min(image.size) == 0:
        raise ValueError(f"image {name}: empty, {image.size[0]}x{image.size[1]} pixels")
    return image


def _as_rgb(image: Image.Image) -> Image.Image:
    """The image turned as its EXIF data say, in 8 bits a channel. This decodes a file that has been opened."""
    width, height = image.size
    if Image.MAX_IMAGE_PIXELS is not None and width * height > Image.MAX_IMAGE_PIXELS:
        raise ValueError(f"expected at most {Image.MAX_IMAGE_PIXELS} pixels, got {width}x{height}")
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # convert() would saturate: everything above 255 white
        image = Image.fromarray((np.asarray(image) // 257).astype("uint8"))
    if image.mode in ("I", "F"):
        raise ValueError(f"expected 8 or 16 bits a channel, got pixels of mode {image.mode!r}")
    return image.convert("RGB")


def _open_image(file: BinaryIO) -> Image.Image:
    """Open an image that Pillow decodes later, in small pieces, as long as there is time."""
    try:
        image: Any = Image.open(_LimitedTime(file), formats=_known_formats())  # type: ignore[arg-type]
    except UnidentifiedImageError as error:  # it would name the file object
        raise ValueError(f"expected an image in one of the formats {', '.join(FORMATS)}") from error
    image.decodermaxblock = 4096  # bytes decoded at once: 64 KB of empty JPEG scans take half a minute
    return image


class _LimitedTime:
    """A file that cannot be read any more when this thread has computed for `DECODING_SECONDS` since it was made.

    It has no `fileno`, so Pillow reads it here.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell, self.close = file.seek, file.tell, file.close
        self._read, self._end = file.read, time.thread_time() + DECODING_SECONDS

    def read(self, size: int = -1) -> bytes:
        if time.thread_time() > self._end:
            raise ValueError(f"expected an image that is decoded within {DECODING_SECONDS:g} s, got none")
        return self._read(size)


@cache
def _known_formats() -> list[str]:
    """Those of `FORMATS` that this Pillow can read."""
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def resolve_source(source: Any, kind: str, otherwise: str) -> tuple[Any, str]:
    """Take the bytes or the path out of the struct of a Hugging Face feature, and decode a data URL.

    Args:
        kind: "image", "video" or "audio".
        otherwise: what is accepted besides paths and bytes, for the error.

    Returns:
        bytes, a path, or the source itself; and a name of it for errors, which of a data URL is its beginning.

    Raises:
        ValueError: another URL, a data URL without valid base64, a text that is too long for a path, or a struct whose
            bytes are something else.
    """
    if isinstance(source, Mapping):
        source = bytes_or_path(source, kind)
    if not isinstance(source, str):
        return source, repr(str(source)) if isinstance(source, Path) else f"of type {type(source).__name__}"
    beginning = repr(source if len(source) <= 80 else f"{source[:80]}...")
    if source.startswith("data:"):
        try:
            return _decode_data_url(source), beginning
        except ValueError as error:
            raise ValueError(f"{kind}: expected a data URL with base64, got {beginning}: {error}") from error
    if "://" in source:
        raise ValueError(f"{kind}: expected a local path, bytes or {otherwise}, got the URL {beginning}")
    if len(source) > LONGEST_PATH or len(source.rpartition("/")[2]) > LONGEST_NAME:
        raise ValueError(f"{kind} {beginning}: expected a path, got {len(source)} characters")
    return source, repr(source)


def _decode_data_url(url: str) -> bytes:
    """The bytes of a data URL. Its media type is not used: decoders recognise the format by the bytes."""
    head, comma, data = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ValueError("no ';base64,' in it")
    return base64.b64decode("".join(data.split()), validate=True)  # encoders may split it into lines


def open_regular_file(path: str | Path) -> BinaryIO:
    """Open a file to be read; what is no regular file is refused before it is opened, as opening may already wait."""
    _check_regular(os.stat(path).st_mode)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # it may have been replaced since
    file = open(descriptor, "rb")
    try:
        _check_regular(os.fstat(descriptor).st_mode)
    except ValueError:
        file.close()
        raise
    return file


def _check_regular(mode: int) -> None:
    kinds = {stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket", stat.S_IFDIR: "folder"}
    if not stat.S_ISREG(mode):
        raise ValueError(f"expected a regular file, got a {kinds.get(stat.S_IFMT(mode), 'device')}")


# outputs of a processor that are not vision tensors; the engine computes its own
TEXT_OUTPUTS = frozenset(
    {"input_ids", "attention_mask", "mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids"}
)


# processors whose audios are tested: both tracks, position ids, training and sampling. They repeat a placeholder and
# report no replacements of text
QWEN2_5_OMNI, QWEN3_OMNI = "Qwen2_5OmniProcessor", "Qwen3OmniMoeProcessor"
AUDIO_PROCESSORS = frozenset({QWEN2_5_OMNI, QWEN3_OMNI})
GLM_PROCESSORS = frozenset({"Glm4vProcessor", "Glm46VProcessor"})  # of GLM-4.1V, 4.5V, 4.6V and OCR
# processors whose videos are tested likewise
VIDEO_PROCESSORS = frozenset(
    {
        "Qwen2VLProcessor",
        "Qwen2_5_VLProcessor",
        "Qwen3VLProcessor",
        *GLM_PROCESSORS,
        "InternVLProcessor",
        "Gemma4Processor",
        "Gemma4UnifiedProcessor",
        "MiniCPMV4_6Processor",
        "Ernie4_5_VLMoeProcessor",
        "CohereCompassProcessor",
        *AUDIO_PROCESSORS,
    }
)
TWO_FRAMES_AT_LEAST = GLM_PROCESSORS | {"Qwen3VLProcessor", "CohereCompassProcessor"}
# processors that stack the videos of a row, which then have the same number of frames
STACKED_VIDEOS = frozenset({"InternVLProcessor", "MiniCPMV4_6Processor"})
# processor -> why videos of its family are refused
VIDEO_OBSTACLES = {
    "Kimi_K25Processor": "the forward of transformers 5.19 fails for videos of more than one frame",
    "SmolVLMProcessor": "the processor of transformers 5.19 loses the images of a row with a video",
}


def encode_text(
    processor: Any,
    text: str,
    images: Sequence[Image.Image] = (),
    videos: Sequence[Video] = (),
    audios: Sequence[Audio] = (),
) -> Sample:
    """Tokenizes a text that has one placeholder per image, video and audio into both token tracks.

    The expanded track is the processor's output. Which of its tokens stand for which image follows from the
    replacements of placeholders that the processor reports (`return_text_replacement_offsets`). The processors of
    Qwen-Omni report none, but only repeat placeholders.

    Raises:
        ValueError: text that is not Unicode, the number of images, videos or audios is not the number of placeholders,
            the processor rejects an image, or its tokens cannot be assigned to the images, videos and audios; videos
            or audios for a family without them.
    """
    if stray := re.search("[\ud800-\udfff]", text):
        raise ValueError(f"prompt: expected Unicode text, got the unpaired surrogate {stray[0]!r}")
    tokenizer = getattr(processor, "tokenizer", processor)
    compact = tokenizer(text, add_special_tokens=False)["input_ids"]
    media: dict[str, Sequence[Any]] = {"image": images, "video": videos, "audio": audios}
    for kind, given in media.items():
        if given and tokenizer is processor:
            raise ValueError(f"{kind}s: expected none, as the model's processor is a tokenizer, got {len(given)}")
    arguments = {"images": list(images)} if images else {}
    arguments |= video_arguments(processor, videos) if videos else {}
    arguments |= audio_arguments(processor, audios) if audios else {}
    tokens = {kind: placeholder_id(processor, kind) for kind in media}
    _check_counts(processor, compact, tokens, media)
    if not any(media.values()):
        return prompt_sample(compact)
    if videos and type(processor).__name__ in AUDIO_PROCESSORS and text != _bracketed_video(processor):
        return _encode_videos_apart(processor, text, compact, media)
    inputs = processor(
        text=[text],
        return_tensors="pt",
        add_special_tokens=False,
        return_text_replacement_offsets=True,
        **arguments,
    )
    expanded = inputs["input_ids"][0].tolist()
    replaced = (inputs.pop("text_replacement_offsets", None) or [[]])[0]
    found = _expansions_by_kind(
        processor, text, expanded, replaced, {kind: tokens[kind] for kind in media if media[kind]}
    )
    placeholders = {tokens[kind]: expansions for kind, expansions in found.items()}
    if (
        any(len(expansions) != len(media[kind]) for kind, expansions in found.items())
        or expand_placeholders(compact, placeholders) != expanded
    ):
        family, kinds = type(processor).__name__, " and ".join(f"{kind}s" for kind in found)
        source = "runs of its placeholder" if family in AUDIO_PROCESSORS else "text_replacement_offsets"
        raise ValueError(
            f"processor: expected {source} that reproduce its tokens, got a {family} whose tokens cannot be assigned "
            f"to the {kinds} of the prompt"
        )
    vision = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor) and name not in TEXT_OUTPUTS}
    vision = {name: x.float() if x.is_floating_point() else x for name, x in vision.items()}  # Llama 4: bfloat16
    if AUDIO_KEYS[0] in vision:  # as long as the longest, not as long as the processor's limit
        frames = int(vision[AUDIO_KEYS[1]].sum(1).max())
        vision |= {name: vision[name][..., :frames].clone() for name in AUDIO_KEYS}
    decoded = {"images": images, "videos": list(videos), "audios": list(audios)}
    return prompt_sample(expanded, compact, vision=vision, placeholders=placeholders, **decoded)


def _bracketed_video(processor: Any) -> str:
    """A video in a text of Qwen-Omni; the processor inserts the tokens of its sound inside the brackets."""
    return processor.vision_bos_token + processor.video_token + processor.vision_eos_token


def _encode_videos_apart(
    processor: Any, text: str, compact: Sequence[int], media: Mapping[str, Sequence[Any]]
) -> Sample:
    """`encode_text` of Qwen-Omni for a text with videos, each in a call of its own.

    One call of the processor has one frame rate for all of its videos, and either all or none of them have sound.

    Args:
        compact: the tokens of the text.
        media: kind -> images, videos or audios.

    Raises:
        ValueError: a chat template that writes videos without brackets, or brackets that are merged with other text.
    """
    place, (images, videos, audios) = _bracketed_video(processor), (iter(media[kind]) for kind in MEDIA)
    samples, pieces = [], text.split(place)
    if len(pieces) != len(media["video"]) + 1:
        raise ValueError(f"chat template: expected {place!r} for each video, got one without its brackets")
    for i, piece in enumerate(pieces):
        if i:
            samples.append(encode_text(processor, place, videos=[*islice(videos, 1)]))
        if piece:
            own_images = [*islice(images, piece.count(processor.image_token))]
            own_audios = [*islice(audios, piece.count(processor.audio_token))]
            samples.append(encode_text(processor, piece, own_images, audios=own_audios))
    joined = reduce(append_observation, samples)
    if joined.compact_ids != list(compact):
        raise ValueError(f"chat template: expected {place!r} not to change the tokens of the text beside it")
    return joined


def placeholder_id(processor: Any, kind: str) -> Any:
    """The token that stands for an image, a video or an audio in a prompt; None if the processor has none."""
    name = f"{kind}_token_id"
    return getattr(processor, name, None) or getattr(getattr(processor, "tokenizer", None), name, None)


def feature_id(processor: Any) -> Any:
    """The token that the expanded track has for each feature of an image; None if the processor has none.

    In Gemma 3 and Llama 4 it is not the token that stands for an image in a prompt.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    if hasattr(processor, "img_patch_token"):  # Llama 4
        return tokenizer.convert_tokens_to_ids(processor.img_patch_token)
    return getattr(tokenizer, "image_token_id", None)


def _check_counts(
    processor: Any, tokens: Sequence[int], placeholders: Mapping[str, Any], media: Mapping[str, Sequence[Any]]
) -> None:
    """Check that a prompt has as many placeholders as media of each kind; a question may spell a placeholder out.

    Args:
        tokens: of the prompt, before placeholders are expanded.
        placeholders: kind -> token id.
        media: kind -> images, videos or audios.

    Raises:
        ValueError: names the kind and both numbers.
    """
    feature = feature_id(processor)
    counts = [(kind, tokens.count(placeholders[kind]), len(given)) for kind, given in media.items()]
    if feature not in (None, placeholders["image"]):
        counts.append(("image feature", tokens.count(feature), 0))
    for kind, slots, given in counts:
        if slots != given:
            raise ValueError(f"{kind}s: expected {slots}, one per placeholder in the prompt, got {given}")


def _expansions_by_kind(
    processor: Any,
    text: str,
    expanded: Sequence[int],
    replacements: Sequence[Mapping[str, Any]],
    placeholders: Mapping[str, int],
) -> dict[str, list[int | Expansion]]:
    """The tokens that stand for each image, video or audio, by kind.

    Args:
        expanded: tokens of the processor's output.
        replacements: as the processor reports them, see `_expansions`.
        placeholders: kind -> token id, for the kinds that the prompt has.
    """
    if type(processor).__name__ in AUDIO_PROCESSORS:
        if [*placeholders] == ["video"] and placeholder_id(processor, "audio") in expanded:  # a video with its sound
            return {"video": [Expansion(expanded[1:-1])]}
        return {kind: _run_lengths(expanded, token) for kind, token in placeholders.items()}
    kinds = [one.get("type", "image") for one in replacements]
    found = _expansions(processor.tokenizer, text, replacements, [placeholder_id(processor, kind) for kind in kinds])
    return {kind: [one for one, of in zip(found, kinds, strict=True) if of == kind] for kind in placeholders}


def _run_lengths(tokens: Sequence[int], placeholder: int) -> list[int | Expansion]:
    """The number of tokens in each run of a placeholder."""
    return [len([*run]) for token, run in groupby(tokens) if token == placeholder]


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
    if why := VIDEO_OBSTACLES.get(name):
        raise ValueError(f"videos: expected none, as {why} ({name}), got {len(videos)}")
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
    }
    if name in AUDIO_PROCESSORS:
        arguments["fps"] = videos[0].fps
        if sounds := [one.sound for one in videos if one.sound is not None]:
            arguments |= {**audio_arguments(processor, sounds), "use_audio_in_video": True}
    return arguments


def _check_frame_counts(name: str, counts: Sequence[int]) -> None:
    """Raise a ValueError for numbers of frames at which the processor of this name fails with an unclear error."""
    if name in STACKED_VIDEOS and len(set(counts)) > 1:
        raise ValueError(
            f"videos: expected as many frames in each video of a row, as {name} stacks them, got videos of "
            f"{' and '.join(map(str, sorted(set(counts))))} frames"
        )
    if name in TWO_FRAMES_AT_LEAST and min(counts) < 2:
        raise ValueError(
            f"videos: expected at least 2 frames, as {name} merges two into one, got 1; raise video_fps for short files"
        )


class _Gap(NamedTuple):
    """Text outside all replacements: before the first, between two of them, or after the last; in characters."""

    start: int
    end: int
    shift: int  # how much later it stands in the expanded text


def _expansions(
    tokenizer: Any, text: str, replacements: Sequence[Mapping[str, Any]], placeholders: Sequence[int]
) -> list[int | Expansion]:
    """The tokens that stand for each image (or video) in the expanded track.

    The processor replaces each placeholder in the text with another text and tokenizes the result. A tokenizer may
    merge the end of a replacement with the text beside it. An image's tokens therefore reach from one boundary to the
    next: a boundary is a character in a gap at which a token begins both in the text and in the expanded text. Images
    without a boundary between them are counted together as the first of them.

    Args:
        replacements: for each image (or video) the `span` of its placeholder in the text, its `replacement`, and the
            `new_span` of that in the expanded text.
        placeholders: token id of each.
    """
    ids, token_at = _tokens_by_character(tokenizer, text)
    expanded_ids, expanded_token_at = _tokens_by_character(tokenizer, _expanded_text(text, replacements))
    gaps = _gaps(text, replacements)
    boundaries = [
        [x for x in range(gap.start, gap.end + 1) if x in token_at and x + gap.shift in expanded_token_at]
        for gap in gaps
    ]
    places = [i for i, token in enumerate(ids) if token in placeholders]
    found: list[int | Expansion] = []
    while (image := len(found)) < len(replacements):
        following = next(i for i in range(image + 1, len(gaps)) if boundaries[i])
        left, right = boundaries[image][-1], boundaries[following][0]
        start = expanded_token_at[left + gaps[image].shift]
        stop = expanded_token_at[right + gaps[following].shift]
        tokens = expanded_ids[start:stop]
        before, after = places[image] - token_at[left], token_at[right] - places[image] - 1
        is_repetition = not before and not after and set(tokens) == {placeholders[image]}
        found.append(len(tokens) if is_repetition else Expansion(tokens, before, after))
        found += [Expansion([])] * (following - image - 1)
    return found


def _expanded_text(text: str, replacements: Sequence[Mapping[str, Any]]) -> str:
    pieces, end = [], 0
    for one in replacements:
        pieces += [text[end : one["span"][0]], one["replacement"]]
        end = one["span"][1]
    return "".join([*pieces, text[end:]])


def _gaps(text: str, replacements: Sequence[Mapping[str, Any]]) -> list[_Gap]:
    starts = [0, *(one["span"][1] for one in replacements)]
    ends = [*(one["span"][0] for one in replacements), len(text)]
    shifts = [0, *(one["new_span"][1] - one["span"][1] for one in replacements)]
    return [_Gap(*gap) for gap in zip(starts, ends, shifts, strict=True)]


def _tokens_by_character(tokenizer: Any, text: str) -> tuple[list[int], dict[int, int]]:
    """Token ids, and: character -> index of the first token that begins there; the end of the text counts as one."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts = [*(start for start, _ in encoded["offset_mapping"]), len(text)]
    return encoded["input_ids"], {start: i for i, start in reversed([*enumerate(starts)])}


def placeholder_ids(config: Any) -> list[int]:
    """Ids of the tokens that stand for images, videos and audio or enclose them: a policy must not sample these."""
    names = [f"{kind}_token_id" for kind in ("image", "video", "audio")]
    names += [f"{kind}_{end}_token_id" for kind in ("vision", "image", "video") for end in ("start", "end")]
    names += [f"{end}_token_{number}" for end in ("boi", "eoi") for number in ("id", "index")]  # Gemma's brackets
    found = (getattr(config, name, None) for name in names)
    return sorted({token for token in found if isinstance(token, int)})


def suppressed_token_ids(config: Any, tokenizer: Any) -> torch.Tensor:
    """Token ids that sampler and trainer both exclude from the distribution, int64 [n].

    These are placeholders, and rows of the output layer beyond the tokenizer's vocabulary (models round its size up).
    """
    size, tokens = getattr(config, "text_config", config).vocab_size, {*placeholder_ids(config)}
    if config.model_type == "llama4":  # its config has the token of an image's features only
        tokens |= {tokenizer.get_vocab().get("<|image|>")} - {None}
    if config.model_type == "internvl":  # its config has no token of a video
        tokens |= {tokenizer.video_token_id}
    inside = sorted(token for token in tokens if token < len(tokenizer))
    return torch.tensor([*inside, *range(len(tokenizer), size)], dtype=torch.long)


def without_video_processor(processor_class: Any) -> Any:
    """A subclass of a processor class without its video processor, which needs torchvision.

    transformers reads the parts of a processor from the signature of its constructor. The class name and the video
    processor's configuration are kept, so a saved processor loads elsewhere with both parts.
    """

    class WithoutVideo(processor_class):
        video_config: dict[str, Any] | None = None

        def __init__(
            self,
            image_processor: Any = None,
            tokenizer: Any = None,
            chat_template: Any = None,
            image_seq_length: int | None = None,  # for InternVL; transformers passes what is named here
        ) -> None:
            options = {} if image_seq_length is None else {"image_seq_length": image_seq_length}
            super().__init__(image_processor, tokenizer, chat_template=chat_template, **options)

        def to_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            extra = {} if self.video_config is None else {"video_processor": self.video_config}
            return {**super().to_dict(*args, **kwargs), **extra}

    WithoutVideo.__name__ = WithoutVideo.__qualname__ = processor_class.__name__
    return WithoutVideo


def load_processor(
    path: str,
    *,
    trust_remote_code: bool = False,
    video_fps: float = 2.0,
    video_frames: int = 32,
    video_sound: bool = False,
    **options: Any,
) -> Any:
    """Loads the processor of a vision-language model, or the tokenizer of a text model.

    Args:
        path: a model directory, hub id or `modelscope:OWNER/NAME`.
        trust_remote_code: run processor code that lies in the model's repository.
        video_fps, video_frames: frames per second that the model sees of a video, and the most frames; see
            `rlkit.vlm.load_video`. They become the video processor's `fps` and `max_frames`.
        video_sound: the model hears the sound of video files; it becomes the video processor's `use_audio_in_video`.
        options: for the image processor, e.g. its `size`, the pixel budget (for Qwen-VL also `min_pixels` and
            `max_pixels`).

    Raises:
        ValueError: no such model, a vision-language model without a processor, an option that its image processor does
            not have, or `video_sound` for a model that hears nothing.
    """
    import transformers

    if not video_fps > 0 or video_frames < 1:
        raise ValueError(f"video_fps, video_frames: expected more than 0, got {video_fps} and {video_frames}")
    path = model_path(path)
    config = load_config(path, trust_remote_code=trust_remote_code)
    if not has_vision(config):
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise ValueError(f"model {path!r}: {error}") from error
        _check_video_sound(tokenizer, video_sound)
        return tokenizer
    options["trust_remote_code"] = trust_remote_code
    no_processor = f"model {path!r}: expected a processor for this vision-language model, got none that can be loaded"
    try:
        processor = transformers.AutoProcessor.from_pretrained(path, **options)
    except (ImportError, OSError, ValueError) as error:
        name = transformers.models.auto.processing_auto.PROCESSOR_MAPPING_NAMES.get(config.model_type)
        if transformers.utils.is_torchvision_available() or name is None:
            raise ValueError(f"{no_processor}: {error}") from error
        processor_class = getattr(transformers, name)
        try:
            processor = without_video_processor(processor_class).from_pretrained(path, **options)
        except (ImportError, OSError, ValueError) as error:
            raise ValueError(f"{no_processor}: {error}") from error
        processor.video_config = _video_config(path)
    if not hasattr(processor, "image_processor"):  # AutoProcessor silently falls back to the tokenizer
        raise ValueError(f"{no_processor}: no preprocessor_config.json")
    valid = getattr(processor.image_processor, "valid_kwargs", None)  # other options would be silently ignored
    if valid is not None and (unknown := options.keys() - valid.__annotations__.keys() - {"trust_remote_code"}):
        kind, names = type(processor.image_processor).__name__, ", ".join(valid.__annotations__)
        raise ValueError(f"image processor options: expected some of {kind} ({names}), got {sorted(unknown)[0]!r}")
    _check_video_sound(processor, video_sound)
    name = type(processor).__name__
    if name in VIDEO_PROCESSORS and (settings := getattr(processor, "video_processor", None)) is not None:
        settings.fps, settings.max_frames = video_fps, video_frames
        if name in AUDIO_PROCESSORS:
            settings.use_audio_in_video = video_sound
    return processor


def _check_video_sound(processor: Any, video_sound: bool) -> None:
    if video_sound and (name := type(processor).__name__) not in AUDIO_PROCESSORS:
        raise ValueError(f"video_sound: expected a model with one of {', '.join(sorted(AUDIO_PROCESSORS))}, got {name}")


def _video_config(path: str) -> dict[str, Any] | None:
    from transformers.utils import cached_file

    kwargs: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    if (found := cached_file(path, "processor_config.json", **kwargs)) is not None:
        if (config := json.loads(Path(found).read_text()).get("video_processor")) is not None:
            return config
    if (found := cached_file(path, "video_preprocessor_config.json", **kwargs)) is not None:
        return json.loads(Path(found).read_text())
    return None


def decode(processor: Any, token_ids: Sequence[int]) -> str:
    """The text of tokens, without special tokens."""
    return getattr(processor, "tokenizer", processor).decode(token_ids, skip_special_tokens=True)
