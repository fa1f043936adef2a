"""Responses that a run keeps for people to read: samples.jsonl, and the folders `images` and `audios` next to it.

Each line holds a prompt and all of its responses:

    {"step": 3, "kind": "training", "prompt": 17, "question": "...", "expected": "7", "images": ["images/3f2a.webp"],
     "audios": [{"file": "audios/91c0.wav", "seconds": 4.2}],
     "responses": [{"text": "7", "reward": 1.0, "parts": {"right": 1.0}, "finish_reason": "stop", "tokens": 2}, ...]}

`kind` is "training", or "held-out" for responses to held-out prompts after `step` steps.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import os
import wave
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from rlkit.tracking import SAMPLES
from rlkit.tracking.files import replace_file

IMAGES, AUDIOS = "images", "audios"
LARGEST_SIDE = 512  # pixels of a saved image
COLUMNS = 2  # of a video's frames: a prompt's images are 240 pixels wide on the page
SAVED_SECONDS = 30.0  # of an audio; a longer one is cut
MOST_BYTES = 24_000_000  # of responses and images on one page
MOST_BYTES_OF_AUDIOS = 24_000_000  # on one page: nine minutes of 16000 samples per second
RESPONSES = b', "responses": ['  # in a line of samples.jsonl
TAIL = 1000  # bytes that tell whether a samples.jsonl has only grown
MOST_CHARACTERS = 20_000  # of each text on the page; samples.jsonl has the whole text


def prompt_record(
    out: Path, samples: Sequence[Any], kind: str, step: int, parts: Mapping[str, Sequence[float]] | None = None
) -> dict[str, Any]:
    """Make one record for samples.jsonl, and save the prompt's images, audios and a grid of each video's frames.

    Args:
        out: the run's directory.
        samples: the scored responses to one prompt, as rlkit.data.Sample.
        kind: "training" or "held-out".
        step: the training step; for held-out prompts, the number of finished steps.
        parts: values of each part of a combined reward, one per sample.
    """
    first = samples[0]
    row = first.row or {}
    responses = [
        {
            "text": sample.text,
            "reward": finite(sample.reward),
            "parts": {name: finite(values[i]) for name, values in (parts or {}).items()},
            "finish_reason": sample.finish_reason,
            "tokens": sum(sample.mask),
        }
        for i, sample in enumerate(samples)
    ]
    pictures = [*first.images, *(frame_grid(video) for video in first.videos)]
    images = [name for image in pictures if (name := save_image(out, image))]
    sounds = [*first.audios, *(video.sound for video in first.videos if video.sound is not None)]
    audios = [save_audio(out, audio) for audio in sounds]
    question, expected = (str(row.get(name, "")) for name in ("question", "answer"))
    place = {"step": step, "kind": kind, "prompt": first.group_id}
    texts = {"question": question, "expected": expected}
    return {**place, **texts, "images": images, "audios": audios, "responses": responses}


def frame_grid(video: Any, most: int = 8) -> Any:
    """Some frames of a video as one PIL image, from the first to the last at equal distances.

    They are in two columns, row by row. The image has at most `LARGEST_SIDE` pixels in width and height.

    Args:
        video: a `rlkit.data.media.Video`.
        most: frames.
    """
    import numpy as np
    from PIL import Image

    chosen = np.linspace(0, len(video.frames) - 1, min(most, len(video.frames))).round().astype(int)
    frames = [Image.fromarray(np.ascontiguousarray(video.frames[i])) for i in chosen]
    rows, gap = math.ceil(len(frames) / COLUMNS), 2
    for frame in frames:
        frame.thumbnail((LARGEST_SIDE // COLUMNS - gap, LARGEST_SIDE // rows - gap))
    width, height = frames[0].width + gap, frames[0].height + gap
    grid = Image.new("RGB", (min(COLUMNS, len(frames)) * width - gap, rows * height - gap), "white")
    for i, frame in enumerate(frames):
        grid.paste(frame, (i % COLUMNS * width, i // COLUMNS * height))
    return grid


def append_records(out: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append records to samples.jsonl."""
    with (out / SAMPLES).open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def finite(value: Any) -> Any:
    """A reward as a JSON value: None for nan, infinities and anything that is not a number."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def save_image(out: Path, image: Any) -> str:
    """Save a copy of an image, at most 512 pixels wide and high, under the hash of its content.

    Returns:
        The file's path relative to `out`; an empty string if the image cannot be saved.
    """
    try:
        small = image.convert("RGB")
        small.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
        content = f"{small.size}".encode() + small.tobytes()
        name = f"{IMAGES}/{hashlib.sha256(content).hexdigest()[:16]}.webp"
        if not (out / name).exists():
            (out / IMAGES).mkdir(exist_ok=True)
            encoded = io.BytesIO()
            small.save(encoded, "webp", lossless=max(small.size) <= 64, quality=85)  # the page enlarges small images
            replace_file(out / name, encoded.getvalue())
    except Exception:  # a broken image or a full disk must not end the run
        return ""
    return name


def save_audio(out: Path, audio: Any) -> dict[str, Any]:
    """Save the first 30 seconds of an audio as a .wav file of 16 bits, under the hash of its content.

    Args:
        audio: a `rlkit.data.media.Audio`.

    Returns:
        `file`, its path relative to `out`, and `seconds` of the whole audio; `file` is empty if it cannot be saved.
    """
    import numpy as np

    seconds = len(audio.samples) / audio.rate
    try:
        samples = np.clip(np.nan_to_num(audio.samples[: int(SAVED_SECONDS * audio.rate)]), -1, 1)
        content = (samples * 32767).round().astype("<i2").tobytes()
        name = f"{AUDIOS}/{hashlib.sha256(f'{audio.rate}'.encode() + content).hexdigest()[:16]}.wav"
        if not (out / name).exists():
            (out / AUDIOS).mkdir(exist_ok=True)
            encoded = io.BytesIO()
            with wave.open(encoded, "wb") as file:
                file.setparams((1, 2, audio.rate, 0, "NONE", ""))
                file.writeframes(content)
            replace_file(out / name, encoded.getvalue())
    except Exception:  # a broken audio or a full disk must not end the run
        name = ""
    return {"file": name, "seconds": round(seconds, 2)}


def responses_for_page(out: Path) -> dict[str, Any]:
    """The part of samples.jsonl that a page shows.

    If all records and images are larger than `MOST_BYTES`, only every second step is shown, or every third, ...; of a
    step that is larger itself, only every second prompt, or every third, ...

    Returns:
        `prompts`: records, each with the keys of its images and audios. `images`: data URLs by key. `audios`: likewise,
        as many as `MOST_BYTES_OF_AUDIOS` allows, those of the newest steps first. `kept`: how many records the file
        has. `audio_seconds`: how much of an audio is saved.
    """
    index = _index(out / SAMPLES)
    lines = index.update()
    by_step: dict[int, list[Line]] = {}
    for line in lines:
        by_step.setdefault(line.step, []).append(line)
    every = _pages(out, lines)
    chosen = set()
    for step in sorted(by_step)[::-every]:  # includes the newest step
        chosen |= {line.start for line in by_step[step][:: _pages(out, by_step[step])]}
    shown = index.read([line for line in lines if line.start in chosen])
    names = dict.fromkeys(name for record in shown for name in record["images"])
    images = {name: url for name in names if (url := data_url(out, name))}
    return {
        "prompts": [_shortened(record) for record in shown],
        "images": images,
        "audios": _audios_for_page(out, shown),
        "kept": len(lines),
        "audio_seconds": SAVED_SECONDS,
    }


def _pages(out: Path, lines: Sequence[Line]) -> int:
    """How many pages of `MOST_BYTES` these records and their images fill, at least 1."""
    images = dict.fromkeys(name for line in lines for name in line.images)
    size = sum(line.size for line in lines) + sum(4 * _saved_bytes(out, name) // 3 for name in images)
    return max(1, math.ceil(size / MOST_BYTES))


def _audios_for_page(out: Path, records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Data URLs of the audios of records by file, newest steps first, up to `MOST_BYTES_OF_AUDIOS`."""
    newest_first = sorted(records, key=lambda record: -record["step"])
    found: dict[str, str] = {}
    total = 0
    for name in dict.fromkeys(audio["file"] for record in newest_first for audio in record["audios"]):
        size = 4 * _saved_bytes(out, name) // 3
        if size and total + size <= MOST_BYTES_OF_AUDIOS and (url := data_url(out, name)):
            found[name] = url
            total += size
    return found


