"""A reward that hangs, crashes or takes everything costs one response, where it runs in worker processes."""

import math
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from waiting import until

from rlkit import runs
from rlkit.data import prompt_sample
from rlkit.rewards import combine, isolated, sandboxed, score, score_parts
from rlkit.rewards.named import REWARDS, reward_named
from rlkit.rewards.sandbox import SandboxError, check_isolation
from rlkit.runs.options import RewardOptions, TaskOptions

sys.path.insert(0, str(Path(__file__).parent))
import misbehaving_rewards

ROW = {"question": "?", "answer": "7", "where": "row 3"}


@pytest.fixture(scope="module")
def reward():
    reward = isolated(misbehaving_rewards.on_ill_text, seconds=1.0, memory=128 << 20)
    yield reward
    assert len(reward.pool.idle) <= len(os.sched_getaffinity(0))


NOT_JUDGED = {
    "loop": "TimeoutError: .*within 1 s, got none",
    "sleep": "TimeoutError",
    "exit": "got the end of its process, code 7",
    "sys.exit": "SystemExit: by mistake",
    "segfault": "got the end of its process, code -11",
    "abort": "got the end of its process, code -6",
    "fork and hang": "got the end of its process, code 1",
    "memory": "MemoryError",
    "memory in pieces": "MemoryError",
    "raise": r"KeyError: 'mine' \(misbehaving_rewards.py, line \d+\)",
    "interrupt": "KeyboardInterrupt",
    "recursion": "RecursionError",
    "text": "ValueError: could not convert string to float: 'high'",
    "none": "a reward of None",
    "close": "got the end of its process",
}
JUDGED = {"7": 1.0, "8": 0.0, "output": 0.0, "input": 0.0, "fork": 0.0}


@pytest.mark.parametrize("text", NOT_JUDGED)
def test_it_costs_one_response(text, reward, caplog):
    samples = [prompt_sample([1], text=one, row=ROW) for one in ("7", text, "8", "7")]
    start = time.monotonic()
    rewards = score(reward, samples)
    assert math.isnan(rewards[1]) and rewards[[0, 2, 3]].tolist() == [1, 0, 1]
    assert time.monotonic() - start < 60

    assert text == "none" or re.search(NOT_JUDGED[text], caplog.text), caplog.text


def test_what_one_response_keeps_takes_no_memory_from_the_next(reward):
    with pytest.raises(RuntimeError, match="MemoryError"):
        reward("memory in pieces", ROW)
    assert reward("64 MB", ROW) == 0.0


@pytest.mark.parametrize("text", JUDGED)
def test_what_does_no_harm_is_scored(text, reward, capfd):
    assert [reward(text, ROW) for _ in range(3)] == [JUDGED[text]] * 3
    assert capfd.readouterr() == ("", "")


