"""Images: a file, bytes or a PIL image -> an RGB image, within limits of time and size."""

from __future__ import annotations

import io
import time
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from rlkit.vlm.media_sources import open_regular_file, resolve_source

# formats of photographs and figures; not PostScript, say, which Pillow would have another program draw
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "ICO")

DECODING_SECONDS = 10.0  # of processor time


def load_image(source: Any) -> Image.Image:
    """An RGB image from a path, bytes, a PIL image, a data URL, or the {"bytes", "path"} struct of Hugging Face sets.

    Transparent pixels become white, as in vLLM.

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
    """The image turned as its EXIF data say, on white, in 8 bits a channel. This decodes an opened file."""
    width, height = image.size
    if Image.MAX_IMAGE_PIXELS is not None and width * height > Image.MAX_IMAGE_PIXELS:
        raise ValueError(f"expected at most {Image.MAX_IMAGE_PIXELS} pixels, got {width}x{height}")
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # convert() would saturate: everything above 255 white
        image = Image.fromarray((np.asarray(image) // 257).astype("uint8"))
    if image.mode in ("I", "F"):
        raise ValueError(f"expected 8 or 16 bits a channel, got pixels of mode {image.mode!r}")
    if image.has_transparency_data:  # convert("RGB") would show the colour of transparent pixels, which is often black
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
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
