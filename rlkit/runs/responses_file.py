"""responses.jsonl, the file of an evaluation with all of its responses: one line for each row of a task."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from rlkit.runs.interruption import continue_from_log
from rlkit.runs.options import RunOptions
from rlkit.tracking import METRICS, Run, read_metrics

RESPONSES = "responses.jsonl"


def resume_responses(cfg: RunOptions, run: Run) -> tuple[list[dict[str, Any]], int]:
    """The responses in all batches that were logged before, and the number of these batches; none in a new run.

    The responses in a batch are written before the batch is logged. Those in a batch that was not logged are removed
    from the file, since the resumed run repeats the batch. This ends the set-up of a run.
    """
    log = run.out / METRICS
    start = len(read_metrics(log)) if cfg.resume and log.exists() else 0
    written = read_metrics(run.out / RESPONSES) if start else []
    responses = [response for response in written if response["step"] < start]
    if run.is_main_process:
        (run.out / RESPONSES).write_text("".join(json.dumps(response) + "\n" for response in responses))
    run.is_set_up = True
    continue_from_log(run)
    return responses, start


def append_responses(run: Run, step: int, responses: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Append the responses of all ranks in batch `step` to the file, in the order of their rows.

    Ranks of a model-parallel group have the same rows; each is written once.

    Args:
        responses: those of this rank, as JSON objects with a `row`.

    Returns:
        The responses of all ranks, each with its `step`.
    """
    per_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(per_rank, list(responses))
    by_row = {response["row"]: response for local in per_rank for response in local}
    in_order = [{"step": step, **by_row[row]} for row in sorted(by_row)]
    if run.is_main_process:
        run.append(RESPONSES, in_order)
    return in_order
