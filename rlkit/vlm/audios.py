"""Audios: a file, bytes or samples -> the audio input of a model, of one channel, at the rate of its processor."""

from __future__ import annotations

import errno
import io
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rlkit.data.lookup import requires_extra
from rlkit.data.media import Audio
from rlkit.vlm.media_sources import check_complete, open_regular_file, resolve_source
from rlkit.vlm.processors import GEMMA3N, QWEN2_5_OMNI, QWEN3_OMNI

RATE = 16000  # of the processors of all families, in samples per second
DECODING_SECONDS = 60.0  # of processor time
MIN_SECONDS = 0.04  # of one token
MAX_AMPLITUDE = 16.0  # decoders of compressed sound go somewhat beyond 1; integers that were stored as floats, far
MAX_SECONDS = 1800.0  # 115 MB at 16000 samples per second

# Containers that hold a video itself. Playlists (HLS, DASH, concat), which name other files, are not among them.
VIDEO_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,gif,mpeg,mpegts,flv,ogg,asf"
# files of sound alone, and the sound of videos
FORMATS = f"wav,w64,flac,mp3,aac,aiff,au,caf,amr,{VIDEO_FORMATS}"


def load_audio(source: Any, *, rate: int = RATE) -> Audio:
    """The audio input of a model: several channels become their mean, and other rates are resampled.

    Args:
        source: a path, bytes, a data URL ("data:audio/wav;base64,..."), the {"bytes", "path"} struct of Hugging Face
            sets; samples as (array, sampling rate) or {"array": ..., "sampling_rate": ...}, where the array is
            [samples] or [channels, samples], of floats from -1 to 1; or an `Audio`. PyAV decodes files and resamples.
        rate: samples per second of the result.

    Raises:
        ValueError: it cannot be read, has no sound, is longer than `MAX_SECONDS`, takes more than `DECODING_SECONDS` to
            decode, is in none of `FORMATS`, is truncated, or is a URL; samples without a rate, or that are no numbers
            from -1 to 1; a file with samples that are nan, infinity or beyond `MAX_AMPLITUDE`.
        ImportError: PyAV is not installed.
    """
    if isinstance(source, Mapping) and source.get("array") is not None:
        source = (source["array"], source.get("sampling_rate"))
    source, name = resolve_source(source, "audio", "samples")
    try:
        if isinstance(source, bytes | bytearray):
            return decode_audio(io.BytesIO(source), rate)
        if isinstance(source, str | Path):
            with open_regular_file(source) as file:
                return decode_audio(file, rate)
        if isinstance(source, tuple | list) and len(source) == 2:
            return _from_samples(source[0], source[1], rate)
        raise ValueError("expected a path, bytes, or samples with their sampling rate")
    except (OSError, ValueError) as error:
        raise ValueError(f"audio {name}: cannot be read: {error}") from error


def _from_samples(array: Any, given: Any, rate: int) -> Audio:
    # the range comes first: int() fails for infinity and nan
    in_range = isinstance(given, int | float | np.integer | np.floating) and 1000 <= given <= 384000
    if not in_range or given != int(given):
        raise ValueError(f"expected a sampling rate from 1000 to 384000 samples per second, got {given!r}")
    try:
        samples = np.asarray(array, dtype=np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"expected samples as an array of numbers, got {type(array).__name__}: {error}") from error
    if samples.ndim not in (1, 2) or not samples.size:
        raise ValueError(f"expected samples [samples] or [channels, samples], got the shape {list(samples.shape)}")
    if not np.abs(samples).max() <= 1:  # also nan
        raise ValueError(f"expected samples from -1 to 1, got up to {np.abs(samples).max():g}; divide integers by 2^15")
    _check_length(samples.shape[-1], int(given))
    samples = samples.mean(0) if samples.ndim == 2 else samples
    return Audio(samples if given == rate else _resample(samples, int(given), rate), rate)


def _resample(samples: np.ndarray, given: int, rate: int) -> np.ndarray:
    with requires_extra("audio"):
        import av

    frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
    frame.sample_rate = given
    resampler = av.AudioResampler(format="fltp", rate=rate)
    return np.concatenate([_mean(piece) for piece in [*resampler.resample(frame), *resampler.resample(None)]])


def _mean(frame: Any) -> np.ndarray:
    """Of the channels: [samples]. FFmpeg's own mixture to one channel would be louder."""
    return frame.to_ndarray().mean(0)


def decode_audio(file: BinaryIO, rate: int) -> Audio:
    """The sound of a file, or of a file's video, with `rate` samples per second; for errors see `load_audio`."""
    with open_container(file, FORMATS, "audio") as container:
        import av

        return Audio(_samples(container, av.AudioResampler(format="fltp", rate=rate), rate), rate)


@contextmanager
def open_container(file: BinaryIO, formats: str, extra: str) -> Iterator[Any]:
    """Open a file with PyAV.

    Args:
        formats: which containers are allowed.
        extra: of rlkit, which installs PyAV.

    Raises:
        ValueError: the file is truncated, or PyAV cannot open it, or not decode it in the `with` block.
        ImportError: PyAV is not installed.
    """
    with requires_extra(extra):
        import av

    check_complete(file)
    # a container that names other files cannot open them: no protocol is allowed
    options = {"format_whitelist": formats, "protocol_whitelist": "none"}
    try:
        with av.open(file, options=options) as container:
            yield container
    except av.error.FFmpegError as error:
        hint = f"; expected one of the formats {formats}" if error.errno == errno.EINVAL else ""
        raise ValueError(f"{error.strerror}{hint}") from error
    except IndexError as error:  # of PyAV, for the first packet of such a stream
        raise ValueError("expected streams that all begin with the file, got one that begins later") from error


