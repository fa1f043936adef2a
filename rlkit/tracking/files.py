"""Names of a run's files, and functions that read and write them."""

from __future__ import annotations

import json
import mmap
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any

CONFIG, METRICS, EVAL, PHASES = "config.json", "metrics.jsonl", "eval.json", "phases"
SAMPLES = "samples.jsonl"  # written and read by rlkit.report.responses


def keep_earlier_config(out: Path) -> None:
    """Renames the config.json of an earlier start to config-1.json, config-2.json, ..."""
    if (out / CONFIG).exists():
        names = (f"config-{number}.json" for number in count(1))
        (out / CONFIG).rename(out / next(name for name in names if not (out / name).exists()))


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl.

    Lines without an integer `step` are left out, such as a line that was cut off when the process was killed.
    """
    with Path(path).open("rb") as file:
        return [row for line in file if (row := _parse_row(line)) is not None]


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def drop_last_rows(path: Path, dropped: Callable[[dict[str, Any]], bool]) -> None:
    """Cuts the end of a metrics.jsonl or samples.jsonl off, after the last row that is not to be dropped.

    Rows are in the order of their steps, so all that is dropped is at the end. The file is neither read nor written as
    a whole.
    """
    if not path.stat().st_size:  # an empty file cannot be mapped
        return
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = len(content)
            while end:
                start = content.rfind(b"\n", 0, end - 1) + 1
                row = _parse_row(content[start:end])
                if row is not None and not dropped(row):
                    break
                end = start
            has_line_end = content[end - 1 : end] == b"\n"
        file.truncate(end)
        if end and not has_line_end:
            file.seek(end)
            file.write(b"\n")


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty dict if the file is missing or holds anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that influence a run."""
    installed = {"python": platform.python_version()}
    for name in ("rlkit-vlm", "torch", "transformers", "vllm", "peft", "flash-attn"):
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def replace_file(path: Path, content: str | bytes) -> None:
    """Writes a file atomically; if writing fails, an earlier file stays, without a part of the new one."""
    part = path.with_name(path.name + ".part")
    try:
        if isinstance(content, str):
            part.write_text(content)
        else:
            part.write_bytes(content)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