def started_by(folder):
    """Ids of processes with this folder in their environment."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get("STARTED_BY") == str(folder):
                found.add(process.pid)
        except psutil.Error:  # another user's, or one that ends meanwhile
            pass
    return found


def test_nothing_is_left_running(reward, monkeypatch, tmp_path):
    """Children of a worker are killed with it."""
    monkeypatch.setenv("STARTED_BY", str(tmp_path))  # other tests, in other processes, have workers of their own
    for text in ("exit", "fork and hang", "sleep", "7"):  # the first one ends a worker without the variable
        try:
            reward(text, ROW)
        except (TimeoutError, RuntimeError):
            pass
    idle = {worker.pid for worker in reward.pool.idle}
    assert idle & started_by(tmp_path)
    until(lambda: started_by(tmp_path) <= idle)


def test_from_several_threads():
    reward = isolated(misbehaving_rewards.with_the_process_id)
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: reward("x", ROW), range(20)))
    assert os.getpid() not in found and 1 <= len(found) <= len(os.sched_getaffinity(0))


def test_parts_are_isolated_each(caplog):
    parts = {"a": (1.0, misbehaving_rewards.well), "b": (0.5, misbehaving_rewards.on_ill_text)}
    reward = isolated(combine(parts), seconds=0.4)
    rewards, found = score_parts(reward, [prompt_sample([1], text=text, row=ROW) for text in ("7", "exit")])
    assert rewards[0] == 1.5 and rewards[1].isnan() and found["a"].tolist() == [1.0, 0.0]


def test_a_reward_that_cannot_be_sent_is_named():
    with pytest.raises(ValueError, match="isolate_reward: expected a function of a module, which a worker can import"):
        isolated(lambda text, row: 1.0)


def test_a_reward_that_cannot_be_imported_is_named(monkeypatch):
    monkeypatch.setattr(misbehaving_rewards.well, "__module__", "gone", raising=False)
    monkeypatch.setitem(sys.modules, "gone", misbehaving_rewards)
    with pytest.raises(ValueError, match="that a worker can import, got: ModuleNotFoundError: No module named 'gone'"):
        isolated(misbehaving_rewards.well)


# --- rewards that execute the response


@pytest.fixture(scope="module")
def executing():
    try:
        check_isolation()
    except SandboxError as error:
        pytest.skip(str(error))
    return sandboxed(misbehaving_rewards.executing, seconds=0.5, memory=128 << 20)


@pytest.mark.parametrize(
    "text",
    [
        "9**9**9**9",
        "while True: pass",
        "try:\n    while True: pass\nexcept BaseException:\n    while True: pass",
        "import time; time.sleep(1000)",
        "import os; os._exit(0)",
        "exit()",
        "raise KeyboardInterrupt",
        "import os; os.kill(os.getpid(), 9)",
        "import ctypes; ctypes.string_at(0)",
        "x = bytearray(10 << 30)",
        "x = []\nwhile True: x.append(bytearray(64 << 20))",
        "import os; os.closerange(0, 64)",
        "reward = 2.0",
        "reward = -1.0",
        "reward = float('nan')",
    ],
)
def test_a_response_that_breaks_its_scoring_scores_0(executing, text):
    assert [executing(one, ROW) for one in (text, "reward = 0.25")] == [0.0, 0.25]


def test_a_response_changes_nothing_for_the_next_one(executing):
    executing("import builtins, json, sys; builtins.float = lambda x: 1.0; sys.modules.clear(); json.dumps = None", ROW)
    assert executing("reward = float('0.5')", ROW) == 0.5


def test_an_error_of_a_sandboxed_reward_is_named(executing):
    with pytest.raises(RuntimeError, match=r"reward executing: KeyError: 'none' \(<string>, line 1\)"):
        executing("row['none']", ROW)
    with pytest.raises(ValueError, match="sandboxed: expected a function of a module, which a worker can import"):
        sandboxed(lambda text, row: 1.0)


def test_a_sandboxed_reward_of_a_file(executing, tmp_path):
    (tmp_path / "my_evaluated.py").write_text(
        "from rlkit.rewards import sandboxed\n"
        "def evaluated(text, row):\n    return float(eval(text) == row['answer'])\n"
        "reward = sandboxed(evaluated)\n"
    )
    reward = reward_named(f"{tmp_path}/my_evaluated.py:reward")
    assert [reward(text, {"answer": 4}) for text in ("2 + 2", "2 + 3")] == [1.0, 0.0]
    with pytest.raises(RuntimeError, match="reward evaluated: PermissionError"):
        reward(f"open({str(tmp_path / 'made')!r}, 'w')", {"answer": 4})
    assert not (tmp_path / "made").exists()


def test_a_sandboxed_reward_imports_more_of_its_packages():
    """Modules that an imported package loads later, as sympy does."""
    reward = sandboxed(misbehaving_rewards.importing_later)
    assert reward("", ROW) == 1.0


def test_nothing_runs_where_the_machine_cannot_isolate(monkeypatch):
    def cannot():
        raise SandboxError("cannot isolate programs: expected Linux on x86-64, got darwin arm64")

    monkeypatch.setattr(sys.modules["rlkit.rewards.isolated"], "check_isolation", cannot)
    with pytest.raises(ValueError, match="sandboxed: cannot isolate programs: .* got darwin"):
        sandboxed(misbehaving_rewards.executing)


def test_a_sandboxed_reward_may_leave_a_response_without_one(executing):
    assert executing("reward = None", ROW) is None
    assert isolated(executing) is executing  # it has processes of its own


@pytest.mark.parametrize("name", REWARDS)
def test_rewards_by_name_can_be_isolated(name):
    row = {**ROW, "answer": "A"}
    assert isolated(REWARDS[name])(r"\boxed{A}" if name in ("maths", "boxed", "choice") else "A", row) == 1.0


@dataclass
class JudgedTaskOptions(RewardOptions, TaskOptions):
    """Options of a recipe that has responses scored."""


def test_the_option_of_a_run(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"question": "?", "answer": "7"}\n' * 3)
    reward = f"{misbehaving_rewards.__file__}:on_ill_text"
    cfg = JudgedTaskOptions(isolate_reward=True, reward_seconds=0.4, reward=reward)
    task = runs.load_named_task(cfg, str(tmp_path / "t.jsonl"))
    with pytest.raises(RuntimeError, match="code 7"):
        task.reward("exit", ROW)
    plain = runs.load_named_task(JudgedTaskOptions(reward=reward), str(tmp_path / "t.jsonl"))
    assert plain.reward is misbehaving_rewards.on_ill_text
