"""Evaluation during training: what is written, which model is the best, and when training ends."""

import itertools
import json
import math
import shutil
import statistics
from types import SimpleNamespace

import pytest
import torch

from rlkit.data import Batch
from rlkit.engines.distributed import init_distributed
from rlkit.losses import token_mean
from rlkit.report.intervals import confidence_interval, intervals
from rlkit.runs import (
    Prompts,
    Responses,
    TrainingOptions,
    evaluate_at_start,
    evaluate_when_due,
    global_loss,
    mean_and_error,
    out_of_patience,
    pass_at_k,
    record_evaluation,
    with_intervals,
)
from rlkit.runs.evaluation import best_step, keep_best_of_all
from rlkit.runs.heldout import sampled_heldout
from rlkit.runs.options import check_evaluation
from rlkit.tracking import EVAL, SAMPLES, Run


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    init_distributed()


@pytest.mark.parametrize(("n", "k"), [(1, 1), (4, 1), (4, 2), (5, 5), (6, 3)])
def test_pass_at_k_is_the_share_of_all_draws_with_a_right_response(n, k):
    for right in range(n + 1):
        draws = list(itertools.combinations([True] * right + [False] * (n - right), k))
        assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    for n, right, k in ((4, 1, 5), (4, 5, 1), (4, 1, 0)):
        with pytest.raises(ValueError, match="pass_at_k: expected 1 <= k <= n and 0 <= right <= n, got n="):
            pass_at_k(n, right, k)


def test_mean_and_error():
    values = [0.0, 1.0, 1.0, 0.5]
    mean, error = mean_and_error(values)
    assert mean == 0.625 and error == pytest.approx(statistics.stdev(values) / 2)
    other_rank = torch.tensor([2.0, 0.5, 0.25], dtype=torch.float64)  # 0.5 and 0
    of_both = mean_and_error(values, lambda sums: sums + other_rank)
    every = [*values, 0.5, 0.0]
    assert of_both == pytest.approx((statistics.fmean(every), statistics.stdev(every) / 6**0.5))
    assert all(map(math.isnan, mean_and_error([])))


def test_a_single_value_has_no_error_and_no_interval():
    mean, error = mean_and_error([0.5])
    assert mean == 0.5 and math.isnan(error)
    assert with_intervals({"accuracy": mean, "accuracy_error": error}, 1)["accuracy"] == "0.500"


@pytest.mark.parametrize(("right", "count"), [(0, 5), (1, 10), (23, 25), (999, 1000), (40, 40)])
def test_the_interval_of_an_accuracy_is_wilsons(right, count):
    """Its ends are the shares p from which the found one differs by 1.96 of their own standard errors."""
    mean, error = mean_and_error([1.0] * right + [0.0] * (count - right))
    for end in confidence_interval(mean, error, count):
        assert 0 <= end <= 1
        assert end in (0, 1) or abs(mean - end) == pytest.approx(1.96 * math.sqrt(end * (1 - end) / count), rel=1e-6)


def test_intervals_of_other_values():
    for values in ([8.0, 9.0, 9.0], [-1.0, 1.0, 1.0, 1.0], [0.0, 3.0, 0.0, 0.0]):
        mean, error = mean_and_error(values)
        assert confidence_interval(mean, error, len(values)) == (mean - 1.96 * error, mean + 1.96 * error)
    assert confidence_interval(0.5, 0.0, 9) == (0.5, 0.5)
    shares = [0.9, 1.0, 1.0, 0.95]  # of tests that passed: mean + 1.96 * error is above 1
    low, high = confidence_interval(*mean_and_error(shares), 4)
    assert 0.5 < low < 0.9625 < high < 1


