"""Tasks: rows to ask about, a reward, and held-out rows that are never trained on.

A row is a mapping with `question` (text), `images` (a list of paths, bytes or PIL images, maybe empty), `answer`, and
`where` (a name for error messages: file and row). A reward is a plain function `reward(text, row) -> float`; None or
nan means that the answer could not be judged, which is not the same as 0.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
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
HELD_OUT_SPLITS = ("test", "validation", "val")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """Prompts, a reward, and held-out prompts."""

    name: str
    train: Sequence[Row]
    heldout: Sequence[Row]
    reward: Reward


def exact_match(text: str, row: Row) -> float | None:
    """1 if the answer is the row's, up to case and white space at the ends; None for a row without an answer."""
    if row["answer"] is None:
        return None
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


def sorting() -> Task:
    """Three digits to put in order: "Sort the digits 311.", 113. There are 1,000, and 200 of them are held out.

    The reward is 1 for the digits in order and nothing else.
    """

    def row(i: int) -> Row:
        digits = f"{i:03}"
        question, answer = f"Sort the digits {digits}.", "".join(sorted(digits))
        return {"question": question, "images": [], "answer": answer, "where": f"sorting row {digits}"}

    rows = [row(i) for i in np.random.default_rng(HELD_OUT_SEED).permutation(1000)]
    return Task("sorting", train=rows[200:], heldout=rows[:200], reward=exact_match)


BUILT_IN: dict[str, Callable[[], Task]] = {"digits": digits, "sorting": sorting}


def load_task(name: str, *, images: bool = True) -> Task:
    """A task by its name: built in, ready-made, a file, a data set, or a function of yours.

    - `digits`, `sorting`: built in, see there.
    - `gsm8k`, ... (rlkit.data.ready): from the hub; `gsm8k@DIRECTORY` from a local copy.
    - a .jsonl, .json or .parquet file with columns `question`, `answer` and, unless it is text alone, `image` or
      `images` (path relative to the file, bytes, or the struct that Hugging Face datasets write); a tenth of its rows,
      at most 300, is held out; the reward is an exact match.
    - `owner/name` on the hub, or a directory: a data set with such columns and a split `train`; held out is its
      `test` or `validation` split, or else a tenth of it; the reward is an exact match.
    - `module:function`, a function that returns a Task.

    Args:
        images: False for text: image columns are not looked at.

    Raises:
        ValueError: unknown name, missing file, a column that is not there, or images in a column of another name.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    from rlkit.data.ready import READY

    base, at, source = name.partition("@")
    if base in READY and bool(at) == bool(source):
        return READY[base](source) if source else READY[base]()
    if Path(name).suffix in {".jsonl", ".json", ".parquet"}:
        return _from_file(Path(name), images)
    if ":" in name:
        try:
            function = resolve_name(name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"task {name!r}: {error}") from error
        task = function() if callable(function) else function
        if not isinstance(task, Task):
            raise ValueError(f"task {name!r}: a rlkit.data.Task expected, came {type(task).__name__}")
        return task
    if "/" in name or (name and Path(name).is_dir()):
        return _from_hub(name, images)
    known = ", ".join(sorted(BUILT_IN))
    raise ValueError(
        f"task {name!r}: expected a built-in ({known}), a ready one ({', '.join(sorted(READY))}), a .jsonl or .parquet "
        "file, a data set (a directory, or owner/name) or module:function"
    )


def _from_file(path: Path, images: bool) -> Task:
    table = _table(path)
    row = _reader(table, str(path), path, images)
    return Task(path.stem, *_a_tenth_held_out(row, len(table)), exact_match)


def _from_hub(source: str, images: bool) -> Task:
    from rlkit.data.hub import read_splits

    splits = read_splits(source)
    if "train" not in splits:
        raise ValueError(f"task {source!r}: no split 'train'; it has {sorted(splits)}")
    row = _reader(splits["train"], f"{source} train", Path(source) / "rows", images)
    if held := [split for split in HELD_OUT_SPLITS if split in splits]:
        table = splits[held[0]]
        unseen = _Rows(_reader(table, f"{source} {held[0]}", Path(source) / "rows", images), np.arange(len(table)))
        return Task(Path(source).name, _Rows(row, np.arange(len(splits["train"]))), unseen, exact_match)
    return Task(Path(source).name, *_a_tenth_held_out(row, len(splits["train"])), exact_match)


def _a_tenth_held_out(row: Callable[[int], Row], count: int) -> tuple[_Rows, _Rows]:
    """Rows to train on, and at most 300 that are not."""
    order = np.random.default_rng(HELD_OUT_SEED).permutation(count)
    held = min(300, count // 10)
    return _Rows(row, order[held:]), _Rows(row, order[:held])


def _reader(table: Any, name: str, file: Path, images: bool) -> Callable[[int], Row]:
    """Row i of a table with a question, an answer and maybe an image column; paths are relative to the file."""
    columns = _columns(table)

    def column(candidates: Sequence[str], what: str) -> str:
        if found := [name for name in candidates if name in columns]:
            return found[0]
        raise ValueError(f"task {name!r}: no {what} column ({' or '.join(candidates)}); it has {columns}")

    question, answer = column(QUESTION_COLUMNS, "question"), column(ANSWER_COLUMNS, "answer")
    image = next((name for name in IMAGE_COLUMNS if name in columns), None) if images else None
    if images and image is None and (stray := [name for name in columns if re.search("image|img", name, re.I)]):
        raise ValueError(f"task {name!r}: no image column (images or image); is it {stray[0]!r}? It has {columns}")

    def row(i: int) -> Row:
        came = table[i]
        raw = {name: came.get(name) for name in columns}
        found = raw[image] if image is not None else []
        pictures = found if isinstance(found, list) else [] if found is None else [found]
        pictures = [_beside(file, picture) for picture in pictures]
        where = f"{name} row {i + 1}"
        return {**raw, "question": raw[question], "images": pictures, "answer": raw[answer], "where": where}

    return row


def _table(path: Path) -> Any:
    """The rows of a file, by number."""
    if not path.is_file():
        raise ValueError(f"task {str(path)!r}: no such file")
    return _parquet_table(path) if path.suffix == ".parquet" else _json_rows(path)


def _columns(table: Any) -> list[str]:
    return list(dict.fromkeys(name for row in (table if isinstance(table, list) else [table.features]) for name in row))


def _json_rows(path: Path) -> list[Row]:
    """The rows of a list of objects, or of one object a line; datasets' own reader turns text into dates."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".json" and text.lstrip().startswith("["):
            rows = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:
        part = f", at {error.doc[:60]!r}" if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"task {str(path)!r}: cannot be read as json: {error}{part}") from error
    if stray := [i for i, row in enumerate(rows) if not isinstance(row, Mapping)]:
        raise ValueError(f"task {str(path)!r}: row {stray[0] + 1} is no object")
    return rows


