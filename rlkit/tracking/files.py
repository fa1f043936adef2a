"""Names of a run's files, and functions that read and write them."""

from __future__ import annotations

import json
import platform
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
    rows = []
    for line in Path(path).read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


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
