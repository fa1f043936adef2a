"""Where images, videos and audios come from: paths, bytes, data URLs and the structs of Hugging Face sets."""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from rlkit.data.messages import bytes_or_path

LONGEST_PATH, LONGEST_NAME = 4096, 255  # characters of a path and of a file's name; Linux opens no longer ones


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
