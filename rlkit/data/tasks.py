"""Tasks: rows to ask about, a reward, and held-out rows that are never trained on.

A row is a mapping with `question` (text), `images` (a list of paths, bytes or PIL images, maybe empty), `answer`, and
`where` (a name for error messages: file and row). A reward is a plain function `reward(text, row) -> float`; None or
nan means that the answer could not be judged, which is not the same as 0.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit.data.samples import Sample

Row = Mapping[str, Any]
Reward = Callable[[str, Row], float | None]

HELD_OUT_SEED = 20240131  # the same rows are held out in every run, whatever its seed
QUESTION_COLUMNS = ("question", "prompt", "problem")
IMAGE_COLUMNS = ("images", "image")
ANSWER_COLUMNS = ("answer", "solution", "label")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """Prompts, a reward, and held-out prompts."""

    name: str
    train: Sequence[Row]
    heldout: Sequence[Row]
    reward: Reward


def exact_match(text: str, row: Row) -> float:
    """1 if the answer is the row's, up to case and white space at the ends."""
    return float(text.strip().lower() == str(row["answer"]).strip().lower())


def digits() -> Task:
    """1,797 handwritten digits (8x8 pixels, from the UCI test set that scikit-learn ships), enlarged to 56x56.

    360 of them are held out. The reward is 1 for the digit and nothing else.
    """
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


BUILT_IN: dict[str, Callable[[], Task]] = {"digits": digits}


def load_task(name: str, *, images: bool = True) -> Task:
    """A built-in task by name, a .jsonl/.json/.parquet file, or `module:function`, a function that returns a Task.

    A file has columns `question`, `answer` and `image` or `images` (path relative to the file, bytes, or the struct
    that Hugging Face datasets write); a tenth of its rows, at most 300, is held out; the reward is an exact match.

    Raises:
        ValueError: unknown name, missing file, or a column that is not there.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    if Path(name).suffix in {".jsonl", ".json", ".parquet"}:
        return _from_file(Path(name), images)
    if ":" in name:
        try:
            task = resolve_name(name)()
        except (ImportError, AttributeError) as error:
            raise ValueError(f"task {name!r}: {error}") from error
        if not isinstance(task, Task):
            raise ValueError(f"task {name!r}: a rlkit.data.Task expected, came {type(task).__name__}")
        return task
    known = ", ".join(sorted(BUILT_IN))
    raise ValueError(f"task {name!r}: expected a built-in ({known}), a .jsonl or .parquet file, or module:function")


def _from_file(path: Path, images: bool) -> Task:
    if not path.is_file():
        raise ValueError(f"task {str(path)!r}: no such file")
    import datasets

    kind = "parquet" if path.suffix == ".parquet" else "json"
    try:
        table = datasets.load_dataset(kind, data_files=str(path), split="train")
    except datasets.exceptions.DatasetGenerationError as error:
        raise ValueError(f"task {str(path)!r}: cannot be read as {kind}: {error.__cause__ or error}") from error

    def column(candidates: Sequence[str], what: str) -> str:
        if found := [name for name in candidates if name in table.column_names]:
            return found[0]
        names = " or ".join(candidates)
        raise ValueError(f"task {str(path)!r}: no {what} column ({names}); it has {table.column_names}")

    question, answer = column(QUESTION_COLUMNS, "question"), column(ANSWER_COLUMNS, "answer")
    image = column(IMAGE_COLUMNS, "image") if images else None
    if image is not None:  # undecoded, so that one broken image is one bad row and not the end of the run
        for feature in (datasets.Image, datasets.List):
            if isinstance(table.features[image], feature):
                undecoded = datasets.Image(decode=False)
                is_list = isinstance(table.features[image], datasets.List)
                if not is_list or isinstance(table.features[image].feature, datasets.Image):
                    table = table.cast_column(image, datasets.List(undecoded) if is_list else undecoded)

    def row(i: int) -> Row:
        raw = table[i]
        came = raw[image] if image is not None else []
        pictures = came if isinstance(came, list) else [] if came is None else [came]
        pictures = [str(path.parent / p) if isinstance(p, str) and "://" not in p else p for p in pictures]
        where = f"{path} row {i + 1}"
        return {**raw, "question": raw[question], "images": pictures, "answer": raw[answer], "where": where}

    order = np.random.default_rng(HELD_OUT_SEED).permutation(len(table))
    held = min(300, len(table) // 10)
    return Task(path.stem, _Rows(row, order[held:]), _Rows(row, order[:held]), exact_match)


class _Rows(Sequence[Row]):
    """Rows of a table in a fixed order, read when asked for."""

    def __init__(self, row: Callable[[int], Row], order: np.ndarray) -> None:
        self.row, self.order = row, order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, i: Any) -> Any:
        return self.row(int(self.order[i]))


def step_rows(rows: Sequence[Row], step: int, count: int, seed: int) -> list[tuple[int, Row]]:
    """The `count` rows of step `step` (from 0) of endless shuffled epochs: a pure function, so resuming needs no state.

    Returns:
        (position within the step, row) pairs; the position is the group id.
    """
    if not len(rows):
        raise ValueError("task: no rows to train on")
    first = step * count
    epochs = {i // len(rows) for i in range(first, first + count)}
    order = {e: np.random.default_rng((seed, e)).permutation(len(rows)) for e in epochs}
    return [(i - first, rows[int(order[i // len(rows)][i % len(rows)])]) for i in range(first, first + count)]


def score(reward: Reward, samples: Sequence[Sample]) -> Tensor:
    """[B] float32 rewards; nan where the reward function raised, or returned None or nan: not judged.

    A failure is logged with its row, never turned into a 0.
    """
    return torch.tensor([_judge(reward, sample) for sample in samples], dtype=torch.float32)


def _judge(reward: Reward, sample: Sample) -> float:
    try:
        value = reward(sample.text, sample.row)
        return math.nan if value is None else float(value)
    except Exception as error:  # whatever it is, it is the reward's, and it says nothing about the answer
        where = sample.row.get("where", f"group {sample.group_id}")
        log.warning("reward failed on %s, answer %r: %s: %s", where, sample.text[:80], type(error).__name__, error)
        return math.nan


def judged(samples: Sequence[Sample], rewards: Tensor) -> list[Sample]:
    """Those samples that could be judged, each with its reward."""
    pairs = zip(samples, rewards.tolist(), strict=True)
    return [replace(sample, reward=value) for sample, value in pairs if not math.isnan(value)]
