"""What every recipe leaves behind beside its results: parts of the reward, work and time, trackers; and text alone."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from forked_commands import run_commands  # noqa: E402
from helpers import RECIPES, environment, evaluation, load, numbers, rows, run_here, text_dir  # noqa: E402, F401  (a fixture)

from rlkit.data import load_task, loading  # noqa: E402
from rlkit.rewards import combine  # noqa: E402
from rlkit.rewards.rules import exact_match, matches  # noqa: E402
from rlkit.rollout.hf import HfRollout  # noqa: E402

SMALL = ["--prompts_per_step", 4, "--group_size", 4, "--steps", 2, "--max_new_tokens", 3]


class Observed:
    """When halves of a batch were written, and when responses were scored; no second half ends before a judgement
    begins, unless that does not begin for a minute."""

    def __init__(self, monkeypatch):
        self.halves, self.scored, self.began = [], [], Event()
        generate = HfRollout._generate_batch

        def one_half(rollout, module, requests, sampling, n, *rest):
            if not len(self.halves) % 2:
                self.began.clear()
            start = time.perf_counter()
            samples = generate(rollout, module, requests, sampling, n, *rest)
            if n > 1:  # no evaluation
                if len(self.halves) % 2:
                    self.began.wait(60)
                self.halves.append((start, time.perf_counter()))
            return samples

        monkeypatch.setitem(HfRollout.__init__.__kwdefaults__, "max_sequences", 8)
        monkeypatch.setattr(HfRollout, "_generate_batch", one_half)

    def two_parts(self):
        """An untrained model is hardly ever right, and sometimes long."""
        task = load_task("sorting")
        parts = {"right": (1.0, self.right), "long": (0.5, matches(".{4,}")), "curve": (0.0, matches("[^0-9]+"))}
        return replace(task, heldout=task.heldout[:4], reward=combine(parts))

    def right(self, text, row):
        start = time.perf_counter()
        self.began.set()
        time.sleep(0.002)
        self.scored.append((start, time.perf_counter()))
        return exact_match(text, row)


@pytest.mark.parametrize(
    ("recipe", "passes", "options"),
    [
        ("grpo_vlm", 4, []), ("reinforce", 3, []), ("ppo", 8, []), ("distill", 4, ["--teacher"]),
        ("dapo", 3, ["--mini_batches", 1, "--gen_batch_size", 4, "--max_num_gen_batches", 2]),
    ],
)  # fmt: skip
def test_parts_work_and_time_are_logged(text_dir, tmp_path, monkeypatch, recipe, passes, options):  # noqa: F811
    observed = Observed(monkeypatch)
    monkeypatch.setitem(loading.BUILT_IN, "two_parts", observed.two_parts)
    options = [*options, text_dir] if recipe == "distill" else options
    run_here(recipe, "--model", text_dir, "--task", "two_parts", "--out", tmp_path, *SMALL, *options)
    for row in rows(tmp_path):
        parts = {name: row[f"reward_part/{name}"] for name in ("right", "long", "curve")}
        assert 0 < parts["long"] < 1 and 0 < parts["curve"] <= 1
        assert row["reward/mean"] == pytest.approx(parts["right"] + 0.5 * parts["long"])
        assert row["reward/worst"] <= row["reward/mean"] <= row["reward/best"] and 0 <= row["reward/equal"] < 1
        assert 0 < row["reward/std"] < 1
        # 2 x 327,680 weights a token and forward, some 20 to 140 tokens; 3 forwards' worth at least for each update
        assert 2 * 327_680 * 40 * passes < row["flops"] < 2 * 327_680 * 400 * passes
        assert row["time/train_flops_per_second"] == pytest.approx(row["flops"] / row["time/train"])
        assert row["time/tokens_per_second"] > 0 and "time/mfu" not in row  # there is no peak to compare a CPU with
        assert {"time/weight_sync", "time/generate", "time/reward", "time/train"} <= row.keys()
        assert row["time/scoring"] > 4 * 0.002  # 4 responses one after the other, for each of 4 prompts
    assert "time/evaluate" in rows(tmp_path)[0]
    for first, second in zip(observed.halves[::2], observed.halves[1::2], strict=True):
        assert any(first[0] < start < second[1] for start, _ in observed.scored)  # while others were written


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ([], 4), (["--ppo_epochs", 2, "--evaluate_every", 1, "--steps", 2], 8), (["--mini_batches", 2], 5),
        (["--lora_rank", 2, "--kl_coef", 0], 2),
    ],
)  # fmt: skip
def test_flops_are_those_of_every_pass_in_training(text_dir, tmp_path, options, passes):  # noqa: F811
    """Three forwards' worth for each update (two with adapters), one for the reference, and one for the old
    log-probabilities of several updates. The responses of the first step are the same."""
    common = ["--model", text_dir, "--task", "sorting", "--heldout_rows", 4, *SMALL, "--steps", 1]
    run_here("grpo_vlm", *common, "--kl_coef", 0, "--out", tmp_path / "three")
    run_here("grpo_vlm", *common, *options, "--out", tmp_path / "more")
    assert 3 * rows(tmp_path / "more")[0]["flops"] == passes * rows(tmp_path / "three")[0]["flops"]


@pytest.mark.parametrize(
    ("recipe", "options"),
    [("ppo", []), ("reinforce", []), ("dapo", ["--mini_batches", 1, "--gen_batch_size", 4, "--overlong_buffer", 0])],
)
def test_what_cannot_be_scored_is_left_out_until_it_is_too_much(text_dir, tmp_path, monkeypatch, recipe, options):  # noqa: F811
    """Two of four prompts, and one of two held-out rows. A reward is 8 or 9: a 0 in place of an unknown one would show
    in the mean."""
    sorting = load_task("sorting")
    sorting = replace(sorting, train=sorting.train[:4], heldout=sorting.heldout[:2])

    def scored(*rows):
        known = {row["where"] for row in rows}
        reward = lambda text, row: 8.0 + sum(text.encode()) % 2 if row["where"] in known else None  # noqa: E731
        return lambda: replace(sorting, reward=reward)

    tasks = {"half": scored(*sorting.train[:2], sorting.heldout[0]), "seen": scored(*sorting.heldout), "none": scored()}
    monkeypatch.setattr(loading, "BUILT_IN", tasks)
    options = ["--model", text_dir, *SMALL, "--steps", 1, *options, "--task"]
    run_here(recipe, *options, "half", "--out", tmp_path / "half", "--max_failed_rewards", 0.5)
    (row,) = rows(tmp_path / "half")
    assert row["unscored"] == 2 * row.get("groups/sampled", 4) and 8 < row["reward/mean"] < 9
    found = evaluation(tmp_path / "half")
    assert found["accuracy_before"] in (8, 9) and found["unscored_before"] == found["unscored_after"] == 1
    refused = "responses: expected at least 80% of .* scored, got 0: .* x a reward of None"
    with pytest.raises(SystemExit, match=f"{recipe}-sorting-seed0: step 0: {refused}"):
        run_here(recipe, *options, "seen", "--out", tmp_path / "seen")
    with pytest.raises(SystemExit, match=f"{recipe}-sorting-seed0: held-out {refused}"):
        run_here(recipe, *options, "none", "--out", tmp_path / "none")


def test_text_from_a_file_and_two_places_to_look_at_it(text_dir, tmp_path):  # noqa: F811
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines = [{"question": row["question"], "answer": row["answer"]} for row in load_task("sorting").train[:40]]
    (tmp_path / "sorting.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "run"
    run_here(
        "grpo_vlm", "--model", text_dir, "--task", tmp_path / "sorting.jsonl", "--out", out, *SMALL, "--trackers",
        "tensorboard", "--watchdog", 60,
    )  # fmt: skip
    assert evaluation(out)["heldout"] == 4 and all(row["skipped_rows"] == 0 for row in rows(out))
    board = EventAccumulator(str(out / "tensorboard"))
    board.Reload()
    assert [event.value for event in board.Scalars("flops")] == pytest.approx([row["flops"] for row in rows(out)])
    assert len(board.Scalars("eval/accuracy_after")) == 1 and not (out / "phases").exists()


def test_a_run_is_evaluated_while_it_trains(text_dir, tmp_path):  # noqa: F811
    """The numbers of training are those of a run that is not; the model of the best evaluation is exported."""
    options = ["--model", text_dir, "--task", "sorting", "--heldout", 0.02, *SMALL, "--steps", 5, "--lr", 0.01]
    run_here("grpo_vlm", *options, "--out", tmp_path / "plain")
    during = ["--evaluate_every", 2, "--keep_best", "--heldout_samples", 4]
    run_here("grpo_vlm", *options, *during, "--out", tmp_path / "run")
    assert numbers(tmp_path / "plain") == numbers(tmp_path / "run")
    found = evaluation(tmp_path / "run")
    assert [one["step"] for one in found["evaluations"]] == [0, 2, 4, 5]
    for one in found["evaluations"]:
        assert {"accuracy", "accuracy_error", "pass@4_error"} <= one.keys()
        assert one["sampled"] == pytest.approx(one["pass@1"])  # rewards are 0 or 1
        assert one["pass@1"] <= one["pass@2"] <= one["pass@4"]
    assert evaluation(tmp_path / "plain")["accuracy_after"] == found["accuracy_after"]
    assert (tmp_path / "run" / "best" / "model.safetensors").exists() == (found["best_step"] > 0)
    kept = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {one["step"] for one in kept if one["kind"] == "held-out"} == {0, 2, 4, 5}


def test_training_ends_early_by_its_loss(text_dir, tmp_path):  # noqa: F811
    """With a learning rate of 0 no evaluation is better than the one before training."""
    options = ["--model", text_dir, "--task", "sorting", "--steps", 9, "--prompts_per_step", 4, "--max_new_tokens", 0]
    run_here("sft", *options, "--lr", 0, "--evaluate_every", 1, "--patience", 2, "--out", tmp_path)
    found = evaluation(tmp_path)
    assert len(rows(tmp_path)) == 2 and found["steps"] == 2 and (tmp_path / "model").is_dir()
    assert [one["step"] for one in found["evaluations"]] == [0, 1, 2]


def test_two_runs_that_start_at_once_are_both_complete(text_dir, tmp_path):  # noqa: F811
    """A sweep that names no directory."""
    arguments = ["--model", text_dir, "--task", "sorting", "--steps", 3, "--prompts_per_step", 8, "--max_new_tokens", 0]
    sweep = [[RECIPES / "sft.py", *arguments, "--lr", lr] for lr in (1e-3, 2e-3)]
    ran = run_commands(sweep, tmp_path / "printed", at_once=True, cwd=tmp_path, env=environment())
    assert [one.returncode for one in ran] == [0, 0], ran
    found = sorted((tmp_path / "runs").iterdir())
    assert [out.name for out in found] == ["sft-sorting-seed0", "sft-sorting-seed0-2"]
    assert [[row["step"] for row in rows(out)] for out in found] == [[0, 1, 2]] * 2
    assert all((out / "report.html").exists() and (out / "model").is_dir() for out in found)
    assert {json.loads((out / "config.json").read_text())["lr"] for out in found} == {1e-3, 2e-3}


@pytest.mark.parametrize("recipe", sorted(path.stem for path in RECIPES.glob("*.py")))
def test_a_run_is_named_after_its_task(recipe, monkeypatch):
    """And not after `helpers:few_digits`: some programs take what stands before a colon for another machine."""
    module = load(recipe)
    monkeypatch.setattr("rlkit.runs.start.claim_directory", lambda out, name, resume: sys.exit(name))
    with pytest.raises(SystemExit, match=f"^{recipe}-digits-seed3$"):
        config = module.Config(task=("helpers:few_digits",) if recipe == "evaluate" else "helpers:few_digits", seed=3)
        module.main(config)
