"""Rows of files and data sets, read when asked for; those of a task have a question, images and an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlkit.data.samples import Row

HELD_OUT_SEED = 20240131  # the same rows are held out in every run, whatever its seed
QUESTION_COLUMNS = ("question", "prompt", "problem")
IMAGE_COLUMNS = ("images", "image")
ANSWER_COLUMNS = ("answer", "solution", "label")


class Rows(Sequence[Row]):
    """Rows of a table in a fixed order, read when asked for."""

    def __init__(self, row: Callable[[int], Row], order: np.ndarray) -> None:
        self.row, self.order = row, order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, i: Any) -> Any:
        return Rows(self.row, self.order[i]) if isinstance(i, slice | list) else self.row(int(self.order[i]))


def a_tenth_held_out(row: Callable[[int], Row], count: int) -> tuple[Rows, Rows]:
    """Rows to train on, and at most 300 that are not."""
    order = np.random.default_rng(HELD_OUT_SEED).permutation(count)
    held = min(300, count // 10)
    return Rows(row, order[held:]), Rows(row, order[:held])


def read_table(path: Path) -> Any:
    """The rows of a file, by number."""
    if not path.is_file():
        raise ValueError(f"task {str(path)!r}: no such file")
    return _parquet_table(path) if path.suffix == ".parquet" else _json_rows(path)


def task_rows(table: Any, name: str, file: Path, images: bool) -> Callable[[int], Row]:
    """Row i of a table with a question, an answer and maybe an image column; paths are relative to the file."""
    columns = columns_of(table)

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
        pictures = [beside(file, picture) for picture in pictures]
        where = f"{name} row {i + 1}"
        return {**raw, "question": raw[question], "images": pictures, "answer": raw[answer], "where": where}

    return row


def columns_of(table: Any) -> list[str]:
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
    return undecoded(table)


def undecoded(table: Any) -> Any:
    """A table or stream of datasets whose images are bytes or a path until somebody wants them."""
    import datasets

    undecoded = datasets.Image(decode=False)
    for name, feature in (table.features or {}).items():
        if isinstance(feature, datasets.Image):
            table = table.cast_column(name, undecoded)
        elif isinstance(feature, datasets.List) and isinstance(feature.feature, datasets.Image):
            table = table.cast_column(name, datasets.List(undecoded))
    return table


def beside(path: Path, picture: Any) -> Any:
    """A relative path, bare or in a struct without bytes, is relative to the task's file."""
    if isinstance(picture, Mapping) and not picture.get("bytes"):
        return {**picture, "path": beside(path, picture.get("path"))}
    return str(path.parent / picture) if isinstance(picture, str) and "://" not in picture else picture
