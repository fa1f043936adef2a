"""Every recipe on two ranks by fsdp2, and some by megatron, does what it does on one by fsdp2. They share one pair of
processes, which are forked: starting one takes six CPU seconds."""

import functools
import json
import sys
from pathlib import Path

import pytest
from isolated_cases import require, run_cases
from runs.some_responses import expected

sys.path.insert(0, str(Path(__file__).parent))
import helpers
import media_rows
from helpers import evaluation, numbers, run_here
from test_evaluate import SMALL, responses

DIGITS = ["--task", "helpers:seen_shortly"]
PROMPTS = [*DIGITS, "--prompts_per_step", 8, "--group_size", 4, "--max_new_tokens", 3, "--lr", 1e-3]
PAIRS = [*DIGITS, "--prompts_per_step", 6, "--lr", 1e-3, "--steps", 2]
DRAWS = ["--gen_batch_size", 8, "--max_num_gen_batches", 2, "--mini_batches", 1, "--overlong_buffer", 0]
MEGATRON = ["--engine", "megatron", "--parallel"]
SPLIT_BY = {
    "tensor": [*MEGATRON, "tensor", 2, "sequence_parallel", 1],
    "pipeline": [*MEGATRON, "pipeline", 2, "--save_every", 1],
}
# recipe, options, and those of the run on two ranks alone
CASES = {
    "grpo_vlm": ("grpo_vlm", [*PROMPTS, "--steps", 1], ["--save_rollouts"]),
    "ulysses": ("grpo_vlm", [*PROMPTS, "--steps", 1], ["--ulysses_sequence_parallel_size", 2, "--save_rollouts"]),
    "reinforce": ("reinforce", [*PROMPTS, "--steps", 1, "--advantage", "reinforce_plus_plus_baseline"], []),
    "gspo": ("gspo", [*PROMPTS, "--steps", 1, "--mini_batches", 2], []),
    "cispo": ("cispo", [*PROMPTS, "--steps", 1, "--mini_batches", 2], []),
    "dapo": ("dapo", [*PROMPTS, "--steps", 1, *DRAWS], []),
    "ppo": ("ppo", [*PROMPTS, "--steps", 1, "--mini_batches", 2], []),
    "vapo": ("vapo", [*PROMPTS, "--steps", 1, "--mini_batches", 2, "--critic_warmup", 0], []),
    "distill": ("distill", [*PROMPTS, "--steps", 1], []),
    "distill_whole": ("distill", [*PROMPTS, "--steps", 2, "--loss", "jsd"], ["--ulysses_sequence_parallel_size", 2]),
    "distill_top": ("distill", [*PROMPTS, "--steps", 2, "--loss", "jsd", "--teacher_top_k", 9], []),
    "sft": ("sft", [*PAIRS, "--max_new_tokens", 2], []),
    "dpo": ("dpo", [*PAIRS, "--max_new_tokens", 3], ["--micro_batch_tokens", 300]),  # pairs are not torn apart
    "simpo": ("simpo", [*PAIRS, "--max_new_tokens", 3], ["--micro_batch_tokens", 300]),
    "kto": ("kto", [*PAIRS, "--max_new_tokens", 3], ["--micro_batch_tokens", 300]),
    "reward_model": ("reward_model", PAIRS, ["--micro_batch_tokens", 300]),
    "media": ("grpo_vlm", [*PROMPTS[2:], "--reward", "helpers:length_is_even", "--steps", 2, "--save_every", 1], []),
    "fsdp2-tensor": ("sft", [*PAIRS, "--max_new_tokens", 2], ["--parallel", "tensor", 2]),
}
SPLIT = {  # six of them: the others make their engine by the same line
    "grpo_vlm": "tensor", "ppo": "pipeline", "distill_top": "tensor", "sft": "pipeline", "reward_model": "tensor",
    "dpo": "pipeline",
}  # fmt: skip
SAVED = ["grpo_vlm", "ulysses"]  # each rank has rows of its own; both have the same rows
STOPPED = {"megatron-sft": 1, "media": 1}  # after so many steps, and resumed
CASES |= {f"megatron-{n}": (*CASES[n][:2], [*CASES[n][2], *SPLIT_BY[way]]) for n, way in SPLIT.items()}
# a task whose rewards are parts of 1, and some of which cannot be scored
PARTS = """
from dataclasses import replace
from helpers import few_digits

def reward(text, row):
    return None if row["answer"] == "0" else 0.5

def task():
    return replace(few_digits(), reward=reward)
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return helpers.built_start(tmp_path_factory)


@pytest.fixture(scope="module")
def two_ranks(start, tmp_path_factory):
    """The directory of runs on two ranks, and what all runs began from."""
    warm = helpers.built_warm(tmp_path_factory)
    shared, out = {name: ["--model", warm] for name in CASES}, tmp_path_factory.mktemp("two")
    media_rows.save_model(out / "omni")
    media_rows.write_mixed_rows(out / "rows.jsonl", 12)
    shared["media"] = ["--model", out / "omni", "--task", out / "rows.jsonl", "--heldout", "0.34"]
    for name in ("distill", "distill_whole", "distill_top", "megatron-distill_top"):
        shared[name] += ["--teacher", helpers.built(tmp_path_factory, "random", helpers.few_digits, warm_up_steps=0)]
    runs = {
        name: [STOPPED.get(name, 0), recipe, *shared[name], *options, *more, "--out", out / name]
        for name, (recipe, options, more) in CASES.items()
    }
    (out / "parts.py").write_text(PARTS)
    tasks = ["helpers:few_digits", f"{out}/parts.py:task"]
    options = ["--model", start, "--task", *tasks, *SMALL, "--right", 0.4, "--out", out / "evaluate"]
    runs["evaluate"] = [0, "evaluate", *options]
    options = ["--model", start, "--task", "helpers:few_digits", *SMALL, "--out", out / "evaluate_ulysses"]
    runs["evaluate_ulysses"] = [0, "evaluate", *options, "--ulysses_sequence_parallel_size", 2]
    (out / "runs.json").write_text(json.dumps(runs, default=str))
    command = helpers.command(Path(__file__).with_name("on_two_ranks.py"), out / "runs.json")
    names = ["responses", "late", "refused", "measured", *runs, *(f"replayed/{name}" for name in SAVED)]
    run_cases(command, out, names, timeout=1800, env=helpers.environment())
    return out, shared


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory):
    """Runs in this process, and returns the directory; what has the same options is one run."""

    @functools.cache
    def run(recipe, *arguments):
        out = tmp_path_factory.mktemp("one")
        run_here(recipe, *arguments, "--out", out)
        return out

    return run


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_do_what_one_does(two_ranks, on_one_rank, name):
    out, shared = two_ranks
    require(out, name)
    recipe, options, _ = CASES[name]
    alone = on_one_rank(recipe, *shared[name], *options)
    assert any(row["grad_norm"] > 0 for row in numbers(alone))
    assert all(row.get("skipped_rows", 0) == 0 for row in numbers(alone))
    for one, two in zip(numbers(alone), numbers(out / name), strict=True):
        helpers.assert_same_step(one, two)
    one, two = evaluation(alone), evaluation(out / name)
    pairs = [(one, two), *zip(one.pop("evaluations"), two.pop("evaluations"), strict=True)]
    for alone_found, found in pairs:
        assert found == pytest.approx(alone_found, rel=1e-3, abs=0.06)


def test_two_ranks_evaluate_several_tasks(two_ranks, on_one_rank, start):
    out, _ = two_ranks
    require(out, "evaluate")
    parts, printed = f"{out}/parts.py:task", (out / "evaluate.printed").read_text()
    assert "helpers:few_digits: accuracy" in printed and f"{parts}: accuracy" in printed
    alone = on_one_rank("evaluate", "--model", start, "--task", "helpers:few_digits", *SMALL)
    assert responses(out / "evaluate")[:20] == responses(alone)
    found = evaluation(out / "evaluate")["tasks"]
    assert found["helpers:few_digits"] == evaluation(alone)["tasks"]["helpers:few_digits"]
    zeros = sum(row["answer"] == "0" for row in helpers.few_digits().heldout[:20])
    assert 0 < zeros < 20
    assert found[parts]["accuracy"] == 0.5  # over the responses that were scored
    assert found[parts]["pass@1"] == 1
    assert found[parts]["unscored"] == 5 * zeros


def test_ranks_that_share_rows_evaluate_each_row_once(two_ranks, on_one_rank, start):
    out, _ = two_ranks
    require(out, "evaluate_ulysses")
    alone = on_one_rank("evaluate", "--model", start, "--task", "helpers:few_digits", *SMALL)
    assert responses(out / "evaluate_ulysses") == responses(alone)
    assert evaluation(out / "evaluate_ulysses")["tasks"] == evaluation(alone)["tasks"]


@pytest.mark.parametrize("name", SAVED)
def test_a_replay_on_two_ranks_has_every_row_once(two_ranks, name):
    out, _ = two_ranks
    require(out, f"replayed/{name}")
    found = json.loads((out / f"replayed_{name}.json").read_text())
    assert found["rows"] == found["responses"] == [[prompt, number] for prompt in range(8) for number in range(4)]
    assert found["compared"]["grad_norm"] and not found["differ"]


def test_ranks_with_the_same_rows_have_the_same_responses(two_ranks):
    """The first one's, or each a share of them: [rank that answered, of so many requests], and the request's own."""
    out, _ = two_ranks
    require(out, "responses")
    first = [[[10, 3], i, i] for i in (0, 0, 1, 1, 2, 2)]
    shared = [[[10 + i % 2, 2 - i % 2], i, i] for i in (0, 0, 1, 1, 2, 2)]
    assert json.loads((out / "responses.json").read_text()) == [[first, first], [shared, shared]]


def test_a_rank_that_starts_late_joins_the_run(two_ranks):
    """It finds the directory that the first one already writes to, and took it for a run of before."""
    out, _ = two_ranks
    require(out, "late")
    assert json.loads((out / "late.json").read_text()) == ["late", "late"]


def test_both_ranks_are_refused_what_the_first_is(two_ranks):
    out, _ = two_ranks
    require(out, "refused")
    error = f"out {str(out / 'out0')!r}: expected a directory, got a file"
    assert json.loads((out / "refused.json").read_text()) == [error] * 2


@pytest.mark.parametrize("rows_of", ["both", "the first"])
def test_responses_of_all_ranks_are_measured(two_ranks, rows_of):
    """Against loops over all of them; `tests/runs/test_sampling.py` has it on one rank."""
    out, _ = two_ranks
    require(out, "measured")
    found, right = json.loads((out / "measured.json").read_text())[rows_of == "the first"], expected()
    assert len(found) == 2
    for of_a_rank in found:
        assert of_a_rank["metrics"] == pytest.approx(right["metrics"])
        assert of_a_rank["accuracy"] == pytest.approx(right["accuracy"]) and of_a_rank["stops"] == right["stops"]
