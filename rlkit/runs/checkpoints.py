"""Saves a run, resumes it, and writes its final output."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import rlkit
from rlkit.data.samples import Sample
from rlkit.engines.checkpoint import (
    DamagedCheckpoint,
    checkpoints,
    first_problem,
    keep_newest,
    problem_of_rank_0,
    step_of,
)
from rlkit.report import write_report
from rlkit.report.model_card import CARD, write_model_card
from rlkit.runs.closing import closing_table
from rlkit.runs.directory import decided_by_rank_0, release_directory
from rlkit.runs.evaluation import keep_best_of_all
from rlkit.runs.export import export_model, stop_if_not_written
from rlkit.runs.hub import command_line, push_model, pushed_folder
from rlkit.runs.interruption import POLICY, a_signal_has_come, end_after_step, interrupted
from rlkit.runs.options import RunOptions
from rlkit.runs.rollouts import save_rollouts
from rlkit.tracking import Run


def resume(cfg: RunOptions, run: Run, **engines: Any) -> dict[str, Any]:
    """Load the newest checkpoint of each engine if `cfg.resume` is set. This ends the set-up of a run.

    All ranks call this together.

    A damaged checkpoint is renamed to `step_<n>.damaged`, and the one before it is loaded. Checkpoints of later steps,
    which a run has that was killed before it had saved every engine, are removed.

    Args:
        engines: engines by checkpoint folder; the policy's folder is `checkpoints`.

    Returns:
        The state that `save` was given, with `step`, the number of finished steps. {"step": 0} in a new run.

    Raises:
        ValueError: all checkpoints are damaged, or one belongs to another model.

    The run ends with an error message if a rank does not see the checkpoints that rank 0 sees.
    """
    state = _newest_state(cfg, run, engines)
    run.is_set_up = True
    return state


def _newest_state(cfg: RunOptions, run: Run, engines: Mapping[str, Any]) -> dict[str, Any]:
    """Load the newest intact checkpoints; returns the state that they were saved with."""
    end_after_step(run)
    saved = decided_by_rank_0(lambda: checkpoints(run.out / POLICY)) if cfg.resume else []
    if not saved:
        if cfg.resume and run.is_main_process:
            print(f"resume: no checkpoint in {run.out}, starting at step 0", flush=True)
        if cfg.resume:
            _remove_later(run, 0, engines)
        return {"step": 0}
    if unseen := first_problem(next((str(path) for path in saved if not path.is_dir()), "")):
        run.stop(f"resume: expected --out on a file system that all machines share, got one without {unseen}")
    damaged: dict[str, str] = {}
    for name in [path.name for path in reversed(saved)]:
        try:
            states = {folder: engine.load_checkpoint(run.out / folder / name) for folder, engine in engines.items()}
        except DamagedCheckpoint as error:
            damaged[name] = str(error)
            if run.is_main_process:
                run.print(f"resume: {error}")
            continue
        if problem := problem_of_rank_0(lambda: _set_aside(run.out, damaged, engines)):
            run.stop(f"resume: expected to rename the damaged checkpoints {', '.join(damaged)}, got: {problem}")
        _remove_later(run, states[POLICY]["step"], engines)
        if run.is_main_process:
            run.print(f"resume: continuing {run.out} at step {states[POLICY]['step']}")
        run.first_mismatch = states[POLICY].get("first_mismatch")
        return states[POLICY]
    raise ValueError(
        f"resume: expected an intact checkpoint in {run.out}, got {len(damaged)} damaged ones: "
        f"{'; '.join(damaged.values())}"
    )


def _set_aside(out: Path, names: Iterable[str], folders: Iterable[str]) -> None:
    """Rename damaged checkpoints, so that they are not loaded again."""
    for path in [out / folder / name for name in names for folder in folders]:
        if path.exists():
            aside = path.with_name(f"{path.name}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def _remove_later(run: Run, step: int, folders: Iterable[str]) -> None:
    """Remove checkpoints of steps after this one: `keep_newest` would keep them and remove those of repeated steps."""

    def remove() -> None:
        for path in [path for folder in folders for path in checkpoints(run.out / folder)]:
            if step_of(path) > step:
                shutil.rmtree(path)

    if problem := problem_of_rank_0(remove):
        run.stop(f"resume: expected to remove checkpoints after step {step}, got: {problem}")


def save(cfg: Any, run: Run, step: int, state: Mapping[str, Any] | None = None, **engines: Any) -> None:
    """Save each engine after every `cfg.save_every` steps and after the last.

    The newest `cfg.keep_checkpoints` are kept.

    If training ends earlier, `finish` saves its last step.

    With `cfg.save_rollouts`, the rollouts of the step are written first.

    The run ends with an error message if a checkpoint cannot be written, and after `cfg.max_skipped_steps` steps in a
    row without finite gradients. The previous checkpoint stays. After Ctrl-C or SIGTERM the step is saved, and the run
    ends.

    Args:
        step: the finished step.
        state: further state for `resume` to return.
        engines: as in `resume`.
    """
    if getattr(cfg, "save_rollouts", False):
        save_rollouts(cfg, run, step, engines)
    if 0 < cfg.max_skipped_steps <= run.skipped_in_a_row:
        run.stop(
            f"gradients: expected finite ones, got nan or inf in {run.skipped_in_a_row} steps in a row, which were "
            "skipped; lower --lr, or allow more with --max_skipped_steps"
        )
    run.save_last_step = partial(_save_engines, cfg, run, {"step": step + 1, **(state or {})}, engines)
    ends = a_signal_has_come()
    if (step + 1) % cfg.save_every and step + 1 != cfg.steps and not ends:
        return
    run.save_last_step()
    if ends:
        run.close()
        raise interrupted()


def _save_engines(cfg: Any, run: Run, extra: dict[str, Any], engines: Mapping[str, Any]) -> None:
    run.phase("checkpoint")
    if run.first_mismatch is not None:
        extra["first_mismatch"] = run.first_mismatch
    for folder, engine in sorted(engines.items(), key=lambda item: item[0] == POLICY):
        try:
            engine.save_checkpoint(run.out / folder / f"step_{extra['step']}", extra)
        except OSError as error:
            run.stop(str(error))
    for folder in engines:  # only now: until the last is saved, a resume needs the earlier ones of all
        try:
            keep_newest(run.out / folder, cfg.keep_checkpoints)
        except OSError as error:
            run.stop(str(error))
    run.save_last_step = None


def finish(cfg: Any, run: Run, samples: Sequence[Sample], **engines: Any) -> None:
    """Export the trained models, close the logs, write the page and print where everything is.

    If training ended early, its last step is saved first.

    Each exported language model gets a model card, and `cfg.push_to_hub` uploads one of them.

    Args:
        samples: responses for the page. At most 40 are shown, those with the lowest rewards.
        engines: engines by export folder. Models are exported in Hugging Face format, with adapters merged.
            Those of a language model are exported alone, too: of `model` to `adapter`, of another to `FOLDER_adapter`.

    The run ends with an error message if a model cannot be written. The checkpoints stay.
    """
    if run.save_last_step is not None:
        run.save_last_step()
    for folder, engine in engines.items():
        export_model(cfg, run, folder, engine)
        if getattr(engine, "has_adapters", False) and "logprobs" in engine.known_outputs:
            with stop_if_not_written(run):
                engine.export_adapter(run.out / ("adapter" if folder == "model" else f"{folder}_adapter"))
    if engines:
        keep_best_of_all(cfg, run, engines["model"])
        run.log_evaluation(steps=run.step + 1)
    run.close()
    release_directory(run.out)
    if run.is_main_process:
        repository = getattr(cfg, "push_to_hub", "") if engines else ""
        write_report_and_cards(cfg, run, samples, repository)
        run.print(closing_table(run, engines))
        if repository:
            push_model(cfg, run)


def write_report_and_cards(cfg: Any, run: Run, samples: Sequence[Sample], repository: str) -> None:
    """Write report.html, and a model card into each exported language model. A failure is printed.

    Args:
        samples: as for `finish`.
        repository: where the model is uploaded afterwards; empty if it is not.
    """
    path = run.out / "report.html"
    try:
        write_report(run.out, sorted(samples, key=_reward)[:40], title=run.name)
        for folder in ("model", "best"):
            if (run.out / folder).exists():
                path = run.out / folder / CARD
                pushed = folder == pushed_folder(cfg, run)
                name = repository if pushed else ""
                write_model_card(run.out, folder, command_line(), rlkit.__version__, repository=name)
    except Exception as error:  # a page that cannot be written must not fail the run
        run.print(f"{path}: could not be written: {type(error).__name__}: {error}")


def _reward(sample: Sample) -> float:
    """A sort key: a missing reward or nan is the lowest."""
    is_number = isinstance(sample.reward, int | float) and not math.isnan(sample.reward)
    return sample.reward if is_number else -math.inf