class Line(NamedTuple):
    """The place of a record in samples.jsonl, in bytes, and what chooses the records of a page."""

    start: int
    size: int
    step: int
    images: list[str]


class RecordIndex:
    """Where the records of a samples.jsonl are, so that a page of a long run reads only those that it shows.

    A later record of the same kind, step and prompt replaces an earlier one. Lines that are not records are left out,
    such as a line that was cut off when the process was killed. Numbers that are not finite become None.

    Args:
        path: of the file. It may grow, and may be replaced by another.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.inode, self.head = 0, b""  # of the file, and its first bytes
        self.end, self.tail = 0, b""  # how many bytes have been read, and the last of them
        self.lines: dict[tuple[str, int, str], Line] = {}

    def update(self) -> list[Line]:
        """Read what is new in the file, and return the lines of all records."""
        if not self.path.exists():
            return []
        with self.path.open("rb", buffering=1 << 20) as file:  # lines may be long
            file.seek(self.end - len(self.tail))
            if file.read(len(self.tail)) != self.tail or self._begins_otherwise(file):  # another file
                self.end, self.tail, self.lines = 0, b"", {}
            file.seek(self.end)
            for line in file:
                record = _parse_place(line)
                if record is None and not line.endswith(b"\n"):
                    break  # it is being written
                if record is not None:
                    place = (record["kind"], record["step"], record["prompt"])
                    self.lines[place] = Line(self.end, len(line), record["step"], record["images"])
                self.end, self.tail = self.end + len(line), line[-TAIL:]
            file.seek(0)
            self.inode, self.head = os.fstat(file.fileno()).st_ino, file.read(min(TAIL, self.end))
        return list(self.lines.values())

    def _begins_otherwise(self, file: BinaryIO) -> bool:
        file.seek(0)
        return (os.fstat(file.fileno()).st_ino, file.read(len(self.head))) != (self.inode, self.head)

    def read(self, lines: Sequence[Line]) -> list[dict[str, Any]]:
        """The records of these lines."""
        if not lines:
            return []
        records = []
        with self.path.open("rb") as file:
            for line in lines:
                file.seek(line.start)
                records.append(_parse_record(file.read(line.size)))
        return [record for record in records if record is not None]


def _parse_place(line: bytes) -> dict[str, Any] | None:
    """`_parse_record`, without the responses where they are the last part of the line, and most of it.

    A quotation mark within a text has a backslash before it, so no text contains `RESPONSES`.
    """
    if line.endswith(b"\n"):
        start, responses, _ = line.partition(RESPONSES)
        if record := _parse_record(start + responses + b"]}"):
            return record
    return _parse_record(line)


_index = cache(RecordIndex)  # a run's page is written again and again


def _parse_record(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None if there is none."""
    hooks: Any = {"parse_constant": lambda _: None, "parse_float": _finite_number, "parse_int": _finite_number}
    try:
        record = json.loads(line.decode(errors="replace"), **hooks)
        images, responses = map(str, record["images"]), [dict(response) for response in record["responses"]]
        audios = [
            {"file": str(audio["file"]), "seconds": finite(audio["seconds"])} for audio in record.get("audios", ())
        ]
        place = {"step": int(record["step"]), "kind": str(record["kind"]), "prompt": str(record["prompt"])}
        texts = {name: str(record[name]) for name in ("question", "expected")}
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return {**place, "images": [*images], "audios": audios, "responses": responses, **texts}


