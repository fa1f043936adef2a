"""Pages of runs: curves, sampled answers with their images and rewards, options.

`write_report` writes the page of one run, during the run and at its end. `python -m rlkit.report A B C` writes a page
with several runs beside each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlkit.report.answers import append_records, prompt_record
from rlkit.report.curves import draw_learning_curve
from rlkit.report.page import write_page
from rlkit.tracking import EVAL, METRICS, read_metrics, read_object

__all__ = ["append_records", "prompt_record", "write_page", "write_report"]


def write_report(out: str | Path, samples: Sequence[Any] = (), *, title: str = "") -> Path:
    """Write `learning_curve.png` and `report.html` of a run that has ended, from its files.

    No sample and no line of a log can prevent it: what cannot be drawn is left out.

    Args:
        out: the run's directory.
        samples: rlkit.data.Sample with text, row, reward and images: answers to held-out prompts, which are added to
            samples.jsonl.
        title: of the page; the directory's name by default.

    Returns:
        The page's path.
    """
    out = Path(out)
    rows = read_metrics(out / METRICS)
    finished = rows[-1]["step"] + 1 if rows else 0
    append_records(out, [{**prompt_record(out, [s], "held-out", finished), "prompt": i} for i, s in enumerate(samples)])
    draw_learning_curve(out / "learning_curve.png", rows, read_object(out / EVAL))
    return write_page(out / "report.html", [out], title=title)
