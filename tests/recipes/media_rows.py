"""Rows with sound, videos and images, and a tiny Qwen2.5-Omni that takes all three."""

import io
import json
import sys
import wave
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "vlm"))
import family_processors  # noqa: E402

FAMILY = "qwen2_5_omni_thinker"


def save_model(folder):
    for part in (family_processors.model(FAMILY), family_processors.processor(FAMILY)):
        part.save_pretrained(folder)


def wav(pitch, seconds, rise=0):
    """A file with a tone of this pitch in Hz, which rises by so many Hz a second, at 16000 samples per second."""
    file, times = io.BytesIO(), np.arange(int(16000 * seconds)) / 16000
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, 16000, 0, "NONE", ""))
        out.writeframes((16000 * np.sin(2 * np.pi * (pitch + rise * times / 2) * times)).astype("<i2"))
    return file.getvalue()


def write_mixed_rows(file, count):
    """One row with sound, one with a video of images, one with an image, one with text alone, and so on."""
    lines = []
    for i in range(count):
        row = {"question": f"Bright {i}?", "answer": str(i % 2)}
        for name in (f"{i}-a.png", f"{i}-b.png"):
            Image.new("RGB", (40, 40), (20 * i % 256, 90, 200)).save(file.parent / name)
        if i % 4 == 0:
            (file.parent / f"{i}.wav").write_bytes(wav(200 + 100 * i, 0.1 + 0.02 * i))
            row["audio"] = f"{i}.wav"
        elif i % 4 == 1:
            row["video"] = {"frames": [f"{i}-a.png", f"{i}-b.png"] * (1 + i % 3), "fps": 2}
        elif i % 4 == 2:
            row["image"] = f"{i}-a.png"
        lines.append(json.dumps(row) + "\n")
    file.write_text("".join(lines))
