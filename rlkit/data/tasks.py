"""Tasks: rows to train on, held-out rows, and a reward function.

A row is a mapping with `question` (text), `images` (a list of paths, bytes or PIL images, possibly empty), `answer`,
and `where` (its name in error messages: file and row). A chat in `messages` may replace `question`;
`rlkit.data.formats` reads the formats of files. A reward function is `reward(text, row) -> float | None`; None or nan
means that the response could not be scored, which is not the same as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rlkit.data.lookup import requires_extra
from rlkit.data.samples import Reward, Row
from rlkit.data.tables import HELD_OUT_SEED, Rows, as_rows
from rlkit.rewards.rules import exact_match, numeric_match


@dataclass(frozen=True)
class Task:
    """Rows to train on, held-out rows, and a reward function.

    Attributes:
        name: used in names of runs.
        train: rows to train on.
        heldout: rows to evaluate on.
        reward: `reward(text, row) -> float | None`.
        splits: all rows of each split of a data set; the rows of a file are the split "train".
    """

    name: str
    train: Sequence[Row]
    heldout: Sequence[Row]
    reward: Reward
    splits: Mapping[str, Sequence[Row]] = field(default_factory=dict)


def map_rows(task: Task, change: Callable[[Row], Row]) -> Task:
    """The task with `change` applied to each row, on access."""

    def changed(rows: Sequence[Row]) -> Sequence[Row]:
        table = as_rows(rows)
        return table.with_read(lambda number: change(table.read(number)))

    return map_tables(task, changed)


def map_tables(task: Task, change: Callable[[Sequence[Row]], Sequence[Row]]) -> Task:
    """The task with `change` applied to its training rows, its held-out rows, and the rows of each split."""
    splits = {split: change(rows) for split, rows in task.splits.items()}
    return replace(task, train=change(task.train), heldout=change(task.heldout), splits=splits)


def digits() -> Task:
    """1,797 handwritten digits (8x8 pixels, from the UCI test set that scikit-learn ships), enlarged to 56x56.

    360 of them are held out. The reward is 1 if the response is the digit alone, otherwise 0.
    """
    with requires_extra("recipes"):
        from PIL import Image
        from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(HELD_OUT_SEED).permutation(len(data.target))

    def row(i: int) -> Row:
        pixels = (data.images[i] * (255 / 16)).astype("uint8")
        image = Image.fromarray(pixels).resize((56, 56), Image.Resampling.BILINEAR).convert("RGB")
        question, answer = "What digit is this?", str(data.target[i])
        return {"question": question, "images": [image], "answer": answer, "where": f"digits row {i}"}

    rows = [row(i) for i in order]
    return Task("digits", train=rows[360:], heldout=rows[:360], reward=exact_match)


def sorting() -> Task:
    """1,000 questions that ask to sort three digits: "Sort the digits 311.", answer 113. 200 of them are held out.

    The reward is 1 if the response is the sorted digits alone, otherwise 0.
    """

    def row(i: int) -> Row:
        digits = f"{i:03}"
        question, answer = f"Sort the digits {digits}.", "".join(sorted(digits))
        return {"question": question, "images": [], "answer": answer, "where": f"sorting row {digits}"}

    rows = [row(i) for i in np.random.default_rng(HELD_OUT_SEED).permutation(1000)]
    return Task("sorting", train=rows[200:], heldout=rows[:200], reward=exact_match)


def addition() -> Task:
    """Two numbers of two digits to add: "What is 17 + 25?", 42. There are 4,095 pairs, and 200 of them are held out.

    Each pair is there once, the smaller number first. The reward is 1 if the last number in the response is the sum, so
    a chat model may answer in a sentence.
    """
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]

    def row(i: int) -> Row:
        a, b = pairs[i]
        where = f"addition row {a} + {b}"
        return {"question": f"What is {a} + {b}?", "images": [], "answer": str(a + b), "where": where}

    order = np.random.default_rng(HELD_OUT_SEED).permutation(len(pairs))
    return Task("addition", train=Rows(row, order[200:]), heldout=Rows(row, order[:200]), reward=numeric_match())


def step_rows(rows: Sequence[Row], step: int, count: int, seed: int) -> list[tuple[int, Row]]:
    """The rows of one step of endlessly repeated, shuffled epochs. A pure function, so resuming needs no state.

    Args:
        rows: of a task.
        step: number of the step, from 0.
        count: rows per step.
        seed: for shuffling.

    Returns:
        (position within the step, row) pairs; the position is the group id.

    Raises:
        ValueError: there are no rows.
    """
    if not len(rows):
        raise ValueError("task: expected rows to train on, got none")
    first = step * count
    epochs = {i // len(rows) for i in range(first, first + count)}
    order = {e: np.random.default_rng((seed, e)).permutation(len(rows)) for e in epochs}
    return [(i - first, rows[int(order[i // len(rows)][i % len(rows)])]) for i in range(first, first + count)]


def rows_of_steps(rows: Sequence[Row], steps: Iterable[int], count: int, seed: int) -> Iterator[list[tuple[int, Row]]]:
    """`step_rows` of each of these steps."""
    return (step_rows(rows, step, count, seed) for step in steps)
