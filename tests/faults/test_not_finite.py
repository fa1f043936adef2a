"""Losses, gradients, rewards and weights of nan or inf: no step is made of them, no checkpoint, and no endless run."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlkit.advantages import grpo_advantages
from rlkit.data import prompt_sample
from rlkit.engines import checkpoint
from rlkit.engines.distributed import init_distributed
from rlkit.rewards import combine, score, score_parts
from rlkit.rewards.scoring import scored
from rlkit.runs import checkpoints
from rlkit.runs.options import TrainingOptions
from rlkit.tracking import Run


class Engine:
    """Saves a state of one tensor."""

    def __init__(self):
        init_distributed()
        self.state = {"model": {"layer.weight": torch.ones(8)}}

    def save_checkpoint(self, path, extra):
        checkpoint.save(path, self.state, {"extra": extra})


def steps_until_it_stops(run, skipped, *, limit, save_every=1):
    """Log and save one step after another; the message, and how many steps were logged."""
    cfg = SimpleNamespace(max_skipped_steps=limit, save_every=save_every, keep_checkpoints=2, steps=99)
    engine = Engine()
    for step, metrics in enumerate(skipped):
        run.log(step, metrics)
        try:
            checkpoints.save(cfg, run, step, checkpoints=engine)
        except SystemExit as stopped:
            return str(stopped), step + 1
    return "", len(skipped)


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path, {}, name="the-run")


def test_a_limit_of_skipped_steps_ends_the_run(run):
    good, bad = {"skipped_steps": 0.0}, {"skipped_steps": 1.0, "loss": math.nan}
    said, steps = steps_until_it_stops(run, [good, bad, bad, good, *[bad] * 50], limit=3)
    assert steps == 4 + 3
    assert said == (
        "the-run: gradients: expected finite ones, got nan or inf in 3 steps in a row, which were skipped; "
        "lower --lr, or allow more with --max_skipped_steps"
    )
    assert len(checkpoint.checkpoints(run.out / "checkpoints")) == 2  # of the steps before, none of the last


def test_steps_that_save_nothing_count_too(run):
    assert steps_until_it_stops(run, [{"skipped_steps": 1.0}] * 9, limit=4, save_every=50)[1] == 4


def test_a_limit_of_0_is_none(run):
    assert steps_until_it_stops(run, [{"skipped_steps": 1.0}] * 9, limit=0, save_every=50) == ("", 9)


def test_a_critic_counts_too_and_a_step_with_one_good_update_does_not(run):
    said, steps = steps_until_it_stops(run, [{"skipped_steps": 0.0, "critic/skipped_steps": 1.0}] * 9, limit=2)
    assert said and steps == 2
    run.log(9, {"skipped_steps": 0.0})
    assert steps_until_it_stops(run, [{"skipped_steps": 0.5}] * 9, limit=2, save_every=50) == ("", 9)


def test_the_option():
    assert TrainingOptions().max_skipped_steps == 10


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_there_is_no_checkpoint_of_weights_that_are_not_finite(value, tmp_path):
    engine = Engine()
    checkpoint.save(tmp_path / "step_1", engine.state, {"step": 1})
    engine.state["model"]["layer.weight"][3] = value
    with pytest.raises(
        checkpoint.CheckpointNotWritten, match=f"step_2: expected finite weights, got {value} in layer.w"
    ):
        checkpoint.save(tmp_path / "step_2", engine.state, {"step": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    checkpoint.load(tmp_path / "step_1", engine.state)
    assert engine.state["model"]["layer.weight"].eq(1).all()


class Reads(TorchDispatchMode):
    """Counts how often the host reads a number of a tensor, for which it would wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return function(*args, **(kwargs or {}))


def test_the_host_waits_once_for_all_weights():
    weights = {str(i): torch.ones(3, i) for i in range(9)} | {"steps": 4, "counts": torch.arange(3)}
    with Reads() as reads:
        assert checkpoint._not_finite(weights) == ""
    assert reads.count == 1
    weights["5"][1, 2], weights["7"][0] = math.inf, math.nan
    assert checkpoint._not_finite(weights) == "inf in 5"
    assert checkpoint._not_finite({}) == ""


def test_a_run_ends_with_the_weights_name(run):
    cfg = SimpleNamespace(max_skipped_steps=3, save_every=1, keep_checkpoints=2, steps=99)
    engine = Engine()
    engine.state["model"]["layer.weight"][3] = math.nan
    with pytest.raises(SystemExit, match="^the-run: checkpoint .*step_1: expected finite weights, got nan in layer.w"):
        checkpoints.save(cfg, run, 0, checkpoints=engine)


SAMPLES = [prompt_sample([1], text=str(i), group_id=0) for i in range(4)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e39, -1e300, None, "one", [], 10**400])
def test_a_reward_that_is_no_number_of_a_batch_is_not_scored(bad):
    """float32 is what a batch holds: 1e39 is infinite there, and would make its group's advantages nan."""
    rewards = score(lambda text, row: bad if text == "2" else float(text), SAMPLES)
    assert rewards.isnan().tolist() == [False, False, True, False]
    assert rewards[~rewards.isnan()].tolist() == [0, 1, 3]
    batch = scored(SAMPLES, rewards)
    assert (
        grpo_advantages(torch.tensor([one.reward for one in batch]), torch.zeros(3, dtype=torch.long)).isfinite().all()
    )


def test_a_sum_of_rewards_that_is_too_large_is_not_scored():
    reward = combine({"a": (1e20, lambda text, row: 1e30), "b": (1.0, lambda text, row: 0.0)})
    assert score_parts(reward, SAMPLES)[0].isnan().all()


def test_a_run_with_a_learning_rate_out_of_all_bounds_ends(tiny_dir, tmp_path):
    """The weights become so large that every loss is nan."""
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
    import helpers

    arguments = ["--model", tiny_dir, "--out", tmp_path / "run", "--lr", 1e30, "--max_grad_norm", 1e30]
    arguments += ["--warmup_steps", 0, "--prompts_per_step", 2, "--steps", 50, "--max_skipped_steps", 4]
    with pytest.raises(SystemExit, match="step 4: gradients: expected finite ones, got nan or inf in 4 steps in a row"):
        helpers.run_here("sft", *arguments, "--max_new_tokens", 0, "--heldout", 0.003)
