"""The image tool and the task that wants it."""

import asyncio
from dataclasses import replace

import numpy as np

from rlkit.data import prompt_sample
from rlkit.rollout.image_tools import QUADRANT_CALLS, QUADRANTS, noisy_demonstration, zoom, zoomed_digits

TASK = zoomed_digits()


def test_zoom_shows_what_it_is_asked_for():
    row = TASK.heldout[3]
    request = prompt_sample([1], row=row, images=row["images"])
    for k, call in enumerate(QUADRANT_CALLS):
        shown = asyncio.run(zoom(replace(request, text=f"I look: {call}.")))
        x, y = k % 2 * 56, k // 2 * 56
        assert shown.images[0].tobytes() == row["original"].crop((x, y, x + 56, y + 56)).tobytes()
    small = np.asarray(row["images"][0])
    assert len(np.unique(small.reshape(-1, 3), axis=0)) <= 4  # a digit is one pixel
    bare = replace(request, row={}, images=[row["original"]])
    assert asyncio.run(zoom(replace(bare, text="zoom(0, 50, 25, 100)"))).images[0].size == (28, 56)
    for bad in ("zoom(50,0,50,50)", "zoom(0,0,101,50)"):
        assert "left < right <= 100" in asyncio.run(zoom(replace(request, text=bad))).text
    assert asyncio.run(zoom(replace(request, text="7"))) is None
    strip = replace(request, row={}, images=[row["original"].resize((1000, 4))])
    assert "100 times" in asyncio.run(zoom(replace(strip, text="zoom(0,0,100,25)"))).text
    assert asyncio.run(zoom(replace(strip, text="zoom(3,0,4,1)"))).images[0].size == (10, 1)


def test_the_task_holds_out_what_it_says():
    task, again = TASK, zoomed_digits()
    assert (len(task.train), len(task.heldout)) == (1437, 360)
    for row, same in zip(task.heldout[:50], again.heldout[:50], strict=True):
        assert row["original"].tobytes() == same["original"].tobytes() and row["question"] == same["question"]
        place = next(k for k, place in enumerate(QUADRANTS) if place in row["question"])
        assert row["digits"][place] == row["answer"]
    assert {row["question"] for row in task.heldout} == {f"What digit is {place}?" for place in QUADRANTS}


def test_a_noisy_demonstration_often_zooms_to_the_wrong_quadrant():
    rng = np.random.default_rng(0)
    row = TASK.train[0]
    request = prompt_sample([1], row=row, images=row["images"])
    asked_quadrant = next(k for k, place in enumerate(QUADRANTS) if place in row["question"])
    calls = [QUADRANT_CALLS.index(noisy_demonstration(request, rng)) for _ in range(400)]
    assert 0.3 < np.mean([call == asked_quadrant for call in calls]) < 0.5 and set(calls) == {0, 1, 2, 3}
    for k, call in enumerate(QUADRANT_CALLS):
        seen = replace(request, images=[*request.images, row["original"]], text=call)
        assert noisy_demonstration(seen, rng) == row["digits"][k]