def test_intervals_by_name():
    found = {"accuracy_after": 1.0, "accuracy_error_after": 0.0, "accuracy_rows_after": 4, "unscored_after": 6,
             "heldout": 10, "loss_after": 2.0}  # fmt: skip
    assert intervals(found, 10, "_after") == {"accuracy_after": confidence_interval(1.0, 0.0, 4)}
    assert intervals(found, 10) == {} and intervals({"a": math.nan, "a_error": 0.1}, None) == {}
    small = {"loss": 0.02, "loss_error": 0.02, "pass@4": 0.02, "pass@4_error": 0.02}
    assert intervals(small, 50)["loss"] == pytest.approx((-0.0192, 0.0592)) and intervals(small, 50)["pass@4"][0] > 0
    few = {"pass@4": 0.5, "pass@4_error": 0.5, "pass@4_rows": 2}  # of 50 rows
    assert 0 < intervals(few, 50)["pass@4"][0] and intervals(few, 50)["pass@4"][1] < 1
    for name in ("acc", "acc_norm", "exact_match strict-match", "match accuracy"):  # of other tools
        assert intervals({name: 0.99, f"{name}_error": 0.01}, 100) == {name: confidence_interval(0.99, 0.01, 100)}
    for name in ("word_perplexity", "bits_per_byte", "kl_divergence"):
        assert intervals({name: 0.5, f"{name}_error": 0.1}, 100)[name] == pytest.approx((0.304, 0.696))
    texts = with_intervals(found, 10, "_after")
    assert texts == {"accuracy_after": "1.000 (95 %: 0.510 to 1.000)", "unscored_after": "6.000", "loss_after": "2.000"}


def test_the_interval_of_sampled_responses_counts_their_rows():
    """Not those with a scored greedy response."""
    right, nan = 1.0, math.nan
    rewards = [[right] * 4, [right] * 4, [nan] * 4, [right, right, nan, nan], [right, nan, nan, nan]]
    sampler = SimpleNamespace(
        cfg=SimpleNamespace(heldout_samples=4, max_new_tokens=1, temperature=1.0),
        engine=SimpleNamespace(global_sum=lambda x: x),
        sync_and_sample=lambda *_, **__: Responses([], torch.tensor(rewards).flatten()),
    )
    found = sampled_heldout(sampler, Prompts([], []))
    rows = {"sampled": 4, "pass@1": 4, "pass@2": 3, "pass@4": 2}
    assert {name: found[f"{name}_rows"] for name in rows} == rows
    greedy = {"accuracy": 1.0, "accuracy_error": 0.0, "accuracy_rows": 5.0, "unscored": 3.0}
    assert intervals(greedy | found, 8) == {
        name: confidence_interval(1.0, 0.0, count) for name, count in {"accuracy": 5, **rows}.items()
    }


def measured(*accuracies):
    return [{"step": 10 * i, "accuracy": x} for i, x in enumerate(accuracies)]


@pytest.mark.parametrize(
    ("evaluations", "expected"),
    [
        ([], (-1, 0)),
        (measured(0.1, 0.5, 0.4, 0.3), (10, 2)),
        (measured(0.5, 0.5), (0, 1)),  # of equal ones the first
        (measured(float("nan"), 0.2), (10, 0)),
        (
            [{"step": 0, "heldout_loss": 2.0}, {"step": 5, "heldout_loss": 1.0}, {"step": 9, "heldout_loss": 1.5}],
            (5, 1),
        ),
        ([{"step": s, "accuracy": 0.0, "heldout_loss": 3 / (s + 1)} for s in range(4)], (3, 0)),  # no exact response
        (
            [
                {"step": 0, "accuracy": 0.5, "heldout_loss": 1.0},
                {"step": 1, "accuracy": 0.6, "heldout_loss": 2.0},
                {"step": 2, "accuracy": 0.6, "heldout_loss": float("nan")},
                {"step": 3, "heldout_loss": 0.1},  # nothing was scored
            ],
            (1, 2),
        ),
        ([{"step": 3, "other": 1.0}], (-1, 0)),
    ],
)
def test_the_best_step(evaluations, expected):
    assert best_step(evaluations) == expected


