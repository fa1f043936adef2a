"""Rollouts of a recipe: saved, computed again, and trained on without sampling."""

import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
from helpers import RECIPES, numbers, rows, run_here, seen_shortly, warm_dir  # noqa: F401  (a fixture)

from rlkit.replay.__main__ import main as replay
from rlkit.replay.bundles import read_bundle, write_bundle
from rlkit.rollout.hf import HfRollout

SMALL = ["--task", "helpers:seen_shortly", "--prompts_per_step", 4, "--group_size", 4, "--max_new_tokens", 3]


@pytest.fixture(scope="module")
def saved(warm_dir, tmp_path_factory):  # noqa: F811
    """Two steps of GRPO with a checkpoint after the first one."""
    out = tmp_path_factory.mktemp("saved") / "run"
    options = ["--steps", 2, "--save_every", 1, "--evaluate_every", 1, *SMALL, "--save_rollouts"]
    run_here("grpo_vlm", "--model", warm_dir, "--out", out, *options)
    return out


def replayed(*arguments):
    """The exit status of a replay."""
    with pytest.raises(SystemExit) as end:
        replay([str(x) for x in arguments])
    return end.value.code


def test_a_bundle_has_what_the_step_was_made_of(saved):
    bundle = read_bundle(saved / "rollouts" / "step_1")
    (draw,), (update,), row = bundle.draws, bundle.updates, rows(saved)[1]
    assert len(draw.samples) == 16 and draw.sampling["seed"] == [0, 1]
    assert sum(sample.reward for sample in draw.samples) / 16 == pytest.approx(row["reward/mean"])
    assert update.metrics["loss"] == row["loss"] and update.metrics["grad_norm"] == row["grad_norm"]
    gap = (update.fields["logprobs"] - update.fields["rollout_logprobs"]).abs()[update.fields["mask"]].mean()
    assert gap.item() == pytest.approx(row["mismatch/abs_dlogp"], rel=1e-3, abs=1e-8)
    assert bundle.options["prompts_per_step"] == 4 and bundle.recipe.endswith("grpo_vlm.py")
    assert all(x.vision["pixel_values"].numel() and x.row["answer"] in "01" for x in draw.samples)


def test_the_block_of_the_page(saved):
    (block,) = re.findall(r"```python\n(.*?)```", (RECIPES.parent / "docs" / "replay.md").read_text(), re.DOTALL)
    assert '"runs/NAME/rollouts/step_12"' in block
    exec(block.replace('"runs/NAME/rollouts/step_12"', repr(str(saved / "rollouts" / "step_1"))), {})


def test_a_step_is_computed_again_from_its_checkpoint(saved, capsys):
    assert replayed(saved / "rollouts" / "step_1") == 0
    said = capsys.readouterr().out
    assert "at step 1" in said and said.endswith("nothing differs\n")
    for line in ("rewards", "advantages", "loss", "grad_norm"):
        assert f"\n{line} " in said


def test_the_kl_in_the_reward_is_that_of_this_runs_policy(saved, warm_dir, tmp_path):  # noqa: F811
    """It is 0 before the first update, whatever the policy was whose responses are read."""
    start, losses = tmp_path / "start", []
    shutil.copytree(warm_dir, start)
    weights = load_file(start / "model.safetensors")
    weights = {name: x * 1.1 if x.dim() > 1 else x for name, x in weights.items()}
    save_file(weights, start / "model.safetensors", {"format": "pt"})
    for coef in (0.0, 0.5):
        options = ["--steps", 1, *SMALL, "--from_rollouts", saved / "rollouts", "--kl_coef", coef]
        run_here("reinforce", "--model", start, "--out", tmp_path / f"{coef}", *options)
        losses.append(numbers(tmp_path / f"{coef}")[0])
    without, measured = losses
    assert measured["kl"] < 1e-6 and measured["mismatch/abs_dlogp"] > 1e-3
    assert measured["loss"] == pytest.approx(without["loss"], abs=1e-5)


@pytest.mark.parametrize(
    ("right", "wrong", "first"),
    [
        ("grpo_advantages(batch.rewards", "grpo_advantages(-batch.rewards", "advantages"),
        ("loss + cfg.kl_coef * kl", "loss + (1 + cfg.kl_coef) * kl", "loss"),
    ],
)
def test_a_changed_recipe_is_named(saved, tmp_path, capsys, right, wrong, first):
    text = (RECIPES / "grpo_vlm.py").read_text()
    assert right in text
    (tmp_path / "changed.py").write_text(text.replace(right, wrong))
    assert replayed(saved / "rollouts" / "step_1", "--recipe", tmp_path / "changed.py") == 1
    said = capsys.readouterr().out
    assert "is not the file that the run was started with" in said
    assert said.splitlines()[-1].startswith(f"first difference: {first}: ")


