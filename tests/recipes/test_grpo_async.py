"""`recipes/grpo_async.py`, and each recipe that samples with `--rollout vllm_server`, beside a real vLLM server."""

import json
import math
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from rlkit import runs
from rlkit.data import Batch
from rlkit.engines.distributed import init_distributed
from rlkit.engines.fsdp.fsdp2 import Fsdp2Engine
from rlkit.rollout import Observation
from rlkit.rollout.serve import serving
from rlkit.tracking import read_metrics

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "rollout")]
import helpers  # noqa: E402
from free_ports import free_ports  # noqa: E402
from helpers import assert_help_names_every_option, run, run_here, warm_dir  # noqa: E402, F401  (a fixture)

# all responses of a step at once, and no adapters, whose layers are slower without one too
OPTIONS = ["--kv-cache-memory-bytes", str(64 << 20), "--max-model-len", "512", "--max-num-seqs", "256"]
SMALL = ["--prompts_per_step", "8", "--group_size", "4", "--max_new_tokens", "3"]
LEARNING = [
    "--task", "helpers:few_digits", "--prompts_per_step", 24, "--group_size", 8, "--max_new_tokens", 3,
    "--warmup_steps", 2, "--max_staleness", 1,
]  # fmt: skip


@pytest.fixture(scope="module")
def server(warm_dir, tmp_path_factory):  # noqa: F811
    with serving(str(warm_dir), port=free_ports(1), logs=tmp_path_factory.mktemp("server"), options=OPTIONS) as urls:
        yield next(iter(urls))


def test_learns_ahead_and_stays_within_its_bound(warm_dir, server, tmp_path):  # noqa: F811
    out = tmp_path / "ahead"
    options = ["--servers", server, *LEARNING]
    during = ["--evaluate_every", 5, "--keep_best"]
    done = run("grpo_async", "--model", warm_dir, *options, "--steps", 12, "--lr", 9e-4, "--out", out, *during)
    # seen with AVX2: held-out accuracy 0.462 -> 1.0; without a learning rate 0.462
    assert "Traceback" not in done.stderr and helpers.learned(out)
    rows = read_metrics(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(12)) and all(row["time/scoring"] > 0 for row in rows)
    assert rows[0]["staleness/max"] == 0 and rows[0]["mismatch/abs_dlogp"] < 1e-5  # the weights arrived
    old = [row for row in rows if row["staleness/max"] == 1.0]  # asked for one update before; a late start makes it 0
    assert old and all(row["staleness/max"] <= 1.0 for row in rows)
    assert all(row["mismatch/abs_dlogp"] > 1e-5 for row in old if row["step"] > 1)  # by other weights
    assert (out / "model" / "config.json").exists() and (out / "report.html").exists()
    # between batches that are already being sampled
    evaluations = helpers.evaluation(out)["evaluations"]
    assert [found["step"] for found in evaluations] == [0, 5, 10, 12]
    assert evaluations[2]["accuracy"] > evaluations[0]["accuracy"] + 0.1
    assert helpers.evaluation(out)["best_step"] > 0 and (out / "best" / "config.json").exists()
    helpers.assert_nothing_changes(tmp_path / "still", "grpo_async", warm_dir, *options)


def test_taking_turns_and_going_on(warm_dir, server, tmp_path):  # noqa: F811
    """Without staleness every token is by the weights that it trains, also after a resume, which sends them again."""
    options = ["--model", warm_dir, "--servers", server, "--max_staleness", 0, "--save_every", 2, "--steps", 4, *SMALL]
    options += ["--task", "helpers:few_digits", "--out"]
    run_here("grpo_async", *options, tmp_path / "whole")
    helpers.stop_after(3, "grpo_async", *options, tmp_path / "run")
    run_here("grpo_async", *options, tmp_path / "run", "--resume")
    rows = helpers.numbers(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(4))
    assert all(row["staleness/max"] == 0 and row["mismatch/abs_dlogp"] < 1e-5 for row in rows)
    for row, other in zip(rows, helpers.numbers(tmp_path / "whole"), strict=True):
        helpers.assert_same_step(row, other)
    with pytest.raises(SystemExit, match="To take adapters, start servers with: .* --enable-lora"):
        run_here("grpo_async", *options, tmp_path / "adapters", "--lora_rank", 4, "--sync_adapters")


