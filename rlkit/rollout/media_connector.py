"""A vLLM plug-in: the server's side of videos and audios, which a trainer sends as frames and samples.

vLLM itself decodes files, and takes frames of its own choice from them. Here a server gets the arrays that training
sees. It uses this connector if the environment variable VLLM_MEDIA_CONNECTOR is "rlkit", as `rlkit.rollout.serve` sets
it. The trainer's side is `rlkit.rollout.servers.vllm`.
"""

from __future__ import annotations

from typing import Any

from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

from rlkit.data.media import Audio, Video
from rlkit.rollout.servers.arrays import arrays_of
from rlkit.rollout.vllm_requests import vllm_audio, vllm_video

NAME = "rlkit"


class ArrayConnector(MediaConnector):
    """Reads URLs of `rlkit.rollout.servers.arrays`, and all others as vLLM does."""

    async def fetch_video_async(self, video_url: str, **options: Any) -> Any:
        if (arrays := arrays_of(video_url)) is None:
            return await super().fetch_video_async(video_url, **options)
        return vllm_video(Video(arrays["frames"], arrays["fps"].item()))

    async def fetch_audio_async(self, audio_url: str) -> Any:
        if (arrays := arrays_of(audio_url)) is None:
            return await super().fetch_audio_async(audio_url)
        return vllm_audio(Audio(arrays["samples"], arrays["rate"].item()))


def register() -> None:
    """Register the connector with vLLM."""
    MEDIA_CONNECTOR_REGISTRY.register(NAME)(ArrayConnector)
