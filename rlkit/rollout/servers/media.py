"""Images, videos and audios in requests to servers, as data URLs."""

from __future__ import annotations

import asyncio
import base64
import io
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlkit.data.messages import MEDIA
from rlkit.data.samples import Sample
from rlkit.rollout.sampling import sample_name
from rlkit.rollout.servers.arrays import array_url

Part = dict[str, str]
"""A medium as the part of a message: {"type": "image_url", "url": ...}."""


class MediaEncoder:
    """Encodes the media of requests, one after the other in a thread.

    Each medium is encoded once, before the first request with it is sent, and kept until its last request has finished.
    More threads would finish the first one later, as they compete for Python's lock.

    Args:
        requests: the sample of each request to come; samples of one prompt have the same media.
    """

    def __init__(self, requests: Iterable[Sample]) -> None:
        self.requests_left = Counter(id(medium) for request in requests for _, medium in _media(request))
        self.encoded: dict[int, asyncio.Future[Part]] = {}
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="media")

    async def parts(self, request: Sample) -> list[Part]:
        """The media of a request, each kind in the order of its placeholders.

        Raises:
            ValueError: an image that cannot be encoded.
        """
        for kind, medium in _media(request):
            if id(medium) not in self.encoded:
                self.encoded[id(medium)] = asyncio.get_running_loop().run_in_executor(
                    self.thread, media_part, kind, medium, sample_name(request)
                )
        return await asyncio.gather(*(self.encoded[id(medium)] for _, medium in _media(request)))

    def finished(self, request: Sample) -> None:
        """Say that a request has been answered."""
        for _, medium in _media(request):
            self.requests_left[id(medium)] -= 1
            if not self.requests_left[id(medium)]:
                del self.encoded[id(medium)]


def _media(request: Sample) -> Iterator[tuple[str, Any]]:
    for kind in MEDIA:
        for medium in getattr(request, f"{kind}s"):
            yield kind, medium


def media_part(kind: str, medium: Any, name: str) -> Part:
    """An image, a `Video` or an `Audio` as the part of a message.

    Args:
        kind: one of `MEDIA`.
        name: name of the sample, for error messages.
    """
    match kind:
        case "image":
            url = image_data_url(medium, name)
        case "video":
            url = array_url(frames=medium.frames, fps=medium.fps)
        case _:
            url = array_url(samples=medium.samples, rate=medium.rate)
    return {"type": f"{kind}_url", "url": url}


def image_data_url(image: Any, name: str) -> str:
    """An image as a data URL of a BMP file: its pixels as they are, since compressing takes longer than sending them.

    Args:
        name: name of the sample, for error messages.

    Raises:
        ValueError: it is not an image that can be saved as BMP.
    """
    buffer = io.BytesIO()
    try:
        image.save(buffer, "BMP")
    except (AttributeError, OSError, ValueError) as error:
        raise ValueError(f"{name}: expected an image that can be saved as BMP, got {error}") from error
    return "data:image/bmp;base64," + base64.b64encode(buffer.getvalue()).decode()
