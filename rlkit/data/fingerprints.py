"""Fingerprints of tables: short texts by which a resumed run recognises its data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import date
from decimal import Decimal
from hashlib import blake2b
from pathlib import PurePath
from typing import Any

import numpy as np

BATCH = 1000  # rows of a table that are converted at a time


def fingerprint(parts: Iterable[Any]) -> str:
    """Sixteen hexadecimal digits that depend on every part: texts, numbers, and lists or mappings of them.

    Of bytes, such as an image's, only their number counts; of other objects but arrays and sets their type.
    """
    digest, encode = blake2b(digest_size=8), json.JSONEncoder(default=_described, skipkeys=True).encode
    for part in parts:
        digest.update(encode(part).encode() + b"\n")
    return digest.hexdigest()


def table_fingerprint(table: Any) -> str:
    """`fingerprint` of the rows of a list or a datasets.Dataset. The media of a Dataset are not read, only their names.

    Linear time: 1M rows of a question, an answer and an image took a slow core 4 s in a list, and 1.5 s in a Dataset.
    """
    if isinstance(table, list | tuple):
        return fingerprint(table[first : first + BATCH] for first in range(0, len(table), BATCH))
    return fingerprint(_parts_of_dataset(table))


def _parts_of_dataset(table: Any) -> Iterator[Any]:
    yield table.column_names
    for batch in table.with_format("arrow").iter(BATCH):
        for column in batch.columns:
            yield from _without_bytes(column)


def _without_bytes(column: Any) -> Iterator[list[Any]]:
    """The values of an Arrow column, with the number of bytes in place of bytes, at any depth."""
    import pyarrow as pa
    from pyarrow import compute

    if pa.types.is_struct(column.type):
        for i in range(column.type.num_fields):
            if column.type.field(i).name == "path":  # of media: the folder may have another place when a run goes on
                paths = compute.struct_field(column, [i]).to_pylist()
                yield [path and PurePath(path).name for path in paths]
            else:
                yield from _without_bytes(compute.struct_field(column, [i]))
    elif pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        yield compute.list_value_length(column).to_pylist()
        yield from _without_bytes(compute.list_flatten(column))
    elif pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        yield compute.binary_length(column).to_pylist()
    else:
        yield column.to_pylist()


def _described(x: Any) -> Any:
    if isinstance(x, np.generic):
        return x.item()
    if isinstance(x, np.ndarray):
        return x.tolist()
    if isinstance(x, set | frozenset):
        return sorted(map(str, x))
    if isinstance(x, bytes | bytearray):
        return f"{len(x)} bytes"
    return str(x) if isinstance(x, PurePath | date | Decimal) else type(x).__name__
