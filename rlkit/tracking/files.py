"""Names of a run's files, and functions that read and write them."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

CONFIG, METRICS, EVAL, PHASES = "config.json", "metrics.jsonl", "eval.json", "phases"
SAMPLES = "samples.jsonl"  # written and read by rlkit.report.answers


def keep_earlier_config(out: Path) -> None:
    """Renames the config.json of an earlier start to config-1.json, config-2.json, ..."""
    if (out / CONFIG).exists():
        earlier = len(list(out.glob("config-*.json")))
        (out / CONFIG).rename(out / f"config-{earlier + 1}.json")


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl.

    Lines without an integer `step` are left out, such as a line that was cut off when the process was killed.
    """
    return list(_read_rows(Path(path)))


def _read_rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                yield row


def drop_rows(path: Path, dropped: Callable[[dict[str, Any]], bool]) -> None:
    """Removes rows of a metrics.jsonl or samples.jsonl, which may be too large to be read as a whole."""
    replace_file(path, (json.dumps(row) + "\n" for row in _read_rows(path) if not dropped(row)))


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


def replace_file(path: Path, content: str | bytes | Iterable[str]) -> None:
    """Writes a file atomically; if writing fails, an earlier file stays, without a part of the new one.

    Args:
        content: all of it, or its parts one after the other.
    """
    part = path.with_name(path.name + ".part")
    try:
        if isinstance(content, str):
            part.write_text(content)
        elif isinstance(content, bytes):
            part.write_bytes(content)
        else:
            with part.open("w") as file:
                file.writelines(content)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
