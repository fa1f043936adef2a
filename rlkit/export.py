"""Write a checkpoint of a run as a Hugging Face model, e.g. of a run that was killed; it needs no GPU.

python -m rlkit.export runs/grpo_vlm-digits-seed0 [--step 150] [--to DIR]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from rlkit.engines import make_engine
from rlkit.engines.checkpoint import TensorReader, checkpoints
from rlkit.engines.distributed import init_distributed
from rlkit.engines.value_head import head_name, load_value_model
from rlkit.runs.directory import BUILT_MODEL
from rlkit.runs.export import export_dtype
from rlkit.runs.models import builds_model, processor_of, trained_part
from rlkit.runs.options import TrainingOptions
from rlkit.runs.start import one_sentence_errors
from rlkit.tracking import CONFIG
from rlkit.tracking.files import read_object
from rlkit.vlm import load_model

POLICY, CRITIC = "checkpoints", "critic_checkpoints"  # folders of a run


def main(arguments: Sequence[str] | None = None) -> None:
    """Export a checkpoint and print where the model is."""
    parser = argparse.ArgumentParser(
        "python -m rlkit.export", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("run", type=Path, help="directory of a run, e.g. runs/grpo_vlm-digits-seed0")
    parser.add_argument("--step", type=int, help="finished steps of the checkpoint; default: the newest")
    parser.add_argument("--to", type=Path, help="directory of the model, a new one; default: RUN/model_step_<n>")
    parser.add_argument(
        "--critic", action="store_true", help="the critic, of a recipe that trains one, instead of the policy"
    )
    options = parser.parse_args(arguments)
    with one_sentence_errors("export"):
        path = export_checkpoint(options.run, options.step, options.to, critic=options.critic)
    print(f"export: {path}")


def export_checkpoint(run: Path, step: int | None = None, to: Path | None = None, *, critic: bool = False) -> Path:
    """Write a checkpoint as a Hugging Face model, with adapters merged, and return its directory.

    The whole model is read into host memory, in the dtype of the trained weights.

    Args:
        run: directory of a run of any recipe and engine, on any number of ranks.
        step: finished steps of the checkpoint; by default of the newest.
        to: a new directory; by default `model_step_<n>` in the run, or `critic_step_<n>`.
        critic: export the critic of ppo.py, pf_ppo.py or vapo.py, instead of the policy.

    Raises:
        ValueError: there is no such checkpoint, it is damaged, or `to` exists.
    """
    cfg = options_of_run(run)
    checkpoint = chosen_checkpoint(run / (CRITIC if critic else POLICY), step)
    to = to or run / f"{'critic' if critic else 'model'}_{checkpoint.name}"
    if to.exists():
        raise ValueError(f"to: expected a new directory, got {to}, which exists")
    path = (cfg.critic_model if critic else "") or (str(run / BUILT_MODEL) if builds_model(cfg) else cfg.model)
    init_distributed("cpu")
    engine = engine_of_run(cfg, path, checkpoint)
    engine.load_checkpoint(checkpoint)
    engine.export_hf(to, export_dtype(cfg, engine))
    return to


def options_of_run(run: Path) -> Any:
    """The options that a run was started with; those that its version did not have get their defaults."""
    if not (run / CONFIG).exists():
        raise ValueError(f"run: expected the directory of a run, got {run}, which has no {CONFIG}")
    if not (saved := read_object(run / CONFIG)):
        raise ValueError(f"run: expected options as JSON in {run / CONFIG}, got a damaged file")
    cfg: Any = TrainingOptions(
        **{field.name: saved[field.name] for field in fields(TrainingOptions) if field.name in saved}
    )
    cfg.critic_model = saved.get("critic_model", "")
    return cfg


def chosen_checkpoint(folder: Path, step: int | None) -> Path:
    """The checkpoint of a run after `step` steps, or its newest."""
    found = checkpoints(folder)
    if not found:
        raise ValueError(f"run: expected a checkpoint in {folder}, got none")
    if step is None:
        return found[-1]
    path = folder / f"step_{step}"
    if path not in found:
        steps = ", ".join(one.name.removeprefix("step_") for one in found)
        raise ValueError(f"step: expected one of {steps}, whose checkpoints are kept, got {step}")
    return path


def engine_of_run(cfg: Any, path: str, checkpoint: Path) -> Any:
    """An engine without an optimizer, on this process alone, with the parameters that the run trains."""
    options = {"dtype": getattr(torch, cfg.dtype), "trust_remote_code": cfg.trust_remote_code}
    has_head = holds_value_head(checkpoint, load_value_model(path, on_meta=True, **options))
    load, kind = (load_value_model, "value_model") if has_head else (load_model, "language_model")
    model = trained_part(cfg, load(path, **options), head=has_head)
    return make_engine("fsdp2", kind, model=model, processor=processor_of(cfg, path), device="cpu")


def holds_value_head(checkpoint: Path, model: Any) -> bool:
    """Whether the output layer in a checkpoint is a single scalar, as in critics and reward models.

    Args:
        model: the same with a value head, whose parameters are not read.
    """
    shapes = TensorReader(checkpoint).shapes
    return any(name.endswith(head_name(model)) and shape[0] == 1 for name, shape in shapes.items())


if __name__ == "__main__":
    main()
