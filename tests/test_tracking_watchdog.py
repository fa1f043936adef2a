"""The watchdog on two real ranks that wait for each other, and the sentence it says."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rlkit.tracking import PHASES, Run, describe_waits, read_metrics

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two ranks wrote to their standard errors, and their run's directory; rank 1 was asked for its stacks."""
    folder = tmp_path_factory.mktemp("ranks")
    processes = []
    for rank in range(2):
        path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "PYTHONPATH": path, "MASTER_ADDR": "127.0.0.1"}
        env["MASTER_PORT"] = str(20000 + os.getpid() % 20000)
        with (folder / f"error{rank}").open("w") as error:
            command = [sys.executable, str(HERE / "on_watched_ranks.py"), str(folder / "run")]
            processes.append(subprocess.Popen(command, env=env, stderr=error))
    try:
        phase = folder / "run" / PHASES / "1"
        deadline = time.time() + 60
        while not (phase.exists() and phase.read_text().endswith(" reward")) and time.time() < deadline:
            time.sleep(0.02)
        time.sleep(0.2)
        os.kill(int(phase.read_text().split()[1]), signal.SIGUSR1)
        assert [process.wait(60) for process in processes] == [0, 0]  # it stops nobody
    finally:
        for process in processes:
            process.kill()
    return [(folder / f"error{rank}").read_text() for rank in range(2)], folder / "run"


def reports(text):
    return [line for line in text.splitlines() if line.startswith("watchdog: ")]


def test_says_which_rank_waits_in_which_phase(ranks):
    (first, _), _ = ranks
    found = [x for x in reports(first) if "rank 1 in reward for " in x and "rank 0 in train for " in x]
    assert 2 <= len(found) <= 4 and "kill -USR1 prints the stacks" in found[0]  # once in 0.4 of 1.4 seconds


def test_another_rank_says_it_where_rank_0_cannot(ranks):
    """A call into C that does not end, as a regular expression's, silences the threads of its process."""
    (_, second), _ = ranks
    assert any("rank 0 in reward for " in x and "rank 1 in train for " in x for x in reports(second))


def test_stacks_on_request(ranks):
    (_, second), _ = ranks
    assert "in judge_slowly" in second


def test_leaves_no_files_and_the_seconds_of_each_phase(ranks):
    _, out = ranks
    (row,) = read_metrics(out / "metrics.jsonl")
    assert row["time/reward"] > 0.4 and row["time/train"] > 1 and not (out / PHASES).exists()


def test_the_phase_with_the_fewest_ranks_comes_first():
    waits = [(63.0, 0, "train"), (65.4, 1, "reward"), (62.0, 3, "train"), (64.0, 2, "train")]
    assert describe_waits(waits) == "rank 1 in reward for 65 s; ranks 0, 2, 3 in train for 64 s"


def test_a_run_that_is_gone_is_not_watched(tmp_path, capfd):
    others = set(threading.enumerate())
    run = Run(tmp_path, {}, watchdog=0.2)
    run.phase("reward")
    (thread,) = set(threading.enumerate()) - others
    time.sleep(0.5)
    assert "watchdog: rank 0 in reward for " in capfd.readouterr().err
    del run  # never closed: it ended in an error
    thread.join(2)
    assert not thread.is_alive()
