"""Ranks that share rows: tools and rewards are called once for each sample, and all ranks get the same results."""

import json
import subprocess
import sys
from pathlib import Path


def test_tools_and_rewards_are_called_on_one_rank(tiny_dir):
    script = str(Path(__file__).with_name("on_shared_rows.py"))
    done = subprocess.run([sys.executable, script, tiny_dir], capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr[-3000:]
    (*first, calls), (*second, more_calls) = json.loads(done.stdout.splitlines()[-1])
    assert first == second
    _, observations, rewards, reasons = first
    said = ["from rank 0", "from rank 1", "Broken: no result on rank 0", "from rank 1"]
    assert observations[::2] == said
    assert rewards == [0, 0, -1, -1, 0, 0, 1, 1]
    assert reasons == "2 x a reward of None"
    assert calls == more_calls == {"tool": 8, "reward": 4}  # of 8 episodes of 2 turns