def _finite_number(text: str) -> float | int | None:
    """A number in JSON; None if it is too large for a float."""
    number = float(text)
    return None if math.isinf(number) else int(text) if text.lstrip("-").isdigit() else number


def _shortened(record: Mapping[str, Any]) -> dict[str, Any]:
    def cut(text: Any) -> str:
        text = str(text)
        return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} … [{len(text)} characters]"

    responses = [{**response, "text": cut(response.get("text", ""))} for response in record["responses"]]
    return {**record, "question": cut(record["question"]), "expected": cut(record["expected"]), "responses": responses}


def data_url(out: Path, name: str) -> str:
    """A saved image or audio of a run as a data URL; an empty string if it is not a file in `IMAGES` or `AUDIOS`."""
    if not _saved_bytes(out, name):
        return ""
    kind = "image/webp" if (out / name).parent == out / IMAGES else "audio/wav"
    try:
        return f"data:{kind};base64," + base64.b64encode((out / name).read_bytes()).decode()
    except OSError:
        return ""


def _saved_bytes(out: Path, name: str) -> int:
    """The size of a saved image or audio; 0 if it is missing, in another folder, or a link, which may lead anywhere."""
    path = out / name
    if path.parent not in (out / IMAGES, out / AUDIOS):
        return 0
    try:
        is_link = path.is_symlink() or path.parent.is_symlink()
        return path.stat().st_size if path.is_file() and not is_link else 0
    except (OSError, ValueError):  # a name that no file can have
        return 0
