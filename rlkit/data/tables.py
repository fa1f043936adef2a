"""Tables of files and data sets, whose rows are read on access."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from rlkit.data.fingerprints import fingerprint, table_fingerprint
from rlkit.data.lookup import requires_extra
from rlkit.data.messages import bytes_or_path
from rlkit.data.samples import Row

HELD_OUT_SEED = 20240131  # the same rows are held out in every run, whatever its seed
TEXT_SUFFIXES = frozenset({".jsonl", ".json", ".csv", ".tsv"})
FILE_SUFFIXES = TEXT_SUFFIXES | {".parquet"}
SEEN_ROWS = 100  # so many rows are read for a fingerprint of rows without `table_fingerprint`
LONGEST_CELL = 2**31 - 1  # characters in a cell of a csv file; Python's default is 131072


class Rows(Sequence[Row]):
    """Rows of a table, read on access. `rows[i]` is a row; slices and lists of indices give `Rows` again.

    Args:
        read: row number -> the row with this number in the table.
        numbers: int [n], the row number of each of these rows. A row that is repeated has the same number each time.
        source_ids: int [n]; rows that are held out together have the same id: rows that were made of the same row, such
            as both responses of a preference pair, and rows with the same prompt. By default all differ.
        files: that the rows were read from, where known.
        table_fingerprint: returns a fingerprint of all that `read` reads.
        prompt_hashes: uint64 [n], equal for the same prompt, also of other tables; 0 for rows whose prompts are not
            compared. By default all are 0.
    """

    def __init__(
        self,
        read: Callable[[int], Row],
        numbers: np.ndarray,
        source_ids: np.ndarray | None = None,
        files: Collection[Path] = (),
        table_fingerprint: Callable[[], str] | None = None,
        prompt_hashes: np.ndarray | None = None,
    ) -> None:
        self.read = read
        self.numbers = numbers
        self.source_ids = np.arange(len(numbers)) if source_ids is None else source_ids
        self.files = files
        self.table_fingerprint = table_fingerprint
        self.prompt_hashes = np.zeros(len(numbers), np.uint64) if prompt_hashes is None else prompt_hashes

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice | list | np.ndarray):
            numbers, sources, prompts = self.numbers[i], self.source_ids[i], self.prompt_hashes[i]
            return Rows(self.read, numbers, sources, self.files, self.table_fingerprint, prompts)
        return self.read(int(self.numbers[i]))

    def with_read(self, read: Callable[[int], Row]) -> Rows:
        """The same row numbers, read by another function; the fingerprint stays that of this table."""
        return Rows(read, self.numbers, self.source_ids, self.files, self.table_fingerprint, self.prompt_hashes)

    def fingerprint(self) -> str:
        """Changes with the texts, numbers and paths of media in the rows, and with their order.

        Without `table_fingerprint`, as for rows that are computed when they are read, it is made of `SEEN_ROWS` rows.
        """
        some = np.linspace(0, len(self) - 1, min(len(self), SEEN_ROWS)).astype(int)
        contents = self.table_fingerprint() if self.table_fingerprint else table_fingerprint([self[i] for i in some])
        return fingerprint([contents, len(self), *self.numbers.tolist()])


def as_rows(rows: Sequence[Row]) -> Rows:
    """The same rows as `Rows`."""
    if isinstance(rows, Rows):
        return rows
    read_all = cache(partial(table_fingerprint, rows)) if isinstance(rows, list | tuple) else None
    return Rows(lambda number: rows[number], np.arange(len(rows)), table_fingerprint=read_all)


def stack_tables(tables: Sequence[Rows]) -> Rows:
    """The rows of several tables one after another. Rows of different tables have different numbers and source ids."""
    first_numbers = _first_numbers([table.numbers for table in tables])
    first_sources = _first_numbers([table.source_ids for table in tables])

    def read(number: int) -> Row:
        which = int(np.searchsorted(first_numbers, number, side="right")) - 1
        return tables[which].read(number - int(first_numbers[which]))

    return Rows(
        read,
        np.concatenate([table.numbers + first for table, first in zip(tables, first_numbers, strict=True)]),
        np.concatenate([table.source_ids + first for table, first in zip(tables, first_sources, strict=True)]),
        {file for table in tables for file in table.files},
        lambda: fingerprint(table.fingerprint() for table in tables),
        np.concatenate([table.prompt_hashes for table in tables]),
    )


def _first_numbers(numbers: Sequence[np.ndarray]) -> np.ndarray:
    """What to add to the numbers of each table, so that those of different tables differ."""
    return np.cumsum([0, *(own.max(initial=-1) + 1 for own in numbers)])[:-1]


def without_repeats(rows: Sequence[Row]) -> Rows:
    """Each row once, where it is first."""
    rows = as_rows(rows)
    return rows[_first_places(rows.numbers)]


def concatenate(tables: Sequence[Sequence[Row]]) -> Rows:
    """The rows of several tables one after another, each once."""
    return stack_tables([without_repeats(table) for table in tables])


def first_of_sources(rows: Sequence[Row]) -> list[int]:
    """The index of the first of the rows of each source, such as a preference pair or a prompt, in order."""
    return _first_places(as_rows(rows).source_ids).tolist()


def _first_places(ids: np.ndarray) -> np.ndarray:
    """The index of each different id where it is first, in order."""
    return np.sort(np.unique(ids, return_index=True)[1])


def split_heldout(rows: Rows) -> tuple[Rows, Rows]:
    """Splits rows into (training, held-out): a tenth is held out, at least 1 and at most 300; of a single row none.

    Of several rows of one source, such as rows with the same prompt, one is held out, and none of them is trained on.
    """
    order = np.random.default_rng(HELD_OUT_SEED).permutation(len(rows))
    sources = rows.source_ids[order]
    first = _first_places(sources)
    held = first[: min(300, max(1, len(first) // 10), max(0, len(first) - 1))]
    return rows[order[~np.isin(sources, sources[held])]], rows[order[held]]


def read_table(path: Path) -> Any:
    """The rows of a file: a list of mappings, or for parquet a datasets.Dataset.

    Raises:
        ValueError: no such file, an empty one, or one that cannot be read.
    """
    if not path.is_file():
        near = sorted(one.name for one in path.parent.glob(f"*{path.suffix}")) if path.parent.is_dir() else []
        beside = f"; {str(path.parent)!r} has {', '.join(near[:5])}" if near else ""
        raise ValueError(f"{path}: expected a file, got none of this name{beside}")
    readers: Mapping[str, Callable[[Path], Any]] = {".parquet": _parquet_table, ".csv": _csv_rows, ".tsv": _csv_rows}
    table = readers.get(path.suffix, _json_rows)(path)
    if not len(table):
        raise ValueError(f"{path}: expected at least one row, got an empty file")
    return table


def columns_of(table: Any) -> list[str]:
    """The column names of a table of `read_table`."""
    return list(dict.fromkeys(name for row in (table if isinstance(table, list) else [table.features]) for name in row))


def _json_rows(path: Path) -> list[Row]:
    """Rows of a JSON list, or of JSON lines. datasets' reader is not used, as it converts texts to dates."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        is_list = path.suffix == ".json" and text.lstrip().startswith("[")
        rows = json.loads(text) if is_list else []
    except ValueError as error:
        raise ValueError(f"{path}: expected json, got {error}") from error
    for number, line in enumerate([] if is_list else text.split("\n"), 1):
        if line.strip():
            rows.append(_from_json_line(line, f"{path} line {number}"))
    if stray := [i for i, row in enumerate(rows) if not isinstance(row, Mapping)]:
        raise ValueError(f"{path} row {stray[0] + 1}: expected an object, got {rows[stray[0]]!r:.80}")
    return rows


