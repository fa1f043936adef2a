"""answers.jsonl, the file of an evaluation with all of its answers: one line for each row of a task."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from rlkit.runs.interruption import continue_from_log
from rlkit.runs.options import RunOptions
from rlkit.tracking import METRICS, Run, read_metrics

ANSWERS = "answers.jsonl"


def resume_answers(cfg: RunOptions, run: Run) -> tuple[list[dict[str, Any]], int]:
    """The answers in all batches that were logged before, and the number of these batches; none in a new run.

    The answers in a batch are written before the batch is logged. Those in a batch that was not logged are removed from
    the file, since the resumed run repeats the batch. This ends the set-up of a run.
    """
    log = run.out / METRICS
    start = len(read_metrics(log)) if cfg.resume and log.exists() else 0
    answers = [answer for answer in read_metrics(run.out / ANSWERS) if answer["step"] < start] if start else []
    if run.is_main_process:
        (run.out / ANSWERS).write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    run.is_set_up = True
    continue_from_log(run)
    return answers, start


def append_answers(run: Run, step: int, answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Append the answers of all ranks in batch `step` to the file, in the order of their rows.

    Ranks of a model-parallel group have the same rows; each is written once.

    Args:
        answers: those of this rank, as JSON objects with a `row`.

    Returns:
        The answers of all ranks, each with its `step`.
    """
    per_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(per_rank, list(answers))
    by_row = {answer["row"]: answer for local in per_rank for answer in local}
    in_order = [{"step": step, **by_row[row]} for row in sorted(by_row)]
    if run.is_main_process:
        run.append(ANSWERS, in_order)
    return in_order
