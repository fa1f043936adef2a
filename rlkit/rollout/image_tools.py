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

CALL = re.compile(r"zoom\((\d{1,9}),\s*(\d{1,9}),\s*(\d{1,9}),\s*(\d{1,9})\)")
PLACES = ("top left", "top right", "bottom left", "bottom right")
CALLS = ("zoom(0,0,50,50)", "zoom(50,0,100,50)", "zoom(0,50,50,100)", "zoom(50,50,100,100)")  # that show those


async def zoom(sample: Sample) -> Observation | None:
    """`zoom(left, top, right, bottom)`, in percent of the image, shows that part of it; a turn without a call ends.

    The part is cut out of the row's `original` if it has one, an image of which the policy was shown a smaller copy,
    else out of the prompt's first image (where the model's processor makes the smaller copy). A box that is empty,
    reaches beyond the image or is a mere strip is answered with a text: the mistake is the policy's, not the tool's.
    """
    if (call := CALL.search(sample.text)) is None:
        return None
    left, top, right, bottom = (int(part) for part in call.groups())
    if not (left < right <= 100 and top < bottom <= 100):
        return Observation("zoom: 0 <= left < right <= 100 and 0 <= top < bottom <= 100 expected")
    original = sample.row.get("original") or sample.images[0]
    width, height = original.size
    part = original.crop(
        (left * width // 100, top * height // 100, -(-right * width // 100), -(-bottom * height // 100))
    )
    if max(part.size) > 100 * min(part.size):  # no processor takes one
        return Observation("zoom: a part at most 100 times as long as wide expected")
    return Observation(images=[part])


def zoomed_digits() -> Task:
    """Four handwritten digits (scikit-learn's) on a canvas that is shown so small that a digit is one pixel.

    "What digit is top left?" is answered by `zoom(0,0,50,50)`, which shows that quarter, and then by its digit. There
    is a canvas for each digit, with three others beside it; those of the 360 held-out digits hold no others.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    pixels = (data.images * (255 / 16)).astype("uint8")
    pictures = [Image.fromarray(digit).resize((56, 56), Image.Resampling.BILINEAR) for digit in pixels]
    rng = np.random.default_rng(HELD_OUT_SEED)
    order = rng.permutation(len(data.target))

    def row(i: int, among: np.ndarray) -> Row:
        four, place = rng.choice(among, 4), int(rng.integers(4))
        four[place] = i
        canvas = Image.new("RGB", (112, 112))
        for k, j in enumerate(four):
            canvas.paste(pictures[j], (k % 2 * 56, k // 2 * 56))
        small = canvas.resize((2, 2), Image.Resampling.BOX).resize((28, 28), Image.Resampling.NEAREST)
        return {
            "question": f"What digit is {PLACES[place]}?",
            "images": [small],
            "original": canvas,
            "answer": str(data.target[i]),
            "digits": [str(data.target[j]) for j in four],
            "where": f"zoomed_digits row {i}",
        }

    train, heldout = ([row(i, part) for i in part] for part in (order[360:], order[:360]))
    return Task("zoomed_digits", train=train, heldout=heldout, reward=exact_match)


def careless_turn(sample: Sample, rng: np.random.Generator) -> str:
    """The next turn of one who knows the tool and the digits, but in four of five cases looks anywhere: what to imitate
    before learning."""
    if len(sample.images) == 1:
        asked = next(k for k, place in enumerate(PLACES) if place in sample.row["question"])
        return CALLS[asked if rng.random() < 0.2 else rng.integers(4)]
    left, top = (int(part) for part in CALL.findall(sample.text)[0][:2])
    return sample.row["digits"][2 * (top > 0) + (left > 0)]
