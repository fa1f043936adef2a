"""Sends kept responses to experiment trackers that can show tables or images.

wandb and trackio show each response with its images in one table. MLflow gets a table and, beside it, the images of
each prompt; TensorBoard the same, the table as text. Other trackers get the table, if accelerate has `log_table` for
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLUMNS = ["step", "question", "expected", "response", "reward"]
STEPS_PER_TABLE = 100  # of an MLflow table, which is read and written as a whole

Records = Sequence[Mapping[str, Any]]


def log_responses(tracker: Any, out: Path, step: int, records: Records) -> None:
    """Send responses of a step to a tracker.

    Args:
        tracker: a tracker of accelerate.
        out: the run's directory, where the images are.
        records: prompts with their responses, as in samples.jsonl; see rlkit.report.responses.
    """
    senders = {"wandb": _to_wandb, "trackio": _to_trackio, "mlflow": _to_mlflow, "tensorboard": _to_tensorboard}
    if tracker.name in senders:
        senders[tracker.name](tracker, out, step, records)
    elif hasattr(tracker, "log_table"):
        tracker.log_table("responses", columns=COLUMNS, data=_rows(step, records), step=step)


def _rows(step: int, records: Records) -> list[list[Any]]:
    """A row for each response, with a cell for each of COLUMNS."""
    return [row for record in records for row in _rows_of_prompt(step, record)]


def _rows_of_prompt(step: int, record: Mapping[str, Any]) -> list[list[Any]]:
    place = [step, record["question"], record["expected"]]
    return [[*place, response["text"], response["reward"]] for response in record["responses"]]


def _to_wandb(tracker: Any, out: Path, step: int, records: Records) -> None:
    import wandb

    most = max(len(record["images"]) for record in records)
    rows = []
    for record in records:
        images = [wandb.Image(str(out / name)) for name in record["images"]]
        images += [None] * (most - len(images))
        rows += [[*row, *images] for row in _rows_of_prompt(step, record)]
    columns = [*COLUMNS, *(f"image {i + 1}" for i in range(most))]
    tracker.log_table("responses", columns=columns, data=rows, step=step)


def _to_trackio(tracker: Any, out: Path, step: int, records: Records) -> None:
    import trackio

    rows = []
    for record in records:
        images = [trackio.Image(out / name) for name in record["images"]]
        rows += [[*row, *([images] if images else [])] for row in _rows_of_prompt(step, record)]
    tracker.log({"responses": trackio.Table(columns=[*COLUMNS, "images"], data=rows)}, step=step)


def _to_mlflow(tracker: Any, out: Path, step: int, records: Records) -> None:
    import mlflow
    from PIL import Image

    run = tracker.tracker.info.run_id
    # MLflow reads a table back to append to it, and then shows a column of digits as numbers
    columns = dict(zip(COLUMNS, map(list, zip(*_rows(step, records), strict=True)), strict=True))
    first = step - step % STEPS_PER_TABLE
    mlflow.log_table(columns, f"responses/steps_{first}_to_{first + STEPS_PER_TABLE - 1}.json", run_id=run)
    for key, name in _named_images(records):
        with Image.open(out / name) as image:
            mlflow.log_image(image.convert("RGB"), key=key, step=step, synchronous=True)


def _to_tensorboard(tracker: Any, out: Path, step: int, records: Records) -> None:
    import numpy as np
    from PIL import Image

    lines = [COLUMNS, ["---"] * len(COLUMNS), *_rows(step, records)]
    table = "\n".join(f"| {' | '.join(_markdown_cell(cell) for cell in line)} |" for line in lines)
    tracker.log({"responses": table}, step=step)
    for key, name in _named_images(records):
        with Image.open(out / name) as image:
            tracker.log_images({key: np.asarray(image.convert("RGB"))[None]}, step=step, dataformats="NHWC")


def _named_images(records: Records) -> list[tuple[str, str]]:
    """(name in the tracker, file) of each image: "prompt 1" or, of several images, "prompt 1 image 2"."""
    return [
        (f"prompt {i + 1}" + (f" image {j + 1}" if len(record["images"]) > 1 else ""), name)
        for i, record in enumerate(records)
        for j, name in enumerate(record["images"])
    ]


def _markdown_cell(value: Any) -> str:
    """Text as a cell of a Markdown table: without line breaks, bars and HTML."""
    text = " ".join(str(value).split())
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
