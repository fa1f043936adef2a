"""Loads tasks by name: built-in and published tasks, files, data sets, and functions of the user."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from hashlib import blake2b
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlkit.data.fingerprints import table_fingerprint
from rlkit.data.formats import (
    ANSWER_COLUMNS,
    AUDIO_COLUMNS,
    CHAT_COLUMNS,
    IMAGE_COLUMNS,
    PROMPT_COLUMNS,
    QUESTION_COLUMNS,
    VIDEO_COLUMNS,
    chat_row,
    check_columns,
    check_no_unread_media,
    pair_row,
    task_row,
    unpaired_row,
)
from rlkit.data.hub import cache_folders, read_splits
from rlkit.data.published_tasks import PUBLISHED_TASKS
from rlkit.data.reasoning_gym import PREFIX, reasoning_gym_task
from rlkit.data.samples import Row
from rlkit.data.tables import (
    FILE_SUFFIXES,
    HELD_OUT_SEED,
    Rows,
    as_rows,
    check_inside,
    columns_of,
    concatenate,
    files_of_video,
    media_columns,
    read_table,
    resolve_image_path,
    resolve_video_path,
    split_heldout,
    with_class_names,
    without_filled_nulls,
    without_repeats,
)
from rlkit.data.tasks import Task, addition, digits, map_rows, map_tables, sorting
from rlkit.data.user_code import load_function
from rlkit.rewards.named import REWARDS, reward_named
from rlkit.rewards.rules import exact_match

HELD_OUT_SPLITS = ("test", "validation", "val")
DEMONSTRATION_COLUMNS = ("completion", "output", "reward_model", *CHAT_COLUMNS)  # contain a response
MEDIA_COLUMNS = {*IMAGE_COLUMNS, *VIDEO_COLUMNS, *AUDIO_COLUMNS}

BUILT_IN: dict[str, Callable[[], Task]] = {"addition": addition, "digits": digits, "sorting": sorting}


class Kind(NamedTuple):
    """How rows are read, and the columns that a table needs: at least one of each group."""

    read: Callable[[Row], dict[str, Any]]
    needed: Sequence[Sequence[str]]


TASK = Kind(task_row, (PROMPT_COLUMNS, (*ANSWER_COLUMNS, *DEMONSTRATION_COLUMNS)))
PROMPTS = Kind(task_row, (PROMPT_COLUMNS,))
CHAT = Kind(chat_row, ((*PROMPT_COLUMNS, "text"), (*ANSWER_COLUMNS, *DEMONSTRATION_COLUMNS, "text")))
PAIRS = Kind(pair_row, (("chosen",), ("rejected",)))
UNPAIRED = Kind(unpaired_row, (("completion", *CHAT_COLUMNS), ("label",)))


def load_task(name: str, *, reward: str | None = None, allow_outside_files: bool = False) -> Task:
    """Loads a task by name: built-in, published, a file, a data set, or a function of yours.

    - `addition`, `digits`, `sorting`: built-in tasks of rlkit.data.tasks.
    - `gsm8k`, ... (rlkit.data.published_tasks): from the hub; `gsm8k@DIRECTORY` from a local copy.
    - a .jsonl, .json, .csv, .tsv or .parquet file with questions, answers and possibly images, in a format of
      rlkit.data.formats; image paths are relative to the file. A tenth of the rows is held out, at least 1 and at most
      300. The reward is an exact match.
    - `owner/name` on the hub, or a directory: a data set with such columns. Its `test` or `validation` split is held
      out, or a tenth of `train` if there is none. Image paths are relative to the directory. The reward is an exact
      match.
    - `reasoning_gym:NAME`, possibly with settings (`,level=2`): a task of reasoning-gym, see rlkit.data.reasoning_gym.
    - `module:function` or `path/to/file.py:function`: a function that returns a Task.

    Args:
        name: as above.
        reward: replaces the task's reward: `maths`, `choice`, `module:function`, ...; see rlkit.rewards.reward_named.
            With a function of yours a file needs no answers.
        allow_outside_files: image paths of a file or data set may lead out of its folder, by `..`, an absolute path or
            a link. Otherwise such a row cannot be read.

    Raises:
        ValueError: an unknown name, a missing file, a column that is missing or ambiguous, or none of the first twenty
            rows can be read.
    """
    task = _load(name, TASK if reward is None or reward in REWARDS else PROMPTS, allow_outside_files)
    return task if reward is None else replace(task, reward=reward_named(reward))


def load_chats(name: str, *, allow_outside_files: bool = False) -> Task:
    """Loads rows for supervised fine-tuning, with the response as `completion`.

    Args:
        name: as for `load_task`; also a file or data set with a `text` column of plain text.

    Raises:
        ValueError: as in `load_task`, or the rows have neither texts nor questions with answers.
    """
    return _load(name, CHAT, allow_outside_files)


def load_pairs(name: str, *, allow_outside_files: bool = False) -> Task:
    """Loads preference pairs: rows with a `chosen` and a `rejected` response.

    Args:
        name: a file or data set with these columns, or a task. In a task without them, the chosen response is the row's
            own answer, and the rejected one is the answer of another row, the same in every run.

    Raises:
        ValueError: as in `load_task`, or a file or data set without these columns.
    """
    if _is_table(name):
        return _from_tables(name, _tables(name), PAIRS, allow_outside_files)
    return map_tables(load_task(name), _with_wrong_answers)


def load_unpaired(name: str, *, allow_outside_files: bool = False) -> Task:
    """Loads unpaired preferences: rows with one response, `completion`, and a `label` that is true if it is good.

    Args:
        name: a file or data set with these columns, or a name for `load_pairs`. Each pair gives two rows: the chosen
            response with a true label, and the rejected one with a false label.

    Raises:
        ValueError: as in `load_task`, or columns of neither kind.
    """
    if not _is_table(name):
        task = load_task(name)
        if _are_marked(task.train or task.heldout):
            return _read_as(task, UNPAIRED)
        return map_tables(task, lambda rows: _split_pairs(_with_wrong_answers(rows)))
    tables = _tables(name)
    if all({"chosen", "rejected"} <= set(columns_of(table)) for table, *_ in tables.values()):
        return map_tables(_from_tables(name, tables, PAIRS, allow_outside_files), _split_pairs)
    return _from_tables(name, tables, UNPAIRED, allow_outside_files)


def _load(name: str, kind: Kind, allow_outside_files: bool) -> Task:
    if name in BUILT_IN:
        return _read_as(BUILT_IN[name](), kind)
    base, at, source = name.partition("@")
    if base in PUBLISHED_TASKS and bool(at) == bool(source):
        return _read_as(PUBLISHED_TASKS[base](source) if source else PUBLISHED_TASKS[base](), kind)
    if _is_table(name):
        return _from_tables(name, _tables(name), kind, allow_outside_files)
    if name.startswith(PREFIX):
        return _read_as(reasoning_gym_task(name), kind)
    if ":" in name:
        function = load_function(name, "task")
        if callable(function):
            _check_no_arguments(function, name)
        task = function() if callable(function) else function
        if not isinstance(task, Task):
            raise ValueError(f"task {name!r}: expected a rlkit.data.Task, got {type(task).__name__}")
        return _read_as(task, kind)
    raise ValueError(
        f"task: expected a built-in ({', '.join(sorted(BUILT_IN))}), a published one "
        f"({', '.join(sorted(PUBLISHED_TASKS))}), a file ({', '.join(sorted(FILE_SUFFIXES))}), a data set (a "
        f"directory, or owner/name) or module:function, got {name!r}"
    )


def _check_no_arguments(function: Callable[..., Any], name: str) -> None:
    """Raise a ValueError for a function that cannot be called without arguments."""
    try:
        signature(function).bind()
    except TypeError as error:
        expected = "expected a function without arguments that returns a Task"
        got = f"{name.rpartition(':')[2]}{signature(function)}"
        raise ValueError(f"task {name!r}: {expected}, got {got}") from error


# --- tables


def _is_table(name: str) -> bool:
    if name in BUILT_IN or name.partition("@")[0] in PUBLISHED_TASKS:
        return False
    return (
        Path(name).suffix in FILE_SUFFIXES or (bool(name) and Path(name).is_dir()) or ("/" in name and ":" not in name)
    )


def _tables(name: str) -> dict[str, tuple[Any, str, Path]]:
    """For each split its table, its name in errors, and the file that image paths are relative to."""
    if Path(name).suffix in FILE_SUFFIXES:
        return {"train": (read_table(Path(name)), name, Path(name))}
    return {split: (table, f"{name} {split}", Path(name) / "rows") for split, table in read_splits(name).items()}


def _from_tables(name: str, tables: Mapping[str, tuple[Any, str, Path]], kind: Kind, allow_outside_files: bool) -> Task:
    splits = {split: _rows(kind, *table, allow_outside_files) for split, table in tables.items()}
    held = next((split for split in HELD_OUT_SPLITS if split in splits), None)
    if "train" not in splits and held is None:
        raise ValueError(f"task {name!r}: expected a split train, test or validation, got {sorted(splits)}")
    if held is not None:
        train, heldout = splits.get("train", ()), splits[held]
    else:
        train, heldout = split_heldout(splits["train"])
    path = Path(name)
    return Task(path.stem if path.suffix in FILE_SUFFIXES else path.name, train, heldout, exact_match, splits)


def _rows(kind: Kind, table: Any, name: str, file: Path, allow_outside_files: bool) -> Rows:
    """The rows of a table, read as this kind on access, with paths of media relative to the file."""
    folders = [file.parent, *([] if file.suffix in FILE_SUFFIXES else cache_folders())]
    try:
        check_columns(columns_of(table), *kind.needed, media=media_columns(table))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error

    def row(i: int) -> Row:
        raw = table[i]
        if not isinstance(table, list):
            numbered = ("label",) if kind is UNPAIRED else ()  # its classes are bad and good
            raw = without_filled_nulls(with_class_names(raw, table.features, numbered))
        read = _read(kind, {**raw, "where": f"{name} row {i + 1}"})
        images = [resolve_image_path(file, image) for image in read["images"]]
        videos = [resolve_video_path(file, video) for video in read.get("videos") or ()]
        audios = [resolve_image_path(file, audio) for audio in read.get("audios") or ()]
        sources = [("images", image) for image in images] + [("audios", audio) for audio in audios]
        sources += [("videos", source) for video in videos for source in files_of_video(video)]
        try:
            for column, source in () if allow_outside_files else sources:
                check_inside(folders, source, column)
        except ValueError as error:
            return _unreadable(read, error)
        more = {name: media for name, media in (("videos", videos), ("audios", audios)) if media}
        return {**read, "images": images, **more}

    files = [file] if file.suffix in FILE_SUFFIXES else ()
    read_all = cache(partial(table_fingerprint, table))
    hashes = _prompt_hashes(table)
    rows = Rows(row, np.arange(len(table)), _source_ids(hashes), files, read_all, hashes)
    first = [rows[i] for i in range(min(20, len(rows)))]
    if first and all("unreadable" in one for one in first):
        raise ValueError(f"{first[0]['where']}: {first[0]['unreadable']}")
    read_media = any(row.get(column) for row in first for column in MEDIA_COLUMNS)  # also those of messages
    if not read_media and MEDIA_COLUMNS.isdisjoint(columns_of(table)):
        try:
            check_no_unread_media([table[i] for i in range(len(first))])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return rows


def _prompt_hashes(table: Any) -> np.ndarray:
    """For each row a hash of its prompt; 0 without a text prompt, and for all rows of a table with media.

    Data sets have several rows for a prompt: DAPO's file has each problem a hundred times, and preferences have several
    answers. Linear time.
    """
    columns = columns_of(table)
    texts = [name for name in (*QUESTION_COLUMNS, "instruction") if name in columns]
    hashes = np.zeros(len(table), np.uint64)
    if not texts or not MEDIA_COLUMNS.isdisjoint(columns):
        return hashes
    texts += [name for name in ("input", "system", "history") if name in columns]  # which are parts of the prompt
    for i, row in enumerate(table if isinstance(table, list) else table.select_columns(texts)):
        if prompt := [row[name] for name in texts if row.get(name)]:
            digest = blake2b(json.dumps(prompt, default=str).encode(), digest_size=8).digest()
            hashes[i] = int.from_bytes(digest)
    return hashes


def _source_ids(prompt_hashes: np.ndarray) -> np.ndarray:
    """For each row the number of the first row with the same prompt, or its own number if prompts are not compared."""
    _, first, which = np.unique(prompt_hashes, return_index=True, return_inverse=True)
    return np.where(prompt_hashes == 0, np.arange(len(prompt_hashes)), first[which])


def _read(kind: Kind, raw: Row) -> Row:
    """Reads a row. One that cannot be read gets the reason as `unreadable`, and is skipped when it is encoded."""
    if raw.get("unreadable"):
        return raw
    try:
        return kind.read(raw)
    except ValueError as error:
        return _unreadable(raw, error)


def _unreadable(row: Row, error: ValueError) -> Row:
    where = row.get("where", "row")
    return {"question": "", "images": [], "answer": None, "where": where, "unreadable": str(error)}


# --- held-out rows


def with_heldout(task: Task, heldout: str, load: Callable[[str], Task] = load_task) -> Task:
    """Replaces the held-out rows of a task. They are never trained on. `heldout` is one of these:

    - a file (`heldout.jsonl`) or a split of the data set (`validation`). The other rows are trained on, without those
      whose prompt is in the file; a line says how many these are. Prompts are compared where both have text in a
      column such as `question`, and no column of images, videos or audios.
    - `all`, for evaluation: every row of a file, or of all splits.
    - a share of the training rows (`0.1`): at least one row, the same rows in every run. Both rows that `load_unpaired`
      makes of a pair are held out, or neither. So are all rows with the same prompt, unless they have images, videos or
      audios, and all copies of a row that a mixture repeats; one copy of it is then among the held-out rows.

    Args:
        task: from `load`, or from a function of yours.
        heldout: which rows to hold out, as above.
        load: the function that loaded the task, which also reads the file: `load_task`, `load_chats`, `load_pairs` or
            `load_unpaired`.

    Raises:
        ValueError: none of these, a file with rows to train on, or a share that leaves none of them.
    """
    rows = task.splits.get("train", task.train)
    if heldout in task.splits:
        return replace(task, train=() if heldout == "train" else rows, heldout=task.splits[heldout])
    if heldout == "all":
        every = concatenate(list(task.splits.values()) or [task.train, task.heldout])
        return replace(task, train=(), heldout=every)
    if Path(heldout).suffix in FILE_SUFFIXES:
        held_rows = load(heldout).splits["train"]
        if Path(heldout).resolve() in {file.resolve() for file in _files_of(rows)}:
            raise ValueError(f"heldout: expected another file than those to train on, got {heldout!r}")
        return replace(task, train=_without_prompts_of(rows, held_rows, heldout), heldout=held_rows)
    train, held = _split_by_share(rows, _share(heldout, task.splits))
    return replace(task, train=train, heldout=held)


def _without_prompts_of(rows: Sequence[Row], held: Sequence[Row], name: str) -> Sequence[Row]:
    """The rows without those that have the prompt of a held-out row."""
    hashes, held_hashes = as_rows(rows).prompt_hashes, as_rows(held).prompt_hashes
    is_held = np.isin(hashes, held_hashes[held_hashes != 0])
    if not is_held.any():
        return rows
    if os.environ.get("RANK", "0") == "0":
        print(f"not trained on: {is_held.sum()} of {len(rows)} rows, whose prompts are in {name}", flush=True)
    return as_rows(rows)[np.flatnonzero(~is_held)]


def _files_of(rows: Sequence[Row]) -> Iterable[Path]:
    """The files that rows were read from, where known. Rows in a list are in memory, and name their files."""
    if isinstance(rows, Rows):
        return rows.files
    return {Path(str(row.get("where", "")).rpartition(" row ")[0]) for row in rows}


def _share(heldout: str, splits: Collection[str]) -> float:
    try:
        share = float(heldout)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise ValueError(
            f"heldout: expected a file, a split ({', '.join(splits) or 'none'}), all, or a share between 0 and 1, "
            f"got {heldout!r}"
        )
    return share


def _split_by_share(rows: Sequence[Row], share: float) -> tuple[Rows, Rows]:
    """Splits rows into (training, held-out), see `with_heldout`."""
    unique_sources, sources = np.unique(as_rows(rows).source_ids, return_inverse=True)
    place_of_source = np.argsort(np.random.default_rng(HELD_OUT_SEED).permutation(len(unique_sources)))
    place = place_of_source[sources]
    order = np.argsort(place, kind="stable")  # shuffled, with rows of one source beside each other
    held = max(1, round(share * len(rows)))
    held = int((place <= place[order[held - 1]]).sum())  # all rows of the last source
    if held >= len(rows):
        raise ValueError(f"heldout: expected a share that leaves rows to train on, got {share} of {len(rows)}")
    shuffled = as_rows(rows)[order]
    return shuffled[held:], without_repeats(shuffled[:held])


# --- other tasks


def _read_as(task: Task, kind: Kind) -> Task:
    return task if kind.read is task_row else map_rows(task, lambda row: _read(kind, row))


def _are_marked(rows: Sequence[Row]) -> bool:
    """Whether a task has single responses with a label that says whether they are good.

    A label without a response is a column of a pair, and the label of a row that was read as a task is its answer.
    """
    return len(rows) > 0 and {"completion", "label"} <= rows[0].keys() and rows[0].get("read_as") != "task"


def _split_pairs(rows: Sequence[Row]) -> Rows:
    """Two rows per pair, the chosen response first."""
    pairs = as_rows(rows)

    def row(i: int) -> Row:
        pair, good = pairs.read(i // 2), i % 2 == 0
        return {**pair, "completion": pair.get("chosen" if good else "rejected"), "label": good}

    numbers = (2 * pairs.numbers[:, None] + [0, 1]).flatten()
    sources, prompts = np.repeat(pairs.source_ids, 2), np.repeat(pairs.prompt_hashes, 2)
    return Rows(row, numbers, sources, pairs.files, pairs.table_fingerprint, prompts)


def _with_wrong_answers(rows: Sequence[Row]) -> Sequence[Row]:
    """Adds each row's answer as `chosen` and another row's as `rejected`; pairs are unchanged."""
    table = as_rows(rows)

    def row(i: int) -> Row:
        right = table.read(i)
        if "chosen" in right:
            return _read(PAIRS, right)
        others = np.random.default_rng((HELD_OUT_SEED, i)).permutation(len(rows))[:100]
        answers = (rows[int(j)]["answer"] for j in others)
        wrong = next((answer for answer in answers if answer is not None and str(answer) != str(right["answer"])), None)
        return _read(PAIRS, {**right, "chosen": right["answer"], "rejected": wrong})

    return table.with_read(row)
