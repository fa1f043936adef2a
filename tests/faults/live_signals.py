"""Complete runs that are ended from outside: signals under torchrun and in a weight sync, a rank killed or stopped.

`make faults` runs it.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlkit.tracking import PHASES, read_metrics

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
from helpers import RECIPES, environment, text_dir  # noqa: F401  (a fixture)

TORCHRUN = ["-m", "rlkit.runs.torchrun", "--standalone", "--nproc-per-node=2"]
ASYNC = ["--prompts_per_step", "4", "--group_size", "4", "--max_new_tokens", "8", "--isolate_reward"]


class Started:
    """A run in a process of its own, with everything that it prints in a file."""

    def __init__(self, log, recipe, out, *options, ranks=1):
        self.log, self.out = log, out
        command = [sys.executable, *(TORCHRUN if ranks > 1 else []), str(RECIPES / f"{recipe}.py"), "--out", str(out)]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*command, *map(str, options)],
                env=environment(),
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
        self.family = {}

    @property
    def said(self):
        return self.log.read_text()

    def phase(self, rank=0):
        """The process id of a rank, and the phase that it is in."""
        try:
            _, process, _, phase = (self.out / PHASES / str(rank)).read_text().split(" ", 3)
        except (FileNotFoundError, ValueError):
            return 0, ""
        return int(process), phase

    def waits_until(self, happened, seconds=600):
        deadline = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < deadline and self.process.poll() is None, self.said[-3000:]
            time.sleep(0.005)

    def trains(self, steps):
        """Waits until so many steps more are logged, and remembers the processes that the run has started."""
        metrics = self.out / "metrics.jsonl"
        before = len(read_metrics(metrics)) if metrics.exists() else 0
        self.waits_until(lambda: metrics.exists() and len(read_metrics(metrics)) >= before + steps)
        self.family = {child.pid: child for child in psutil.Process(self.process.pid).children(recursive=True)}

    def ends(self, code, seconds=60):
        """Waits for its end, after which no process is left of it."""
        assert self.process.wait(seconds) == code, self.said[-3000:]
        _, left = psutil.wait_procs(list(self.family.values()), timeout=10)
        assert not left and "Traceback" not in self.said, (left, self.said[-3000:])

    def saved(self):
        """The step of the checkpoint that its last words name."""
        step = re.findall(r"the newest checkpoint is \S+step_(\d+); to continue, add --out \S+ --resume", self.said)[-1]
        assert json.loads((self.out / "checkpoints" / f"step_{step}" / "manifest.json").read_text())["extra"]
        return int(step)


@pytest.fixture
def start(tmp_path, text_dir):  # noqa: F811
    runs = []

    def start(recipe, *options, ranks=1):
        log = tmp_path / f"log-{len(runs)}"
        common = ["--model", text_dir, "--task", "sorting", "--save_every", 100]
        runs.append(Started(log, recipe, tmp_path / "run", *common, *options, ranks=ranks))
        return runs[-1]

    yield start
    for run in runs:
        for process in (*run.family.values(), psutil.Process(run.process.pid) if run.process.poll() is None else None):
            if process is not None and process.is_running():
                process.kill()


def test_two_ranks_are_ended_stopped_killed_and_continued(start):
    """SIGTERM, Ctrl-C, SIGSTOP and SIGKILL, each to a run that continues the one before; at last on one rank."""
    options = ["--steps", 100000]
    run = start("sft", *options, ranks=2)
    for number, code in ((signal.SIGTERM, 0), (signal.SIGINT, 130)):
        run.trains(2)
        run.process.send_signal(number)
        run.ends(code)
        step = run.saved()
        assert f"ended by {number.name}" in run.said and len(read_metrics(run.out / "metrics.jsonl")) == step
        run = start("sft", *options, "--resume", ranks=2)
        run.waits_until(lambda run=run, step=step: f"resume: continuing {run.out} at step {step}\n" in run.said)
    run.trains(1)
    other, _ = run.phase(1)
    os.kill(other, signal.SIGSTOP)
    began = time.monotonic()
    run.waits_until(lambda: "watchdog: " in run.said, seconds=60)
    assert re.search(rf"rank 1 \(process {other} on \S+, in \w+\) was stopped \d+ s ago: continue it with", run.said)
    os.kill(other, signal.SIGKILL)
    run.process.wait(60)
    assert time.monotonic() - began < 120 and f"Signal 9 (SIGKILL) received by PID {other}" in run.said
    assert "sft: rank 0 has lost another rank, which ended, or was killed, or cannot be reached any more" in run.said
    step = run.saved()
    alone = start("sft", "--steps", step + 2, "--resume", "--allow_changes", "steps", "lr_schedule")
    alone.waits_until(lambda: f"resume: continuing {run.out} at step {step}\n" in alone.said)
    assert alone.process.wait(200) == 0, alone.said[-3000:]
    assert [row["step"] for row in read_metrics(run.out / "metrics.jsonl")] == list(range(step + 2))


def test_a_weight_sync_with_a_server_is_finished(start):
    """The server that the run started, the workers for rewards and all else end with it."""
    run = start("grpo_async", *ASYNC, "--steps", 100000)
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 0)):
        run.trains(2)
        assert len(run.family) >= 2  # the server, and a worker for rewards
        run.waits_until(lambda run=run: run.phase()[1] == "weight_sync")
        run.process.send_signal(number)
        run.ends(code)
        assert len(read_metrics(run.out / "metrics.jsonl")) == run.saved()
        run = start("grpo_async", *ASYNC, "--steps", 100000, "--resume")
    run.trains(1)
    run.waits_until(lambda: run.phase()[1] == "weight_sync")
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGINT)  # now, not after the step
    run.ends(130)
