"""Videos: a file, bytes or a list of frames -> the frames that a model sees, at equal distances in time."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rlkit.data.media import Video
from rlkit.vlm.audios import VIDEO_FORMATS, audio_rate, decode_audio, load_audios, open_container
from rlkit.vlm.images import load_image
from rlkit.vlm.media_sources import open_regular_file, resolve_source
from rlkit.vlm.processors import QWEN2_5_OMNI, QWEN3_OMNI

FPS = 2.0  # the default of the Qwen-VL processors
MAX_FRAMES = 32
DECODING_SECONDS = 60.0  # of processor time
TRUNCATED_SECONDS = 1.0  # by which a file may end before the time in its header
TIME_RESOLUTION = 1e-3  # seconds; Matroska and WebM round the times of frames to milliseconds
MAX_PIXELS = 1 << 29  # of all frames together: 1.5 GiB of RGB, and twice that while frames are stacked

# Processor -> seconds of which the time between two frames is a multiple. Qwen3-Omni's position ids are only whole
# numbers if two frames, which make one step of the time axis, take whole seconds. For Qwen2.5-Omni transformers rounds
# products of seconds in float32, and vLLM in float64: they agree on multiples of a power of two.
FRAME_INTERVALS = {QWEN2_5_OMNI: 1 / 16, QWEN3_OMNI: 1 / 2}


def load_video(
    source: Any,
    *,
    fps: float = FPS,
    max_frames: int = MAX_FRAMES,
    frame_interval: float | None = None,
    sound_rate: int | None = None,
) -> Video:
    """The frames of a video that a model sees, and the sound that it hears.

    Of a file, frames are taken at the times 0, 1 / rate, 2 / rate, ... seconds, with

        rate = min(fps, max_frames / duration, frames per second of the file)

    Each is the frame that a player shows at that time, which is the last one that has begun. With a `frame_interval`,
    1 / rate is rounded up to a multiple of it. Frames that are given as a list are all used.

    Args:
        source: a path, bytes, a data URL ("data:video/mp4;base64,..."), the {"bytes", "path"} struct of Hugging Face
            sets; a list of frames (each as for `load_image`, all of one size), uint8 [frames, height, width, 3], or
            {"frames": such frames, "fps": of these frames}; or a `Video`. Files are decoded by PyAV.
        fps: frames per second; for frames without `fps`, the rate at which they were taken.
        max_frames: most frames of a file.
        frame_interval: in seconds.
        sound_rate: samples per second of the sound; None: without sound. Only files have sound, and not all of them.

    Raises:
        ValueError: it cannot be read, has no frames, frames of several sizes or too many pixels, takes more than
            `DECODING_SECONDS` to decode, is in none of `VIDEO_FORMATS`, is truncated, or is a URL.
        ImportError: PyAV is not installed.
    """
    if isinstance(source, Video):
        return source
    if isinstance(source, Mapping) and source.get("frames") is not None:
        given = source.get("fps")
        return _from_frames(source["frames"], fps if given is None else given)
    if isinstance(source, list | tuple) or isinstance(source, np.ndarray):
        return _from_frames(source, fps)
    source, name = resolve_source(source, "video", "frames")
    try:
        if isinstance(source, bytes | bytearray):
            return _decode(io.BytesIO(source), fps, max_frames, frame_interval, sound_rate)
        if isinstance(source, str | Path):
            with open_regular_file(source) as file:
                return _decode(file, fps, max_frames, frame_interval, sound_rate)
        raise ValueError("expected a path, bytes or a list of frames")
    except (OSError, ValueError) as error:
        raise ValueError(f"video {name}: cannot be read: {error}") from error


def _from_frames(frames: Any, fps: Any) -> Video:
    if not (isinstance(fps, int | float | np.integer | np.floating) and 0 < fps < math.inf):
        raise ValueError(f"video: expected frames per second above 0, got {fps!r}")
    if not isinstance(frames, list | tuple | np.ndarray):
        raise ValueError(f"video: expected a list of frames, got {type(frames).__name__}")
    if isinstance(frames, np.ndarray) and frames.ndim == 4 and frames.shape[-1] == 3 and frames.dtype == np.uint8:
        found = frames
    else:
        images = [np.asarray(load_image(frame)) for frame in frames]
        if len(sizes := {image.shape for image in images}) > 1:
            shown = ", ".join(sorted(f"{width}x{height}" for height, width, _ in sizes))
            raise ValueError(f"video: expected frames of one size, got {shown}")
        found = np.stack(images) if images else np.empty((0, 1, 1, 3), np.uint8)
    if not found.size:
        raise ValueError("video: expected frames, got none")
    return Video(found, float(fps))


def _decode(file: BinaryIO, fps: float, max_frames: int, frame_interval: float | None, sound_rate: int | None) -> Video:
    with open_container(file, VIDEO_FORMATS, "video") as container:
        video, has_sound = _sample_frames(container, fps, max_frames, frame_interval), bool(container.streams.audio)
    if sound_rate is None or not has_sound:
        return video
    file.seek(0)
    return video._replace(sound=decode_audio(file, sound_rate))


def _sample_frames(container: Any, fps: float, max_frames: int, frame_interval: float | None) -> Video:
    """See `load_video`."""
    if not container.streams.video:
        raise ValueError("expected a video, got a file without one")
    stream = container.streams.video[0]
    if stream.codec_context is None:
        raise ValueError("expected a codec that FFmpeg knows, got another")
    _check_pixels(1, stream.codec_context)
    stream.codec_context.thread_count = 1  # rlkit prepares several prompts at once
    rates = [fps, max_frames / max(_duration(container, stream), 1e-3)]
    if stream.average_rate:  # MPEG-TS and ASF files may have none
        rates.append(float(stream.average_rate))
    rate = min(rates)
    if frame_interval is not None:
        rate = _rate_in_steps(rate, frame_interval)
    frames: list[np.ndarray] = []
    for frame, end in _frames_with_ends(container, stream):
        while len(frames) < max_frames and len(frames) / rate < end - TIME_RESOLUTION:
            _check_pixels(len(frames) + 1, frame)
            frames.append(np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90)))
        if len(frames) == max_frames:
            break
    if frames and len(frames) < max_frames:
        _check_complete(container, stream, frame)
    return _from_frames(np.stack(frames) if frames else [], rate)


def _check_complete(container: Any, stream: Any, last: Any) -> None:
    """Raise a ValueError for a truncated Matroska or WebM file, of which PyAV silently reads what is there.

    The header has the time at which the file ends, and often that at which its video ends, in `DURATION`.

    Args:
        last: the last frame of the video.
    """
    if "matroska" not in container.format.name:
        return  # the index of other formats is at their end, or each packet says when it is incomplete
    expected = container.duration / 1e6 if container.duration and len(container.streams) == 1 else 0.0
    if tag := stream.metadata.get("DURATION"):
        hours, minutes, seconds = map(float, tag.split(":"))
        expected = 3600 * hours + 60 * minutes + seconds
    end = (last.time or 0.0) + float((last.duration or 0) * stream.time_base)
    if end < expected - TRUNCATED_SECONDS:
        raise ValueError(f"expected a complete file of {expected:.1f} s, got one that ends after {end:.1f} s")


def _rate_in_steps(rate: float, interval: float) -> float:
    """The largest rate up to `rate` at which frames are exactly a multiple of `interval` seconds apart."""
    count = math.ceil(1 / rate / interval)
    while 1 / (1 / (count * interval)) != count * interval:  # the first is 49, as 1 / 49 is rounded
        count += 1
    return 1 / (count * interval)


def _check_pixels(frames: int, of: Any) -> None:
    if frames * of.width * of.height > MAX_PIXELS:
        raise ValueError(f"expected at most {MAX_PIXELS} pixels, got {frames} frames of {of.width}x{of.height}")


def _duration(container: Any, stream: Any) -> float:
    """In seconds, from the header; of a file without a duration there, from the last packet."""
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    if container.duration:
        return container.duration / 1e6
    times = [packet.pts for packet in container.demux(stream) if packet.pts is not None]
    container.seek(0)
    return float((max(times) - min(times)) * stream.time_base) if times else 0.0


def _frames_with_ends(container: Any, stream: Any) -> Iterator[tuple[Any, float]]:
    """(frame, end) of each frame: the next one begins at `end`, in seconds since the first frame began.

    The last frame ends just after it begins, because not every file says how long it is shown.

    Raises:
        ValueError: decoding takes too long.
    """
    deadline, first, previous, seconds = time.thread_time() + DECODING_SECONDS, None, None, 0.0
    for frame in container.decode(stream):
        if time.thread_time() > deadline:
            raise ValueError(f"expected a video that is decoded within {DECODING_SECONDS:g} s, got a longer one")
        begin = frame.time or 0.0
        first = begin if first is None else first
        seconds = begin - first
        if previous is not None:
            yield previous, seconds
        previous = frame
    if previous is not None:
        yield previous, seconds + 2 * TIME_RESOLUTION


def load_videos(processor: Any, sources: Sequence[Any]) -> list[Video]:
    """The videos of a prompt, with the frame rate and the number of frames of the processor's video processor.

    If it has `use_audio_in_video`, they have the sound of their files, as `load_audios` reads it.

    Raises:
        ValueError: as `load_video` and `load_audios`, or given frames at a rate for which Qwen3-Omni has no whole
            position ids.
    """
    settings, family = getattr(processor, "video_processor", None), type(processor).__name__
    fps, most = getattr(settings, "fps", None) or FPS, getattr(settings, "max_frames", None) or MAX_FRAMES
    options: dict[str, Any] = {"fps": fps, "max_frames": most, "frame_interval": FRAME_INTERVALS.get(family)}
    if getattr(settings, "use_audio_in_video", False):
        options["sound_rate"] = audio_rate(processor)
    videos = []
    for source in sources:
        video = load_video(source, **options)
        if video.sound is not None:
            video = video._replace(sound=load_audios(processor, [video.sound])[0])
        if family == QWEN3_OMNI and 1 / video.fps % FRAME_INTERVALS[family]:
            raise ValueError(
                f"video: expected frames a multiple of {FRAME_INTERVALS[family]} s apart for {family}, whose position "
                f"ids are not whole numbers otherwise, got {video.fps:g} frames per second"
            )
        videos.append(video)
    return videos
