import json
import math
import multiprocessing
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from waiting import is_running, until

from rlkit.data import prompt_sample
from rlkit.rewards import maths, score
from rlkit.rewards.maths import final_answer, maths_reward, same_answer
from rlkit.rewards.workers import WorkerPool, end_worker

TABLE = [json.loads(line) for line in Path(__file__).with_name("maths_answers.jsonl").read_text().splitlines()]
HANGS = "9^{9^{9^{9}}}"  # sympy works it out


def test_answers_of_the_table():
    """Every verdict was written by hand; where ours is another one, the row says why."""
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda row: maths_reward(row["text"], {"answer": row["gold"]}), TABLE))
    other = [(row, value) for row, value in zip(TABLE, found, strict=True) if value != row["verdict"]]
    assert [row for row, _ in other] == [row for row in TABLE if "deviates" in row], other
    assert len(TABLE) >= 500 and sum(row["verdict"] for row in TABLE) >= 200 and len(other) <= 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"a \boxed{1} b \boxed{\frac{1}{2}} c", (r"\frac{1}{2}", True, False)),
        (r"\boxed{\{1, 2\}} and more", (r"\{1, 2\}", True, False)),
        (r"\boxed{1} then \boxed{2", None),
        (r"\boxed{1}</think> the answer is **5**, so", ("5**, so", False, True)),
        (r"&= \boxed9. \end{align*}", ("9", True, False)),
        (r"is $\boxed\frac{1}{2}$ in the end of 5 steps.", (r"\frac{1}{2}", True, False)),
        (r"is $\boxed 4$, since $4<7$.", ("4", True, False)),
        (r"$\boxed 12\pi$", (r"$\boxed 12\pi$", False, False)),
        (r"$\boxed 5^2$", (r"$\boxed 5^2$", False, False)),
        (r"is $\boxed -1,234.5$.", ("-1,234.5", True, False)),
        (r"is $\boxed -3/2$.", ("-3/2", True, False)),
        (r"is $\boxed B$.", ("B", True, False)),
        ("Put it in \\boxed a line. The answer is: 7", ("7", False, True)),
        ("Write it in \\boxed. The answer is: 7", ("7", False, True)),
        ("The answer is: 7\nbecause", ("7", False, True)),
        ("answer: 6. No, answer: 7", ("7", False, True)),
        ("3 * 4 = 12\n#### 12\n", ("12", False, True)),
        ("**Answer**: 6\nin 3 rows", ("6", False, True)),
        ("### Answer\n\n**6**\nin 3 rows", ("6", False, True)),
        ("### Answer\nIn 3 rows\nthere are 6", ("there are 6", False, False)),
        ("### Answer\n6\n\n$7$", ("$7$", False, False)),
        ("**Answer:**\n> 6\n> in 3 rows", ("6", False, True)),
        ("Answer: > 6\n> 7", ("> 6", False, True)),
        ("The correct option is B.", ("The correct option is B.", False, False)),
        ("one\n\ntwo \n", ("two", False, False)),
        ("one\n**\n", ("one", False, False)),
        ("The answer is\n```text\n`42`\n```\nas shown", ("42", False, True)),
        ("The answer is:\n\n\\[\n42\n\\]\nas shown", ("\\[ 42 \\]", False, True)),
        ("one\n$$\nx = 40 + 2 \\\\\n\n= 42\n$$\n", ("$$ x = 40 + 2 \\\\ = 42 $$", False, False)),
        (
            "So \\begin{align*}\nx &= 42\n\\end{align*}.\n$$y$$\n",
            ("$$y$$", False, False),
        ),
        ("\\[ x\n\\begin{cases}\n1\n\\end{cases} \\]\ntwo", ("two", False, False)),
        ("one \\[\n42", ("one \\[ 42", False, False)),
        ("the answer:", None),
        (" \n", None),
    ],
)
def test_final_answer(text, expected):
    assert final_answer(text) == expected


def test_unreadable_gold_is_not_scored():
    assert maths_reward(r"\boxed{\foo{3} \bar}", {"answer": r"\foo{3} \bar"}) == 1.0
    assert maths_reward(r"\boxed{3}", {"answer": r"\frac{}{\sqrt{"}) is None
    for row in ({}, {"answer": None}, {"answer": " "}):
        with pytest.raises(ValueError, match="file row 3: answer: expected text or a number"):
            maths_reward("1", {**row, "where": "file row 3"})


def test_one_of_several_answers_is_enough():
    for text, reward in ((r"\boxed{0.5}", 1.0), (r"\boxed{3}", 1.0), (r"\boxed{4}", 0.0), (r"\boxed{1/2, 3}", 0.0)):
        assert maths_reward(text, {"answer": [r"\frac{1}{2}", "3"]}) == reward, text
    assert maths_reward(r"\boxed{4}", {"answer": ["3", r"\frac{}{\sqrt{"]}) is None  # one cannot be read
    for answer in ([], ["3", " "]):
        with pytest.raises(ValueError, match="answer: expected text or a number"):
            maths_reward("3", {"answer": answer})


