"""An image tool for `run_episodes`, and a task that cannot be solved without it."""

from __future__ import annotations

import re

import numpy as np
from PIL import Image

from rlkit.data.samples import Sample
from rlkit.data.tables import HELD_OUT_SEED, Row
from rlkit.data.tasks import Task
from rlkit.rewards.rules import exact_match
from rlkit.rollout.agent import Observation

ZOOM_CALL = re.compile(r"zoom\((\d{1,9}),\s*(\d{1,9}),\s*(\d{1,9}),\s*(\d{1,9})\)")
QUADRANTS = ("top left", "top right", "bottom left", "bottom right")
QUADRANT_CALLS = ("zoom(0,0,50,50)", "zoom(50,0,100,50)", "zoom(0,50,50,100)", "zoom(50,50,100,100)")


async def zoom(sample: Sample) -> Observation | None:
    """`zoom(left, top, right, bottom)`, in percent of the image, shows that part; a turn without a call ends.

    The part is cut out of the row's `original`, if it has one and the prompt shows a smaller copy of it; else out of
    the prompt's first image, of which the model's processor makes the smaller copy. An empty box, one that reaches
    beyond the image, and a narrow strip are answered with text: they are mistakes of the policy, not of the tool.
    """
    if (call := ZOOM_CALL.search(sample.text)) is None:
        return None
    left, top, right, bottom = (int(number) for number in call.groups())
    if not (left < right <= 100 and top < bottom <= 100):
        return Observation(
            "zoom: expected 0 <= left < right <= 100 and 0 <= top < bottom <= 100, "
            f"got {left}, {top}, {right}, {bottom}"
        )
    original = sample.row.get("original") or sample.images[0]
    width, height = original.size
    part = original.crop(
        (left * width // 100, top * height // 100, -(-right * width // 100), -(-bottom * height // 100))
    )
    if max(part.size) > 100 * min(part.size):  # no processor takes such an image
        return Observation("zoom: expected a part at most 100 times as long as wide, got a longer one")
    return Observation(images=[part])


def zoomed_digits() -> Task:
    """Four handwritten digits (scikit-learn's) on a canvas that is shown so small that a digit is one pixel.

    "What digit is top left?" is solved by `zoom(0,0,50,50)`, which shows that quadrant, and then by its digit. There is
    one canvas for each digit, with three others on it. Canvases of the 360 held-out digits show held-out digits only.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    pixels = (data.images * (255 / 16)).astype("uint8")
    pictures = [Image.fromarray(digit).resize((56, 56), Image.Resampling.BILINEAR) for digit in pixels]
    rng = np.random.default_rng(HELD_OUT_SEED)
    order = rng.permutation(len(data.target))

    def row(i: int, split: np.ndarray) -> Row:
        digits, quadrant = rng.choice(split, 4), int(rng.integers(4))
        digits[quadrant] = i
        canvas = Image.new("RGB", (112, 112))
        for k, j in enumerate(digits):
            canvas.paste(pictures[j], (k % 2 * 56, k // 2 * 56))
        small = canvas.resize((2, 2), Image.Resampling.BOX).resize((28, 28), Image.Resampling.NEAREST)
        return {
            "question": f"What digit is {QUADRANTS[quadrant]}?",
            "images": [small],
            "original": canvas,
            "answer": str(data.target[i]),
            "digits": [str(data.target[j]) for j in digits],
            "where": f"zoomed_digits row {i}",
        }

    train, heldout = ([row(i, part) for i in part] for part in (order[360:], order[:360]))
    return Task("zoomed_digits", train=train, heldout=heldout, reward=exact_match)


def noisy_demonstration(sample: Sample, rng: np.random.Generator) -> str:
    """The next turn of a demonstration to imitate before RL: the calls are well-formed and the digits are read
    correctly, but four of five calls zoom into a random quadrant."""
    if len(sample.images) == 1:
        target = next(k for k, quadrant in enumerate(QUADRANTS) if quadrant in sample.row["question"])
        return QUADRANT_CALLS[target if rng.random() < 0.2 else rng.integers(4)]
    left, top = (int(number) for number in ZOOM_CALL.findall(sample.text)[0][:2])
    return sample.row["digits"][2 * (top > 0) + (left > 0)]
