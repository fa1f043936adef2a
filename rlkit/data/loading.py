"""Tasks by their names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

import numpy as np

from rlkit.data.hub import read_splits
from rlkit.data.ready import READY
from rlkit.data.tables import Rows, a_tenth_held_out, read_table, task_rows
from rlkit.data.tasks import Task, digits, sorting
from rlkit.rewards.rules import exact_match

HELD_OUT_SPLITS = ("test", "validation", "val")

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
    table = read_table(path)
    row = task_rows(table, str(path), path, images)
    return Task(path.stem, *a_tenth_held_out(row, len(table)), exact_match)


def _from_hub(source: str, images: bool) -> Task:
    splits = read_splits(source)
    if "train" not in splits:
        raise ValueError(f"task {source!r}: no split 'train'; it has {sorted(splits)}")
    row = task_rows(splits["train"], f"{source} train", Path(source) / "rows", images)
    if held := [split for split in HELD_OUT_SPLITS if split in splits]:
        table = splits[held[0]]
        unseen = Rows(task_rows(table, f"{source} {held[0]}", Path(source) / "rows", images), np.arange(len(table)))
        return Task(Path(source).name, Rows(row, np.arange(len(splits["train"]))), unseen, exact_match)
    return Task(Path(source).name, *a_tenth_held_out(row, len(splits["train"])), exact_match)
