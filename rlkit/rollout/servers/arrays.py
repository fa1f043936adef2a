"""Frames of videos and samples of audios in requests to servers, as data URLs. Imports no vLLM."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np

PREFIX = "data:application/x-npz;base64,"


def array_url(**arrays: Any) -> str:
    """A data URL of numpy's .npz format, which keeps every array as it is."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return PREFIX + base64.b64encode(buffer.getvalue()).decode()


def arrays_of(url: str) -> dict[str, np.ndarray] | None:
    """The arrays of a URL of `array_url`; None for other URLs."""
    if not url.startswith(PREFIX):
        return None
    with np.load(io.BytesIO(base64.b64decode(url.removeprefix(PREFIX))), allow_pickle=False) as arrays:
        return dict(arrays)
