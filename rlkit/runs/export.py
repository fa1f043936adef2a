"""Exports a trained model in Hugging Face format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rlkit.engines.export import ExportNotWritten
from rlkit.tracking import Run
from rlkit.vlm.loading import load_config


def export_model(cfg: Any, run: Run, folder: str, engine: Any) -> None:
    """Export a model to a folder of the run, in dtype `cfg.export_dtype`. All ranks call this together."""
    with stop_if_not_written(run):
        engine.export_hf(run.out / folder, export_dtype(cfg, engine))


@contextmanager
def stop_if_not_written(run: Run) -> Iterator[None]:
    """End the run with an error message if a model cannot be written in the `with` block. The checkpoints stay."""
    try:
        yield
    except ExportNotWritten as error:
        run.stop(f"{error}; all steps are saved: make room, and add --out {run.out} --resume to export again")


def export_dtype(cfg: Any, engine: Any) -> torch.dtype:
    """The dtype of exported weights: `cfg.export_dtype`, or for "auto" that of the original model files."""
    if cfg.export_dtype != "auto":
        return getattr(torch, cfg.export_dtype)
    config = load_config(engine.config.name_or_path, trust_remote_code=cfg.trust_remote_code)
    return config.dtype or getattr(torch, cfg.dtype)
