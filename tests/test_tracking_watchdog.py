"""The watchdog on two real ranks that wait for each other, and the sentence it says."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from waiting import until

from rlkit.tracking import PHASES, Run, describe_waits, read_metrics

HERE = Path(__file__).parent


class Ranks(NamedTuple):
    out: Path  # the directory of their run
    seconds: float  # that rank 1 had scored, when `early` was read
    early: str  # what rank 0 had written to its standard error by then
    errors: list[str]  # what either wrote in the end


WAITS = "rank 1 in reward for ", "rank 0 in train for "
STUCK = "rank 0 in reward for ", "rank 1 in train for "


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Two ranks that wait for each other; rank 1 is asked for its stacks. Each goes on when the other has said so."""
    folder = tmp_path_factory.mktemp("ranks")
    os.mkfifo(folder / "pipe")
    errors = [folder / f"error{rank}" for rank in range(2)]
    processes = []
    for rank in range(2):
        path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "PYTHONPATH": path}
        with errors[rank].open("w") as error:
            command = [sys.executable, str(HERE / "on_watched_ranks.py"), str(folder)]
            processes.append(subprocess.Popen(command, env=env, stderr=error))
    try:
        until(lambda: len(reports(errors[0].read_text(), WAITS)) >= 2 or processes[0].poll() is not None)
        since, process_id, *_ = (folder / "run" / PHASES / "1").read_text().split()
        os.kill(int(process_id), signal.SIGUSR1)
        until(lambda: "in judge_slowly" in errors[1].read_text())
        time.sleep(max(0.0, float(since) + 1.4 - time.time()))  # long enough to see reports that are too frequent
        early = errors[0].read_text()
        seconds = time.time() - float(since)
        (folder / "scored").touch()
        until(lambda: reports(errors[1].read_text(), STUCK))
        (folder / "pipe").write_bytes(b"1")
        assert [process.wait(100) for process in processes] == [0, 0]  # it stops nobody
    finally:
        for process in processes:
            process.kill()
    return Ranks(folder / "run", seconds, early, [error.read_text() for error in errors])


def reports(text, parts):
    return [line for line in text.splitlines() if line.startswith("watchdog: ") and all(part in line for part in parts)]


def test_says_which_rank_waits_in_which_phase(ranks):
    found = reports(ranks.early, WAITS)
    assert 2 <= len(found) <= ranks.seconds / 0.4 and "kill -USR1 prints the stacks" in found[0]


def test_another_rank_says_it_where_rank_0_cannot(ranks):
    """A call into C that does not end, as a regular expression's, silences the threads of its process."""
    assert reports(ranks.errors[1], STUCK)


def test_stacks_on_request(ranks):
    assert "in judge_slowly" in ranks.errors[1]


def test_leaves_no_files_and_the_seconds_of_each_phase(ranks):
    (row,) = read_metrics(ranks.out / "metrics.jsonl")
    assert row["time/reward"] > 0.4 and row["time/train"] > 0.8 and not (ranks.out / PHASES).exists()


def test_the_phase_with_the_fewest_ranks_comes_first():
    waits = [(63.0, 0, "train"), (65.4, 1, "reward"), (62.0, 3, "train"), (64.0, 2, "train")]
    assert describe_waits(waits) == "rank 1 in reward for 65 s; ranks 0, 2, 3 in train for 64 s"


def test_a_run_that_is_gone_is_not_watched(tmp_path, capfd):
    others = set(threading.enumerate())
    run = Run(tmp_path, {}, watchdog=0.2)
    run.phase("reward")
    (thread,) = (one for one in set(threading.enumerate()) - others if one.name == "watchdog")
    until(lambda: "watchdog: rank 0 in reward for " in capfd.readouterr().err)
    del run  # never closed: it ended in an error
    thread.join(100)
    assert not thread.is_alive()