def _from_json_line(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        got = f"{error.msg}: column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(f"{where}: expected json, got {got}, at {line[:60]!r}") from error


def _csv_rows(path: Path) -> list[Row]:
    """Rows of a .csv or .tsv file. Every cell is text; an empty one is None.

    `strict`, because Python's reader otherwise puts the rest of the file into a cell whose quote is not closed.
    """
    delimiter = "\t" if path.suffix == ".tsv" else ","
    rows, line = [], 1  # line: where the next row begins
    try:
        csv.field_size_limit(LONGEST_CELL)
        with path.open(encoding="utf-8-sig", newline="") as file:  # a cell may have line breaks of any kind
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            for row in reader:
                rows.append(row)
                line = reader.line_num + 1
    except csv.Error as error:
        expected = 'expected a cell that begins with " to end with ", and to have "" for each " inside'
        raise ValueError(f"{path} line {line}: {expected}, got {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: expected {path.suffix[1:]}, got {error}") from error
    names, *cells = [row for row in rows if row] or [[]]
    if len(set(names)) < len(names):
        raise ValueError(f"{path}: expected different names of columns, got {names}")
    for i, row in enumerate(cells):
        if len(row) != len(names):
            raise ValueError(f"{path} row {i + 1}: expected {len(names)} cells, got {len(row)}")
    return [dict(zip(names, (cell or None for cell in row), strict=True)) for row in cells]


def _parquet_table(path: Path) -> Any:
    """Images stay undecoded, so a broken image makes one row unusable instead of ending the run."""
    with requires_extra("recipes"):
        import datasets

    try:
        table = datasets.load_dataset("parquet", data_files=str(path), split="train")
    except (datasets.exceptions.DatasetGenerationError, OSError, ValueError) as error:
        raise ValueError(f"{path}: expected parquet, got {error.__cause__ or error}") from error
    return without_decoding(table)


def without_decoding(table: Any) -> Any:
    """A table or stream of datasets with images, videos and audios as bytes or paths instead of decoded ones."""
    with requires_extra("recipes"):
        import datasets

    for name, kind in media_columns(table).items():
        undecoded = getattr(datasets, kind.title())(decode=False)
        feature = table.features[name]
        table = table.cast_column(name, type(feature)(undecoded) if hasattr(feature, "feature") else undecoded)
    return table


def media_columns(table: Any) -> dict[str, str]:
    """The columns of media in the schema of a table or stream: name -> `image`, `video` or `audio`."""
    features = {} if isinstance(table, list) else table.features or {}
    entries = {name: getattr(feature, "feature", feature) for name, feature in features.items()}
    kinds = {"Image": "image", "Video": "video", "Audio": "audio"}  # names of datasets' classes
    return {name: kinds[type(entry).__name__] for name, entry in entries.items() if type(entry).__name__ in kinds}


def with_class_names(row: Row, features: Mapping[str, Any], numbered: Collection[str] = ()) -> Row:
    """A row of a data set with the names of its classes in place of their numbers; -1, for none, becomes None.

    Args:
        numbered: columns whose numbers stay.
    """
    import datasets

    kinds = {name: feature for name, feature in features.items() if name not in numbered}
    classes = {name: feature for name, feature in kinds.items() if isinstance(feature, datasets.ClassLabel)}
    named = {name: None if row[name] in (None, -1) else feature.int2str(row[name]) for name, feature in classes.items()}
    return {**row, **named}


def without_filled_nulls(found: Any, inside: bool = False) -> Any:
    """A row of a parquet file or data set without the None that Arrow put into tools and into arguments of calls.

    Arrow gives all structs of a column the same fields, so those of other tools and calls are there as None.
    """
    if isinstance(found, list):
        return [without_filled_nulls(one, inside) for one in found]
    if not isinstance(found, Mapping):
        return found
    return {
        name: without_filled_nulls(value, inside or name in ("tools", "arguments"))
        for name, value in found.items()
        if not (inside and value is None)
    }


def resolve_image_path(path: Path, picture: Any) -> Any:
    """Makes a relative image path, bare or in a struct without bytes, relative to the table's file."""
    if isinstance(picture, Mapping) and not picture.get("bytes"):
        return {**picture, "path": resolve_image_path(path, picture.get("path"))}
    return str(path.parent / picture) if isinstance(picture, str) and picture and not _is_url(picture) else picture


def resolve_video_path(path: Path, video: Any) -> Any:
    """As `resolve_image_path`, for a video: one file, a list of frames, or {"frames": [...], "fps": ...}."""
    if isinstance(video, Mapping) and isinstance(video.get("frames"), list | tuple):
        return {**video, "frames": resolve_video_path(path, video["frames"])}
    if isinstance(video, list | tuple):
        return [resolve_image_path(path, frame) for frame in video]
    return resolve_image_path(path, video)


def files_of_video(video: Any) -> list[Any]:
    """The sources of a video that may be paths: its frames, or itself."""
    if isinstance(video, Mapping) and video.get("frames") is not None:
        video = video["frames"]
    return list(video) if isinstance(video, list | tuple) else [video]


def _is_url(source: str) -> bool:
    return "://" in source or source.startswith("data:")


def check_inside(folders: Sequence[Path], picture: Any, column: str = "images") -> None:
    """Check that an image's path, as `resolve_image_path` gives it, does not lead out of a data set's folders.

    Whoever wrote a data set could otherwise have any image, video or audio that this account may read put into
    prompts, logs and pages.

    Raises:
        ValueError: by an absolute path, `..` or a link, it does; or a struct has something else as its bytes.
    """
    if isinstance(picture, Mapping):
        picture = bytes_or_path(picture, column)
    if not isinstance(picture, str | Path) or not str(picture) or _is_url(str(picture)):
        return
    if not any(Path(picture).resolve().is_relative_to(folder.resolve()) for folder in folders):
        raise ValueError(
            f"{column}: expected a file in {str(folders[0])!r}, got {str(picture)!r}, which leads out of it; "
            "--allow_outside_files reads it all the same"
        )
