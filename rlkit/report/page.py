"""One self-contained HTML page of one or several runs.

The page contains its data as JSON, from which `page.js` builds everything. Responses are untrusted: the script inserts
them as text only, and the page's content security policy allows its own two scripts and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit.report.curves import grouped, is_number, numbers
from rlkit.report.intervals import MEAN_SUFFIXES, intervals
from rlkit.report.responses import responses_for_page
from rlkit.tracking import CONFIG, EVAL, METRICS, read_metrics, read_object

HERE = Path(__file__).parent


def write_page(path: Path, runs: Sequence[Path], *, title: str = "", running: bool = False, every: float = 0.0) -> Path:
    """Write a page of these runs.

    Args:
        path: path of the page.
        runs: directories of the runs.
        title: title of the page; by default the names of the directories.
        running: whether a run is still going on; the page then reloads itself.
        every: seconds between two writes of the page during the run.

    Returns:
        `path`.
    """
    shown = [run_data(run) for run in runs]
    data = {
        "runs": shown,
        "groups": grouped([*dict.fromkeys(name for run in shown for name in run["metrics"] if name != "step")]),
        "running": running,
        "every": every,
        "written": time.time(),
    }
    content = page_text(title or ", ".join(run["name"] for run in shown), data)
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content.encode("utf-8", "backslashreplace"))  # a title may contain a lone surrogate
    part.replace(path)
    return path


def page_text(title: str, data: Mapping[str, Any]) -> str:
    """The HTML of a page with this data."""
    styles = [(HERE / "uPlot" / "uPlot.min.css").read_text(), (HERE / "page.css").read_text()]
    scripts = [(HERE / "uPlot" / "uPlot.iife.min.js").read_text(), (HERE / "page.js").read_text()]
    policy = (
        f"default-src 'none'; img-src data:; media-src data:; style-src {_hashes(styles)}; "
        f"script-src {_hashes(scripts)}; base-uri 'none'; form-action 'none'"
    )
    encoded = json.dumps(data, allow_nan=False).replace("<", "\\u003c")  # text must not close the script element
    parts = {
        "title": html.escape(title),
        "policy": html.escape(policy),
        "styles": "\n".join(f"<style>{style}</style>" for style in styles),
        "data": f'<script type="application/json" id="data">{encoded}</script>',
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    before, *rest = (HERE / "page.html").read_text().split("{{")  # one pass, because the inserted parts may contain {{
    marks = [piece.partition("}}") for piece in rest]
    return before + "".join(parts[name.strip()] + text for name, _, text in marks)


def _hashes(sources: Sequence[str]) -> str:
    """The source list for a content security policy: the hash of each script or style."""
    digests = [base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() for source in sources]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def with_evaluations(rows: Sequence[Mapping[str, Any]], evaluations: Any) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl, with the results of evaluations added to the rows of their steps as `heldout/...`."""
    by_step = {row["step"]: dict(row) for row in rows}
    for one in evaluations if isinstance(evaluations, list) else ():
        if isinstance(one, dict) and isinstance(step := one.get("step"), int):
            found = {
                f"heldout/{name}": x for name, x in one.items() if name != "step" and not name.endswith(MEAN_SUFFIXES)
            }
            by_step[step] = {"step": step, **by_step.get(step, {}), **found}
    return [by_step[step] for step in sorted(by_step)]


def run_data(out: Path) -> dict[str, Any]:
    """The data of one run for a page, read from its files. Missing and damaged files are left out."""
    rows = read_metrics(out / METRICS) if (out / METRICS).exists() else []
    evaluation = read_object(out / EVAL)
    config = read_object(out / CONFIG)
    tasks = evaluation.get("tasks")
    tasks = {
        str(task): {name: x for name, x in found.items() if is_number(x)}
        for task, found in (tasks.items() if isinstance(tasks, dict) else ())
        if isinstance(found, dict)
    }
    before, after = (intervals(evaluation, evaluation.get("heldout"), f"_{when}") for when in ("before", "after"))
    return {
        "name": out.resolve().name,
        "steps": config.get("steps") if is_number(config.get("steps")) else None,
        "last": rows[-1]["step"] if rows else None,
        "metrics": numbers(with_evaluations(rows, evaluation.get("evaluations"))),
        "evaluation": {name: x for name, x in evaluation.items() if is_number(x)},
        "intervals": before | after,
        "tasks": tasks,
        "task_intervals": {task: intervals(found, found.get("rows")) for task, found in tasks.items()},
        "config": json.dumps(config, indent=1),
        "options": {name: json.dumps(x) for name, x in config.items() if name not in ("versions", "contents")},
        "responses": responses_for_page(out),
    }
