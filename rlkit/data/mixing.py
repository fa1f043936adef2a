"""Several tasks as one, and easy rows before hard ones, in pure functions: none keeps a state to be saved."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from rlkit.data.samples import Row
from rlkit.data.tables import Rows
from rlkit.data.tasks import Task


def mix_tasks(tasks: Sequence[Task], weights: Sequence[float] | None = None) -> Task:
    """Several tasks as one, which each row is drawn from in proportion to its weight; any recipe takes it.

    An epoch of the mixture holds every row of every task at least once. It is as long as that needs: n_k rows with
    share w_k need n_k / w_k in all, so the rows of a small task with a large weight come several times, each as often
    as the others or once more. `step_rows` shuffles it as it shuffles any task.

    Args:
        tasks: with different names.
        weights: one a task, above 0, of any sum; by default as many rows as each task has.

    Returns:
        a task named "a+b". Its rows say which task they are from (`row["task"]`), which is also what judges them; the
        held-out rows are those of all tasks, each once.

    Raises:
        ValueError: no task, two of the same name, one without training rows, or weights that do not fit.
    """
    names = [task.name for task in tasks]
    if not tasks or len(set(names)) < len(names):
        raise ValueError(f"tasks: expected at least one, with different names, got {names}")
    if empty := [task.name for task in tasks if not len(task.train)]:
        raise ValueError(f"tasks: {empty[0]!r} has no rows to train on")
    sizes = [len(task.train) for task in tasks]
    shares = sizes if weights is None else list(weights)
    if len(shares) != len(tasks) or not all(math.isfinite(share) and share > 0 for share in shares):
        raise ValueError(f"weights: expected {len(tasks)} numbers above 0, got {shares}")
    longest = max(size / share for size, share in zip(sizes, shares, strict=True))
    places = [np.arange(round(longest * share)) % size for size, share in zip(sizes, shares, strict=True)]
    which = np.repeat(np.arange(len(tasks)), [len(place) for place in places])
    place = np.concatenate(places)

    def train(i: int) -> Row:
        task = tasks[which[i]]
        return {**task.train[int(place[i])], "task": task.name}

    asked = [(task, i) for task in tasks for i in range(len(task.heldout))]

    def heldout(i: int) -> Row:
        task, place = asked[i]
        return {**task.heldout[place], "task": task.name}

    rewards = {task.name: task.reward for task in tasks}
    return Task(
        "+".join(names),
        train=Rows(train, np.arange(len(place))),
        heldout=Rows(heldout, np.arange(len(asked))),
        reward=lambda text, row: rewards[row["task"]](text, row),
    )


def sort_by_difficulty(rows: Sequence[Row], difficulty: Callable[[Row], float]) -> Sequence[Row]:
    """The rows from easy to hard; those of equal difficulty keep their order.

    Args:
        rows: as a task's; each is looked at once.
        difficulty: a number for a row, e.g. `lambda row: row["level"]`.

    Raises:
        ValueError: a difficulty that is nan.
    """
    keys = np.array([float(difficulty(row)) for row in rows])
    if np.isnan(keys).any():
        raise ValueError(f"difficulty: expected a number, got nan in row {int(np.isnan(keys).argmax())}")
    return Rows(lambda i: rows[i], keys.argsort(kind="stable"))


def easiest_rows(rows: Sequence[Row], share: float) -> Sequence[Row]:
    """The first share of rows that are sorted by difficulty, at least one of them.

        ordered = sort_by_difficulty(task.train, difficulty)
        rows = step_rows(easiest_rows(ordered, share), step, count, seed)

    Args:
        share: in [0, 1]. Of the step alone, `min(1, 0.2 + step / 100)`, it is a curriculum that is fixed beforehand; of
            measured accuracy, see `widen_share`, one that waits until the model is ready.

    Raises:
        ValueError: a share outside [0, 1].
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share: expected in [0, 1], got {share}")
    return rows[: max(1, math.ceil(share * len(rows)))]


def widen_share(share: float, accuracy: float, *, target: float = 0.7, by: float = 0.05) -> float:
    """The next step's share of the rows: `by` more where the accuracy reached the target, else the same.

    It is the one number of the curriculum that a checkpoint has to carry: `save_checkpoint(path, {"step": step,
    "share": share})`, and the resumed run goes on with it.

    Args:
        share: this step's, in [0, 1].
        accuracy: mean reward of this step; nan (nothing could be judged) changes nothing.
    """
    return min(1.0, share + by) if accuracy >= target else share
