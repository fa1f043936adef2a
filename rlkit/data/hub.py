"""Data sets of the Hugging Face hub, or local copies of them, as tables or as streams.

Images stay undecoded, so a broken image makes one row unusable instead of ending the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlkit.data.lookup import check_source, requires_extra
from rlkit.data.samples import Row
from rlkit.data.tables import Rows, without_decoding


def read_splits(source: str, subset: str | None = None) -> Any:
    """The splits of a data set, each a table: `read_splits("openai/gsm8k", "main")["train"][0]["question"]`.

    Args:
        source: hub id (`owner/name`), a directory with a copy of it, or a directory written by `save_to_disk`.
        subset: the configuration of the data set.

    Returns:
        a datasets.DatasetDict.

    Raises:
        ValueError: it cannot be found or read, or has no such subset.
    """
    with requires_extra("recipes"):
        import datasets

    check_source(source, "data set")
    try:
        if _is_saved(source):
            splits = datasets.load_from_disk(source)
            splits = splits if isinstance(splits, dict) else datasets.DatasetDict(train=splits)
        else:
            splits = datasets.load_dataset(source, subset)
    except (datasets.exceptions.DatasetGenerationError, OSError, ValueError) as error:
        raise ValueError(f"data set {source!r}: {error.__cause__ or error}") from error
    return datasets.DatasetDict({name: without_decoding(table) for name, table in splits.items()})


def read_split(source: str, split: str, subset: str | None = None) -> Any:
    """One split of a data set.

    Raises:
        ValueError: it cannot be found or read, or has no such subset or split.
    """
    splits = read_splits(source, subset)
    if split not in splits:
        raise ValueError(f"data set {source!r}: expected one of its splits {sorted(splits)}, got {split!r}")
    return splits[split]


def map_table(table: Any, make: Callable[[Row], Row], where: str) -> Rows:
    """The rows of a table, each converted by `make` on access, with a name (`where`) for error messages."""
    return Rows(lambda i: {**make(table[i]), "where": f"{where} row {i + 1}"}, np.arange(len(table)))


def open_stream(source: str, split: str, subset: str | None = None) -> Any:
    """A split as a datasets.IterableDataset, which is downloaded while it is read.

    Raises:
        ValueError: it cannot be found or read, or has no such subset or split.
    """
    with requires_extra("recipes"):
        import datasets

    check_source(source, "data set")
    try:
        if _is_saved(source):
            return read_split(source, split).to_iterable_dataset()
        return without_decoding(datasets.load_dataset(source, subset, split=split, streaming=True))
    except (OSError, ValueError) as error:
        raise ValueError(f"data set {source!r}: {error.__cause__ or error}") from error


def stream_steps(
    stream: Any, make: Callable[[Row], Row], count: int, *, seed: int, start: int = 0, buffer_size: int = 10_000
) -> Iterator[list[tuple[int, Row]]]:
    """The rows of each step from `start` on, as `step_rows` returns them, from a stream.

    Every epoch is shuffled anew through a buffer. The rows of a step are a function of (stream, seed, step). A resumed
    run needs nothing from the checkpoint: it reads the rows of the steps before `start` again and skips them. (The
    state that datasets can save is not used, as it lacks the rows in the buffer.)

    Args:
        stream: from `open_stream`, or any datasets.IterableDataset.
        make: converts a row of the stream to a task's row (`question`, `images`, `answer`).
        count: rows per step.
        seed: for shuffling.
        start: the first step, from 0.
        buffer_size: size of the shuffle buffer, in rows; 1 keeps the stream's order.

    Yields:
        a list of (position within the step, row) pairs; the position is the group id. It never ends.

    Raises:
        ValueError: the stream is empty.
    """
    if count < 1:
        raise ValueError(f"count: expected at least 1 row per step, got {count}")
    shuffled = stream.shuffle(seed=seed, buffer_size=buffer_size)
    skipped, seen, epoch = start * count, 0, 0
    step: list[tuple[int, Row]] = []
    while True:
        shuffled.set_epoch(epoch)
        before = seen
        for i, raw in enumerate(shuffled):
            seen += 1
            if seen <= skipped:
                continue
            step.append((len(step), {**make(raw), "where": f"stream epoch {epoch} row {i + 1}"}))
            if len(step) == count:
                yield step
                step = []
        if seen == before:
            raise ValueError("stream: expected rows to train on, got none")
        epoch += 1


def cache_folders() -> list[Path]:
    """Where datasets and the hub keep files that belong to data sets: what is downloaded, and unpacked archives."""
    with requires_extra("recipes"):
        import datasets
        from huggingface_hub import constants

    return [Path(datasets.config.HF_DATASETS_CACHE), Path(constants.HF_HUB_CACHE)]


def _is_saved(source: str) -> bool:
    """Whether `save_to_disk` wrote it."""
    return any((Path(source) / name).is_file() for name in ("dataset_dict.json", "state.json"))
