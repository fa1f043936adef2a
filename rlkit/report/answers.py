"""Answers that a run keeps for people to read: samples.jsonl, and the folders `images` and `audios` next to it.

Each line holds a prompt and all of its answers:

    {"step": 3, "kind": "training", "prompt": 17, "question": "...", "expected": "7", "images": ["images/3f2a.webp"],
     "audios": [{"file": "audios/91c0.wav", "seconds": 4.2}],
     "answers": [{"text": "7", "reward": 1.0, "parts": {"right": 1.0}, "finish_reason": "stop", "tokens": 2}, ...]}

`kind` is "training", or "held-out" for answers to held-out prompts after `step` steps.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import wave
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit.tracking import SAMPLES

IMAGES, AUDIOS = "images", "audios"
LARGEST_SIDE = 512  # pixels of a saved image
SAVED_SECONDS = 30.0  # of an audio; a longer one is cut
MOST_BYTES = 24_000_000  # of answers and images on one page
MOST_BYTES_OF_AUDIOS = 24_000_000  # on one page: nine minutes of 16000 samples per second
MOST_CHARACTERS = 20_000  # of each text on the page; samples.jsonl has the whole text


def prompt_record(
    out: Path, samples: Sequence[Any], kind: str, step: int, parts: Mapping[str, Sequence[float]] | None = None
) -> dict[str, Any]:
    """Make one record for samples.jsonl, and save the prompt's images, audios and a strip of each video's frames.

    Args:
        out: the run's directory.
        samples: the judged answers to one prompt, as rlkit.data.Sample.
        kind: "training" or "held-out".
        step: the training step; for held-out prompts, the number of finished steps.
        parts: values of each part of a combined reward, one per sample.
    """
    first = samples[0]
    row = first.row or {}
    answers = [
        {
            "text": sample.text,
            "reward": finite(sample.reward),
            "parts": {name: finite(values[i]) for name, values in (parts or {}).items()},
            "finish_reason": sample.finish_reason,
            "tokens": sum(sample.mask),
        }
        for i, sample in enumerate(samples)
    ]
    pictures = [*first.images, *(frame_strip(video) for video in first.videos)]
    images = [name for image in pictures if (name := save_image(out, image))]
    audios = [save_audio(out, audio) for audio in first.audios]
    question, expected = (str(row.get(name, "")) for name in ("question", "answer"))
    place = {"step": step, "kind": kind, "prompt": first.group_id}
    texts = {"question": question, "expected": expected}
    return {**place, **texts, "images": images, "audios": audios, "answers": answers}


def frame_strip(video: Any, most: int = 8, height: int = 128) -> Any:
    """Some frames of a video side by side as a PIL image, from the first to the last at equal distances.

    Args:
        video: a `rlkit.data.Video`.
        most: frames.
        height: of the strip in pixels, if the frames are higher.
    """
    import numpy as np
    from PIL import Image

    chosen = np.linspace(0, len(video.frames) - 1, min(most, len(video.frames))).round().astype(int)
    frames = [Image.fromarray(np.ascontiguousarray(video.frames[i])) for i in chosen]
    for frame in frames:
        frame.thumbnail((4 * height, height))
    width, tall = frames[0].size
    strip = Image.new("RGB", (len(frames) * (width + 2) - 2, tall), "white")
    for i, frame in enumerate(frames):
        strip.paste(frame, (i * (width + 2), 0))
    return strip


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
            small.save(out / name, lossless=max(small.size) <= 64, quality=85)  # the page enlarges small images
    except Exception:  # a broken image must not end the run
        return ""
    return name


def save_audio(out: Path, audio: Any) -> dict[str, Any]:
    """Save the first 30 seconds of an audio as a .wav file of 16 bits, under the hash of its content.

    Args:
        audio: a `rlkit.data.Audio`.

    Returns:
        `file`, its path relative to `out`, and `seconds` of the whole audio; `file` is empty if it cannot be saved.
    """
    import numpy as np

    seconds = len(audio.samples) / audio.rate
    samples = np.clip(np.nan_to_num(audio.samples[: int(SAVED_SECONDS * audio.rate)]), -1, 1)
    content = (samples * 32767).round().astype("<i2").tobytes()
    name = f"{AUDIOS}/{hashlib.sha256(f'{audio.rate}'.encode() + content).hexdigest()[:16]}.wav"
    try:
        if not (out / name).exists():
            (out / AUDIOS).mkdir(exist_ok=True)
            with wave.open(str(out / name), "wb") as file:
                file.setparams((1, 2, audio.rate, 0, "NONE", ""))
                file.writeframes(content)
    except OSError:  # a full disk must not end the run here
        name = ""
    return {"file": name, "seconds": round(seconds, 2)}


def answers_for_page(out: Path) -> dict[str, Any]:
    """The part of samples.jsonl that a page shows.

    If all records and images are larger than `MOST_BYTES`, only every second step is shown, or every third, ...

    Returns:
        `prompts`: records, each with the keys of its images and audios. `images`: data URLs by key. `audios`: likewise,
        as many as `MOST_BYTES_OF_AUDIOS` allows, those of the newest steps first. `every`: n, where every n-th step is
        shown. `audio_seconds`: how much of an audio is saved.
    """
    records = read_records(out / SAMPLES)
    sizes: dict[int, int] = {}
    seen: set[str] = set()
    for record in records:
        new = [name for name in record["images"] if name not in seen]
        seen.update(new)
        bytes_of_images = sum((out / name).stat().st_size for name in new if (out / name).is_file())
        sizes[record["step"]] = sizes.get(record["step"], 0) + len(json.dumps(record)) + 4 * bytes_of_images // 3
    steps = sorted(sizes)
    every = max(1, math.ceil(sum(sizes.values()) / MOST_BYTES))
    chosen = {*steps[::-every]}  # includes the newest step
    shown = [record for record in records if record["step"] in chosen]
    names = dict.fromkeys(name for record in shown for name in record["images"])
    images = {name: url for name in names if (url := data_url(out, name))}
    return {
        "prompts": [_shortened(record) for record in shown],
        "images": images,
        "audios": _audios_for_page(out, shown),
        "every": every,
        "audio_seconds": SAVED_SECONDS,
    }


def _audios_for_page(out: Path, records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Data URLs of the audios of records by file, newest steps first, up to `MOST_BYTES_OF_AUDIOS`."""
    newest_first = sorted(records, key=lambda record: -record["step"])
    found: dict[str, str] = {}
    total = 0
    for name in dict.fromkeys(audio["file"] for record in newest_first for audio in record["audios"]):
        size = 4 * (out / name).stat().st_size // 3 if (out / name).is_file() else 0
        if size and total + size <= MOST_BYTES_OF_AUDIOS and (url := data_url(out, name)):
            found[name] = url
            total += size
    return found


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a samples.jsonl. A later record of the same kind, step and prompt replaces an earlier one.

    Lines that are not records are left out, such as a line that was cut off when the process was killed.
    """
    found = {}
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else ():
        try:
            record = json.loads(line, parse_constant=lambda _: None)
            images, answers = map(str, record["images"]), [dict(answer) for answer in record["answers"]]
            audios = [
                {"file": str(audio["file"]), "seconds": finite(audio["seconds"])} for audio in record.get("audios", ())
            ]
            place = (str(record["kind"]), int(record["step"]), str(record["prompt"]))
            texts = {name: str(record[name]) for name in ("question", "expected")}
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        kind, step, prompt = place
        media = {"images": [*images], "audios": audios}
        found[place] = {"step": step, "kind": kind, "prompt": prompt, **media, "answers": answers, **texts}
    return list(found.values())


def _shortened(record: Mapping[str, Any]) -> dict[str, Any]:
    def cut(text: Any) -> str:
        text = str(text)
        return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} … [{len(text)} characters]"

    answers = [{**answer, "text": cut(answer.get("text", ""))} for answer in record["answers"]]
    return {**record, "question": cut(record["question"]), "expected": cut(record["expected"]), "answers": answers}


def data_url(out: Path, name: str) -> str:
    """A saved image or audio of a run as a data URL; an empty string if it is missing or lies in another folder."""
    path = out / name
    kind = {out / IMAGES: "image/webp", out / AUDIOS: "audio/wav"}.get(path.parent)
    if kind is None or not path.is_file():
        return ""
    return f"data:{kind};base64," + base64.b64encode(path.read_bytes()).decode()
