"""From a sample to a request of vLLM, in this process or on a server: prompt, sampling parameters, seed.

Imports no vLLM.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import groupby, zip_longest
from typing import Any

import numpy as np
from PIL import Image

from rlkit.data.media import Audio, Video
from rlkit.data.placeholders import Expansion, expand_placeholders
from rlkit.data.samples import Sample
from rlkit.rollout.inference_requests import SUPPRESSED_LOGIT_BIAS
from rlkit.rollout.sampling import Sampling, sample_name
from rlkit.vlm.families import has_bidirectional_images
from rlkit.vlm.processors import (
    FRAMES_AS_IMAGES,
    GLM_PROCESSORS,
    NEXT_VIDEO,
    OMNI_PROCESSORS,
    QWEN2_5_OMNI,
    VIDEO_LLAMA,
    placeholder_id,
)

MAX_LOGIT_BIASES = 1024  # tokens, in vLLM's runner V2, whose process dies with more; V1 has no limit
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
TEMPERATURES = (0.01, 2.0)  # vLLM replaces lower ones by 0.01, and refuses higher ones


def vllm_prompt(request: Sample, processor: Any) -> dict[str, Any]:
    """vLLM's prompt: `compact_ids`, with one placeholder for each image, video and audio, and these media.

    vLLM expands placeholders itself, so it must not be given `token_ids`. The sound of videos is among the
    audios of a model with audio input; other models do not hear it.
    """
    prompt: dict[str, Any] = {"prompt_token_ids": list(request.compact_ids)}
    media: dict[str, Any] = {"image": list(request.images)} if request.images else {}
    if request.videos:
        media["video"] = [vllm_video(video) for video in request.videos]
    hears = type(processor).__name__ in OMNI_PROCESSORS
    sounds = [video.sound for video in request.videos if hears and video.sound is not None]
    if audios := [*request.audios, *sounds]:
        media["audio"] = [vllm_audio(audio) for audio in audios]
    return {**prompt, "multi_modal_data": media} if media else prompt


def vllm_video(video: Video) -> tuple[Any, dict[str, Any]]:
    """A video in vLLM's form: (frames, metadata). Families that need no times ignore the metadata.

    `do_sample_frames` is False, or vLLM would choose among the frames again.
    """
    return video.frames, {**video.metadata, "do_sample_frames": False}


def vllm_video_options(request: Sample, processor: Any) -> dict[str, Any]:
    """Further entries of vLLM's prompt for videos of Qwen-Omni: their frame rate, and whether they have sound.

    Videos with sound also get an identifier, because vLLM's prefix cache would identify them by their frames alone.

    Raises:
        ValueError: videos of several frame rates; or sound in some videos only, beside audios or for Qwen2.5-Omni.
    """
    if type(processor).__name__ not in OMNI_PROCESSORS or not request.videos:
        return {}
    if len(rates := {video.fps for video in request.videos}) > 1:
        shown = ", ".join(f"{rate:g}" for rate in sorted(rates))
        raise ValueError(
            f"{sample_name(request)}: videos: expected one frame rate, as vLLM has one argument for all videos of a "
            f"Qwen-Omni prompt, got {shown} frames per second; lower video_fps, or use rollout 'hf'"
        )
    arguments = {"fps": request.videos[0].fps, "do_sample_frames": False}
    sounds = [video.sound for video in request.videos if video.sound is not None]
    if not sounds:
        return {"mm_processor_kwargs": arguments}
    _check_sound(request, len(sounds), type(processor).__name__)
    return {
        "mm_processor_kwargs": {**arguments, "use_audio_in_video": True},
        "multi_modal_uuids": {"video": [_identity(video) for video in request.videos]},
    }


def _identity(video: Video) -> str:
    """A hash of the frames and the sound of a video."""
    digest = hashlib.sha256(f"{video.frames.shape}".encode())
    digest.update(video.frames.tobytes())
    if video.sound is not None:
        digest.update(video.sound.samples.tobytes())
    return digest.hexdigest()


def _check_sound(request: Sample, sounds: int, family: str) -> None:
    if family == QWEN2_5_OMNI:
        raise ValueError(
            f"{sample_name(request)}: videos: expected none with sound for {family}, as vLLM's position ids of such a "
            f"video begin one token too early, got {sounds}; use rollout 'hf', or no video_sound"
        )
    if sounds < len(request.videos) or request.audios:
        raise ValueError(
            f"{sample_name(request)}: videos: expected no other audios, and sound in all videos or in none, as vLLM "
            f"supports no other prompts of Qwen-Omni, got {len(request.videos)} videos, {sounds} with sound, and "
            f"{len(request.audios)} audios; use rollout 'hf', or no video_sound"
        )


def vllm_audio(audio: Audio) -> tuple[Any, int]:
    """An audio in vLLM's form: (samples, rate). It has the processor's rate, so vLLM does not resample it."""
    return audio.samples, audio.rate


def _check_video_normalization(requests: Sequence[Sample], processor: Any) -> None:
    """Raise a ValueError for videos of a model whose images and videos are normalized differently.

    vLLM normalizes both in the vision tower, with the mean and standard deviation of images.
    """
    if any(request.videos for request in requests):
        image_values, video_values = (
            [getattr(part, name) for name in ("image_mean", "image_std")]
            for part in (processor.image_processor, processor.video_processor)
        )
        if [list(x) for x in image_values] != [list(x) for x in video_values]:
            raise ValueError(
                "model: expected a processor with the same image_mean and image_std for images and videos, as vLLM "
                f"normalizes both alike, got {image_values} and {video_values}; use rollout 'hf'"
            )


def check_videos(requests: Sequence[Sample], processor: Any, *, prepared: bool = False) -> None:
    """Raise a ValueError for videos that vLLM refuses, or of which it would compute other inputs than the trainer.

    Args:
        prepared: whether vLLM is given the pixels that the trainer has prepared, and does not normalize them.
    """
    name = type(processor).__name__
    if not prepared:
        _check_video_normalization(requests, processor)
        if name in FRAMES_AS_IMAGES and (count := sum(len(request.videos) for request in requests)):
            raise ValueError(
                f"videos: expected none of a {name} for servers of vLLM, as vLLM takes no videos of it, and frames "
                f"only where the trainer has prepared them, got {count}; use rollout 'hf' or 'vllm'"
            )
    if name == VIDEO_LLAMA:
        _check_no_videos(requests)
    if name not in GLM_PROCESSORS:
        return
    for request in requests:
        if len(request.videos) > 1:
            raise ValueError(
                f"{sample_name(request)}: videos: expected at most 1 in a prompt, as vLLM takes no more with a {name}, "
                f"got {len(request.videos)}; use rollout 'hf'"
            )
        if request.videos and name == "Glm46VProcessor":
            _check_whole_seconds(request)


def _check_no_videos(requests: Sequence[Sample]) -> None:
    """Raise a ValueError for videos of VideoLLaMA 3, with which vLLM fails."""
    for request in requests:
        if request.videos:
            raise ValueError(
                f"{sample_name(request)}: videos: expected none for a {VIDEO_LLAMA}, as vLLM cannot tell which entries "
                f"of its video_compression_mask belong to which video, got {len(request.videos)}; use rollout 'hf'"
            )


def check_images(requests: Sequence[Sample], processor: Any) -> None:
    """Raise a ValueError for images of LLaVA-NeXT-Video, of which vLLM takes videos only."""
    if type(processor).__name__ != NEXT_VIDEO:
        return
    for request in requests:
        if request.images:
            raise ValueError(
                f"{sample_name(request)}: images: expected none for a {NEXT_VIDEO}, of which vLLM takes videos only, "
                f"got {len(request.images)}; use rollout 'hf'"
            )


def check_image_attention(requests: Sequence[Sample], config: Any) -> None:
    """Raise a ValueError for images and videos whose tokens attend to later ones, as vLLM on a CPU does not do.

    Args:
        config: of the model.
    """
    if has_bidirectional_images(config) and any(request.images or request.videos for request in requests):
        raise ValueError(
            "model: expected a family whose image tokens attend to earlier ones only, as vLLM supports no other on a "
            f"CPU, got {config.model_type}; use rollout 'hf'"
        )


VISION_CHUNKS = "KimiK25ForConditionalGeneration"  # vLLM's class, which takes neither `image` nor `video`


def takes_vision_chunks(config: Any) -> bool:
    """Whether vLLM takes images and chunks of videos together, as `vision_chunk`: Kimi K2.5 by its published class.

    Args:
        config: of the model.
    """
    return VISION_CHUNKS in (config.architectures or ())


def vision_chunk_prompt(request: Sample, processor: Any, config: Any) -> dict[str, Any]:
    """vLLM's prompt of a family that takes `vision_chunk`; {} for others, and without media.

    The text around the chunks of a video is that of the trainer, with one placeholder, that of images, for each chunk.
    """
    if not takes_vision_chunks(config) or not (request.images or request.videos):
        return {}
    image, video = placeholder_id(processor, "image"), placeholder_id(processor, "video")
    in_text = [_one_placeholder_per_chunk(one, video, image) for one in request.placeholders.get(video, ())]
    images, videos = iter(request.images), iter(request.videos)
    chunks: list[dict[str, Any]] = []
    for token in request.compact_ids:
        if token == image:
            chunks.append({"type": "image", "image": next(images), "uuid": None})
        elif token == video:
            chunks += _video_chunks(next(videos), processor.video_processor.temporal_patch_size)
    ids = expand_placeholders(request.compact_ids, {video: in_text})
    return {"prompt_token_ids": ids, "multi_modal_data": {"vision_chunk": chunks}}


def _one_placeholder_per_chunk(expansion: Any, video: int, image: int) -> Expansion:
    """The tokens of a video with a placeholder of images for each run of placeholders of videos."""
    tokens: list[int] = []
    for token, run in groupby(expansion.tokens):
        tokens += [image] if token == video else run
    return expansion._replace(tokens=tokens)


def _video_chunks(video: Video, size: int) -> list[dict[str, Any]]:
    """The frames of a video in chunks of this size; vLLM uses `prompt` and `video_idx` for prompts of text alone."""
    frames = [Image.fromarray(frame) for frame in video.frames]
    chunks = [frames[i : i + size] for i in range(0, len(frames), size)]
    return [{"type": "video_chunk", "video_chunk": one, "uuid": None, "prompt": "", "video_idx": 0} for one in chunks]


def check_kimi_videos(requests: Sequence[Sample], config: Any) -> None:
    """Raise a ValueError for videos of Kimi K2.5 by the class that transformers writes.

    vLLM has no model of that name and runs transformers' code, which fails for videos.

    Args:
        config: of the model.
    """
    if config.model_type == "kimi_k25" and not takes_vision_chunks(config):
        if count := sum(len(request.videos) for request in requests):
            raise ValueError(
                f"videos: expected none for {', '.join(config.architectures or ())} in vLLM, which runs "
                f"transformers' code for it, which fails for videos, got {count}; use rollout 'hf'"
            )


def check_vision_chunks(requests: Sequence[Sample], config: Any) -> None:
    """Raise a ValueError for images and videos of Kimi K2.5 on servers, by the class of its published files.

    Args:
        config: of the model.
    """
    count = sum(len(request.images) + len(request.videos) for request in requests)
    if takes_vision_chunks(config) and count:
        raise ValueError(
            f"images: expected none for {VISION_CHUNKS} on a vLLM server, which would have to get them as "
            f"vision_chunk, got {count} images and videos; use rollout 'vllm' or 'hf'"
        )


def check_server_media(request: Sample, processor: Any, config: Any, *, on_cpu: bool) -> None:
    """Raise a ValueError for images and videos of which a vLLM server would compute other inputs than the trainer.

    Args:
        processor, config: of the model on the server.
        on_cpu: whether a server computes on a CPU.
    """
    if request.videos and type(processor).__name__ in OMNI_PROCESSORS:
        raise ValueError(
            f"{sample_name(request)}: videos: expected none of Qwen-Omni for a vLLM server, which takes no frame "
            f"rate with a prompt, got {len(request.videos)}; use rollout 'vllm' or 'hf'"
        )
    check_images([request], processor)
    check_videos([request], processor)
    check_vision_chunks([request], config)
    check_kimi_videos([request], config)
    if on_cpu:
        check_image_attention([request], config)


def as_trainer_tokens(token_ids: Sequence[int], processor: Any, trainer_ids: Sequence[int] = ()) -> Sequence[int]:
    """The tokens of a prompt that vLLM has expanded, with the placeholders that the trainer has.

    They differ in videos of two families. For InternVL vLLM repeats the placeholder of a video, and transformers'
    processor that of an image; for Kimi K2.5 it is the other way round. The features of a frame replace either.

    Args:
        trainer_ids: the trainer's tokens, which for Kimi K2.5 say where videos are.
    """
    name = type(processor).__name__
    if name not in ("InternVLProcessor", "Kimi_K25Processor"):
        return token_ids
    image, video = placeholder_id(processor, "image"), placeholder_id(processor, "video")
    if name == "InternVLProcessor":
        return [image if token == video else token for token in token_ids]
    pairs = zip_longest(token_ids, trainer_ids[: len(token_ids)])
    return [video if pair == (image, video) else pair[0] for pair in pairs]


def _check_whole_seconds(request: Sample) -> None:
    """Raise a ValueError for a video of GLM-4.6V or GLM-OCR whose frames vLLM would give other times.

    The processor writes a time with one decimal after every second frame, "0.8 seconds". vLLM rounds times down first.
    """
    (video,) = request.videos
    for i in range(0, len(video.frames), 2):
        seconds = i / video.fps
        if f"{seconds:.1f}" != f"{int(seconds):.1f}":
            raise ValueError(
                f"{sample_name(request)}: videos: expected every second frame at a whole second, as vLLM rounds the "
                f"times of a Glm46VProcessor down to seconds, got frame {i} at {seconds:.1f} s; use rollout 'hf'"
            )


def vllm_sampling_params(
    sampling: Sampling, request: Sample, *, n: int, suppressed_token_ids: Iterable[int], end_token_ids: Sequence[int]
) -> dict[str, Any]:
    """Arguments of `vllm.SamplingParams` for one request, so that vLLM samples the distribution the trainer scores.

    Args:
        n: how many samples. At temperature 0 they are all the same, and vLLM generates no more than one.
        suppressed_token_ids: token ids that get probability 0.
        end_token_ids: tokens that end a response. The response includes the one that ended it.

    Raises:
        ValueError: a temperature at which vLLM does not sample.
    """
    check_temperature(sampling.temperature)
    return {
        "n": n if sampling.temperature else 1,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "seed": request_seed(sampling.seed, request),
        "logit_bias": dict.fromkeys(suppressed_token_ids, SUPPRESSED_LOGIT_BIAS),
        "stop_token_ids": [*end_token_ids, *sampling.stop],
        "ignore_eos": True,  # it is among `end_token_ids`
        "logprobs": 0,  # of the sampled token only
        "flat_logprobs": True,
        "detokenize": False,
        "skip_special_tokens": False,
    }


def check_temperature(temperature: float) -> None:
    """Raise a ValueError for a temperature at which vLLM does not sample; 0, greedy decoding, is none."""
    low, high = TEMPERATURES
    if temperature and not low <= temperature <= high:
        raise ValueError(
            f"temperature: expected one from {low:g} to {high:g} for vLLM, got {temperature:g}; use rollout 'hf'"
        )


def check_suppressed_token_ids(suppressed_token_ids: Sequence[int]) -> None:
    """Raise a ValueError if more tokens have to be suppressed than vLLM's runner V2 takes logit biases for."""
    if len(suppressed_token_ids) > MAX_LOGIT_BIASES:
        raise ValueError(
            f"model: expected at most {MAX_LOGIT_BIASES} suppressed tokens, the limit of vLLM's runner V2, got "
            f"{len(suppressed_token_ids)} (image placeholders, and a vocabulary larger than the tokenizer's): set "
            f"{RUNNER_VARIABLE}=0 in the environment of vLLM, for its runner V1, or use rollout 'hf'"
        )


def request_seed(seed: Sequence[int], request: Sample) -> int:
    """vLLM's seed for the first response to a prompt, or for a continued sample; vLLM adds 1 for each further one."""
    keys = (*seed, request.group_id, request.number, sum(request.mask))
    return int(np.random.default_rng(keys).integers(2**53))
