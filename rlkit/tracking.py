"""What a run leaves behind: a directory of plain files, written as the run goes."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

CONFIG, METRICS, EVAL = "config.json", "metrics.jsonl", "eval.json"


class Run:
    """A run's directory: `config.json`, `metrics.jsonl` (one object a step), `eval.json`, checkpoints.

    Only one process writes; on the others every call does nothing.

    Args:
        out: the directory.
        config: what the run was started with.
        resume: go on with a run that is there; without it a directory that holds one is refused.
        writes: this is the process that writes.
    """

    def __init__(
        self, out: str | Path, config: Mapping[str, Any], *, resume: bool = False, writes: bool = True
    ) -> None:
        self.out, self.writes = Path(out), writes
        if (self.out / METRICS).exists() and not resume:
            raise ValueError(f"out {str(self.out)!r}: holds a run already; --resume goes on with it, or name another")
        if writes:
            self.out.mkdir(parents=True, exist_ok=True)
            self._write(CONFIG, {**config, "versions": versions()})

    def start_at(self, step: int) -> None:
        """Drop what was logged from `step` on: a resumed run logs it again."""
        path = self.out / METRICS
        if self.writes:
            kept = [row for row in read_metrics(path) if row["step"] < step] if path.exists() else []
            _replace(path, "".join(json.dumps(row) + "\n" for row in kept))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One line of `metrics.jsonl`, on disk when this returns."""
        if self.writes:
            with (self.out / METRICS).open("a") as file:
                file.write(json.dumps({"step": step, **metrics}) + "\n")

    def evaluation(self, **results: Any) -> dict[str, Any]:
        """Add to `eval.json`; returns all of it."""
        path = self.out / EVAL
        merged = {**(json.loads(path.read_text()) if path.exists() else {}), **results}
        if self.writes:
            self._write(EVAL, merged)
        return merged

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        _replace(self.out / name, json.dumps(content, indent=1, default=str) + "\n")


def new_directory(root: str | Path, name: str, *, resume: bool = False) -> Path:
    """`root/name`, or the first of `name-2`, `name-3`, ... that holds no run; with `resume`, the last that does."""
    taken = path = Path(root) / name
    count = 1
    while (path / METRICS).exists():
        taken, count = path, count + 1
        path = Path(root) / f"{name}-{count}"
    return taken if resume else path


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a last line that was cut short by a kill is left out."""
    rows = []
    for line in Path(path).read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def versions() -> dict[str, str]:
    """Of Python and of the packages that decide what a run does."""
    found = {"python": platform.python_version()}
    for name in ("rlkit", "torch", "transformers", "vllm", "peft", "flash-attn"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _replace(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)
