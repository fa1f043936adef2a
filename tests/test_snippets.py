"""The Python blocks of the pages on tasks and environments, each run as it stands, in an empty directory."""

import json
import re
import sys
from pathlib import Path

import datasets
import pytest

from rlkit.engines.value_head import load_value_model
from rlkit.rewards.sandbox import SandboxError, check_isolation
from rlkit.vlm import load_processor

ROOT = Path(__file__).parents[1]
FIXTURES = ROOT / "tests" / "data" / "fixtures"
HUB = {"openai/gsm8k": "gsm8k", "DigitalLearningGmbH/MATH-lighteval": "math"}


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


TASKS = [block for page in ("tasks.md", "formats.md", "prompts.md", "rewards.md", "rows.md") for block in blocks(page)]


def title(block):
    return re.search(r"from rlkit.*? import (.*)|$", block)[1] or "nothing"


@pytest.fixture
def folder(tmp_path, monkeypatch, tiny_dir):
    """An empty directory, small copies of the hub's data sets, and the export of a reward model."""
    load = datasets.load_dataset
    monkeypatch.setattr(
        datasets, "load_dataset", lambda source, *rest, **how: load(str(FIXTURES / HUB[source]), *rest, **how)
    )
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    before = [*sys.path], {*sys.modules}
    yield work
    sys.path[:] = before[0]
    for name in {*sys.modules} - before[1]:
        if name.startswith("my_"):
            del sys.modules[name]


@pytest.mark.parametrize("block", TASKS, ids=title)
def test_tasks(block, folder, tiny_dir):
    if "reward_model-digits" in block:
        export = folder / re.search(r'"(runs/[^"]*)"', block)[1]
        load_value_model(tiny_dir).save_pretrained(export)
        load_processor(tiny_dir).save_pretrained(export)
    if "all_tests_passed" in block:
        try:
            check_isolation()
        except SandboxError as error:
            pytest.skip(str(error))
    names = {}
    exec(block, names)
    if "rewards" in names:
        assert names["rewards"].isfinite().all() and len(names["rewards"]) in (2, 8)


def test_the_programs_of_the_page(folder, capsys):
    try:
        check_isolation()
    except SandboxError as error:
        pytest.skip(str(error))
    (block,) = (code for code in TASKS if "all_tests_passed" in code)
    names = {}
    exec(block, names)
    assert capsys.readouterr().out.split() == re.findall(r"# (\d\.\d)$", block, re.M) == ["1.0", "0.0"]
    from rlkit.data import load_task

    (folder / "programs.jsonl").write_text(json.dumps(names["row"]) + "\n")
    task = load_task("programs.jsonl", reward="rlkit.rewards:all_tests_passed")
    assert task.reward("Here:\n```python\ndef double(x):\n    return x + x\n```", [*task.train, *task.heldout][0]) == 1


def test_the_judge_of_the_page(folder, monkeypatch):
    """A server on the loopback gives 7 of 10 points to a response, and then forgets the score."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "rewards")
    from test_judge import Server

    from rlkit.rewards import reward_named

    (block,) = (code for code in TASKS if "chat_judge" in code)
    with Server(lambda i, body: (200, "Score: 7" if i == 0 else "It is fine.")) as server:
        (folder / "my_judge.py").write_text(block.replace("http://127.0.0.1:9000/v1", server.url))
        grade = reward_named("my_judge.py:grade")
        row = {"question": "What is 2 + 2?", "answer": "4"}
        assert grade("It is 4.", row) == grade("It is 4.", row) == 0.7 and len(server.seen) == 1
        assert "Right answer: 4\nResponse to grade: It is 4.\n" in server.seen[0]["messages"][0]["content"]
        assert grade("It is 5.", row) is None


def test_the_choices_of_the_page(folder, capsys):
    (block,) = (code for code in TASKS if "with_heldout" in code)
    exec(block, {})
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(
        "30 10 [{'role': 'system', 'content': 'You are a calculator.'}, {'role': 'user', 'content': "
    )
    assert first.endswith("+ 2?\\nEnd with \\\\boxed{...}.'}]") and last == "1.0"


def test_the_task_of_the_page(folder):
    from rlkit.data import load_task

    (own,) = (code for code in TASKS if "def roman" in code)
    assert len(own.replace("\n\n\n", "\n").strip().splitlines()) <= 32
    (folder / "my_tasks.py").write_text(own)
    roman = load_task("my_tasks.py:roman")
    responses = {row["question"]: row["answer"] for row in [*roman.train, *roman.heldout]}
    assert len(responses) == 999 and (len(roman.train), len(roman.heldout)) == (799, 200)
    known = {"CMXCIX": "999", "XIV": "14", "CDXLIV": "444", "DCCCLXXXVIII": "888"}
    assert all(responses[f"What number is {written}?"] == number for written, number in known.items())
    assert [roman.reward(text, roman.train[0]) for text in (roman.train[0]["answer"], "0")] == [1, 0]


def test_the_game_of_the_page(folder, capsys):
    game, play = blocks("environments.md")
    assert len([line for line in game.splitlines() if line.strip()]) <= 24
    (folder / "my_game.py").write_text(game)
    names = {}
    exec(play, names)
    rewards = names["rewards"]
    assert rewards.isfinite().all() and rewards.min() >= 1 / 7  # seven guesses are enough for a hundred numbers
    guesses = [episode.row["state"]["guesses"] for episode in names["episodes"]]
    assert rewards.tolist() == pytest.approx([1 / n for n in guesses]) and len(set(guesses)) > 2
    said = capsys.readouterr().out.splitlines()
    assert said[1].strip().startswith("user: I think of a number") and said[2].strip() == "assistant: 50"
    assert said[3].strip() in ("user: higher", "user: lower")


def test_every_task_of_the_page_is_there():
    from rlkit.data.loading import BUILT_IN
    from rlkit.data.published_tasks import PUBLISHED_TASKS

    page = (ROOT / "docs" / "tasks.md").read_text()
    assert set(BUILT_IN) | set(PUBLISHED_TASKS) == set(
        re.findall(r"`(\w+)`", page.split("gsm8k@")[0].split("|---|---|")[1])
    )


def test_every_reward_of_the_page_is_there():
    from rlkit.rewards.named import REWARDS

    table = (ROOT / "docs" / "rewards.md").read_text().partition("| reward |")[2].partition("\n\n")[0]
    assert list(REWARDS) == re.findall(r"^\| `(\w+)` \|", table, re.M)
