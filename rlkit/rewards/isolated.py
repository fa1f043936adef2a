"""A reward function in worker processes with limits, for one that may hang, crash or take all memory.

    reward = isolated(task.reward, seconds=30, memory=4 << 30)

By default a reward runs in threads of the trainer: nothing limits it, and one that ends its process ends the run.
`--isolate_reward` runs it here. This is for mistakes, not for malice: what is not trusted runs in
`rlkit.rewards.sandbox`, which can do far less.
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
START_SECONDS = 120.0  # to import what the reward needs, on a machine however busy


class IsolatedReward:
    """See `isolated`."""

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
        self.pool.idle.append(self.pool.take())  # what cannot be loaded is found now

    def __call__(self, text: str, row: Row) -> float | None:
        reply, code = self.pool.ask(pickle.dumps((text, dict(row))), self.seconds)
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
        said = read_line(worker, START_SECONDS)
        problem = json.loads(said) if said else "its worker did not start"
        if problem:
            end_worker(worker)
            raise ValueError(f"isolate_reward: expected a reward that a worker can import, got: {problem}")
        return worker


def isolated(reward: Reward, *, seconds: float = 60.0, memory: int = 4 << 30) -> Reward:
    """The same reward, called in worker processes that are started when they are needed, at most one a processor.

    An answer is not judged if the reward takes longer, ends its process, or needs more memory. What the worker prints
    is discarded. Processes that it has started are killed with it.

    Args:
        reward: a function of a module, or `combine` of such; a lambda or a closure cannot be sent to a worker.
        seconds: most processor time for an answer; wall time is held to four times that.
        memory: most bytes of address space beyond what its imports take.

    Raises:
        ValueError: it cannot be sent to a worker, or not be imported there.
    """
    if isinstance(reward, Combined):
        parts = {
            name: (weight, isolated(part, seconds=seconds, memory=memory))
            for name, (weight, part) in reward.parts.items()
        }
        return Combined(parts)
    return IsolatedReward(reward, seconds, memory)
