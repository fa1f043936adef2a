"""HTML pages of runs, with curves, sampled responses with images and rewards, and options.

`write_page` writes a page of one or several runs, also while they are running. `write_report` writes the final page of
a run. `python -m rlkit.report A B C` writes a page that compares runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlkit.report.curves import draw_learning_curve
from rlkit.report.page import write_page
from rlkit.report.responses import append_records, prompt_record
from rlkit.tracking import EVAL, METRICS, read_metrics, read_object

__all__ = ["append_records", "prompt_record", "write_page", "write_report"]


def write_report(out: str | Path, samples: Sequence[Any] = (), *, title: str = "") -> Path:
    """Write `learning_curve.png` and `report.html` of a finished run, from its files.

    Samples, images and log lines that cannot be shown are left out.

    Args:
        out: the run's directory.
        samples: responses to held-out prompts, as rlkit.data.Sample with text, row, reward, images and the `group_id`
            of their prompt. They are appended to samples.jsonl, where they take the place of responses to these prompts
            at the same step.
        title: title of the page; by default the directory's name.

    Returns:
        The page's path.
    """
    out = Path(out)
    rows = read_metrics(out / METRICS)
    finished = rows[-1]["step"] + 1 if rows else 0
    of_prompts: dict[int, list[Any]] = {}
    for sample in samples:
        of_prompts.setdefault(sample.group_id, []).append(sample)
    append_records(out, [prompt_record(out, responses, "held-out", finished) for responses in of_prompts.values()])
    draw_learning_curve(out / "learning_curve.png", rows, read_object(out / EVAL))
    return write_page(out / "report.html", [out], title=title)
