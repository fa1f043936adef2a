"""Data sets of the Hugging Face hub, or local copies of them, as tables or as streams.

Images stay undecoded, so a broken image makes one row unusable instead of ending the run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from rlkit.data.fingerprints import table_fingerprint
from rlkit.data.formats import media_columns_of
from rlkit.data.lookup import check_source, requires_extra
from rlkit.data.samples import Row
from rlkit.data.tables import FILE_SUFFIXES, TEXT_SUFFIXES, Rows, read_table, without_decoding


def read_splits(source: str, subset: str | None = None) -> dict[str, Any]:
    """The splits of a data set, each a table: `read_splits("openai/gsm8k", "main")["train"][0]["question"]`.

    Args:
        source: hub id (`owner/name`), a directory with a copy of it, or a directory written by `save_to_disk`.
        subset: the configuration of the data set.

    Returns:
        for each split a datasets.Dataset; or a list of rows, as `read_table` reads files, if a directory has only json,
        jsonl, csv and tsv files.

    Raises:
        ValueError: it cannot be found or read, or has no such subset.
    """
    with requires_extra("recipes"):
        import datasets

    check_source(source, "data set")
    if files := _text_files(source, subset):
        return {split: list(_rows_of_files(paths)) for split, paths in files.items()}
    with _source_in_errors(source):
        if _is_saved(source):
            splits = datasets.load_from_disk(source)
            splits = splits if isinstance(splits, dict) else {"train": splits}
        else:
            splits = datasets.load_dataset(source, subset)
    return {name: without_decoding(table) for name, table in splits.items()}


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

    def row(i: int) -> Row:
        return {**make(table[i]), "where": f"{where} row {i + 1}"}

    return Rows(row, np.arange(len(table)), table_fingerprint=cache(partial(table_fingerprint, table)))


def open_stream(source: str, split: str, subset: str | None = None) -> Any:
    """A split as a datasets.IterableDataset, which is downloaded while it is read.

    Raises:
        ValueError: it cannot be found or read, or has no such subset or split.
    """
    with requires_extra("recipes"):
        import datasets

    check_source(source, "data set")
    if split in (files := _text_files(source, subset)):
        return datasets.IterableDataset.from_generator(_rows_of_files, gen_kwargs={"paths": files[split]})
    if _is_saved(source):
        return read_split(source, split).to_iterable_dataset()
    with _source_in_errors(source):
        return without_decoding(datasets.load_dataset(source, subset, split=split, streaming=True))


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
    shuffled = stream if buffer_size == 1 else stream.shuffle(seed=seed, buffer_size=buffer_size)  # also its files
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


def _text_files(source: str, subset: str | None) -> dict[str, list[str]]:
    """The files of each split of a directory that has only json, jsonl, csv and tsv files; otherwise none.

    datasets' readers would convert texts to dates and numbers. They are used if the directory's README has features or
    settings for them, such as another separator.
    """
    import datasets

    if not Path(source).is_dir() or _is_saved(source):
        return {}
    with _source_in_errors(source), TemporaryDirectory() as empty:  # a cache may have features that datasets inferred
        builder = datasets.load_dataset_builder(source, subset, cache_dir=empty)
    files = {str(split): list(paths) for split, paths in (builder.config.data_files or {}).items()}
    _check_no_heldout_file(source, files.get("train", ()))
    suffixes = {Path(path).suffix for paths in files.values() for path in paths}
    unread = _unread_files(source, {Path(path).resolve() for paths in files.values() for path in paths})
    if unread and suffixes and all(media_columns_of(f"x{suffix}") for suffix in suffixes):
        raise ValueError(
            f"data set {source!r}: expected a file with rows, got a directory of media; it has {', '.join(unread)}: "
            f"give --task {Path(source) / unread[0]}"
        )
    if unread and os.environ.get("RANK", "0") == "0":
        print(f"{source}: not read: {', '.join(unread)} (of no split; --heldout takes a file)", flush=True)
    defaults = {"sep": "\t"} if suffixes == {".tsv"} else {}
    settings, usual = vars(builder.config), {**vars(type(builder.config)()), **defaults}
    about = {"name", "version", "description", "data_dir", "data_files"}
    plain = all(settings[name] == usual[name] for name in settings.keys() - about)
    return files if suffixes <= TEXT_SUFFIXES and plain and builder.info.features is None else {}


def _check_no_heldout_file(source: str, files: Collection[str]) -> None:
    """Refuse `heldout.jsonl` beside `rows.jsonl`, as datasets reads all files as one split unless it knows a name."""
    heldout = [path for path in files if re.search(r"(?<![a-z])held[_-]?out(?![a-z])", Path(path).stem, re.IGNORECASE)]
    if 0 < len(heldout) < len(files):
        name = Path(heldout[0]).name
        raise ValueError(
            f"data set {source!r}: expected files to train on, got also {name}; rename it to test{Path(name).suffix}, "
            "or pass one file as --task and this one as --heldout"
        )


def _unread_files(source: str, read: Collection[Path]) -> list[str]:
    """The files of a directory that have rows and are of no split, such as `heldout.jsonl` beside `train.jsonl`."""
    found = [path for path in Path(source).iterdir() if path.suffix in FILE_SUFFIXES and path.resolve() not in read]
    return sorted(path.name for path in found if path.name != "dataset_infos.json")


def _rows_of_files(paths: Iterable[str]) -> Iterator[Row]:
    for path in paths:
        yield from read_table(Path(path))


@contextmanager
def _source_in_errors(source: str) -> Iterator[None]:
    import datasets

    try:
        yield
    except (datasets.exceptions.DatasetGenerationError, OSError, ValueError) as error:
        raise ValueError(f"data set {source!r}: {error.__cause__ or error}") from error


def _is_saved(source: str) -> bool:
    """Whether `save_to_disk` wrote it."""
    return any((Path(source) / name).is_file() for name in ("dataset_dict.json", "state.json"))
