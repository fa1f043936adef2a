"""Evaluation on held-out rows before, during and after training, with the best result and early stopping."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlkit.report.intervals import MEAN_SUFFIXES, NOT_MEASURED, intervals
from rlkit.runs.directory import decided_by_rank_0
from rlkit.runs.export import export_model
from rlkit.runs.rollouts import is_replay
from rlkit.tracking import EVAL, Run, read_object

EXPORTED_STEP = "step.json"  # in `best`: the number of steps after which its model was exported
NO_RESULT = (-math.inf, -math.inf)


def pass_at_k(n: int, right: int, k: int) -> float:
    """1 - C(n - right, k) / C(n, k): the probability that k of the n samples include a correct one.

    The unbiased estimator of the Codex paper (https://arxiv.org/abs/2107.03374, eq. 1).
    """
    if not 1 <= k <= n or not 0 <= right <= n:
        raise ValueError(f"pass_at_k: expected 1 <= k <= n and 0 <= right <= n, got n={n}, right={right}, k={k}")
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def mean_and_error(
    values: Sequence[float], global_sum: Callable[[Tensor], Tensor] | None = None
) -> tuple[float, float]:
    """The mean of some values and its standard error, sqrt(sample variance / count).

    Without values both are nan. A single value has no standard error, so that is nan too.

    Args:
        values: one value for each row of this rank.
        global_sum: an engine's `global_sum`, to include the values of all ranks.
    """
    x = torch.tensor(values, dtype=torch.float64)
    sums = torch.stack([torch.tensor(float(len(x)), dtype=torch.float64), x.sum(), (x * x).sum()])
    count, total, squares = (global_sum(sums) if global_sum else sums).tolist()
    if not count:
        return math.nan, math.nan
    if count == 1:
        return total, math.nan
    variance = max(0.0, squares - total**2 / count) / (count - 1)
    return total / count, math.sqrt(variance / count)


def means_of_rows(
    values: Mapping[str, Sequence[float]], global_sum: Callable[[Tensor], Tensor] | None = None
) -> dict[str, float]:
    """For each NAME its mean over rows, the standard error NAME_error, and the number of these rows, NAME_rows.

    Args:
        values: by name, a value for each row of this rank that has one.
        global_sum: as in `mean_and_error`.
    """
    results: dict[str, float] = {}
    for name, of_rows in values.items():
        results[name], results[f"{name}_error"] = mean_and_error(of_rows, global_sum)
        count = torch.tensor(float(len(of_rows)))
        results[f"{name}_rows"] = (global_sum(count) if global_sum else count).item()
    return results


def with_intervals(results: Mapping[str, Any], rows: Any, when: str = "") -> dict[str, str]:
    """Results of an evaluation as text, such as "0.850 (95 %: 0.809 to 0.884)" where NAME has a NAME_error.

    Args:
        results, rows, when: as in `rlkit.report.intervals.intervals`, which gives the intervals.
    """
    bounds = intervals(results, rows, when)
    texts = {name: f" (95 %: {low:.3f} to {high:.3f})" for name, (low, high) in bounds.items()}
    return {
        name: f"{x:.3f}{texts.get(name, '')}"
        for name, x in results.items()
        if isinstance(x, int | float) and name.endswith(when) and not name.removesuffix(when).endswith(MEAN_SUFFIXES)
    }


def record_evaluation(
    run: Run, engine: Any, when: str, results: Mapping[str, float], *, rows: int, skipped: int, name: str = ""
) -> None:
    """Write the results of an evaluation to eval.json, and print them.

    The list `evaluations` in the file has all results, with the number of finished steps; those of several sets of
    held-out rows at one step are one entry. Results before and after training are also stored under their own names,
    such as `accuracy_after`.

    Args:
        when: "before", "during" or "after" training.
        results: over all ranks, by name; see `means_of_rows` for NAME_error and NAME_rows. `unscored` is the number of
            greedy responses without a reward, and `unanswered` that of rows without a response.
        rows, skipped: number of held-out rows of this rank that were used, and that could not be used.
        name: of a second set of held-out rows; it begins the names in the file, as in `easy/accuracy`.
    """
    counts = engine.global_sum(torch.tensor([rows, skipped], dtype=torch.float64)).tolist()
    rows, skipped = (int(x) for x in counts)
    results = {key: x for key, x in results.items() if rows or not math.isnan(x)}  # of no row, none is a result
    prefix = f"{name}/" if name else ""
    stored = {f"{prefix}{key}": x for key, x in results.items() if not name or x or key not in NOT_MEASURED}
    step = 0 if when == "before" else run.step + 1
    earlier = [one for one in _evaluations(run) if one["step"] < step]
    same_step = next((one for one in _evaluations(run) if one["step"] == step), {})  # of other rows
    evaluations = [*earlier, {"step": step, **same_step, **stored}]
    named = {} if when == "during" else {f"{key}_{when}": x for key, x in stored.items()}
    used = {f"{prefix}heldout": rows, f"{prefix}heldout_skipped": skipped}
    run.log_evaluation(**named, **used, evaluations=evaluations)
    if run.is_main_process:
        texts = with_intervals(results, rows).items()
        shown = [f"{key.replace('_', ' ')} {text}" for key, text in texts if key not in NOT_MEASURED]
        unanswered = f"; rows without a response: {count:.0f}" if (count := results.get("unanswered", 0)) else ""
        unscored = f"; responses without a reward: {count:.0f}" if (count := results.get("unscored", 0)) else ""
        after = f"after {step} steps" if when == "during" else when
        nothing = "no response was scored" if rows else "there was nothing to evaluate"
        of = f" {name}" if name else ""
        run.print(f"held-out{of} {after}: {', '.join(shown) or nothing} ({rows} rows{unanswered}{unscored})")


def evaluate_at_start(cfg: Any, run: Run, start: int, evaluate: Callable[[str], Any], engine: Any) -> None:
    """Evaluate before training; in a resumed run, repeat what an interruption lost after the step it resumes at.

    That is an evaluation that was due, or the export of the best model. What the interrupted run logged after that step
    is removed, as it is logged again. If `cfg.patience` ends training at that step, `run.steps` yields none. All ranks
    call this together.

    Args:
        start: number of finished steps.
        evaluate, engine: as in `evaluate_when_due`.
    """
    if start == 0:
        run.drop_metrics_from(-1)  # also the responses from before training, which are logged again
        evaluate("before")
        _check_results(cfg, run)
        return
    run.drop_metrics_from(start)
    run.step = start - 1
    if run.is_main_process:
        _drop_evaluations_after(run, start)
    if _is_due(cfg, start):
        steps, exported = decided_by_rank_0(lambda: ([one["step"] for one in _evaluations(run)], _exported_step(run)))
        if start not in steps:
            evaluate("during")
        if start not in steps or exported != start:
            _keep_if_best(cfg, run, engine)
        run.ended = out_of_patience(cfg, run)


def _check_results(cfg: Any, run: Run) -> None:
    """End a run that is to compare evaluations if the first one has no result."""
    names = [name for name in ("patience", "keep_best", "evaluate_every") if getattr(cfg, name, 0)]
    if not names or is_replay() or decided_by_rank_0(lambda: best_step(_evaluations(run))[0]) >= 0:
        return
    problem = (
        f"--{names[0]}: expected a result on the held-out rows, got none; name rows with --heldout, or see why "
        "none was scored"
    )
    if names != ["evaluate_every"]:
        run.stop(problem)
    if run.is_main_process:
        run.print(problem)


def _drop_evaluations_after(run: Run, step: int) -> None:
    """Remove the evaluations after more steps than these from eval.json: they are of a model that was lost."""
    evaluations = _evaluations(run)
    kept = [earlier for earlier in evaluations if earlier["step"] <= step]
    if len(kept) < len(evaluations):
        run.write_evaluation(evaluations=kept)


def evaluate_when_due(cfg: Any, run: Run, evaluate: Callable[[str], Any], engine: Any) -> None:
    """Evaluate after every `cfg.evaluate_every` steps, and keep the best model with `cfg.keep_best`.

    All ranks call this together after a step was logged. It does nothing after the last step, where the recipe itself
    evaluates.

    Args:
        evaluate: called with "during"; it evaluates and calls `record_evaluation`.
        engine: its model is exported to `best`, in Hugging Face format, if the result is the best so far.
    """
    if _is_due(cfg, run.step + 1):
        evaluate("during")
        _keep_if_best(cfg, run, engine)


def out_of_patience(cfg: Any, run: Run) -> bool:
    """Whether training is to end after an evaluation: none of the last `cfg.patience` was better than the best before.

    All ranks call this together after `evaluate_when_due`. A line says so. Evaluations during `cfg.critic_warmup`, of a
    policy that is not trained yet, do not count.
    """
    if not _is_due(cfg, run.step + 1):
        return False
    warmup = getattr(cfg, "critic_warmup", 0)
    best, since = decided_by_rank_0(
        lambda: best_step([one for one in _evaluations(run) if not 0 < one["step"] <= warmup])
    )
    stops = 0 < cfg.patience <= since
    if stops and run.is_main_process:
        run.print(f"no evaluation since step {best} was better: training ends after {run.step + 1} steps (--patience)")
    return stops


def _is_due(cfg: Any, finished: int) -> bool:
    return bool(cfg.evaluate_every) and not finished % cfg.evaluate_every and finished < cfg.steps and not is_replay()


def best_step(evaluations: Sequence[Mapping[str, float]]) -> tuple[int, int]:
    """The number of finished steps at the best evaluation, and the number of evaluations since then.

    The best evaluation has the highest accuracy and, of those with this accuracy or without any, the lowest held-out
    loss. Of equal results, the first counts. Without any result: (-1, 0).
    """
    scores = [_score(evaluation) for evaluation in evaluations]
    if max(scores, default=NO_RESULT) == NO_RESULT:
        return -1, 0
    best = scores.index(max(scores))
    return int(evaluations[best]["step"]), len(scores) - best - 1


def _score(evaluation: Mapping[str, float]) -> tuple[float, float]:
    """(accuracy, -held-out loss), each -inf if it is missing or nan."""
    results = evaluation.get("accuracy", -math.inf), -evaluation.get("heldout_loss", math.inf)
    accuracy, negative_loss = (-math.inf if math.isnan(x) else x for x in results)
    return accuracy, negative_loss


def keep_best_of_all(cfg: Any, run: Run, engine: Any) -> None:
    """Export the final model to `best` if its evaluation is the best one, and write `best_step` to eval.json.

    If `best` has the model of another step, because an interruption lost the best one, it is renamed. If it has none,
    because the model before training is the best or `cfg.keep_best` was not given at the best step, a line says so.
    """
    if not getattr(cfg, "keep_best", False) or is_replay():
        return
    best, folder = _keep_if_best(cfg, run, engine), run.out / "best"
    if run.is_main_process and folder.exists() and _exported_step(run) != best:
        aside = run.out / "best.outdated"
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        run.print(f"the best model, that of step {best}, was lost by an interruption; {aside} has another one")
    elif run.is_main_process and best > 0 and not folder.exists():
        run.print(f"the best model, that of step {best}, was not kept: --keep_best was not given then")
    if run.is_main_process and best == 0:
        run.print("no evaluation was better than the one before training, so best/ has no model (--keep_best)")
    run.log_evaluation(best_step=best)


def _keep_if_best(cfg: Any, run: Run, engine: Any) -> int:
    """With `cfg.keep_best`, export the model to `best` if its evaluation is the best one. Returns the best step."""
    best, finished = decided_by_rank_0(lambda: best_step(_evaluations(run))[0]), run.step + 1
    if cfg.keep_best and best == finished:
        run.phase("checkpoint")
        export_model(cfg, run, "best", engine)
        if run.is_main_process:
            (run.out / "best" / EXPORTED_STEP).write_text(json.dumps({"step": finished}))
    return best


def _exported_step(run: Run) -> int | None:
    """The step of the model in `best`; None if there is no model, or its step is unknown."""
    return read_object(run.out / "best" / EXPORTED_STEP).get("step")


def _evaluations(run: Run) -> list[dict[str, Any]]:
    evaluations = read_object(run.out / EVAL).get("evaluations")
    if not isinstance(evaluations, list):
        return []
    return [evaluation for evaluation in evaluations if isinstance(evaluation, dict) and "step" in evaluation]
