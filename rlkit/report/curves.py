"""Selects and groups the curves of a page, and draws the learning curve as a PNG."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LARGEST = 1e100  # larger values overflow the axes
MOST_POINTS = 4000  # of a curve, and of a rare metric among them
RARE = 0.1  # a metric that fewer rows have, such as held-out results

# (title, pattern of metric names). A metric belongs to the first group that matches. The alternatives of a pattern give
# the order of the curves in the group.
GROUPS = (
    ("Reward", r"reward/mean|preference/accuracy|heldout/.*|reward/.*|reward_part/.*|preference/.*|groups/.*|unscored"),
    ("Optimisation", r"loss|kl|entropy|grad_norm|lr|ratio/.*|.*loss.*|critic.*|value/.*|skipped_steps|staleness"),
    ("Sampler against trainer", r"mismatch/.*"),
    ("Responses", r"response_length/.*|tokens|skipped_rows"),
    ("Time", r"time/.*|flops"),
    ("Memory", r"memory/.*"),
    ("Other", r".*"),
)

# explanations of names that do not explain themselves
LABELS = {
    "preference/accuracy": "pairs told apart",
    "kl": "KL to the reference",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "ratio/clip_fraction": "share of clipped tokens",
    "mismatch/abs_dlogp": "mean |dlogp| of sampler and trainer",
    "response_length/truncated": "share of responses truncated at the limit",
    "reward/equal": "share of prompts whose responses have equal rewards",
    "tokens": "trained tokens per step",
    "time/tokens_per_second": "tokens per second",
    "time/mfu": "MFU in training",
}


def is_number(value: Any) -> bool:
    """Whether a value can be drawn: a finite number that does not overflow the axes."""
    return isinstance(value, int | float) and abs(value) < LARGEST


def numbers(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The rows of metrics.jsonl as columns: `step`, and each metric, with None where a row lacks it.

    Of many rows, every second or third, ... is drawn, and all those with a rare metric, or with the first, last, lowest
    or highest value of any metric.
    """
    values: dict[str, dict[int, float | None]] = {}  # of each metric, by row; None for nan
    for i, row in enumerate(rows):
        for name, x in row.items():
            if name != "step":
                values.setdefault(name, {})[i] = x if is_number(x) else None
    values = {name: known for name, known in values.items() if any(x is not None for x in known.values())}
    drawn = set(_thinned(range(len(rows))))
    for known in values.values():
        drawn |= _ends_and_extremes({i: x for i, x in known.items() if x is not None})
        drawn |= set(_thinned(list(known))) if len(known) < RARE * len(rows) else set()
    order = sorted(drawn)
    columns = {name: [known.get(i) for i in order] for name, known in values.items()}
    return {"step": [rows[i]["step"] for i in order], **columns}


def _thinned(indices: Sequence[int]) -> Sequence[int]:
    return indices[:: -(-len(indices) // MOST_POINTS) or 1]


def _ends_and_extremes(values: Mapping[int, float]) -> set[int]:
    indices = list(values)
    return {indices[0], indices[-1], min(indices, key=values.__getitem__), max(indices, key=values.__getitem__)}


def grouped(names: Sequence[str]) -> list[tuple[str, list[tuple[str, str]]]]:
    """(title, [(metric, label), ...]) of each group that has a metric; a metric is in one group only."""
    left, found = sorted(names), []
    for title, pattern in GROUPS:
        alternatives = [re.compile(part) for part in pattern.split("|")]
        members = [name for one in alternatives for name in left if one.fullmatch(name)]
        if members := list(dict.fromkeys(members)):
            found.append((title, [(name, label(name)) for name in members]))
            left = [name for name in left if name not in members]
    return found


def label(name: str) -> str:
    """The heading of a metric's curve: its name and, if there is one, its explanation."""
    return f"{name}: {LABELS[name]}" if name in LABELS else name


def draw_learning_curve(path: Path, rows: Sequence[Mapping[str, Any]], evaluation: Mapping[str, Any]) -> None:
    """Write a PNG of the mean reward, or else of the run's first curve, with the held-out accuracies."""
    from matplotlib.figure import Figure

    names = [name for name, column in numbers(rows).items() if name != "step"]
    (name, title), *_ = [curve for _, curves in grouped(names) for curve in curves] or [("reward/mean", "reward/mean")]
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title.encode("utf-8", "backslashreplace").decode(), fontsize=10, parse_math=False)
    axes.set_xlabel("step", fontsize=8)
    axes.grid(alpha=0.3)
    if points := [(row["step"], row[name]) for row in rows if is_number(row.get(name))]:
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, linewidth=0.8, alpha=0.45)
        axes.plot(steps, smooth(values), linewidth=1.6)
    for when, style in (("before", ":"), ("after", "--")):
        accuracy = evaluation.get(f"accuracy_{when}")
        if accuracy is not None and is_number(accuracy):
            text = f"held out, {when}: {accuracy:.3f}"
            axes.axhline(accuracy, linestyle=style, color="black", linewidth=1, label=text)
            axes.legend(fontsize=8)
    figure.savefig(path, format="png", dpi=110)


def smooth(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """Exponential moving average with bias correction, as in Adam."""
    smoothed, total, mass = [], 0.0, 0.0
    for value in values:
        total, mass = weight * total + (1 - weight) * value, weight * mass + (1 - weight)
        smoothed.append(total / mass)
    return smoothed
