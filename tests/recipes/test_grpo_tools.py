"""`recipes/grpo_tools.py`: episodes of several turns with an image tool, as a person runs it."""

import functools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import helpers  # noqa: E402
from helpers import load, numbers, rows, run_here, text_dir  # noqa: E402, F401

from rlkit.data.messages import message  # noqa: E402
from rlkit.engines.distributed import init_distributed  # noqa: E402
from rlkit.replay.__main__ import main as replay  # noqa: E402
from rlkit.rollout import Observation, Sampling, run_episodes  # noqa: E402
from rlkit.rollout.agent import ScriptedRollout  # noqa: E402
from rlkit.rollout.image_tools import zoom, zoomed_digits  # noqa: E402
from rlkit.runs import Responses, start  # noqa: E402
from rlkit.runs.tiny_tool_user import build_tiny_tool_user  # noqa: E402
from rlkit.vlm import encode_prompt, load_processor  # noqa: E402

HELD_OUT = 100
canvases = functools.cache(zoomed_digits)
FEWER = ["--prompts_per_step", 24]
SMALL = ["--task", "test_grpo_tools:fewer_held_out", "--prompts_per_step", 8, "--group_size", 4]


def few_held_out():
    """The default task; a run names it "test_grpo_tools:few_held_out"."""
    task = canvases()
    return replace(task, heldout=task.heldout[:HELD_OUT])


def fewer_held_out():
    """For runs of a few steps, most of whose time would be spent on held-out rows."""
    task = canvases()
    return replace(task, heldout=task.heldout[:20])


async def shaky(sample):
    if sample.row["answer"] in "12345":
        raise RuntimeError("the camera is down")
    return await zoom(sample)


def test_the_plan_of_a_run_does_not_go_by_its_rows(tmp_path, monkeypatch):
    """They may have no images where a tool returns some."""
    planned_with = []

    def planned(cfg, out, rows):
        planned_with.append(list(rows))
        raise KeyboardInterrupt

    monkeypatch.setattr(start, "planned_memory", planned)
    with pytest.raises(KeyboardInterrupt):
        run_here("grpo_tools", *SMALL, "--out", tmp_path / "run")
    assert planned_with == [[]]


@pytest.fixture(scope="module")
def warm_dir(tmp_path_factory):
    """The default model after the recipe's warm-up, on a part of its rows."""
    recipe = load("grpo_tools")
    init_distributed()
    path = tmp_path_factory.mktemp("warm") / "init"
    cfg = recipe.Config()
    build_tiny_tool_user(path, few_held_out().train[:400], zoom, max_new_tokens=cfg.max_new_tokens, seed=cfg.seed)
    return path


def run(warm_dir, out, *arguments):
    run_here("grpo_tools", "--model", warm_dir, "--out", out, *arguments)
    return rows(out), json.loads((out / "eval.json").read_text())


def has_learned(metrics, evaluation):
    rewards = [row["reward/mean"] for row in metrics]
    quarter = len(rewards) // 4
    rose = np.mean(rewards[-quarter:]) > np.mean(rewards[:quarter]) + 0.2
    return rose and evaluation["accuracy_after"] > evaluation["accuracy_before"] + 0.2


def test_learns_where_to_zoom(warm_dir, tmp_path):
    """What was sampled over two turns and two images is what is trained on."""
    # seen: held-out accuracy 0.44 -> 0.85 with AVX-512, 0.28 -> 0.83 with ATEN_CPU_CAPABILITY=avx2, 0.44 -> 0.83 with
    # ATEN_CPU_CAPABILITY=default
    metrics, evaluation = run(
        warm_dir, tmp_path / "run", "--task", "test_grpo_tools:few_held_out", *FEWER, "--steps", 20
    )
    assert has_learned(metrics, evaluation), (evaluation, [row["reward/mean"] for row in metrics])
    assert max(row["mismatch/abs_dlogp"] for row in metrics) < 1e-5
    assert all(1 < row["turns"] <= 2 and row["aborted"] == row["unscored"] == 0 for row in metrics)
    assert np.mean([row["turns"] for row in metrics]) > 1.5
    page = (tmp_path / "run" / "report.html").read_text()
    assert "zoom(" in page and " | [image] | " in page
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_does_not_learn_without_a_learning_rate(warm_dir, tmp_path):
    metrics, evaluation = run(warm_dir, tmp_path / "run", "--steps", 4, "--lr", 0, *SMALL)
    assert not has_learned(metrics, evaluation) and evaluation["accuracy_after"] == evaluation["accuracy_before"]