def _samples(container: Any, resampler: Any, rate: int) -> np.ndarray:
    """The samples of the first stream with sound, float32 [samples]."""
    if not container.streams.audio:
        raise ValueError("expected sound, got a file without it")
    stream = container.streams.audio[0]
    if stream.codec_context is None:
        raise ValueError("expected a codec that FFmpeg knows, got another")
    stream.codec_context.thread_count = 1  # rlkit prepares several prompts at once
    end, pieces, length = time.thread_time() + DECODING_SECONDS, [], 0
    for frame in container.decode(stream):
        if time.thread_time() > end:
            raise ValueError(f"expected an audio that is decoded within {DECODING_SECONDS:g} s, got a longer one")
        for piece in resampler.resample(frame):
            pieces.append(_mean(piece))
            length += len(pieces[-1])
        _check_length(length, rate)
    pieces += [_mean(piece) for piece in resampler.resample(None)] if pieces else []
    if not pieces:
        raise ValueError("expected sound, got no samples")
    samples = np.concatenate(pieces)
    if not np.isfinite(samples).all():
        raise ValueError("expected finite samples, got nan or infinity")
    if (largest := np.abs(samples).max()) > MAX_AMPLITUDE:
        raise ValueError(f"expected samples from -1 to 1, got up to {largest:g}")
    return samples


def _check_length(samples: int, rate: int) -> None:
    if samples > MAX_SECONDS * rate:
        raise ValueError(f"expected at most {MAX_SECONDS:g} s, got a longer sound")


def load_audios(processor: Any, sources: Sequence[Any]) -> list[Audio]:
    """The audios of a prompt, with the sampling rate of the processor's feature extractor.

    Those of Qwen3-Omni end with silence up to a whole frame, and to a second. Otherwise the number of frames would
    depend on the other audios of the prompt, and the features of a shorter audio on those of the batch, because the
    encoder pads a chunk to the longest one before its convolutions. The silence is at least as long as the window of
    the last frame reaches beyond the end: there a shorter audio has silence, and the longest one is reflected.
    Those of Gemma 3n end with up to 0.06 s of silence, without which their last token would depend on the padding.

    Raises:
        ValueError: as `load_audio`, or an audio that the processor would cut off, or that is shorter than a token.
    """
    extractor: Any = getattr(processor, "feature_extractor", None)
    family, rate, limit = type(processor).__name__, audio_rate(processor), _longest_audio(processor)
    audios = []
    for source in sources:
        audio = load_audio(source, rate=rate)
        seconds = len(audio.samples) / rate
        if seconds < MIN_SECONDS:
            raise ValueError(f"audio: expected at least {MIN_SECONDS:g} s, got {seconds:.3g} s")
        if seconds > limit:
            raise ValueError(f"audio: expected at most {limit:g} s for {family}, got {seconds:.1f} s")
        if family == QWEN3_OMNI:
            hop = extractor.hop_length
            silence = extractor.n_fft // 2 - hop
            length = max(rate, math.ceil((len(audio.samples) + silence) / hop) * hop)
            audio = Audio(np.pad(audio.samples, (0, length - len(audio.samples))), rate)
        if family == GEMMA3N:
            audio = _with_frames_for_gemma3n(audio, extractor)
        audios.append(audio)
    return audios


def _with_frames_for_gemma3n(audio: Audio, extractor: Any) -> Audio:
    """The audio with silence at its end, such that the last token sees no padding.

    A token is computed from 16 frames: by two convolutions with a kernel of 3 and a stride of 2, of whose results every
    fourth is kept. It sees the first 7 of its frames, and attends to earlier tokens only. The last token therefore gets
    7 frames at least. The longest audio is an exception, as it is never padded.
    """
    window, hop, most = extractor.frame_length + 1, extractor.hop_length, 30 * audio.rate
    samples = min(math.ceil(max(len(audio.samples), window) / 128) * 128, most)  # the extractor's padding
    frames = (samples - window) // hop + 1
    missing = max(0, 7 - (frames - 1) % 16 - 1)
    length = min((frames + missing - 1) * hop + window, most) if missing else len(audio.samples)
    return Audio(np.pad(audio.samples, (0, max(0, length - len(audio.samples)))), audio.rate)


def _longest_audio(processor: Any) -> float:
    """The most seconds that a processor takes of an audio; without this limit it would cut off the rest."""
    if type(processor).__name__ == QWEN2_5_OMNI:
        return processor.feature_extractor.chunk_length
    if type(processor).__name__ == GEMMA3N:
        return 30.0
    if hasattr(processor, "audio_ms_per_token"):  # Gemma 4
        return processor.audio_seq_length * processor.audio_ms_per_token / 1000
    return MAX_SECONDS


def audio_rate(processor: Any) -> int:
    """Samples per second of the processor's feature extractor."""
    return getattr(getattr(processor, "feature_extractor", None), "sampling_rate", RATE)