def _parquet_table(path: Path) -> Any:
    """Images stay undecoded, so that one broken image is one bad row and not the end of the run."""
    import datasets

    try:
        table = datasets.load_dataset("parquet", data_files=str(path), split="train")
    except (datasets.exceptions.DatasetGenerationError, OSError, ValueError) as error:
        raise ValueError(f"task {str(path)!r}: cannot be read as parquet: {error.__cause__ or error}") from error
    return _undecoded(table)


def _undecoded(table: Any) -> Any:
    """A table or stream of datasets whose images are bytes or a path until somebody wants them."""
    import datasets

    undecoded = datasets.Image(decode=False)
    for name, feature in (table.features or {}).items():
        if isinstance(feature, datasets.Image):
            table = table.cast_column(name, undecoded)
        elif isinstance(feature, datasets.List) and isinstance(feature.feature, datasets.Image):
            table = table.cast_column(name, datasets.List(undecoded))
    return table


def _beside(path: Path, picture: Any) -> Any:
    """A relative path, bare or in a struct without bytes, is relative to the task's file."""
    if isinstance(picture, Mapping) and not picture.get("bytes"):
        return {**picture, "path": _beside(path, picture.get("path"))}
    return str(path.parent / picture) if isinstance(picture, str) and "://" not in picture else picture


class _Rows(Sequence[Row]):
    """Rows of a table in a fixed order, read when asked for."""

    def __init__(self, row: Callable[[int], Row], order: np.ndarray) -> None:
        self.row, self.order = row, order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, i: Any) -> Any:
        return _Rows(self.row, self.order[i]) if isinstance(i, slice | list) else self.row(int(self.order[i]))


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


def score(reward: Reward, samples: Sequence[Sample], *, threads: int = 1) -> Tensor:
    """[B] float32 rewards; nan where the reward function raised, or returned None, nan or an infinity: not judged.

    A failure is logged with its row, never turned into a 0. A sample that was aborted is not judged.

    Args:
        threads: rewards under way at once, for those that wait for a process or a server (maths, programs, a judge).
    """
    judge = partial(_judge, reward)
    if threads == 1:  # in this thread: a reward may use signals
        return torch.tensor([judge(sample) for sample in samples], dtype=torch.float32)
    with ThreadPoolExecutor(threads) as pool:
        return torch.tensor(list(pool.map(judge, samples)), dtype=torch.float32)


def _judge(reward: Reward, sample: Sample) -> float:
    if sample.finish_reason == "aborted":  # a tool failed, which says nothing about the policy
        return math.nan
    try:
        value = reward(sample.text, sample.row)
        value = math.nan if value is None else float(value)
        return value if math.isfinite(value) else math.nan  # an infinite one would spoil its whole group
    except Exception as error:  # whatever it is, it is the reward's, and it says nothing about the answer
        where = sample.row.get("where", f"group {sample.group_id}")
        log.warning("reward failed on %s, answer %r: %s: %s", where, sample.text[:80], type(error).__name__, error)
        return math.nan


def judged(samples: Sequence[Sample], rewards: Tensor) -> list[Sample]:
    """Those samples that could be judged, each with its reward."""
    pairs = zip(samples, rewards.tolist(), strict=True)
    return [replace(sample, reward=value) for sample, value in pairs if not math.isnan(value)]