def test_resume_is_exact(warm_dir, tmp_path):
    options = ["--steps", 4, "--save_every", 2, *SMALL]
    _, evaluation = run(warm_dir, tmp_path / "whole", *options)
    helpers.stop_after(3, "grpo_tools", "--model", warm_dir, "--out", tmp_path / "stopped", *options)
    _, again = run(warm_dir, tmp_path / "stopped", *options, "--resume")
    assert numbers(tmp_path / "stopped") == numbers(tmp_path / "whole") and again == evaluation


def test_a_failing_tool_is_left_out_or_shown(warm_dir, tmp_path, capsys):
    options = ["--steps", 1, *SMALL, "--tool", "test_grpo_tools:shaky", "--max_failed_rewards", 0.99]
    (left_out,), evaluation = run(warm_dir, tmp_path / "out", *options, "--save_rollouts")
    assert 0 < left_out["aborted"] == left_out["unscored"] < 32 and evaluation["heldout"] == 20
    with pytest.raises(SystemExit) as end:  # the step again, with the saved episodes
        replay([str(tmp_path / "out" / "rollouts" / "step_0")])
    said = capsys.readouterr().out
    assert end.value.code == 0 and "\ngrad_norm " in said and said.endswith("nothing differs\n")
    (shown,), _ = run(warm_dir, tmp_path / "shown", *options, "--show_failures")
    assert shown["aborted"] == shown["unscored"] == 0


def test_the_game_of_the_page(text_dir, tmp_path, monkeypatch):  # noqa: F811
    """The environment of docs/environments.md, of several turns and without images, from a file in this directory."""
    game, _ = re.findall(r"```python\n(.*?)```", (HERE.parents[1] / "docs" / "environments.md").read_text(), re.DOTALL)
    (tmp_path / "my_game.py").write_text(game)
    monkeypatch.chdir(tmp_path)
    run_here(
        "grpo_tools", *SMALL, "--model", text_dir, "--task", "my_game.py:numbers", "--tool", "my_game.py:guess",
        "--out", "run", "--steps", 1, "--max_turns", 3, "--max_new_tokens", 4,
    )  # fmt: skip
    (row,) = rows(tmp_path / "run")
    assert 1 <= row["turns"] <= 3 and row["unscored"] == row["aborted"] == 0


def test_turns_of_the_prompt_are_not_those_of_the_episode(text_dir):  # noqa: F811
    """The prompt is itself a chat of several turns."""
    recipe, processor = load("grpo_tools"), load_processor(str(text_dir))
    chat = [message(role, text) for role, text in (("user", "1?"), ("assistant", "2"), ("user", "3?"))]
    written = iter(["higher", "five"])
    rollout = ScriptedRollout(processor, lambda sample: next(written))
    samples = run_episodes(
        rollout,
        [encode_prompt(processor, {"messages": chat})],
        Sampling(8),
        lambda sample: Observation("no") if sample.text == "higher" else None,
        processor=processor,
    )
    responses = Responses([replace(sample, reward=1.0) for sample in samples], torch.ones(1))
    engine = SimpleNamespace(global_sum=lambda x: x)
    assert recipe.transcript(samples[0]) == "higher | no | five"
    assert recipe.turns_and_aborted(responses, engine) == {"turns": 2, "aborted": 0}


def test_episodes_are_as_long_as_the_samplers_context():
    recipe, text = load("grpo_tools"), SimpleNamespace(max_position_embeddings=64)
    engine = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text), global_sum=None)
    for rollout, longest in ((SimpleNamespace(), 64), (SimpleNamespace(max_model_len=48), 48)):
        assert recipe.episodes(recipe.Config(), rollout, None, None, engine).keywords["max_tokens"] == longest


def test_bad_input_is_one_clear_message(warm_dir, tmp_path):
    cases = {
        ("--tool", "test_grpo_tools:crop"): "grpo_tools: tool '.*:crop': expected a function of test_grpo_tools",
        ("--model", "tiny"): 'grpo_tools: model: expected a model that can use this task and tool, got "tiny"',
        ("--max_new_tokens", 12, "--max_response_tokens", 8): "max_response_tokens: expected at least 12, got 8",
        ("--tool", "test_grpo_tools:shaky", "--max_failed_rewards", 0.1): "held-out responses: expected at least 90%",
    }
    for i, (arguments, text) in enumerate(cases.items()):
        with pytest.raises(SystemExit, match=text):
            run(warm_dir, tmp_path / str(i), "--steps", 1, *SMALL, *arguments)


def test_help_names_every_option(capsys):
    helpers.assert_help_names_every_option("grpo_tools", capsys)
