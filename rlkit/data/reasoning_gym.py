"""Tasks of reasoning-gym (https://github.com/open-thought/reasoning-gym, Apache-2.0): made by programs, scored by them.

    load_task("reasoning_gym:chain_sum")
    load_task("reasoning_gym:chain_sum,level=2")                  # level 2 of its curriculum
    load_task("reasoning_gym:chain_sum,max_terms=3,max_digits=2") # settings of its own

Rows are generated when they are asked for, without a download. Settings of this module, beside those of the task:

- `level`: of reasoning-gym's curriculum, from 0; each attribute is at this level, or at its last one.
- `rows`, `heldout`: how many rows to train on (10,000) and to hold out (200).
- `exact`: True for a reward of 1 where the verifier's score is 1, and 0 elsewhere; by default the score is the reward.
- `sandbox`: whether responses are scored in the sandbox; by default where the verifier executes them as Python.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from rlkit.data.lookup import requires_extra
from rlkit.data.samples import Row
from rlkit.data.tables import Rows
from rlkit.data.tasks import Task
from rlkit.data.thinking_tags import thinking_tags_of
from rlkit.rewards.isolated import sandboxed
from rlkit.rewards.sandbox import SandboxError, check_isolation

PREFIX = "reasoning_gym:"
INSTRUCTION = "Put your final answer between <answer> and </answer>."
TRAIN_SEED, HELD_OUT_SEED = 0, 10**9  # row i is made from seed + i, so these two never meet
TRIES = 100
# what a verifier raises for an answer of a form that it does not expect
UNREADABLE_ANSWER = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)

# tasks of reasoning-gym 0.1.25 whose rows seed and index do not determine, as a comparison of all tasks has shown
DRAWS_FROM_GLOBAL_RANDOM = {"list_functions"}
DEPEND_ON_HASHES = {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}


def reasoning_gym_task(name: str) -> Task:
    """A task of reasoning-gym with its own verifier as the reward.

    Held-out rows have seeds of their own. A training row whose question is among them is replaced by the
    next one whose question is not.

    Args:
        name: `reasoning_gym:NAME`, maybe with settings behind it: `,level=2`, `,max_terms=3`.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: no such task, one whose rows differ between processes, a setting that it does not have or cannot
            use, or no question left for training.
    """
    with requires_extra("reasoning-gym"):
        from reasoning_gym.factory import DATASETS

    task, *parts = name.removeprefix(PREFIX).split(",")
    if task not in DATASETS:
        raise ValueError(
            f"task {name!r}: expected one of reasoning-gym's ({', '.join(sorted(DATASETS))}), got {task!r}"
        )
    _check_rows_are_reproducible(name, task)
    settings = dict(_setting(name, part) for part in parts)
    known = [one.name for one in fields(DATASETS[task][1]) if one.name not in ("seed", "size")]
    known = ["level", "rows", "heldout", "exact", "sandbox", *known]
    if unknown := [key for key in settings if key not in known]:
        raise ValueError(f"task {name!r}: expected settings among {', '.join(known)}, got {unknown[0]!r}")
    count, held = (_count(name, settings, key, default) for key, default in (("rows", 10_000), ("heldout", 200)))
    exact, sandbox = (_switch(name, settings, key, default) for key, default in (("exact", False), ("sandbox", None)))
    settings = _with_level(name, task, settings)
    reward = Verifier(name, task, {**settings, "seed": TRAIN_SEED, "size": count}, bool(exact), sandbox)
    train, heldout = reward.dataset, _dataset(name, task, {**settings, "seed": HELD_OUT_SEED, "size": held})
    held_rows = [_row(f"{name} held-out row {i + 1}", heldout[i]) for i in range(held)]
    held_questions = {row["question"] for row in held_rows}

    def row(i: int) -> Row:
        where = f"{name} row {i + 1}"
        for j in range(i, i + TRIES):
            made = _row(where, train[j % count])
            if made["question"] not in held_questions:
                return made
        return {**made, "unreadable": f"expected a question that is not held out, got none in {TRIES} rows"}

    if "unreadable" in row(0):
        raise ValueError(
            f"task {name!r}: heldout: expected questions to be left for training, got {held} held-out rows with "
            f"the questions of {TRIES} training rows; lower it, or raise the level"
        )
    return Task(task, Rows(row, np.arange(count)), held_rows, reward)


def _check_rows_are_reproducible(name: str, task: str) -> None:
    """Raise a ValueError for a task whose rows would differ between ranks, and after a restart."""
    if task in DRAWS_FROM_GLOBAL_RANDOM:
        raise ValueError(
            f"task {name!r}: expected a task whose rows depend on a seed alone, got {task!r}, which draws from "
            "Python's global random numbers"
        )
    if task in DEPEND_ON_HASHES and not os.environ.get("PYTHONHASHSEED", "").isdecimal():
        raise ValueError(
            f"task {name!r}: expected a number in the environment variable PYTHONHASHSEED, such as 0, as rows of "
            f"{task!r} depend on Python's hashes, got {os.environ.get('PYTHONHASHSEED')!r}"
        )


class Verifier:
    """A reward that has reasoning-gym score the answer between the last <answer> and </answer>, or else the whole text.

    Only the text after the last closing tag of the row's `thinking_tags` counts. The opening `<answer>` may
    be missing, as the prompt can end with it. An answer at which the verifier raises an error scores 0.

    Args:
        name, task, settings: as `_dataset` takes them.
        exact: the reward is 1 for a score of 1, and 0 for all others.
        sandbox: score in restricted processes; by default if the verifier executes the answer.
    """

    def __init__(
        self, name: str, task: str, settings: dict[str, Any], exact: bool = False, sandbox: bool | None = None
    ) -> None:
        self.arguments = (name, task, settings, exact, sandbox)
        self.dataset, self.exact = _dataset(name, task, settings), exact
        self.sandbox = executes_answers(self.dataset) if sandbox is None else sandbox
        self.score_answer: Callable[[str, Any], Any] = self.dataset.score_answer
        if self.sandbox:
            _check_isolation(name)
            self.score_answer = sandboxed(self.score_answer)

    def __call__(self, text: str, row: Row) -> float:
        text = text.rpartition(thinking_tags_of(row)[1])[2]
        before, tag, _ = text.rpartition("</answer>")
        answer = before.rpartition("<answer>")[2] if tag else text
        entry = row["entry"]
        try:
            score = float(self.score_answer(answer.strip(), entry))
        except UNREADABLE_ANSWER:
            if self.sandbox:  # an error of the sandbox itself, not of the answer
                raise
            return 0.0
        return float(score >= 1) if self.exact else score

    def __reduce__(self) -> tuple[Any, ...]:  # a worker of --isolate_reward has a dataset of its own
        return Verifier, self.arguments

    def __repr__(self) -> str:
        return f"the verifier of {self.arguments[0]}"


def executes_answers(dataset: Any) -> bool:
    """Whether a task's verifier calls `eval`, `exec`, or sympy's `parse_expr` or `sympify`, which call `eval`, with
    anything but its own entry."""
    code = inspect.getsource(type(dataset).score_answer)
    return re.search(r"\b(eval|exec|parse_expr|sympify)\((?!entry\b)", code) is not None


def _check_isolation(name: str) -> None:
    try:
        check_isolation()
    except SandboxError as error:
        raise ValueError(
            f"task {name!r}: expected a machine with rlkit's sandbox, as this task's verifier executes answers as "
            f"Python, got: {error}; the setting sandbox=False executes them with all of your rights"
        ) from error


def _row(where: str, entry: Any) -> dict[str, Any]:
    question = f"{entry['question']}\n\n{INSTRUCTION}"
    return {"question": question, "images": [], "answer": entry["answer"], "entry": entry, "where": where}


def _setting(name: str, part: str) -> tuple[str, Any]:
    key, equals, value = part.partition("=")
    if not (key and equals and value):
        raise ValueError(f"task {name!r}: expected settings NAME=VALUE behind the commas, got {part!r}")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):  # a word
        return key, value


def _count(name: str, settings: dict[str, Any], key: str, default: int) -> int:
    count = settings.pop(key, default)
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"task {name!r}: {key}: expected a whole number of at least 1, got {count!r}")
    return count


def _switch(name: str, settings: dict[str, Any], key: str, default: bool | None) -> bool | None:
    switch = settings.pop(key, default)
    if not isinstance(switch, bool | None):
        raise ValueError(f"task {name!r}: {key}: expected True or False, got {switch!r}")
    return switch


def _with_level(name: str, task: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings in place of `level`: what the curriculum has at this level, and what is set explicitly."""
    from reasoning_gym.factory import CURRICULA, create_curriculum

    if "level" not in settings:
        return settings
    level = settings.pop("level")
    if task not in CURRICULA:
        raise ValueError(f"task {name!r}: level: expected a task that has a curriculum, got {task!r}")
    curriculum = create_curriculum(task)
    highest = max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1
    if not isinstance(level, int) or not 0 <= level <= highest:
        raise ValueError(f"task {name!r}: level: expected 0 to {highest}, got {level!r}")
    for attribute in curriculum.attributes.values():
        curriculum.set_attr_level(attribute.name, min(level, len(attribute.levels) - 1))
    config = curriculum.generate_configuration()
    return {**{one.name: getattr(config, one.name) for one in fields(config)}, **settings}


def _dataset(name: str, task: str, settings: dict[str, Any]) -> Any:
    from reasoning_gym.factory import create_dataset

    try:
        return create_dataset(task, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"task {name!r}: expected settings that fit together, got: {error}") from error