class Engine:
    """Exports its number of steps."""

    config = SimpleNamespace(name_or_path="", dtype=None)

    def __init__(self, killed_in_export=None):
        self.steps, self.killed_in_export = 0, killed_in_export

    def global_sum(self, x):
        return x

    def export_hf(self, path, dtype):
        if self.steps == self.killed_in_export:
            raise KeyboardInterrupt
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        (path / "steps").write_text(str(self.steps))


def test_where_nothing_was_scored_the_line_says_so(tmp_path, capsys):
    record_evaluation(Run(tmp_path, {}), Engine(), "before", {"unscored": 32.0}, rows=32, skipped=0)
    expected = "held-out before: no response was scored (32 rows; responses without a reward: 32)\n"
    assert expected in capsys.readouterr().out


def test_without_usable_rows_there_is_no_result(tmp_path, capsys):
    run = Run(tmp_path, {})
    record_evaluation(run, Engine(), "before", {"heldout_loss": math.nan}, rows=0, skipped=3)
    assert "held-out before: there was nothing to evaluate (0 rows)\n" in capsys.readouterr().out
    found = json.loads((tmp_path / EVAL).read_text())
    assert (
        found["evaluations"] == [{"step": 0}] and found["heldout_skipped"] == 3 and "heldout_loss_before" not in found
    )
    record_evaluation(run, Engine(), "before", {"heldout_loss": math.nan}, rows=3, skipped=0)  # of a diverged model
    assert "heldout loss nan" in capsys.readouterr().out


def test_a_loss_of_no_row_is_nan():
    batch = Batch(torch.zeros(0, 3, dtype=torch.long), torch.zeros(0, 3, dtype=torch.bool), [])
    engine = SimpleNamespace(global_sum=lambda x: x, data_parallel_group=None)

    def loss_fn(out, mb):
        return token_mean(-out.logprobs, mb.mask, mb.total_tokens), {"accuracy": mb.mask.double().sum()}

    found = global_loss(engine, loss_fn, {"logprobs": torch.zeros(0, 3)}, batch)
    assert found.keys() == {"loss", "accuracy"} and all(map(math.isnan, found.values()))


@pytest.mark.parametrize("name", ["patience", "keep_best"])
def test_what_compares_evaluations_needs_a_result(tmp_path, name, capsys):
    options = {"keep_best": False, "patience": 0, name: 1}
    with pytest.raises(SystemExit, match=f"--{name}: expected a result on the held-out rows, got none; name rows with"):
        train(tmp_path / "run", [math.nan] * 3, rows=0, **options)
    train(tmp_path / "other", [math.nan] * 3, rows=0, keep_best=False)
    assert "--evaluate_every: expected a result on the held-out rows, got none" in capsys.readouterr().out


def train(out, accuracies, *, rows=3, start=0, killed_in_export=None, saved_only=None, **options):
    """A run whose held-out accuracy before training, and after each step, is given.

    Args:
        killed_in_export: the run is killed while it exports the model of this step.
        saved_only: after this step a signal ends the run, once the checkpoint is saved and before it is evaluated.
    """
    defaults = {"steps": len(accuracies) - 1, "evaluate_every": 1, "keep_best": True, "patience": 0}
    cfg = SimpleNamespace(**{**defaults, "export_dtype": "float32", **options})
    run, engine = Run(out, {}), Engine(killed_in_export)

    def evaluate(when):
        found = {"accuracy": accuracies[engine.steps]}
        record_evaluation(run, engine, when, found, rows=rows, skipped=0)

    engine.steps = start
    evaluate_at_start(cfg, run, start, evaluate, engine)
    for step in run.steps(start, cfg.steps):
        engine.steps = step + 1
        run.log(step, {})
        if step + 1 == saved_only:
            raise KeyboardInterrupt
        evaluate_when_due(cfg, run, evaluate, engine)
        if out_of_patience(cfg, run):
            break
    evaluate("after")
    keep_best_of_all(cfg, run, engine)
    found = json.loads((out / EVAL).read_text())
    best = out / "best" / "steps"
    return found, int(best.read_text()) if best.exists() else None, engine.steps


