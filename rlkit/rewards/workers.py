"""Worker processes that answer one question after another, and are killed when one takes too long."""

from __future__ import annotations

import atexit
import os
import select
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable

from rlkit.rewards.sandbox import WALL, processor_seconds

Worker = subprocess.Popen[bytes]


class WorkerPool:
    """Workers of this process that wait for work, at most one a processor; they end with it.

    Args:
        start: starts one, with pipes for input and output, in a session of its own.
    """

    def __init__(self, start: Callable[[], Worker]) -> None:
        self.start = start
        self.reset()
        _pools.add(self)

    def reset(self) -> None:
        """Forget the workers, and the slots that threads hold: after a fork they are the parent's."""
        self.idle: list[Worker] = []
        self.slots = threading.BoundedSemaphore(len(os.sched_getaffinity(0)))

    def take(self) -> Worker:
        """A worker that is alive."""
        while True:
            try:
                worker = self.idle.pop()
            except IndexError:
                return self.start()
            if worker.poll() is None:
                return worker
            end_worker(worker)

    def ask(self, question: bytes, seconds: float) -> tuple[bytes | None, int | None]:
        """The line that a worker answers, and None; or None and its exit code, which is None if it took too long.

        Args:
            question: what is written to its input.
            seconds: most processor time, which a busy machine does not use up; wall time is held to four times that.
        """
        with self.slots:
            worker = self.take()
            reply = None
            try:
                if worker.stdin is not None:
                    worker.stdin.write(question)
                reply = read_line(worker, seconds)
            except BrokenPipeError:
                pass
            if reply is not None:
                self.idle.append(worker)
                return reply, None
            code = _exit_code(worker)
            end_worker(worker)
            return None, code


def read_line(worker: Worker, seconds: float) -> bytes | None:
    """None after so many seconds, and when the worker has ended (its clock is there until it is waited for)."""
    assert worker.stdout is not None
    waiting = select.poll()
    waiting.register(worker.stdout, select.POLLIN)
    deadline, computed = time.monotonic() + WALL * seconds, processor_seconds(worker.pid) + seconds
    while not waiting.poll(50):
        if time.monotonic() > deadline or processor_seconds(worker.pid) > computed:
            return None
    return worker.stdout.readline() or None


def _exit_code(worker: Worker) -> int | None:
    """Of a worker that has closed its pipes, which is a moment before it can be waited for; None if it is alive."""
    try:
        return worker.wait(0.2)
    except subprocess.TimeoutExpired:
        return None


def end_worker(worker: Worker) -> None:
    """Kill a worker and what it has started."""
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            pipe.close()


_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for pool in list(_pools):
        while pool.idle:
            end_worker(pool.idle.pop())


def _after_fork() -> None:
    for pool in list(_pools):
        pool.reset()


os.register_at_fork(after_in_child=_after_fork)