def test_a_step_without_its_checkpoint_is_taken_from_the_start(saved, tmp_path, capsys):
    """Folder and bundles alone, as on another machine; then without a bundle that it takes."""
    shutil.copytree(saved / "rollouts", tmp_path / "run" / "rollouts")
    assert replayed(tmp_path / "run" / "rollouts" / "step_1") == 0
    shutil.rmtree(tmp_path / "run" / "rollouts" / "step_0")
    said = replayed(tmp_path / "run" / "rollouts" / "step_1")
    assert said.startswith("replay: checkpoint: expected one of step 1, or bundles from step 0 on in ")
    assert said.endswith("got no step_0") and "\n" not in said


def test_training_on_saved_rollouts_is_the_same_run(saved, warm_dir, tmp_path, monkeypatch):  # noqa: F811
    def no_sampling(*_, **options):
        assert options["n"] == 1, "sampled for training"
        return generate(*_, **options)

    generate = HfRollout.generate
    monkeypatch.setattr(HfRollout, "generate", no_sampling)
    source = saved / "rollouts"
    common = ["grpo_vlm", "--model", warm_dir, "--from_rollouts", source, *SMALL]
    run_here(*common, "--out", tmp_path / "again", "--steps", 2, "--evaluate_every", 1)
    assert numbers(tmp_path / "again") == numbers(saved)
    with pytest.raises(
        SystemExit, match=r"from_rollouts .*: expected a bundle of each of the 3 steps .*, got 2 bundles"
    ):
        run_here(*common, "--out", tmp_path / "more", "--steps", 3)


def test_rewards_are_scored_again(saved, capsys):
    assert replayed(saved / "rollouts" / "step_1", "--task", "test_replay:all_wrong") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("first difference: rewards: prompt ") and last.endswith("recorded 1, computed 0")


def test_responses_without_logprobs_and_their_saved_rewards(saved, warm_dir, tmp_path):  # noqa: F811
    """As of another trainer's dump: the log-probabilities are the trainer's own, so nothing is corrected."""
    bundle = read_bundle(saved / "rollouts" / "step_0", updates=False)
    bundle.draws[0].samples = [replace(s, logprobs=[math.nan] * len(s.logprobs)) for s in bundle.draws[0].samples]
    write_bundle(tmp_path / "dump" / "step_0", bundle)
    out = tmp_path / "kept"
    options = ["--from_rollouts", tmp_path / "dump", "--steps", 1, *SMALL, "--task", "test_replay:all_wrong"]
    run_here("grpo_vlm", "--model", warm_dir, "--out", out, *options, "--keep_rewards")
    assert rows(out)[0]["reward/mean"] == rows(saved)[0]["reward/mean"] > 0
    assert rows(out)[0]["mismatch/abs_dlogp"] < 1e-6
    assert rows(out)[0]["grad_norm"] == pytest.approx(rows(saved)[0]["grad_norm"], rel=1e-4)  # the loss is 0


def all_wrong():
    return replace(seen_shortly(), reward=lambda text, row: 0.0)


def test_two_models_and_several_updates(warm_dir, tmp_path, capsys):  # noqa: F811
    """PPO: a critic, mini-batches, and advantages from values."""
    out = tmp_path / "ppo"
    run_here("ppo", "--model", warm_dir, "--out", out, "--steps", 1, *SMALL, "--save_rollouts")
    bundle = read_bundle(out / "rollouts" / "step_0")
    assert [update.engine for update in bundle.updates] == ["critic_checkpoints"] * 2 + ["checkpoints"] * 2
    assert "values" in bundle.updates[0].fields and "returns" in bundle.updates[2].fields
    assert replayed(out / "rollouts" / "step_0") == 0
    assert "update 3: advantages" in capsys.readouterr().out


def test_a_recipe_that_samples_ahead_refuses(tmp_path):
    with pytest.raises(SystemExit, match="save_rollouts: expected a recipe that samples and trains in turn, got one"):
        run_here("grpo_async", "--out", tmp_path / "run", "--save_rollouts")