def test_the_best_model_is_kept(tmp_path):
    found, best, steps = train(tmp_path, [0.1, 0.2, 0.6, 0.4, 0.5])
    assert (best, steps) == (2, 4) and found["best_step"] == 2
    assert [one["accuracy"] for one in found["evaluations"]] == [0.1, 0.2, 0.6, 0.4, 0.5]
    assert [one["step"] for one in found["evaluations"]] == [0, 1, 2, 3, 4]
    assert (found["accuracy_before"], found["accuracy_after"]) == (0.1, 0.5) and "accuracy_during" not in found


def test_the_last_model_may_be_the_best(tmp_path):
    assert train(tmp_path, [0.1, 0.2, 0.6])[:2][1] == 2


def test_a_model_that_only_becomes_worse_is_not_kept(tmp_path, capsys):
    found, best, _ = train(tmp_path / "worse", [0.9, 0.2, 0.6])
    assert best is None and found["best_step"] == 0
    line = "no evaluation was better than the one before training, so best/ has no model (--keep_best)\n"
    assert capsys.readouterr().out.endswith(line)
    train(tmp_path / "better", [0.5, 0.2, 0.6])
    assert line not in capsys.readouterr().out


def test_every_third_step(tmp_path):
    found, best, _ = train(tmp_path, [0.1, 0.9, 0.2, 0.3, 0.4, 0.5, 0.9, 0.1], evaluate_every=3)
    assert [one["step"] for one in found["evaluations"]] == [0, 3, 6, 7] and best == 6


def test_training_ends_when_nothing_is_better_any_more(tmp_path, capsys):
    accuracies = [0.1, 0.5, 0.4, 0.5, 0.9, 0.9]
    assert train(tmp_path / "patient", accuracies, patience=3)[2] == 5
    found, best, steps = train(tmp_path / "impatient", accuracies, patience=2)
    assert (best, steps) == (1, 3) and found["evaluations"][-1]["step"] == 3
    assert "no evaluation since step 1 was better: training ends after 3 steps" in capsys.readouterr().out


def test_patience_begins_when_the_policy_trains(tmp_path):
    """In --critic_warmup its evaluations equal the one before training."""
    accuracies = [0.5, 0.5, 0.5, 0.5, 0.4, 0.6, 0.3, 0.3, 0.3]
    _, best, steps = train(tmp_path / "warm-up", accuracies, patience=2, critic_warmup=3)
    assert (best, steps) == (5, 7)
    assert train(tmp_path / "worse", [0.5, 0.5, 0.5, 0.4, 0.4, 0.6], patience=2, critic_warmup=2)[2] == 4


def test_a_run_resumed_where_it_should_end_does_not_train(tmp_path, capsys):
    """It was killed after the evaluation that ends it, or has been given --patience now."""
    accuracies = [0.1, 0.5, 0.4, 0.3, 0.9]
    train(tmp_path, accuracies[:4])
    found, best, steps = train(tmp_path, accuracies, start=3, patience=2)
    assert (best, steps) == (1, 3) and found["evaluations"][-1]["step"] == 3
    assert capsys.readouterr().out.count("no evaluation since step 1 was better: training ends after 3 steps") == 1
    assert train(tmp_path, accuracies, start=3, patience=3)[2] == 4


def test_a_best_model_of_before_keep_best_was_given_is_named(tmp_path, capsys):
    accuracies = [0.1, 0.5, 0.4, 0.3, 0.2]
    train(tmp_path, accuracies[:4], keep_best=False)
    found, best, _ = train(tmp_path, accuracies, start=3)
    assert best is None and found["best_step"] == 1
    assert "the best model, that of step 1, was not kept" in capsys.readouterr().out
    train(tmp_path / "worse", [0.9, 0.2, 0.6])  # the best is the model before training
    assert "not kept" not in capsys.readouterr().out


