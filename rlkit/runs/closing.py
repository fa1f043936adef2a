"""The summary table at the end of a run: results, and where the files are."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any

from rlkit.report.intervals import MEAN_SUFFIXES, NOT_MEASURED
from rlkit.report.model_card import is_value_model
from rlkit.runs.evaluation import with_intervals
from rlkit.tracking import EVAL, METRICS, Run, read_metrics, read_object

FILES = {  # files of a run's directory, and what each contains
    "report.html": "open it: curves, responses with their rewards",
    "metrics.jsonl": "all measurements of each step",
    "samples.jsonl": "the responses on the page",
    "responses.jsonl": "all responses",
    "best": "the model with the best held-out result",
    "adapter": "adapters alone, for peft and vLLM",
}


def closing_table(run: Run, exported: Collection[str] = ()) -> str:
    """The table as text.

    Args:
        run: a run whose metrics.jsonl and eval.json are complete.
        exported: folders in the run's directory that contain an exported model.
    """
    rows = read_metrics(run.out / METRICS) if (run.out / METRICS).exists() else []
    evaluation = read_object(run.out / EVAL)
    took = timedelta(seconds=round(time.monotonic() - run.started))
    steps = f"{len(rows)} step" if len(rows) == 1 else f"{len(rows)} steps"
    lines = [("run", f"{run.name}, {steps}, {took} since its last start")]
    lines += _before_and_after(evaluation)
    lines += _first_and_last(rows)
    files = {**FILES, **{f"{name}_adapter": FILES["adapter"] for name in exported}}
    lines += [(str(run.out / name), text) for name, text in files.items() if (run.out / name).exists()]
    lines += [(str(run.out / name), _use_of(read_object(run.out / name / "config.json"))) for name in exported]
    width = max(len(name) for name, _ in lines)
    return "\n".join(["", "results:", *(f"  {name:<{width}}  {text}" for name, text in lines)])


def _use_of(model: Mapping[str, Any]) -> str:
    """What an exported model is for, from its config.json."""
    if is_value_model(model):
        return "gives one number: rlkit.engines.value_head.load_value_model(DIR)"
    return "for transformers and vLLM: recipes/evaluate.py --model DIR"


def _before_and_after(evaluation: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Held-out results before and after training, with 95 % confidence intervals where known."""
    lines = []
    texts = {when: with_intervals(evaluation, evaluation.get("heldout"), f"_{when}") for when in ("before", "after")}
    for name in evaluation:
        measured, is_after, _ = name.partition("_after")
        if is_after and not measured.endswith(MEAN_SUFFIXES) and measured not in NOT_MEASURED:
            both = [
                f"{shown[f'{measured}_{when}']} {when}"
                for when, shown in texts.items()
                if isinstance(evaluation.get(f"{measured}_{when}"), float)
            ]
            text = ", ".join(both)
            if text:
                lines.append((f"held-out {measured.removeprefix('heldout_').replace('_', ' ')}", text))
    return lines


def _first_and_last(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The mean reward, or else the loss, in the first and in the last step."""
    for name in ("reward/mean", "loss"):
        values = [row[name] for row in rows if isinstance(row.get(name), float)]
        if len(values) > 1:
            return [(name, f"{values[0]:.3g} in the first step, {values[-1]:.3g} in the last")]
    return []
