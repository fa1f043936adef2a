"""Runs a reward function in worker processes with limits, in case it hangs, crashes or takes all memory.

    reward = isolated(task.reward, seconds=30, memory=4 << 30)

By default a reward runs in threads of the trainer: nothing limits it, and if it ends its process it ends the run.
`--isolate_reward` runs it in workers. This protects against mistakes, not against malice: code that you do not trust
belongs in `rlkit.rewards.sandbox`, which allows far less. `sandboxed` scores responses under its restrictions, for a
reward that executes them: `eval(text)`, or sympy's `parse_expr(text)`.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from rlkit.data.samples import Reward, Row
from rlkit.rewards.sandbox import SandboxError, check_isolation, readable_paths
from rlkit.rewards.scoring import Combined
from rlkit.rewards.workers import Worker, WorkerPool, end_worker, read_line

WORKER = str(Path(__file__).with_name("isolated_worker.py"))
START_SECONDS = 120.0  # time to import what the reward needs, even on a busy machine
KEPT = ("LD_LIBRARY_PATH", "PYTHONHASHSEED")  # of the environment; the response can read what the worker has
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a restricted process cannot start others


class IsolatedReward:
    """A reward that is computed in worker processes; see `isolated`."""

    def __init__(self, reward: Reward, seconds: float, memory: int) -> None:
        self.__name__, self.seconds, self.memory = _name(reward), seconds, memory
        self.pickled = _pickled(reward, "isolate_reward")
        self.pool = WorkerPool(self._start)
        self.pool.idle.append(self.pool.take())  # a reward that cannot be loaded fails now

    def __call__(self, text: str, row: Row) -> float | None:
        reply, code = self.pool.ask(pickle.dumps((text, dict(row))), self.seconds, keep=_has_memory)
        if reply is None and code is None:
            raise TimeoutError(f"reward {self.__name__}: expected a verdict within {self.seconds:g} s, got none")
        return _verdict(self.__name__, reply, code)

    def _start(self) -> Worker:
        return _start_worker("isolate_reward", (sys.path, self.pickled, self.memory, None))


class SandboxedReward:
    """A reward that is computed in restricted processes; see `sandboxed`."""

    def __init__(self, reward: Reward, seconds: float, memory: int) -> None:
        self.__name__, self.seconds, self.memory = _name(reward), seconds, memory
        self.pickled = _pickled(reward, "sandboxed")
        self.pool = WorkerPool(
            self._start
        )  # none now: a worker that imports a file with `sandboxed` would start another

    def __call__(self, text: str, row: Row) -> float | None:
        reply, code = self.pool.ask(pickle.dumps((text, dict(row))), self.seconds)
        if reply is None and code is None:
            return 0.0
        value = _verdict(self.__name__, reply, code)
        return value if value is None or 0 <= value <= 1 else 0.0

    def _start(self) -> Worker:
        environment = {name: os.environ[name] for name in KEPT if name in os.environ} | ONE_THREAD
        sandbox = self.seconds, readable_paths()
        return _start_worker("sandboxed", (sys.path, self.pickled, self.memory, sandbox), environment)


def _name(reward: Reward) -> str:
    return getattr(reward, "__qualname__", repr(reward))


def _pickled(reward: Reward, caller: str) -> bytes:
    try:
        return pickle.dumps(reward)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{caller}: expected a function of a module, which a worker can import, got {_name(reward)}: {error}"
        ) from error


def _start_worker(caller: str, message: tuple[Any, ...], environment: dict[str, str] | None = None) -> Worker:
    """A worker that has imported its reward; `message` is what it reads first."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    command = [sys.executable, "-P", WORKER]
    worker = subprocess.Popen(command, bufsize=0, start_new_session=True, env=environment, **pipes)
    assert worker.stdin is not None
    worker.stdin.write(pickle.dumps(message))
    line = read_line(worker, START_SECONDS)
    problem = json.loads(line) if line else "its worker did not start"
    if problem:
        end_worker(worker)
        raise ValueError(f"{caller}: expected a reward that a worker can import, got: {problem}")
    return worker


def _verdict(name: str, reply: bytes | None, code: int | None) -> float | None:
    if reply is None:
        raise RuntimeError(f"reward {name}: expected a verdict, got the end of its process, code {code}")
    value, problem = json.loads(reply)
    if problem:
        raise RuntimeError(f"reward {name}: {problem}")
    return value


def _has_memory(reply: bytes) -> bool:
    """False after a MemoryError: what the reward keeps would fail the next responses, too."""
    return b'"MemoryError' not in reply


def isolated(reward: Reward, *, seconds: float = 60.0, memory: int = 4 << 30) -> Reward:
    """The same reward, computed in worker processes. They are started when needed, at most one per processor.

    A response has no reward if the function exceeds a limit or ends its process. Output that it prints is discarded.
    Processes that it has started are killed together with the worker.

    Args:
        reward: a function of a module, or `combine` of such functions. A lambda or a closure cannot be sent to a
            worker.
        seconds: limit of processor time for one response. The limit of wall time is four times as long.
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
    if isinstance(reward, SandboxedReward):  # it has processes of its own
        return reward
    return IsolatedReward(reward, seconds, memory)


def sandboxed(reward: Reward, *, seconds: float = 10.0, memory: int = 1 << 30) -> Reward:
    """The same reward, for functions that execute the response: each response is scored in a restricted process.

    The restrictions are those of `rlkit.rewards.sandbox`, with two differences: the process reads the packages that the
    reward has imported, too, and it can create no file. It is a copy of a worker process, which has imported what the
    reward needs. Workers are started when needed, at most one per processor.

    A response that exceeds a limit or ends its process scores 0, and so does a reward that is not from 0 to 1. After an
    exception of the reward it is not scored. The response shares its process with the reward and the row: it can do no
    harm, but it could read the right answer and state its own reward.

    Args:
        reward: a function of a module, or another object that pickle can send to a worker.
        seconds: limit of processor time for one response, in whole seconds. The limit of wall time is four times as
            long.
        memory: limit of address space in bytes, in addition to what imports take.

    Raises:
        ValueError: the reward cannot be sent to a worker, or this machine cannot restrict processes.
    """
    try:
        check_isolation()
    except SandboxError as error:
        raise ValueError(f"sandboxed: {error}") from error
    return SandboxedReward(reward, seconds, memory)
