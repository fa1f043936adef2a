"""Processors: images, and text with places for them -> both token tracks; with torchvision or without it."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image, ImageOps

from rlkit.data.samples import Expansion, Sample, expand, prompt
from rlkit.vlm.loading import can_see, load_config, model_path

# formats of photographs and figures; not PostScript, say, which Pillow would have another program draw
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "ICO")


def load_image(source: Any) -> Image.Image:
    """An RGB image from a path, bytes, a PIL image, a data URL, or the {"bytes", "path"} struct of Hugging Face sets.

    A data URL is a text that holds the image: "data:image/png;base64,...". A path must be that of a regular file: a
    pipe or a device is not opened. Images of more than `PIL.Image.MAX_IMAGE_PIXELS` pixels are not decoded.

    Raises:
        ValueError: it cannot be read, is empty, too large or not in one of `FORMATS`, or is a URL (fetch those
            beforehand: a run that depends on the network cannot be repeated).
    """
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, str) and (found := re.match(r"data:image/[\w.+-]+;base64,", source)):
        source = base64.b64decode(source[found.end() :])
    if isinstance(source, str) and "://" in source:
        raise ValueError(f"image: expected a local path, bytes or a PIL image, got the URL {source!r}")
    name = repr(str(source)) if isinstance(source, str | Path) else f"of type {type(source).__name__}"
    try:
        if isinstance(source, bytes | bytearray):
            image = _as_rgb(Image.open(io.BytesIO(source), formats=_known_formats()))
        elif isinstance(source, str | Path):
            with _open_regular_file(source) as file:
                image = _as_rgb(Image.open(file, formats=_known_formats()))
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


@cache
def _known_formats() -> list[str]:
    """Those of `FORMATS` that this Pillow can read."""
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def _open_regular_file(path: str | Path) -> BinaryIO:
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


OF_TEXT = frozenset({"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"})  # made by the engine


def encode_text(processor: Any, text: str, images: Sequence[Image.Image] = ()) -> Sample:
    """Both token tracks of a text in which each image has its one placeholder.

    The expanded track is the processor's own; what in it stands for which image is found from the texts that the
    processor says it puts in the place of placeholders (`return_text_replacement_offsets`).

    Raises:
        ValueError: text that is no Unicode, images without a place for them, places without an image, an image that has
            no such shape, or a processor that does not say so.
    """
    if stray := re.search("[\ud800-\udfff]", text):
        raise ValueError(f"prompt: expected Unicode text, got the unpaired surrogate {stray[0]!r}")
    tokenizer = getattr(processor, "tokenizer", processor)
    compact = tokenizer(text, add_special_tokens=False)["input_ids"]
    if images and tokenizer is processor:
        raise ValueError(f"{len(images)} images, but the model's processor is a tokenizer: it cannot see")
    image: Any = getattr(processor, "image_token_id", None)
    video = getattr(processor, "video_token_id", None)
    feature = getattr(tokenizer, "image_token_id", image)  # Gemma3 has a token for an image, one for each feature
    for kind, token, given in (("image", image, len(images)), ("video", video, 0), ("image feature", feature, 0)):
        slots = 0 if kind == "image feature" and token == image else compact.count(token)
        if slots != given:  # a question may spell a placeholder out
            raise ValueError(f"{given} {kind}s, but the prompt has {slots} places for them")
    if not images:
        return prompt(compact)
    inputs = processor(
        text=[text], images=list(images), return_tensors="pt", add_special_tokens=False,
        return_text_replacement_offsets=True,
    )  # fmt: skip
    expanded = inputs["input_ids"][0].tolist()
    replaced = (inputs.get("text_replacement_offsets") or [[]])[0]
    placeholders = {image: _expansions(tokenizer, text, replaced, image)}
    if len(replaced) != len(images) or expand(compact, placeholders) != expanded:
        raise ValueError(f"{type(processor).__name__} does not say which of its tokens stand for which image")
    vision = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor) and name not in OF_TEXT}
    return prompt(expanded, compact, vision=vision, placeholders=placeholders, images=images)


def _expansions(tokenizer: Any, text: str, replaced: Sequence[Any], placeholder: int) -> list[int | Expansion]:
    """The tokens of each image, given where a text was put in the place of its placeholder.

    A tokenizer may join such a text with what stands beside it, so the cuts are where a token begins both before and
    after. Images without a cut between them go together under the first.
    """
    whole, done = "", 0
    for one in replaced:
        whole, done = whole + text[done : one["span"][0]] + one["replacement"], one["span"][1]
    ids, begins = _tokens(tokenizer, text)
    expanded, begins_after = _tokens(tokenizer, whole + text[done:])
    first = [0, *(one["span"][1] for one in replaced)]  # of the text before, between and behind the images
    last = [*(one["span"][0] for one in replaced), len(text)]
    moved = [0, *(one["new_span"][1] - one["span"][1] for one in replaced)]
    cuts = [
        [x for x in range(a, b + 1) if x in begins and x + by in begins_after]
        for a, b, by in zip(first, last, moved, strict=True)
    ]
    found: list[int | Expansion] = []
    places = [i for i, token in enumerate(ids) if token == placeholder]
    while (i := len(found)) < len(replaced):
        j = next(j for j in range(i + 1, len(cuts)) if cuts[j])
        left, right = cuts[i][-1], cuts[j][0]
        tokens = expanded[begins_after[left + moved[i]] : begins_after[right + moved[j]]]
        before, after = places[i] - begins[left], begins[right] - places[i] - 1
        alone = not before and not after and set(tokens) == {placeholder}
        found += [len(tokens) if alone else Expansion(tokens, before, after), *[Expansion([])] * (j - i - 1)]
    return found


def _tokens(tokenizer: Any, text: str) -> tuple[list[int], dict[int, int]]:
    """Token ids, and for each character where a token begins the number of that token; the end counts as one."""
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts = [*(start for start, _ in found["offset_mapping"]), len(text)]
    return found["input_ids"], {start: i for i, start in reversed([*enumerate(starts)])}


def placeholder_ids(config: Any) -> list[int]:
    """Token ids that stand for images, videos and audio, and their brackets: no policy may sample them."""
    names = [f"{kind}_token_id" for kind in ("image", "video", "audio")]
    names += [f"{kind}_{end}_token_id" for kind in ("vision", "image", "video") for end in ("start", "end")]
    names += [f"{end}_token_{number}" for end in ("boi", "eoi") for number in ("id", "index")]  # Gemma's brackets
    found = (getattr(config, name, None) for name in names)
    return sorted({token for token in found if isinstance(token, int)})


def suppressed_token_ids(config: Any, tokenizer: Any) -> torch.Tensor:
    """What sampler and trainer both leave out of the distribution: placeholders, and rows of the output layer that are
    beyond the tokenizer's vocabulary (models round it up)."""
    size = getattr(config, "text_config", config).vocab_size
    inside = [token for token in placeholder_ids(config) if token < len(tokenizer)]
    return torch.tensor([*inside, *range(len(tokenizer), size)], dtype=torch.long)