def test_videos_are_sampled_by_a_server_also_after_a_resume(warm_dir, server, tmp_path):  # noqa: F811
    options = ["--model", warm_dir, "--servers", server, "--max_staleness", 0, "--save_every", 1, "--steps", 2, *SMALL]
    options += ["--task", "helpers:digit_films", "--out"]
    run_here("grpo_async", *options, tmp_path / "whole")
    helpers.stop_after(1, "grpo_async", *options, tmp_path / "run")
    run_here("grpo_async", *options, tmp_path / "run", "--resume")
    rows = helpers.numbers(tmp_path / "run")
    assert all(row["mismatch/abs_dlogp"] < 1e-5 and row["grad_norm"] > 0 and not row["skipped_rows"] for row in rows)
    for row, other in zip(rows, helpers.numbers(tmp_path / "whole"), strict=True):
        helpers.assert_same_step(row, other)
    response = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0])
    assert len(response["images"]) == 1  # the frames of its video, in a row


def look_twice(sample):
    """A tool that shows every image once more, and then has had enough."""
    return Observation("Look again.", sample.images[:1]) if len(sample.images) == 1 else None


WITH_A_SERVER = {
    "grpo_vlm": [], "gspo": ["--mini_batches", 1], "cispo": ["--mini_batches", 2], "ppo": ["--mini_batches", 1],
    "reinforce": ["--advantage", "remax"], "distill": ["--teacher"],
    "vapo": ["--mini_batches", 1, "--critic_warmup", 0],
    "dapo": ["--mini_batches", 1, "--gen_batch_size", 8, "--max_num_gen_batches", 1, "--overlong_buffer", 0],
    "grpo_tools": ["--tool", "test_grpo_async:look_twice"],
}  # fmt: skip


def test_a_copy_in_an_empty_folder_runs_two_steps(warm_dir, server, tmp_path):  # noqa: F811
    options = ["--model", warm_dir, "--task", "helpers:seen_shortly", "--servers", server, *SMALL, "--steps", 2]
    out = helpers.run_a_copy("grpo_async", tmp_path, *options)
    assert out.name == "grpo_async-digits-seed0" and len(helpers.rows(out)) == 2


