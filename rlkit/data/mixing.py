"""Mixtures of tasks, and curricula from easy to hard rows, as pure functions without a state to save."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from rlkit.data.samples import Row
from rlkit.data.tables import Rows, as_rows, stack_tables
from rlkit.data.tasks import Task


def mix_tasks(tasks: Sequence[Task], weights: Sequence[float] | None = None) -> Task:
    """A mixture of tasks, in which each task's share of the rows is proportional to its weight.

    An epoch of the mixture has every row of every task at least once, and is no longer than necessary: a task with n_k
    rows and share w_k needs n_k / w_k rows in total. Rows of a small task with a large weight are repeated, each
    equally often or once more. `step_rows` shuffles the mixture like any task.

    Args:
        tasks: with different names.
        weights: one number above 0 per task, with any sum; by default the tasks' numbers of rows.

    Returns:
        a task named "a+b". `row["task"]` names the task whose reward scores the responses to a row. That reward sees
        the `task` that the row had before, if it had one. The held-out rows are those of all tasks, each once.

    Raises:
        ValueError: no task, two with the same name, one without training rows, or wrong weights.
    """
    names = [task.name for task in tasks]
    if not tasks or len(set(names)) < len(names):
        raise ValueError(f"tasks: expected at least one, with different names, got {names}")
    if empty := [task.name for task in tasks if not len(task.train)]:
        raise ValueError(f"tasks: expected rows to train on in each, got none in {empty[0]!r}")
    sizes = [len(task.train) for task in tasks]
    shares = sizes if weights is None else list(weights)
    if len(shares) != len(tasks) or not all(math.isfinite(share) and share > 0 for share in shares):
        raise ValueError(f"weights: expected {len(tasks)} numbers above 0, got {shares}")
    longest = max(size / share for size, share in zip(sizes, shares, strict=True))
    indices = [np.arange(round(longest * share)) % size for size, share in zip(sizes, shares, strict=True)]
    rewards = {task.name: task.reward for task in tasks}

    def reward(text: str, row: Row) -> float | None:
        if row.get("task") not in rewards:
            expected = f"expected one of {sorted(rewards)} in the column `task`, also of a held-out file"
            raise ValueError(f"{row.get('where', 'row')}: task: {expected}, got {row.get('task')!r}")
        own = row.get("own_task") or {}  # a held-out file has none
        return rewards[row["task"]](text, {**row, "own_task": None, **own})

    return Task(
        "+".join(names),
        train=stack_tables([_with_task_name(task, task.train)[i] for task, i in zip(tasks, indices, strict=True)]),
        heldout=stack_tables([_with_task_name(task, task.heldout) for task in tasks]),
        reward=reward,
    )


def _with_task_name(task: Task, rows: Sequence[Row]) -> Rows:
    """The rows with the task's name as `task`, and what they had there in `own_task`, for the task's reward."""
    table = as_rows(rows)

    def read(number: int) -> Row:
        row = table.read(number)
        return {**row, "task": task.name, "own_task": {key: row[key] for key in ("task", "own_task") if key in row}}

    return table.with_read(read)


def sort_by_difficulty(rows: Sequence[Row], difficulty: Callable[[Row], float]) -> Sequence[Row]:
    """Sorts rows from easy to hard; rows of equal difficulty keep their order.

    Args:
        rows: of a task; each is read once.
        difficulty: returns a number for a row, e.g. `lambda row: row["level"]`.

    Raises:
        ValueError: a difficulty is nan.
    """
    keys = np.array([float(difficulty(row)) for row in rows])
    if np.isnan(keys).any():
        raise ValueError(f"difficulty: expected a number, got nan in row {int(np.isnan(keys).argmax())}")
    order = keys.argsort(kind="stable")
    return as_rows(rows)[order]


def easiest_rows(rows: Sequence[Row], share: float) -> Sequence[Row]:
    """The easiest share of rows that are sorted by difficulty, at least one row.

        ordered = sort_by_difficulty(task.train, difficulty)
        rows = step_rows(easiest_rows(ordered, share), step, count, seed)

    Args:
        rows: of `sort_by_difficulty`.
        share: in [0, 1]. A function of the step alone, such as `min(1, 0.2 + step / 100)`, gives a fixed curriculum;
            `widen_share` gives one that depends on the model's accuracy.

    Raises:
        ValueError: a share outside [0, 1].
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share: expected in [0, 1], got {share}")
    return rows[: max(1, math.ceil(share * len(rows)))]


def widen_share(share: float, accuracy: float, *, target: float = 0.7, by: float = 0.05) -> float:
    """The share of rows for the next step: `by` larger if the accuracy reached the target, otherwise unchanged.

    The share is the only state of the curriculum: save it with `save_checkpoint(path, {"step": step, "share": share})`.

    Args:
        share: of this step, in [0, 1].
        accuracy: mean reward of this step; nan (nothing could be scored) leaves the share unchanged.
        target: the accuracy from which on the share grows.
        by: how much it grows.
    """
    return min(1.0, share + by) if accuracy >= target else share