def image_only(processor_class: Any) -> Any:
    """A processor class for images alone, where torchvision, which the video part wants, is not installed.

    transformers reads the parts of a processor off its constructor's signature; this one has no video part. The name is
    kept, and so is the video part of the configuration, so that what is saved loads elsewhere as the whole processor.
    """

    class ImageOnly(processor_class):
        video_config: dict[str, Any] | None = None

        def __init__(
            self,
            image_processor: Any = None,
            tokenizer: Any = None,
            chat_template: Any = None,
            image_seq_length: int | None = None,  # InternVL's; transformers hands over what is named here
        ) -> None:
            more = {} if image_seq_length is None else {"image_seq_length": image_seq_length}
            super().__init__(image_processor, tokenizer, chat_template=chat_template, **more)

        def to_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            extra = {} if self.video_config is None else {"video_processor": self.video_config}
            return {**super().to_dict(*args, **kwargs), **extra}

    ImageOnly.__name__ = ImageOnly.__qualname__ = processor_class.__name__
    return ImageOnly


def load_processor(path: str, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """The processor of a model directory, hub id or `modelscope:OWNER/NAME`; for a text model its tokenizer.

    Args:
        options: handed to the image processor, e.g. its `size`, the pixel budget (Qwen-VL's also as `min_pixels` and
            `max_pixels`).

    Raises:
        ValueError: no such model, a vision-language model without a processor, or an option that its image processor
            does not have.
    """
    import transformers

    path = model_path(path)
    config = load_config(path, trust_remote_code=trust_remote_code)
    if not can_see(config):
        try:
            return transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise ValueError(f"model {path!r}: {error}") from error
    options["trust_remote_code"] = trust_remote_code
    lacks = f"model {path!r}: a vision-language model without a processor that can be loaded"
    try:
        processor = transformers.AutoProcessor.from_pretrained(path, **options)
    except (ImportError, OSError, ValueError) as error:
        known = transformers.models.auto.processing_auto.PROCESSOR_MAPPING_NAMES
        name = known.get(config.model_type)
        if transformers.utils.is_torchvision_available() or name is None:
            raise ValueError(f"{lacks}: {error}") from error
        whole = getattr(transformers, name)
        try:
            processor = image_only(whole).from_pretrained(path, **options)
        except (ImportError, OSError, ValueError) as error:
            raise ValueError(f"{lacks}: {error}") from error
        processor.video_config = _video_config(path)
    if not hasattr(processor, "image_processor"):  # AutoProcessor falls back to the tokenizer alone without a word
        raise ValueError(f"{lacks}: no preprocessor_config.json")
    takes = getattr(processor.image_processor, "valid_kwargs", None)  # what is not among them is ignored without a word
    if takes is not None and (unknown := options.keys() - takes.__annotations__.keys() - {"trust_remote_code"}):
        name = type(processor.image_processor).__name__
        raise ValueError(f"{sorted(unknown)[0]}: expected an option of {name}: {', '.join(takes.__annotations__)}")
    return processor


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
    """Text of sampled tokens, without special ones."""
    return getattr(processor, "tokenizer", processor).decode(token_ids, skip_special_tokens=True)