def test_a_resumed_run_has_the_evaluations_of_one_that_was_not_stopped(tmp_path):
    accuracies = [0.1, 0.2, 0.8, 0.4, 0.5]
    whole = train(tmp_path / "whole", accuracies)
    train(tmp_path / "resumed", [*accuracies[:3], 0.99])  # killed, say, after step 3
    resumed = train(tmp_path / "resumed", accuracies, start=2)  # and resumed at step 2
    assert resumed[0]["evaluations"] == whole[0]["evaluations"]
    assert resumed[0]["best_step"] == whole[0]["best_step"] == 2


ACCURACIES = [0.1, 0.3, 0.9, 0.4, 0.5]


def test_an_evaluation_that_a_signal_left_out_is_made_up_for(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, ACCURACIES, saved_only=2)
    found, best, _ = train(tmp_path, ACCURACIES, start=2)
    assert [one["step"] for one in found["evaluations"]] == [0, 1, 2, 3, 4] and found["best_step"] == best == 2


def test_an_export_that_was_interrupted_is_repeated(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, ACCURACIES, killed_in_export=2)
    found, best, _ = train(tmp_path, ACCURACIES, start=2)
    assert [one["step"] for one in found["evaluations"]] == [0, 1, 2, 3, 4] and found["best_step"] == best == 2


def test_a_best_model_that_is_there_is_not_exported_again(tmp_path):
    train(tmp_path, ACCURACIES)
    assert train(tmp_path, ACCURACIES, start=2, killed_in_export=2)[1] == 2


def test_a_model_in_best_that_is_not_the_best_is_set_aside(tmp_path, capsys):
    """The run resumes at another step than that of the interrupted export."""
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, ACCURACIES, killed_in_export=2)
    found, best, _ = train(tmp_path, ACCURACIES, start=3)
    assert found["best_step"] == 2 and best is None and (tmp_path / "best.outdated" / "steps").read_text() == "1"
    assert "the best model, that of step 2, was lost by an interruption" in capsys.readouterr().out


def test_a_better_evaluation_of_a_lost_continuation_does_not_count(tmp_path):
    """The run was killed after step 3, evaluated and exported there, and resumes at step 2, the best from then on."""
    train(tmp_path, [*ACCURACIES[:3], 0.99])
    found, best, _ = train(tmp_path, ACCURACIES, start=2)
    assert found["best_step"] == best == 2 and not (tmp_path / "best.outdated").exists()


def test_evaluations_of_a_lost_continuation_are_removed_at_once(tmp_path):
    run = Run(tmp_path, {})
    run.log_evaluation(evaluations=measured(0.1, 0.2, 0.3))
    evaluate_at_start(SimpleNamespace(evaluate_every=10, steps=50, keep_best=False), run, 15, None, Engine())
    assert json.loads((tmp_path / EVAL).read_text())["evaluations"] == measured(0.1, 0.2)


@pytest.mark.parametrize(("start", "kept"), [(0, []), (2, [0, "0", "1"])])
def test_responses_of_lost_steps_are_removed_before_held_out_ones_are_written(tmp_path, start, kept):
    """Without a checkpoint the run starts again at step 0; else the evaluation after step 2 is made up for."""
    held_out, trained = '{"kind": "held-out", "step": %d}\n', '{"step": %d}\n'
    (tmp_path / SAMPLES).write_text(held_out % 0 + "".join(trained % step for step in range(4)))
    run = Run(tmp_path, {})

    def evaluate(when):
        with (tmp_path / SAMPLES).open("a") as file:
            file.write(held_out % start)

    cfg = SimpleNamespace(evaluate_every=2, steps=4, keep_best=False, patience=0)
    evaluate_at_start(cfg, run, start, evaluate, Engine())
    next(run.steps(start, 4))
    rows = [json.loads(line) for line in (tmp_path / SAMPLES).read_text().splitlines()]
    assert [row["step"] if "kind" in row else str(row["step"]) for row in rows] == [*kept, start]


@pytest.mark.parametrize("options", [{"keep_best": True}, {"patience": 2}])
def test_options_that_need_evaluations(options):
    cfg = TrainingOptions(evaluate_every=0, **options)
    with pytest.raises(ValueError, match="^evaluate_every: expected at least 1 with --"):
        check_evaluation(cfg)
