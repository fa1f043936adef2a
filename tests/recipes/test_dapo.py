"""`recipes/dapo.py` as a person runs it."""

import re
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import helpers
from helpers import numbers, run_here

from rlkit.runs import PolicySampler

warm_dir, text_dir = helpers.warm_dir, helpers.text_dir
LEARNING = [
    "--task", "helpers:few_digits", "--seed", 0, "--steps", 10, "--prompts_per_step", 24, "--gen_batch_size", 32,
    "--max_num_gen_batches", 2, "--group_size", 8, "--mini_batches", 2, "--max_new_tokens", 4, "--temperature", 1.0,
    "--warmup_steps", 2, "--clip_low", 0.2, "--clip_high", 0.28, "--overlong_buffer", 2,
    "--overlong_penalty_factor", 1.0, "--save_every", 2, "--threads", 1,
]  # fmt: skip
SMALL = [
    "--seed", 0, "--steps", 1, "--prompts_per_step", 6, "--gen_batch_size", 4, "--max_num_gen_batches", 3,
    "--group_size", 4, "--mini_batches", 1, "--max_new_tokens", 2, "--overlong_buffer", 0, "--lr", 1e-3,
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(warm_dir, tmp_path_factory):
    """A run on one rank that was never killed."""
    out = tmp_path_factory.mktemp("dapo") / "whole"
    run_here("dapo", "--model", warm_dir, "--out", out, "--lr", 1.5e-3, *LEARNING)
    return out


def test_learns_and_not_without_a_learning_rate(whole, warm_dir, tmp_path):
    # seen with AVX2, without it, and with two threads: held-out accuracy 0.462 -> 1.0; without a learning rate 0.462
    assert helpers.learned(whole)
    helpers.assert_nothing_changes(tmp_path / "still", "dapo", warm_dir, *LEARNING)


def test_resume_is_exact_after_steps_of_several_gen_batches(warm_dir, tmp_path):
    rows = helpers.assert_resume_is_exact(tmp_path, "dapo", "--model", warm_dir, *SMALL)
    assert all(row["groups/sampled"] in (8, 12) for row in rows[:2])  # two or three generation batches of four prompts


def test_leaves_what_it_promises(whole):
    rows = helpers.rows(whole)
    assert [row["step"] for row in rows] == list(range(10))
    for row in rows:
        assert row["groups/trained"] == min(24, row["groups/differ"]) <= row["groups/sampled"] in (32, 64)
        assert row["groups/sampled"] == 32 or row["groups/differ"] > 0
        assert row["mismatch/abs_dlogp"] < 1e-5 and row["time/generate"] > 0 and row["time/reward"] >= 0
    assert [p.name for p in sorted((whole / "checkpoints").iterdir())] == ["step_10", "step_8"]
    assert (whole / "model" / "model.safetensors").exists() and (whole / "report.html").exists()


def test_rows_are_encoded_while_others_are_sampled(warm_dir, tmp_path, monkeypatch):
    """Those of the training steps, and not those of held-out rows."""
    threads, encode = [], PolicySampler.encode

    def recorded(sampler, rows):
        threads.append(threading.current_thread().name)
        return encode(sampler, rows)

    monkeypatch.setattr(PolicySampler, "encode", recorded)
    run_here("dapo", "--model", warm_dir, "--out", tmp_path, "--task", "helpers:few_digits", *SMALL)
    assert len(threads) > 1 and all(name.startswith("prefetch") for name in threads[1:])


def half_settled():
    """What is asked about a 0 is always right."""
    task = helpers.few_digits()
    return replace(task, reward=lambda text, row: 1.0 if row["answer"] == "0" else task.reward(text, row))


def settled():
    return replace(helpers.few_digits(), reward=lambda text, row: 1.0)


def test_groups_of_equal_rewards_are_dropped_and_others_drawn(warm_dir, tmp_path):
    run_here("dapo", "--model", warm_dir, "--out", tmp_path / "half", "--task", f"{__name__}:half_settled", *SMALL)
    row = numbers(tmp_path / "half")[0]
    assert row["groups/sampled"] in (8, 12) and 0 < row["groups/differ"] < row["groups/sampled"]
    assert row["groups/trained"] == min(6, row["groups/differ"])
    assert row["loss"] != 0 and row["grad_norm"] > 0


def test_a_run_with_nothing_left_to_learn_ends_well(warm_dir, tmp_path, capsys):
    run_here("dapo", "--model", warm_dir, "--out", tmp_path / "run", "--task", f"{__name__}:settled", *SMALL)
    said = (
        r"\nstep 0: no sampled group has different rewards, so the run ends here; (\d+) of \1 responses were scored\n"
    )
    assert re.search(said, capsys.readouterr().out)
    assert helpers.rows(tmp_path / "run") == [] and helpers.evaluation(tmp_path / "run")["accuracy_after"] == 1
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def unscored():
    return replace(helpers.seen_shortly(), reward=lambda text, row: None)


def test_a_run_without_any_verdict_says_so(warm_dir, tmp_path, capsys):
    arguments = ["--model", warm_dir, "--task", f"{__name__}:unscored", "--out", tmp_path / "run", *SMALL]
    run_here("dapo", *arguments, "--max_failed_rewards", 1)
    assert re.search(r"the run ends here; 0 of [1-9]\d+ responses were scored\n", capsys.readouterr().out)


def test_long_responses_pay(warm_dir, tmp_path):
    """Every response of the warm model is a digit and an end: two tokens, or one without its end."""
    arguments = ["--model", warm_dir, "--task", "helpers:few_digits", *SMALL, "--overlong_penalty_factor", 0.5]
    run_here("dapo", *arguments, "--out", tmp_path / "free")
    run_here("dapo", *arguments, "--out", tmp_path / "paid", "--overlong_buffer", 1)
    (free,), (paid,) = numbers(tmp_path / "free"), numbers(tmp_path / "paid")
    assert free["reward/overlong"] == 0 and -0.5 <= paid["reward/overlong"] < -0.3
    assert free["reward/mean"] == paid["reward/mean"] and free["groups/differ"] == paid["groups/differ"]


def test_text_with_lora(text_dir, tmp_path):
    run_here("dapo", "--model", text_dir, "--out", tmp_path / "run", "--task", f"{__name__}:length", *SMALL,
             "--lora_rank", 4, "--exclude_modules", "None", "--use_fused_kernels")  # fmt: skip
    row = numbers(tmp_path / "run")[0]
    assert row["unscored"] == 0 and row["grad_norm"] > 0


def length():
    """Sorting, with a reward that a model without any training earns now and then."""
    return replace(helpers.load_task("sorting"), reward=lambda text, row: float(len(text) > 4))


def test_help_names_every_option(capsys):
    helpers.assert_help_names_every_option("dapo", capsys)


def test_bad_input_is_one_clear_message(whole, tmp_path):
    with pytest.raises(SystemExit, match="dapo: mini_batches: expected 1 to 6, got 7"):
        run_here("dapo", "--out", tmp_path / "a", *SMALL, "--mini_batches", 7)
    with pytest.raises(SystemExit, match="dapo: overlong_buffer: expected 0 to 4, got 8"):
        run_here("dapo", "--out", tmp_path / "a", *SMALL, "--max_new_tokens", 4, "--overlong_buffer", 8)
    with pytest.raises(SystemExit, match="dapo: epochs: expected --steps, as steps vary in size, got "):
        run_here("dapo", "--out", tmp_path / "a", *SMALL, "--epochs", 1)
    with pytest.raises(SystemExit, match="dapo: out .*holds a run already; continue it with --resume"):
        run_here("dapo", "--out", whole, *SMALL)
