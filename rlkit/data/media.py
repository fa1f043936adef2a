"""Decoded sound and videos, as samples carry them to processors and samplers. Images are PIL's."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Audio(NamedTuple):
    """Sound of one channel, as the input of a model.

    Attributes:
        samples: float32 [samples], from -1 to 1.
        rate: samples per second.
    """

    samples: np.ndarray
    rate: int


class Video(NamedTuple):
    """The frames of a video that a model sees, at equal distances in time.

    Attributes:
        frames: uint8 [frames, height, width, 3].
        fps: number of these frames per second of the video; frame i was taken at i / fps seconds.
        sound: of the video, if the model is to hear it.
    """

    frames: np.ndarray
    fps: float
    sound: Audio | None = None

    @property
    def metadata(self) -> dict[str, Any]:
        """The video's `VideoMetadata` of transformers, which also vLLM takes: all frames are used, in this order."""
        count = len(self.frames)
        return {
            "total_num_frames": count,
            "fps": self.fps,
            "duration": count / self.fps,
            "frames_indices": list(range(count)),
        }
