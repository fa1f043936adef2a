"""Runs a reward function in worker processes with limits, in case it hangs, crashes or takes all memory.

    reward = isolated(task.reward, seconds=30, memory=4 << 30)

By default a reward runs in threads of the trainer: nothing limits it, and if it ends its process it ends the run.
`--isolate_reward` runs it in workers. This protects against mistakes, not against malice: code that you do not trust
belongs in `rlkit.rewards.sandbox`, which allows far less.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from rlkit.data.samples import Reward, Row
from rlkit.rewards.scoring import Combined
from rlkit.rewards.workers import Worker, WorkerPool, end_worker, read_line

WORKER = str(Path(__file__).with_name("isolated_worker.py"))
START_SECONDS = 120.0  # time to import what the reward needs, even on a busy machine


class IsolatedReward:
    """A reward that is computed in worker processes; see `isolated`."""

    def __init__(self, reward: Reward, seconds: float, memory: int) -> None:
        name = getattr(reward, "__qualname__", repr(reward))
        try:
            self.pickled = pickle.dumps(reward)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"isolate_reward: expected a function of a module, which a worker can import, got {name}: {error}"
            ) from error
        self.__name__, self.seconds, self.memory = name, seconds, memory
        self.pool = WorkerPool(self._start)
        self.pool.idle.append(self.pool.take())  # a reward that cannot be loaded fails now

    def __call__(self, text: str, row: Row) -> float | None:
        reply, code = self.pool.ask(pickle.dumps((text, dict(row))), self.seconds, keep=_has_memory)
        if reply is None and code is None:
            raise TimeoutError(f"reward {self.__name__}: expected a verdict within {self.seconds:g} s, got none")
        if reply is None:
            raise RuntimeError(f"reward {self.__name__}: expected a verdict, got the end of its process, code {code}")
        value, error = json.loads(reply)
        if error:
            raise RuntimeError(f"reward {self.__name__}: {error}")
        return value

    def _start(self) -> Worker:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        worker = subprocess.Popen([sys.executable, "-P", WORKER], bufsize=0, start_new_session=True, **pipes)
        assert worker.stdin is not None
        worker.stdin.write(pickle.dumps((sys.path, self.pickled, self.memory)))
        line = read_line(worker, START_SECONDS)
        problem = json.loads(line) if line else "its worker did not start"
        if problem:
            end_worker(worker)
            raise ValueError(f"isolate_reward: expected a reward that a worker can import, got: {problem}")
        return worker


def _has_memory(reply: bytes) -> bool:
    """False after a MemoryError: what the reward keeps would fail the next answers, too."""
    return b'"MemoryError' not in reply


def isolated(reward: Reward, *, seconds: float = 60.0, memory: int = 4 << 30) -> Reward:
    """The same reward, computed in worker processes. They are started when needed, at most one per processor.

    An answer has no reward if the function exceeds a limit or ends its process. Output that it prints is discarded.
    Processes that it has started are killed together with the worker.

    Args:
        reward: a function of a module, or `combine` of such functions. A lambda or a closure cannot be sent to a
            worker.
        seconds: limit of processor time for one answer. The limit of wall time is four times as long.
        memory: limit of address space in bytes, in addition to what imports take.

    Raises:
        ValueError: the reward cannot be sent to a worker, or a worker cannot import it.
    """
    if isinstance(reward, Combined):
        parts = {
            name: (weight, isolated(part, seconds=seconds, memory=memory))
            for name, (weight, part) in reward.parts.items()
        }
        return Combined(parts)
    return IsolatedReward(reward, seconds, memory)