@pytest.mark.parametrize("recipe", WITH_A_SERVER)
def test_every_recipe_with_a_server_by_one_word(recipe, warm_dir, server, tmp_path):  # noqa: F811
    """What it sampled is by its weights, and no longer by those that the server had of the run before."""
    options = ["--model", warm_dir, "--task", "helpers:seen_shortly", "--steps", 1, *SMALL, *WITH_A_SERVER[recipe]]
    options += [warm_dir] if recipe == "distill" else []
    run_here(recipe, *options, "--rollout", "vllm_server", "--servers", server, "--out", tmp_path / "run")
    (row,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert row["mismatch/abs_dlogp"] < 1e-5 and row.get("turns", 2) == 2


def test_evaluate_with_a_server_by_one_word(warm_dir, server, tmp_path):  # noqa: F811
    options = ["--model", warm_dir, "--task", "helpers:seen_shortly", "--group_size", 2, "--pass_at", 1, "--out"]
    run_here("evaluate", *options, tmp_path / "server", "--rollout", "vllm_server", "--servers", server)
    run_here("evaluate", *options, tmp_path / "alone")
    theirs, ours = (
        [json.loads(line) for line in (tmp_path / name / "responses.jsonl").read_text().splitlines()]
        for name in ("server", "alone")
    )
    assert [response["text"] for response in theirs] == [response["text"] for response in ours] and len(ours) == 20


def test_weights_that_do_not_arrive_stop_the_run(warm_dir, server, tmp_path, monkeypatch):  # noqa: F811
    """The servers are told everything and sent nothing: their version rises, their weights stay."""
    options = ["--model", warm_dir, "--servers", server, *SMALL, "--out"]
    # a run at a learning rate of 0 leaves the servers with the weights that training starts from
    run_here("grpo_async", *options, tmp_path / "still", "--steps", 1, "--lr", 0)
    with monkeypatch.context() as patch:
        patch.setattr("rlkit.rollout.servers.rollout.send_weights", lambda weights, *rest, **options: list(weights))
        with pytest.raises(SystemExit, match="grpo_async-.*: step [01]: mismatch/abs_dlogp: .* they did not arrive"):
            run_here("grpo_async", *options, tmp_path / "run", "--steps", 4, "--warmup_steps", 1)


def test_a_mismatch_of_nan_stops_the_run(warm_dir, server, tmp_path, monkeypatch):  # noqa: F811
    train_batch = Fsdp2Engine.train_batch
    nan = {"mismatch/abs_dlogp": math.nan}
    monkeypatch.setattr(Fsdp2Engine, "train_batch", lambda *args, **options: train_batch(*args, **options) | nan)
    options = ["--model", warm_dir, "--servers", server, *SMALL, "--steps", 1, "--out", tmp_path / "run"]
    with pytest.raises(SystemExit, match="sampler and trainer differ by nan in mean"):
        run_here("grpo_async", *options, "--task", "helpers:seen_shortly")


def test_bad_input_is_one_clear_message(warm_dir, tmp_path):  # noqa: F811
    options = ["--model", warm_dir, "--out", tmp_path / "a", "--servers", "http://127.0.0.1:9", "--rollout", "tgi"]
    with pytest.raises(SystemExit, match="grpo_async: rollout: expected one of hf, .*, got 'tgi'"):
        run_here("grpo_async", *options)


def test_help_names_every_option(capsys):
    assert_help_names_every_option("grpo_async", capsys)


def test_options_of_the_back_end_count_for_a_server_that_the_recipe_starts(tmp_path, monkeypatch):
    """And those that the recipe itself gives, unless an option overrides them."""
    made = {}

    def make(*args, **options):
        made.update(options)
        return SimpleNamespace(close=lambda: None, submit=None)

    init_distributed()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("rlkit.runs.models.make_rollout", make)
    monkeypatch.setattr(
        "rlkit.rollout.serve.serving", lambda *args, **options: nullcontext({"http://localhost:1": None})
    )
    cfg = helpers.load("grpo_async").Config(rollout_options={"max_sequences": "32", "timeout": "5"})
    run = SimpleNamespace(is_main_process=True, out=tmp_path, print=lambda text: None)
    engine = SimpleNamespace(model_parallel_group=None, gathered=None, config=LlamaConfig())
    with ExitStack() as stack:
        runs.build_server_rollout(cfg, run, "model", None, engine, stack)
    assert made["urls"] == ("http://localhost:1",) and made["transfer"] == "gloo"
    assert (made["max_sequences"], made["timeout"]) == (32, 5)


def test_the_gradient_is_that_of_ppo_at_a_ratio_of_one_with_truncated_weights():
    mask = torch.tensor([[False, True, True, True], [True, True, False, False], [False, False, True, False]])
    logprobs = torch.tensor([[-1.0, -2.0, -0.5, -1.5], [-0.1, -3.0, -1.0, -1.0], [-2.0, -2.0, -0.7, -2.0]])
    rollout_logprobs = logprobs + torch.tensor([[0.0, 0.3, -0.9, 0.0], [-0.2, 0.5, 0.0, 0.0], [0.0, 0.0, -0.1, 0.0]])
    advantages = torch.tensor([1.0, -0.5, 2.0])
    columns = {"advantages": advantages, "rollout_logprobs": rollout_logprobs, "staleness": torch.ones(3)}
    mb = Batch(torch.zeros(3, 4, dtype=torch.long), mask, [4] * 3, **columns)
    mb.total_tokens = 6
    recipe = helpers.load("grpo_async")
    out = SimpleNamespace(logprobs=logprobs.clone().requires_grad_(), entropy=torch.zeros(3, 4))
    recipe.policy_loss(out, mb, recipe.Config(tis_cap=2.0))[0].backward()

    new = logprobs.clone().requires_grad_()
    ratio = (new - logprobs).exp()  # 1, so that no bound is reached
    surrogate = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.28) * advantages[:, None])
    weights = (logprobs - rollout_logprobs).exp().clamp(max=2.0)
    (-(surrogate * weights)[mask].sum() / 6).backward()
    torch.testing.assert_close(out.logprobs.grad, new.grad)
    assert (out.logprobs.grad[mask] != 0).all() and weights[0, 2] == 2.0


def test_ranks_that_share_rows_are_refused(warm_dir, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(
        "rlkit.runs.build_engine", lambda *args, **options: SimpleNamespace(model_parallel_group="both ranks")
    )
    with pytest.raises(SystemExit, match="grpo_async: parallel: expected ranks with rows of their own, got ranks that"):
        run_here("grpo_async", "--model", warm_dir, "--servers", "http://localhost:1", "--out", tmp_path)
