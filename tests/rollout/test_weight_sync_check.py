"""What stops a run whose weights do not arrive; test_grpo_async.py has a real server that is sent none."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlkit.data import load_task, prompt_sample
from rlkit.engines import make_engine
from rlkit.rollout import Sampling, WeightSyncCheck, make_rollout, measure_mismatch
from rlkit.rollout.hf import HfRollout
from rlkit.runs import PolicySampler, TrainingOptions
from rlkit.runs.models import sync_check_dtype
from rlkit.vlm import load_model, load_processor, suppressed_token_ids

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path[:0] = [str(Path(__file__).parent), str(RECIPES.parent / "tests" / "recipes")]
from helpers import run_here  # noqa: E402
from vllm_models import build  # noqa: E402


def short_words():
    """The digits, with a reward that random weights get sometimes."""
    task = load_task("digits")
    return replace(task, heldout=task.heldout[:60], reward=lambda text, row: float(len(text) % 2))


def test_the_first_mismatch_is_taken_as_rounding():
    check_sync = WeightSyncCheck(0.3, dtype=torch.bfloat16)
    assert [check_sync(gap) for gap in (0.02, 0.001, 0.19)] == ["", "", ""]
    assert "expected at most 0.2, got 0.21: the sampler does not have the trainer's weights" in check_sync(0.21)
    exact = WeightSyncCheck(0.3)
    assert not exact(0.0) and not exact(1e-3) and exact(2e-3) and exact(float("nan"))
    rough = WeightSyncCheck(0.3, dtype=torch.bfloat16)
    assert not rough(0.1) and not rough(0.3) and rough(0.31)


def test_a_resumed_run_goes_on_with_its_first_mismatch():
    before = WeightSyncCheck(0.3, dtype=torch.bfloat16)
    assert not any(map(before, (0.03, 0.09, 0.15)))
    resumed = WeightSyncCheck(0.3, dtype=torch.bfloat16, first=before.first)
    assert not resumed(0.15) and resumed.first == 0.03
    other_sampler = WeightSyncCheck(0.3, dtype=torch.bfloat16, first=1e-6)  # hf before, now one in bfloat16
    assert not other_sampler(0.04) and not other_sampler(0.2) and other_sampler.first == 0.04
    assert WeightSyncCheck(0.3, dtype=torch.bfloat16, first=1e-6)(0.11)
    assert "expected at most 0.003" in WeightSyncCheck(0.3, dtype=torch.float32, first=1e-6)(0.02)


def test_a_checkpoint_has_the_first_mismatch(tiny_dir, tmp_path, monkeypatch):
    """It was that of rounding in bfloat16, and has grown since."""
    mismatches, stop = iter([0.03, 0.09]), PolicySampler.stop_if_out_of_sync
    monkeypatch.setattr(PolicySampler, "stop_if_out_of_sync", lambda sampler, _: stop(sampler, next(mismatches)))
    options = ["--model", tiny_dir, "--out", tmp_path, "--prompts_per_step", 2, "--group_size", 2, "--save_every", 1]
    small = ["--task", "test_weight_sync_check:short_words", "--max_new_tokens", 3, "--compute_dtype", "bfloat16"]
    run_here("grpo_vlm", *options, *small, "--steps", 2)
    mismatches = iter([0.15])
    run_here("grpo_vlm", *options, *small, "--steps", 3, "--resume")


@pytest.mark.parametrize(("name", "most"), [("float32", 0.003), ("bfloat16", 0.1), ("float16", 0.1)])
def test_a_first_mismatch_above_rounding_fails(name, most):
    dtype = getattr(torch, name)
    assert not WeightSyncCheck(0.3, dtype=dtype)(most) and WeightSyncCheck(most / 2, dtype=dtype)(most)
    said = WeightSyncCheck(0.3, dtype=dtype)(1.1 * most)
    assert f"expected at most {most}, got" in said and said.endswith(f"does not compute in {name} as the trainer does")


@pytest.mark.parametrize(("computed", "least", "most"), [("float32", 1e-8, 1e-5), ("bfloat16", 0.01, 0.05)])
def test_weights_that_are_slightly_wrong_from_the_start(tmp_path, computed, least, most):
    """A sampler with leftover weights, 0.005 in the logprobs, is seen at once in float32; rounding is no alarm: not
    that of float32, and not that of a trainer in bfloat16 beside a sampler in float32."""
    build("qwen2", str(tmp_path))
    tokenizer, model, leftover = load_processor(str(tmp_path)), load_model(str(tmp_path)), load_model(str(tmp_path))
    dtype, suppressed = getattr(torch, computed), suppressed_token_ids(model.config, tokenizer)
    engine = make_engine("fsdp2", model=model, suppressed_token_ids=suppressed, compute_dtype=dtype)
    rollout = make_rollout("hf", lambda: nullcontext(leftover), processor=tokenizer)
    prompts = [prompt_sample([10 + i, 11], group_id=i) for i in range(8)]
    rounding = measure_mismatch(rollout, engine, prompts, Sampling(8))
    assert least < rounding < most and not WeightSyncCheck(0.3, dtype=dtype)(rounding)
    with torch.no_grad():
        leftover.get_output_embeddings().weight.mul_(1.0045)
    wrong = measure_mismatch(rollout, engine, prompts, Sampling(8))
    assert bool(WeightSyncCheck(0.3, dtype=dtype)(wrong)) == (computed == "float32")
    assert computed == "bfloat16" or 0.004 < wrong < 0.006  # rounding hides it


def test_the_mismatch_is_over_all_tokens_with_current_weights(tiny_dir):
    processor = load_processor(tiny_dir)
    model = load_model(tiny_dir)
    suppressed = suppressed_token_ids(model.config, processor.tokenizer)
    engine = make_engine("fsdp2", model=model, suppressed_token_ids=suppressed)
    rollout = make_rollout("hf", lambda: nullcontext(load_model(tiny_dir)), processor=processor)
    prompts = [prompt_sample([10 + i, 11], group_id=i) for i in range(3)]
    assert measure_mismatch(rollout, engine, prompts, Sampling(5)) < 1e-5
    assert measure_mismatch(rollout, engine, [], Sampling(5)) == 0.0  # a rank without any takes part
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.5)
    assert measure_mismatch(rollout, engine, prompts, Sampling(5)) > 0.05


def test_a_run_whose_weights_do_not_arrive_stops(tiny_dir, tmp_path, monkeypatch):
    """The sampler keeps the weights that it loaded; a mismatch of 0.001 is detected."""
    init = HfRollout.__init__

    def keeps_its_weights(self, gathered, **options):
        loaded = load_model(tiny_dir)
        init(self, lambda: nullcontext(loaded), **options)

    monkeypatch.setattr(HfRollout, "__init__", keeps_its_weights)
    options = ["--model", tiny_dir, "--out", tmp_path, "--steps", 6, "--prompts_per_step", 8, "--group_size", 4]
    small = ["--task", "test_weight_sync_check:short_words", "--max_new_tokens", 3, "--lr", 1e-4, "--warmup_steps", 1]
    with pytest.raises(SystemExit, match="step [12]: mismatch/abs_dlogp: expected at most .* did not arrive"):
        run_here("grpo_vlm", *options, *small)


def test_the_dtype_of_a_run_is_that_of_its_options():
    """A first mismatch of 0.03, as SmolLM2 has in bfloat16 on a CPU, stops a run in float32 alone."""
    for options, dtype in (
        ({}, None),
        ({"compute_dtype": "float32"}, None),
        ({"compute_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "bfloat16"}, torch.bfloat16),
    ):
        assert sync_check_dtype(TrainingOptions(**options)) == dtype
        check_sync = WeightSyncCheck(0.3, dtype=sync_check_dtype(TrainingOptions(**options)))
        assert bool(check_sync(0.03)) == (dtype is None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, None])
def test_the_dtype_of_a_run_is_that_of_its_sampler(dtype):
    rollout, run = (
        SimpleNamespace(weight_dtype=dtype, generate=None),
        SimpleNamespace(stop=sys.exit, first_mismatch=None),
    )
    cfg = SimpleNamespace(dtype="float32", compute_dtype="auto", max_mismatch=0.3, reward_threads=0)
    sampler = PolicySampler(cfg, run, SimpleNamespace(reward=None), None, None, rollout)
    with nullcontext() if dtype in (torch.bfloat16, torch.float16) else pytest.raises(SystemExit, match="0.003, got"):
        sampler.stop_if_out_of_sync(0.03)


def test_every_recipe_that_samples_to_train_checks_weight_sync():
    for path in RECIPES.glob("*.py"):
        text = path.read_text()
        if "mismatch_stats(" in text:
            assert "sampler.stop_if_out_of_sync(" in text, path.name