def scored_in_a_thread(hangs: str, seconds: float) -> list[float | None]:
    maths.SECONDS = seconds
    with ThreadPoolExecutor(3) as pool:
        texts = [r"\boxed{\frac{2}{4}}", rf"\boxed{{{hangs}}}", r"\boxed{3}", "0.5"]
        return list(pool.map(lambda text: maths_reward(text, {"answer": "1/2"}), texts))


def test_reward_timeout_off_main_thread(monkeypatch):
    """In a thread: right and wrong answers are scored, and one that never ends is none of both."""
    monkeypatch.setattr(maths, "SECONDS", maths.SECONDS)
    assert threading.current_thread() is threading.main_thread()
    assert scored_in_a_thread(HANGS, 1.0) == [1.0, None, 0.0, 1.0]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_reward_timeout_in_another_process(method):
    """Forked from a process with threads and workers of its own, or started anew; the parent's workers live on."""
    assert same_answer("0.5", "1/2") is True
    before = [worker.pid for worker in maths._POOL.idle]
    held = [maths._POOL.slots.acquire(blocking=False) for _ in os.sched_getaffinity(0)]  # as by threads of the parent
    with multiprocessing.get_context(method).Pool(1) as pool:
        found = pool.apply_async(scored_in_a_thread, (HANGS, 1.0)).get(timeout=100)
    assert found == [1.0, None, 0.0, 1.0] and maths._POOL.slots.release(len(held)) is None
    assert same_answer("0.5", "1/2") is True and [worker.pid for worker in maths._POOL.idle] == before


def test_a_time_out_costs_one_worker_and_leaves_nothing_behind():
    assert same_answer("2", "2") is True
    for worker in maths._POOL.idle[1:]:
        end_worker(worker)
    del maths._POOL.idle[1:]
    (first,) = maths._POOL.idle
    assert same_answer(HANGS, "2", seconds=0.5) is None
    assert first.returncode == -9 and maths._POOL.idle == []
    assert same_answer("2", "2") is True and maths._POOL.idle[0].pid != first.pid
    with pytest.raises(ChildProcessError):  # reaped
        os.waitpid(first.pid, os.WNOHANG)


def test_a_worker_that_dies_is_not_a_zero(tmp_path, monkeypatch):
    """While it waits: another one answers. While it works, or from the start: not scored."""
    assert same_answer("2", "2") is True
    os.kill(maths._POOL.idle[-1].pid, 9)
    os.waitid(os.P_PID, maths._POOL.idle[-1].pid, os.WEXITED | os.WNOWAIT)
    assert same_answer("3", "2") is False
    monkeypatch.setattr(maths, "_POOL", WorkerPool(lambda: maths._start()))
    script = tmp_path / "worker.py"
    script.write_text("print('ready', flush=True); input()")
    monkeypatch.setattr(maths, "WORKER", str(script))
    assert maths_reward("3", {"answer": "2"}) is None
    script.write_text("raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="a worker did not start, exit code 3"):
        maths_reward("3", {"answer": "2"})


def test_reward_failure_is_not_zero(monkeypatch):
    """What `score` makes of it."""
    samples = [prompt_sample([1])] * 0
    for text in (r"\boxed{2}", rf"\boxed{{{HANGS}}}", r"\boxed{3}"):
        sample = prompt_sample([1], row={"answer": "2"}, text=text)
        samples.append(sample)
    monkeypatch.setattr(maths, "SECONDS", 0.5)
    rewards = score(maths_reward, samples)
    assert rewards[0] == 1 and math.isnan(rewards[1]) and rewards[2] == 0 and rewards.dtype == torch.float32


def test_without_math_verify_it_says_so(monkeypatch):
    monkeypatch.setattr(maths, "_POOL", WorkerPool(lambda: maths._start()))
    monkeypatch.setattr(maths.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"^package math_verify: .* pip install -e '\.\[rewards\]'$"):
        maths_reward("1", {"answer": "1"})


def test_workers_end_with_their_process_and_import_no_torch(tmp_path):
    """Also when it is killed, with one worker at work and one at rest."""
    code = f"""
import os, sys, threading
from rlkit.rewards import maths
maths.same_answer("1", "1")
idle = maths._POOL.idle.pop()
busy = maths._start()
maths._POOL.idle.append(busy)
threading.Thread(target=maths.same_answer, args=({HANGS!r}, "1"), kwargs=dict(seconds=0.5), daemon=True).start()
maps = open(f"/proc/{{idle.pid}}/maps").read()
print(idle.pid, busy.pid, "torch" in maps, flush=True)
os.kill(os.getpid(), 9)
"""
    root = str(Path(maths.__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env)
    *pids, torch_there = done.stdout.split()
    assert torch_there == "False", done.stderr
    for pid in map(int, pids):
        until(lambda: not is_running(pid))  # noqa: B023
