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
MISSING_BYTES = 1024  # by which a file may be shorter than its header says; some programs write a wrong length
UNKNOWN_LENGTH = 0x7FFF0000  # from here on, the length in a WAV header is that of a stream, which has no end
BOXES = {b"ftyp", b"styp", b"moov", b"moof", b"mdat", b"free", b"skip", b"wide", b"uuid", b"sidx", b"meta", b"pnot"}
MOST_BOXES = 100_000


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
    if not source:
        raise ValueError(f"{kind}: expected a path, bytes or {otherwise}, got an empty text")
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


def check_complete(file: BinaryIO) -> None:
    """Raise a ValueError for a truncated MP4, QuickTime, WAV or AVI file, of which FFmpeg silently reads what is there.

    The file is then at its beginning.
    """
    length = file.seek(0, os.SEEK_END)
    expected = _announced_length(file, length)
    file.seek(0)
    if expected > length + MISSING_BYTES:
        raise ValueError(f"expected a complete file of {expected} bytes, got {length}")


def _announced_length(file: BinaryIO, length: int) -> int:
    """In bytes, from the header of a RIFF file (WAV, AVI), or the boxes of an MP4 file with frames; otherwise 0."""
    file.seek(0)
    head = file.read(8)
    if head[:4] == b"RIFF":
        size = int.from_bytes(head[4:], "little")
        return size + 8 if size < UNKNOWN_LENGTH else 0
    position, expected = 0, 0
    for _ in range(MOST_BOXES):
        file.seek(min(position, length))
        head = file.read(16)
        size, kind = int.from_bytes(head[:4], "big"), head[4:8]
        size = int.from_bytes(head[8:], "big") if size == 1 else size
        if size < 8 or kind not in BOXES:
            break
        position += size
        if kind == b"mdat":
            expected = position
    return expected
