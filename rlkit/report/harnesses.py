"""Reads results that other evaluation tools measured on an exported model: lm-eval and inspect-ai."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlkit.tracking import EVAL, read_object
from rlkit.tracking.files import replace_file


def add_results(run: Path, files: list[Path]) -> None:
    """Add the results in files of lm-eval or inspect-ai to the `tasks` in a run's eval.json.

    A task is named "gsm8k (lm-eval)", and replaces an earlier result of this name.

    Args:
        files: `results_*.json` of lm-eval, and logs of inspect-ai (.json; .eval if inspect-ai is installed).

    Raises:
        ValueError: a file is of neither tool.
    """
    evaluation = read_object(run / EVAL)
    for file in files:
        evaluation["tasks"] = {**(evaluation.get("tasks") or {}), **read_results(file)}
    replace_file(run / EVAL, json.dumps(evaluation, indent=1) + "\n")


def read_results(file: Path) -> dict[str, dict[str, float]]:
    """The numbers in a file of results, by task and name. NAME_error is the standard error of NAME."""
    content = _inspect_log(file) if file.suffix == ".eval" else read_object(file)
    results = content.get("results")
    if isinstance(results, dict) and isinstance(content.get("eval"), dict):
        return _of_inspect(content["eval"], results)
    if isinstance(results, dict) and "configs" in content:
        return {f"{task} (lm-eval)": _of_lm_eval(found or {}) for task, found in results.items()}
    raise ValueError(f"add: expected results of lm-eval or a log of inspect-ai, got {file}")


def _of_lm_eval(found: dict[str, Any]) -> dict[str, float]:
    """From {"exact_match,none": 0.5, "exact_match_stderr,none": 0.1}; a filter other than none stays in the name."""
    numbers = {}
    for key, x in found.items():
        if isinstance(x, int | float):
            name, _, filtered = key.partition(",")
            is_error = name.endswith("_stderr")
            name = name.removesuffix("_stderr") + (f" {filtered}" if filtered not in ("", "none") else "")
            numbers[f"{name}_error" if is_error else name] = float(x)
    return {("rows" if name == "sample_len" else name): x for name, x in numbers.items()}


def _of_inspect(task: dict[str, Any], results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Metrics of all scorers; with several scorers, their names are in front. The metric stderr is that of accuracy."""
    scores = results.get("scores") or []
    numbers: dict[str, float] = {"rows": float(results.get("total_samples") or 0)}
    for score in scores:
        scorer = f"{score['name']} " if len(scores) > 1 else ""
        metrics = {name: metric["value"] for name, metric in score["metrics"].items()}
        values = {name: float(x) for name, x in metrics.items() if isinstance(x, int | float)}  # null without samples
        if len(values) == 2 and "stderr" in values:
            (mean,) = values.keys() - {"stderr"}
            values[f"{mean}_error"] = values.pop("stderr")
        numbers |= {f"{scorer}{name}": x for name, x in values.items()}
    return {f"{task.get('task', 'task')} (inspect)": numbers}


def _inspect_log(file: Path) -> dict[str, Any]:
    try:
        from inspect_ai.log import read_eval_log
    except ImportError as error:
        raise ValueError(
            f"add: expected inspect-ai for {file}; install it, or write logs with `inspect eval --log-format json`"
        ) from error
    try:
        return json.loads(read_eval_log(str(file), header_only=True).model_dump_json())
    except Exception as error:  # the file may be damaged in any way
        raise ValueError(f"add: expected a log of inspect-ai, got {file}: {type(error).__name__}: {error}") from error
